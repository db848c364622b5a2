"""The comparison as one HTML file that needs no network: plots, tables and plotly itself are inside."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

import verl_tim
from verl_tim.diagnosis.compare import Comparison, Run, written
from verl_tim.diagnosis.figures import PALETTE, build_sections
from verl_tim.diagnosis.formats import count, percent, short
from verl_tim.diagnosis.manifest import Difference, flatten
from verl_tim.diagnosis.run_folder import Sample
from verl_tim.diagnosis.verdict import Exactness

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
    sections = build_sections(comparison.runs)
    figures = {
        drawing.plot.id: json.loads(drawing.figure.to_json()) for section in sections for drawing in section.drawings
    }
    environment = Environment(
        loader=PackageLoader("verl_tim.diagnosis"),
        autoescape=select_autoescape(("html", "j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "short": short,
        "percent": percent,
        "written": written,
        "setting": setting,
        "breakable": breakable,
    }
    return environment.get_template("compare.html.j2").render(
        comparison=comparison,
        runs=comparison.runs,
        cards=[_card(comparison, at) for at in range(len(comparison.runs))],
        sections=sections,
        stages=_stages(comparison),
        summary=comparison.summary(),
        samples=sample_rows(comparison.runs),
        manifest_rows=_manifest_rows(comparison.runs),
        metric_groups=_metric_groups(comparison.runs),
        palette=PALETTE,
        data=_script_json({"figures": figures, "palette": PALETTE}),
        plotlyjs=Markup(get_plotlyjs()),
        version=verl_tim.__version__,
    )


def setting(value: Any) -> str:
    """A setting as text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def breakable(name: str) -> Markup:
    """A dotted or slashed name that may wrap at its separators."""
    return Markup(re.sub(r"([./_])", r"\1<wbr>", str(escape(name))))


def _script_json(data: Any) -> Markup:
    """JSON that may stand inside a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _card(comparison: Comparison, at: int) -> dict[str, Any]:
    run, state, speed = comparison.runs[at], comparison.states[at], comparison.speeds[at]
    facts = []
    for row in comparison.summary():
        first, last, _ = row.values[at]
        if row.label in ("reward", "validation") and last is not None:
            facts.append((row.label, f"{short(first)} → {short(last)}"))
    if state.delta_max is not None:
        facts.append(("largest |d|", f"{short(state.delta_max)} nats"))
    if speed.step_seconds is not None:
        facts.append(("step time", f"{short(speed.step_seconds)} s"))
    if speed.tokens_per_second is not None:
        facts.append(("tokens per second", short(speed.tokens_per_second)))
    if speed.rollout_share is not None:
        facts.append(("time in rollout", percent(speed.rollout_share)))
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
    names = list(dict.fromkeys(name for speed in comparison.speeds for name in speed.stage_seconds))
    if not names:
        return None
    names = [name for name in names if name != "other"] + ["other"] * ("other" in names)
    totals = [sum(speed.stage_seconds.values()) for speed in comparison.speeds]
    largest = max(totals)
    shown = [name for name in names if any(s.stage_seconds.get(name, 0) > 0.004 * largest for s in comparison.speeds)]
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
                    if (seconds := speed.stage_seconds.get(name, 0.0)) > 0
                ],
            }
            for at, (speed, total) in enumerate(zip(comparison.speeds, totals, strict=True))
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


def _manifest_rows(runs: list[Run]) -> list[Difference]:
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


def _metric_groups(runs: list[Run]) -> list[tuple[str, list[tuple[str, list[dict[str, str] | None]]]]]:
    """All metrics by their first path part: (group, [(name, per run first, last, max and mean as text)])."""
    tables = [run.statistics() for run in runs]
    groups: dict[str, list[tuple[str, list[dict[str, str] | None]]]] = {}
    for name in sorted(set().union(*tables)):
        cells = [
            {key: short(value) for key, value in table[name].items()} if name in table else None for table in tables
        ]
        groups.setdefault(name.split("/")[0], []).append((name, cells))
    return list(groups.items())
