"""The calibration as one HTML file: the curves it was chosen from, and every threshold."""

from __future__ import annotations

from typing import Any

from verl_tim.diagnosis.calibrate import TRUNCATION, Calibration
from verl_tim.diagnosis.charts import threshold_curves
from verl_tim.diagnosis.formats import short
from verl_tim.diagnosis.html import figure_data, render


def bound(threshold: Any) -> str:
    """A threshold as text: a number or a band."""
    return f"[{threshold[0]:.4g}, {threshold[1]:.4g}]" if isinstance(threshold, list) else short(threshold)


def render_calibration(calibration: Calibration) -> str:
    """HTML of a calibration."""
    rules = list(dict.fromkeys(candidate.rule for candidate in calibration.candidates))
    skews: dict[str, tuple[list[float], list[float]]] = {rule: ([], []) for rule in rules}
    sizes: dict[str, tuple[list[float], list[float]]] = {rule: ([], []) for rule in rules}
    for candidate in sorted(calibration.candidates, key=lambda each: each.mismatch.rejected):
        seen = candidate.mismatch
        if seen.rejected <= 0:  # has no place on a logarithmic axis
            continue
        for curves, value in ((skews, seen.skew), (sizes, seen.effective)):
            if value is not None:
                curves[candidate.rule][0].append(seen.rejected)
                curves[candidate.rule][1].append(value)
    drawings = [
        threshold_curves("skew", "Contribution skew left", "0 is unbiased.", skews, calibration.max_share),
        threshold_curves(
            "effective",
            "Effective sample size",
            "Of the weights on what is left, as a share of all tokens.",
            sizes,
            calibration.max_share,
        ),
    ]
    return render(
        "calibrate.html.j2",
        filters={"bound": bound},
        c=calibration,
        rules=rules,
        best=calibration.best_per_rule(),
        drawings=drawings,
        truncation=f"{TRUNCATION:g}",
        data=figure_data(drawings),
    )
