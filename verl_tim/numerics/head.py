"""Head: logits and log-probs. One rule, and one function, for the sampler and the trainer's loss.

Rule: logits = hidden W^T with float32 accumulation and no rounding to the operand dtype; z = logits / temperature in
float32; log-sum-exp over vocabulary tiles of `VOCAB_TILE` columns, each with its own maximum and sum, merged in
ascending order; log-prob = (z[token] - max) - log(sum). Padding columns are -inf and contribute exact zeros.
On a GPU the tile is `gpu/vocabulary_tile.TILE`, and sums inside it and over tiles are pairwise (`gpu/head.py`).
Free: rows per call. The trainer works in row chunks and recomputes them in backward, so that no [tokens, vocab] tensor
outlives a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from verl_tim.numerics.contract import (
    COLUMN_FLOOR,
    ROW_FLOOR,
    VOCAB_TILE,
    ContractError,
    ceil_to,
    exact_region,
    kernels,
    on_gpu,
    operand,
    pad_dim0,
    require_operands,
)
from verl_tim.numerics.linear import matmul_rows

_CHUNK_ELEMENTS = 1 << 22  # logits in flight in the trainer: 16 MiB of float32


class LogSumExp(NamedTuple):
    """max_T and log_sum_T, float32 [T]: log-sum-exp = max + log_sum, kept apart so that nothing is rounded twice."""

    max_T: Tensor
    log_sum_T: Tensor


def _check(hidden_TD: Tensor, weight_VD: Tensor) -> None:
    require_operands("head", hidden=hidden_TD, weight=weight_VD)
    if hidden_TD.dim() != 2 or weight_VD.dim() != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ContractError(f"head: hidden {tuple(hidden_TD.shape)} does not fit the weight {tuple(weight_VD.shape)}")


def head_logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """float32 logits [T, P], P = vocabulary padded to `COLUMN_FLOOR` with -inf (on a GPU not padded). No autograd.

    Raises `ContractError` for operands whose dtypes or shapes do not fit.
    """
    _check(hidden_TD, weight_VD)
    if on_gpu(hidden_TD):
        return kernels("gemm").gemm(hidden_TD, weight_VD, out_dtype=torch.float32)
    padded = operand(pad_dim0(weight_VD, COLUMN_FLOOR))
    return mask_padding(matmul_rows(operand(hidden_TD), padded), weight_VD.shape[0])


def mask_padding(logits_TP: Tensor, vocab_size: int) -> Tensor:
    """Set the padding columns to -inf, in place."""
    if logits_TP.shape[1] != vocab_size:
        logits_TP[:, vocab_size:] = -torch.inf
    return logits_TP


def _tiles(z_TP: Tensor) -> list[Tensor]:
    """[T, P] -> [T, n, tile] views: all full tiles in one, the ragged last in another."""
    full = z_TP.shape[1] // VOCAB_TILE * VOCAB_TILE
    parts = []
    if full:
        parts.append(z_TP[:, :full].unflatten(1, (-1, VOCAB_TILE)))
    if full != z_TP.shape[1]:
        parts.append(z_TP[:, full:].unsqueeze(1))
    return parts


def tile_parts(z_TP: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exp(z - maximum) of each tile, float32 [T, tiles] each; columns start at a tile's border."""
    maxima, sums = [], []
    for part in _tiles(z_TP):
        tile_max = part.amax(-1)
        # A tile of padding only cannot occur (P < V + COLUMN_FLOOR), but top-k may mask a whole tile.
        shift = torch.where(tile_max == -torch.inf, 0.0, tile_max)
        maxima.append(tile_max)
        sums.append((part - shift[..., None]).exp_().sum(-1))
    return torch.cat(maxima, 1), torch.cat(sums, 1)


def merge_tiles(tile_max: Tensor, tile_sum: Tensor) -> LogSumExp:
    """Tiles' parts [T, tiles] in ascending order."""
    maximum, total = tile_max[:, 0], tile_sum[:, 0]
    for j in range(1, tile_max.shape[1]):
        merged = torch.maximum(maximum, tile_max[:, j])
        safe = torch.where(merged == -torch.inf, 0.0, merged)
        total = total * torch.exp(maximum - safe) + tile_sum[:, j] * torch.exp(tile_max[:, j] - safe)
        maximum = merged
    return LogSumExp(maximum, total.log())


def log_sum_exp(z_TP: Tensor) -> LogSumExp:
    """Contract log-sum-exp of float32 [T, P], P a multiple of `COLUMN_FLOOR`; every tile holds a finite value."""
    return merge_tiles(*tile_parts(z_TP))


def scale_by_temperature(logits_TP: Tensor, temperature_T: Tensor) -> Tensor:
    """z = logits / temperature in float32; rows with temperature 0 (greedy) are scored at temperature 1."""
    if temperature_T.dtype != torch.float32:
        raise ContractError(f"head: the temperature must be float32, got {temperature_T.dtype}")
    divisor = torch.where(temperature_T == 0.0, 1.0, temperature_T)
    return logits_TP / divisor[:, None]


def entropy_tiles(z_TV: Tensor, lse: LogSumExp) -> list[Tensor]:
    """Sum of p * (z - max) over each tile, [T] each; columns start at a tile's border and hold no padding."""
    shifted = z_TV - lse.max_T[:, None]
    weighted = torch.exp(shifted - lse.log_sum_T[:, None]).mul_(shifted)
    return [weighted[:, start : start + VOCAB_TILE].sum(-1) for start in range(0, z_TV.shape[1], VOCAB_TILE)]


def entropy_of(tiles: Iterable[Tensor], lse: LogSumExp) -> Tensor:
    """Entropy in nats, [T]: log_sum - sum p * (z - max), tile by tile in ascending order."""
    total = torch.zeros_like(lse.max_T)
    for tile_T in tiles:
        total = total + tile_T
    return lse.log_sum_T - total


def _entropy(z_TP: Tensor, lse: LogSumExp, vocab_size: int) -> Tensor:
    return entropy_of(entropy_tiles(z_TP[:, :vocab_size], lse), lse)


def log_probs_from(z_TP: Tensor, token_T: Tensor, lse: LogSumExp) -> Tensor:
    """log p(token) = (z[token] - max) - log_sum, float32 [T]."""
    chosen = z_TP.gather(1, token_T[:, None])[:, 0]
    return (chosen - lse.max_T) - lse.log_sum_T


def log_probs_of(
    logits_TV: Tensor, token_T: Tensor, temperature_T: Tensor, *, vocab_size: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of given tokens from logits as `head_logits` returns them, by the CPU's rule on any device.

    Args:
        logits_TV: float32 [T, P].
        token_T: int64 [T].
        temperature_T: float32 [T]; 0 means scored at temperature 1.
        vocab_size: when given, the entropy over that many columns is returned too.

    Returns:
        (log_probs float32 [T], entropy float32 [T] or None).
    """
    z = scale_by_temperature(logits_TV, temperature_T)
    lse = log_sum_exp(z)
    entropy = None if vocab_size is None else _entropy(z, lse, vocab_size)
    return log_probs_from(z, token_T, lse), entropy


def _chunk_rows(vocab_size: int) -> int:
    return max(ROW_FLOOR, _CHUNK_ELEMENTS // ceil_to(vocab_size, COLUMN_FLOOR) // ROW_FLOOR * ROW_FLOOR)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, target_T, temperature_T, with_entropy, top1_out_T):
        if on_gpu(hidden_TD):
            scored = kernels("head").token_log_probs(
                hidden_TD, weight_VD, target_T, temperature_T, with_entropy=with_entropy,
                with_top1=top1_out_T is not None,
            )  # fmt: skip
            if top1_out_T is not None:
                top1_out_T.copy_(scored.top1_T)
            ctx.save_for_backward(
                hidden_TD, weight_VD, target_T, temperature_T, scored.max_T, scored.log_sum_T, scored.entropy_T
            )
            ctx.set_materialize_grads(False)
            return scored.log_prob_T, scored.entropy_T
        vocab = weight_VD.shape[0]
        log_probs = torch.empty(hidden_TD.shape[0], device=hidden_TD.device)
        maximum, log_sum = torch.empty_like(log_probs), torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        with exact_region(hidden_TD.device.type):
            padded = operand(pad_dim0(weight_VD, COLUMN_FLOOR))
            hidden = operand(hidden_TD)
            for start in range(0, hidden.shape[0], _chunk_rows(vocab)):
                rows = slice(start, start + _chunk_rows(vocab))
                logits = mask_padding(matmul_rows(operand(hidden[rows]), padded), vocab)
                z = scale_by_temperature(logits, temperature_T[rows])
                lse = log_sum_exp(z)
                log_probs[rows] = log_probs_from(z, target_T[rows], lse)
                maximum[rows], log_sum[rows] = lse
                if entropy is not None:
                    entropy[rows] = _entropy(z, lse, vocab)
                if top1_out_T is not None:
                    top1_out_T[rows] = logits.argmax(-1)
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, temperature_T, maximum, log_sum, entropy)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_prob_T, grad_entropy_T):
        hidden_TD, weight_VD, target_T, temperature_T, maximum, log_sum, entropy = ctx.saved_tensors
        if grad_log_prob_T is None and grad_entropy_T is None:
            return None, None, None, None, None, None
        if on_gpu(hidden_TD):
            grad_hidden, grad_weight = kernels("head_backward").head_backward(
                hidden_TD, weight_VD, target_T, temperature_T, maximum, log_sum, entropy, grad_log_prob_T,
                grad_entropy_T, hidden_grad=ctx.needs_input_grad[0], weight_grad=ctx.needs_input_grad[1],
            )  # fmt: skip
            return grad_hidden, grad_weight, None, None, None, None
        vocab = weight_VD.shape[0]
        divisor = torch.where(temperature_T == 0.0, 1.0, temperature_T)
        with exact_region(hidden_TD.device.type):
            weight = weight_VD.to(torch.float32)
            padded = operand(pad_dim0(weight, COLUMN_FLOOR))
            grad_hidden = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
            grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
            for start in range(0, hidden_TD.shape[0], _chunk_rows(vocab)):
                rows = slice(start, start + _chunk_rows(vocab))
                hidden = operand(hidden_TD[rows])
                z = (matmul_rows(hidden, padded)[:, :vocab]) / divisor[rows, None]
                log_p = (z - maximum[rows, None]) - log_sum[rows, None]
                p = log_p.exp()
                grad_z = torch.zeros_like(p)
                if grad_log_prob_T is not None:
                    g = grad_log_prob_T[rows, None].to(torch.float32)
                    grad_z.sub_(p * g).scatter_add_(1, target_T[rows, None], g)
                if grad_entropy_T is not None:
                    g = grad_entropy_T[rows, None].to(torch.float32)
                    grad_z.sub_(p * (log_p + entropy[rows, None]) * g)
                grad_logits = grad_z.div_(divisor[rows, None])
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad_logits @ weight).to(hidden_TD.dtype)
                if grad_weight is not None:
                    grad_weight += grad_logits.t() @ hidden
        grad_weight = None if grad_weight is None else grad_weight.to(weight_VD.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def as_temperature(temperature: float | Tensor, rows: int, device: torch.device) -> Tensor:
    """Float32 [rows] temperatures from a scalar or a [rows] tensor.

    A rounded (half-precision) tensor is refused, and a scalar that is negative or not finite.
    """
    if not isinstance(temperature, Tensor):
        if not 0.0 <= temperature < float("inf"):
            raise ContractError(f"head: temperature={temperature}; it must be finite and not negative")
        return torch.full((rows,), float(temperature), dtype=torch.float32, device=device)
    if temperature.dtype not in (torch.float32, torch.float64):
        raise ContractError(
            f"head: the temperature arrived as {temperature.dtype}, already rounded (FSDP2's cast_forward_inputs casts "
            "tensor arguments); pass it as a Python float"
        )
    temperature = temperature.to(device, torch.float32).reshape(-1)
    return temperature.expand(rows) if temperature.numel() == 1 else temperature


def token_log_probs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    temperature: float | Tensor,
    *,
    with_entropy: bool = False,
    top1_out_T: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (and entropy) of target tokens, differentiable in hidden and weight, without a [T, V] tensor kept.

    Args:
        hidden_TD: [T, D] in the operand dtype, final norm applied.
        weight_VD: [V, D] in the operand dtype.
        target_T: int64 [T].
        temperature: a float, or float32 [T] (or [1]); 0 means scored at temperature 1.
        with_entropy: also return the entropy (nats) of the scaled distribution.
        top1_out_T: int64 [T], filled with the id of each row's likeliest token, as the sampler reports it.

    Returns:
        (log_probs float32 [T], entropy float32 [T] or None). Same bits as `sampling.draw`; on a CPU also as
        `log_probs_of(head_logits(...))`.

    Raises:
        ContractError: dtypes, shapes or a temperature that do not fit; on a CPU a target outside the vocabulary, too (a
            GPU, which that would wait for, gives it NaN).
    """
    _check(hidden_TD, weight_VD)
    temperature_T = as_temperature(temperature, hidden_TD.shape[0], hidden_TD.device)
    if temperature_T.shape != target_T.shape or target_T.shape[0] != hidden_TD.shape[0]:
        raise ContractError(
            f"head: {hidden_TD.shape[0]} rows, {tuple(target_T.shape)} targets and {tuple(temperature_T.shape)} "
            "temperatures must agree"
        )
    if not on_gpu(hidden_TD):
        outside_T = (target_T < 0) | (target_T >= weight_VD.shape[0])
        if bool(outside_T.any()):
            row = int(outside_T.nonzero()[0])
            raise ContractError(
                f"head: target {int(target_T[row])} in row {row} is outside the vocabulary of {weight_VD.shape[0]}; "
                "mask such rows and give them any token"
            )
    return _TokenLogProbs.apply(hidden_TD, weight_VD, target_T, temperature_T, with_entropy, top1_out_T)


def log_probs_reference(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, temperature_T: Tensor) -> Tensor:
    """Slow: row by row, tile by tile."""
    out = []
    for hidden_D, target, temperature in zip(hidden_TD, target_T, temperature_T, strict=True):
        z_P = head_logits(hidden_D[None], weight_VD)[0] / (temperature if temperature != 0 else torch.tensor(1.0))
        maximum, total = None, None
        for tile in z_P.split(VOCAB_TILE):
            tile_max = tile.max()
            tile_sum = torch.exp(tile - tile_max).sum()
            if maximum is None or total is None:
                maximum, total = tile_max, tile_sum
            else:
                merged = torch.maximum(maximum, tile_max)
                total = total * torch.exp(maximum - merged) + tile_sum * torch.exp(tile_max - merged)
                maximum = merged
        assert maximum is not None
        assert total is not None
        out.append((z_P[target] - maximum) - total.log())
    return torch.stack(out)
