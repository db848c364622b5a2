"""What can be tested of the vLLM side without vLLM: names, shapes, conversions, and the message where it is missing."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from verl_tim.models.taps import ROTATED
from verl_tim.verification.vllm_engine import (
    TapExtension,
    VllmError,
    answer_of,
    make_llm,
    result_kind,
    routes_of,
    split_qkv,
)

CONFIG = SimpleNamespace(
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    hidden_size=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)


class Linear(nn.Linear):
    """vLLM's linears return (result, bias)."""

    def forward(self, x):
        return super().forward(x), None


class Norm(nn.Module):
    def forward(self, x, residual=None):
        return (x * 2, x) if residual is not None else x * 2


class Attention(nn.Module):
    def forward(self, query, key, value):
        return query + 1


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj, self.attn, self.o_proj = Linear(8, 16), Attention(), Linear(8, 8)

    def forward(self, hidden_states):
        q, k, v = self.qkv_proj(hidden_states)[0].split([8, 4, 4], -1)
        return self.o_proj(self.attn(q, k, v))[0]


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Linear(8, 6)

    def forward(self, x):
        self.gate(x)
        return x


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = SelfAttention(), Moe()

    def forward(self, x, residual):
        x = self.self_attn(hidden_states=self.input_layernorm(x) if residual is None else self.input_layernorm(x, x)[0])
        x, residual = self.post_attention_layernorm(x, x)
        return self.mlp(x), residual


class Model(nn.Module):
    """The module tree and calling conventions of vLLM's Qwen3-MoE."""

    config = CONFIG

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(10, 8)
        self.model.layers = nn.ModuleList([Layer(), Layer()])
        self.model.norm = Norm()

    def forward(self, ids):
        x, residual = self.model.embed_tokens(ids), None
        for layer in self.model.layers:
            x, residual = layer(x, residual)
        return self.model.norm(x, residual)[0]


def test_hooks_give_our_names_in_forward_order(tmp_path):
    from safetensors.torch import load_file

    worker = type("Worker", (TapExtension,), {"get_model": lambda self: self.module})()
    worker.module = Model()
    worker.tim_start_taps()
    ids = torch.arange(5)
    worker.module(ids)
    names = worker.tim_save_taps(str(tmp_path / "taps.safetensors"), 3)
    worker.tim_stop_taps()
    layer = "model.layers.0"
    assert names[:10] == [
        "model.embed_tokens",
        f"{layer}.input_layernorm",
        f"{layer}.self_attn.v_proj",
        f"{layer}.self_attn.q {ROTATED}",
        f"{layer}.self_attn.k {ROTATED}",
        f"{layer}.self_attn.attention",
        f"{layer}.self_attn.o_proj",
        f"{layer}.post_attention_layernorm",
        f"{layer}.mlp.router",
        f"{layer}.mlp.routes",
    ]
    taken = load_file(tmp_path / "taps.safetensors")
    assert {len(x) for x in taken.values()} == {3}
    embedded = worker.module.model.embed_tokens(ids[:3])
    assert torch.equal(taken["model.embed_tokens"], embedded)
    assert torch.equal(taken[f"{layer}.input_layernorm"], embedded * 2)
    value = worker.module.model.layers[0].self_attn.qkv_proj(embedded * 2)[0][:, 12:]
    torch.testing.assert_close(taken[f"{layer}.self_attn.v_proj"], value)
    worker.module(ids)
    assert worker._tim_taps == {}


class Router:
    """Of two tokens: one whose experts come unsorted, one with a tie."""

    def select_experts(self, hidden_states, router_logits):
        return torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)


class CpuExperts:
    def _select_experts(self, *_args):
        return Router().select_experts(None, None)


class Experts(nn.Module):
    """As vLLM 0.28's MoERunner: the router, or a kernel that takes the gate's logits and chooses inside."""

    def __init__(self, gate, kernel=None):
        super().__init__()
        self.gate, self.router = gate, Router()
        self._quant_method = SimpleNamespace(moe_kernel=kernel)

    def forward(self, x):
        logits, _ = self.gate(x)
        kernel = self._quant_method.moe_kernel
        if kernel is None:
            self.router.select_experts(hidden_states=x, router_logits=logits)
        elif hasattr(kernel.fused_experts, "_select_experts"):
            kernel.fused_experts._select_experts(x, logits)
        return x


class GatedMoe(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.gate = Linear(8, 6)
        self.experts = Experts(self.gate, kernel)

    def forward(self, x):
        return self.experts(x)


@pytest.mark.parametrize("kernel", ["modular", "CPU", "fused"])
def test_routes_are_those_that_were_chosen(kernel):
    """and of a kernel that shows nothing, those of the gate's logits."""
    owner = {"CPU": CpuExperts, "fused": SimpleNamespace}.get(kernel)
    model = Model()
    for layer in model.model.layers:
        layer.mlp = GatedMoe(owner and SimpleNamespace(is_monolithic=True, fused_experts=owner()))
    worker = type("Worker", (TapExtension,), {"get_model": lambda self: model})()
    worker.tim_start_taps()
    model(torch.arange(2))
    name = "model.layers.0.mlp"
    taken = dict(worker._tim_taps)
    if kernel == "fused":
        logits, _ = model.model.layers[0].mlp.gate(taken["model.layers.0.post_attention_layernorm"])
        assert torch.equal(taken[f"{name}.routes"], routes_of(logits, name, 2, True)[f"{name}.routes"])
    else:
        assert taken[f"{name}.routes"].tolist() == [[1, 3], [2, 0]]
        assert taken[f"{name}.router"].tolist() == [[0.75, 0.25], [0.5, 0.5]]
    worker.tim_stop_taps()
    worker._tim_taps.clear()
    model(torch.arange(2))
    assert worker._tim_taps == {}


def test_models_of_other_names_are_refused():
    worker = type("Worker", (TapExtension,), {"get_model": lambda self: nn.Sequential(nn.Linear(2, 2))})()
    with pytest.raises(VllmError, match="no module has a known name"):
        worker.tim_start_taps()


def test_names_inside_a_multimodal_model_are_known():
    assert result_kind("language_model.model.layers.3.self_attn.qkv_proj") == "qkv"
    assert result_kind("visual.blocks.0.attn") is None


def test_a_part_of_a_projection_is_refused():
    assert [x.shape[-1] for x in split_qkv(torch.zeros(3, 16), CONFIG)] == [8, 4, 4]
    with pytest.raises(VllmError, match="tensor_parallel_size=1"):
        split_qkv(torch.zeros(3, 8), CONFIG)


def test_routes_of_a_gate():
    routes = routes_of(torch.log(torch.tensor([[0.1, 0.6, 0.3]])), "m", 2, True)
    assert routes["m.routes"].tolist() == [[1, 2]]
    torch.testing.assert_close(routes["m.router"], torch.tensor([[2 / 3, 1 / 3]]))


def entry(rank, value):
    return SimpleNamespace(rank=rank, logprob=value)


def test_an_answer_of_a_completion():
    completion = SimpleNamespace(
        token_ids=[7, 3],
        # the second token was drawn at rank 5: vLLM adds it to the two likeliest
        logprobs=[{7: entry(1, -0.1), 2: entry(2, -3.0)}, {4: entry(1, -0.2), 9: entry(2, -2.0), 3: entry(5, -6.0)}],
    )
    answer = answer_of(np.array([1]), completion, 1.0)
    assert answer.tokens.response_R.tolist() == [7, 3]
    torch.testing.assert_close(answer.log_prob_R, torch.tensor([-0.1, -6.0]))
    assert answer.top.id_R2.tolist() == [[7, 2], [4, 9]]
    torch.testing.assert_close(answer.top.log_prob_R2, torch.tensor([[-0.1, -3.0], [-0.2, -2.0]]))


def test_a_completion_without_two_log_probs_is_refused():
    for logprobs in (None, [{7: entry(1, -0.1)}]):
        with pytest.raises(VllmError, match=r"logprobs=2|ranks \[1\]"):
            answer_of(np.array([1]), SimpleNamespace(token_ids=[7], logprobs=logprobs), 1.0)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_without_vllm_it_says_what_to_install():
    with pytest.raises(VllmError, match=r"pip install .*verl_tim\[gpu\].*--dump"):
        make_llm("model", dtype="bfloat16", max_model_len=8, seed=0)
