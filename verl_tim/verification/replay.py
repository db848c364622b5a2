"""The engine's model over a whole sequence at once: what a replay of a drawn response computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_tim.engine.runner import RunnableModel
from verl_tim.numerics import PagedBatch
from verl_tim.numerics.contract import ROW_FLOOR, ceil_to

PAGE_SIZE = 16


def response_logits(model: RunnableModel, prompt_P: np.ndarray, response_R: np.ndarray) -> Tensor:
    """fp32 logits (R, padded vocabulary) that each response token would be drawn from. Arguments as below."""
    return model.logits(response_hidden(model, prompt_P, response_R))


def response_log_probs(model: Any, hidden_RD: Tensor, response_R: np.ndarray, temperature: float) -> Tensor:
    """fp32 (R,) on the CPU: what an `EngineModel` would record for the tokens of `response_hidden`'s rows."""
    token_R = torch.from_numpy(response_R).to(hidden_RD.device)
    temperature_R = torch.full(token_R.shape, temperature, device=hidden_RD.device)
    return model.log_probs(hidden_RD, token_R, temperature_R).cpu()


def response_hidden(model: RunnableModel, prompt_P: np.ndarray, response_R: np.ndarray) -> Tensor:
    """(R, hidden): the rows that each response token would be drawn from, by one prefill on own KV pages.

    Args:
        prompt_P, response_R: int64 token ids, at least one each.
    """
    token_T = torch.from_numpy(np.concatenate([prompt_P, response_R]).astype(np.int64))
    length = len(token_T)
    rows, pages = ceil_to(length, ROW_FLOOR), ceil_to(length, PAGE_SIZE) // PAGE_SIZE
    position_T, slot_T, padded_T = (torch.zeros(rows, dtype=torch.int64) for _ in range(3))
    position_T[:length] = torch.arange(length)
    slot_T[:length] = torch.arange(length) + PAGE_SIZE  # page 0 is the null page
    padded_T[:length] = token_T
    batch = PagedBatch(
        query_start_S1=torch.tensor([0, length]),
        context_len_S=torch.tensor([length]),
        block_table_SM=torch.arange(1, pages + 1)[None],
        slot_T=slot_T,
        position_T=position_T,
        device=model.device,
    )
    layers, kv_heads, head_dim = model.kv_shape
    shape = (layers, pages + 1, PAGE_SIZE, kv_heads, head_dim)
    k_pages, v_pages = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
    hidden_TD = model.forward(padded_T.to(model.device), batch, k_pages, v_pages)
    first = len(prompt_P) - 1
    return hidden_TD[first : first + len(response_R)]
