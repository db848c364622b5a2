"""The GPU linear: every schedule against float64 in the interpreter, and against each other's bits on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.bits import close_to_double, randn, same_bits
from verl_tim.numerics.contract import ContractError

from .shapes import HEADS, LINEARS

gemm = pytest.importorskip("verl_tim.numerics.gpu.gemm")
cublaslt = pytest.importorskip("verl_tim.numerics.gpu.cublaslt")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 255, 256, 257, 512, 1000, 2048, 4096, 8192)


@pytest.fixture(autouse=True)
def _nothing_forbidden(monkeypatch):
    monkeypatch.setattr(gemm, "_forbidden", set())
    monkeypatch.setattr(gemm, "_chosen", {})


def _inputs(rows: int, outputs: int, inner: int, device: str = DEVICE):
    x = randn(rows, inner, dtype=torch.bfloat16).to(device)
    return x, randn(outputs, inner, dtype=torch.bfloat16, seed=1).to(device), randn(outputs, seed=2).to(device)


@pytest.mark.parametrize(("rows", "outputs", "inner"), [(1, 64, 64), (5, 130, 96), (20, 72, 128), (70, 40, 72)])
def test_every_schedule_is_close_to_double(rows, outputs, inner):
    x, weight, bias = _inputs(rows, outputs, inner)
    want = x.double() @ weight.double().t()
    for schedule in gemm.schedules(rows, outputs, inner, DEVICE):
        for bias_N in (None, bias.bfloat16()):
            exact = want if bias_N is None else want + bias_N.double()
            for dtype in (torch.float32, torch.bfloat16):
                out = torch.full((rows, outputs), float("nan"), dtype=dtype, device=DEVICE)
                if not schedule.serves(x, weight, bias_N, out):
                    continue
                schedule.run(x, weight, bias_N, out)
                close_to_double(out.cpu(), exact.cpu(), dtype)


def test_bias_is_added_before_the_rounding():
    x, weight, _ = _inputs(3, 64, 64)
    exact = x.double() @ weight.double().t()
    bias = (1024 - exact[0]).float()  # the sum's rounding differs from the rounded product's
    got = gemm.gemm(x[:1], weight, bias_N=bias)
    want = (exact[:1].float() + bias).to(torch.bfloat16)
    assert same_bits(got.cpu(), want.cpu())


def test_strided_rows_and_given_out():
    x, weight, _ = _inputs(6, 64, 64)
    wide_x = torch.cat([x, x], 1)[:, :64]
    wide_out = torch.zeros(6, 128, dtype=torch.float32, device=DEVICE)
    got = gemm.gemm(wide_x, weight, out=wide_out[:, :64])
    assert got.data_ptr() == wide_out.data_ptr()
    assert same_bits(wide_out[:, :64].cpu(), gemm.gemm(x, weight, out_dtype=torch.float32).cpu())
    assert not wide_out[:, 64:].any()


def test_no_rows():
    x, weight, _ = _inputs(1, 64, 64)
    assert gemm.gemm(x[:0], weight).shape == (0, 64)


def test_forbidding_takes_another_schedule_and_shows():
    first = gemm.schedules(70, 64, 64, DEVICE)
    x, weight, _ = _inputs(70, 64, 64)
    want = gemm.gemm(x, weight, out_dtype=torch.float32)
    for schedule in first[1:]:
        gemm.forbid(schedule.name)
    assert gemm.forbidden() == {s.name for s in first[1:]}
    assert [s.name for s in gemm.schedules(70, 64, 64, DEVICE)] == [gemm.REFERENCE.name]
    close_to_double(gemm.gemm(x, weight, out_dtype=torch.float32).cpu(), want.double().cpu(), torch.float32)
    gemm.forbid(gemm.REFERENCE.name)
    with pytest.raises(ContractError, match="every schedule"):
        gemm.gemm(x, weight)


def test_refuses_what_it_cannot_serve():
    x, weight, bias = _inputs(3, 64, 64)
    with pytest.raises(ContractError, match=r"both must be torch\.bfloat16"):
        gemm.gemm(x.float(), weight)
    with pytest.raises(ContractError, match="does not fit the weight"):
        gemm.gemm(x[:, :32], weight)
    with pytest.raises(ContractError, match="bias"):
        gemm.gemm(x, weight, bias_N=bias[:-1])
    with pytest.raises(ContractError, match="out "):
        gemm.gemm(x, weight, out_dtype=torch.float16)
    with pytest.raises(ContractError, match="contiguous"):
        gemm.gemm(x, randn(64, 64, dtype=torch.bfloat16).to(DEVICE).t())


def test_names_are_unique():
    for rows in (1, 16, 17, 33, 64, 65, 4096):
        names = [s.name for s in gemm.schedules(rows, 2048, 2048, DEVICE)]
        assert len(names) == len(set(names))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LINEARS)
def test_every_schedule_has_the_bits_of_the_reference(name):
    """Each row count, each schedule, against the rows of one large reference product, accumulators compared whole."""
    outputs, inner = LINEARS[name]
    most = 512 if name in HEADS else max(ROWS)
    x = torch.randn(most, inner, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    weight = torch.randn(outputs, inner, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    want = torch.empty(most, outputs, device="cuda")
    gemm.REFERENCE.run(x, weight, None, want)
    compared = 0
    for rows in (r for r in ROWS if r <= most):
        for schedule in gemm.schedules(rows, outputs, inner):
            first = (most - rows) // 2
            part = slice(first, first + rows)
            got = torch.full((rows, outputs), float("nan"), device="cuda")
            schedule.run(x[part], weight, None, got)
            assert same_bits(got, want[part]), f"{schedule.name}, {rows} rows"
            if outputs < 32768:
                rounded = torch.empty(rows, outputs, dtype=torch.bfloat16, device="cuda")
                schedule.run(x[part], weight, None, rounded)
                assert same_bits(rounded, want[part].bfloat16()), f"{schedule.name}, {rows} rows, bfloat16"
            compared += 1
    assert compared >= 2 * len([r for r in ROWS if r <= most])


@pytest.mark.gpu
def test_every_schedule_adds_the_bias_alike():
    outputs, inner = 2048, 1536
    x = torch.randn(300, inner, device="cuda").bfloat16()
    weight = torch.randn(outputs, inner, device="cuda").bfloat16()
    bias = torch.randn(outputs, device="cuda").bfloat16()
    for rows in (1, 9, 64, 65, 300):
        want = torch.empty(rows, outputs, dtype=torch.bfloat16, device="cuda")
        gemm.REFERENCE.run(x[:rows], weight, bias, want)
        plain = gemm.gemm(x[:rows], weight, out_dtype=torch.float32)
        assert same_bits(want, (plain + bias.float()).bfloat16())
        for schedule in gemm.schedules(rows, outputs, inner):
            got = torch.empty_like(want)
            schedule.run(x[:rows], weight, bias, got)
            assert same_bits(got, want), schedule.name


@pytest.mark.gpu
def test_every_algorithm_that_cublaslt_offers_has_the_bits():
    for outputs, inner in ((2048, 6144), (4096, 12288), (128, 2048), (12288, 2048)):
        x = torch.randn(512, inner, device="cuda").bfloat16()
        weight = torch.randn(outputs, inner, device="cuda").bfloat16()
        want = torch.empty(512, outputs, device="cuda")
        gemm.REFERENCE.run(x, weight, None, want)
        for rows in (1, 2, 7, 8, 16, 100, 512):
            got = torch.empty(rows, outputs, device="cuda")
            for plan in cublaslt.plans(x[:rows], weight, None, got, 8):
                got.fill_(float("nan"))
                plan.run(x[:rows], weight, None, got)
                assert same_bits(got, want[:rows]), f"{rows} rows, ({outputs}, {inner})"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 64, 1024])
def test_tuning_keeps_the_bits(rows):
    weights = [torch.randn(2048, 6144, device="cuda").bfloat16() for _ in range(4)]
    x = torch.randn(rows, 6144, device="cuda").bfloat16()
    want = gemm.gemm(x, weights[0], out_dtype=torch.float32)
    name = gemm.tune(rows, weights)
    assert gemm._chosen[rows, 2048, 6144, x.device].name == name
    assert same_bits(gemm.gemm(x, weights[0], out_dtype=torch.float32), want)


@pytest.mark.gpu
def test_global_settings_of_torch_are_left_alone():
    before = torch._C._get_blas_preferred_backend(), torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    x, weight, _ = _inputs(128, 2048, 6144, "cuda")
    gemm.gemm(x, weight)
    after = torch._C._get_blas_preferred_backend(), torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    assert before == after


@pytest.mark.gpu
def test_runs_inside_a_cuda_graph():
    outputs, inner = 2048, 6144
    weight = torch.randn(outputs, inner, device="cuda").bfloat16()
    for rows in (8, 100):
        x = torch.randn(rows, inner, device="cuda").bfloat16()
        want = gemm.gemm(x, weight)
        out = torch.zeros_like(want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gemm.gemm(x, weight, out=out)
        out.zero_()
        graph.replay()
        assert same_bits(out, want)
