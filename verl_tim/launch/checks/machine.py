"""What the machine must have: GPUs where the config asks for them, and the packages that the run imports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch.errors import Finding

# Logger name in trainer.logger -> the package it imports, and how to get it.
_LOGGER_PACKAGES = {
    "wandb": ("wandb", "pip install 'verl_tim[wandb]'"),
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "swanlab": ("swanlab", "pip install swanlab"),
    "mlflow": ("mlflow", "pip install mlflow"),
    "trackio": ("trackio", "pip install trackio"),
    "clearml": ("clearml", "pip install clearml"),
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
    if name in ("vllm", "sglang", "trtllm") and not remote and gpus == 0:
        yield Finding(
            "rollout", f"{name} needs a GPU, and this machine has none", "take rollout=vexact or rollout=stock"
        )


def check_packages(config: DictConfig) -> Iterator[Finding]:
    """Packages that the chosen rollout and loggers import, and that are not installed."""
    if config.actor_rollout_ref.rollout.name == "vllm" and find_spec("vllm") is None:
        yield Finding("rollout", "vllm is not installed", "pip install 'verl_tim[gpu]', or take rollout=vexact")
    if config.trainer.use_v1 and find_spec("transfer_queue") is None:
        yield Finding("trainer.use_v1", "the V1 trainer needs TransferQueue", "pip install 'TransferQueue>=0.1.10'")
    loggers = config.trainer.logger
    for name in [loggers] if isinstance(loggers, str) else loggers:
        package, remedy = _LOGGER_PACKAGES.get(name, (None, ""))
        if package is not None and find_spec(package) is None:
            yield Finding("trainer.logger", f"{name} is not installed", f"{remedy}, or take tracker=file")


def joins_a_cluster(config: DictConfig) -> bool:
    """True when Ray will join a cluster that runs already, whose size this process does not know yet."""
    return bool(OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS"))
