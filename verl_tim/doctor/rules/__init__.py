"""All rules, one subject per file, in the order in which docs/doctor.md lists them."""

from __future__ import annotations

from verl_tim.doctor.rule import Rule
from verl_tim.doctor.rules import (
    correction,
    environment,
    memory,
    native,
    repeat,
    rollout,
    sampling,
    schedule,
    start,
    trainer,
    waste,
)

# Title of the section, rules. Start-up checks last: their functions live with the launcher and the trainer.
GROUPS: tuple[tuple[str, list[Rule]], ...] = (
    ("The trainer's forward", trainer.RULES),
    ("The rollout engine", rollout.RULES),
    ("Sampling and tokens", sampling.RULES),
    ("Environment and processes", environment.RULES),
    ("Runs that repeat", repeat.RULES),
    ("The correction", correction.RULES),
    ("verl's own correction", native.RULES),
    ("Counts, lengths, versions, disk", schedule.RULES),
    ("GPU memory", memory.RULES),
    ("Waste", waste.RULES),
    ("Start-up checks", start.RULES),
)
OWN: tuple[Rule, ...] = tuple(rule for _, rules in GROUPS if rules is not start.RULES for rule in rules)
ALL: tuple[Rule, ...] = (*OWN, *start.RULES)
