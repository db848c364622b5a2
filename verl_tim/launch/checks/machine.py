"""What the machine must have: GPUs where the config asks for them, and the packages that the run imports."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from omegaconf import DictConfig

from verl_tim.launch.checks import trackers
from verl_tim.launch.errors import Finding
from verl_tim.training.config import joins_a_cluster


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
    if name in ("vllm", "sglang", "trtllm") and not remote and gpus == 0:
        yield Finding(
            "rollout", f"{name} needs a GPU, and this machine has none", "take rollout=vexact or rollout=stock"
        )


def check_packages(config: DictConfig) -> Iterator[Finding]:
    """Packages that the chosen rollout and loggers import and that are not installed, and logins that they need."""
    if config.actor_rollout_ref.rollout.name == "vllm" and find_spec("vllm") is None:
        yield Finding("rollout", "vllm is not installed", "pip install 'verl_tim[gpu]', or take rollout=vexact")
    if config.trainer.use_v1 and find_spec("transfer_queue") is None:
        yield Finding("trainer.use_v1", "the V1 trainer needs TransferQueue", "pip install 'TransferQueue>=0.1.10'")
    yield from trackers.check(config)
