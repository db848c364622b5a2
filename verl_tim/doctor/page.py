"""docs/doctor.md, from the rules themselves: `python -m verl_tim.doctor.page > docs/doctor.md`."""

from __future__ import annotations

import sys
from importlib import resources

from verl_tim.doctor.rule import Rule
from verl_tim.doctor.rules import ALL, GROUPS


def page() -> str:
    """The whole page."""
    parts = [resources.files("verl_tim.doctor").joinpath("page_head.md").read_text(encoding="utf-8")]
    for title, rules in GROUPS:
        parts.append(f"\n## {title}\n\n| rule | severity | looks at | what, and why | remedy | reported |\n")
        parts.append("| --- | --- | --- | --- | --- | --- |\n")
        parts.extend(_row(rule) for rule in rules)
    parts.append(f"\n{len(ALL)} rules. This page is made by `python -m verl_tim.doctor.page`.\n")
    return "".join(parts)


def _row(rule: Rule) -> str:
    keys = ", ".join(f"`{_short(key)}`" for key in rule.keys)
    cells = (f"`{rule.id}`", rule.severity.value, keys, rule.why, rule.remedy, ", ".join(rule.reports))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _short(key: str) -> str:
    """Without the longest of verl's prefixes, which no other key shares."""
    return key.removeprefix("actor_rollout_ref.")


if __name__ == "__main__":
    sys.stdout.write(page())
