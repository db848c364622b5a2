"""`tim/*`: how large the training-inference mismatch is, and whether it bends the objective.

Notation: d = log p_old - log q (trainer under the batch's weights against rollout), r_corr = exp(d),
r_train = exp(log p - log p_old), r_rollout = exp(log p - log q), A the advantage. Nats throughout. Source of the
signals: "Diagnosing Training-Inference Mismatch in LLM Reinforcement Learning" (arXiv 2605.14220); conventions: docs of
this package.

Statistics are exact on the given batch: a training step's is put together from all ranks first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_tim.diagnosis.estimators import LOG_RATIO_BOUND, chi_square, k1, k2, k3, ratio_minus_one
from verl_tim.diagnosis.routes import put_route_metrics
from verl_tim.diagnosis.sink import MetricSink
from verl_tim.diagnosis.stats import (
    ascending,
    group_counts,
    group_sums,
    pearson,
    population_std,
    segment_sums,
    sorted_quantiles,
    spearman,
)
from verl_tim.diagnosis.tokens import ValidTokens, as_mask, finite_fp32

DELTA_THRESHOLDS = (0.01, 0.1, 0.5, 1.0)  # nats
BINS = 10
SIGNS = ("pos", "neg")
BLOCK = 1 << 15  # tokens looked at together on a CPU: what is computed of them stays in its caches
MAX_TURNS = 32  # later turns share one bin, so that no batch can flood a tracker with keys
MAX_VERSION_LAG = 8  # likewise


def mismatch_metrics(
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    advantages: Tensor | None = None,
    log_prob: Tensor | None = None,
    rollout_top1: Tensor | None = None,
    train_top1: Tensor | None = None,
    rollout_routes: Tensor | None = None,
    train_routes: Tensor | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    bypass: bool = False,
    kept_mask: Tensor | None = None,
    weight_versions: Tensor | None = None,
    current_version: int | None = None,
    num_experts: int | None = None,
    longest_response: int | None = None,
    spearman_sample: int | None = None,
) -> dict[str, float]:
    """Mismatch metrics of one batch, as plain floats under `tim/`.

    All tensors are (B, T) over response tokens unless said otherwise, any floating dtype for log-probs (up-cast before
    anything is subtracted), on any device.

    Args:
        old_log_probs: log p_old, the trainer's log-probs under the weights that generated the batch.
        rollout_log_probs: log q, as recorded when the token was drawn. NaN or infinite means missing; 0.0 is a value.
        response_mask: 1 for response tokens the model produced; bool, int or float. Values elsewhere are never read.
        advantages: A. Without it the metrics by advantage are left out.
        log_prob: log p under the current weights; None means log p = log p_old, so r_train = 1, and the metrics of the
            ratio the loss used (`ppo_k*`, `clipped_share_*`) are left out, since that ratio was not seen.
        rollout_top1, train_top1: int ids of the most likely token on each side, -1 where not recorded.
        rollout_routes, train_routes: (B, T, layers, k) int expert ids, -1 where none is recorded; both or neither.
        clip_ratio_low, clip_ratio_high: PPO clips at 1 - low and 1 + high.
        bypass: the loss uses r_rollout (true) or r_train (false); decides `ppo_k*` and `clipped_share_*` only.
        kept_mask: 1 for tokens that survive rejection; gives `rejected_share_*`.
        weight_versions, current_version: int version each token was drawn under, and the trainer's; gives the staleness
            metrics.
        num_experts: upper bound for expert ids.
        longest_response: tokens of which the bins of length are tenths; None: T, the width of the batch, which is
            another one in each step where batches are padded to their own longest row.
        spearman_sample: of more tokens than that, `delta_adv_spearman` is that of so many, drawn with a fixed seed.

    Returns:
        name -> value, never NaN or infinite: what has no value in this batch is left out. With no valid token only
        `tim/valid_tokens` (0) and `tim/missing_tokens`. `seq_*`, `k*_seq` and `chi2_seq` are means over rows with a
        valid token; `k*_seq` sums over a row's tokens, `k*_seq_mean` averages over them; every other mean is over
        tokens.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name. `RouteError` (a ValueError) for routes, with
            sample, layer and position.
    """
    _check_clip(clip_ratio_low, clip_ratio_high)
    batch = BatchMismatch.of(
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        response_mask=response_mask,
        advantages=advantages,
        rollout_top1=rollout_top1,
        train_top1=train_top1,
        rollout_routes=rollout_routes,
        train_routes=train_routes,
        weight_versions=weight_versions,
        current_version=current_version,
        num_experts=num_experts,
        longest_response=longest_response,
        spearman_sample=spearman_sample,
    )
    return batch.with_loss(
        log_prob=log_prob,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        bypass=bypass,
        kept_mask=kept_mask,
    )


@dataclass(frozen=True)
class BatchMismatch:
    """The metrics of `mismatch_metrics` that need nothing of the loss, and what the others are computed from.

    Attributes:
        found: the metrics.
        tokens: the batch's valid tokens.
        advantage_N: float64; None where none were given.
        finite_N: bool, tokens whose advantage is finite; None likewise.
    """

    found: dict[str, float]
    tokens: ValidTokens
    advantage_N: Tensor | None
    finite_N: Tensor | None

    @classmethod
    def of(
        cls,
        *,
        old_log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor,
        advantages: Tensor | None = None,
        rollout_top1: Tensor | None = None,
        train_top1: Tensor | None = None,
        rollout_routes: Tensor | None = None,
        train_routes: Tensor | None = None,
        weight_versions: Tensor | None = None,
        current_version: int | None = None,
        num_experts: int | None = None,
        longest_response: int | None = None,
        spearman_sample: int | None = None,
    ) -> BatchMismatch:
        """Arguments and errors as in `mismatch_metrics`."""
        if (rollout_routes is None) != (train_routes is None):
            missing = "rollout_routes" if rollout_routes is None else "train_routes"
            raise ValueError(
                f"{missing} is missing: routes recorded on one side only cannot be compared; record both or neither"
            )
        if rollout_top1 is not None and train_top1 is None:
            raise ValueError(
                "train_top1 is missing: the rollout's top-1 ids were given and need the trainer's beside them"
            )
        if longest_response is not None and longest_response < 1:
            raise ValueError(f"longest_response must be at least 1, got {longest_response}")
        if (weight_versions is None) != (current_version is None):
            raise ValueError("weight_versions and current_version belong together: give both or neither")

        tokens = ValidTokens.select(old_log_probs, rollout_log_probs, response_mask)
        sink = MetricSink(tokens.delta_N.device)
        sink.put("valid_tokens", tokens.count)
        sink.put("missing_tokens", tokens.missing)

        # Checked before the early return, so that a wrong argument is not hidden by an empty batch.
        advantage_N = None if advantages is None else tokens.gather("advantages", advantages, floating=True)
        top1 = None
        if rollout_top1 is not None and train_top1 is not None:
            top1 = tuple(
                tokens.gather(name, ids, floating=False)
                for name, ids in (("rollout_top1", rollout_top1), ("train_top1", train_top1))
            )
        version_N = None
        if weight_versions is not None:
            version_N = tokens.gather("weight_versions", weight_versions, floating=False)
        if rollout_routes is not None and train_routes is not None:
            put_route_metrics(sink, tokens, rollout_routes, train_routes, num_experts)
        if tokens.count == 0:
            return cls(sink.finish(), tokens, None, None)

        size_N, excess_N = tokens.delta_N.abs(), ratio_minus_one(tokens.delta_N)
        _put_delta(sink, tokens, size_N, excess_N)
        _put_sequences(sink, tokens, _put_bins(sink, tokens, size_N, longest_response or tokens.shape[1]))
        _put_estimators(sink, tokens, excess_N)
        if top1 is not None:
            _put_top1(sink, *top1)
        if version_N is not None and current_version is not None:
            _put_staleness(sink, tokens, size_N, version_N, current_version)
        finite_N = None
        if advantage_N is not None:
            finite_N = finite_fp32(advantage_N)
            advantage_N = advantage_N.to(torch.float64)
            sink.put("nonfinite_advantage_tokens", len(finite_N) - finite_N.count_nonzero())
            _put_by_advantage(sink, *_selected(finite_N, tokens.delta_N, advantage_N), spearman_sample=spearman_sample)
        return cls(sink.finish(), tokens, advantage_N, finite_N)

    def with_loss(
        self,
        *,
        log_prob: Tensor | None = None,
        clip_ratio_low: float = 0.2,
        clip_ratio_high: float = 0.2,
        bypass: bool = False,
        kept_mask: Tensor | None = None,
        loss_ratio: bool = True,
    ) -> dict[str, float]:
        """All metrics of `mismatch_metrics`; arguments and errors as there.

        Args:
            loss_ratio: False leaves out `ppo_k*` and `clipped_share_*`, for a caller that has them of every mini-batch
                (`LossRatioSums`), where `log_prob` is the last one's.
        """
        _check_clip(clip_ratio_low, clip_ratio_high)
        tokens = self.tokens
        log_prob_N = None if log_prob is None else tokens.gather("log_prob", log_prob, floating=True)
        kept_N = None
        if kept_mask is not None:
            kept_N = tokens.gather("kept_mask", as_mask(kept_mask, "kept_mask").to(torch.uint8), floating=False).bool()
        if tokens.count == 0:
            return dict(self.found)

        sink = MetricSink(tokens.delta_N.device)
        # log p falls back to log p_old for contributions and clipping; a token whose log p is not finite leaves both.
        log_p_N = tokens.old_N if log_prob_N is None else log_prob_N
        usable_N = finite_fp32(log_p_N)
        if log_prob_N is not None:
            sink.put("nonfinite_log_prob_tokens", len(usable_N) - usable_N.count_nonzero())
        if log_prob_N is not None and loss_ratio:
            reference_N = tokens.rollout_N if bypass else tokens.old_N
            (loss_log_ratio_N,) = _selected(usable_N, log_p_N.to(torch.float64) - reference_N)
            for name, estimate in (("ppo_k1", k1), ("ppo_k2", k2), ("ppo_k3", k3)):
                sink.put_mean(name, estimate(loss_log_ratio_N))
        if self.advantage_N is not None and self.finite_N is not None:
            if kept_N is not None:
                _put_shares_by_sign(sink, "rejected_share", *_selected(self.finite_N, ~kept_N, self.advantage_N))
            advantage_N, log_p_N, old_N, rollout_N = _selected(
                usable_N & self.finite_N, self.advantage_N, log_p_N, tokens.old_N, tokens.rollout_N
            )
            _put_objective(
                sink,
                advantage_N=advantage_N,
                log_p_N=log_p_N,
                references={"train": old_N, "rollout": rollout_N},
                clip=(clip_ratio_low, clip_ratio_high),
                loss_uses=None if log_prob_N is None or not loss_ratio else ("rollout" if bypass else "train"),
            )
        return self.found | sink.finish()


def _check_clip(low: float, high: float) -> None:
    for name, value in (("clip_ratio_low", low), ("clip_ratio_high", high)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number >= 0, got {value}")


def _selected(select_N: Tensor, *values_N: Tensor) -> tuple[Tensor, ...]:
    """The selected entries of each; without a copy in the usual case that all are."""
    return values_N if bool(select_N.all()) else tuple(x_N[select_N] for x_N in values_N)


def choice_metrics(
    valid_mask: Tensor,
    *,
    rollout_top1: Tensor,
    train_top1: Tensor,
    rollout_routes: Tensor | None = None,
    train_routes: Tensor | None = None,
) -> dict[str, float]:
    """The metrics of `mismatch_metrics` that compare choices, for sequences sampled from a batch: `tim/top1_*` and
    `tim/router_*`. Arguments as there; `valid_mask` is 1 for the tokens to count."""
    zeros = torch.zeros(valid_mask.shape)
    tokens = ValidTokens.select(zeros, zeros, valid_mask)
    sink = MetricSink(zeros.device)
    if rollout_routes is not None and train_routes is not None:
        put_route_metrics(sink, tokens, rollout_routes, train_routes)
    if tokens.count:
        _put_top1(
            sink,
            tokens.gather("rollout_top1", rollout_top1, floating=False),
            tokens.gather("train_top1", train_top1, floating=False),
        )
    return sink.finish()


def _put_delta(sink: MetricSink, tokens: ValidTokens, size_N: Tensor, excess_N: Tensor) -> None:
    """Size of d, token by token; `size_N` is |d|, `excess_N` exp(d) - 1."""
    delta_N = tokens.delta_N
    sorted_N = ascending(size_N)
    sink.put_mean("delta_abs_mean", size_N)
    for name, value in zip(("p50", "p95", "p99"), sorted_quantiles(sorted_N, (0.5, 0.95, 0.99)), strict=True):
        sink.put(f"delta_abs_{name}", value)
    sink.put("delta_abs_max", sorted_N[-1])
    sink.put_mean("delta_mean", delta_N)
    sink.put("delta_std", population_std(delta_N))
    # the sorted sizes tell how many are larger
    bounds = sorted_N.new_tensor((*DELTA_THRESHOLDS, LOG_RATIO_BOUND))
    larger = (len(sorted_N) - torch.searchsorted(sorted_N, bounds, right=True)).to(torch.float64)
    for threshold, count in zip(DELTA_THRESHOLDS, larger, strict=False):
        sink.put(f"delta_gt_{threshold:g}", count / len(sorted_N))
    ratio_N = ascending(excess_N)
    for name, value in zip(("p01", "p50", "p99"), sorted_quantiles(ratio_N, (0.01, 0.5, 0.99)), strict=True):
        sink.put(f"ratio_{name}", value + 1.0)
    sink.put_mean("exact_fraction", tokens.exact_N)
    sink.put("clamped_tokens", larger[-1])


def _row_sums(tokens: ValidTokens, values_N: Tensor) -> Tensor:
    """Sums over the valid tokens of each row that has one: (rows with a valid token,)."""
    return segment_sums(values_N, tokens.count_B[tokens.count_B > 0])


def _put_sequences(sink: MetricSink, tokens: ValidTokens, travelled_B: Tensor) -> None:
    """What accumulates over a sequence, and how much of it cancels; `travelled_B` is the sum of |d| over each row."""
    accumulated_R = _row_sums(tokens, tokens.delta_N).abs()
    travelled_R = travelled_B[tokens.count_B > 0]
    sorted_R = ascending(accumulated_R)
    sink.put_mean("seq_delta_sum_abs_mean", accumulated_R)
    sink.put("seq_delta_sum_p95", sorted_quantiles(sorted_R, (0.95,))[0])
    sink.put("seq_delta_sum_max", sorted_R[-1])
    moved_R = travelled_R > 0  # 0 / 0 where every d of the row is 0: no value
    sink.put_mean("seq_delta_cancel", (accumulated_R[moved_R] / travelled_R[moved_R]).clamp_max(1.0))
    sink.put("clamped_sequences", (accumulated_R > LOG_RATIO_BOUND).sum())


def _put_bins(sink: MetricSink, tokens: ValidTokens, size_N: Tensor, longest: int) -> Tensor:
    """Mean |d| by place in the row, by length of the row and by turn. Returns the sum over each row: (B,)."""
    bin_names = [str(i) for i in range(BINS)]

    counts_BG = _tenths(tokens)
    sums_BG = segment_sums(size_N, counts_BG.reshape(-1)).reshape(counts_BG.shape)
    sums_B = sums_BG.sum(1)
    long_B = tokens.length_B >= BINS
    sink.put_bins("delta_abs_mean_by_position", bin_names, sums_BG[long_B].sum(0), counts_BG[long_B].sum(0))
    # Tenths of the longest, half-open; a row that is so long belongs to the last.
    length_B = (tokens.length_B * BINS // longest).clamp_max(BINS - 1)
    sink.put_bins(
        "delta_abs_mean_by_length",
        bin_names,
        group_sums(length_B, sums_B, BINS),
        group_sums(length_B, tokens.count_B, BINS),
    )

    if tokens.turns > 1 and (turns := int(tokens.turn_N.max())) > 1:
        turn_N = tokens.turn_N.clamp_max(MAX_TURNS + 1) - 1
        names = [str(i + 1) for i in range(min(turns, MAX_TURNS))] + [f"{MAX_TURNS + 1}_up"] * (turns > MAX_TURNS)
        sink.put_bins(
            "delta_abs_mean_by_turn", names, group_sums(turn_N, size_N, len(names)), group_counts(turn_N, len(names))
        )
    return sums_B


def _tenths(tokens: ValidTokens) -> Tensor:
    """Valid tokens in each tenth of a row's tokens: int64 (B, BINS). They follow each other in the order of tokens."""
    rows, device = tokens.shape[0], tokens.count_B.device
    if tokens.missing:
        place_N = tokens.rank_N * BINS // tokens.length_B.repeat_interleave(tokens.count_B, output_size=tokens.count)
        return group_counts(tokens.row_N * BINS + place_N, rows * BINS).reshape(rows, BINS)
    # Tenth k begins at the first rank with rank * BINS >= k * length.
    starts_BK = (tokens.length_B.unsqueeze(1) * torch.arange(BINS + 1, device=device) + BINS - 1) // BINS
    return starts_BK.diff(dim=1)


def _put_estimators(sink: MetricSink, tokens: ValidTokens, excess_N: Tensor) -> None:
    """K1, K2, K3 and chi-square of r_corr: means over tokens, and over rows of a row's sum (`_seq`) or mean."""
    delta_N = tokens.delta_N
    k3_N = k3(delta_N, excess_N)
    sink.put("k1", -delta_N.sum() / tokens.count)
    sink.put_mean("k2", k2(delta_N))
    sink.put_mean("k3", k3_N)
    sink.put_mean("chi2_token", excess_N * (excess_N + 2.0))  # r^2 - 1
    delta_R = _row_sums(tokens, delta_N)
    sink.put_mean("chi2_seq", chi_square(delta_R))
    tokens_R = tokens.count_B[tokens.count_B > 0]
    for name, sums_R in (("k1", -delta_R), ("k3", _row_sums(tokens, k3_N))):
        sink.put_mean(f"{name}_seq", sums_R)
        sink.put_mean(f"{name}_seq_mean", sums_R / tokens_R)


def _put_top1(sink: MetricSink, rollout_N: Tensor, train_N: Tensor) -> None:
    """Share of tokens, among those recorded on both sides, where the most likely token differs."""
    for name, ids_N in (("rollout_top1", rollout_N), ("train_top1", train_N)):
        if bool((ids_N < -1).any()):
            raise ValueError(f"{name} holds token ids below -1; -1 alone marks a token that was not recorded")
    recorded_N = (rollout_N >= 0) & (train_N >= 0)
    sink.put("top1_tokens", recorded_N.sum())
    sink.put_mean("top1_flip_rate", rollout_N != train_N, recorded_N)


def _put_staleness(
    sink: MetricSink, tokens: ValidTokens, size_N: Tensor, version_N: Tensor, current_version: int
) -> None:
    """Age of the weights each token was drawn under, in versions."""
    lag_N = current_version - version_N.to(torch.int64)
    low, high = lag_N.aminmax()
    if bool(low < 0):
        newest = int(version_N.max())
        raise ValueError(f"weight_versions holds version {newest}, newer than current_version {current_version}")
    names = [str(i) for i in range(MAX_VERSION_LAG)] + [f"{MAX_VERSION_LAG}_up"]
    mixed = torch.zeros((), dtype=torch.int64, device=lag_N.device)
    if bool(low == high):  # one version throughout, as in every synchronous step
        counts_G = torch.zeros(len(names), dtype=torch.int64, device=lag_N.device)
        sums_G = torch.zeros(len(names), dtype=size_N.dtype, device=lag_N.device)
        counts_G[int(low.clamp_max(MAX_VERSION_LAG))] = tokens.count
        sums_G[int(low.clamp_max(MAX_VERSION_LAG))] = size_N.sum()
    else:
        rows = tokens.shape[0]
        low_B = torch.full((rows,), torch.iinfo(torch.int64).max, device=lag_N.device)
        low_B.scatter_reduce_(0, tokens.row_N, lag_N, "amin")
        high_B = torch.full((rows,), -1, device=lag_N.device).scatter_reduce_(0, tokens.row_N, lag_N, "amax")
        mixed = (high_B > low_B).sum()
        if bool(low == 0):
            # what older weights say is no mismatch; of one version throughout it is delta_abs_max, or there is none
            sink.put("delta_abs_max_at_lag_0", size_N[lag_N == 0].max())
        capped_N = lag_N.clamp_max(MAX_VERSION_LAG)
        sums_G, counts_G = group_sums(capped_N, size_N, len(names)), group_counts(capped_N, len(names))
    sink.put_mean("staleness_mean", lag_N)
    sink.put("staleness_max", high)
    sink.put("mixed_version_rows", mixed)
    sink.put_bins("delta_abs_mean_by_version_lag", names, sums_G, counts_G)


def _put_by_advantage(sink: MetricSink, delta_N: Tensor, advantage_N: Tensor, *, spearman_sample: int | None) -> None:
    """Does d know the advantage?"""
    ranked = spearman(delta_N, advantage_N, spearman_sample)
    for name, correlation in (("pearson", pearson(delta_N, advantage_N)), ("spearman", ranked)):
        if correlation is not None:
            sink.put(f"delta_adv_{name}", correlation)
    count, sides = len(advantage_N), _sides(advantage_N)
    totals = {name: sign_N.sum() for name, sign_N in sides.items()}
    shares = {"pos": totals["pos"], "zero": count - totals["pos"] - totals["neg"], "neg": totals["neg"]}
    for name, total in shares.items():
        if count:
            sink.put(f"token_share_{name}_adv", total / count)
        if name in sides:
            sink.put(f"delta_mean_{name}_adv", (delta_N * sides[name]).sum() / total.clamp_min(1), total)


def _sides(advantage_N: Tensor) -> dict[str, Tensor]:
    """1.0 where a finite advantage is above ("pos") or below ("neg") zero, else 0.0. To be multiplied with, which is
    faster than to select."""
    sign_N = advantage_N.sign()
    return {"pos": sign_N.clamp_min(0.0), "neg": sign_N.neg_().clamp_min_(0.0)}


def _put_shares_by_sign(sink: MetricSink, stem: str, hit_N: Tensor, advantage_N: Tensor) -> None:
    for name, sign_N in (("pos", advantage_N > 0), ("neg", advantage_N < 0)):
        sink.put_mean(f"{stem}_{name}_adv", hit_N, sign_N)


def _put_objective(
    sink: MetricSink,
    *,
    advantage_N: Tensor,
    log_p_N: Tensor,
    references: dict[str, Tensor],
    clip: tuple[float, float],
    loss_uses: str | None,
) -> None:
    """Loss contributions C(r) = -(r - 1) A by sign of A, and which tokens PPO's clip binds for, under both ratios.

    `references`: log p_old for the ratio "train", log q for "rollout"; float64, as the advantage.
    """
    count = len(advantage_N)
    if not count:
        return
    low, high = clip
    totals_S = torch.zeros(2, dtype=torch.int64, device=advantage_N.device)  # tokens by sign: above 0, below
    sums = {side: torch.zeros(2, dtype=torch.float64, device=advantage_N.device) for side in references}
    only_rollout, only_train, both = torch.zeros(3, dtype=torch.int64, device=advantage_N.device)
    clipped_S = torch.zeros_like(totals_S)  # under the ratio that the loss used
    block = BLOCK if advantage_N.device.type == "cpu" else count
    for start in range(0, count, block):
        at = slice(start, start + block)
        advantage, log_p = advantage_N[at], log_p_N[at].to(torch.float64)
        signs = advantage > 0, advantage < 0
        signed = advantage.clamp_min(0.0), advantage.clamp_max(0.0)
        totals_S += _counts(*signs)
        clipped: dict[str, Tensor] = {}
        for side, reference_N in references.items():
            excess = ratio_minus_one(log_p - reference_N[at])
            sums[side] -= torch.stack([(excess * values).sum() for values in signed])
            clipped[side] = (signs[0] & (excess > high)) | (signs[1] & (excess < -low))
        train, rollout = clipped["train"], clipped["rollout"]
        only_rollout += (rollout & ~train).count_nonzero()
        only_train += (train & ~rollout).count_nonzero()
        both += (train & rollout).count_nonzero()
        if loss_uses is not None:
            clipped_S += _counts(*(clipped[loss_uses] & sign for sign in signs))
    means = {side: sums_S / totals_S.clamp_min(1) for side, sums_S in sums.items()}
    for side, means_S in means.items():
        for sign, mean, total in zip(SIGNS, means_S, totals_S, strict=True):
            sink.put(f"contribution_{sign}_{side}", mean, total)
    if bool((totals_S > 0).all()):
        sink.put("contribution_skew", means["rollout"].sum() - means["train"].sum())
    for name, found in (
        ("clip_mismatch_only", only_rollout),
        ("clip_masked_by_mismatch", only_train),
        ("clip_both", both),
    ):
        sink.put(name, found.to(torch.float64) / count)
    if loss_uses is not None:
        shares_S = clipped_S.to(torch.float64) / totals_S.clamp_min(1)
        for sign, share, total in zip(SIGNS, shares_S, totals_S, strict=True):
            sink.put(f"clipped_share_{sign}_adv", share, total)


def _counts(*masks: Tensor) -> Tensor:
    """int64, one for each."""
    return torch.stack([mask.count_nonzero() for mask in masks])
