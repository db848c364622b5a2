"""The GPU linear: every schedule against float64 in the interpreter, and against each other's bits on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.numerics.bits import close_to_double, randn, same_bits
from verl_tim.numerics import collection
from verl_tim.numerics.contract import ContractError, interpreted_schedules
from verl_tim.numerics.linear import PreparedLinear, linear

from .shapes import LINEARS

gemm = pytest.importorskip("verl_tim.numerics.gpu.gemm")
cublaslt = pytest.importorskip("verl_tim.numerics.gpu.cublaslt")
cancelling = pytest.importorskip("verl_tim.numerics.gpu.cancelling").cancelling

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


def test_the_engines_bias_is_one_that_cublaslt_takes():
    """In the dtype of the result. With another one a slower schedule takes the product's place, step after step."""
    with interpreted_schedules():
        prepared = PreparedLinear((64, 32), 48, dtype=torch.bfloat16, device=torch.device(DEVICE), bias=True)
    x = torch.zeros(17, 48, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty(17, 96, dtype=torch.bfloat16, device=DEVICE)
    assert cublaslt._aligned(x, prepared.weight_PK, prepared.bias_N, out)


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


@pytest.mark.parametrize(("outputs", "inner"), [(2048, 2048), (2048, 6144), (6144, 2048), (12288, 2048)])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 4096])
def test_what_is_in_use_is_what_a_product_takes_and_changes_with_what_is_forbidden(rows, outputs, inner):
    size = (rows, outputs, inner, torch.device(DEVICE))
    every = gemm.schedules(*size)
    compared = set()
    while True:
        using = gemm.in_use(*size)
        assert using[0] is gemm.REFERENCE
        assert {s.name for s in using} <= {s.name for s in every}
        assert gemm.choice(*size) in {s.name for s in using}
        assert gemm._stand_ins(rows)[0] in using, "where the choice cannot take the tensors"
        compared |= {s.name for s in using}
        if gemm.choice(*size) == gemm.REFERENCE.name:
            break
        gemm.forbid(gemm.choice(*size))
    assert compared == {s.name for s in every}, "whatever stands in was in use then"


def test_only_schedules_that_there_are_can_be_forbidden(monkeypatch):
    with pytest.raises(ContractError, match=r"no schedule 'cublaslt'; there are triton:.*, cublaslt:0"):
        gemm.forbid("cublaslt")
    assert gemm.forbidden() == set()
    monkeypatch.setattr(cublaslt, "library", lambda: object())
    monkeypatch.setattr(gemm, "shared_bytes", lambda device: 227 << 10)
    cuda = torch.device("cuda")
    shapes = itertools.product((1, 17), (256, 4096, 6144, 50_000), (64, 4096))
    for name in {one.name for shape in shapes for one in gemm._candidates(*shape, cuda)}:
        gemm.forbid(name)
    assert gemm.forbidden() == set(gemm._KNOWN)


@pytest.mark.parametrize("library", [object(), None])
def test_few_rows_are_streamed_where_the_sweep_showed_that_it_pays(library, monkeypatch):
    """The shapes of docs/benchmarks.md, and what one row more takes."""
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(gemm, "shared_bytes", lambda device: 227 << 10)
    cuda = torch.device("cuda")
    for outputs, inner in LINEARS.values():
        for rows in (1, 9, 16, 17):
            names = [schedule.name for schedule in gemm._candidates(rows, outputs, inner, cuda)]
            assert len(set(names)) == len(names)
            assert names[-1] == gemm.REFERENCE.name
            assert names[0].startswith("triton:") == (library is None or rows <= 16), names
            assert ("16x" in names[0]) == (rows <= 16), names
    for outputs, inner, chosen in (
        (2048, 2048, gemm._STREAM),
        (4096, 2048, gemm._STREAM),  # programs of 32 columns as long as there is a multiprocessor for each
        (5120, 2048, gemm._STREAM_MORE),
        (12288, 2048, gemm._STREAM_WIDE),
        (2048, 4096, gemm._STREAM_LONG),
        (4096, 4096, gemm._STREAM),
        (6144, 4096, gemm._STREAM_MORE),
        (24576, 4096, gemm._STREAM_WIDE),
        (2048, 6144, gemm._STREAM_LONG),
        (4096, 12288, gemm._STREAM),
    ):
        assert gemm._choose(16, outputs, inner, cuda) is chosen


def test_refuses_what_it_cannot_serve():
    x, weight, bias = _inputs(3, 64, 64)
    with pytest.raises(ContractError, match=r"both must be torch\.bfloat16"):
        gemm.gemm(x.float(), weight)
    with pytest.raises(ContractError, match="does not fit the weight"):
        gemm.gemm(x[:, :32], weight)
    with pytest.raises(ContractError, match="bias"):
        gemm.gemm(x, weight, bias_N=bias[:-1])
    with pytest.raises(ContractError, match="bias's last dimension must be contiguous"):
        gemm.gemm(x, weight, bias_N=torch.cat([bias, bias])[::2])
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
    most = max(ROWS)
    x = torch.randn(most, inner, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    weight = torch.randn(outputs, inner, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    want = torch.empty(most, outputs, device="cuda")
    gemm.REFERENCE.run(x, weight, None, want)
    compared = 0
    for rows in (r for r in ROWS if r <= most):
        for schedule in gemm.schedules(rows, outputs, inner):
            first = (most - rows) // 2
            part = slice(first, first + rows)
            got = torch.full((rows, outputs), float("nan"), device="cuda")  # of a head's 8,192 rows 5 GB, as `want`
            if not schedule.serves(x[part], weight, None, got):
                continue
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


@pytest.mark.parametrize(
    ("rows", "outputs", "inner"),
    [
        (13, 24, 40),
        pytest.param(300, 6144, 4096, marks=pytest.mark.gpu),
        pytest.param(1, 128, 2048, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_gradients_against_double_repeat(rows, outputs, inner, out_dtype):
    """Through autograd, as the trainer takes them: the library's choice of kernels, whose results must repeat."""
    x, weight, bias = _inputs(rows, outputs, inner)
    grad = randn(rows, outputs, dtype=torch.bfloat16, seed=3).to(DEVICE)
    found = []
    for _ in range(3):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias.bfloat16())]
        with interpreted_schedules():
            linear(*leaves, out_dtype=out_dtype).backward(grad.to(out_dtype))
        found.append([leaf.grad for leaf in leaves])
    doubles = [t.double().requires_grad_() for t in (x, weight, bias.bfloat16())]
    (doubles[0] @ doubles[1].t() + doubles[2]).backward(grad.double())
    for got, *again, double in zip(*found, doubles, strict=True):
        assert all(same_bits(got, other) for other in again)
        close_to_double(got.cpu(), double.grad.cpu(), torch.bfloat16)


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
        with collection.paused(), torch.cuda.graph(graph):
            gemm.gemm(x, weight, out=out)
        out.zero_()
        graph.replay()
        assert same_bits(out, want)


def test_products_of_cancelling_operands_are_zero_and_tell_orders_apart():
    x, weight = cancelling(5, 24, 96, DEVICE)
    assert not (x.double() @ weight.double().t()).any()
    terms_TNK = x.float()[:, None] * weight.float()[None]
    in_order = torch.zeros(2, 5, 24, device=DEVICE)
    for k in range(48):
        in_order[0] += terms_TNK[..., k]
        in_order[1] += terms_TNK[..., 48 + k]
    halves = in_order[0] + in_order[1]
    one = torch.zeros(5, 24, device=DEVICE)
    for k in range(96):
        one += terms_TNK[..., k]
    assert (one != halves).float().mean() > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", [8, 24, 60, 72, 120, 200, 1000, 5120])
@pytest.mark.parametrize("inner", [64, 768, 2048, 4096])
def test_odd_sizes_have_the_order_of_the_reference(outputs, inner):
    """Sizes that no tile divides: the library then offers algorithms that add two parts of K inside one program."""
    for rows in (1, 3, 8, 17, 60, 64, 100, 700, 2049):
        x, weight = cancelling(rows, outputs, inner, "cuda", seed=rows)
        for dtype in (torch.float32, torch.bfloat16):
            want = torch.empty(rows, outputs, dtype=dtype, device="cuda")
            gemm.REFERENCE.run(x, weight, None, want)
            for schedule in gemm.schedules(rows, outputs, inner):
                got = torch.full_like(want, float("nan"))
                if schedule.serves(x, weight, None, got):
                    schedule.run(x, weight, None, got)
                    assert same_bits(got, want), f"{schedule.name}, {rows} rows, {dtype}"


@pytest.mark.gpu
def test_an_algorithm_of_another_order_is_not_admitted(monkeypatch):
    """The trial itself: against a reference that adds the two halves of K apart, every algorithm must fail."""
    monkeypatch.setattr(cublaslt, "_admitted", {})
    monkeypatch.setattr(cublaslt, "_plans", {})

    def halves(x, weight, bias, out, **_options):
        half = x.shape[1] // 2
        parts = [torch.empty(out.shape, device=out.device) for _ in range(2)]
        gemm.REFERENCE.run(x[:, :half], weight[:, :half], None, parts[0])
        gemm.REFERENCE.run(x[:, half:], weight[:, half:], None, parts[1])
        out.copy_(parts[0] + parts[1])

    x, weight = cancelling(100, 2048, 2048, "cuda")
    out = torch.empty(100, 2048, device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(cublaslt.few_rows, "run", halves)
        assert not cublaslt.serves(x, weight, None, out)
    cublaslt._admitted.clear()
    cublaslt._plans.clear()
    assert cublaslt.serves(x, weight, None, out)


@pytest.mark.parametrize(("rows", "inner_size", "depth"), [(1, 40, 128), (5, 64, 256), (16, 33, 128)])
def test_swiglu_in_the_product(rows, inner_size, depth):
    """One kernel, or a product and then SwiGLU: the same bits, also where columns are no multiple of a block."""
    few_rows = pytest.importorskip("verl_tim.numerics.gpu.few_rows")
    activation = pytest.importorskip("verl_tim.numerics.gpu.activation")
    x = randn(rows, depth, dtype=torch.bfloat16).to(DEVICE)
    weight = randn(2 * inner_size, depth, dtype=torch.bfloat16, seed=1, scale=0.1).to(DEVICE)
    both = torch.empty(rows, 2 * inner_size, dtype=torch.bfloat16, device=DEVICE)
    gemm.REFERENCE.run(x, weight, None, both)
    want = activation.swiglu(both[:, :inner_size], both[:, inner_size:])
    got = few_rows.swiglu(x, weight)
    assert got is not None
    if DEVICE == "cuda":
        assert same_bits(got, want)
    else:  # the interpreter's matrix product orders by the shape of the block
        assert (got.float() - want.float()).abs().max() <= 0.02 * want.float().abs().max()
    assert few_rows.swiglu(x[:, : depth - 8], weight[:, : depth - 8]) is None


def test_swiglu_in_the_product_refuses_what_it_would_misread():
    few_rows = pytest.importorskip("verl_tim.numerics.gpu.few_rows")
    x, weight, _ = _inputs(3, 64, 128)
    with pytest.raises(ContractError, match="gate_up: x has stride 2"):
        few_rows.swiglu(torch.cat([x, x], 1)[:, ::2], weight)
    with pytest.raises(ContractError, match=r"gate_up: x is torch\.float32"):
        few_rows.swiglu(x.float(), weight)
    for other in (weight[:, :64], weight[:63]):
        with pytest.raises(ContractError, match="gate_up: weight is"):
            few_rows.swiglu(x, other)


@pytest.mark.gpu
@pytest.mark.parametrize(("inner_size", "depth"), [(6144, 2048), (12288, 4096), (3072, 1024), (1000, 768)])
def test_swiglu_in_the_product_at_model_sizes(inner_size, depth):
    from verl_tim.numerics.gpu import activation, few_rows

    x, weight = cancelling(16, 2 * inner_size, depth, "cuda")
    both = torch.empty(16, 2 * inner_size, dtype=torch.bfloat16, device="cuda")
    gemm.REFERENCE.run(x, weight, None, both)
    want = activation.swiglu(both[:, :inner_size], both[:, inner_size:])
    for rows in (1, 3, 8, 16):
        got = few_rows.swiglu(x[:rows], weight)
        assert got is not None
        assert same_bits(got, want[:rows]), f"{rows} rows"


def test_no_schedule_takes_more_shared_memory_than_the_device_has(monkeypatch):
    sizes = [(16, outputs, inner) for outputs in (2048, 6144, 12288) for inner in (2048, 6144)]
    every = {s.name for size in sizes for s in gemm.schedules(*size, "cpu")}
    monkeypatch.setattr(gemm, "shared_bytes", lambda device: 99 << 10)  # of an L40S
    fewer = {s.name for size in sizes for s in gemm.schedules(*size, "cpu")}
    assert every - fewer == {"triton:16x32x256/4w6s"}
