"""docs/evidence.md, from run folders alone."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from verl_tim.evidence.figures import PICTURES
from verl_tim.evidence.names import PLANNED
from verl_tim.evidence.parts import write_part
from verl_tim.evidence.runs import Evidence
from verl_tim.evidence.tables import TABLES

NAME = "evidence.md"
PICTURE_FOLDER = "evidence"
# What choosing a correction sets.
_OF_CORRECTION = re.compile(r"correction|policy_loss\.loss_mode|^old_log_probs$")


def write_page(evidence: Evidence, out: Path) -> list[Path]:
    """Write `out/evidence.md` and its pictures in `out/evidence/`.

    Of runs that were not done the page says so; without any it is the page of what is to be measured.
    """
    pictures = [path for name in PICTURES for path in write_part(name, evidence, out / PICTURE_FOLDER)]
    out.mkdir(parents=True, exist_ok=True)
    page = out / NAME
    page.write_text(render(evidence), encoding="utf-8")
    return [page, *pictures]


def render(evidence: Evidence) -> str:
    """The page's text."""
    environment = Environment(
        loader=PackageLoader("verl_tim.evidence"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown of our own numbers
    )
    finished = evidence.finished
    return environment.get_template("evidence.md.j2").render(
        measured=bool(evidence.folders),
        pairs=[pair.name for pair in evidence.pairs],
        planned=len(PLANNED),
        finished=len(finished),
        unfinished=sorted({name.pair for name in PLANNED} - {name.pair for name in finished}),
        seeds={pair.name: {g.name: len(g.logs) for g in pair.comparison.groups} for pair in evidence.pairs},
        machines=_machines(evidence),
        differences=_differences(evidence),
        tables={name: make(evidence).markdown() for name, make in TABLES.items()} if evidence.folders else {},
        folder=PICTURE_FOLDER,
    )


def _machines(evidence: Evidence) -> list[str]:
    """Device, driver-independent: what the trainers' processes said they ran on."""
    found: dict[str, None] = {}
    for pair in evidence.pairs:
        for run in pair.comparison.runs:
            if run.manifest is not None and run.manifest.trainer.facts.device:
                found[str(run.manifest.trainer.facts.device)] = None
    return list(found)


def _differences(evidence: Evidence) -> list[str]:
    """Settings that differ within a pair besides rollout, seed and correction: a fair comparison has none."""
    found: dict[str, None] = {}
    for pair in evidence.pairs:
        for difference in pair.comparison.differences:
            if not _OF_CORRECTION.search(difference.key):
                found[f"{pair.name}: `{difference.key}`"] = None
    return list(found)
