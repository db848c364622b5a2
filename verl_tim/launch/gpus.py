"""Which of the machine's GPUs a run is given, where several run side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

VISIBLE = "CUDA_VISIBLE_DEVICES"


def listed_gpus() -> list[str]:
    """The names in `CUDA_VISIBLE_DEVICES`, numbers or UUIDs; none where it is not set, or empty."""
    return [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]


def visible_gpus() -> tuple[str, ...]:
    """This process's GPUs by the names that `CUDA_VISIBLE_DEVICES` takes: what it lists now, else their numbers."""
    import torch

    count = torch.cuda.device_count()
    # CUDA reads the list up to the first name that is no GPU
    return tuple(listed_gpus()[:count] or map(str, range(count)))


def gpus_asked(config: DictConfig) -> int:
    """How many GPUs of one machine a run needs: what its Ray cluster is told to have, else what trainer and rollout ask
    for; 0 for a run on CPUs."""
    if config.trainer.device == "cpu":
        return 0
    told = OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus")
    if told is not None:
        return int(told)
    own = OmegaConf.select(config, "actor_rollout_ref.rollout.nnodes") or 0  # a rollout on GPUs of its own
    return int(config.trainer.n_gpus_per_node) + (int(config.actor_rollout_ref.rollout.n_gpus_per_node) if own else 0)


class Gpus:
    """The GPUs that runs are placed on, and how many runs each holds."""

    def __init__(self, names: Sequence[str]) -> None:
        self._runs = dict.fromkeys(names, 0)

    def take(self, count: int) -> tuple[str, ...]:
        """`count` of them, those with the fewest runs, the first of equals; all where there are fewer."""
        chosen = set(sorted(self._runs, key=self._runs.__getitem__)[:count])
        for name in chosen:
            self._runs[name] += 1
        return tuple(name for name in self._runs if name in chosen)

    def give_back(self, names: Sequence[str]) -> None:
        """One run fewer on each."""
        for name in names:
            self._runs[name] -= 1
