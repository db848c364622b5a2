from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parity.bits import assert_same_bits
from verl_tim.models import ModelError, apply_contract
from verl_tim.numerics import ContractError

from .tiny import DTYPES, KINDS, VOCAB, tiny_model

LENGTHS = (40, 1, 66, 9)


def _inputs(seed: int = 0):
    """(packed ids [1, T], packed positions, padded ids, left mask)."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]
    width = max(LENGTHS)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    return torch.cat(rows)[None], torch.cat([torch.arange(n) for n in LENGTHS])[None], ids, mask


def _grads(model) -> dict[str, torch.Tensor]:
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_agree_with_transformers_in_float32(kind):
    _, _, ids, mask = _inputs()
    model = tiny_model(kind, head_scale=2.0)
    real = mask.bool()
    target = torch.roll(ids, -1, 1)
    logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits / 0.8
    log_p = torch.log_softmax(logits, -1)
    want = log_p.gather(2, target[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (want[real].mean() + 0.1 * entropy[real].mean()).backward()
    want_grads = _grads(model)

    apply_contract(model)
    out = model(ids, attention_mask=mask, temperature=0.8)
    (out.log_probs[real].mean() + 0.1 * out.entropy[real].mean()).backward()
    grads = _grads(model)
    assert torch.allclose(out.log_probs[real], want[real], atol=1e-4)
    assert torch.allclose(out.entropy[real], entropy[real], atol=1e-4)
    assert not out.log_probs[~real].any(), "padding positions are zero"
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        scale = want_grads[name].abs().max()
        assert scale > 0, name
        assert (grad - want_grads[name]).abs().max() < 1e-3 * scale, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_padded_give_the_same_bits(kind, dtype):
    packed, position, ids, mask = _inputs()
    model = tiny_model(kind, dtype=dtype)
    handle = apply_contract(model)
    with torch.no_grad():
        want = model(packed, position_ids=position, temperature=0.7)
        left = model(ids, attention_mask=mask, temperature=0.7)
        right_ids, right_mask = torch.zeros_like(ids), torch.zeros_like(mask)
        for i, n in enumerate(LENGTHS):
            right_ids[i, :n], right_mask[i, :n] = ids[i, ids.shape[1] - n :], 1
        right = model(right_ids, attention_mask=right_mask.bool(), temperature=0.7)
    # The target of a sequence's last position is whatever follows it, so it is left out.
    inner = torch.cat([torch.arange(n) < n - 1 for n in LENGTHS])
    for out, m in ((left, mask), (right, right_mask)):
        assert_same_bits(out.log_probs[m.bool()][inner], want.log_probs[0][inner], "padded")
        assert_same_bits(out.entropy[m.bool()], want.entropy[0], "padded entropy")
    assert (handle.forward_calls, handle.tokens) == (3, 3 * sum(LENGTHS))


def test_gradients_do_not_depend_on_checkpointing_or_repetition():
    packed, position, _, _ = _inputs()
    grads = []
    for checkpointing in (False, False, True):
        model = tiny_model("qwen3_moe", dtype=torch.bfloat16).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        apply_contract(model)
        model(packed, position_ids=position).log_probs.mean().backward()
        grads.append(_grads(model))
    for other in grads[1:]:
        for name, grad in grads[0].items():
            assert torch.equal(grad, other[name]), name


def test_checkpointing_recomputes_every_layer():
    packed, position, _, _ = _inputs()
    model = tiny_model("qwen3").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    apply_contract(model)
    calls: list[int] = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda *a: calls.append(0))  # not called: its op is
        layer.register_forward_pre_hook(lambda *a: calls.append(1))
    loss = model(packed, position_ids=position).log_probs.mean()
    assert calls == [1] * 3
    loss.backward()
    assert calls == [1] * 6


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_autocast_outside_changes_nothing(kind):
    packed, position, _, _ = _inputs()
    model = tiny_model(kind)
    apply_contract(model)
    with torch.no_grad():
        want = model(packed, position_ids=position).log_probs
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same_bits(model(packed, position_ids=position).log_probs, want, "autocast")


def test_temperature_per_row_per_position_and_scalar_agree():
    packed, position, ids, mask = _inputs()
    model = tiny_model("qwen3")
    apply_contract(model)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, temperature=0.7).log_probs
        per_row = torch.tensor([0.7, 0.9, 0.7, 1.1])
        got = model(ids, attention_mask=mask, temperature=per_row).log_probs
        assert_same_bits(got[[0, 2]], want[[0, 2]], "rows at the same temperature")
        assert not torch.equal(got[3], want[3])
        every = torch.full((1, packed.shape[1]), 0.7)
        one, all_of_them = (model(packed, position_ids=position, temperature=t).log_probs for t in (0.7, every))
        assert_same_bits(all_of_them, one, "per position")


def test_shift_labels_are_taken_as_they_are():
    packed, position, _, _ = _inputs()
    model = tiny_model("qwen3")
    apply_contract(model)
    labels = torch.roll(packed, -1, 1)
    with torch.no_grad():
        want = model(packed, position_ids=position).log_probs
        assert_same_bits(model(packed, position_ids=position, shift_labels=labels).log_probs, want, "rolled")
        assert not torch.equal(model(packed, position_ids=position, shift_labels=packed).log_probs, want)


def test_entropy_is_computed_on_request_only():
    packed, position, _, _ = _inputs()
    model = tiny_model("qwen3")
    apply_contract(model)
    with torch.no_grad():
        assert model(packed, position_ids=position, calculate_entropy=False).entropy is None
        assert model(packed, position_ids=position).entropy.shape == packed.shape


def test_whole_rows_without_a_mask():
    model = tiny_model("qwen3")
    apply_contract(model)
    ids = torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        want = model(ids, attention_mask=torch.ones_like(ids)).log_probs
        assert_same_bits(model(ids).log_probs, want, "no mask, no positions")
        assert_same_bits(model(ids, position_ids=torch.arange(20).expand(3, -1)).log_probs, want, "no mask")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda p, q, i, m: {"input_ids": p, "position_ids": q + 1}, "must start at 0"),
        (lambda p, q, i, m: {"input_ids": p, "position_ids": (q * 2)}, "count up by one"),
        (lambda p, q, i, m: {"input_ids": i, "attention_mask": torch.where(torch.arange(66) == 60, 0, m)}, "a hole"),
        (lambda p, q, i, m: {"input_ids": i, "attention_mask": m * torch.tensor([1, 0, 1, 1])[:, None]}, "row 1"),
        (
            lambda p, q, i, m: {"input_ids": i, "attention_mask": m, "position_ids": torch.arange(66).expand(4, -1)},
            "count up from 0 over each row",
        ),
        (lambda p, q, i, m: {"input_ids": i, "position_ids": torch.arange(66).expand(4, -1) + 1}, "count up from 0"),
        (lambda p, q, i, m: {"input_ids": p, "position_ids": q[None].expand(4, -1, -1)}, "position_ids must be"),
        (lambda p, q, i, m: {"input_ids": p, "position_ids": q[:, 1:]}, "position_ids must be"),
        (lambda p, q, i, m: {"input_ids": i, "attention_mask": m[:, 1:]}, "must have the shape of input_ids"),
        (lambda p, q, i, m: {"input_ids": i, "attention_mask": m[:2]}, "must have the shape of input_ids"),
        (lambda p, q, i, m: {"input_ids": i, "attention_mask": (m - 1.0) * 1e9}, "1 at real tokens and 0 at padding"),
        (lambda p, q, i, m: {"input_ids": i, "attention_mask": m * 2}, "1 at real tokens and 0 at padding"),
        (lambda p, q, i, m: {"input_ids": i[:0]}, "holds no token"),
        (lambda p, q, i, m: {"input_ids": p[:, :0], "position_ids": q[:, :0]}, "holds no token"),
        (lambda p, q, i, m: {"input_ids": p[0]}, "input_ids must be"),
        (lambda p, q, i, m: {}, "input_ids is required"),
        (lambda p, q, i, m: {"input_ids": p, "shift_labels": p[:, 1:]}, "shift_labels"),
        (lambda p, q, i, m: {"input_ids": i, "temperature": torch.ones(3)}, "temperature: 3 values"),
        (lambda p, q, i, m: {"input_ids": i, "temperature": torch.ones(4).bfloat16()}, "already rounded"),
        (lambda p, q, i, m: {"input_ids": p, "use_cache": True}, "use_cache=True"),
        (lambda p, q, i, m: {"input_ids": p, "pixel_values": 1}, "pixel_values=1"),
        (lambda p, q, i, m: {"input_ids": torch.zeros(1, 1025, dtype=torch.int64)}, "max_position_embeddings=1024"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    model = tiny_model("qwen3")
    handle = apply_contract(model)
    with pytest.raises(ContractError, match=message):
        model(**arguments(*_inputs()))
    assert handle.forward_calls == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_names_every_served_module(kind):
    handle = apply_contract(tiny_model(kind))
    assert set(handle.table) == {
        "",
        "lm_head",
        "model.embed_tokens",
        "model.norm",
        *(f"model.layers.{i}" for i in range(3)),
    }
    assert ("experts" in handle.table["model.layers.0"]) == (kind == "qwen3_moe")
    assert "experts" not in handle.table["model.layers.1"]


def test_remove_gives_transformers_back():
    packed, _, _, _ = _inputs()
    model = tiny_model("qwen3")
    with torch.no_grad():
        want = model(packed).logits
        handle = apply_contract(model)
        assert not hasattr(model(packed), "logits")
        with pytest.raises(ContractError, match="already served"):
            apply_contract(model)
        handle.remove()
        assert torch.equal(model(packed).logits, want)
        apply_contract(model)


def test_refuses_other_models_and_adapters():
    with pytest.raises(ModelError, match="not a transformers causal language model"):
        apply_contract(nn.Linear(2, 2))

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.config, self.model, self.lm_head = inner.config, inner.model, inner.lm_head

    with pytest.raises(ModelError, match="Wrapper wraps or replaces Qwen3ForCausalLM"):
        apply_contract(Wrapper(tiny_model("qwen3")))

    class Adapter(nn.Module):
        pass

    model = tiny_model("qwen3")
    model.model.layers[1].mlp.up_proj = Adapter()
    with pytest.raises(ContractError, match=r"model.layers.1.mlp.up_proj is Adapter"):
        apply_contract(model)


def test_a_model_in_a_dtype_without_a_contract_is_refused():
    packed, position, _, _ = _inputs()
    model = tiny_model("qwen3", dtype=torch.float16)
    apply_contract(model)
    with pytest.raises(ContractError, match="float16"):
        model(packed, position_ids=position)
