"""Everything the page shows, by name: one picture per model and algorithm, or one table."""

from __future__ import annotations

from pathlib import Path

from verl_tim.evidence.figures import PICTURES
from verl_tim.evidence.runs import Evidence, EvidenceError, pair_names
from verl_tim.evidence.tables import TABLES

PARTS = (*PICTURES, *TABLES)


def write_part(name: str, evidence: Evidence, out: Path) -> list[Path]:
    """Write a picture as NAME-MODEL-ALGORITHM.png, or a table as NAME.md, into a folder (made if need be).

    Raises:
        EvidenceError: an unknown name.
    """
    if name not in PARTS:
        raise EvidenceError(f"{name!r} is no part of the page: choose one of {', '.join(PARTS)}")
    out.mkdir(parents=True, exist_ok=True)
    if name in TABLES:
        evidence.on_part(f"table {name}")
        path = out / f"{name}.md"
        path.write_text(TABLES[name](evidence).markdown() + "\n", encoding="utf-8")
        return [path]
    paths = []
    for pair in evidence.pairs:
        evidence.on_part(f"{name} of {pair.name}")
        paths.append(out / f"{name}-{pair.name}.png")
        PICTURES[name](pair, paths[-1])
    return paths


def parts_of_page(evidence: Evidence) -> int:
    """How often the page tells `Evidence.on_part` of something."""
    pairs = len(pair_names(evidence.folders))
    return pairs + len(pair_names(evidence.alone)) + pairs * len(PICTURES) + len(TABLES)
