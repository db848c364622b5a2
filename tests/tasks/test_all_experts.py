"""All experts on every token against transformers' loop over the chosen ones: outputs and gradients, in float64."""

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from verl_tim.tasks import all_experts


def experts(implementation):
    config = Qwen3MoeConfig(hidden_size=24, moe_intermediate_size=8, num_experts=6, num_experts_per_tok=2)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    made = Qwen3MoeExperts(config).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def backward(implementation, tokens, skewed):
    module = experts(implementation)
    torch.manual_seed(1)
    hidden_TD = torch.randn(tokens, 24, dtype=torch.float64, requires_grad=True)
    scores_TE = torch.randn(tokens, 6, dtype=torch.float64)
    if skewed:
        scores_TE[:, 2:] -= 100  # four experts that nobody chooses
    weight_TK, expert_TK = scores_TE.softmax(-1).topk(2)
    weight_TK = weight_TK.requires_grad_()
    output_TD = module(hidden_TD, expert_TK, weight_TK)
    (output_TD * torch.randn(tokens, 24, dtype=torch.float64)).sum().backward()
    return [output_TD, hidden_TD.grad, weight_TK.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize(("tokens", "skewed"), [(1, False), (13, False), (40, True)])
def test_they_are_the_loops(tokens, skewed):
    for got, want in zip(backward(all_experts.NAME, tokens, skewed), backward("eager", tokens, skewed), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
