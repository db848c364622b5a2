from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from verl_tim.numerics import attention
from verl_tim.numerics import probe as probe_module
from verl_tim.numerics.contract import ContractError
from verl_tim.numerics.linear import matmul_rows, row_blocks, use_row_blocks
from verl_tim.numerics.probe import ProbeShapes, probe

from .bits import DTYPES

SHAPES = ProbeShapes(
    linears=(((64, 32, 32), 64), ((64,), 64), ((96, 96), 64), ((64,), 96)),
    hidden_size=64,
    vocab_size=99,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    widths=(64, 16),
    intermediate_size=96,
    moe=(6, 2, 40),
)


@pytest.fixture(autouse=True, params=[False, True], ids=["all rows", "row blocks"])
def blocks(request):
    """A process starts with one product for all rows, and may have been switched to blocks by an earlier probe."""
    before = row_blocks()
    use_row_blocks(request.param)
    yield request.param
    use_row_blocks(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_passes_here_and_reports_what_it_did(dtype):
    before, random_state = torch.get_num_threads(), torch.get_rng_state()
    report = probe("cpu", dtype, SHAPES, threads=(2, 3))
    assert report.contract.startswith("chunk64/cpu-e/")
    assert report.threads == (1, 2, 3)
    assert set(report.comparisons) == {
        "linear(128, 64)", "linear(64, 64)", "linear(192, 64)", "linear(64, 96)", "rms_norm(64)", "rms_norm(16)",
        "swiglu(96)", "swiglu(37)", "rope(4/2 heads of 16)", "attention(chunk64, 4/2 heads of 16)", "head(99, 64)",
        "sampling(99)", "moe(6 of 40 x 64, top 2)", "grouped_linear(6 of 40 x 64, top 2)",
    }  # fmt: skip
    assert sum(report.comparisons.values()) > 100
    assert report.seconds > 0
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("ranks", [2, 4])
def test_compares_the_shares_of_split_weights(ranks):
    shapes = dataclasses.replace(SHAPES, ranks=ranks, num_kv_heads=4, vocab_size=4096 + 99)
    whole = probe("cpu", torch.bfloat16, dataclasses.replace(shapes, ranks=1), threads=(2,)).comparisons
    split = probe("cpu", torch.bfloat16, shapes, threads=(2,)).comparisons
    for kind in ("linear(128, 64)", "linear(64, 96)", "attention", "head", "grouped_linear"):
        (op,) = (name for name in whole if name.startswith(kind))
        assert split[op] > whole[op]


def _depends_on_columns(x_TK, weight_PK):
    y = matmul_rows(x_TK, weight_PK)
    return y * (1 + 2.0**-23) if weight_PK.shape == (128, 64) else y


def test_names_a_share_that_has_other_bits(monkeypatch):
    """192 outputs alone are fine, and half of them, in 128 padded columns, are not."""
    shapes = dataclasses.replace(SHAPES, linears=(((192,), 64),), ranks=2)
    monkeypatch.setattr(probe_module, "matmul_rows", _depends_on_columns)
    with pytest.raises(ContractError, match=r"probe: linear\(192, 64\) .*rank 0 of 2, 136 rows"):
        probe("cpu", torch.float32, shapes)
    assert probe("cpu", torch.float32, dataclasses.replace(shapes, ranks=1)).comparisons["linear(192, 64)"]


def _depends_on_rows(x_TK, weight_PK):
    y = torch.mm(x_TK, weight_PK.t())
    return y if x_TK.shape[0] > 2 else y * (1 + 2.0**-23)


def _depends_on_position(gate, up):
    out = F.silu(gate) * up
    out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf, dtype=out.dtype))
    return out


def _stock_attention(q, k, v, cu):
    out = torch.zeros_like(q)
    for a, b in itertools.pairwise(cu):
        one = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        out[a:b] = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return out


def _stock_head(hidden, weight, target, temperature):
    return torch.log_softmax(F.linear(hidden, weight) / temperature, -1).gather(1, target[:, None])[:, 0], None


@pytest.mark.parametrize(
    ("name", "fault", "op"),
    [
        ("matmul_rows", _depends_on_rows, r"linear\(128, 64\)"),
        ("swiglu_inference", _depends_on_position, r"swiglu\(96\)"),
        ("varlen_attention", _stock_attention, r"attention\(chunk64, 4/2 heads of 16\)"),
        ("token_log_probs", _stock_head, r"head\(99, 64\)"),
        (
            "grouped_matmul",
            lambda x, w, plan: torch.zeros(1) if plan.capacity else torch.ones(1),
            r"grouped_linear\(6 of 40 x 64, top 2\)",
        ),
    ],
)
def test_names_the_op_that_breaks_the_contract(monkeypatch, name, fault, op, blocks):
    threads = torch.get_num_threads()
    monkeypatch.setattr(probe_module, name, fault)
    with pytest.raises(ContractError, match=f"probe: {op} is not exact .*products of 8 rows each") as failed:
        probe("cpu", torch.float32, SHAPES)
    assert blocks or re.match("probe: .* is not exact .*one product for all rows", str(failed.value.__cause__))
    assert row_blocks() == blocks
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("name", "op"),
    [("matmul_rows", r"linear\(128, 64\)"), ("head_logits", r"head\(99, 64\)"), ("grouped_matmul", r"grouped_linear")],
)
def test_bits_are_those_of_a_process_in_the_other_schedule(monkeypatch, name, op):
    """A product that is consistent in itself and has other bits than one of few rows."""
    product = getattr(probe_module, name)
    monkeypatch.setattr(probe_module, name, lambda *args, **kwargs: product(*args, **kwargs) * (1 + 2.0**-23))
    with pytest.raises(ContractError, match=rf"probe: {op}.* \(against products of 8 rows at one thread;"):
        probe("cpu", torch.float32, SHAPES)


def test_finds_a_split_that_moves_with_the_length(monkeypatch):
    """A fixed number of key splits is batch invariant, but its borders move: the classic decode schedule."""

    def moving(q, k, v, bias, live, scale):
        s = (
            torch.bmm(q, k.transpose(1, 2))[:, :live]
            .unflatten(0, (bias.shape[0], -1))
            .unflatten(2, (bias.shape[1], -1))
        )
        s = (s * scale + bias[:, None, :, None]).flatten(2, 3).flatten(0, 1)
        p = torch.softmax(s, -1)
        half = k.shape[1] // 2
        return torch.bmm(p[..., :half], v[:, :half]) + torch.bmm(p[..., half:], v[:, half:]), s.logsumexp(-1)

    monkeypatch.setattr(attention, "_attend", moving)
    with pytest.raises(ContractError, match="probe: attention"):
        probe("cpu", torch.float32, SHAPES)


def test_refuses_devices_and_dtypes_without_a_contract():
    with pytest.raises(ContractError, match="float16"):
        probe("cpu", torch.float16, SHAPES)
