"""What makes the same config another run each time."""

from __future__ import annotations

from collections.abc import Iterator

from verl_tim.doctor.rule import ACTOR, ROLLOUT, Rules, Severity, found
from verl_tim.doctor.view import View
from verl_tim.training.determinism import AGENT_LOOP, AGENT_LOOP_KEY, SWITCH
from verl_tim.training.finding import Finding

RULES = Rules()
rule = RULES.rule


@rule(
    "exact.only-warns",
    Severity.EXACTNESS,
    f"{ACTOR}.fsdp_config.full_determinism",
    f"{ROLLOUT}.full_determinism",
    remedy=f"set it to false, and {SWITCH}=true",
)
def only_warns(view: View) -> Iterator[Finding]:
    """verl's switch asks torch for deterministic kernels with warn_only (workers/engine/utils.py:62): where there is
    none, torch warns and goes on, and its attention keeps the fast backward, which adds in any order.
    """
    key = f"{ACTOR}.fsdp_config.full_determinism"
    if view.get(key, False):
        yield found(key, "it is true, and torch only warns")


@rule(
    "note.unseeded-order",
    Severity.NOTE,
    "data.shuffle",
    "data.seed",
    remedy=f"data.seed=1, or {SWITCH}=true, which sets it",
)
def unseeded_order(view: View) -> Iterator[Finding]:
    """verl shuffles the data with a generator of its own, and without a seed that is another one in each run: two runs
    see other prompts at each step, so their curves differ whatever their rollouts.
    """
    if view.get("data.shuffle", True) and view.get("data.seed") is None:
        yield found("data.seed", "it is null, and data.shuffle is true")


@rule(
    "note.unseeded-samples",
    Severity.NOTE,
    AGENT_LOOP_KEY,
    remedy=f"+{AGENT_LOOP_KEY}={AGENT_LOOP}, or {SWITCH}=true, which sets it",
)
def unseeded_samples(view: View) -> Iterator[Finding]:
    """verl gives requests random ids and no seed: what is sampled cannot be drawn again, and two runs differ from their
    first token.
    """
    if view.get(AGENT_LOOP_KEY) is None and not view.get(f"{ROLLOUT}.full_determinism", False):
        yield found(AGENT_LOOP_KEY, "it is null, so verl's own is in use")
