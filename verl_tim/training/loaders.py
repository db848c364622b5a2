"""Data loaders whose worker processes end with the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def workers_ended(trainer: Any) -> Iterator[None]:
    """End the workers of a trainer's data loaders when its training ends, well or not.

    verl 0.9.1 leaves that to the garbage collector, and Ray ends the process without one: it kills the process's
    children first, of which PyTorch writes a traceback (DataLoader worker is killed) behind the last line of a run in
    which nothing went wrong.

    Args:
        trainer: verl's, with `train_dataloader`, `val_dataloader` and, of V1, `train_dataloader_it`
            (trainer/ppo/v1/trainer_base.py:751).
    """
    try:
        yield
    finally:
        if hasattr(trainer, "train_dataloader_it"):
            trainer.train_dataloader_it = None
        for loader in (trainer.train_dataloader, trainer.val_dataloader):
            loader._iterator = None  # its end ends its workers
