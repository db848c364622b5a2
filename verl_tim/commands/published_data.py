"""What `verl-tim data` does for published sets and files of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_tim.commands.output import stderr


def build(task: str, out: Path | None, **settings: Any) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Make a published set: the paths of its files, and its manifest. Arguments and errors as of `build_published`."""
    from verl_tim.tasks.artifact import read_card
    from verl_tim.tasks.published.build import build_published

    built = build_published(task, out, **settings)
    card = read_card(built.folder, built.card.name)
    names = ("train", "validation", "card")
    return {name: None if (path := getattr(built, name)) is None else str(path) for name in names}, card


def say_where_from(card: Mapping[str, Any]) -> None:
    """What was read, and what of it is not certain, on stderr."""
    for split, source in card["sources"].items():
        counts = card["counts"][split]
        dropped = counts["copies_dropped"], counts["problems_with_conflicting_answers_dropped"]
        where = f"{source['repo']}@{source['commit']}:{source['path']}" if "repo" in source else source["path"]
        stderr().print(
            f"{split}: {counts['rows_written']} of {counts['rows_read']} rows of {where} "
            f"(dropped: {dropped[0]} copies, {dropped[1]} problems with conflicting answers)",
            soft_wrap=True,
        )
    if card.get("pinned") is False:
        commits = sorted({source["commit"] for source in card["sources"].values()})
        stderr().print(
            f"no pinned commit: revision {card['spec']['source']['revision']} was resolved to {', '.join(commits)}; "
            "dataset.json records it, and --revision with that commit repeats it",
            soft_wrap=True,
        )
    for fact in card.get("inferred", []):
        stderr().print(f"inferred: {fact}", soft_wrap=True, markup=False)
