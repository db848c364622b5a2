"""The run folders of the evidence, read: a comparison for each model and algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_tim.diagnosis.compare import Comparison, Options, compare
from verl_tim.diagnosis.errors import DiagnosisError
from verl_tim.diagnosis.groups import Group
from verl_tim.diagnosis.run import Run
from verl_tim.diagnosis.run_folder import METRICS_NAME, attempts, parts
from verl_tim.diagnosis.token_dump import dumped_steps
from verl_tim.evidence.names import BASELINE, MIXTURE, PLANNED, VARIANTS, RunName
from verl_tim.launch.exit_code import INTERRUPTED
from verl_tim.units import count


class EvidenceError(DiagnosisError):
    """Folders or archives that cannot be used as asked; the message says what to change."""


@dataclass(frozen=True)
class Pair:
    """The runs of one model under one algorithm."""

    name: str
    comparison: Comparison
    folders: dict[RunName, Path]

    def group(self, variant: str) -> Group | None:
        """All seeds of a variant; None where none ran."""
        return next((group for group in self.comparison.groups if group.name == variant), None)

    def same_seed(self, group: Group, baseline: Group) -> list[tuple[int, int]]:
        """(place in the group's logs, place in the baseline's) of runs with the same seed: the same prompts in the same
        order."""
        names = list(self.folders)
        places = {names[member].seed: place for place, member in enumerate(baseline.members)}
        return [
            (place, places[seed])
            for place, member in enumerate(group.members)
            if (seed := names[member].seed) in places
        ]

    @property
    def title(self) -> str:
        """Model and algorithm, for a picture that stands alone."""
        first = next(iter(self.folders))
        manifests = [run.manifest for run in self.comparison.runs]
        sizes = {manifest.parameters for manifest in manifests if manifest is not None and manifest.parameters}
        size = f", {count(sizes.pop())} parameters" if len(sizes) == 1 else ""
        kind = "mixture of experts" if first.model == MIXTURE else f"{first.model} model"
        return f"{self.name}: {kind}{size}, {first.algorithm.upper()}"

    @property
    def variants(self) -> list[str]:
        """Those that ran, in the order of the page."""
        return [group.name for group in self.comparison.groups]

    def dumped(self, variant: str) -> Path | None:
        """The folder of its run whose token dumps stand for the variant."""
        return next((self.folders[name] for name in dumped_runs(self.folders) if name.variant == variant), None)


@dataclass(frozen=True)
class Evidence:
    """All of it.

    Attributes:
        folder: that was read.
        folders: run -> its folder, those that logged something; at least one.
        alone: runs of the same names, each alone on its GPU, for times; empty: none.
        on_part: told what is begun, as that takes seconds: a comparison that is read, a picture, a table.
    """

    folder: Path
    folders: dict[RunName, Path]
    alone: dict[RunName, Path]
    on_part: Callable[[str], None] = field(default=lambda what: None, repr=False)

    @classmethod
    def read(
        cls, folder: Path, alone: Path | None = None, on_part: Callable[[str], None] = lambda what: None
    ) -> Evidence:
        """Find the runs; a folder is read when something asks for it.

        Raises:
            EvidenceError: a folder without a run of the matrix.
        """
        return cls(folder, found_in(folder), {} if alone is None else found_in(alone), on_part)

    @cached_property
    def pairs(self) -> list[Pair]:
        """By model and algorithm, those with at least one run."""
        return _pairs(self.folders, self.on_part)

    @cached_property
    def alone_pairs(self) -> list[Pair]:
        return _pairs(self.alone, self.on_part)

    @cached_property
    def progress(self) -> dict[RunName, Progress]:
        """How far each run came."""
        return {
            name: Progress.of(run, folder)
            for pair in self.pairs
            for (name, folder), run in zip(pair.folders.items(), pair.comparison.runs, strict=True)
        }

    @property
    def finished(self) -> list[RunName]:
        """Of the planned runs, those that logged their last step."""
        return [name for name, progress in self.progress.items() if name in PLANNED and progress.finished]


@dataclass(frozen=True)
class Progress:
    """How far a run came.

    Attributes:
        steps: the last that it logged; total: its last, None where its config does not tell.
        why: of a run that ended early, in words; empty where its folder does not tell.
    """

    steps: int
    total: int | None
    why: str

    @classmethod
    def of(cls, run: Run, folder: Path) -> Progress:
        total = ((run.config or {}).get("trainer") or {}).get("total_training_steps")
        entries = attempts(folder)
        why = _why(entries[-1]) if entries else ""
        return cls(run.steps, None if total is None else int(total), why)

    @property
    def finished(self) -> bool:
        return self.total is not None and self.steps >= self.total


def _why(attempt: Mapping[str, Any]) -> str:
    if attempt.get("exit_code") == INTERRUPTED:
        return "stopped"
    cause = attempt.get("cause") or [f"exit code {attempt.get('exit_code')}"]
    return str(cause[-1])


def found_in(folder: Path) -> dict[RunName, Path]:
    """Run -> folder, of a matrix's folder, in the order of the page.

    Raises:
        EvidenceError: there is none.
    """
    if not folder.is_dir():
        raise EvidenceError(f"{folder} is no folder: give what tim.run_dir of +matrix=evidence named (runs/evidence)")
    named = {
        RunName.parse(path.name): path
        for path in sorted(folder.iterdir())
        if path.is_dir() and parts(path, METRICS_NAME)
    }
    found = {name: path for name, path in named.items() if name is not None}
    if not found:
        raise EvidenceError(
            f"{folder} holds no run of +matrix=evidence ({PLANNED[0]}, ...) that logged anything: "
            "unpack the archives first, or run verl-tim train recipe=evidence_grpo +matrix=evidence"
        )
    order = {variant: place for place, variant in enumerate(VARIANTS)}
    return dict(sorted(found.items(), key=lambda item: (item[0].pair, order.get(item[0].variant, 99), item[0].seed)))


def dumped_runs(folders: Mapping[RunName, Path]) -> list[RunName]:
    """Of each pair's variant the lowest seed that has token dumps: what figures read of them, one run shows."""
    chosen: dict[tuple[str, str], RunName] = {}
    for name, folder in sorted(folders.items(), key=lambda item: item[0].seed):
        if (name.pair, name.variant) not in chosen and dumped_steps(folder):
            chosen[name.pair, name.variant] = name
    return list(chosen.values())


def pair_names(folders: Iterable[RunName]) -> list[str]:
    """Models and algorithms of runs, in their order."""
    return list(dict.fromkeys(name.pair for name in folders))


def _pairs(folders: dict[RunName, Path], on_part: Callable[[str], None]) -> list[Pair]:
    pairs = []
    for pair in pair_names(folders):
        on_part(f"the runs of {pair}")
        mine = {name: path for name, path in folders.items() if name.pair == pair}
        rules = tuple(f"{variant}={pair}-{variant}-*" for variant in dict.fromkeys(name.variant for name in mine))
        has_baseline = any(name.variant == BASELINE for name in mine)
        options = Options(groups=rules, baseline=BASELINE if has_baseline else None)
        comparison = compare(list(mine.values()), [str(name) for name in mine], options)
        pairs.append(Pair(pair, comparison, mine))
    return pairs
