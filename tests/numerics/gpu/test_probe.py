"""The probe of a GPU, in Triton's interpreter: operands are small integers, so that sums are exact in any order and
only a planted error differs."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from verl_tim.numerics.contract import ContractError, interpreted_schedules
from verl_tim.numerics.gpu import few_rows, gemm, grouped_gemm, probe
from verl_tim.numerics.probe import ProbeReport, ProbeShapes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")

SHAPES = ProbeShapes(
    linears=(((32, 16), 48),),
    hidden_size=48,
    vocab_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    widths=(48,),
    intermediate_size=32,
    moe=(6, 2, 16),
)


class IntegerProbe(probe.GpuProbe):
    def random(self, *size):
        return torch.randint(0, 2, size, generator=self.generator).bfloat16()


def integers(rows, outputs, inputs, device):
    """In place of operands that cancel, whose rounding errors are NumPy's own in the interpreter."""
    generator = torch.Generator(device).manual_seed(0)
    return tuple(torch.randint(0, 2, (n, inputs), generator=generator).bfloat16() for n in (rows, outputs))


@pytest.fixture(autouse=True)
def few_and_unforbidden(monkeypatch):
    monkeypatch.setattr(probe, "ROW_COUNTS", (1, 9, 17))
    monkeypatch.setattr(probe, "EXPERT_ROW_COUNTS", (1, 8))
    monkeypatch.setattr(probe, "_ROWS", 20)
    monkeypatch.setattr(probe, "cancelling", integers)
    monkeypatch.setattr(gemm, "_forbidden", set())
    monkeypatch.setattr(gemm, "_chosen", {})
    monkeypatch.setattr(grouped_gemm, "_forbidden", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "planted")
    with interpreted_schedules():
        yield


@pytest.fixture
def checks():
    return IntegerProbe(torch.device("cpu"), SHAPES, "chunk64", ProbeReport("chunk64", ()))


def _wrong(*arguments, **options):
    few_rows.run(*arguments, bm=16, bn=16, bk=16, swap=False, warps=4, stages=1)
    arguments[3][-1, -1] += 1


def test_linears_and_experts_that_hold(checks):
    checks.linears()
    checks.experts()
    assert not checks.report.forbidden
    assert set(checks.report.comparisons) == {"linear(48, 48)", "linear(64, 48)", "experts"}


def test_shares_of_split_weights_that_hold(monkeypatch):
    shapes = dataclasses.replace(SHAPES, ranks=2, vocab_size=300)
    whole, split = (
        IntegerProbe(torch.device("cpu"), each, "chunk64", ProbeReport("chunk64", ()))
        for each in (dataclasses.replace(shapes, ranks=1), shapes)
    )
    monkeypatch.setattr(probe, "_ROWS", 40)
    for checks in (whole, split):
        checks.linears()
        checks.experts()
        params = probe._sampling(torch.arange(3))
        hidden, weight = checks.random(3, 48), checks.random(300, 48)
        if checks is split:
            checks.shards_of_head(hidden, weight, params, probe.draw(hidden, weight, 300, params))
    assert not split.report.forbidden
    for op in ("linear(48, 48)", "experts", "head"):
        assert split.report.comparisons[op] > whole.report.comparisons.get(op, 0)


def plant(schedule, monkeypatch):
    """The linears' one schedule beside the reference."""
    monkeypatch.setattr(gemm, "_candidates", lambda *_: [schedule, gemm.REFERENCE])
    monkeypatch.setattr(gemm, "_KNOWN", [schedule.name, gemm.REFERENCE.name])


def test_a_share_that_differs_drops_its_schedule(monkeypatch):
    """The schedule holds for 48 outputs, and not for the 24 of a rank."""

    def wrong_for_shares(x, weight, bias, out):
        (_wrong if len(weight) == 24 else gemm.REFERENCE.run)(x, weight, bias, out)

    planted = gemm.Schedule("planted", wrong_for_shares)
    plant(planted, monkeypatch)
    shapes = dataclasses.replace(SHAPES, ranks=2)
    checks = IntegerProbe(torch.device("cpu"), shapes, "chunk64", ProbeReport("chunk64", ()))
    checks.linears()
    assert checks.report.forbidden == ["linear(48, 48): planted"]


def test_a_linear_schedule_that_differs_is_dropped(checks, monkeypatch):
    planted = gemm.Schedule("planted", _wrong)
    plant(planted, monkeypatch)
    checks.linears()
    assert checks.report.forbidden == ["linear(48, 48): planted"]
    assert gemm.forbidden() == {"planted"}


def test_a_schedule_that_cannot_take_the_operands_is_left_out(checks, monkeypatch):
    planted = gemm.Schedule("planted", _wrong, lambda *_: False)
    plant(planted, monkeypatch)
    checks.linears()
    assert not checks.report.forbidden


def test_an_expert_schedule_that_differs_is_dropped(checks, monkeypatch):
    stream = grouped_gemm.stream

    @functools.wraps(stream)
    def wrong(x, weight, plan, **options):
        out = stream(x, weight, plan, **options)
        if plan.tiles.block == 32 and not options.get("swiglu"):
            out[0, 0] = -1000.0
        return out

    monkeypatch.setattr(grouped_gemm, "stream", wrong)
    checks.experts()
    assert checks.report.forbidden == ["experts: stream32"]
    assert "stream32" not in grouped_gemm.schedules()


def test_without_another_schedule_the_device_is_refused(checks, monkeypatch):
    monkeypatch.setattr(probe, "_experts_one_by_one", lambda x, *_: x + 1)
    with pytest.raises(ContractError, match="every schedule is forbidden"):
        checks.experts()
    rowwise = iter([torch.zeros(4, 2), torch.ones(1, 2)])
    with pytest.raises(ContractError, match=r"op is not exact .* 2 of 2 values differ \(rows 3\.\.3 alone"):
        checks.rowwise("op", lambda x: next(rowwise), torch.zeros(4, 2), (1,))
