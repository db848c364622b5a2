"""Experts of a small mixture, all of them on every token: a few large products where the router's choice asks for many
small ones.

The warm-up of a small mixture on a GPU waits for launches, and once per expert for the device; with a few dozen small
experts, products that nobody chose cost less than that. transformers takes the function by its name.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "verl_tim_all_experts"


def all_experts_forward(experts: nn.Module, hidden_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """What transformers' eager loop over experts computes, up to the order of sums.

    Args:
        experts: has gate_up_proj (E, 2F, D), gate above up, down_proj (E, D, F) and act_fn (Qwen3MoeExperts).
        hidden_TD: (T, D), any floating dtype.
        expert_TK: (T, K) int64, the chosen experts, all of a row different.
        weight_TK: (T, K), what their outputs are multiplied by.

    Returns:
        (T, D) in the dtype of `hidden_TD`. Takes T * E * 3F elements of memory.
    """
    gate_up_EFD: Tensor = experts.gate_up_proj  # type: ignore[assignment]
    down_EDF: Tensor = experts.down_proj  # type: ignore[assignment]
    count, width = gate_up_EFD.shape[0], down_EDF.shape[-1]
    # a sum over one-hot rows instead of a scatter, which has no kernel of a fixed order
    chosen_TKE = functional.one_hot(expert_TK, count).to(weight_TK.dtype)
    weight_TE = (chosen_TKE * weight_TK.unsqueeze(-1)).sum(1)
    gate_up_TEF = functional.linear(hidden_TD, gate_up_EFD.flatten(0, 1)).unflatten(-1, (count, 2 * width))
    gate_TEF, up_TEF = gate_up_TEF.chunk(2, -1)
    inner_TEF = experts.act_fn(gate_TEF) * up_TEF * weight_TE.unsqueeze(-1)  # type: ignore[operator]
    return functional.linear(inner_TEF.flatten(1).to(hidden_TD.dtype), down_EDF.transpose(0, 1).flatten(1))


ALL_EXPERTS_FUNCTIONS.register(NAME, all_experts_forward)
