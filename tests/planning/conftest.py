import functools

import pytest

from verl_tim.planning.gpu import find_gpu
from verl_tim.planning.plan import make_plan, memory_of
from verl_tim.planning.settings import plain
from verl_tim.planning.shape import shape_of
from verl_tim.planning.source import planned

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def replaced(config, names, value):
    first, *rest = names
    return {**config, first: replaced(config.get(first) or {}, rest, value) if rest else value}


@functools.cache
def composed(words):
    """The resolved config as nested dicts; composing takes a third of a second and more."""
    return plain(planned(words).config)


class Run:
    """A composed config with everything that a plan of it needs; overrides are set without composing again."""

    def __init__(self, words, shape, gpu):
        self.config = composed(tuple(words))
        self.shape, self.gpu = shape_of(shape), find_gpu(gpu)

    def set(self, **values):
        """Values by dotted key (dots written as __)."""
        for key, value in values.items():
            self.config = replaced(self.config, key.split("__"), value)
        return self

    @property
    def memory(self):
        return memory_of(self.config, self.shape, self.gpu)

    def plan(self, **options):
        return make_plan(self.config, self.shape, self.gpu, **options)


DENSE = [
    "cpu_grpo",
    "cluster=gpu8",
    "model=hf",
    "actor_rollout_ref.model.path=Qwen/Qwen3-1.7B",
    "data.train_batch_size=128",
    f"{ACTOR}.ppo_mini_batch_size=128",
    f"{ROLLOUT}.n=8",
    "data.max_prompt_length=1024",
    "data.max_response_length=4096",
    f"{ACTOR}.ppo_max_token_len_per_gpu=16384",
]


@pytest.fixture
def dense():
    """Qwen3-1.7B on 8 GPUs, which fits."""
    return Run(DENSE, "qwen3-1.7b", "H100")


@pytest.fixture
def sparse():
    """Qwen3-30B-A3B on one node of H100, which does not fit."""
    words = [*DENSE, f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.tensor_model_parallel_size=4"]
    return Run(words, "qwen3-30b-a3b", "H100")
