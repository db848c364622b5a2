"""Run folders as a few small archives, to bring them home from a machine that is given back, and to keep them.

An archive is a .tar.xz of whole run folders: what compare and report read, and as many steps of the token dumps as
there is room for; and, last, which of the runs ended well. Logs, samples of text and checkpoints stay behind. Metrics
can be cut down to those that the figures read.
"""

from __future__ import annotations

import json
import lzma
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from verl_tim.diagnosis.config_diff import diff_configs
from verl_tim.diagnosis.manifest import MANIFEST_NAME
from verl_tim.diagnosis.metric_log import RunFolderError, parse_json_lines
from verl_tim.diagnosis.run_folder import ATTEMPTS_NAME, CONFIG_NAME, METRICS_NAME, is_resumable, parts
from verl_tim.diagnosis.token_dump import FOLDER, dumped_steps
from verl_tim.evidence.names import RunName
from verl_tim.evidence.runs import EvidenceError, dumped_runs, found_in
from verl_tim.evidence.used import thinned
from verl_tim.launch.record import RECORD, read_record, write_record
from verl_tim.tasks.file_set import replace_files

STEM = "evidence"
MIB = 1 << 20
_SMALL = (CONFIG_NAME, MANIFEST_NAME, ATTEMPTS_NAME)
_METRICS = re.compile(r"metrics(\.\d+)?\.jsonl")
# All that an archive holds of a run.
_INSIDE = re.compile(rf"{'|'.join(map(re.escape, _SMALL))}|{_METRICS.pattern}|{FOLDER}/step_\d{{6,}}\.parquet")


@dataclass(frozen=True)
class Packed:
    """What was packed.

    Attributes:
        files: the archives.
        runs: in them.
        dump_steps: run -> of how many steps it has token dumps, those that may have some.
    """

    files: tuple[Path, ...]
    runs: tuple[str, ...]
    dump_steps: Mapping[str, int]


@dataclass(frozen=True)
class Unpacked:
    """What became of the runs in archives, by name.

    Attributes:
        written: new, or longer than what was there.
        kept: what was there is as long or longer.
    """

    written: tuple[str, ...]
    kept: tuple[str, ...]


def pack(
    folder: Path,
    out: Path,
    *,
    mib: float = 15.0,
    files: int = 4,
    used_only: bool = False,
    dump_steps: int = 8,
    names: Sequence[RunName] | None = None,
) -> Packed:
    """Write `out/evidence-1.tar.xz`, ... from the run folders in `folder`, in place of those of an earlier call.

    Each run is compressed on its own, so that its size is known, and placed into the fullest archive with room for it.
    Where all of it does not fit, token dumps are thinned: a step less of each run, and another, down to none.

    Args:
        mib: of one archive, at most; files: so many archives, at most.
        used_only: of the metrics keep those that figures read (`used.is_used`), to six digits, and token dumps of the
            runs that they read them of (`runs.dumped_runs`).
        dump_steps: of the token dumps, evenly over the run.
        names: runs to pack; None: all that logged something.

    Raises:
        EvidenceError: no such runs, or too much for the archives even without token dumps.
        RunFolderError: damaged metrics.
        LaunchError: a damaged record of what ended well.
        OSError: no room; archives of an earlier call are still there.
    """
    found = found_in(folder)
    chosen = {name: path for name, path in found.items() if names is None or name in names}
    if not chosen:
        raise EvidenceError(f"{folder}: none of its runs was asked for; it has {', '.join(map(str, found))}")
    record = read_record(folder)
    done = {str(name): record[str(name)] for name in chosen if str(name) in record}
    dumping = dumped_runs(chosen) if used_only else chosen
    runs = {
        name: _Compressed.of(path, used_only, dump_steps if name in dumping else 0) for name, path in chosen.items()
    }
    room = int(mib * MIB) - len(_end(done))
    steps = dump_steps
    while (bins := _placed({name: run.size(steps) for name, run in runs.items()}, room, files)) is None:
        if steps == 0:
            total = sum(run.size(0) for run in runs.values()) / MIB
            raise EvidenceError(
                f"{len(chosen)} runs are {total:.1f} MiB without token dumps, and {files} archives of {mib:g} MiB do "
                "not hold them: pack fewer runs (--only), keep only the metrics that figures read (--used), or allow "
                "more (--mib, --files)"
            )
        steps -= 1
    contents = {}
    for number, members in enumerate(bins, start=1):
        ended = {name: words for name, words in done.items() if name in set(map(str, members))}
        contents[f"{STEM}-{number}.tar.xz"] = b"".join([*(runs[name].stream(steps) for name in members), _end(ended)])
    return Packed(
        files=replace_files(out, contents.items(), f"{STEM}-*.tar.xz"),
        runs=tuple(map(str, chosen)),
        dump_steps={str(name): len(runs[name].kept(steps)) for name in dumping},
    )


def unpack(archives: Sequence[Path], out: Path) -> Unpacked:
    """Run folders from archives; one that is there already with as many steps or more is kept. Nothing is written
    unless all archives can be read.

    Raises:
        EvidenceError: no archive of this kind, damaged, or with anything but a run's files in it; a run that is there
            with other settings.
        LaunchError: a damaged record in `out`.
    """
    read = [(archive, *_read(archive)) for archive in archives]
    written: dict[str, None] = {}
    kept: dict[str, None] = {}
    for archive, runs, record in read:
        for name, files in runs.items():
            target = out / name
            _check_same(archive, files, target)
            if target.exists() and _last_step(_metrics_of(target)) >= _last_step(files):
                kept[name] = None
                continue
            for stale in _owned(target):  # a resumed run's parts are numbered by its attempts
                stale.unlink()
            for inner, content in files.items():
                path = target / inner
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            written[name] = None
        if record:
            write_record(out, {**read_record(out), **record})
    return Unpacked(tuple(written), tuple(name for name in kept if name not in written))


_BLOCK = 512
# A tar archive ends with two empty blocks.
_END = bytes(2 * _BLOCK)


@dataclass(frozen=True)
class _Compressed:
    """A run folder as compressed tar members: what is always there, and each dumped step on its own."""

    always: bytes
    dumps: Mapping[int, bytes]

    @classmethod
    def of(cls, folder: Path, used_only: bool, steps: int) -> _Compressed:
        always = b"".join(_member(f"{folder.name}/{name}", content) for name, content in _contents(folder, used_only))
        dumps = {}
        for step in _evenly(dumped_steps(folder), steps):
            name = f"{FOLDER}/step_{step:06d}.parquet"
            # parquet is compressed already
            dumps[step] = lzma.compress(_member(f"{folder.name}/{name}", (folder / name).read_bytes()), preset=0)
        return cls(lzma.compress(always, preset=6), dumps)

    def kept(self, steps: int) -> list[int]:
        return _evenly(sorted(self.dumps), steps)

    def stream(self, steps: int) -> bytes:
        return self.always + b"".join(self.dumps[step] for step in self.kept(steps))

    def size(self, steps: int) -> int:
        return len(self.always) + sum(len(self.dumps[step]) for step in self.kept(steps))


def _evenly(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of them, first and last included (of one: the last)."""
    count = min(count, len(steps))
    if count == 1:
        return [steps[-1]]
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def _member(name: str, content: bytes) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    return header.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % _BLOCK)


def _end(record: Mapping[str, Sequence[str]]) -> bytes:
    """The last member, which is always there: without it an archive was cut off between two runs."""
    return lzma.compress(_member(RECORD, _placeless(json.dumps(record), Path(RECORD)).encode()) + _END)


def _contents(folder: Path, used_only: bool) -> Iterator[tuple[str, bytes]]:
    for name in _SMALL:
        if (folder / name).is_file():
            yield name, _placeless((folder / name).read_text(encoding="utf-8"), folder).encode()
    for path in parts(folder, METRICS_NAME):
        yield path.name, thinned(path) if used_only else path.read_bytes()


def _placeless(text: str, folder: Path) -> str:
    """Without the folders of the machine that is given back."""
    places = {folder.absolute().parent: f"runs/{STEM}", Path.cwd(): ".", Path.home(): "~"}
    for place, instead in sorted(places.items(), key=lambda item: -len(str(item[0]))):
        # beginnings of paths alone; a container's home may be /
        if len(place.parts) > 1:
            text = re.sub(rf"(?<![\w.~/-]){re.escape(str(place))}(?=/)", instead, text)
    return text


def _placed(sizes: Mapping[RunName, int], room: int, files: int) -> list[list[RunName]] | None:
    """Runs per archive, the largest first into the fullest archive with room for it; None where they do not fit."""
    bins: list[tuple[int, list[RunName]]] = []
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        holding = [at for at, (used, _) in enumerate(bins) if used + size <= room]
        if holding:
            at = max(holding, key=lambda at: bins[at][0])
            bins[at] = (bins[at][0] + size, [*bins[at][1], name])
        elif len(bins) < files and size <= room:
            bins.append((size, [name]))
        else:
            return None
    return [members for _, members in bins]


def _read(archive: Path) -> tuple[dict[str, dict[str, bytes]], dict[str, list[str]]]:
    """(run -> its files by name, run -> its overrides where it ended well)."""
    runs: dict[str, dict[str, bytes]] = {}
    record: Any = None
    try:
        with tarfile.open(archive, "r:xz") as tar:
            for member in tar:
                run, _, inner = PurePosixPath(member.name).as_posix().partition("/")
                ours = member.name == RECORD or (RunName.parse(run) is not None and _INSIDE.fullmatch(inner))
                if not member.isfile() or not ours:
                    raise EvidenceError(
                        f"{archive}: {member.name} is no file of a run of +matrix=evidence: not an archive of "
                        "verl-tim evidence pack"
                    )
                stream = tar.extractfile(member)
                assert stream is not None
                content = stream.read()
                if member.name == RECORD:
                    record = json.loads(content)
                else:
                    runs.setdefault(run, {})[inner] = content
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        if isinstance(error, EvidenceError):
            raise
        raise EvidenceError(f"{archive} cannot be read ({error}): bring it over again") from error
    if not isinstance(record, dict):
        raise EvidenceError(f"{archive} was cut off, or holds no run of +matrix=evidence: bring it over again")
    return runs, record


def _check_same(archive: Path, files: Mapping[str, bytes], target: Path) -> None:
    """A run of other settings must not come into another's place, whichever is longer."""
    if CONFIG_NAME not in files or not (target / CONFIG_NAME).is_file():
        return
    there = _placeless((target / CONFIG_NAME).read_text(encoding="utf-8"), target)
    configs = {"packed": yaml.safe_load(files[CONFIG_NAME]), "there": yaml.safe_load(there)}
    found = [d for d in diff_configs(configs, include_rollout=True) if not is_resumable(d.key)]
    if found:
        first = found[0]
        raise EvidenceError(
            f"{archive}: {target.name} has other settings than the run in {target} ({first.key} is "
            f"{first.values.get('packed')!r}, there it is {first.values.get('there')!r}): give another --out, or "
            "remove that folder"
        )


def _owned(folder: Path) -> list[Path]:
    """Files of a run folder that an archive may hold."""
    inside = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in inside if _INSIDE.fullmatch(path.relative_to(folder).as_posix())]


def _metrics_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in parts(folder, METRICS_NAME)}


def _last_step(files: Mapping[str, bytes]) -> int:
    """The last step of a run's files by name, -1 where it logged none."""
    last = -1
    for name, content in files.items():
        if _METRICS.fullmatch(name):
            try:
                entries, _ = parse_json_lines(content, name)
                last = max([last, *(int(entry["step"]) for _, entry in entries)])
            except (RunFolderError, KeyError, TypeError, ValueError) as error:
                raise EvidenceError(f"{name} of a run is damaged: {error}") from error
    return last
