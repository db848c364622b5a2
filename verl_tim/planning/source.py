"""From the words of a command line to a config that can be planned, by the project's own composition."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from verl_tim.doctor.source import Source, read
from verl_tim.home import expanded
from verl_tim.launch.checks import keys, values
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.words import with_recipe


def planned(words: Sequence[str]) -> Source:
    """The config that the words name: a recipe's name, a YAML of verl's or a run folder, then KEY=VALUE.

    Model and data need not be there.

    Raises:
        LaunchError: what does not compose, keys that nobody reads, values that cannot be meant.
    """
    source = read(with_recipe(words))
    if source.config.get("tim") is not None:
        found = [one for one in keys.check(source.config) if one.key not in keys.MADE_FROM]
        if found:
            raise LaunchError(found)
    found = list(values.check(source.config))
    if found:
        raise LaunchError(found)
    return source


def steps_of(config: DictConfig) -> int | None:
    """Training steps of the run: as given, or from its epochs and rows; None where the data are not here."""
    steps = OmegaConf.select(config, "trainer.total_training_steps")
    if isinstance(steps, int):
        return steps
    rows = _rows(config)
    if rows is None:
        return None
    # verl's dataloader drops the last, incomplete batch
    return rows // int(config.data.train_batch_size) * int(config.trainer.total_epochs)


def _rows(config: DictConfig) -> int | None:
    files = OmegaConf.select(config, "data.train_files")
    if files is None:
        size = OmegaConf.select(config, "tim.task.train_size")
        return int(size) if size is not None else None
    paths = [expanded(str(file)) for file in ([files] if isinstance(files, str) else files)]
    if not all(path.is_file() and path.suffix == ".parquet" for path in paths):
        return None
    return sum(int(pq.read_metadata(path).num_rows) for path in paths)
