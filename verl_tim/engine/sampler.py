"""Sampling parameters of the drawing sequences as the tensors that `numerics.sampling` takes.

Requests of one step mix freely: greedy beside any temperature, cuts beside none. A draw is keyed by (seed, absolute
position of the drawn token), so it depends on no other request, step, or preemption.
"""

from __future__ import annotations

import numpy as np
import torch

from verl_tim.engine.rows import RowTable
from verl_tim.numerics.sampling import SamplingTensors


def sampling_tensors(rows: RowTable, slots_B: np.ndarray, device: torch.device) -> SamplingTensors:
    """Parameters of the next token of each sequence in ``slots_B``."""

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[slots_B]).to(device)

    return SamplingTensors(
        temperature_B=column(rows.temperature_S),
        top_k_B=column(rows.top_k_S),
        top_p_B=column(rows.top_p_S),
        min_p_B=column(rows.min_p_S),
        seed_B=column(rows.seed_S),
        position_B=column(rows.num_tokens_S),
    )
