"""Worker processes of data loaders end with the training, also one that fails."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from verl_tim.training.loaders import workers_ended


def _trainer(**more):
    loaders = [StatefulDataLoader(list(range(8)), batch_size=1, num_workers=2) for _ in range(2)]
    return SimpleNamespace(train_dataloader=loaders[0], val_dataloader=loaders[1], **more)


def _workers():
    return [child for child in psutil.Process().children() if "multiprocessing" not in " ".join(child.cmdline())]


def test_workers_of_v1s_loaders_end_with_the_training():
    before = len(_workers())
    trainer = _trainer(train_dataloader_it=None)
    with workers_ended(trainer):
        trainer.train_dataloader_it = iter(trainer.train_dataloader)
        next(trainer.train_dataloader_it)
        next(iter(trainer.val_dataloader))
        assert len(_workers()) == before + 4
    assert len(_workers()) == before


def test_workers_of_the_legacy_trainers_loaders_end_where_it_fails():
    before = len(_workers())
    trainer = _trainer()

    def fit():
        with workers_ended(trainer):
            next(iter(trainer.val_dataloader))
            for _ in trainer.train_dataloader:
                raise RuntimeError("in the middle of an epoch")

    with pytest.raises(RuntimeError, match="middle"):
        fit()
    assert len(_workers()) <= before + 2, "the failed loop's own are held by its traceback"
