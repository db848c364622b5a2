"""What a config asks of a cluster: its size, the files that every node reads, the contract."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch.checks.keys import MADE_FROM
from verl_tim.training.asynchronous_checks import trainer_mode
from verl_tim.training.config import ATTENTION_KEY, BACKEND_KEY, CONTRACT_BACKEND

ROLLOUT = "actor_rollout_ref.rollout"


def cluster_size(config: DictConfig) -> tuple[int, int]:
    """Nodes, and GPUs that each must have. A rollout that is separate from the trainer has nodes of its own."""

    def get(key: str, default: Any = None) -> Any:
        value = OmegaConf.select(config, key, throw_on_missing=False)
        return default if value is None else value

    nodes, gpus = int(get("trainer.nnodes", 1)), int(get("trainer.n_gpus_per_node", 1))
    if trainer_mode(get) == "separate_async":
        nodes += int(get(f"{ROLLOUT}.nnodes", 0))
        gpus = min(gpus, int(get(f"{ROLLOUT}.n_gpus_per_node", gpus)))
    return nodes, gpus


def files_of(config: DictConfig) -> dict[str, str]:
    """Key -> path of the model and the data, those that are given by an absolute path.

    What this package makes at the start is made on one node, in the cache; names of the hub are fetched.
    """
    files: dict[str, str] = {}
    for key in MADE_FROM:
        value = OmegaConf.select(config, key, throw_on_missing=False)
        if OmegaConf.is_list(value):
            files |= {f"{key}[{index}]": str(one) for index, one in enumerate(value) if str(one).startswith("/")}
        elif isinstance(value, str) and value.startswith("/"):
            files[key] = value
    return files


def contract_of(config: DictConfig) -> str | None:
    """The attention contract of a run whose trainer keeps the contract; None for a stock trainer."""
    if OmegaConf.select(config, BACKEND_KEY, throw_on_missing=False) != CONTRACT_BACKEND:
        return None
    return str(OmegaConf.select(config, ATTENTION_KEY, throw_on_missing=False) or "auto")
