"""Causal grouped-query attention: the contracts' rules, and the CPU schedule of ``chunk64``.

Two contracts exist; a model uses one of them on both sides, and the contract id names it (`resolve_attention`):
    - ``chunk64``: ours, below; every device, head_dim a multiple of 16. GPU schedules: `gpu/chunk64.py`;
    - ``fa3``: FlashAttention 3 as vLLM builds it, for Hopper GPUs and head_dim 128 or 256 (`gpu/fa3.py`).

Rule of chunk64, for one query row and one head, keys in ascending absolute position:
    - scores s = (q . k) accumulated in float32, times scale = head_dim ** -0.5 in float32;
    - keys are cut into blocks of `KEY_BLOCK` from absolute position 0, blocks into chunks of `CHUNK_KEYS`;
    - inside a chunk an online softmax over its blocks: m_j = max(m_{j-1}, max s), p = exp(s - m_j) (base e on a CPU,
      2 on a GPU), l = l * exp(m_{j-1} - m_j) + sum p, acc = acc * exp(m_{j-1} - m_j) + p V (one float32 GEMM over the
      block; on a GPU p is rounded to the operand dtype first, and its sum comes from the matrix unit, too);
    - chunks are merged in ascending order: m' = max(m, m_c), l = l * exp(m - m') + l_c * exp(m_c - m'), acc alike;
    - out = acc / l, rounded once to the operand dtype. Masked keys contribute exact zeros.

Free: which rows and sequences share a call, query tiles, padding of rows and key blocks, the page size, chunked
prefill cut anywhere. One dense function serves prefill, chunked prefill, decode (paged KV) and the trainer (packed
rows): sequences of similar length are gathered into one [sequences, heads, rows, keys] problem, so that a step is a
few large operations whatever the number of sequences.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from verl_tim.numerics.contract import (
    CHUNK_KEYS,
    KEY_BLOCK,
    ROW_FLOOR,
    ContractError,
    ceil_to,
    exact_region,
    kernels,
    on_gpu,
    require_heads,
    require_operands,
)
from verl_tim.numerics.paging import DecodeBatch, PagedBatch, SequenceGroup, group_sequences

ATTENTION_CONTRACTS = (f"chunk{KEY_BLOCK}", "fa3")
ATTENTION_NAMES = ("auto", *ATTENTION_CONTRACTS)
"""What a config may say; `resolve_attention` makes a contract of it."""

_BLOCKS_PER_CHUNK = CHUNK_KEYS // KEY_BLOCK
_TILE_ELEMENTS = 1 << 21  # scores in flight per query tile: 8 MiB of float32


def resolve_attention(name: str, device: torch.device | str, head_dim: int) -> str:
    """The attention contract that `name` means on a device.

    ``auto`` is ``chunk64``: it needs no other library, and decode, where a rollout spends its time, is as fast as
    FlashAttention's on many sequences and several times faster on few long ones, which ``fa3`` cannot split
    (docs/benchmarks.md). Raises `ContractError` for an unknown name, and for a contract that this device cannot serve,
    with the reason.
    """
    if name not in ATTENTION_NAMES:
        raise ContractError(f"attention={name!r} is unknown; use {', '.join(ATTENTION_NAMES)}")
    if name in ("auto", ATTENTION_CONTRACTS[0]):
        return ATTENTION_CONTRACTS[0]
    reason: str | None = "it needs a GPU"
    if torch.device(device).type == "cuda":
        reason = kernels("fa3").unsupported(head_dim, torch.device(device))
    if reason is None:
        return name
    raise ContractError(f"attention=fa3 cannot serve this model here: {reason}; use attention=chunk64 on both sides")


def _split_heads(x_NQHD: Tensor, num_kv_heads: int, rows: int) -> Tensor:
    """[N, Q, H, D] -> float32 [N * Hkv, rows, D]; row = query * G + head in the group, zero rows appended."""
    n, queries, heads, dim = x_NQHD.shape
    group = heads // num_kv_heads
    out = torch.empty(n, num_kv_heads, rows, dim, device=x_NQHD.device)
    live = queries * group
    if rows > live:
        out[:, :, live:] = 0.0
    out[:, :, :live].view(n, num_kv_heads, queries, group, dim).copy_(
        x_NQHD.view(n, queries, num_kv_heads, group, dim).transpose(1, 2)
    )
    return out.view(n * num_kv_heads, rows, dim)


def _merge_heads(x_BRD: Tensor, n: int, queries: int, heads: int) -> Tensor:
    """Inverse of `_split_heads` for the live rows: [N * Hkv, Q * G, D] -> [N, Q, H, D] (a view)."""
    num_kv_heads = x_BRD.shape[0] // n
    group = heads // num_kv_heads
    return x_BRD.unflatten(0, (n, num_kv_heads)).unflatten(2, (queries, group)).transpose(1, 2).flatten(2, 3)


def _keys_to_heads(x_NKHD: Tensor) -> Tensor:
    """[N, K, Hkv, D] -> float32 [N * Hkv, K, D]."""
    n, keys, heads, dim = x_NKHD.shape
    out = torch.empty(n, heads, keys, dim, device=x_NKHD.device)
    out.copy_(x_NKHD.transpose(1, 2))
    return out.view(n * heads, keys, dim)


def _scores(q_BRD: Tensor, k_BKD: Tensor, bias_NQK: Tensor, live: int, scale: float) -> Tensor:
    """float32 scores [B, R, K]; the `live` first rows are scaled and masked, the others stay finite and inert."""
    s_BRK = torch.bmm(q_BRD, k_BKD.transpose(1, 2))
    n, queries, _keys = bias_NQK.shape
    s = s_BRK[:, :live].unflatten(0, (n, -1)).unflatten(2, (queries, -1))  # [N, Hkv, Q, G, K]
    torch.add(bias_NQK[:, None, :, None], s, alpha=scale, out=s)  # bias is 0 or -inf: one rounding, that of s * scale
    return s_BRK


def _attend(
    q_BRD: Tensor, k_BKD: Tensor, v_BKD: Tensor, bias_NQK: Tensor, live: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The contract's walk for a batch of row tiles.

    Args:
        q_BRD: float32 [B, R, D], R a multiple of `ROW_FLOOR`, B = sequences * kv heads.
        k_BKD, v_BKD: float32 [B, K, D], K a multiple of `KEY_BLOCK`, key 0 at absolute position 0. Masked keys must
            be finite.
        bias_NQK: 0 where the key is visible, -inf elsewhere. Key 0 must be visible to every row.
        live: rows of each tile that are real.

    Returns:
        (out float32 [B, live, D], log-sum-exp float32 [B, live]).
    """
    s_BRK = _scores(q_BRD, k_BKD, bias_NQK, live, scale)
    s = s_BRK[:, :live]
    blocks = s.unflatten(2, (-1, KEY_BLOCK))
    num_blocks = blocks.shape[2]
    block_max = blocks.amax(-1)
    running = torch.empty_like(block_max)
    for start in range(0, num_blocks, _BLOCKS_PER_CHUNK):
        stop = min(start + _BLOCKS_PER_CHUNK, num_blocks)
        running[..., start:stop] = block_max[..., start:stop].cummax(-1).values
    reference = running
    if num_blocks > _BLOCKS_PER_CHUNK:  # a chunk may lie wholly behind a row: keep exp(-inf - (-inf)) out
        reference = torch.where(running == -torch.inf, 0.0, running)
    blocks.sub_(reference[..., None]).exp_()
    block_sum = blocks.sum(-1)
    rescale = torch.exp(running[..., :-1] - reference[..., 1:])  # exp(m_{j-1} - m_j); -inf before the first live block

    merged: tuple[Tensor, Tensor, Tensor] | None = None
    for start in range(0, num_blocks, _BLOCKS_PER_CHUNK):
        stop = min(start + _BLOCKS_PER_CHUNK, num_blocks)
        acc = total = None
        for j in range(start, stop):
            keys = slice(j * KEY_BLOCK, (j + 1) * KEY_BLOCK)
            pv = torch.bmm(s_BRK[:, :, keys], v_BKD[:, keys])[:, :live]
            if acc is None or total is None:
                acc, total = pv, block_sum[..., j]
            else:
                factor = rescale[..., j - 1]
                acc = acc.mul_(factor[..., None]).add_(pv)
                total = total * factor + block_sum[..., j]
        assert acc is not None
        assert total is not None
        maximum = running[..., stop - 1]
        merged = (maximum, total, acc) if merged is None else _merge(merged, (maximum, total, acc))
    assert merged is not None
    maximum, total, acc = merged
    out = acc.div_(total[..., None]).add_(0.0)  # -0.0 becomes +0.0, whatever number of empty blocks followed
    return out, maximum + total.log()


def _merge(left: tuple[Tensor, Tensor, Tensor], right: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge a later chunk's (max, sum, acc) into an earlier one's; the earlier maximum is finite."""
    maximum = torch.maximum(left[0], right[0])
    a, b = torch.exp(left[0] - maximum), torch.exp(right[0] - maximum)
    return maximum, left[1] * a + right[1] * b, left[2] * a[..., None] + right[2] * b[..., None]


def _tiles(group: SequenceGroup, heads: int, num_kv_heads: int) -> list[tuple[int, int, int, int]]:
    """(first query, last query + 1, padded rows, keys) of each query tile of a group, within `_TILE_ELEMENTS`."""
    ratio = heads // num_kv_heads
    if group.queries == 1:
        return [(0, 1, ceil_to(ratio, ROW_FLOOR), group.keys)]
    per_query = max(1, group.size * heads * group.keys)
    step = max(ROW_FLOOR, _TILE_ELEMENTS // per_query // ROW_FLOOR * ROW_FLOOR)
    tiles = []
    for first in range(0, group.queries, step):
        last = min(first + step, group.queries)
        # Rows of the tile see no key beyond the largest position in it.
        keys = min(group.keys, ceil_to(group.max_position(last - 1) + 1, KEY_BLOCK))
        tiles.append((first, last, ceil_to((last - first) * ratio, ROW_FLOOR), keys))
    return tiles


def _attend_group(q_NQHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, group: SequenceGroup) -> tuple[Tensor, Tensor]:
    """Attention of a group's padded queries [N, Q, H, D] -> (out in q's dtype, lse float32 [N, Q, H])."""
    n, queries, heads, dim = q_NQHD.shape
    num_kv_heads = k_BKD.shape[0] // n
    out = torch.empty_like(q_NQHD)
    lse = torch.empty(n, queries, heads, device=q_NQHD.device)
    for first, last, rows, keys in _tiles(group, heads, num_kv_heads):
        tile = q_NQHD[:, first:last]
        live = (last - first) * (heads // num_kv_heads)
        o_BRD, lse_BR = _attend(
            _split_heads(tile, num_kv_heads, rows),
            k_BKD[:, :keys],
            v_BKD[:, :keys],
            group.bias(first, last, keys),
            live,
            dim**-0.5,
        )
        out[:, first:last] = _merge_heads(o_BRD, n, last - first, heads)
        lse[:, first:last] = _merge_heads(lse_BR[..., None], n, last - first, heads)[..., 0]
    return out, lse


def _schedules(contract: str) -> Any:
    """The GPU schedules of an attention contract: the module of its name."""
    return kernels(contract)


def _check(q_THD: Tensor, k: Tensor, v: Tensor, contract: str) -> None:
    """Raise `ContractError` unless the operands fit each other and the device serves the contract."""
    if contract not in ATTENTION_CONTRACTS:
        raise ContractError(f"attention: contract {contract!r} is unknown; use {' or '.join(ATTENTION_CONTRACTS)}")
    if contract != ATTENTION_CONTRACTS[0] and not on_gpu(q_THD):
        raise ContractError(f"attention: {contract} needs a GPU; use {ATTENTION_CONTRACTS[0]} on both sides")
    require_heads(q_THD, k, v)
    require_operands("attention", q=q_THD, k=k, v=v)
    if q_THD.shape[-1] % 16:
        raise ContractError(
            f"attention: head_dim {q_THD.shape[-1]} is not a multiple of 16, which the contract requires"
        )


def paged_attention(
    q_THD: Tensor,
    k_pages_PSHD: Tensor,
    v_pages_PSHD: Tensor,
    batch: PagedBatch | DecodeBatch,
    contract: str = ATTENTION_CONTRACTS[0],
) -> Tensor:
    """Attention of this step's rows over the paged KV cache (which already holds their keys and values).

    Args:
        q_THD: [T, heads, head_dim] in the operand dtype, rotated.
        k_pages_PSHD, v_pages_PSHD: one layer's pages [pages, page_size, kv heads, head_dim]; any page size >= 1. Page
            0 is the null page and must hold finite values.
        batch: the step's layout.
        contract: which attention contract.

    Returns:
        [T, heads, head_dim]; rows beyond the batch's are zero.

    Raises:
        ContractError: operands that do not fit each other, or a contract that this device does not serve.
    """
    num_kv_heads = k_pages_PSHD.shape[2]
    _check(q_THD, k_pages_PSHD, v_pages_PSHD, contract)
    if batch.num_rows > q_THD.shape[0]:
        raise ContractError(f"attention: a batch of {batch.num_rows} rows does not fit {q_THD.shape[0]} rows of q")
    if on_gpu(q_THD):
        return _schedules(contract).paged(q_THD, k_pages_PSHD, v_pages_PSHD, batch)
    k_rows = k_pages_PSHD.flatten(0, 1)
    v_rows = v_pages_PSHD.flatten(0, 1)
    out = torch.empty_like(q_THD)
    if batch.num_rows < q_THD.shape[0]:
        out[batch.num_rows :] = 0.0
    for group in batch.groups(page_size=k_pages_PSHD.shape[1]):
        shape = (group.size, group.keys, num_kv_heads, q_THD.shape[2])
        k_BKD = _keys_to_heads(k_rows.index_select(0, group.key_slots).view(shape))
        v_BKD = _keys_to_heads(v_rows.index_select(0, group.key_slots).view(shape))
        o_NQHD, _ = _attend_group(group.take_rows(q_THD), k_BKD, v_BKD, group)
        group.put_rows(out, o_NQHD)
    return out


class PackedSequences:
    """Where sequences lie in packed rows: `cu_seqlens` [S + 1] int64, rows beyond its end are inert padding.

    `bounds`: the same numbers where the host knows them; a GPU is then not waited for.
    """

    def __init__(self, cu_seqlens: Tensor, bounds: list[int] | None = None) -> None:
        self.cu_seqlens = cu_seqlens
        bounds = cu_seqlens.tolist() if bounds is None else bounds
        if not bounds or bounds[0] != 0 or any(b <= a for a, b in itertools.pairwise(bounds)):
            raise ContractError(f"attention: cu_seqlens must start at 0 and increase strictly, got {bounds[:8]}...")
        self.num_rows = bounds[-1]
        self.lengths = [b - a for a, b in itertools.pairwise(bounds)]
        self.max_length = max(self.lengths, default=0)
        self.cu_seqlens_int32 = cu_seqlens.to(torch.int32)  # as GPU schedules read it
        self.gpu_plan: Any = None  # that of a GPU schedule, made by it

    @functools.cached_property
    def groups(self) -> list[SequenceGroup]:
        """The dense problems of the CPU schedule."""
        starts = self.cu_seqlens.tolist()[:-1]
        return group_sequences(starts, self.lengths, self.lengths, device=self.cu_seqlens.device)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, packed: PackedSequences, contract: str) -> Tensor:
        ctx.packed, ctx.contract = packed, contract
        if on_gpu(q_THD):
            out, lse_HT = _schedules(contract).varlen(q_THD, k_THD, v_THD, packed)
            ctx.save_for_backward(q_THD, k_THD, v_THD, out, lse_HT)
            return out
        out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        lse = torch.zeros(q_THD.shape[:2], device=q_THD.device)
        out[packed.num_rows :] = 0.0
        with exact_region(q_THD.device.type):
            for group in packed.groups:
                k_BKD = _keys_to_heads(group.take_keys(k_THD))
                v_BKD = _keys_to_heads(group.take_keys(v_THD))
                o_NQHD, lse_NQH = _attend_group(group.take_rows(q_THD), k_BKD, v_BKD, group)
                group.put_rows(out, o_NQHD)
                group.put_rows(lse, lse_NQH)
        ctx.save_for_backward(q_THD, k_THD, v_THD, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_THD: Tensor):
        q_THD, k_THD, v_THD, out, lse = ctx.saved_tensors
        if on_gpu(grad_THD):
            grads = _schedules(ctx.contract).backward(grad_THD, q_THD, k_THD, v_THD, out, lse, ctx.packed)
            return *grads, None, None
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q_THD, k_THD, v_THD))
        with exact_region(grad_THD.device.type):
            for group in ctx.packed.groups:
                _backward_group(group, q_THD, k_THD, v_THD, out, lse, grad_THD, grad_q, grad_k, grad_v)
        return grad_q.to(q_THD.dtype), grad_k.to(k_THD.dtype), grad_v.to(v_THD.dtype), None, None


def _backward_group(
    group: SequenceGroup,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    grad_THD: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> None:
    """Standard recomputing backward (probabilities from the saved log-sum-exp), float32, tile by tile in a fixed
    order."""
    heads, dim = q_THD.shape[1:]
    num_kv_heads = k_THD.shape[1]
    scale = dim**-0.5
    n = group.size
    k_BKD, v_BKD = _keys_to_heads(group.take_keys(k_THD)), _keys_to_heads(group.take_keys(v_THD))
    q, g = group.take_rows(q_THD), group.take_rows(grad_THD.contiguous())
    delta = (g.to(torch.float32) * group.take_rows(out_THD).to(torch.float32)).sum(-1, keepdim=True)
    lse = group.take_rows(lse_TH)[..., None]
    # Padded query slots repeat a real row: their gradient must not count.
    live_mask = group.query_mask[:, :, None, None]
    g = torch.where(live_mask, g, torch.zeros((), dtype=g.dtype, device=g.device))
    delta = torch.where(live_mask, delta, torch.zeros((), device=g.device))
    dk, dv = torch.zeros_like(k_BKD), torch.zeros_like(v_BKD)
    dq_NQHD = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for first, last, rows, keys in _tiles(group, heads, num_kv_heads):
        part = slice(first, last)
        live = (last - first) * (heads // num_kv_heads)
        q_BRD = _split_heads(q[:, part], num_kv_heads, rows)
        g_BRD = _split_heads(g[:, part], num_kv_heads, rows)
        p = _scores(q_BRD, k_BKD[:, :keys], group.bias(first, last, keys), live, scale)
        p.sub_(_split_heads(lse[:, part], num_kv_heads, rows)).exp_()
        ds = torch.bmm(g_BRD, v_BKD[:, :keys].transpose(1, 2))
        ds.sub_(_split_heads(delta[:, part], num_kv_heads, rows)).mul_(p).mul_(scale)
        if rows > live:
            ds[:, live:] = 0.0
        dv[:, :keys] += torch.bmm(p.transpose(1, 2), g_BRD)
        dk[:, :keys] += torch.bmm(ds.transpose(1, 2), q_BRD)
        dq_NQHD[:, part] = _merge_heads(torch.bmm(ds, k_BKD[:, :keys])[:, :live], n, last - first, heads)
    group.put_rows(grad_q, dq_NQHD)
    group.put_keys(grad_k, dk.view(n, num_kv_heads, group.keys, dim).transpose(1, 2))
    group.put_keys(grad_v, dv.view(n, num_kv_heads, group.keys, dim).transpose(1, 2))


def varlen_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sequences: PackedSequences | Tensor,
    contract: str = ATTENTION_CONTRACTS[0],
) -> Tensor:
    """Causal attention over packed sequences, differentiable; equal bits to `paged_attention` on the same rows.

    Args:
        q_THD: [T, heads, head_dim]; k_THD, v_THD: [T, kv heads, head_dim]; operand dtype, rotated.
        sequences: `PackedSequences`, or its cu_seqlens [S + 1] (int64). Pass the object to share the plan over layers.
        contract: which attention contract.

    Returns:
        [T, heads, head_dim]; rows beyond cu_seqlens[-1] are zero.

    Raises:
        ContractError: operands or sequences that do not fit each other, or a contract that this device does not serve.
    """
    _check(q_THD, k_THD, v_THD, contract)
    packed = sequences if isinstance(sequences, PackedSequences) else PackedSequences(sequences)
    if not packed.num_rows <= q_THD.shape[0] == k_THD.shape[0]:
        raise ContractError(
            f"attention: sequences of {packed.num_rows} rows do not fit {q_THD.shape[0]} rows of q and "
            f"{k_THD.shape[0]} of k and v"
        )
    return _VarlenAttention.apply(q_THD, k_THD, v_THD, packed, contract)


def attention_reference(q_HD: Tensor, k_KHD: Tensor, v_KHD: Tensor) -> Tensor:
    """Slow: one query row over its visible keys, head by head, block by block, as the rule is written."""
    heads, dim = q_HD.shape
    keys, num_kv_heads = k_KHD.shape[:2]
    scale = torch.tensor(dim**-0.5)
    out = torch.empty(heads, dim)
    for head in range(heads):
        kv_head = head // (heads // num_kv_heads)
        q_8D = torch.zeros(ROW_FLOOR, dim)
        q_8D[0] = q_HD[head].to(torch.float32)
        merged = None
        for chunk in range(0, keys, CHUNK_KEYS):
            state = None
            for start in range(chunk, min(chunk + CHUNK_KEYS, keys), KEY_BLOCK):
                block = slice(start, min(start + KEY_BLOCK, keys))
                visible = block.stop - block.start
                k = torch.zeros(KEY_BLOCK, dim)
                v = torch.zeros(KEY_BLOCK, dim)
                k[:visible] = k_KHD[block, kv_head].to(torch.float32)
                v[:visible] = v_KHD[block, kv_head].to(torch.float32)
                s = torch.mm(q_8D, k.t())[0] * scale
                s[visible:] = -torch.inf
                maximum = s.max() if state is None else torch.maximum(state[0], s.max())
                p_8K = torch.zeros(ROW_FLOOR, KEY_BLOCK)
                p_8K[0] = torch.exp(s - maximum)
                block_sum, pv = p_8K[0].sum(), torch.mm(p_8K, v)[0]
                if state is None:
                    state = (maximum, block_sum, pv)
                else:
                    factor = torch.exp(state[0] - maximum)
                    state = (maximum, state[1] * factor + block_sum, state[2] * factor + pv)
            assert state is not None
            if merged is None:
                merged = state
            else:
                maximum = torch.maximum(merged[0], state[0])
                a, b = torch.exp(merged[0] - maximum), torch.exp(state[0] - maximum)
                merged = (maximum, merged[1] * a + state[1] * b, merged[2] * a + state[2] * b)
        assert merged is not None
        out[head] = merged[2] / merged[1] + 0.0
    return out.to(q_HD.dtype)
