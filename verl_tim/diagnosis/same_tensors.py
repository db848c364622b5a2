"""Files of tensors of two runs, value by value: checkpoints and batch dumps."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl_tim.diagnosis.manifest import flatten
from verl_tim.diagnosis.metric_log import RunFolderError
from verl_tim.diagnosis.run_folder import RunFolder

if TYPE_CHECKING:
    from verl_tim.diagnosis.same import Tally

_STEP = re.compile(r"global_step_(\d+)")
_DUMP = re.compile(r"(?:step|update)_(\d+)(?:_part\d+)?\.pt")
_TENSORS = (".pt", ".safetensors")
# What verl keeps of a rank's random generators (utils/checkpoint/checkpoint_manager.py: get_rng_state).
_GENERATORS = re.compile(r"rng\b")
_EXTRA_STATE = "extra_state"
# of a batch dump: row names that hold verl's random uids
_RANDOM_NAMES = frozenset({"keys"})


def checkpoint_files(run: RunFolder) -> dict[int, dict[str, Path]]:
    """Step -> name within the checkpoint -> file, of everything with tensors in it (all ranks: weights, optimiser,
    generators, place in the data)."""
    found: dict[int, dict[str, Path]] = {}
    for folder in _folder_of(run, ("trainer", "default_local_dir"), "checkpoints").glob("global_step_*"):
        match = _STEP.fullmatch(folder.name)
        if match and folder.is_dir():
            files = [path for path in folder.rglob("*") if path.suffix in _TENSORS and path.is_file()]
            found[int(match[1])] = {path.relative_to(folder).as_posix(): path for path in files}
    return found


def _folder_of(run: RunFolder, keys: Sequence[str], default: str) -> Path:
    """The folder that a key of the run's config names, also after the run folder was moved."""
    config = flatten(run.config() or {})
    stated, was = config.get(".".join(keys)), config.get("tim.run_dir")
    if not stated:
        return run.path / default
    folder = Path(stated)
    if was and folder.is_relative_to(was):
        return run.path / folder.relative_to(was)
    return folder


def dump_files(run: RunFolder) -> dict[int, dict[str, Path]]:
    """Step -> file name -> file, of `tim.dump.every`."""
    found: dict[int, dict[str, Path]] = {}
    for path in _folder_of(run, ("tim", "dump", "dir"), "dumps").glob("*.pt"):
        match = _DUMP.fullmatch(path.name)
        if match:
            found.setdefault(int(match[1]), {})[path.name] = path
    return found


def compare_files(weights: Tally, generators: Tally, step: int, name: str, first: Path, second: Path) -> None:
    """Count the values of two files of one name and tell of each leaf that differs.

    Args:
        generators: is told of the states of random generators, `weights` of everything else.

    Raises:
        RunFolderError: a file cannot be read.
    """
    leaves = [dict(_leaves(_read(path))) for path in (first, second)]
    extra_state = first.name.startswith(_EXTRA_STATE)
    for key in dict.fromkeys([*leaves[0], *leaves[1]]):
        where = f"{name}: {key}"
        tally = generators if extra_state and _GENERATORS.match(key) else weights
        if key not in leaves[0] or key not in leaves[1]:
            tally.differs(step, where, ["there" if key in side else None for side in leaves])
            continue
        a, b = (side[key] for side in leaves)
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            tally.count(1)
            if type(a) is not type(b) or _plain(a) != _plain(b):
                tally.differs(step, where, [_short(a), _short(b)])
            continue
        if a.dtype != b.dtype or a.shape != b.shape:
            tally.differs(step, where, [f"{x.dtype} {tuple(x.shape)}" for x in (a, b)])
            continue
        tally.count(a.numel())
        different_N = _differing(a, b)
        if len(different_N):
            place = tuple(int(i) for i in np.unravel_index(int(different_N[0]), a.shape)) if a.ndim else ()
            tally.differs(step, f"{where}{list(place)}", [_element(x, place) for x in (a, b)], count=len(different_N))


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        # a DTensor brings its mesh, and torch warns of each that there are no processes for it here
        logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
        # verl's checkpoints hold DTensors and generator states, which are pickled objects; the files are the user's own
        return torch.load(path, map_location="cpu", weights_only=False)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise RunFolderError(
            f"{path} cannot be read ({error})", "delete it if the run died while writing it"
        ) from error


def _leaves(tree: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, leaf); tensors are local, arrays become tensors."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if not (at == "" and key in _RANDOM_NAMES):
                yield from _leaves(value, f"{at}.{key}" if at else str(key))
    elif isinstance(tree, (list, tuple)) and not all(isinstance(x, (int, float, str, bool)) for x in tree):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{at}[{number}]")
    elif isinstance(tree, torch.Tensor):
        local = getattr(tree, "_local_tensor", tree)
        yield at, local.detach()
    elif isinstance(tree, np.ndarray) and tree.dtype != object:
        yield at, torch.from_numpy(np.ascontiguousarray(tree).view(np.uint8).reshape(-1).copy())
    elif hasattr(tree, "__dict__") and not callable(tree):
        yield from _leaves(vars(tree), at)
    else:
        yield at, tree


def _differing(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """Flat places whose bits differ; -0.0 is not 0.0, and a NaN equals one of the same bits."""
    if a.numel() == 0:
        return np.empty(0, np.int64)
    x, y = (t.contiguous().reshape(-1).view(torch.uint8).view(t.numel(), -1) for t in (a, b))
    return (x != y).any(1).nonzero().squeeze(1).numpy()


def _plain(value: Any) -> Any:
    """A value whose == compares bits."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value.hex() if isinstance(value, float) else value


def _element(x: torch.Tensor, place: tuple[int, ...]) -> str:
    value = x[place].item()
    return f"{value!r} ({value.hex()})" if isinstance(value, float) else repr(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
