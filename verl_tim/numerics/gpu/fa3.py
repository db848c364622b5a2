"""Attention contract ``fa3``: FlashAttention 3 as vLLM builds it, never split over keys.

Rule: for head_dim 128 the kernel walks key blocks of 128 from absolute position 0 (for 256: 80) in one sequence,
whatever the mode; with `num_splits=1` nothing else decides the bits of a row. Measured on an H200 with vLLM 0.24.0's
build: packed, paged (pages of 16 to 256), chunked and decode agree in every bit at every position tried up to 16,384,
for head_dim 128 and 256 and 1 to 8 query heads per kv head. For head_dim 64 decode takes other blocks, so it is
refused; 96 and 192 differ between paged and packed calls (read in its source).

The library is vLLM's shared object, loaded by path: importing vllm would take seconds in every process. It has no
backward; the gradient is that of `chunk64`, which takes any forward's output and log-sum-exp.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.gpu.chunk64 import backward

if TYPE_CHECKING:
    from verl_tim.numerics.attention import PackedSequences
    from verl_tim.numerics.paging import DecodeBatch, PagedBatch

__all__ = ["HEAD_DIMS", "backward", "paged", "unsupported", "varlen"]

HEAD_DIMS = (128, 256)
_LIBRARY = Path("vllm_flash_attn") / "_vllm_fa3_C.abi3.so"
_ARGUMENTS = 37  # of the operator whose order of arguments `_forward` writes down


@functools.cache
def _load() -> str | None:
    """Load vLLM's library; None, or why it cannot be used."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return "vLLM, which brings FlashAttention 3, is not installed"
    path = Path(next(iter(spec.submodule_search_locations))) / _LIBRARY
    if not path.is_file():
        return f"this vLLM has no {_LIBRARY}"
    try:
        torch.ops.load_library(str(path))
        schema = torch.ops._vllm_fa3_C.fwd.default._schema
    except (OSError, AttributeError) as error:
        return f"{_LIBRARY} cannot be loaded into this torch: {error}"
    if len(schema.arguments) != _ARGUMENTS:
        return f"{_LIBRARY} has another interface ({len(schema.arguments)} arguments, {_ARGUMENTS} known)"
    return None


def unsupported(head_dim: int, device: torch.device) -> str | None:
    """Why this contract cannot serve a model on a GPU; None if it can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is none of {', '.join(map(str, HEAD_DIMS))}, where its bits hold"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "FlashAttention 3 is for Hopper GPUs"
    return _load()


def _forward(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_query_S1: Tensor,
    cu_key_S1: Tensor | None,
    used_key_S: Tensor | None,
    max_query: int,
    max_key: int,
    block_table_SM: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], log-sum-exp float32 [H, T]); causal, aligned to the last key, one walk over the keys."""
    reason = _load()
    if reason is not None:
        raise ContractError(f"attention=fa3: {reason}")
    nothing: Any = None
    out, lse_HT, *_ = torch.ops._vllm_fa3_C.fwd(
        q_THD, k, v,
        nothing, nothing, nothing,  # k_new, v_new, q_v
        out,
        cu_query_S1, cu_key_S1, nothing,  # cu_seqlens_k_new
        nothing, used_key_S,  # seqused_q
        max_query, max_key,
        block_table_SM, nothing, nothing,  # kv_batch_idx, leftpad_k
        nothing, nothing, nothing,  # rotary_cos, rotary_sin, seqlens_rotary
        nothing, nothing, nothing,  # q_descale, k_descale, v_descale
        q_THD.shape[-1] ** -0.5,
        True, -1, -1, 0.0,  # causal, window left and right, softcap
        True, nothing,  # rotary_interleaved, scheduler_metadata
        1, nothing, 0,  # num_splits, pack_gqa (bits do not depend on it), sm_margin
        nothing, 1, 0, nothing,  # s_aux, cp_world_size, cp_rank, cp_tot_seqused_k
    )  # fmt: skip
    return out, lse_HT


def paged(q_THD: Tensor, k_pages_PSHD: Tensor, v_pages_PSHD: Tensor, batch: PagedBatch | DecodeBatch) -> Tensor:
    """Arguments and result as `numerics.paged_attention`."""
    layout = batch.gpu
    assert layout is not None, "a batch on a GPU has a layout there"
    out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    if batch.num_rows < q_THD.shape[0]:
        out[batch.num_rows :] = 0.0
    _forward(
        q_THD.contiguous(), k_pages_PSHD, v_pages_PSHD, out, layout.query_start_S1, None, layout.context_len_S,
        batch.max_query, batch.max_context, layout.block_table_SM,
    )  # fmt: skip
    return out


def varlen(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], log-sum-exp float32 [H, T]) over packed rows; rows beyond the last sequence are zero."""
    out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    out[packed.num_rows :] = 0.0
    cu = packed.cu_seqlens_int32
    # With one query row the kernel would choose its blocks for a call without pages, which are others.
    longest = max(packed.max_length, 2)
    _, lse_HT = _forward(
        q_THD.contiguous(), k_THD.contiguous(), v_THD.contiguous(), out, cu, cu, None, longest, longest, None
    )
    return out, lse_HT
