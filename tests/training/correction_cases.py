"""Configurations of the worker's loss: every preset and every switch, in both modes and with both losses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tests.training.correction_bench import ROWS, Bench, Case
from verl_tim.correction import PRESETS, ConfigError, RolloutCorrectionConfig

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# (entropy_coeff, kl_loss_coef)
EXTRAS = ((0.0, 0.0), (0.01, 0.0), (0.0, 0.1), (0.01, 0.1))
MODES: dict[str, dict[str, Any]] = {
    "recompute": {"bypass_mode": False},
    "bypass": {"bypass_mode": True},
    "bypass with old forward": {"bypass_mode": True, "old_forward": True},
}

_SUMS = {"seq_sum_k1": [0.5, 2.0], "seq_sum_k3": 0.05}
_TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}


def _preset(name: str) -> dict[str, Any]:
    rule = PRESETS[name].get("rollout_rs")
    needs = rule in _SUMS and "rollout_rs_threshold" not in PRESETS[name]
    return {"preset": name, **({"rollout_rs_threshold": _SUMS[rule]} if needs else {})}


def _rule(name: str, bound: Any, **others: Any) -> dict[str, Any]:
    return {"rollout_rs": name, "rollout_rs_threshold": bound, **others}


SETTINGS: dict[str, dict[str, Any]] = {
    **{name: _preset(name) for name in PRESETS},
    "sequence_mean": {"rollout_is": "sequence_mean", "rollout_is_threshold": 1.1},
    "sequence band": {"rollout_is": "sequence", "rollout_is_threshold": [0.3, 3.0]},
    "token normalised": {**_TIS, "rollout_is_batch_normalize": True},
    "sequence normalised": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "band normalised, opsm": {
        "rollout_is": "token",
        "rollout_is_threshold": [0.8, 1.3],
        "rollout_is_batch_normalize": True,
        **_rule("opsm", 0.01),
    },
    "all valid": {**_TIS, **_rule("token_k1", [0.8, 1.25]), "denominator": "all"},
    "all valid, by sequence": {**_rule("seq_mean_k3", 0.02, rollout_rs_signal="r_ppo"), "denominator": "all"},
    "baseline kept": {**_rule("seq_mean_k3", 0.02), "baseline_scope": "kept"},
    "token_k1": _rule("token_k1", [0.8, 1.25]),
    "token_k2, r_ppo": _rule("token_k2", 0.01, rollout_rs_signal="r_ppo"),
    "token_k3": _rule("token_k3", 0.01),
    "token_kpop": _rule("token_kpop", 0.001),
    "seq_sum_k2": _rule("seq_sum_k2", 0.2),
    "seq_mean_k2, r_ppo": _rule("seq_mean_k2", 0.01, rollout_rs_signal="r_ppo"),
    "seq_max_k2": _rule("seq_max_k2", 0.1),
    "seq_max_k3": _rule("seq_max_k3", 0.1),
    "opsm": _rule("opsm", 0.01),
    "three rules": {**_TIS, **_rule("token_k1,seq_mean_k3,opsm", [[0.5, 2.0], 0.2, 0.1])},
}


def corrections() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, every key spelled out), for each combination that is one; presets lose the mode and loss they set."""
    seen = set()
    for (name, settings), (mode, bypass), loss_type in itertools.product(
        SETTINGS.items(), MODES.items(), ("ppo_clip", "reinforce")
    ):
        full = RolloutCorrectionConfig.from_mapping(settings).to_mapping() | bypass | {"loss_type": loss_type}
        try:
            RolloutCorrectionConfig.from_mapping(full)
        except ConfigError:
            continue
        if str(full) in seen:
            continue
        seen.add(str(full))
        yield f"{name}, {mode}, {loss_type}", full


def some() -> list[tuple[str, Case, int]]:
    """Every third correction, so that each setting has a mode and loss of its own, the other dimensions in turn.

    Returns (name, case, micro-batch).
    """
    cases = []
    for number, (name, correction) in enumerate(corrections()):
        if (number + number // 6) % 3 and correction["rollout_is_in"] == "loss":
            continue
        place = len(cases)
        aggregation, extras = AGGREGATIONS[place % 4], EXTRAS[(place // 4 + place) % 4]
        case = Case(correction, "vanilla", aggregation, *extras)
        cases.append((f"{name}, {aggregation}, {extras}", case, (1, 2, 4)[(place + place // 4) % 3]))
    return cases


def every() -> list[tuple[str, Case]]:
    """The whole product; entropy and KL terms in turn."""
    return [
        (f"{name}, {aggregation}, {EXTRAS[number % 4]}", Case(correction, "vanilla", aggregation, *EXTRAS[number % 4]))
        for number, ((name, correction), aggregation) in enumerate(itertools.product(corrections(), AGGREGATIONS))
    ]


def differences(bench: Bench, case: Case, micro_batches: tuple[int, ...]) -> list[str]:
    """Where the worker's answer is not that of the whole mini-batch; empty if they agree."""
    whole = bench.whole(case)
    found = []
    size = float(whole.gradient.norm())
    if case.loss_agg_mode == "token-mean" and whole.metrics["rollout_corr/kept_tokens"] > 0 and not size > 1e-4:
        found.append(f"the whole mini-batch has a gradient of {size}, so this shows nothing")
    for micro_batch in micro_batches:
        worker = bench.worker(case, micro_batch)
        where = f"micro-batches of {micro_batch}"
        gap = float((worker.gradient - whole.gradient).norm())
        if not gap <= 1e-6 * size:
            found.append(f"{where}: gradients differ by {gap / max(size, 1e-30):.2g} of {size:.3g}")
        if not _close(worker.loss, whole.loss):
            found.append(f"{where}: loss {worker.loss}, whole {whole.loss}")
        expected = {**whole.metrics, **whole.terms}
        got = {**worker.metrics, **worker.terms}
        for name in sorted(set(expected) | set(got)):
            if not _close(got.get(name), expected.get(name)):
                found.append(f"{where}: {name} {got.get(name)}, whole {expected.get(name)}")
    return found


def _close(value: float | None, expected: float | None) -> bool:
    if value is None or expected is None:
        return value is expected
    return abs(value - expected) <= 2e-6 * max(1.0, abs(expected))


def micro_batches_of(ranks: int) -> tuple[int, ...]:
    """One row, two, and the rank's whole share."""
    return (1, 2, ROWS // ranks)
