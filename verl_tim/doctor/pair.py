"""What breaks exactness only because rollout and trainer are not the exact pair."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tim.doctor.rule import Severity, Violation, key_of
from verl_tim.doctor.rules import OWN
from verl_tim.doctor.view import View
from verl_tim.training.remedy import OVERRIDES

PAIR = "rollout=vexact trainer=contract"


def mended_by_pair(view: View, violations: Sequence[Violation]) -> tuple[Violation, ...]:
    """Those of the violations that the pair ends, found by asking the rules about the config with it.

    None where the config has the pair, or where less than two would end: one is told with its own remedy.
    """
    if view.zero_mismatch:
        return ()
    with_pair = view.changed([word for option in PAIR.split() for word in OVERRIDES[option]])
    left = {
        (rule.id, key_of(finding))
        for rule in OWN
        if rule.severity is Severity.EXACTNESS and rule.looks_at(with_pair)
        for finding in rule.examine(with_pair)
    }
    ended = [
        one
        for one in violations
        if one.severity is Severity.EXACTNESS and not (one.blocks or one.also) and (one.rule, one.key) not in left
    ]
    return tuple(ended) if len(ended) > 1 else ()
