"""The comparison as one HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_tim.diagnosis.band_words import band_cells, band_notes, changed, left
from verl_tim.diagnosis.compare import NO_BASELINE, SUMMARY_STEPS, Comparison, summarise
from verl_tim.diagnosis.early_warning import SIGNALS, band_of
from verl_tim.diagnosis.figures import Overlay, build_sections
from verl_tim.diagnosis.formats import percent, short
from verl_tim.diagnosis.html import figure_data, render
from verl_tim.diagnosis.manifest import Difference, flatten
from verl_tim.diagnosis.run import Run
from verl_tim.diagnosis.run_folder import Sample
from verl_tim.diagnosis.speed import speed
from verl_tim.diagnosis.terms import meaning
from verl_tim.diagnosis.verdict import Exactness, exactness
from verl_tim.units import count

SAMPLE_STEPS = 3
SAMPLES_PER_STEP = 2


@dataclass(frozen=True)
class SampleRow:
    """One prompt at one step with each run's response; None where a run has none for it."""

    step: int
    prompt: str
    ground_truth: str | None
    responses: list[Sample | None]


def render_page(comparison: Comparison) -> str:
    """HTML of a comparison."""
    sections = build_sections(comparison.groups, overlay_of(comparison))
    return render(
        "compare.html.j2",
        comparison=comparison,
        runs=comparison.runs,
        groups=comparison.groups,
        units=comparison.units,
        group_of=[comparison.group_of(at) for at in range(len(comparison.runs))],
        cards=[run_card(unit) for unit in comparison.units],
        sections=sections,
        warnings=[
            {
                "group": next(at for at, g in enumerate(comparison.groups) if g.name == d.run),
                "departure": d,
                "left": left(d),
                "cells": band_cells(d),
                "changed": changed(d),
            }
            for d in comparison.warnings
        ],
        band_notes=band_notes(comparison.warnings, comparison.options.band),
        no_baseline=NO_BASELINE,
        stages=_stages(comparison),
        summary=comparison.summary(),
        summary_steps=SUMMARY_STEPS,
        meaning=meaning,
        terms=comparison.terms(),
        samples=sample_rows(comparison.runs),
        manifest_rows=manifest_rows(comparison.runs),
        metric_groups=metric_groups(comparison.runs),
        data=figure_data([drawing for section in sections for drawing in section.drawings], clocks(comparison)),
    )


def overlay_of(comparison: Comparison) -> Overlay:
    """The baseline's bands, where each signal leaves them, and the smoothing."""
    smoothing = comparison.options.smoothing
    baseline = comparison.baseline
    if baseline is None or len(comparison.groups) == 1:
        return Overlay(smoothing)
    place = {group.name: at for at, group in enumerate(comparison.groups)}
    departures: dict[str, list[tuple[int, int]]] = {}
    for d in comparison.warnings:
        step = d.changed if d.changed is not None else d.step
        if step is not None:
            departures.setdefault(d.metric, []).append((place[d.run], step))
    bands: dict[str, Any] = {}
    for signal in SIGNALS:
        band = band_of(baseline, signal.names, comparison.options.band)
        bands |= {name: band for name in signal.names if not band.empty}
    return Overlay(smoothing, place[baseline.name], bands, departures)


def clocks(comparison: Comparison) -> list[dict[int, float]] | None:
    """Per group, step -> training seconds so far (the mean of its seeds); None where a run logged no step time."""
    found = []
    for group in comparison.groups:
        times = [comparison.runs[at].seconds() for at in group.members]
        if not all(times):
            return None
        shared = set.intersection(*(set(each) for each in times))
        found.append({step: sum(each[step] for each in times) / len(times) for step in sorted(shared)})
    return found


def run_card(run: Run) -> dict[str, Any]:
    state, times = exactness(run.log), speed(run.log)
    facts = []
    for row in summarise([run]):
        first, last, _ = row.values[0]
        if row.label in ("reward", "validation") and last is not None:
            facts.append((f"{row.label}, first and last step", f"{short(first)} → {short(last)}"))
    if state.delta_max is not None:
        facts.append(("largest |d|", f"{short(state.delta_max)} nats"))
    if times.step_seconds is not None:
        facts.append(("median step time", f"{short(times.step_seconds)} s"))
    if times.tokens_per_second is not None:
        facts.append(("median tokens per second", short(times.tokens_per_second)))
    if times.rollout_share is not None:
        facts.append(("time in rollout", percent(times.rollout_share)))
    parameters = run.manifest.parameters if run.manifest else None
    return {
        "badge": _badge(state),
        "kind": state.kind,
        "facts": facts,
        "size": f"{count(parameters)} parameters" if parameters else None,
    }


def _badge(state: Exactness) -> str:
    if state.kind == "unmeasured":
        return "mismatch not measured"
    if state.kind == "exact":
        return "exact, bit for bit" if state.bits else "|d| = 0"
    if state.exact_fraction is not None:
        return f"{percent(1 - state.exact_fraction)} of tokens differ"
    return "log-probs differ"


def _stages(comparison: Comparison) -> dict[str, Any] | None:
    """Mean seconds per step and stage; None when no run logged stages."""
    speeds = [speed(unit.log) for unit in comparison.units]
    names = list(dict.fromkeys(name for each in speeds for name in each.stage_seconds))
    if not names:
        return None
    names = [name for name in names if name != "other"] + ["other"] * ("other" in names)
    totals = [sum(each.stage_seconds.values()) for each in speeds]
    largest = max(totals)
    shown = [name for name in names if any(s.stage_seconds.get(name, 0) > 0.004 * largest for s in speeds)]
    return {
        "names": shown,
        "bars": [
            {
                "run": at,
                "total": total,
                "parts": [
                    {
                        "stage": shown.index(name),
                        "name": name,
                        "seconds": seconds,
                        "width": 100 * seconds / largest,
                        "share": seconds / total,
                    }
                    for name in shown
                    if (seconds := each.stage_seconds.get(name, 0.0)) > 0
                ],
            }
            for at, (each, total) in enumerate(zip(speeds, totals, strict=True))
            if total > 0
        ],
    }


def sample_rows(runs: list[Run]) -> list[SampleRow]:
    """Prompts at the first, a middle and the last sampled step, preferring those that every run answered."""
    by_key: dict[tuple[int, str, str], list[Sample | None]] = {}
    for at, run in enumerate(runs):
        for sample in run.samples:
            row = by_key.setdefault((sample.step, sample.split, sample.uid or sample.prompt), [None] * len(runs))
            if row[at] is None:
                row[at] = sample
    if not by_key:
        return []
    shared = [key for key, row in by_key.items() if all(row)]
    keys = shared or list(by_key)
    steps = sorted({step for step, *_ in keys})
    middle = min(steps, key=lambda step: abs(step - (steps[0] + steps[-1]) / 2))
    rows = []
    for step in sorted({steps[0], middle, steps[-1]})[:SAMPLE_STEPS]:
        for key in [key for key in keys if key[0] == step][:SAMPLES_PER_STEP]:
            any_of = next(sample for sample in by_key[key] if sample is not None)
            rows.append(SampleRow(step, any_of.prompt, any_of.ground_truth, by_key[key]))
    return rows


def manifest_rows(runs: list[Run]) -> list[Difference]:
    """Every fact of every manifest, run by run."""
    flats = {}
    for run in runs:
        if run.manifest is not None:
            tree = run.manifest.to_dict()
            for side in ("trainer", "rollout"):
                tree[side] = {"processes": len(tree[side]["processes"]), **tree[side]["facts"]}
            flats[run.name] = {key: value for key, value in flatten(tree).items() if value is not None}
    keys = dict.fromkeys(key for flat in flats.values() for key in flat)
    return [Difference(key, {run.name: flats.get(run.name, {}).get(key) for run in runs}) for key in keys]


def metric_groups(runs: list[Run]) -> list[tuple[str, list[tuple[str, list[dict[str, str] | None]]]]]:
    """All metrics by their first path part: (group, [(name, per run first, last, max and mean as text)])."""
    tables = [run.statistics() for run in runs]
    groups: dict[str, list[tuple[str, list[dict[str, str] | None]]]] = {}
    for name in sorted(set().union(*tables)):
        cells = [
            {key: short(value) for key, value in table[name].items()} if name in table else None for table in tables
        ]
        groups.setdefault(name.split("/")[0], []).append((name, cells))
    return list(groups.items())
