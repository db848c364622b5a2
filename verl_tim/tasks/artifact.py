"""Folders that are a function of their specification: made once, found again by content key, published atomically."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from verl_tim.home import NOBODY, REMEDY, expanded, of_nobody
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.locked import locked

DEFAULT_CACHE_DIR = Path("~/.cache/verl_tim")

_ONLY_FOUND = ContextVar("only_found", default=False)


class NotMade(LookupError):
    """Under `only_found`: the folder is not there."""


@contextmanager
def only_found() -> Iterator[None]:
    """Within it `make_once` finds what was made, and makes nothing."""
    token = _ONLY_FOUND.set(True)
    try:
        yield
    finally:
        _ONLY_FOUND.reset(token)


def content_key(spec: Mapping[str, Any]) -> str:
    """Hex SHA-256 of the specification as canonical JSON: equal specifications, equal keys, whatever the order of
    their items."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The cache; None: where it is by default.

    Raises:
        InputError: the home of nobody.
    """
    return _expanded(cache_dir if cache_dir is not None else DEFAULT_CACHE_DIR, "tim.cache_dir (--cache-dir)")


def _expanded(folder: str | os.PathLike[str], key: str) -> Path:
    if of_nobody(folder):
        raise InputError(f"{key}: {os.fspath(folder)}: {NOBODY}; {REMEDY}")
    return expanded(folder)


def cached_folder(kind: str, label: str, spec: Mapping[str, Any], cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where the cache keeps the artifact: `<cache_dir>/<kind>/<label>-<first digits of the content key>`."""
    return cache_folder(cache_dir) / kind / f"{label}-{content_key(spec)[:12]}"


def make_once(
    folder: Path,
    card_name: str,
    spec: Mapping[str, Any],
    build: Callable[[Path], Mapping[str, Any]],
    *,
    overwrite: bool = False,
    anew: bool = False,
) -> Path:
    """Make `folder` from `spec`, or reuse it when it was made from an equal one.

    Args:
        folder: final place.
        card_name: JSON file in it that says what it is: `{"key", "spec", "files": {name: sha256}, ...}`.
        build: fills an empty folder and returns what else the card shall say.
        overwrite: replace a folder that was made from another specification.
        anew: replace one made from an equal specification, too, as where the specification names a branch of something
            that moves on.

    The folder is filled under a temporary name beside its final place and renamed, so that no reader ever sees half
    of it and an interrupted build leaves nothing behind that looks finished. Of two builders at once the second waits
    for the first, and finds its folder.

    Raises:
        InputError: the folder holds something else, or its files are not those it was published with.
        NotMade: it would have to be made, within `only_found`.
    """
    folder = _expanded(folder, "--out").absolute()
    key = content_key(spec)
    if folder.exists() and _is_reusable(folder, card_name, key, overwrite=overwrite, anew=anew):
        return folder
    if _ONLY_FOUND.get():
        raise NotMade(str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f".{folder.name}.lock")):
        if not (folder.exists() and _is_reusable(folder, card_name, key, overwrite=overwrite, anew=anew)):
            _make(folder, card_name, key, spec, build, overwrite=overwrite, anew=anew)
    return folder


def _make(
    folder: Path,
    card_name: str,
    key: str,
    spec: Mapping[str, Any],
    build: Callable[[Path], Mapping[str, Any]],
    *,
    overwrite: bool,
    anew: bool,
) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        extra = build(work)
        files = {
            path.relative_to(work).as_posix(): file_sha256(path) for path in sorted(work.rglob("*")) if path.is_file()
        }
        card = {"key": key, "spec": dict(spec), **extra, "files": files}
        (work / card_name).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        work.chmod(0o755)  # mkdtemp makes it private; other users of a shared cache may read
        if folder.exists() and not _is_reusable(folder, card_name, key, overwrite=overwrite, anew=anew):
            shutil.rmtree(folder)  # only now: a failed build leaves the old one
        try:
            work.rename(folder)
        except OSError:
            if not (folder.exists() and _is_reusable(folder, card_name, key)):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until nobody else holds the lock; its file goes with whoever held it."""
    with locked(lock):
        try:
            yield
        finally:
            lock.unlink()


def read_card(folder: Path, card_name: str) -> dict[str, Any]:
    """What an artifact says of itself.

    Raises:
        InputError: it is damaged.
    """
    try:
        card = json.loads((folder / card_name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{folder / card_name}: {error}; remove that folder, and it is made anew") from error
    if not isinstance(card, dict) or not {"key", "files"} <= card.keys():
        raise InputError(f"{folder / card_name}: lacks key or files; remove that folder, and it is made anew")
    return card


def _is_reusable(folder: Path, card_name: str, key: str, *, overwrite: bool = False, anew: bool = False) -> bool:
    if not (folder / card_name).is_file():
        if folder.is_dir() and not any(folder.iterdir()):
            return False
        raise InputError(
            f"{folder}: exists, and is not an artifact of verl-tim (no {card_name}); name another folder or remove it"
        )
    if anew:
        return False
    card = read_card(folder, card_name)
    if card["key"] != key:
        if overwrite:
            return False
        raise InputError(
            f"{folder}: was made from other settings (see its {card_name}); name another folder or pass overwrite"
        )
    changed = [
        name
        for name, digest in card["files"].items()
        if not (folder / name).is_file() or file_sha256(folder / name) != digest
    ]
    if changed:
        raise InputError(
            f"{folder}: {', '.join(changed)} changed since it was made; remove the folder to have it made again"
        )
    return True
