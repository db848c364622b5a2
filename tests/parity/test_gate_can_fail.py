"""An equality that cannot fail proves nothing: each planted fault must break the comparison that guards against it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import verl_tim.models.contract_layer as contract_layer
import verl_tim.models.trainer as trainer
import verl_tim.numerics.rope as rope
from tests.models.tiny import engine_of, perturb, rollout, tiny_model
from tests.parity.bits import assert_same_bits, recorded, score
from verl_tim.models import apply_contract
from verl_tim.numerics import attention, contract

DTYPE = torch.bfloat16
T = 0.8


@pytest.fixture(scope="module")
def setting():
    hf_model = tiny_model("qwen3", dtype=DTYPE)
    engine = engine_of(hf_model, dtype=DTYPE)
    apply_contract(hf_model)
    return hf_model, engine, rollout(engine, prompts=8, new_tokens=20, temperature=T)


@torch.no_grad()
def _compare(hf_model, sequences, temperature=T) -> int:
    return assert_same_bits(score(hf_model, sequences, "packed", temperature), recorded(sequences), "gate")


def test_without_a_fault_it_holds(setting):
    hf_model, _, sequences = setting
    assert _compare(hf_model, sequences) == 160


def test_one_ulp_in_one_log_prob(setting):
    hf_model, _, sequences = setting
    kept = sequences[3].log_probs[5]
    planted = torch.nextafter(torch.tensor(kept), torch.tensor(0.0))
    sequences[3].log_probs[5] = float(planted)
    try:
        with pytest.raises(AssertionError, match="1 of 160 values differ"):
            _compare(hf_model, sequences)
    finally:
        sequences[3].log_probs[5] = kept


def test_wrong_temperature(setting):
    hf_model, _, sequences = setting
    with pytest.raises(AssertionError, match="differ"):
        _compare(hf_model, sequences, temperature=torch.nextafter(torch.tensor(T), torch.tensor(1.0)).item())


def test_one_ulp_in_one_weight():
    hf_model = tiny_model("qwen3", dtype=DTYPE)
    engine = engine_of(hf_model, dtype=DTYPE)
    apply_contract(hf_model)
    with torch.no_grad():
        weight = hf_model.model.layers[0].mlp.down_proj.weight
        weight[0, 0] += weight[0, 0] * 2.0**-7  # one bf16 ulp
    with pytest.raises(AssertionError, match="differ"):
        _compare(hf_model, rollout(engine, prompts=8, new_tokens=20, temperature=T))


def test_skipped_weight_update():
    hf_model = tiny_model("qwen3", dtype=DTYPE)
    engine = engine_of(hf_model, dtype=DTYPE)
    apply_contract(hf_model)
    perturb(hf_model)
    with pytest.raises(AssertionError, match="differ"):
        _compare(hf_model, rollout(engine, prompts=8, new_tokens=20, temperature=T))


def _stock_swiglu(gate, up):
    return F.silu(gate.float()).mul(up.float()).to(gate.dtype)  # rounds once where the contract rounds twice


def _stock_rms_norm(x, weight, eps):
    return (F.rms_norm(x.float(), (x.shape[-1],), eps=eps) * weight.float()).to(x.dtype)  # multiplies before rounding


def _stock_attention(q, k, v, packed, _contract):
    out = torch.zeros_like(q)
    for a, b in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
        qkv = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        out[a:b] = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return out


def _stock_rope(x, cos, sin):
    cos, sin = (torch.cat([t, t], -1).to(x.dtype)[:, None] for t in (cos, sin))
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat([-x2, x1], -1) * sin


def _stock_head(hidden, weight, target, temperature, *, with_entropy=False, top1_out_T=None):
    logits = F.linear(hidden, weight) / temperature[:, None].to(hidden.dtype)
    return torch.log_softmax(logits.float(), -1).gather(1, target[:, None])[:, 0], None


@pytest.mark.parametrize(
    ("module", "name", "stock"),
    [
        (contract_layer, "swiglu", _stock_swiglu),
        (contract_layer, "rms_norm", _stock_rms_norm),
        (trainer, "rms_norm", _stock_rms_norm),
        (contract_layer, "varlen_attention", _stock_attention),
        (rope, "apply_rope", _stock_rope),
        (trainer, "token_log_probs", _stock_head),
    ],
)
def test_a_stock_op_in_the_trainer(setting, monkeypatch, module, name, stock):
    hf_model, _, sequences = setting
    monkeypatch.setattr(module, name, stock)
    with pytest.raises(AssertionError, match="differ"):
        _compare(hf_model, sequences)


def test_another_key_block(setting, monkeypatch):
    """The key-block size is part of the contract: other blocks, other bits."""
    hf_model, engine, _ = setting
    long = rollout(engine, prompts=4, new_tokens=150, temperature=T, preempt=False)
    assert _compare(hf_model, long) == 600
    monkeypatch.setattr(attention, "KEY_BLOCK", contract.KEY_BLOCK // 2)
    with pytest.raises(AssertionError, match="differ"):
        _compare(hf_model, long)


def test_stock_rollout_differs(setting):
    """The same weights and dtype on stock kernels: the honest mismatch, and its size."""
    hf_model, _, _ = setting
    stock = engine_of(hf_model, dtype=DTYPE, numerics="stock")
    sequences = rollout(stock, prompts=8, new_tokens=20, temperature=T)
    with torch.no_grad():
        difference = (score(hf_model, sequences, "packed", T) - recorded(sequences)).abs()
    assert 1e-4 < difference.mean() < 0.5
    assert (difference > 0).float().mean() > 0.5


def test_a_stock_op_in_the_engine(monkeypatch, setting):
    hf_model, engine, _ = setting
    monkeypatch.setattr(contract_layer, "rms_norm_inference", _stock_rms_norm)
    with pytest.raises(AssertionError, match="differ"):
        _compare(hf_model, rollout(engine, prompts=4, new_tokens=10, temperature=T))
