"""Where commands that read runs write, unless told, and what they may replace there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from verl_tim.commands.output import writing
from verl_tim.home import expanded


def beside(runs: Sequence[Path]) -> Path:
    """The folder that holds the runs, given as folders or as their files of metrics; the current one where they lie in
    several."""
    from verl_tim.diagnosis.run_folder import METRICS_NAME

    # abspath, since `..` is no folder's name
    paths = [Path(os.path.abspath(expanded(run))) for run in runs]
    folders = {(path.parent if path.name == METRICS_NAME and path.is_file() else path).parent for path in paths}
    return folders.pop() if len(folders) == 1 else Path.cwd()


def inside(run: Path) -> Path:
    """The run's own folder; of a file of metrics, the one that it is in."""
    run = expanded(run).absolute()
    return run if run.is_dir() else run.parent


def refuse_foreign(*paths: Path, key: str = "--out") -> None:
    """Before any work: LaunchError where a file to be written is there and no command wrote it."""
    from verl_tim.diagnosis import own_file
    from verl_tim.diagnosis.errors import DiagnosisError
    from verl_tim.launch.errors import LaunchError

    with writing(key):
        try:
            own_file.refuse_foreign(*paths, key=key)
        except DiagnosisError as error:
            raise LaunchError.of_input(error, key, "") from error
