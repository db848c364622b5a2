"""Which of cuBLASLt's algorithms are used: every branch of the admission, over a library that runs on a CPU."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from tests.numerics.bits import same_bits
from verl_tim.numerics.contract import ContractError

from .fake_cublaslt import Algorithm, FakeCublasLt, ascending, halves

cublaslt = pytest.importorskip("verl_tim.numerics.gpu.cublaslt")
gemm = pytest.importorskip("verl_tim.numerics.gpu.gemm")
cancelling = pytest.importorskip("verl_tim.numerics.gpu.cancelling").cancelling

GOOD, OTHER_GOOD, BAD = Algorithm(ascending), Algorithm(ascending), Algorithm(halves)


def _reference(x, weight, bias, out, **_options):
    y = ascending(x.float()[:, None] * weight.float()[None])
    out.copy_((y if bias is None else y + bias.float()).to(out.dtype))


@pytest.fixture
def library(monkeypatch):
    """Makes a library of some algorithms and puts it in cuBLASLt's place; nothing is known of it yet."""

    def make(**algorithms: Algorithm) -> FakeCublasLt:
        made = FakeCublasLt(algorithms)
        monkeypatch.setattr(cublaslt, "library", lambda: made)
        return made

    monkeypatch.setattr(cublaslt, "_handle", lambda device: 7)
    monkeypatch.setattr(cublaslt, "_admitted", {})
    monkeypatch.setattr(cublaslt, "_plans", {})
    monkeypatch.setattr(cublaslt.few_rows, "run", _reference)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return make


def operands(rows=5, outputs=24, inner=96, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inner, generator=generator).bfloat16()
    weight = torch.randn(outputs, inner, generator=generator).bfloat16()
    return x, weight, None, torch.full((rows, outputs), torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_algorithms_of_the_contracts_order_run(library, dtype):
    lib = library(bad=BAD, good=GOOD, other=OTHER_GOOD, splits=Algorithm(ascending, split=2))
    x, weight, _, out = operands(dtype=dtype)
    assert cublaslt.serves(x, weight, None, out)
    # The trials; what says of itself that it splits is not tried.
    assert [name for name, *_ in lib.ran] == ["bad", "good", "other"]
    want = torch.empty_like(out)
    _reference(x, weight, None, want)
    for rank, name in ((0, "good"), (1, "other"), (7, "other")):
        out.fill_(torch.nan)
        cublaslt.run(x, weight, None, out, rank=rank)
        assert lib.ran[-1][0] == name
        assert same_bits(out, want)


def test_strided_rows_and_a_bias(library):
    lib = library(good=GOOD)
    x, weight, _, _ = operands()
    wide_x, wide_out = torch.cat([x, x], 1), torch.zeros(5, 64)
    bias = torch.randn(24)
    assert cublaslt.serves(wide_x[:, :96], weight, bias, wide_out[:, :24])
    assert len(lib.ran) == 1
    cublaslt.run(wide_x[:, :96], weight, bias, wide_out[:, :24])
    want = torch.empty(5, 24)
    _reference(x, weight, bias, want)
    assert same_bits(wide_out[:, :24].contiguous(), want)
    assert not wide_out[:, 24:].any()
    assert not cublaslt.serves(x, weight, bias.bfloat16(), torch.empty(5, 24))  # a bias of another dtype than out


def test_an_algorithm_is_tried_once_and_a_shape_asked_once(library):
    lib = library(bad=BAD, good=GOOD)
    for rows in (5, 9, 5):
        assert cublaslt.serves(*operands(rows))
    assert len(lib.ran) == 2
    assert lib.asked == 2
    assert cublaslt.serves(*operands(5, inner=64))  # another K is another order
    assert cublaslt.serves(*operands(5, dtype=torch.bfloat16))  # as is another output
    assert len(lib.ran) == 6


def test_nothing_in_order_is_refused_and_the_log_says_why(library, caplog):
    lib = library(
        bad=BAD, hungry=Algorithm(ascending, workspace_of_trials=64), needy=Algorithm(ascending, workspace=64)
    )
    x, weight, _, out = operands()
    with caplog.at_level(logging.INFO, cublaslt.__name__):
        assert not cublaslt.serves(x, weight, None, out)
    assert [name for name, *_ in lib.ran] == ["bad"]
    bad, hungry = caplog.messages
    assert "adds in another order" in bad
    assert "of 120 values differ" in bad
    assert "does not serve the trial's sizes without a workspace" in hungry
    with pytest.raises(ContractError, match=r"no algorithm in the contract's order for x \(5, 96\), weight \(24, 96\)"):
        cublaslt.run(x, weight, None, out)


def test_what_was_not_tried_before_is_not_used_in_a_capture_and_not_forgotten_after(library, monkeypatch):
    lib = library(good=GOOD)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not cublaslt.serves(*operands())
    assert lib.ran == []  # a trial waits for the device, which would end the capture
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cublaslt.serves(*operands())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cublaslt.serves(*operands(9))  # another shape, whose algorithm is known by now
    assert len(lib.ran) == 1


def test_unaligned_tensors_are_not_asked_about(library):
    lib = library(good=GOOD)
    x, weight, _, out = operands()
    for odd in (
        (torch.cat([x, x[:, :1]], 1)[:, :96], weight, None, out),
        (x, weight, None, torch.empty(5, 25)[:, :24]),
        (torch.zeros(5 * 96 + 1, dtype=torch.bfloat16)[1:].view(5, 96), weight, None, out),
    ):
        assert not cublaslt.serves(*odd)
    assert lib.asked == 0


def test_a_trial_of_many_rows_and_outputs_keeps_what_decides_alignment(library, monkeypatch):
    monkeypatch.setattr(cublaslt, "_MOST_ROWS", 64)
    monkeypatch.setattr(cublaslt, "_MOST_OUTPUTS", 128)
    lib = library(good=GOOD)
    assert cublaslt.serves(*operands(rows=200, outputs=264, inner=16))
    assert lib.ran == [("good", 64 + 200 % 64, 128 + 264 % 64, 16)]


def test_what_the_library_made_ends_with_the_plans(library):
    lib = library(bad=BAD, good=GOOD)
    for rows in (5, 9, 13):
        assert cublaslt.serves(*operands(rows))
    gc.collect()
    assert len(lib.objects) == 3 * 4  # of each shape the operation and three layouts; nothing of trials and preferences
    cublaslt._plans.clear()
    gc.collect()
    assert lib.objects == {}


def test_shapes_beyond_the_limit_let_go_of_all_before(library, monkeypatch):
    monkeypatch.setattr(cublaslt, "_MOST_PLANS", 2)
    lib = library(good=GOOD)
    for rows in (5, 9, 13):
        assert cublaslt.serves(*operands(rows))
    assert len(cublaslt._plans) == 1
    gc.collect()
    assert len(lib.objects) == 4


def test_a_status_of_the_library_is_told_with_schedule_and_shape(library, monkeypatch):
    lib = library(good=GOOD)
    x, weight, _, out = operands()
    assert cublaslt.serves(x, weight, None, out)
    with monkeypatch.context() as patch:
        patch.setattr(FakeCublasLt, "cublasLtMatmulAlgoGetHeuristic", lambda *_: 15)
        with pytest.raises(ContractError) as asked:
            cublaslt.serves(*operands(9))
    assert lib.asked == 1
    plan = cublaslt._plans[cublaslt._key(x, weight, None, out)][0]
    monkeypatch.setattr(plan, "_matmul", lambda *_: 13)
    with pytest.raises(ContractError) as ran:
        cublaslt.run(x, weight, None, out, rank=2)
    for error, words in (
        (asked, ("schedule cublaslt:", "cublasLtMatmulAlgoGetHeuristic gave status 15", "x (9, 96)")),
        (ran, ("schedule cublaslt:2", "cublasLtMatmul gave status 13", "x (5, 96)")),
    ):
        for word in (*words, "weight (24, 96), out torch.float32", "trainer=stock", "gemm.forbid"):
            assert word in str(error.value)


def test_loading_runs_what_is_offered_and_admits_none_of_it(library, monkeypatch):
    lib = library(bad=BAD, good=GOOD, splits=Algorithm(ascending, split=2))
    monkeypatch.setattr(gemm, "_forbidden", set())
    gemm.get_ready((5, 9), 24, 96, torch.float32, torch.device("cpu"))
    assert not lib.ran, "no product on a CPU takes the library"
    monkeypatch.setattr(gemm, "_choose", lambda rows, *_: gemm._CUBLASLT[0] if rows == 9 else gemm.REFERENCE)
    gemm.get_ready((5, 9), 24, 96, torch.float32, torch.device("cpu"))
    assert lib.ran == [("bad", 9, 24, 96), ("good", 9, 24, 96)]
    assert not cublaslt._admitted
    assert not cublaslt._plans
    monkeypatch.setattr(FakeCublasLt, "cublasLtMatmulAlgoGetHeuristic", lambda *_: 15)
    with pytest.raises(ContractError, match=r"AlgoGetHeuristic gave status 15 for x \(9, 96\)"):
        gemm.get_ready((9,), 24, 96, torch.float32, torch.device("cpu"))


def test_without_the_library_nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    monkeypatch.setattr(cublaslt, "load", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(gemm, "_choose", lambda *_: gemm._CUBLASLT[0])
    gemm.get_ready((9,), 24, 96, torch.float32, torch.device("cpu"))


@pytest.fixture
def choice(monkeypatch):
    """`gemm` with nothing forbidden or told, whose rule picks a schedule that serves nothing."""
    monkeypatch.setattr(gemm, "_forbidden", set())
    monkeypatch.setattr(gemm, "_chosen", {})
    monkeypatch.setattr(gemm, "_stood_in", set())
    ran = []

    def noting(name):
        def run(x, weight, bias, out):
            ran.append(name)
            _reference(x, weight, bias, out)

        return run

    picky = gemm.Schedule("picky", noting("picky"), lambda *_: False)
    plain, tiled = (
        gemm.Schedule(s.name, noting(name)) for s, name in ((gemm.REFERENCE, "plain"), (gemm._TILED, "tiled"))
    )
    monkeypatch.setattr(gemm, "REFERENCE", plain)
    monkeypatch.setattr(gemm, "_TILED", tiled)
    monkeypatch.setattr(gemm, "_candidates", lambda *_: [picky, tiled, plain])
    return ran


def test_a_slower_schedule_in_its_place_is_told_once(choice, caplog):
    with caplog.at_level(logging.WARNING, gemm.__name__):
        for rows in (5, 5, 65, 64):
            x, weight, _, out = operands(rows)
            gemm.gemm(x, weight, out=out)
            assert torch.isfinite(out).all()
    assert choice == ["plain", "plain", "tiled", "plain"]
    (message,) = caplog.messages
    assert "picky cannot serve 5 rows with weight (24, 96)" in message
    assert f"the slower {gemm.REFERENCE.name} takes its place" in message


def test_what_is_forbidden_takes_no_place(choice):
    gemm.forbid(gemm._TILED.name)
    x, weight, _, out = operands(65)
    gemm.gemm(x, weight, out=out)
    assert choice == ["plain"]
    gemm.forbid(gemm.REFERENCE.name)
    with pytest.raises(ContractError, match=r"every schedule for 65 rows, weight \(24, 96\) is forbidden"):
        gemm.gemm(x, weight, out=out)
