"""Rejection thresholds from evidence: the token dumps of a mismatching and of a zero-mismatch run of one recipe.

Every rule of verl_tim.correction that looks at trainer over rollout is tried over a range of thresholds on both runs.
Chosen is, among those that reject nothing of the zero-mismatch run and at most `max_share` of the mismatching run's
tokens, the one that leaves the least contribution skew. All figures of a candidate come from one half of the
mismatching run's prompts; of the chosen one they are given on the other half too, which had no part in the choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from verl_tim.correction import Band, RolloutCorrectionConfig, correct
from verl_tim.correction.rejection import verdicts
from verl_tim.correction.rules import rule_names, takes_band
from verl_tim.correction.tokens import prepare_tokens
from verl_tim.diagnosis.dumped import Dumped
from verl_tim.diagnosis.halves import CalibrationError, Half, enough, halves, part_of
from verl_tim.diagnosis.manifest import MANIFEST_NAME, Manifest
from verl_tim.diagnosis.own_file import MARK, mark

# Tokens that a threshold would reject, as shares: from a little below what is allowed to far above.
SHARES = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4)
TRUNCATION = 2.0
DIGITS = 3


def calibrated_rules() -> tuple[str, ...]:
    """Rules with a threshold on trainer over rollout; opsm looks at the current policy."""
    return tuple(name for name in rule_names() if name != "opsm")


@dataclass(frozen=True)
class Figures:
    """What one setting does to one set of sequences.

    Attributes:
        rejected: share of tokens; rejected_sequences: share of sequences that lose a token.
        skew: contribution skew of the tokens that are left.
        effective: effective sample size of the token weights (capped at `TRUNCATION`) on what is left, as a share of
            all tokens.
    """

    rejected: float
    rejected_sequences: float
    skew: float | None
    effective: float


@dataclass(frozen=True)
class Candidate:
    """One rule with one threshold: x stands for the band [exp(-x), exp(x)] where the rule takes one."""

    rule: str
    x: float
    mismatch: Figures
    exact_rejected: float
    admitted: bool

    @property
    def threshold(self) -> float | list[float]:
        return threshold_of(self.rule, self.x)


@dataclass(frozen=True)
class Calibration:
    """Every candidate, and the chosen one; `chosen` is None where none leaves less skew than rejecting nothing.

    Attributes:
        none: figures of the mismatching run without rejection; skew_error: the standard error of its skew.
        held_out, held_out_none: of the chosen candidate and without rejection, on the half that had no part in the
            choice.
        exact_sequences, exact_tokens: looked at in the zero-mismatch run; rejecting none of n sequences bounds the
            true share below 3 / n with 95 % confidence.
    """

    mismatch_run: Path
    exact_run: Path
    max_share: float
    none: Figures
    candidates: list[Candidate]
    chosen: Candidate | None
    held_out: Figures | None
    held_out_none: Figures
    skew_error: float | None
    mismatch_sequences: int
    mismatch_tokens: int
    exact_sequences: int
    exact_tokens: int
    notes: list[str] = field(default_factory=list)

    @property
    def confirmed(self) -> bool:
        """Whether the chosen threshold leaves less skew on the held-out half too, where chance had no say."""
        if self.held_out is None or self.held_out.skew is None or self.held_out_none.skew is None:
            return False
        return abs(self.held_out.skew) < abs(self.held_out_none.skew)

    def best_per_rule(self) -> list[Candidate]:
        """Of each rule the admitted threshold that rejects something and leaves the least |skew|; best first."""
        return [by_rule[0] for by_rule in _ranked(self.candidates).values()]

    def criterion(self) -> str:
        """In words."""
        return (
            f"rejects nothing of the zero-mismatch run and at most {100 * self.max_share:g} % of the mismatching run's "
            "tokens; of these, the least |contribution skew|"
        )

    def to_dict(self) -> dict[str, Any]:
        """`calibrate.json`."""
        content = asdict(self)
        for entry, candidate in zip(content["candidates"], self.candidates, strict=True):
            entry["threshold"] = candidate.threshold
        if self.chosen is not None:
            content["chosen"]["threshold"] = self.chosen.threshold
        content |= {"mismatch_run": str(self.mismatch_run), "exact_run": str(self.exact_run)}
        return {**mark("calibrate"), "criterion": self.criterion(), "confirmed": self.confirmed, **content}

    def config(self, *, weights: bool) -> RolloutCorrectionConfig:
        """The chosen rule as a correction, with token weights capped at `TRUNCATION` or without weights."""
        if self.chosen is None:
            raise CalibrationError(
                f"no threshold within {100 * self.max_share:g} % leaves less skew than rejecting nothing "
                f"({self.none.skew}): nothing to write. Allow more with --max-share, or use correction=token_tis"
            )
        if not self.confirmed:
            raise CalibrationError(
                f"{self.chosen.rule} at {self.chosen.threshold} leaves no less skew on the half that had no part in "
                f"the choice ({_number(self.held_out_none.skew)} without rejection, "
                f"{_number(self.held_out.skew if self.held_out else None)} with it): what it gained was chance. Dump "
                "more steps, or use correction=token_tis"
            )
        return _config(self.chosen.rule, self.chosen.threshold, weights=weights)

    def write_yaml(self, folder: Path, name: str, *, weights: bool) -> Path:
        """Write `<folder>/correction/<name>.yaml`, an option of the config group `correction`."""
        config = self.config(weights=weights)
        assert self.chosen is not None
        assert self.held_out is not None
        seen, checked = self.chosen.mismatch, self.held_out
        comment = [
            "@package _global_",
            f"{MARK} calibrate",
            f"{self.chosen.rule} from token dumps: {self.criterion()}.",
            f"Rejected: 0 of {self.exact_tokens:,} zero-mismatch tokens, {seen.rejected:.3%} of the mismatching run's "
            f"(held out: {checked.rejected:.3%}).",
            f"Skew left: {_number(seen.skew)} (held out: {_number(checked.skew)}); without rejection "
            f"{_number(self.none.skew)} (held out: {_number(self.held_out_none.skew)}).",
            "For this model, task and pair of backends alone.",
            *self.notes,
        ]
        content = {
            "tim": {"choices": {"correction": name}},
            "algorithm": {"rollout_correction": config.to_mapping()},
        }
        path = folder / "correction" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(f"# {line}\n" for line in comment) + yaml.safe_dump(content, sort_keys=False), encoding="utf-8"
        )
        return path


def threshold_of(rule: str, x: float) -> float | list[float]:
    """What `rollout_rs_threshold` takes for it."""
    return [math.exp(-x), math.exp(x)] if takes_band(rule) else x


def _config(rule: str | None, threshold: Any, *, weights: bool) -> RolloutCorrectionConfig:
    mapping: dict[str, Any] = {"rollout_rs_signal": "r_corr"}
    if rule is not None:
        mapping |= {"rollout_rs": rule, "rollout_rs_threshold": threshold}
    if weights:
        mapping |= {"rollout_is": "token", "rollout_is_threshold": TRUNCATION}
    return RolloutCorrectionConfig.from_mapping(mapping)


def calibrate(
    mismatch_run: str | Path,
    exact_run: str | Path,
    *,
    max_share: float = 0.01,
    rules: Sequence[str] | None = None,
    steps: Sequence[int] | None = None,
) -> Calibration:
    """Try rules and thresholds on both runs and choose.

    Args:
        mismatch_run, exact_run: run folders with token dumps.
        max_share: of the mismatching run's tokens that may be rejected, in (0, 1).
        rules: of `calibrated_rules`; None: all of them.
        steps: dumped steps to read; None: all.
    Raises:
        CalibrationError: a share or rule that is none, too little data, log-probs that were not recorded, runs of
            different models, or runs in the other order.
        TokenDumpError: no dumps, or damaged ones.
        ManifestError: a broken manifest.
    """
    if not 0 < max_share < 1:
        raise CalibrationError(f"is {max_share}", "give a share between 0 and 1, for example 0.01", key="--max-share")
    known = calibrated_rules()
    rules = known if rules is None else rules
    unknown = [rule for rule in rules if rule not in known]
    if unknown or not rules:
        problem = f"there is no rule {unknown[0]!r} to calibrate" if unknown else "no rule was asked for"
        raise CalibrationError(problem, f"choose among {', '.join(known)}", key="--rule")
    notes = _one_setup(Path(mismatch_run), Path(exact_run))
    mismatch, exact = Dumped.read(mismatch_run, steps), Dumped.read(exact_run, steps)
    fit, check = halves(mismatch)
    reference = part_of(exact, np.ones(exact.sequences, bool))
    enough(fit, check, reference, max_share, mismatch.path, exact.path)
    largest = {run.path: float(run.tokens["delta"].abs().max()) for run in (mismatch, exact)}
    if largest[exact.path] > largest[mismatch.path]:
        raise CalibrationError(
            f"the largest |d| of {exact.path} ({largest[exact.path]:.3g}) is above that of {mismatch.path} "
            f"({largest[mismatch.path]:.3g})",
            "give the mismatching run first and the zero-mismatch run second",
        )
    if largest[mismatch.path] == 0:
        raise CalibrationError(
            f"{mismatch.path} has no mismatch at all: there is nothing to choose a threshold from",
            "give a run that mismatches first; this one needs no correction",
        )
    if largest[exact.path] > 0:
        notes.append(f"{exact.path.name} is not exact: |d| up to {largest[exact.path]:.3g} nats.")

    none, error = figures(fit, None, None), fit.skew_error()
    if none.skew is not None and (error is None or abs(none.skew) < 2 * error):
        size = "unknown" if error is None else f"{error:.2g}"
        notes.append(
            f"The skew without rejection, {none.skew:.2g}, is within twice its standard error ({size}): no skew is "
            "seen in this much data, and the choice among rules rests on chance. Dump more steps."
        )
    candidates = []
    for rule in rules:
        for x in thresholds(rule, fit):
            threshold = threshold_of(rule, x)
            seen, lost = figures(fit, rule, threshold), figures(reference, rule, threshold, sizes=False).rejected
            admitted = lost == 0 and seen.rejected <= max_share and seen.skew is not None
            candidates.append(Candidate(rule, x, seen, lost, admitted))
    chosen = choose(candidates, none)
    return Calibration(
        mismatch_run=mismatch.path,
        exact_run=exact.path,
        max_share=max_share,
        none=none,
        candidates=candidates,
        chosen=chosen,
        held_out=figures(check, chosen.rule, chosen.threshold) if chosen else None,
        held_out_none=figures(check, None, None),
        skew_error=error,
        mismatch_sequences=fit.sequences + check.sequences,
        mismatch_tokens=fit.tokens + check.tokens,
        exact_sequences=reference.sequences,
        exact_tokens=reference.tokens,
        notes=notes,
    )


def _one_setup(mismatch_run: Path, exact_run: Path) -> list[str]:
    """Notes on what the manifests say of the two runs.

    Raises:
        CalibrationError: their models differ, so that what one rejects says nothing of the other.
    """
    manifests = {path: Manifest.read(path) for path in (mismatch_run, exact_run) if (path / MANIFEST_NAME).is_file()}
    unknown = [path.name for path in (mismatch_run, exact_run) if path not in manifests]
    if unknown:
        return [f"No manifest in {', '.join(unknown)}: whether both runs have one model is not known."]
    one, other = (
        {"architecture": m.trainer.facts.model.get("architecture"), "parameters": m.parameters, "task": m.run.task}
        for m in manifests.values()
    )
    differing = [f"{key} {one[key]!r} and {other[key]!r}" for key in one if one[key] != other[key]]
    if any(one[key] != other[key] for key in ("architecture", "parameters")):
        raise CalibrationError(
            f"{mismatch_run} and {exact_run} are runs of different models ({', '.join(differing)})",
            "give two runs of one recipe that differ in the rollout",
        )
    return [f"The runs differ in more than the rollout: {', '.join(differing)}."] if differing else []


def choose(candidates: Sequence[Candidate], none: Figures) -> Candidate | None:
    """The admitted candidate with the least |skew|, if that is less than without rejection; of equals the one that
    rejects less."""
    best = next((by_rule[0] for by_rule in _ranked(candidates).values()), None)
    if best is None or none.skew is None or abs(best.mismatch.skew or 0.0) >= abs(none.skew):
        return None
    return best


def _ranked(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Admitted candidates that reject something by rule, the least |skew| first, rules in the order of their best."""
    admitted = [c for c in candidates if c.admitted and c.mismatch.rejected > 0]
    by_rule: dict[str, list[Candidate]] = {}
    for candidate in sorted(admitted, key=lambda c: (abs(c.mismatch.skew or 0.0), c.mismatch.rejected)):
        by_rule.setdefault(candidate.rule, []).append(candidate)
    return by_rule


def thresholds(rule: str, half: Half) -> list[float]:
    """Values of the rule's statistic (of |-log r| for a band) beyond which `SHARES` of the tokens or sequences lie,
    rounded to what is written and ascending. Without repeats and zeros."""
    config = _config(rule, threshold_of(rule, 1.0), weights=False)
    tokens = prepare_tokens(
        config,
        response_mask=half.mask,
        old_log_probs=half.old,
        rollout_log_probs=half.rollout,
        log_prob=None,
        advantages=None,
        old_forward_log_probs=None,
    )
    (verdict,) = verdicts(config, tokens)
    statistic = verdict.statistic[verdict.counted].double()
    if isinstance(verdict.rule.bound, Band):
        statistic = statistic.abs()
    quantiles = np.quantile(statistic.numpy(), [1 - share for share in SHARES])
    return sorted({float(f"{value:.{DIGITS}g}") for value in quantiles} - {0.0})


def figures(half: Half, rule: str | None, threshold: Any, *, sizes: bool = True) -> Figures:
    """What a rule does to a set of sequences, by verl_tim.correction.

    Args:
        sizes: also skew and effective size.
    """
    inputs = {"old_log_probs": half.old, "rollout_log_probs": half.rollout}
    config = _config(rule, threshold, weights=False)
    result = correct(config, response_mask=half.mask, **inputs)
    kept = result.mask & half.mask
    lost_R = (half.mask & ~kept).any(dim=-1)
    rejected = 1 - int(kept.sum()) / half.tokens
    if not sizes:
        return Figures(rejected, float(lost_R.double().mean()), None, 1 - rejected)
    weighted = correct(_config(None, None, weights=True), response_mask=kept, **inputs)
    effective = weighted.metrics.get("rollout_corr/rollout_is_eff_sample_size", 0.0) * (1 - rejected)
    return Figures(rejected, float(lost_R.double().mean()), half.skew(kept), effective)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def write_json(calibration: Calibration, path: Path) -> None:
    """`calibrate.json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(calibration.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
