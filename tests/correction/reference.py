"""The correction written out token by token in Python floats: slow, without tensors, independent of the code tested.

Inputs are lists of rows; ``settings`` is ``RolloutCorrectionConfig.to_mapping()``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

Rows = list[list[float]]


@dataclass
class Reference:
    weights: Rows | None
    mask: list[list[bool]]
    loss: float = 0.0
    gradient: Rows = field(default_factory=list)
    numerator: float = 0.0
    divisor: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


def clamp(x: float, low: float = -20.0, high: float = 20.0) -> float:
    return min(max(x, low), high)


def k3(log_r: float) -> float:
    return math.expm1(clamp(log_r)) - log_r


def two_outcome_kl(log_p: float, log_q: float) -> float:
    log_p, log_q = min(log_p, 0.0), min(log_q, 0.0)  # rounding may leave them above
    p, q = math.exp(log_p), math.exp(log_q)
    rest_p, rest_q = max(-math.expm1(log_p), 2**-24), max(-math.expm1(log_q), 2**-24)
    forward = p * (log_p - log_q) + rest_p * math.log(rest_p / rest_q)
    backward = q * (log_q - log_p) + rest_q * math.log(rest_q / rest_p)
    return max(forward, backward)


def in_band(log_r: float, band: list[float | None]) -> bool:
    lower, upper = band
    if lower is not None and log_r < math.log(lower):
        return False
    return upper is None or log_r <= math.log(upper)


def evaluate(
    settings: dict[str, Any],
    *,
    old: Rows | None,
    rollout: Rows,
    mask: list[list[int]],
    log_prob: Rows,
    advantages: Rows,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    mode: str = "token-mean",
    factor: float | None = None,
    old_forward: Rows | None = None,
    divisor: float | None = None,
) -> Reference:
    """Weights, mask, loss and d loss / d log_prob of one mini-batch."""
    bypass, reinforce = settings["bypass_mode"], settings["loss_type"] == "reinforce"
    rows, width = len(mask), len(mask[0]) if mask else 0
    every = [(i, t) for i in range(rows) for t in range(width)]
    valid = {(i, t) for i, t in every if mask[i][t]}
    trainer = (log_prob if old_forward is None else old_forward) if bypass else old
    assert trainer is not None
    usable = {(i, t) for i, t in valid if math.isfinite(trainer[i][t]) and math.isfinite(log_prob[i][t])}
    known = {(i, t) for i, t in usable if math.isfinite(rollout[i][t])}
    d = {(i, t): trainer[i][t] - rollout[i][t] for i, t in known}

    # The log of PPO's ratio.
    log_ppo = {}
    for i, t in usable:
        if not bypass:
            log_ppo[i, t] = log_prob[i][t] - trainer[i][t]
        else:
            log_ppo[i, t] = log_prob[i][t] - rollout[i][t] if (i, t) in known else 0.0

    def row_known(i: int) -> list[int]:
        return [t for t in range(width) if (i, t) in known]

    # Rejection.
    kept = set(usable)
    lost_by_rule: dict[str, set[tuple[int, int]]] = {}
    for name, bound in zip(settings["rollout_rs"] or [], settings["rollout_rs_threshold"] or [], strict=True):
        lost: set[tuple[int, int]] = set()
        for i in range(rows):
            ts = row_known(i)
            if not ts:
                continue
            if name == "opsm":
                advantage = sum(advantages[i][t] for t in ts) / len(ts)
                gap = sum(rollout[i][t] - log_prob[i][t] for t in ts) / len(ts)
                if advantage < 0 and gap > bound:
                    lost |= {(i, t) for t in range(width)}
                continue
            ppo = settings["rollout_rs_signal"] == "r_ppo"
            log_r = {t: log_ppo[i, t] if ppo else d[i, t] for t in ts}
            if name == "token_kpop":
                for t in ts:
                    if not ppo:
                        pair = trainer[i][t], rollout[i][t]
                    else:
                        pair = log_prob[i][t], rollout[i][t] if bypass else trainer[i][t]
                    if two_outcome_kl(*pair) > bound:
                        lost.add((i, t))
                continue
            per_token = {
                "k1": log_r,
                "k2": {t: x * x / 2 for t, x in log_r.items()},
                "k3": {t: k3(x) for t, x in log_r.items()},
            }[name[-2:]]

            def passes(value: float, name: str = name, bound: Any = bound) -> bool:
                return in_band(value, bound) if name.endswith("k1") else value <= bound

            if name.startswith("token"):
                lost |= {(i, t) for t in ts if not passes(per_token[t])}
                continue
            reduce = {"sum": sum, "mean": lambda v: sum(v) / len(v), "max": max}[name.split("_")[1]]
            if not passes(reduce([per_token[t] for t in ts])):
                lost |= {(i, t) for t in range(width)}
        lost_by_rule[name] = lost & valid
        kept -= lost

    # Importance weights, truncated or limited to the band.
    level, threshold = settings["rollout_is"], settings["rollout_is_threshold"]
    weight: dict[tuple[int, int], float] = {}
    raw: dict[tuple[int, int], float] = {}
    dropped: set[tuple[int, int]] = set()
    if level is not None:
        for i, t in every:
            ts = row_known(i)
            if level == "token":
                present, log_w = (i, t) in known, d.get((i, t), 0.0)
            else:
                log_w = sum(d[i, s] for s in ts)
                log_w = log_w / len(ts) if level == "sequence_mean" and ts else log_w
                present = bool(ts)
            raw[i, t] = math.exp(clamp(log_w))
            if not present:
                weight[i, t] = 1.0
            elif isinstance(threshold, list):
                ok = in_band(log_w, threshold)
                weight[i, t] = raw[i, t] if ok else 0.0
                if not ok:
                    dropped.add((i, t))
            else:
                weight[i, t] = min(raw[i, t], threshold)
    logged_only = bypass and not reinforce
    truncated = dict(weight)
    if not logged_only:
        kept -= dropped
    if level is not None and settings["rollout_is_batch_normalize"]:
        if level == "token":
            values = [weight[key] for key in kept & known]
        else:
            values = [weight[i, 0] for i in range(rows) if any((i, t) in kept & known for t in range(width))]
        mean = (sum(values) / len(values) if values else 1.0) or 1.0  # all zero: nothing to divide
        for i, t in every:
            if (i, t) in known or (level != "token" and row_known(i)):
                weight[i, t] /= mean

    # The loss of each token and its derivative by log_prob.
    value, slope = {}, {}
    for i, t in usable:
        a, w = advantages[i][t], 1.0
        if level is not None and not logged_only and settings["rollout_is_in"] == "loss":
            w = weight[i, t]
        if reinforce:
            value[i, t], slope[i, t] = -a * log_prob[i][t] * w, -a * w
            continue
        log_r = log_ppo[i, t]
        if settings["rollout_is_in"] == "ratio" and (i, t) in known:
            log_r += min(d[i, t], math.log(threshold))
        r = math.exp(clamp(log_r))
        dr = r if -20 <= log_r <= 20 else 0.0
        clipped = clamp(r, 1 - clip_low, 1 + clip_high)
        loss, by_r = (-a * r, -a) if -a * r >= -a * clipped else (-a * clipped, 0.0)
        if a < 0 and clip_c is not None and loss > -a * clip_c:
            loss, by_r = -a * clip_c, 0.0
        value[i, t], slope[i, t] = loss * w, by_r * dr * w

    # Aggregation.
    counted = kept if settings["denominator"] == "kept" else usable
    kept_rows = {i for i, _ in kept}
    rows_counted = len({i for i, _ in counted})
    scale: dict[int, float] = {}
    for i in kept_rows:
        own = sum((i, t) in counted for t in range(width))
        scale[i] = {
            "token-mean": 1.0,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1.0,
            "seq-mean-token-mean": 1 / own,
            "seq-mean-token-sum-norm": 1 / (factor or width),
        }[mode]
    numerator = sum(value[i, t] * scale[i] for i, t in kept)
    own_divisor = {"token-mean": len(counted), "token-sum": 1}.get(mode, rows_counted)
    over = max(own_divisor if divisor is None else divisor, 1)
    gradient = [[slope[i, t] * scale[i] / over if (i, t) in kept else 0.0 for t in range(width)] for i in range(rows)]

    out = Reference(
        weights=None
        if level is None
        else [[weight[i, t] if (i, t) in kept else 0.0 for t in range(width)] for i in range(rows)],
        mask=[[(i, t) in kept for t in range(width)] for i in range(rows)],
        loss=numerator / over,
        gradient=gradient,
        numerator=numerator,
        divisor=own_divisor,
    )
    missing = sum(not math.isfinite(rollout[i][t]) for i, t in valid)
    out.metrics = _metrics(
        settings, missing, valid, usable, known, kept, d, log_ppo, lost_by_rule, truncated, raw, dropped
    )
    return out


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _metrics(
    settings: dict[str, Any],
    missing: int,
    valid: set[tuple[int, int]],
    usable: set[tuple[int, int]],
    known: set[tuple[int, int]],
    kept: set[tuple[int, int]],
    d: dict[tuple[int, int], float],
    log_ppo: dict[tuple[int, int], float],
    lost_by_rule: dict[str, set[tuple[int, int]]],
    weight: dict[tuple[int, int], float],
    raw: dict[tuple[int, int], float],
    dropped: set[tuple[int, int]],
) -> dict[str, float]:
    def rows_of(keys: set[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
        out: dict[int, list[tuple[int, int]]] = {}
        for key in sorted(keys):
            out.setdefault(key[0], []).append(key)
        return out

    known_rows = rows_of(known)
    sums = {i: sum(d[k] for k in keys) for i, keys in known_rows.items()}
    means = {i: sums[i] / len(keys) for i, keys in known_rows.items()}
    sequence_log = means if settings["rollout_is"] == "sequence_mean" else sums
    found: dict[str, float | None] = {
        "valid_tokens": len(valid),
        "valid_sequences": len(rows_of(valid)),
        "kept_tokens": len(kept),
        "kept_sequences": len(rows_of(kept)),
        "empty_step": float(not kept),
        "missing_tokens": missing,
        "nonfinite_trainer_tokens": len(valid - usable),
        "clamped_tokens": sum(abs(x) > 20 for x in d.values()),
        "clamped_sequences": sum(abs(x) > 20 for x in sequence_log.values()),
        "kl": _mean([-x for x in d.values()]),
        "kl_kept": _mean([-d[k] for k in known & kept]),
        "k3_kl": _mean([k3(x) for x in d.values()]),
        "log_ratio_abs_mean": _mean([abs(x) for x in d.values()]),
        "log_ratio_abs_max": max((abs(x) for x in d.values()), default=None),
        "log_ppl_diff": _mean([-x for x in means.values()]),
        "log_ppl_abs_diff": _mean([abs(x) for x in means.values()]),
        "ppl_ratio": _mean([math.exp(clamp(-x)) for x in means.values()]),
        "ppo_k1": _mean([-log_ppo[k] for k in known]),
        "ppo_k3": _mean([k3(log_ppo[k]) for k in known]),
    }
    chi2 = _mean([math.exp(2 * clamp(x)) for x in d.values()])
    found["chi2_token"] = None if chi2 is None else chi2 - 1
    chi2 = _mean([math.exp(2 * clamp(x)) for x in sums.values()])
    found["chi2_seq"] = None if chi2 is None else chi2 - 1
    for name, lost in [*lost_by_rule.items(), ("", set().union(*lost_by_rule.values()))]:
        if lost_by_rule and valid:
            prefix = f"rollout_rs_{name}_" if name else "rollout_rs_"
            found[f"{prefix}masked_fraction"] = len(lost) / len(valid)
            found[f"{prefix}seq_masked_fraction"] = len(rows_of(lost)) / len(rows_of(valid))
    if settings["rollout_is"] is not None:
        token_level = settings["rollout_is"] == "token"
        seen = known - dropped
        found["rollout_is_mean"] = _mean([weight[k] for k in seen])
        found["rollout_is_max"] = max((weight[k] for k in seen), default=None)
        found["rollout_is_min"] = min((weight[k] for k in seen), default=None)
        mean = found["rollout_is_mean"]
        if mean is not None:
            found["rollout_is_std"] = math.sqrt(sum((weight[k] - mean) ** 2 for k in seen) / len(seen))
        units = sorted(known) if token_level else [keys[0] for keys in known_rows.values()]
        if units:
            w = [weight[k] for k in units]
            squares = sum(x * x for x in w)
            found["rollout_is_eff_sample_size"] = sum(w) ** 2 / (len(w) * squares) if squares else 0.0
            cap = settings["rollout_is_threshold"]
            upper = cap[1] if isinstance(cap, list) else cap
            if upper is not None:
                found["rollout_is_ratio_fraction_high"] = sum(raw[k] > upper for k in units) / len(units)
                per_row = [_mean([raw[k] for k in keys]) or 0.0 for keys in known_rows.values()]
                found["rollout_is_seq_fraction_high"] = sum(x > upper for x in per_row) / len(per_row)
    return {f"rollout_corr/{name}": value for name, value in found.items() if value is not None}
