"""A made model as parts of a limited size, and from them back into another machine's cache.

What is made is a function of its settings on machines of one kind, but making it takes minutes; and where runs of
several machines are compared, all of them have to begin with the same weights. A part is a line that says what it is a
part of, then bytes of a tar archive of the model's folder. Weights are not compressed: they are close to noise.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from verl_tim.tasks.artifact import cache_folder, cached_folder, content_key, file_sha256, make_once, read_card
from verl_tim.tasks.base_model import CARD
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.file_set import replace_files

MIB = 1 << 20
_MODELS = "models"
_MAGIC = b"verl_tim model part 1 "
# A line of JSON with two digests and a name; a file that has no end of line within so many bytes is none of ours.
_HEAD = 1024
_AGAIN = "bring it over again"


@dataclass(frozen=True)
class Part:
    """What the first line of a part says.

    Attributes:
        model: name of its folder in the cache, which ends with the first digits of its content key.
        sha256, size: of the whole archive.
        part, parts: number of this one, from 1, and of all.
        part_sha256: of the bytes behind the line.
    """

    model: str
    sha256: str
    size: int
    part: int
    parts: int
    part_sha256: str


@dataclass(frozen=True)
class Unpacked:
    """What became of the models in parts, by folder.

    Attributes:
        written: put into the cache; `kept`: were there already, with the same weights.
        not_found_here: folder -> the versions for which a start on this machine makes a model of its own all the same.
    """

    written: tuple[Path, ...]
    kept: tuple[Path, ...]
    not_found_here: Mapping[Path, str]


def models_in(cache_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """Folders of the made models of a cache, sorted.

    Raises:
        InputError: it has none.
    """
    folder = cache_folder(cache_dir) / _MODELS
    found = sorted(path.parent for path in folder.glob(f"[!.]*/{CARD}"))
    if not found:
        raise InputError(f"{folder} holds no model: make one first (verl-tim train ... --dry-run), or name its cache")
    return found


def pack_model(folder: Path, out: Path, *, mib: float = 15.0) -> tuple[Path, ...]:
    """Write `out/NAME.01-of-03.part`, ..., in place of those of an earlier call. Takes the model's size of memory.

    Args:
        folder: of a made model, under its name in the cache.
        mib: of one part, at most.

    Raises:
        InputError: no made model, or one whose files are not those that it was made with; no room for a part.
        OSError: no room on the disk; parts of an earlier call are still there.
    """
    card = _checked_card(folder)
    room = int(mib * MIB) - _HEAD
    if room < 1:
        raise InputError(f"--mib {mib:g} has no room for a part: give 0.01 or more")
    whole = _archive(folder, [*card["files"], CARD])
    digest, count = hashlib.sha256(whole).hexdigest(), math.ceil(len(whole) / room)
    digits = max(2, len(str(count)))

    def numbered() -> Iterator[tuple[str, bytes]]:
        for number in range(1, count + 1):
            content = whole[(number - 1) * room : number * room]
            head = Part(folder.name, digest, len(whole), number, count, hashlib.sha256(content).hexdigest())
            name = f"{folder.name}.{number:0{digits}d}-of-{count:0{digits}d}.part"
            yield name, _MAGIC + json.dumps(asdict(head)).encode() + b"\n" + content

    return replace_files(out, numbered(), f"{folder.name}.*-of-*.part")


def unpack_models(paths: Sequence[Path], cache_dir: str | os.PathLike[str] | None = None) -> Unpacked:
    """Put models into a cache, where a start finds them instead of making them. Nothing is written unless all parts of
    all models are there and whole.

    Raises:
        InputError: no parts, damaged ones, some missing, parts of two packings of one model; a model that is there with
            other weights.
        OSError: no room.
    """
    models = [_Model.of(name, parts) for name, parts in _by_model(paths).items()]
    places = [model.check_place(cache_dir) for model in models]
    written: list[Path] = []
    kept: list[Path] = []
    elsewhere: dict[Path, str] = {}
    for model, place in zip(models, places, strict=True):
        (kept if place.exists() else written).append(place)
        make_once(place, CARD, model.card["spec"], model.fill)
        model.check_place(cache_dir)  # another process may have made one meanwhile
        if others := _other_versions(model.card["spec"]):
            elsewhere[place] = others
    return Unpacked(tuple(written), tuple(kept), elsewhere)


@dataclass(frozen=True)
class _Model:
    name: str
    card: Mapping[str, Any]
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, name: str, parts: Mapping[Path, Part]) -> _Model:
        """From all of its parts, checked against its own card."""
        whole = _joined(name, parts)
        try:
            with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
                files = {member.name: _content(tar, member) for member in tar}
            card = json.loads(files.pop(CARD))
            digests = {inner: hashlib.sha256(content).hexdigest() for inner, content in files.items()}
            key, spec = card["key"], card["spec"]
        except (tarfile.TarError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"the parts of {name} hold no model ({error}): pack it again") from error
        if content_key(spec) != key or not name.endswith(f"-{key[:12]}") or digests != card["files"]:
            raise InputError(f"the parts of {name} hold another model than its {CARD} says: pack it again")
        return cls(name, card, files)

    def check_place(self, cache_dir: str | os.PathLike[str] | None) -> Path:
        """Its place in the cache; refused where other weights are there under the same key."""
        place = cached_folder(_MODELS, self.name.rpartition("-")[0], self.card["spec"], cache_dir)
        if not (place / CARD).is_file():
            return place
        there = _checked_card(place)
        others = sorted(name for name, digest in self.card["files"].items() if there["files"].get(name) != digest)
        if others:
            raise InputError(
                f"{place}: was made from the same settings with other content ({', '.join(others)}), as on another "
                "kind of machine, and runs that begin with different weights do not compare: remove the folder to have "
                "the packed one instead, or give another cache"
            )
        return place

    def fill(self, work: Path) -> dict[str, Any]:
        """What `make_once` calls in place of making the model."""
        for inner, content in self.files.items():
            path = work / inner
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return {name: value for name, value in self.card.items() if name not in ("key", "spec", "files")}


def _checked_card(folder: Path) -> dict[str, Any]:
    if not (folder / CARD).is_file():
        raise InputError(f"{folder}: is no model made here (no {CARD})")
    card = read_card(folder, CARD)
    key = card["key"]
    if not folder.name.endswith(f"-{key[:12]}"):
        raise InputError(f"{folder}: does not end with its content key ({key[:12]}): give the folder in the cache")
    changed = [
        name
        for name, digest in card["files"].items()
        if not (folder / name).is_file() or file_sha256(folder / name) != digest
    ]
    if changed:
        raise InputError(f"{folder}: {', '.join(changed)} changed since it was made; remove the folder")
    return card


def _archive(folder: Path, names: Sequence[str]) -> bytes:
    """A tar archive that is a function of the files alone, without times and owners: parts of two calls are equal."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(names):
            member = tarfile.TarInfo(name)
            member.size = (folder / name).stat().st_size
            with (folder / name).open("rb") as content:
                tar.addfile(member, content)
    return stream.getvalue()


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    inner = PurePosixPath(member.name)
    if not member.isfile() or inner.is_absolute() or ".." in inner.parts:
        raise ValueError(f"{member.name} is no file of a model")
    stream = tar.extractfile(member)
    assert stream is not None
    return stream.read()


def _by_model(paths: Sequence[Path]) -> dict[str, dict[Path, Part]]:
    found: dict[str, dict[Path, Part]] = {}
    for path in paths:
        part = _head(path)
        found.setdefault(part.model, {})[path] = part
    return found


def _head(path: Path) -> Part:
    """What a part says of itself; its bytes are checked, too."""
    with _opened(path) as stream:
        line = stream.readline(_HEAD)
        if not line.startswith(_MAGIC):
            raise InputError(f"{path}: is no part of verl-tim evidence pack-models")
        try:
            part = Part(**json.loads(line.removeprefix(_MAGIC)))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}: is damaged in its first line ({error}): {_AGAIN}") from error
        if hashlib.sha256(stream.read()).hexdigest() != part.part_sha256:
            raise InputError(f"{path}: is damaged, or was cut off: {_AGAIN}")
    return part


def _joined(name: str, parts: Mapping[Path, Part]) -> bytes:
    """The bytes of all parts in order. A part may be there twice, as from two folders."""
    packings: dict[tuple[str, int], Path] = {}
    for path, part in parts.items():
        packings.setdefault((part.sha256, part.parts), path)
    if len(packings) > 1:
        raise InputError(
            f"{name}: {' and '.join(map(str, packings.values()))} are parts of two packings of it (other weights, or "
            "another --mib): give those of one"
        )
    ((digest, count),) = packings
    by_number = {part.part: path for path, part in parts.items()}
    missing = [str(number) for number in range(1, count + 1) if number not in by_number]
    if missing:
        raise InputError(f"{name}: of its {count} parts, number {', '.join(missing)} is not among those given")
    contents = []
    for number in range(1, count + 1):
        with _opened(by_number[number]) as stream:
            stream.readline(_HEAD)
            contents.append(stream.read())
    whole = b"".join(contents)
    if hashlib.sha256(whole).hexdigest() != digest:
        raise InputError(f"{name}: its parts are whole, and what they make up is not: pack it again")
    return whole


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    with stream:
        yield stream


def _other_versions(spec: Mapping[str, Any]) -> str:
    """A model's key has the versions of what made it: `NAME VERSION (here VERSION)`, or nothing where they agree."""
    return ", ".join(
        f"{name} {made_with} (here {version(name)})"
        for name, made_with in spec["versions"].items()
        if version(name) != made_with
    )
