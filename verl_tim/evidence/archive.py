"""Run folders as a few small archives, to bring them home from a machine that is given back, and to keep them.

An archive is a .tar.xz of whole run folders: what compare and report read, and as many steps of the token dumps as
there is room for. Logs, samples of text and checkpoints stay behind. Metrics can be cut down to those that the figures
read.
"""

from __future__ import annotations

import json
import lzma
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from verl_tim.diagnosis.curves import PLOTS
from verl_tim.diagnosis.early_warning import SIGNALS
from verl_tim.diagnosis.manifest import MANIFEST_NAME
from verl_tim.diagnosis.run_folder import CONFIG_NAME
from verl_tim.diagnosis.speed import STAGES, STEP_TIME
from verl_tim.diagnosis.token_dump import FOLDER, dumped_steps
from verl_tim.evidence.names import RunName
from verl_tim.evidence.runs import METRIC_FILES, EvidenceError, found_in, metric_files
from verl_tim.launch.restarts import ATTEMPTS

STEM = "evidence"
MIB = 1 << 20
_SMALL = (CONFIG_NAME, MANIFEST_NAME, ATTEMPTS)
# What is read beside the plots' and signals' own names: shares, flips, places, corrections, times.
_MORE = (
    *STEP_TIME,
    *(f"timing_s/{stage}" for stage in STAGES),
    "timing_per_token_ms/gen",
    "perf/total_num_tokens",
    "response_length/mean",
    "tim/valid_tokens",
    "tim/sampled_share",
    "tim/delta_gt_0.01",
    "tim/delta_gt_0.1",
    "tim/delta_gt_1",
    "tim/top1_tokens",
    "tim/router_compared",
    "tim/rejected_share_pos_adv",
    "tim/rejected_share_neg_adv",
    "tim/seq_delta_sum_abs_mean",
)
_PREFIXES = ("val-core/", "tim/delta_abs_mean_by_position_", "rollout_corr/rollout_rs")
DIGITS = 6


@dataclass(frozen=True)
class Packed:
    """What was packed.

    Attributes:
        files: the archives.
        runs: in them, and `dump_steps`: of how many steps each has its token dumps.
    """

    files: tuple[Path, ...]
    runs: tuple[str, ...]
    dump_steps: Mapping[str, int]


def is_used(metric: str) -> bool:
    """Whether a figure or table of the page reads this metric."""
    return metric in _used_names() or metric.startswith(_PREFIXES)


def _used_names() -> frozenset[str]:
    plots = {name for _, section in PLOTS for plot in section for line in plot.lines for name in line.names}
    return frozenset({*plots, *(name for signal in SIGNALS for name in signal.names), *_MORE})


def pack(
    folder: Path,
    out: Path,
    *,
    mib: float = 15.0,
    files: int = 6,
    used_only: bool = False,
    dump_steps: int = 8,
    names: Sequence[RunName] | None = None,
) -> Packed:
    """Write `out/evidence-1.tar.xz`, ... from the run folders in `folder`.

    Each run is compressed on its own, so that its size is known, and placed into the fullest archive with room for it.
    Where all of it does not fit, token dumps are thinned: fewer steps of each run, down to none.

    Args:
        mib: of one archive, at most; files: so many archives, at most.
        used_only: of the metrics keep those that `is_used`, to six digits.
        dump_steps: of the token dumps, evenly over the run.
        names: runs to pack; None: all that logged something.

    Raises:
        EvidenceError: no such runs, or too much for the archives even without token dumps.
    """
    found = found_in(folder)
    chosen = {name: path for name, path in found.items() if names is None or name in names}
    if not chosen:
        raise EvidenceError(f"{folder}: none of its runs was asked for; it has {', '.join(map(str, found))}")
    runs = {name: _Compressed.of(path, used_only, dump_steps) for name, path in chosen.items()}
    steps = dump_steps
    while (bins := _placed({name: run.size(steps) for name, run in runs.items()}, int(mib * MIB), files)) is None:
        if steps == 0:
            total = sum(run.size(0) for run in runs.values()) / MIB
            raise EvidenceError(
                f"{len(chosen)} runs are {total:.1f} MiB without token dumps, and {files} archives of {mib:g} MiB do "
                "not hold them: pack fewer runs (--only), keep only the metrics that figures read (--used), or allow "
                "more (--mib, --files)"
            )
        steps //= 2
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob(f"{STEM}-*.tar.xz"):
        stale.unlink()
    written = []
    for number, members in enumerate(bins, start=1):
        path = out / f"{STEM}-{number}.tar.xz"
        # .xz streams one after another are one .xz file, and so are tar members without the end mark between them
        path.write_bytes(b"".join(runs[name].stream(steps) for name in members) + lzma.compress(_END))
        written.append(path)
    packed = [str(name) for members in bins for name in members]
    return Packed(tuple(written), tuple(packed), {str(name): len(run.kept(steps)) for name, run in runs.items()})


def unpack(archives: Sequence[Path], out: Path) -> list[str]:
    """Run folders from archives; one that is there already with as many steps or more is kept.

    Returns:
        The names of those that were written.

    Raises:
        EvidenceError: no archive of this kind, damaged, or with a path that leaves its folder.
    """
    written: list[str] = []
    for archive in archives:
        for name, files in _runs_in(archive):
            target = out / name
            if target.exists() and _last_step(_metrics_of(target)) >= _last_step(files):
                continue
            for stale in metric_files(target):  # a resumed run's parts are numbered by its attempts
                stale.unlink()
            for inner, content in files.items():
                path = target / inner
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            written.append(name)
    return written


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


def _contents(folder: Path, used_only: bool) -> Iterator[tuple[str, bytes]]:
    places = {str(folder.parent.absolute()): f"runs/{STEM}", str(Path.home()): "~", str(Path.cwd()): "."}
    for name in _SMALL:
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            for place, instead in places.items():  # of the machine that is given back
                text = text.replace(place, instead)
            yield name, text.encode()
    for path in metric_files(folder):
        yield path.name, _thinned(path) if used_only else path.read_bytes()


def _thinned(path: Path) -> bytes:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # a torn last line; the reader would leave it out, too
        data = {name: _short(value) for name, value in entry["data"].items() if is_used(name)}
        lines.append(json.dumps({"step": entry["step"], "data": data}, separators=(",", ":")))
    return ("\n".join(lines) + "\n").encode()


def _short(value: object) -> object:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _placed(sizes: Mapping[RunName, int], room: int, files: int) -> list[list[RunName]] | None:
    """Runs per archive, the largest first into the fullest archive with room for it; None where they do not fit."""
    bins: list[tuple[int, list[RunName]]] = []
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        holding = [at for at, (used, _) in enumerate(bins) if used + size + _BLOCK <= room]
        if holding:
            at = max(holding, key=lambda at: bins[at][0])
            bins[at] = (bins[at][0] + size, [*bins[at][1], name])
        elif len(bins) < files and size + _BLOCK <= room:
            bins.append((size, [name]))
        else:
            return None
    return [members for _, members in bins]


def _runs_in(archive: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    runs: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(archive, "r:xz") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if not member.isfile() or path.is_absolute() or ".." in path.parts or len(path.parts) not in (2, 3):
                    raise EvidenceError(
                        f"{archive}: {member.name} is no file of a run folder: not an archive of verl-tim"
                    )
                stream = tar.extractfile(member)
                assert stream is not None
                runs.setdefault(path.parts[0], {})["/".join(path.parts[1:])] = stream.read()
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise EvidenceError(f"{archive} cannot be read ({error}): bring it over again") from error
    strange = [name for name in runs if RunName.parse(name) is None]
    if strange or not runs:
        raise EvidenceError(f"{archive} holds no run of +matrix=evidence ({strange[0] if strange else 'it is empty'})")
    yield from runs.items()


def _metrics_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in metric_files(folder)}


def _last_step(files: Mapping[str, bytes]) -> int:
    """The last step of a run's files by name, -1 where it logged none."""
    last = -1
    for name, content in files.items():
        if fnmatch(name, METRIC_FILES):
            for line in content.splitlines():
                with suppress(json.JSONDecodeError):  # a torn last line
                    last = max(last, json.loads(line)["step"])
    return last
