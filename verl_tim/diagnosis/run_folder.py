"""One folder per run: `config.yaml` (resolved), `manifest.json`, `metrics.jsonl`, `samples.jsonl`.

`metrics.jsonl` is what verl's `file` logger writes: a line `{"step": n, "data": {name: value}}` per logged step
(verl 0.9.1, utils/tracking.py, FileLogger).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl_tim import broken_yaml
from verl_tim.diagnosis.manifest import MANIFEST_NAME, Manifest, flatten
from verl_tim.diagnosis.metric_log import MetricLog, Record, RunFolderError, read_json_lines, read_metrics_file
from verl_tim.diagnosis.process import DETERMINISM_VARIABLES
from verl_tim.diagnosis.trackers import (
    TRACKER_KEYS,
    read_tensorboard_metrics,
    read_wandb_metrics,
    tensorboard_folder,
    wandb_file,
)
from verl_tim.home import expanded

CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.jsonl"
SAMPLES_NAME = "samples.jsonl"
LOG_NAME = "train.log"  # what verl and Ray printed
ATTEMPTS_NAME = "attempts.jsonl"  # a line for each start of `verl-tim train`, written when it has ended
RUN_FILES = (CONFIG_NAME, MANIFEST_NAME, METRICS_NAME, SAMPLES_NAME)

# What a resumed run writes anew; the files of earlier attempts are kept under a number.
ATTEMPT_FILES = (CONFIG_NAME, MANIFEST_NAME, METRICS_NAME, SAMPLES_NAME, LOG_NAME)

# Keys that a resumed run may change and still be the same run, beside those of its trackers (TRACKER_KEYS).
RESUMABLE_KEYS = frozenset(
    {
        "trainer.resume_mode",
        "trainer.resume_from_path",
        "trainer.total_training_steps",
        "trainer.total_epochs",
        "trainer.val_before_train",
        "trainer.test_freq",
        "trainer.save_freq",
        "trainer.max_actor_ckpt_to_keep",
        "trainer.max_critic_ckpt_to_keep",
        "tim.restarts.limit",
        "tim.restarts.wait",
        "ray_kwargs.ray_init.address",
    }
)
# Where and how it is started, beside them: the scheduler's settings, and variables of a shell that decide no number.
_START_KEYS = re.compile(r"tim\.launch\..* | ray_kwargs\.ray_init\.runtime_env\.env_vars\.(?P<variable>.*)", re.VERBOSE)


def is_resumable(key: str) -> bool:
    """Whether a resumed run may have another value there and still be the same run."""
    start = _START_KEYS.fullmatch(key)
    if start is not None:
        return start["variable"] not in DETERMINISM_VARIABLES
    return key in RESUMABLE_KEYS or TRACKER_KEYS.fullmatch(key) is not None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt with the model's response, as a line of `samples.jsonl`.

    Attributes:
        step: training step; 0 is before training.
        prompt, response: text.
        reward: the verifier's score.
        uid: names the problem (data set index, say), so that runs can be set side by side; prompts are matched without
            it.
        split: "train" or "validation".
        ground_truth: the expected answer, if the task has one.
        extra: anything else.
    """

    step: int
    prompt: str
    response: str
    reward: float | None = None
    uid: str | None = None
    split: str = "train"
    ground_truth: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def read_jsonl_metrics(folder: Path) -> MetricLog | None:
    """The log from `metrics.jsonl` and its earlier parts `metrics.1.jsonl`, ...; None when there is none.

    A resumed run does the steps after its checkpoint again, so what an earlier part says of later steps than the first
    of a later part is of a past that did not come to be, and is left out.
    """
    paths = parts(folder, METRICS_NAME)
    if not paths:
        return None
    records: list[Record] = []
    torn = False
    for path in paths:
        part, torn = read_metrics_file(path)
        first = min((record.step for record in part), default=None)
        # a step that both have is merged: validation before the first step bears the checkpoint's number
        records = [record for record in records if first is None or record.step <= first] + part
    return MetricLog.merged(records, torn)


# Where a folder's metrics may come from, in order of preference. A reader returns None when the folder has nothing for
# it.
METRIC_READERS: list[Callable[[Path], MetricLog | None]] = [
    read_jsonl_metrics,
    read_tensorboard_metrics,
    read_wandb_metrics,
]


class RunFolder:
    """Reader of a run folder; `create` makes one."""

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            RunFolderError: no such folder, or one that holds no run.
        """
        self.path = expanded(path).absolute()
        if not self.path.is_dir():
            what = "is a file, not a folder" if self.path.exists() else "does not exist"
            raise RunFolderError(f"run folder {self.path} {what}")
        if not (holds_run(self.path) or tensorboard_folder(self.path) or wandb_file(self.path)):
            # verl's `file` logger calls its file by project and experiment
            lines = [str(path.relative_to(self.path)) for path in sorted(self.path.rglob("*.jsonl"))[:3]]
            raise RunFolderError(
                f"{self.path} holds no run (none of {', '.join(RUN_FILES)}, no TensorBoard events, no .wandb file)",
                f"give the file itself, if it is one of metrics: {', '.join(lines)}" if lines else "",
            )

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], *, resume: bool = False) -> RunFolder:
        """Claim a folder for a run and write its resolved config.

        Args:
            path: `tim.run_dir`. Other files in it (Hydra's log, checkpoints) are left alone.
            config: resolved, plain (mappings, lists, scalars).
            resume: the run continues what the folder holds. Its config must then be the folder's, up to
                `RESUMABLE_KEYS`; earlier `ATTEMPT_FILES` are kept under a number (verl's file logger truncates).

        Raises:
            RunFolderError: the folder holds another run; names the key and the remedy.
        """
        path = expanded(path).absolute()
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"tim.run_dir={path} is a file", "give a folder that does not exist yet")
        path.mkdir(parents=True, exist_ok=True)
        plain = json.loads(json.dumps(config, default=str))
        if holds_run(path):
            if not resume:
                raise RunFolderError(
                    f"tim.run_dir={path} already holds a run ({describe_run(path)})",
                    "choose another tim.run_dir, or delete that folder if the run is not needed",
                )
            _check_same_run(path, plain)
            _set_aside(path)
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
        try:
            # Exclusive: of two runs started at once on one folder, one gets it.
            with open(path / CONFIG_NAME, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise RunFolderError(
                f"tim.run_dir={path} was taken by another run just now", "choose another tim.run_dir"
            ) from error
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.name

    def config(self) -> dict[str, Any] | None:
        """The resolved config, or None if the folder has none.

        Raises:
            RunFolderError: not readable as a YAML mapping in UTF-8.
        """
        file = self.path / CONFIG_NAME
        if not file.exists():
            return None
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            problem, remedy = broken_yaml.explain(error, file)
            raise RunFolderError(f"{file} is not YAML: {problem}", remedy) from error
        if not isinstance(content, dict):
            raise RunFolderError(f"{file} must hold a mapping, got {type(content).__name__}")
        return content

    def manifest(self) -> Manifest | None:
        """The manifest, or None if the folder has none (the run ended before its processes could be asked)."""
        file = self.path / MANIFEST_NAME
        return Manifest.read(file) if file.exists() else None

    def metrics(self) -> MetricLog:
        """The logged metrics.

        Raises:
            RunFolderError: none logged, or a corrupt file.
        """
        for read in METRIC_READERS:
            log = read(self.path)
            if log is not None:
                return log
        raise RunFolderError(
            f"{self.path} has no {METRICS_NAME}: the run logged nothing",
            f"trainer.logger must list 'file' and VERL_FILE_LOGGER_PATH must be {self.path / METRICS_NAME} "
            "(ray_kwargs.ray_init.runtime_env.env_vars)",
        )

    def samples(self) -> list[Sample]:
        """Samples in the order written, of each step those of the last attempt that did it; empty if none were kept.

        A torn last line is left out.

        Raises:
            RunFolderError: a corrupt line, or one without step, prompt and response.
        """
        samples: list[Sample] = []
        for file in parts(self.path, SAMPLES_NAME):
            part = _read_samples(file)
            first = min((sample.step for sample in part), default=None)
            # as of metrics; a step has all its samples from one attempt
            samples = [sample for sample in samples if first is None or sample.step < first] + part
        return samples

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Append samples, one line each, in one write."""
        lines = "".join(json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
        with open(self.path / SAMPLES_NAME, "a", encoding="utf-8") as file:
            file.write(lines)


def _read_samples(file: Path) -> list[Sample]:
    known = {f.name for f in dataclasses.fields(Sample)} - {"extra"}
    samples = []
    for number, entry in read_json_lines(file)[0]:
        missing = [key for key in ("step", "prompt", "response") if key not in entry]
        if missing:
            raise RunFolderError(f"{file}:{number} lacks {', '.join(missing)}")
        kinds = {"step": int, "prompt": str, "response": str, "extra": dict}
        wrong = [key for key, kind in kinds.items() if key in entry and not isinstance(entry[key], kind)]
        if wrong:
            raise RunFolderError(f"{file}:{number}: {wrong[0]} must be of type {kinds[wrong[0]].__name__}")
        own = {key: value for key, value in entry.items() if key in known}
        extra = {key: value for key, value in entry.items() if key not in known and key != "extra"}
        samples.append(Sample(**own, extra={**entry.get("extra", {}), **extra}))
    return samples


def attempt_number(path: str | Path) -> int:
    """Which start in this folder the present one is, from 1."""
    folder = Path(path)
    return 1 + max(_part_numbers(folder), default=0) if folder.is_dir() else 1


def holds_run(path: Path) -> bool:
    """Does the folder hold any of a run's files?"""
    return any((path / name).exists() for name in RUN_FILES)


@dataclass(frozen=True)
class Progress:
    """How far the run in a folder has come.

    Attributes:
        last: the last step that it logged to the file; None: none.
        total: its last step, by its own config.yaml; None: not said there.
        exit_code: of its last start; None where nobody wrote that down: it still runs, was killed, or is plain verl's.
    """

    last: int | None
    total: int | None
    exit_code: int | None

    @property
    def finished(self) -> bool:
        """All its steps are done. Where their number is not known, it ended well."""
        return self.exit_code == 0 if self.total is None else self.last is not None and self.last >= self.total

    def __str__(self) -> str:
        """`finished at step 12/12`, `stopped at step 3/12`; empty where no step was logged."""
        if self.last is None:
            return ""
        step = f"{self.last}" if self.total is None else f"{self.last}/{self.total}"
        # one that nobody saw end may run
        how = "finished at" if self.finished else "last" if self.exit_code is None else "stopped at"
        return f"{how} step {step}"


def progress_of(path: Path, config: Mapping[str, Any] | None = None) -> Progress:
    """How far the run in a folder has come, all its starts together.

    Args:
        config: the folder's, where it has been read already.

    Raises:
        RunFolderError: what the folder holds is damaged.
    """
    log = read_jsonl_metrics(path)
    trainer = ((RunFolder(path).config() if config is None else config) or {}).get("trainer")
    total = trainer.get("total_training_steps") if isinstance(trainer, dict) else None
    last = log.steps[-1] if log is not None and log.steps else None
    return Progress(last, total if isinstance(total, int) else None, _exit_code(path))


def attempts(path: Path) -> list[dict[str, Any]]:
    """What `verl-tim train` wrote of each start of the run in a folder that has ended; [] where there is no list.

    Raises:
        RunFolderError: a damaged list.
    """
    file = path / ATTEMPTS_NAME
    return [entry for _, entry in read_json_lines(file)[0]] if file.is_file() else []


def _exit_code(path: Path) -> int | None:
    try:
        entries = attempts(path)
    except RunFolderError:
        return None  # it says no more than a list that is not there
    # fewer than starts: the last one has not ended, or nobody saw it end
    code = entries[-1].get("exit_code") if len(entries) >= attempt_number(path) else None
    return code if isinstance(code, int) else None


def describe_run(path: Path) -> str:
    """A few words about the run in a folder, for messages; tolerant of whatever is broken in it."""
    words = [name for name in RUN_FILES if (path / name).exists()]
    with suppress(RunFolderError):
        words.append(str(progress_of(path)))
    return ", ".join(word for word in words if word)


def _earlier_parts(folder: Path, name: str) -> list[Path]:
    """`metrics.1.jsonl`, `metrics.2.jsonl`, ... in order."""
    stem, suffix = name.rsplit(".", 1)
    pattern = re.compile(rf"{re.escape(stem)}\.(\d+)\.{suffix}")
    parts = [(int(match.group(1)), path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(parts)]


def parts(folder: Path, name: str) -> list[Path]:
    """A file's earlier parts and the present one, those that are there."""
    return [*_earlier_parts(folder, name), *(path for path in (folder / name,) if path.exists())]


def _part_numbers(folder: Path) -> list[int]:
    return [int(part.name.split(".")[-2]) for name in ATTEMPT_FILES for part in _earlier_parts(folder, name)]


def kept_as(path: Path) -> dict[str, str]:
    """The files that a resumed run writes anew -> the numbered names under which the present ones are kept then."""
    number = attempt_number(path)
    parted = {name: name.rsplit(".", 1) for name in ATTEMPT_FILES if (path / name).exists()}
    return {name: f"{stem}.{number}.{suffix}" for name, (stem, suffix) in parted.items()}


def _set_aside(path: Path) -> None:
    for name, numbered in kept_as(path).items():
        os.replace(path / name, path / numbered)


def _check_same_run(path: Path, config: dict[str, Any]) -> None:
    if not (path / CONFIG_NAME).exists():
        raise RunFolderError(
            f"tim.run_dir={path} holds a run without {CONFIG_NAME} ({describe_run(path)}), so "
            "whether it is the same run cannot be checked",
            "choose another tim.run_dir",
        )
    before, now = flatten(RunFolder(path).config() or {}), flatten(config)
    changed = [key for key in _all_keys(before, now) if before.get(key) != now.get(key) and not is_resumable(key)]
    if changed:
        shown = "; ".join(f"{key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in changed[:5])
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise RunFolderError(
            f"tim.run_dir={path} holds a run with other settings ({describe_run(path)}); it differs in {shown}{more}",
            "choose another tim.run_dir, or resume with the config of that run",
        )


def _all_keys(*flats: Mapping[str, Any]) -> Iterator[str]:
    yield from dict.fromkeys(key for flat in flats for key in flat)
