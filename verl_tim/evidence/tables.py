"""The tables of the page, as columns and rows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np

from verl_tim.diagnosis.band_words import STAYED, changed
from verl_tim.diagnosis.calibrate import Calibration, calibrate
from verl_tim.diagnosis.calibrate_page import bound
from verl_tim.diagnosis.drift import DriftError, Measured, forecast, pull_of
from verl_tim.diagnosis.dumped import Dumped
from verl_tim.diagnosis.early_warning import SIGNALS, Departure
from verl_tim.diagnosis.errors import DiagnosisError
from verl_tim.diagnosis.formats import percent, short
from verl_tim.diagnosis.groups import Group
from verl_tim.diagnosis.halves import CalibrationError, part_of
from verl_tim.diagnosis.metric_log import MetricLog
from verl_tim.diagnosis.run import Run
from verl_tim.diagnosis.speed import Speed, speed
from verl_tim.diagnosis.token_dump import TokenDumpError
from verl_tim.evidence.effect import effect_of
from verl_tim.evidence.names import BASELINE, MISMATCHING, MIXTURE
from verl_tim.evidence.runs import Evidence, Pair

NONE = "–"
# Corrections that need nothing but d and a threshold of their own, and whose weights, if any, are of tokens: what a
# sequence's weight does is not to be seen token by token. Each is tried on the same tokens.
CORRECTIONS = (
    "none",
    "token_tis",
    "icepop",
    "seq_reject_corr_k1",
    "seq_reject_corr_k3",
    "paper_tis_seq_k1",
    "paper_tis_seq_k3",
    "paper_tis_seq_sum",
)
BEST_RULES = 3


@dataclass(frozen=True)
class Table:
    """Columns, rows, and what has to be said of them; without rows, why there are none."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """As a page shows it."""
        lines = []
        if self.rows:
            head = (_escaped(self.columns), ("---",) * len(self.columns))
            lines = [f"| {' | '.join(row)} |" for row in (*head, *map(_escaped, self.rows))]
        return "\n".join([*lines, *([""] if lines and self.notes else []), *self.notes])


def _escaped(cells: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]


def first_to_leave(evidence: Evidence) -> Table:
    """At which step each signal leaves the zero-mismatch band."""
    rows, notes = [], []
    for pair in evidence.pairs:
        if pair.comparison.baseline is None:
            notes.append(_no_exact_run(pair))
            continue
        for variant in pair.variants:
            of = {d.signal: d for d in pair.comparison.warnings if d.run == variant}
            if of:
                rows.append((pair.name, variant, *(_when(of[signal.label]) for signal in SIGNALS)))
    for pair in evidence.pairs:
        if pair.comparison.baseline is not None:
            notes.append(f"Band of {pair.name}: {pair.comparison.band_text()}.")
    if any(d.sharp for pair in evidence.pairs for d in pair.comparison.warnings):
        notes.append(
            "A band without width, where the exact run is constant, is left at once; the step in parentheses is the "
            "first that leaves the run's own first steps, – if none does, too short if it has too few steps to say."
        )
    columns = ("runs", "variant", *(signal.label for signal in SIGNALS))
    return Table(columns, rows, notes)


def _when(d: Departure) -> str:
    if d.state != "left":
        return {STAYED: "stays"}.get(d.state, d.state)
    if not d.sharp:
        return str(d.step)
    own = changed(d)
    return f"{d.step} ({NONE if own == STAYED else own})"


def tail(evidence: Evidence) -> Table:
    """Share of tokens with a large |d|, its size, and flips of the likeliest token and of the router."""
    rows = []
    for pair, group in _groups(evidence):
        shares = [_weighted(group, f"tim/delta_gt_{limit}", "tim/valid_tokens") for limit in ("0.01", "0.1", "1")]
        tokens = sum(sum(log.series("tim/valid_tokens")[1]) for log in group.logs)
        largest = max((value for log in group.logs for value in log.series("tim/delta_abs_max")[1]), default=None)
        rows.append(
            (
                pair.name,
                group.name,
                f"{tokens:,.0f}",
                *(_share(value) for value in shares),
                short(_weighted(group, "tim/delta_abs_mean", "tim/valid_tokens")),
                short(_mean(group, "tim/delta_abs_p99")),
                short(largest),
                _share(_weighted(group, "tim/top1_flip_rate", "tim/top1_tokens")),
                _share(_weighted(group, "tim/router_flip_rate", "tim/router_compared")),
            )
        )
    columns = (
        *("runs", "variant", "tokens", "|d| > 0.01", "> 0.1", "> 1"),
        *("mean |d|", "p99 (mean of steps)", "largest", "top-1 flips", "router flips"),
    )
    notes = (
        ["Nats. Of all tokens of all steps and seeds; under bypass those of each step's first mini-batch."]
        if rows
        else []
    )
    if any(row[-1] == NONE and row[0].startswith(f"{MIXTURE}-") for row in rows):
        notes.append("Router flips need the routes of both sides; vLLM's come with tim.vllm_routes.")
    return Table(columns, rows, notes)


def lengths(evidence: Evidence) -> Table:
    """|d| by length of the response, from the token dumps."""
    rows, notes = [], []
    for pair in evidence.pairs:
        for variant in pair.variants:
            folder = pair.dumped(variant)
            if folder is None or variant == BASELINE:
                continue
            try:
                known = _known(folder)
            except TokenDumpError as error:
                notes.append(f"{pair.name} {variant}: {_problem(error, evidence)}.")
                continue
            if known is None:
                notes.append(f"{pair.name} {variant}: its dumps have no log-probs of the trainer (bypass).")
                continue
            size, length = known
            edges = np.unique(np.quantile(length, (0, 0.25, 0.5, 0.75, 1)).astype(int))
            # responses of one length are one row
            for low, high in pairwise(edges if len(edges) > 1 else np.repeat(edges, 2)):
                inside = (length >= low) & ((length < high) | (high == edges[-1]))
                if inside.any():
                    rows.append(
                        (
                            pair.name,
                            variant,
                            _range(low, high if high == edges[-1] else high - 1),
                            f"{int(inside.sum()):,}",
                            short(float(size[inside].mean())),
                            short(float(np.quantile(size[inside], 0.99))),
                        )
                    )
    return Table(("runs", "variant", "length, tokens", "dumped tokens", "mean |d|", "p99 |d|"), rows, notes)


def rejected(evidence: Evidence) -> Table:
    """What each correction does to the same tokens: share rejected, weights that the cap cuts, skew that is left."""
    rows, notes = [], []
    for pair in evidence.pairs:
        folder = pair.dumped(MISMATCHING)
        if folder is None:
            continue
        try:
            dumped = Dumped.read(folder)
            half = part_of(dumped, np.ones(dumped.sequences, bool))
        except (TokenDumpError, CalibrationError) as error:
            notes.append(f"{pair.name}: {_problem(error, evidence)}.")
            continue
        for name in CORRECTIONS:
            found = effect_of(name, half)
            rows.append(
                (
                    pair.name,
                    name,
                    _share(found.tokens),
                    _share(found.sequences),
                    _share(found.cut),
                    _skew(found.skew),
                    percent(found.effective),
                )
            )
        spread = half.skew_error()
        size = "not known" if spread is None else short(spread)
        notes.append(
            f"{pair.name}: {half.tokens:,} tokens of {half.sequences:,} dumped sequences of {folder.name}; standard "
            f"error of the skew without correction {size}."
        )
    if rows:
        notes.append(
            "Below the cap a weight is exp(d) itself and leaves no skew, whatever d is; what is left is rounding."
        )
    columns = (
        "runs",
        "correction",
        "tokens rejected",
        "sequences",
        "weights at the cap",
        "skew left",
        "effective size",
    )
    return Table(columns, rows, notes)


def rejected_in_training(evidence: Evidence) -> Table:
    """What the runs with a rejection rejected as they went."""
    rows = []
    for pair, group in _groups(evidence):
        share = _mean(group, "rollout_corr/rollout_rs_masked_fraction")
        if share is not None:
            signs = (_mean(group, f"tim/rejected_share_{sign}_adv") for sign in ("pos", "neg"))
            sequences = _mean(group, "rollout_corr/rollout_rs_seq_masked_fraction")
            rows.append((pair.name, group.name, _share(share), _share(sequences), *(_share(value) for value in signs)))
    columns = ("runs", "variant", "tokens rejected", "sequences", "of positive advantage", "of negative advantage")
    return Table(columns, rows, ["Means over steps and seeds."] if rows else ["No run logged a rejection."])


def thresholds(evidence: Evidence) -> Table:
    """The best thresholds that calibrate finds, and whether the held-out half agrees."""
    rows, notes = [], []
    for pair in evidence.pairs:
        mismatch, exact = pair.dumped(MISMATCHING), pair.dumped(BASELINE)
        if mismatch is None or exact is None:
            notes.append(f"{pair.name}: no token dumps of {MISMATCHING} and {BASELINE}.")
            continue
        try:
            found = calibrate(mismatch, exact)
        except (CalibrationError, TokenDumpError) as error:
            notes.append(f"{pair.name}: {_problem(error, evidence)}.")
            continue
        rows.append((pair.name, "no rejection", NONE, "0 %", short(found.none.skew), percent(found.none.effective)))
        for c in found.best_per_rule()[:BEST_RULES]:
            cells = (percent(c.mismatch.rejected), short(c.mismatch.skew), percent(c.mismatch.effective))
            rows.append((pair.name, c.rule, bound(c.threshold), *cells))
        confirmed = "no threshold leaves less skew than none"
        if found.chosen is not None and found.held_out is not None:
            confirmed = (
                f"{found.chosen.rule} leaves {short(found.held_out.skew)} of {short(found.held_out_none.skew)} on the "
                f"half that had no part in the choice: {'confirmed' if found.confirmed else 'chance'}"
            )
        notes.append(f"{pair.name}: {confirmed}. {_against_error(found)}")
    columns = ("runs", "rule", "threshold", "tokens rejected", "skew left", "effective size")
    return Table(columns, rows, notes)


def _against_error(found: Calibration) -> str:
    """What the skew without rejection is worth, in words."""
    if found.skew_error is None or found.none.skew is None:
        return "How much of the skew is chance is not known: some of its blocks of sequences have one sign only."
    error = f"Standard error of the skew: {short(found.skew_error)}"
    if abs(found.none.skew) <= 2 * found.skew_error:
        return f"{error}; the skew is within two of it, so there is none to be told that a threshold could take away."
    return f"{error}."


_SPEED_COLUMNS = (
    *("runs", "variant", "step, s", "tokens drawn/s", "tokens of the batch/s"),
    *("rollout, s", "old log-probs, s", "update, s", "weight sync, s"),
)


def speeds(evidence: Evidence) -> Table:
    """Time of a step and throughput, of runs that had the machine to themselves."""
    if not evidence.alone_pairs:
        return Table(_SPEED_COLUMNS, [], ["No run that had the machine to itself: --alone FOLDER."])
    return _speeds(
        evidence.alone_pairs, "Of short runs, each alone on the machine; without the first step, which compiles."
    )


def speeds_side_by_side(evidence: Evidence) -> Table:
    """The same of the runs of the page, as they ran."""
    return _speeds(
        evidence.pairs,
        "Of the runs above, which may have shared the GPU and the CPUs with others: they say what those runs took, "
        "not how fast a rollout is. Without the first step, which compiles.",
    )


def _speeds(pairs: Sequence[Pair], note: str) -> Table:
    rows = []
    for pair in pairs:
        for group in pair.comparison.groups:
            each = [speed(_without_first(log)) for log in group.logs]
            rows.append(
                (
                    pair.name,
                    group.name,
                    *(
                        short(_over(each, name))
                        for name in ("step_seconds", "generated_per_second", "tokens_per_second")
                    ),
                    *(
                        short(_stage(each, stage))
                        for stage in ("rollout", "old log-probs", "actor update", "weight sync")
                    ),
                )
            )
    notes = [note]
    looks = sorted({look for pair in pairs for run in pair.comparison.runs if (look := _seconds_between_looks(run))})
    if looks:
        seconds = " or ".join(short(look) for look in looks)
        notes.append(
            f"The trainer looks every {seconds} s for answers that are complete (`tim.poll_interval`): times of a "
            "rollout come in steps of that, and a step has half of one more than it needs."
        )
    return Table(_SPEED_COLUMNS, rows, notes)


def forecasts(evidence: Evidence) -> Table:
    """Whether the rewards part, and where one would expect it if not."""
    rows, notes, told = [], [], []
    for pair in evidence.pairs:
        baseline = pair.group(BASELINE)
        if baseline is None:
            notes.append(_no_exact_run(pair))
            continue
        try:
            pull = _pull(pair)
        except (DriftError, TokenDumpError) as error:
            notes.append(f"{pair.name}: the pull of the advantages is not known: {_problem(error, evidence)}.")
            continue
        length = _mean(baseline, "response_length/mean")
        for group in pair.comparison.groups:
            if group is baseline:
                continue
            try:
                seeds = pair.same_seed(group, baseline)
                f = forecast(group, baseline, pull=pull, rule=pair.comparison.options.band, same_seed=seeds)
            except DriftError as error:
                notes.append(f"{pair.name}: {_problem(error, evidence)}.")
                continue
            if f.gap.seen:
                told.append(f"{pair.name} {group.name}")
            if not seeds:
                notes.append(
                    f"{pair.name}: {group.name} has no seed that {BASELINE} has: the means of all are compared, and ± "
                    "has in it what sets seeds apart."
                )
            elif len(seeds) < len(group.logs):
                notes.append(
                    f"{pair.name}: of {len(group.logs)} seeds of {group.name} {len(seeds)} are compared, those that "
                    f"{BASELINE} has."
                )
            times = tokens = NONE
            if math.isfinite(f.factor):
                times = f"{short(f.factor)} ×"
                tokens = NONE if length is None else f"{f.response_length(length):,.0f}"
            rows.append(
                (
                    pair.name,
                    group.name,
                    "yes" if f.parted else "no",
                    _interval(f.gap),
                    str(f.paired) if f.paired else "means",
                    f"±{short(f.band)}",
                    _interval(f.skew),
                    _share(f.share.most),
                    _steps(f.by_reward, f.earliest_by_reward),
                    _steps(f.by_skew, f.earliest_by_skew),
                    times,
                    tokens,
                )
            )
    columns = (
        *(
            "runs",
            "variant",
            "parted",
            "reward's gap at the end",
            "seeds",
            "its band",
            "skew",
            "share of the pull, at most",
        ),
        *("parts at step, by the reward", "by the skew", "or with a skew of", "or at a length of"),
    )
    if rows:
        notes.append(f"Gaps that are told from 0: {', '.join(told) or 'none'}.")
    # a baseline of one seed says the same of every variant
    return Table(columns, rows, list(dict.fromkeys(notes)))


def _groups(evidence: Evidence) -> Iterator[tuple[Pair, Group]]:
    for pair in evidence.pairs:
        for group in pair.comparison.groups:
            yield pair, group


def _mean(group: Group, metric: str) -> float | None:
    values = [value for log in group.logs for value in log.series(metric)[1]]
    return fmean(values) if values else None


def _weighted(group: Group, metric: str, weight: str) -> float | None:
    """Mean of a share over steps and seeds, each step by what it counted."""
    total = count = 0.0
    for log in group.logs:
        weights = dict(zip(*log.series(weight), strict=True))
        for step, value in zip(*log.series(metric), strict=True):
            total, count = total + value * weights.get(step, 0.0), count + weights.get(step, 0.0)
    return total / count if count else None


def _share(value: float | None) -> str:
    """A share whose small values matter: 0.0023 %."""
    if value is None or value in (0, 1) or value >= 1e-3:
        return percent(value)
    return f"{short(100 * value)} %"


def _skew(value: float | None) -> str:
    # weights are fp32
    return "< 10⁻⁷" if value is not None and 0 < abs(value) < 1e-7 else short(value)


def _known(folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """(|d|, length of its response) of the dumped tokens with both log-probs."""
    tokens = Dumped.read(folder).tokens
    known = tokens[tokens["delta"].notna()]
    if known.empty:
        return None
    return known["delta"].abs().to_numpy(), known["length"].to_numpy()


def _pull(pair: Pair) -> float:
    folder = pair.dumped(BASELINE) or pair.dumped(MISMATCHING)
    if folder is None:
        raise DriftError("no token dumps")
    try:
        return pull_of(Dumped.read(folder).tokens["advantage"].to_numpy(dtype=float))
    except DriftError as error:
        raise DriftError(f"{folder.name}: {error.problem}", error.remedy) from error


def _no_exact_run(pair: Pair) -> str:
    return f"{pair.name}: no exact run, so there is no band."


def _over(each: Sequence[Speed], name: str) -> float | None:
    values = [value for one in each if (value := getattr(one, name)) is not None]
    return fmean(values) if values else None


def _seconds_between_looks(run: Run) -> float | None:
    return ((run.config or {}).get("tim") or {}).get("poll_interval")


def _stage(each: Sequence[Speed], stage: str) -> float | None:
    values = [one.stage_seconds[stage] for one in each if stage in one.stage_seconds]
    return fmean(values) if values else None


def _without_first(log: MetricLog) -> MetricLog:
    first = min((record.step for record in log.records if "timing_s/step" in record.data), default=None)
    return MetricLog([record for record in log.records if record.step != first], log.torn)


def _interval(measured: Measured) -> str:
    if not measured.freedom:
        return f"{short(measured.value)} (one seed)"
    return f"{short(measured.value)} ± {short(measured.half_width)}"


def _steps(expected: float | None, earliest: float) -> str:
    early = "never" if not math.isfinite(earliest) else f"{earliest:,.0f}"
    return f"not before {early}" if expected is None else f"{expected:,.0f} (not before {early})"


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}–{high}"


def _problem(error: DiagnosisError, evidence: Evidence) -> str:
    """What is wrong with the runs, with paths from their folder on, whichever way that was given. The remedy is left
    out: it is of options and keys of the command that the error was made for, and the page has none."""
    text = error.problem
    for folder in (evidence.folder, evidence.folder.absolute()):
        text = text.replace(f"{folder}/", "")
    return text


TABLES: dict[str, Callable[[Evidence], Table]] = {
    "first": first_to_leave,
    "tail": tail,
    "length": lengths,
    "rejected": rejected,
    "rejected_in_training": rejected_in_training,
    "thresholds": thresholds,
    "speed": speeds,
    "speed_side_by_side": speeds_side_by_side,
    "forecast": forecasts,
}
