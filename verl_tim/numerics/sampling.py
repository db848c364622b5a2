"""Sampling: the token drawn, its log-prob, and what the cuts removed.

Rule: token = argmax over kept ids of z + gumbel, z = logits / temperature in float32, ties to the lower id; the noise
comes from Philox4x32-10 (Salmon et al. 2011), key = the request's seed, counter = (token id / 4, position), so it
depends on nothing else: not on the batch, the replica, preemption or a restart. The log-prob is that of the *full*
vocabulary at the sampling temperature, by the trainer's own function, whatever was cut; the probability mass that the
cuts kept stands beside it. Temperature 0 is greedy: the lowest id of the largest logit, log-prob at temperature 1.

Cuts, in this order, each on what the former left: min-p (probability below min_p times the largest), top-k (ties to the
lower id), top-p (the smallest set, most probable first, whose renormalised mass reaches top_p).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_tim.numerics.contract import ContractError, kernels, on_gpu
from verl_tim.numerics.head import LogSumExp, log_probs_from, log_sum_exp, mask_padding, scale_by_temperature
from verl_tim.numerics.linear import matmul_rows
from verl_tim.numerics.shards import VocabularyPart

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


@dataclass
class SamplingTensors:
    """Per-row sampling parameters, one device. temperature_B float32 (0 = greedy), top_k_B int64 (-1 off), top_p_B
    float32 (1 off), min_p_B float32 (0 off), seed_B int64, position_B int64 (absolute position of the token drawn)."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    position_B: Tensor

    def rows(self, index_R: Tensor) -> SamplingTensors:
        """The parameters of some rows, in the order of `index_R`."""
        return SamplingTensors(*(getattr(self, field.name)[index_R] for field in dataclasses.fields(self)))


@dataclass
class Sampled:
    """token_B int64; log_prob_B float32 (full vocabulary, at the sampling temperature; greedy: at 1); kept_mass_B
    float32 (1.0 where nothing was cut); top1_B int64 (most probable id, ties to the lower)."""

    token_B: Tensor
    log_prob_B: Tensor
    kept_mass_B: Tensor
    top1_B: Tensor


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors holding unsigned 32-bit words (broadcast together). Returns four such tensors.

    Source: "Parallel random numbers: as easy as 1, 2, 3", SC11; the same generator as Triton's and cuRAND's.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The int64 products wrap, but their 64 bits are those of the unsigned ones.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(seed_B: Tensor, position_B: Tensor, vocab_size: int, *, first: int = 0) -> Tensor:
    """Standard Gumbel noise [B, vocab_size], float32, a function of (seed, position, token id) alone.

    `first`: id of the first column, a multiple of 4.
    """
    quads = first // 4 + torch.arange(-(-vocab_size // 4), device=seed_B.device)[None]
    zero = torch.zeros((), dtype=torch.int64, device=seed_B.device)
    position, seed = position_B[:, None], seed_B[:, None]
    words = philox(
        (quads, position & _MASK, (position >> 32) & _MASK, zero),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    bits_BV = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    # 32-bit uniforms in (0, 1), exact in float64: -log(1 - u) keeps the small exponentials, which win, at full
    # precision.
    uniform = (bits_BV.to(torch.float64) + 0.5) * 2.0**-32
    return torch.log1p(uniform.neg_()).neg_().log_().neg_().to(torch.float32)


def _cut(z_RP: Tensor, lse: LogSumExp, params: SamplingTensors, row_R: Tensor) -> tuple[Tensor, Tensor]:
    """Kept mask [R, P] and kept mass [R] of the rows that cut anything."""
    log_p = (z_RP - lse.max_T[:, None]) - lse.log_sum_T[:, None]
    sorted_log_p, order = log_p.sort(dim=-1, descending=True, stable=True)  # stable: ties keep the lower id first
    p = sorted_log_p.exp()
    rank = torch.arange(p.shape[1], device=p.device)
    keep = p >= params.min_p_B[row_R, None] * p[:, :1]
    top_k = params.top_k_B[row_R, None]
    keep &= (top_k < 0) | (rank < top_k)
    p = torch.where(keep, p, 0.0)
    before = p.cumsum(-1) - p  # mass of the more probable tokens
    top_p = params.top_p_B[row_R, None]
    keep &= (top_p >= 1.0) | (before < top_p * p.sum(-1, keepdim=True))
    keep[:, 0] = True
    kept_mass = torch.where(keep, p, 0.0).sum(-1)
    return torch.zeros_like(keep).scatter_(1, order, keep), kept_mass


def cutting_rows(params: SamplingTensors) -> Tensor:
    """int64 [R]: rows that cut anything and are not greedy."""
    cuts = (params.top_k_B >= 0) | (params.top_p_B < 1.0) | (params.min_p_B > 0.0)
    return (cuts & (params.temperature_B != 0.0)).nonzero()[:, 0]


def sample(logits_TV: Tensor, params: SamplingTensors) -> Sampled:
    """Draw one token per row from logits as `head_logits` returns them ([B, P] float32, padding -inf).

    Raises:
        ContractError: a row without any finite logit, or with NaN; a parameter out of range.
    """
    check_sampling(params)
    top1_B = logits_TV.argmax(-1)  # torch returns the first maximum
    if not bool(torch.isfinite(logits_TV.gather(1, top1_B[:, None])).all()):
        raise ContractError("sampling: logits hold NaN or no finite value; the model's weights or KV cache are broken")
    z = scale_by_temperature(logits_TV, params.temperature_B)
    lse = log_sum_exp(z)
    kept_mass_B = torch.ones_like(params.temperature_B)
    choice = z
    greedy = params.temperature_B == 0.0
    rows = cutting_rows(params)
    if rows.numel():
        keep, mass = _cut(z[rows], LogSumExp(lse.max_T[rows], lse.log_sum_T[rows]), params, rows)
        choice = z.clone()
        choice[rows] = choice[rows].masked_fill(~keep, -torch.inf)
        kept_mass_B[rows] = torch.where(keep.logical_or(z[rows] == -torch.inf).all(-1), 1.0, mass)
    if bool(greedy.all()):
        token_B = top1_B
    else:
        noise = gumbel_noise(params.seed_B, params.position_B, z.shape[1])
        token_B = torch.where(greedy, top1_B, (choice + noise).argmax(-1))
    return Sampled(token_B, log_probs_from(z, token_B, lse), kept_mass_B, top1_B)


def draw(
    hidden_BD: Tensor, head_PD: Tensor, vocab_size: int, params: SamplingTensors, cut_R: Tensor | None = None
) -> Sampled:
    """Head and sampling in one: a token per row of hidden states [B, D].

    `cut_R`: the rows that cut and are not greedy, int64 on the device, where the caller knows them; a GPU then need
    not be asked, which would wait for it (and could not be captured in a CUDA graph).

    `head_PD` is the head's weight in the layout of `PreparedLinear`. A row without usable logits does not stop the
    others: it draws as if all were zero (on a GPU token 0), and its log-prob is NaN. On a CPU the bits are those of
    `sample` on `head_logits`, and a parameter out of range raises `ContractError`; a GPU's tiles are its own, and to
    check parameters there would wait for it (the engine checks each request's when it is added).
    """
    if on_gpu(hidden_BD):
        return draw_on_gpu(hidden_BD, head_PD, params, cut_R)
    logits_BP = mask_padding(matmul_rows(hidden_BD.to(torch.float32), head_PD), vocab_size)
    broken_B = ~torch.isfinite(logits_BP.amax(dim=-1))
    if not bool(broken_B.any()):
        return sample(logits_BP, params)
    # padding columns stay out of it: their tokens do not exist, and a step that is launched ahead would embed them
    drawn = sample(mask_padding(logits_BP.masked_fill(broken_B[:, None], 0.0), vocab_size), params)
    drawn.log_prob_B = drawn.log_prob_B.masked_fill(broken_B, torch.nan)
    return drawn


def draw_on_gpu(
    hidden_BD: Tensor,
    head_VD: Tensor,
    params: SamplingTensors,
    cut_R: Tensor | None,
    part: VocabularyPart | None = None,
) -> Sampled:
    """`draw` by the GPU's schedules; with `part`, `head_VD` holds its rows only and all ranks call this together."""
    if cut_R is None:
        cut_R = cutting_rows(params)
    if cut_R.shape[0] == hidden_BD.shape[0]:
        return _cut_on_gpu(hidden_BD, head_VD, params, part)
    drawn = kernels("head").sample(
        hidden_BD, head_VD, params.temperature_B, params.seed_B, params.position_B, part=part
    )
    sampled = Sampled(drawn.token_T, drawn.log_prob_T, torch.ones_like(drawn.log_prob_T), drawn.top1_T)
    if cut_R.shape[0]:
        redrawn = _cut_on_gpu(hidden_BD[cut_R], head_VD, params.rows(cut_R), part)
        sampled.token_B[cut_R], sampled.log_prob_B[cut_R] = redrawn.token_B, redrawn.log_prob_B
        sampled.kept_mass_B[cut_R] = redrawn.kept_mass_B
    return sampled


def _cut_on_gpu(hidden_RD: Tensor, head_VD: Tensor, params: SamplingTensors, part: VocabularyPart | None) -> Sampled:
    """Draws of rows that all cut; token 0 and NaN where a row has no usable logits."""
    gpu = kernels("sampling")
    cuts = gpu.Cuts(params.top_k_B, params.top_p_B, params.min_p_B)
    drawn = gpu.sample_with_cuts(
        hidden_RD, head_VD, params.temperature_B, cuts, params.seed_B, params.position_B, part=part
    )
    usable_R = torch.isfinite(drawn.log_prob_R)
    log_prob_R = drawn.log_prob_R.masked_fill(~usable_R, torch.nan)
    return Sampled(drawn.token_R * usable_R, log_prob_R, drawn.kept_mass_R, drawn.top1_R)


def sample_reference(logits_P: Tensor, params: SamplingTensors, row: int) -> int:
    """Slow: the token of one row, without tensors of noise or masks: one Philox word per kept id, a running maximum."""
    temperature = float(params.temperature_B[row])
    z = logits_P if temperature == 0.0 else logits_P / params.temperature_B[row]
    ids = [i for i in range(len(z)) if z[i] > -torch.inf]
    order = sorted(ids, key=lambda i: (-z[i].item(), i))
    if temperature == 0.0:
        return order[0]
    p = torch.softmax(z, -1)
    kept = [i for i in order if p[i] >= params.min_p_B[row] * p[order[0]]]
    if params.top_k_B[row] >= 0:
        kept = kept[: int(params.top_k_B[row])]
    if params.top_p_B[row] < 1.0:
        target, mass = params.top_p_B[row] * p[kept].sum(), 0.0
        nucleus: list[int] = []
        for i in kept:
            if nucleus and mass >= target:
                break
            nucleus.append(i)
            mass += float(p[i])
        kept = nucleus
    seed, position = int(params.seed_B[row]), int(params.position_B[row])
    best, winner = -torch.inf, -1
    for i in sorted(kept):
        counter = tuple(torch.tensor(c) for c in (i // 4, position & _MASK, (position >> 32) & _MASK, 0))
        key = (torch.tensor(seed & _MASK), torch.tensor((seed >> 32) & _MASK))
        word = int(philox(counter, key)[i % 4])  # type: ignore[arg-type]
        noise = -math.log(-math.log1p(-(word + 0.5) * 2.0**-32))
        score = float(z[i] + torch.tensor(noise, dtype=torch.float32))
        if score > best:
            best, winner = score, i
    return winner


def check_sampling(params: SamplingTensors) -> None:
    """Raise `ContractError` naming the first parameter out of range."""
    for name, bad in (
        ("temperature", (params.temperature_B < 0) | ~params.temperature_B.isfinite()),
        ("top_k", (params.top_k_B == 0) | (params.top_k_B < -1)),
        ("top_p", ~((params.top_p_B > 0) & (params.top_p_B <= 1))),
        ("min_p", ~((params.min_p_B >= 0) & (params.min_p_B <= 1))),
    ):
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            value = getattr(params, f"{name}_B")[row].item()
            raise ContractError(
                f"sampling: {name}={value} in row {row}; allowed: temperature >= 0, top_k -1 or >= 1, 0 < top_p <= 1, "
                "0 <= min_p <= 1"
            )
