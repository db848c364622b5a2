"""Head and sampling over a vocabulary that is split over ranks: the bits of `head.py` and `sampling.py` on one.

Each rank holds the head's rows of whole vocabulary tiles (`shards.VocabularyPart`). A tile's partial results (maximum,
sum, part of the entropy) and a rank's best candidates (top-1, arrival of the draw) are gathered and merged in tile
order on every rank, so that all ranks hold the same tokens and log-probs without another exchange. Rows that cut the
distribution need all of it: their logits are gathered, and every rank draws from them as one rank would.

All functions are collectives: every rank calls them in the same order with the same rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_tim.numerics.contract import COLUMN_FLOOR, VOCAB_TILE, ceil_to, kernels, on_gpu
from verl_tim.numerics.head import (
    LogSumExp,
    entropy_of,
    entropy_tiles,
    mask_padding,
    merge_tiles,
    scale_by_temperature,
    tile_parts,
)
from verl_tim.numerics.linear import matmul_rows
from verl_tim.numerics.sampling import (
    Sampled,
    SamplingTensors,
    check_sampling,
    cutting_rows,
    draw_on_gpu,
    gumbel_noise,
    sample,
)
from verl_tim.numerics.shards import Shards, VocabularyPart


def vocabulary_part(shards: Shards, vocab_size: int, device: torch.device) -> VocabularyPart:
    """This rank's part, on the borders of the device's tiles."""
    tile = kernels("vocabulary_tile").TILE if on_gpu(device) else VOCAB_TILE
    return VocabularyPart(shards, vocab_size, tile)


def _own_logits(hidden_BD: Tensor, head_PD: Tensor, part: VocabularyPart) -> Tensor:
    """float32 [B, P] of this rank's columns, padding -inf; P is 0 where it has none."""
    if not part.width:
        return torch.empty(hidden_BD.shape[0], 0, device=hidden_BD.device)
    return mask_padding(matmul_rows(hidden_BD.to(torch.float32), head_PD), part.width)


def _gather_columns(own_BP: Tensor, part: VocabularyPart) -> Tensor:
    """[B, columns as `head_logits` has them on one rank]."""
    share = part.tiles_per_rank * part.tile
    padded = torch.nn.functional.pad(own_BP, (0, share - own_BP.shape[1]), value=-torch.inf)
    whole = ceil_to(part.vocab_size, COLUMN_FLOOR)
    return part.shards.columns(padded)[:, :whole].contiguous()


def split_logits(hidden_BD: Tensor, head_PD: Tensor, part: VocabularyPart) -> Tensor:
    """float32 logits of the whole vocabulary, as `head_logits` returns them, on every rank."""
    if on_gpu(hidden_BD):
        return kernels("sampling").gather_logits(hidden_BD, head_PD, part)
    return _gather_columns(_own_logits(hidden_BD, head_PD, part), part)


def _tiles(z_BP: Tensor, part: VocabularyPart) -> LogSumExp:
    """Log-sum-exp over every rank's tiles."""
    if part.width:
        maximum, total = tile_parts(z_BP)
    else:
        maximum = total = z_BP  # [B, 0]
    return merge_tiles(*part.gather_tiles(torch.stack([maximum, total])))


def split_log_probs(
    hidden_TD: Tensor,
    head_PD: Tensor,
    part: VocabularyPart,
    token_T: Tensor,
    temperature_T: Tensor,
    *,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`head.token_log_probs` without gradients: (log_probs float32 [T], entropy float32 [T] or None).

    Args:
        hidden_TD: [T, D] in the operand dtype.
        head_PD: this rank's rows, as `PreparedLinear` lays them out.
        token_T: int64 [T]; temperature_T: float32 [T], 0 scores at 1.
    """
    if on_gpu(hidden_TD):
        scored = kernels("head").token_log_probs(
            hidden_TD, head_PD, token_T, temperature_T, with_entropy=with_entropy, part=part
        )
        return scored.log_prob_T, scored.entropy_T
    z_TP = scale_by_temperature(_own_logits(hidden_TD, head_PD, part), temperature_T)
    lse = _tiles(z_TP, part)
    chosen_T = torch.full_like(lse.max_T, torch.nan)
    if part.width:
        here_T = (token_T >= part.first) & (token_T < part.first + part.width)
        column_T = (token_T - part.first).clamp(0, part.width - 1)
        chosen_T = torch.where(here_T, z_TP.gather(1, column_T[:, None])[:, 0], chosen_T)
    chosen_T = part.shards.all(chosen_T).gather(0, part.owner(token_T)[None])[0]
    log_prob_T = (chosen_T - lse.max_T) - lse.log_sum_T
    if not with_entropy:
        return log_prob_T, None
    tiles = entropy_tiles(z_TP[:, : part.width], lse)
    own_TJ = torch.stack(tiles, 1) if tiles else z_TP
    return log_prob_T, entropy_of(part.gather_tiles(own_TJ).unbind(1), lse)


def split_draw(
    hidden_BD: Tensor,
    head_PD: Tensor,
    part: VocabularyPart,
    params: SamplingTensors,
    cut_R: Tensor | None = None,
) -> Sampled:
    """`sampling.draw` over a split vocabulary; the same result on every rank. `cut_R`: as `draw` takes it.

    Raises:
        ContractError: a sampling parameter out of range (on a CPU).
    """
    if on_gpu(hidden_BD):
        return draw_on_gpu(hidden_BD, head_PD, params, cut_R, part)
    check_sampling(params)
    own_BP = _own_logits(hidden_BD, head_PD, part)
    z_BP = scale_by_temperature(own_BP, params.temperature_B)
    lse = _tiles(z_BP, part)
    rows = hidden_BD.shape[0]
    best = torch.full((4, rows), -torch.inf, device=hidden_BD.device)  # largest logit, its z, best score, its z
    ids = torch.zeros(2, rows, dtype=torch.int32, device=hidden_BD.device)
    if part.width:
        noise = gumbel_noise(params.seed_B, params.position_B, own_BP.shape[1], first=part.first)
        score_BP = z_BP + noise
        for number, ranked in enumerate((own_BP, score_BP)):
            at_B1 = ranked.argmax(-1, keepdim=True)  # torch returns the first maximum
            best[2 * number] = ranked.gather(1, at_B1)[:, 0]
            best[2 * number + 1] = z_BP.gather(1, at_B1)[:, 0]
            ids[number] = at_B1[:, 0] + part.first
    every = part.shards.all(torch.cat([best.view(torch.int32), ids]))
    best_RXB, ids_RXB = every[:, :4].view(torch.float32), every[:, 4:].to(torch.int64)

    def winner(number: int) -> tuple[Tensor, Tensor, Tensor]:
        """(largest value, its z, its id) over ranks; ties to the lower rank, which has the lower ids."""
        value_RB = best_RXB[:, 2 * number]
        rank_1B = value_RB.argmax(0, keepdim=True)
        return (
            value_RB.gather(0, rank_1B)[0],
            best_RXB[:, 2 * number + 1].gather(0, rank_1B)[0],
            ids_RXB[:, number].gather(0, rank_1B)[0],
        )

    top_B, top_z_B, top1_B = winner(0)
    _, pick_z_B, pick_B = winner(1)
    greedy_B = params.temperature_B == 0.0
    z_B = torch.where(greedy_B, top_z_B, pick_z_B)
    drawn = Sampled(
        token_B=torch.where(greedy_B, top1_B, pick_B),
        log_prob_B=(z_B - lse.max_T) - lse.log_sum_T,
        kept_mass_B=torch.ones_like(params.temperature_B),
        top1_B=top1_B,
    )
    broken_B = ~torch.isfinite(top_B)  # argmax finds NaN first
    if cut_R is None:
        cut_R = cutting_rows(params)
    if cut_R.numel():
        logits_RP = _gather_columns(own_BP[cut_R], part)
        redrawn = sample(logits_RP.masked_fill(broken_B[cut_R, None], 0.0), params.rows(cut_R))
        drawn.token_B[cut_R], drawn.log_prob_B[cut_R] = redrawn.token_B, redrawn.log_prob_B
        drawn.kept_mass_B[cut_R] = redrawn.kept_mass_B
    drawn.log_prob_B = drawn.log_prob_B.masked_fill(broken_B, torch.nan)
    return drawn
