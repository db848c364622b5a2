"""qk-norm and RoPE in one pass, and the write of keys and values into pages.

Rounding order as `verl_tim.numerics.norm` and `.rope`: per head, x * r rounded to bfloat16, times the weight, rounded;
then float32 products with cos and sin, each rounded, their sum, one rounding to bfloat16. The mean of squares is
`norm.inverse_rms`, so that a head normalised alone by `norm.rms_norm` has the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu.norm import inverse_rms, norm_grad, row_mask, scaled
from verl_tim.numerics.gpu.operand import require_rows, require_shape, whole_rows
from verl_tim.numerics.gpu.overlap import begin, launch
from verl_tim.numerics.gpu.sums import column_sums

_PROGRAMS = 4096  # of a backward, over token blocks and head groups
_STAGES = 1
MANY_TOKENS = 2048


class KVWrite(NamedTuple):
    """Where a step's keys and values go: bfloat16 pages [P, S, H, D] and each row's flat slot (page * S + offset)."""

    k_pages_PSHD: Tensor
    v_pages_PSHD: Tensor
    slot_T: Tensor


@triton.jit
def _load_halves(x, at_HF, live, HALF: tl.constexpr):
    x1 = tl.load(x + at_HF, mask=live, other=0.0).to(tl.float32)
    return x1, tl.load(x + HALF + at_HF, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _load_table(cos, sin, token, repeated_HF, live, HALF: tl.constexpr):
    c = tl.load(cos + token * HALF + repeated_HF, mask=live, other=0.0)
    return c, tl.load(sin + token * HALF + repeated_HF, mask=live, other=0.0)


@triton.jit
def _turned(
    x, at_HF, w1, w2, c, s, live, eps,
    D: tl.constexpr, LOG_F: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Halves of normalised and rotated heads, bfloat16."""
    x1, x2 = _load_halves(x, at_HF, live, D // 2)
    if NORM:
        scale_H = inverse_rms(x1, x2, eps, D, HEADS, LOG_F)
        x1 = scaled(x1, scale_H, w1).to(tl.float32)
        x2 = scaled(x2, scale_H, w2).to(tl.float32)
    return (x1 * c - x2 * s).to(tl.bfloat16), (x2 * c + x1 * s).to(tl.bfloat16)


@triton.jit
def _page_offset(slots, token, page_size, page_stride, slot_stride):
    slot = tl.load(slots + token).to(tl.int64)
    return (slot // page_size) * page_stride + (slot % page_size) * slot_stride


@triton.jit
def _forward(
    q, k, v, q_weight, k_weight, cos, sin, q_out, k_out, k_pages, v_pages, slots,
    q_token, q_head, k_token, k_head, v_token, v_head,
    page_size, k_page, k_slot, k_page_head, v_page, v_slot, v_page_head, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, LOG_F: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, KEEP_K: tl.constexpr, WRITE: tl.constexpr, REPEAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = 2**LOG_F
    HALF: tl.constexpr = D // 2
    Q_GROUPS: tl.constexpr = (Q_HEADS + REPEAT * HEADS - 1) // (REPEAT * HEADS)
    K_GROUPS: tl.constexpr = (K_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column_F = tl.arange(0, F)
    # one element per head and column, though all heads share it: loaded where it is used, not moved between threads
    shared_HF = tl.zeros([HEADS, 1], tl.int32) + column_F[None, :]
    inside = (column_F < HALF)[None, :]
    w1, w2 = shared_HF, shared_HF  # read only if NORM
    if NORM:  # as in `norm`: no step changes them, so they come while the kernel before still works
        of_q, of_k = group < Q_GROUPS, (group >= Q_GROUPS) & (group < Q_GROUPS + K_GROUPS)
        q1, q2 = _load_halves(q_weight, shared_HF, inside & of_q, HALF)
        k1, k2 = _load_halves(k_weight, shared_HF, inside & of_k, HALF)
        w1, w2 = tl.where(of_q, q1, k1), tl.where(of_q, q2, k2)
    begin(OVERLAP)
    if group < Q_GROUPS:
        c, s = _load_table(cos, sin, token, shared_HF, inside, HALF)
        for part in tl.static_range(REPEAT):
            head = (group * REPEAT + part) * HEADS + tl.arange(0, HEADS)
            live = row_mask(head, Q_HEADS, column_F, D, F)
            at = token * q_token + head[:, None] * q_head + column_F[None, :]
            y1, y2 = _turned(q, at, w1, w2, c, s, live, eps, D, LOG_F, HEADS, NORM)
            at = token * Q_HEADS * D + head[:, None] * D + column_F[None, :]
            tl.store(q_out + at, y1, mask=live)
            tl.store(q_out + HALF + at, y2, mask=live)
    elif group < Q_GROUPS + K_GROUPS:
        c, s = _load_table(cos, sin, token, shared_HF, inside, HALF)
        head = (group - Q_GROUPS) * HEADS + tl.arange(0, HEADS)
        live = row_mask(head, K_HEADS, column_F, D, F)
        at = token * k_token + head[:, None] * k_head + column_F[None, :]
        y1, y2 = _turned(k, at, w1, w2, c, s, live, eps, D, LOG_F, HEADS, NORM)
        if KEEP_K:
            at = token * K_HEADS * D + head[:, None] * D + column_F[None, :]
            tl.store(k_out + at, y1, mask=live)
            tl.store(k_out + HALF + at, y2, mask=live)
        if WRITE:
            at = _page_offset(slots, token, page_size, k_page, k_slot)
            at = at + head[:, None] * k_page_head + column_F[None, :]
            tl.store(k_pages + at, y1, mask=live)
            tl.store(k_pages + HALF + at, y2, mask=live)
    elif WRITE:
        head = (group - Q_GROUPS - K_GROUPS) * HEADS + tl.arange(0, HEADS)
        live = row_mask(head, K_HEADS, column_F, D, F)
        at = token * v_token + head[:, None] * v_head + column_F[None, :]
        v1 = tl.load(v + at, mask=live)
        v2 = tl.load(v + HALF + at, mask=live)
        at = _page_offset(slots, token, page_size, v_page, v_slot)
        at = at + head[:, None] * v_page_head + column_F[None, :]
        tl.store(v_pages + at, v1, mask=live)
        tl.store(v_pages + HALF + at, v2, mask=live)


@triton.jit
def _heads_grad(
    grad, x, weight, cos, sin, grad_x, partial, group, tokens, grad_token, grad_head, x_token, x_head, eps,
    ALL_HEADS: tl.constexpr, D: tl.constexpr, LOG_F: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = 2**LOG_F
    HALF: tl.constexpr = D // 2
    GROUPS: tl.constexpr = (ALL_HEADS + HEADS - 1) // HEADS
    column_F = tl.arange(0, F)
    head = group * HEADS + tl.arange(0, HEADS)
    live = row_mask(head, ALL_HEADS, column_F, D, F)
    repeated_HF = tl.zeros([HEADS, 1], tl.int32) + column_F[None, :]
    total1 = tl.zeros([HEADS, F], tl.float32)
    total2 = tl.zeros([HEADS, F], tl.float32)
    if NORM:
        w1, w2 = _load_halves(weight, repeated_HF, live, HALF)
    for start in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        token = tl.full([1, 1], start, tl.int64)
        at = token * grad_token + head[:, None] * grad_head + column_F[None, :]
        g1, g2 = _load_halves(grad, at, live, HALF)
        c, s = _load_table(cos, sin, start, repeated_HF, live, HALF)
        dx1, dx2 = g1 * c + g2 * s, g2 * c - g1 * s
        if NORM:
            at = token * x_token + head[:, None] * x_head + column_F[None, :]
            x1, x2 = _load_halves(x, at, live, HALF)
            dx1, dx2, dw1, dw2 = norm_grad(dx1, dx2, x1, x2, w1, w2, eps, D)
            total1 += dw1
            total2 += dw2
        at = token * ALL_HEADS * D + head[:, None] * D + column_F[None, :]
        tl.store(grad_x + at, dx1.to(tl.bfloat16), mask=live)
        tl.store(grad_x + HALF + at, dx2.to(tl.bfloat16), mask=live)
    if NORM:
        at = (tl.program_id(0) * GROUPS + group) * D + column_F
        tl.store(partial + at, tl.sum(total1, axis=0), mask=column_F < HALF)
        tl.store(partial + HALF + at, tl.sum(total2, axis=0), mask=column_F < HALF)


@triton.jit
def _backward(
    grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, grad_q_in, grad_k_in, q_partial, k_partial, tokens,
    grad_q_token, grad_q_head, grad_k_token, grad_k_head, q_token, q_head, k_token, k_head, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, LOG_F: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    Q_GROUPS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    group = tl.program_id(1)
    if group < Q_GROUPS:
        _heads_grad(
            grad_q, q, q_weight, cos, sin, grad_q_in, q_partial, group, tokens, grad_q_token, grad_q_head, q_token,
            q_head, eps, Q_HEADS, D, LOG_F, HEADS, NORM, STAGES,
        )  # fmt: skip
    else:
        _heads_grad(
            grad_k, k, k_weight, cos, sin, grad_k_in, k_partial, group - Q_GROUPS, tokens, grad_k_token, grad_k_head,
            k_token, k_head, eps, K_HEADS, D, LOG_F, HEADS, NORM, STAGES,
        )  # fmt: skip


def _tile(head_dim: int, q_heads: int) -> tuple[int, int]:
    """(log2 of the padded half head, heads per program). Free: no forward bit depends on it."""
    log_half = triton.next_power_of_2(head_dim // 2).bit_length() - 1
    return log_half, min(triton.next_power_of_2(q_heads), max(1, 512 >> log_half))


def _check(op: str, q_THD: Tensor, k_THD: Tensor, weights: tuple[Tensor | None, Tensor | None], tables) -> None:
    tokens, _, head_dim = q_THD.shape
    require_rows(op, q=q_THD, k=k_THD, q_weight=weights[0], k_weight=weights[1])
    require_shape(op, "k", k_THD, (tokens, k_THD.shape[1], head_dim))
    if head_dim % 2:
        raise ContractError(f"{op}: head_dim {head_dim} is odd; rotary halves need an even one")
    if (weights[0] is None) != (weights[1] is None):
        raise ContractError(f"{op}: q_weight and k_weight must both be given (qk-norm) or both be None")
    for name, weight in zip(("q_weight", "k_weight"), weights, strict=True):
        if weight is not None:
            require_shape(op, name, weight, (head_dim,))
    for name, table in zip(("cos", "sin"), tables, strict=True):
        require_shape(op, name, table, (tokens, head_dim // 2))
        if table.dtype != torch.float32 or not table.is_contiguous():
            raise ContractError(
                f"{op}: {name} is {table.dtype}; it must be float32 and contiguous (FSDP casts arguments)"
            )


def qk_norm_rope(
    q_THD: Tensor,
    k_THD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    *,
    v_THD: Tensor | None = None,
    kv_write: tuple[Tensor, Tensor, Tensor] | None = None,
    keep_k: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Normalise (where weights are given) and rotate q and k; optionally write k and v into pages.

    Args:
        q_THD, k_THD, v_THD: bfloat16 [T, heads, D], heads may be views into one fused row.
        q_weight_D, k_weight_D: bfloat16 [D], or None for models without qk-norm.
        cos_TF, sin_TF: float32 [T, D / 2].
        kv_write: (k_pages [P, S, H, D], v_pages, slot [T] int32 or int64); v is required then. A slot must be named
            once, except that of padding rows (null page): their result is whichever row came last.
        keep_k: whether the rotated k is returned too.

    Returns:
        (q [T, Hq, D], k [T, Hk, D] or None), bfloat16, contiguous.
    """
    op = "qk_norm_rope"
    _check(op, q_THD, k_THD, (q_weight_D, k_weight_D), (cos_TF, sin_TF))
    tokens, q_heads, head_dim = q_THD.shape
    kv_heads = k_THD.shape[1]
    q_out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    k_out = torch.empty(k_THD.shape, dtype=k_THD.dtype, device=k_THD.device) if keep_k else None
    # without a write the kernel reads none of these: a page size that varied with the tokens would compile it again
    v, pages = k_THD, KVWrite(k_THD[:1, None], k_THD[:1, None], q_THD)
    if kv_write is not None:
        if v_THD is None:
            raise ContractError(f"{op}: kv_write needs v_THD")
        v, pages = v_THD, KVWrite(*kv_write)
        require_rows(op, v=v, k_pages=pages.k_pages_PSHD, v_pages=pages.v_pages_PSHD)
        require_shape(op, "v", v, tuple(k_THD.shape))
        require_shape(op, "slots", pages.slot_T, (tokens,))
        for name, page in (("k_pages", pages.k_pages_PSHD), ("v_pages", pages.v_pages_PSHD)):
            require_shape(op, name, page, (page.shape[0], pages.k_pages_PSHD.shape[1], kv_heads, head_dim))
    if not tokens:
        return q_out, k_out
    log_half, heads = _tile(head_dim, q_heads)
    k_groups = triton.cdiv(kv_heads, heads)
    # many tokens fill the device: then a program takes several groups of q heads and loads cos and sin once
    repeat = min(4, triton.cdiv(q_heads, heads)) if tokens >= MANY_TOKENS else 1
    groups = triton.cdiv(q_heads, heads * repeat) + k_groups * (1 if kv_write is None else 2)
    k_pages, v_pages = pages.k_pages_PSHD, pages.v_pages_PSHD
    _forward[(tokens, groups)](
        q_THD, k_THD, v, q_weight_D, k_weight_D, cos_TF, sin_TF, q_out, k_out, k_pages, v_pages, pages.slot_T,
        q_THD.stride(0), q_THD.stride(1), k_THD.stride(0), k_THD.stride(1), v.stride(0), v.stride(1),
        k_pages.shape[1], *k_pages.stride()[:3], *v_pages.stride()[:3], eps,
        Q_HEADS=q_heads, K_HEADS=kv_heads, D=head_dim, LOG_F=log_half, HEADS=heads, NORM=q_weight_D is not None,
        KEEP_K=keep_k, WRITE=kv_write is not None, REPEAT=repeat, num_warps=2, enable_fp_fusion=False,
        **launch(),
    )  # fmt: skip
    return q_out, k_out


def qk_norm_rope_backward(
    grad_q_THD: Tensor,
    grad_k_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `qk_norm_rope` with respect to q, k and the two weights; deterministic.

    q and k are the forward's inputs (unused without qk-norm). Returns (grad q [T, Hq, D], grad k [T, Hk, D], grad
    q_weight [D] or None, grad k_weight [D] or None), bfloat16, contiguous.
    """
    op = "qk_norm_rope_backward"
    _check(op, q_THD, k_THD, (q_weight_D, k_weight_D), (cos_TF, sin_TF))
    grad_q_THD, grad_k_THD = whole_rows(grad_q_THD), whole_rows(grad_k_THD)
    require_rows(op, grad_q=grad_q_THD, grad_k=grad_k_THD)
    require_shape(op, "grad_q", grad_q_THD, tuple(q_THD.shape))
    require_shape(op, "grad_k", grad_k_THD, tuple(k_THD.shape))
    tokens, q_heads, head_dim = q_THD.shape
    kv_heads = k_THD.shape[1]
    grad_q = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    grad_k = torch.empty(k_THD.shape, dtype=k_THD.dtype, device=k_THD.device)
    log_half, heads = _tile(head_dim, q_heads)
    q_groups, k_groups = triton.cdiv(q_heads, heads), triton.cdiv(kv_heads, heads)
    programs = min(tokens, triton.cdiv(_PROGRAMS, q_groups + k_groups))
    q_partial = k_partial = None
    if q_weight_D is not None:
        # zeros: without tokens no program runs
        q_partial = torch.zeros(max(programs, 1) * q_groups, head_dim, dtype=torch.float32, device=q_THD.device)
        k_partial = torch.zeros(max(programs, 1) * k_groups, head_dim, dtype=torch.float32, device=q_THD.device)
    if tokens:
        _backward[(programs, q_groups + k_groups)](
            grad_q_THD, grad_k_THD, q_THD, k_THD, q_weight_D, k_weight_D, cos_TF, sin_TF, grad_q, grad_k, q_partial,
            k_partial, tokens, grad_q_THD.stride(0), grad_q_THD.stride(1), grad_k_THD.stride(0), grad_k_THD.stride(1),
            q_THD.stride(0), q_THD.stride(1), k_THD.stride(0), k_THD.stride(1), eps,
            Q_HEADS=q_heads, K_HEADS=kv_heads, D=head_dim, LOG_F=log_half, HEADS=heads, NORM=q_weight_D is not None,
            STAGES=_STAGES, num_warps=2,
        )  # fmt: skip
    if q_partial is None or k_partial is None or q_weight_D is None or k_weight_D is None:
        return grad_q, grad_k, None, None
    return grad_q, grad_k, column_sums(q_partial, q_weight_D.dtype), column_sums(k_partial, k_weight_D.dtype)
