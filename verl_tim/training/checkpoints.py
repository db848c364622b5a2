"""From which checkpoint a run goes on: the last whole one.

verl writes a step's checkpoint into `global_step_N/` (every rank's shards, then `data.pt`, the state of the data
loader) and N into `latest_checkpointed_iteration.txt` last, so a run that was killed before that goes on from the
checkpoint before. Two gaps are closed here: a kill while that file is written leaves it empty, and verl then fails on
it (0.9.1, utils/checkpoint/checkpoint_manager.py, find_latest_ckpt_path); and a checkpoint of another number of ranks,
or one from which files were removed, fails in the workers, where one rank waits for the others.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_tim.home import expanded
from verl_tim.training.config import ConfigError

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"global_step_(\d+)")
_LOADER_STATE = "data.pt"
_PARTS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""What `checkpoint.load_contents` names -> how verl's FSDP files of it begin."""


def settle(config: Any) -> int | None:
    """Make sure that verl resumes from a whole checkpoint, before it looks for one; repairs an empty tracker file.

    Args:
        config: of the run.

    Returns:
        The checkpoint's step; None: there is none, or the run shall not resume.

    Raises:
        ConfigError: the checkpoint lacks files; names them, and the last whole checkpoint.
    """
    mode = str(config.trainer.resume_mode)
    folder = expanded(str(config.trainer.default_local_dir)).absolute()
    if mode == "auto":
        step = _tracked(folder, config)
        if step is None:
            return None
        checkpoint, key = folder / f"global_step_{step}", "trainer.default_local_dir"
    elif mode == "resume_path" and config.trainer.resume_from_path:
        checkpoint, key = Path(str(config.trainer.resume_from_path)).absolute(), "trainer.resume_from_path"
    else:
        return None
    missing = missing_files(checkpoint, config)
    if missing:
        whole = max(whole_steps(folder, config), default=None)
        remedy = (
            f"trainer.resume_mode=resume_path trainer.resume_from_path={folder}/global_step_{whole}"
            if whole is not None
            else "start anew, with another tim.run_dir"
        )
        raise ConfigError(
            f"{key}: the checkpoint {checkpoint} is not whole for {_ranks(config)} trainer rank(s): it lacks "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}; {remedy}"
        )
    match = _FOLDER.search(checkpoint.name)
    return int(match.group(1)) if match else None


def _tracked(folder: Path, config: Any) -> int | None:
    """The step that the tracker file names; where the file is torn, that of the last whole checkpoint."""
    tracker = folder / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text(errors="replace").strip("\0 \n")
    if text.isdigit():
        # verl starts from scratch, without a word, where the folder is gone
        return int(text)
    whole = max(whole_steps(folder, config), default=None)
    if whole is None:
        raise ConfigError(
            f"trainer.default_local_dir: {tracker} holds no step ({text!r}), and {folder} no whole checkpoint: "
            "start anew with another tim.run_dir"
        )
    logger.warning("%s was cut off while it was written; the last whole checkpoint is of step %d", tracker, whole)
    scratch = tracker.with_name(f".{tracker.name}.{os.getpid()}")
    scratch.write_text(str(whole))
    os.replace(scratch, tracker)
    return whole


def whole_steps(folder: Path, config: Any) -> list[int]:
    """Steps of the checkpoints in a folder that lack nothing."""
    if not folder.is_dir():
        return []
    found = ((_FOLDER.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(int(match.group(1)) for match, path in found if match and not missing_files(path, config))


def missing_files(checkpoint: Path, config: Any) -> list[str]:
    """What a checkpoint lacks, as paths in it; a file without bytes counts as missing."""
    return [name for name in _needed(config) if not _has_bytes(checkpoint / name)]


def _needed(config: Any) -> Iterable[str]:
    actor = config.actor_rollout_ref.actor
    if str(actor.strategy) in ("fsdp", "fsdp2"):
        contents = actor.get("checkpoint", {}).get("load_contents") or list(_PARTS)
        world = _ranks(config)
        for part in contents:
            if part in _PARTS:
                for rank in range(world):
                    yield f"actor/{_PARTS[part]}_world_size_{world}_rank_{rank}.pt"
    yield _LOADER_STATE


def _ranks(config: Any) -> int:
    return int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)


def _has_bytes(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
