"""The report as one HTML file."""

from __future__ import annotations

from verl_tim.diagnosis.charts import heat_map, histogram, layer_bars
from verl_tim.diagnosis.figures import build_sections
from verl_tim.diagnosis.formats import one_line
from verl_tim.diagnosis.html import figure_data, render
from verl_tim.diagnosis.page import clocks, manifest_rows, metric_groups, run_card, sample_rows
from verl_tim.diagnosis.report import Report


def render_report(report: Report) -> str:
    """HTML of a report."""
    comparison = report.comparison
    sections = build_sections(comparison.groups)
    drawings = []
    if len(report.known):
        size_N = report.known["delta"].abs().to_numpy()
        place_N, length_N = (report.known[name].to_numpy("int64") for name in ("place", "length"))
        drawings = [heat_map(place_N, length_N, size_N), histogram(size_N)]
    if report.flips:
        drawings.append(layer_bars(report.flips))
    return render(
        "report.html.j2",
        filters={"one_line": one_line},
        report=report,
        comparison=comparison,
        runs=comparison.runs,
        groups=comparison.groups,
        group_of=[0],
        card=run_card(comparison.units[0]),
        sections=sections,
        token_drawings=drawings,
        corrections=_corrections(report),
        samples=sample_rows(comparison.runs),
        manifest_rows=manifest_rows(comparison.runs),
        metric_groups=metric_groups(comparison.runs),
        data=figure_data([*(d for section in sections for d in section.drawings), *drawings], clocks(comparison)),
    )


def _corrections(report: Report) -> list[tuple[str, float, float]]:
    """(metric, mean, last) of what the correction logged, over the run."""
    log = report.comparison.runs[0].log
    wanted = (
        *("rollout_is_mean", "rollout_is_max", "rollout_is_eff_sample_size", "rollout_is_ratio_fraction_high"),
        *("rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction", "empty_step"),
    )
    rows = []
    for name in wanted:
        values = log.series(f"rollout_corr/{name}")[1]
        if values:
            rows.append((f"rollout_corr/{name}", sum(values) / len(values), values[-1]))
    return rows
