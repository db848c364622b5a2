"""The metrics as plain Python loops over float64 numbers, from the definitions; shares no code with the package."""

from __future__ import annotations

import math
import struct
from collections import defaultdict

BOUND = 20.0


def fp32_bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]


def is_finite_fp32(x: float) -> bool:
    try:
        return math.isfinite(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return False


def mean(values):
    return math.fsum(values) / len(values)


def quantile(values, q):
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def ranks(values):
    return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]


def pearson(xs, ys):
    if len(xs) < 2 or min(xs) == max(xs) or min(ys) == max(ys):
        return None
    mx, my = mean(xs), mean(ys)
    dx, dy = [x - mx for x in xs], [y - my for y in ys]
    # Scaled, so that the squares of extreme inputs neither overflow nor vanish.
    sx, sy = max(map(abs, dx)), max(map(abs, dy))
    dx, dy = [x / sx for x in dx], [y / sy for y in dy]
    return sum(a * b for a, b in zip(dx, dy, strict=True)) / math.sqrt(sum(a * a for a in dx) * sum(b * b for b in dy))


def ratio(log_ratio):
    return math.exp(max(-BOUND, min(BOUND, log_ratio)))


def excess(log_ratio):
    return math.expm1(max(-BOUND, min(BOUND, log_ratio)))


def k3(log_ratio):
    return max(0.0, excess(log_ratio) - log_ratio)


def reference_metrics(
    old, rollout, mask, advantages=None, log_prob=None, clip_low=0.2, clip_high=0.2, bypass=False, kept=None
):
    """Nested lists in, the same dict as `mismatch_metrics` out (without top-1, routes and versions)."""
    out = {}
    rows = range(len(old))
    width = len(old[0]) if old else 0
    tokens = []  # (row, rank in row, length of row, turn, old, rollout, column)
    missing = 0
    for b in rows:
        length = sum(bool(m) for m in mask[b])
        rank, turn, before = 0, 0, False
        for t in range(width):
            inside = bool(mask[b][t])
            if inside and not before:
                turn += 1
            before = inside
            if not inside:
                continue
            if is_finite_fp32(old[b][t]) and is_finite_fp32(rollout[b][t]):
                tokens.append((b, rank, length, turn, old[b][t], rollout[b][t], t))
            else:
                missing += 1
            rank += 1
    out["valid_tokens"], out["missing_tokens"] = len(tokens), missing
    if not tokens:
        return {f"tim/{k}": float(v) for k, v in out.items()}

    d = [token[4] - token[5] for token in tokens]
    size = [abs(x) for x in d]
    out["delta_abs_mean"], out["delta_abs_max"] = mean(size), max(size)
    for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        out[f"delta_abs_{name}"] = quantile(size, q)
    out["delta_mean"] = mean(d)
    out["delta_std"] = 0.0 if min(d) == max(d) else math.sqrt(mean([(x - mean(d)) ** 2 for x in d]))
    for name, threshold in (("0.01", 0.01), ("0.1", 0.1), ("0.5", 0.5), ("1", 1.0)):
        out[f"delta_gt_{name}"] = mean([x > threshold for x in size])
    for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        out[f"ratio_{name}"] = quantile([ratio(x) for x in d], q)
    out["exact_fraction"] = mean([fp32_bits(token[4]) == fp32_bits(token[5]) for token in tokens])
    out["clamped_tokens"] = sum(x > BOUND for x in size)

    by_row = defaultdict(list)
    for token, x in zip(tokens, d, strict=True):
        by_row[token[0]].append(x)
    sums = [abs(sum(xs)) for xs in by_row.values()]
    out["seq_delta_sum_abs_mean"], out["seq_delta_sum_max"] = mean(sums), max(sums)
    out["seq_delta_sum_p95"] = quantile(sums, 0.95)
    cancel = [min(1.0, abs(sum(xs)) / sum(map(abs, xs))) for xs in by_row.values() if any(xs)]
    if cancel:
        out["seq_delta_cancel"] = mean(cancel)
    out["clamped_sequences"] = sum(s > BOUND for s in sums)

    bins = defaultdict(list)
    for token, x in zip(tokens, size, strict=True):
        _, rank, length, turn, *_ = token
        if length >= 10:
            bins[f"position_{rank * 10 // length}"].append(x)
        bins[f"length_{min(9, length * 10 // width)}"].append(x)
        bins["turn_33_up" if turn > 32 else f"turn_{turn}"].append(x)
    multi_turn = max(token[3] for token in tokens) > 1
    for name, xs in bins.items():
        if multi_turn or not name.startswith("turn"):
            out[f"delta_abs_mean_by_{name}"] = mean(xs)

    out["k1"] = mean([-x for x in d])
    out["k2"] = mean([x * x / 2 for x in d])
    out["k3"] = mean([k3(x) for x in d])
    out["chi2_token"] = mean([math.expm1(2 * max(-BOUND, min(BOUND, x))) for x in d])
    out["chi2_seq"] = mean([math.expm1(2 * max(-BOUND, min(BOUND, sum(xs)))) for xs in by_row.values()])
    for name, estimate in (("k1", lambda x: -x), ("k3", k3)):
        out[f"{name}_seq"] = mean([sum(map(estimate, xs)) for xs in by_row.values()])
        out[f"{name}_seq_mean"] = mean([mean(list(map(estimate, xs))) for xs in by_row.values()])

    log_p = [(old if log_prob is None else log_prob)[token[0]][token[6]] for token in tokens]
    usable = [is_finite_fp32(x) for x in log_p]
    if log_prob is not None:
        out["nonfinite_log_prob_tokens"] = usable.count(False)
        ppo = [p - (token[5] if bypass else token[4]) for p, token, ok in zip(log_p, tokens, usable, strict=True) if ok]
        if ppo:
            out["ppo_k1"], out["ppo_k2"] = mean([-x for x in ppo]), mean([x * x / 2 for x in ppo])
            out["ppo_k3"] = mean([k3(x) for x in ppo])

    if advantages is not None:
        adv = [advantages[token[0]][token[6]] for token in tokens]
        known = [is_finite_fp32(a) for a in adv]
        out["nonfinite_advantage_tokens"] = known.count(False)
        pairs = [(x, a) for x, a, ok in zip(d, adv, known, strict=True) if ok]
        xs, advs = [x for x, _ in pairs], [a for _, a in pairs]
        for name, value in (
            ("pearson", pearson(xs, advs)),
            ("spearman", pearson(ranks(xs), ranks(advs)) if len(xs) > 1 else None),
        ):
            if value is not None:
                out[f"delta_adv_{name}"] = value
        for name, test in (("pos", lambda a: a > 0), ("zero", lambda a: a == 0), ("neg", lambda a: a < 0)):
            if pairs:
                out[f"token_share_{name}_adv"] = mean([test(a) for a in advs])
            of_sign = [x for x, a in pairs if test(a)]
            if of_sign and name != "zero":
                out[f"delta_mean_{name}_adv"] = mean(of_sign)
            if kept is not None and name != "zero":
                hits = [
                    not kept[token[0]][token[6]]
                    for token, a, ok in zip(tokens, adv, known, strict=True)
                    if ok and test(a)
                ]
                if hits:
                    out[f"rejected_share_{name}_adv"] = mean(hits)

        contributions = defaultdict(list)
        only, masked, both = [], [], []
        clipped_by_sign = defaultdict(list)
        for token, p, a, ok_p, ok_a in zip(tokens, log_p, adv, usable, known, strict=True):
            if not (ok_p and ok_a):
                continue
            clip = {}
            for side, reference in (("train", token[4]), ("rollout", token[5])):
                over = excess(p - reference)
                if a != 0:
                    contributions["pos" if a > 0 else "neg", side].append(-over * a)
                clip[side] = (a > 0 and over > clip_high) or (a < 0 and over < -clip_low)
            only.append(clip["rollout"] and not clip["train"])
            masked.append(clip["train"] and not clip["rollout"])
            both.append(clip["train"] and clip["rollout"])
            if a != 0:
                clipped_by_sign["pos" if a > 0 else "neg"].append(clip["rollout" if bypass else "train"])
        for (sign, side), values in contributions.items():
            out[f"contribution_{sign}_{side}"] = mean(values)
        if len(contributions) == 4:
            out["contribution_skew"] = (
                out["contribution_pos_rollout"]
                + out["contribution_neg_rollout"]
                - out["contribution_pos_train"]
                - out["contribution_neg_train"]
            )
        for name, hits in (
            ("clip_mismatch_only", only),
            ("clip_masked_by_mismatch", masked),
            ("clip_both", both),
        ):
            if hits:
                out[name] = mean(hits)
        if log_prob is not None:
            for sign, hits in clipped_by_sign.items():
                out[f"clipped_share_{sign}_adv"] = mean(hits)
    return {f"tim/{name}": float(value) for name, value in out.items()}
