"""The probe of a GPU, in Triton's interpreter: operands are small integers, so that sums are exact in any order and
only a planted error differs."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from verl_tim.numerics.contract import ContractError, interpreted_schedules
from verl_tim.numerics.gpu import attention, attention_plan, few_rows, gemm, grouped_gemm, head, probe, rope, sampling
from verl_tim.numerics.probe import ProbeReport, ProbeShapes
from verl_tim.numerics.sampling import Sampled

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

EXPERTS = "experts(6 of 16 x 48, top 2)"


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
    for module in (attention, few_rows, grouped_gemm, head):
        monkeypatch.setattr(module, "_forbidden", set())
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
    assert set(checks.report.comparisons) == {"linear(48, 48)", "linear(64, 48)", EXPERTS}


def test_shares_of_split_weights_that_hold(monkeypatch):
    shapes = dataclasses.replace(SHAPES, ranks=2, vocab_size=300)
    whole, split = (
        IntegerProbe(torch.device("cpu"), each, "chunk64", ProbeReport("chunk64", ()))
        for each in (dataclasses.replace(shapes, ranks=1), shapes)
    )
    monkeypatch.setattr(probe, "_ROWS", 40)
    monkeypatch.setattr(sampling, "CHUNK_ROWS", 2)
    for checks in (whole, split):
        checks.linears()
        checks.experts()
        params = probe._sampling(torch.arange(3))
        hidden, weight = checks.random(3, 48), checks.random(300, 48)
        if checks is split:
            none = probe._no_rows(checks.device)
            checks.shards_of_head(
                "head(300, 48)", hidden, weight, params, none, probe.draw(hidden, weight, 300, params)
            )
            checks.cuts()  # of the whole head, too
    assert not split.report.forbidden
    for op in ("linear(48, 48)", EXPERTS, "head(300, 48)", "cuts(300, 48)"):
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


def test_what_takes_the_place_of_a_dropped_linear_schedule_is_compared_too(checks, monkeypatch):
    first, second = (gemm.Schedule(name, _wrong) for name in ("first", "second"))
    monkeypatch.setattr(gemm, "_candidates", lambda *_: [first, second, gemm.REFERENCE])
    monkeypatch.setattr(gemm, "_KNOWN", ["first", "second"])
    checks.linears()
    assert checks.report.forbidden == ["linear(48, 48): first", "linear(48, 48): second"]
    assert gemm.choice(9, 48, 48, torch.device("cpu")) == gemm.REFERENCE.name


def test_a_linear_schedule_that_only_a_part_takes_is_compared(checks, monkeypatch):
    """The trainer's projections are parts of the engine's fused ones, and may take another schedule."""
    planted = gemm.Schedule("planted", _wrong)
    monkeypatch.setattr(gemm, "_candidates", lambda rows, outputs, *_: [*[planted] * (outputs == 16), gemm.REFERENCE])
    monkeypatch.setattr(gemm, "_KNOWN", ["planted"])
    checks.linears()
    assert checks.report.forbidden == ["linear(48, 48): planted"]


def test_a_linear_schedule_that_adds_its_bias_otherwise_is_dropped(monkeypatch):
    def wrong_with_a_bias(x, weight, bias, out):
        (gemm.REFERENCE.run if bias is None else _wrong)(x, weight, bias, out)

    plant(gemm.Schedule("planted", wrong_with_a_bias), monkeypatch)
    monkeypatch.setattr(probe, "ROW_COUNTS", (9,))
    for biased, dropped in (((), []), (SHAPES.linears, ["linear(48, 48): planted"])):
        shapes = dataclasses.replace(SHAPES, biased=biased)
        checks = IntegerProbe(torch.device("cpu"), shapes, "chunk64", ProbeReport("chunk64", ()))
        checks.linears()
        assert checks.report.forbidden == dropped


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
    assert checks.report.forbidden == [f"{EXPERTS}: stream32"]
    assert "stream32" not in grouped_gemm.schedules()


def test_without_another_schedule_the_device_is_refused(checks, monkeypatch):
    monkeypatch.setattr(probe, "_experts_one_by_one", lambda x, *_: x + 1)
    with pytest.raises(ContractError, match="every schedule is forbidden"):
        checks.experts()
    rowwise = iter([torch.zeros(4, 2), torch.ones(1, 2)])
    with pytest.raises(ContractError, match=r"op is not exact .* 2 of 2 values differ \(triton, rows 3\.\.3 alone"):
        checks.rowwise("op", lambda x: next(rowwise), torch.zeros(4, 2), (1,))


ATTENTION = "attention(chunk64, 4/2 heads of 16)"


@pytest.fixture
def some_attention(monkeypatch):
    """In place of the kernels, whose products the interpreter orders by their shapes: a row's result is its query. What
    a schedule in `wrong` computes is one too much."""
    wrong = {}
    monkeypatch.setattr(attention.attention_hopper, "supports", lambda *_, **__: True)

    def result(q, schedule):
        return q + wrong.get(schedule, 0)

    def varlen(q, k, v, packed, contract):
        return result(q, attention.prefill_schedule(q, k, v, paged=False))

    def forward(q, k, v, cu_seqlens, *, plan, schedule):
        return result(q, schedule), None

    def paged(q, k, v, batch, contract):
        lengths = torch.tensor(batch._query_lens).repeat_interleave(torch.tensor(batch._query_lens))
        chunks, decodes = attention.prefill_schedule(q, k, v, paged=True), attention.decode_schedule(q, k, v)
        return torch.where((lengths == 1)[:, None, None], result(q, decodes), result(q, chunks))

    monkeypatch.setattr(probe, "varlen_attention", varlen)
    monkeypatch.setattr(probe, "paged_attention", paged)
    monkeypatch.setattr(attention, "varlen_forward", forward)
    return wrong


def test_attention_that_holds(checks, some_attention):
    checks.attention()
    assert not checks.report.forbidden
    assert checks.report.comparisons[ATTENTION] > 10


@pytest.mark.parametrize(
    "names", [(attention.HOPPER,), (attention.SPLIT,), (attention.HOPPER, attention.SPLIT)], ids=" ".join
)
def test_an_attention_schedule_that_differs_is_dropped_and_another_takes_its_rows(
    checks, some_attention, names, caplog
):
    some_attention.update(dict.fromkeys(names, 1))
    checks.attention()
    assert checks.report.forbidden == [f"{ATTENTION}: {name}" for name in names]
    assert attention.forbidden() == set(names)
    for name in names:
        assert f"schedule {name} of {ATTENTION} differs ({name}, " in caplog.text


@pytest.mark.parametrize("kv_heads", [1, 2, 32])
@pytest.mark.parametrize("wrong", [(1, 3, 4), (16, 2, 4), (4, 2, 2)], ids=["few, short", "few, long", "many"])
def test_every_shape_of_a_decode_steps_work_is_compared(some_attention, wrong, kv_heads, monkeypatch):
    """Each is a kernel of its own; one that differs drops the schedule."""
    shapes = dataclasses.replace(SHAPES, num_heads=kv_heads, num_kv_heads=kv_heads)
    checks = IntegerProbe(torch.device("cpu"), shapes, "chunk64", ProbeReport("chunk64", ()))
    right = probe.paged_attention

    def paged(q, k, v, batch, contract):
        out = right(q, k, v, batch, contract)
        takes = attention_plan._shape_of_work(len(batch._contexts) * kv_heads, batch.max_context)
        if attention.SPLIT in attention.forbidden() or takes != wrong:
            return out
        length_S = torch.tensor(batch._query_lens)
        return out + (length_S == 1).repeat_interleave(length_S)[:, None, None]

    monkeypatch.setattr(probe, "paged_attention", paged)
    checks.attention()
    op = f"attention(chunk64, {kv_heads}/{kv_heads} heads of 16)"
    assert checks.report.forbidden == [f"{op}: {attention.SPLIT}"]


def test_pages_are_of_the_engines_size(some_attention, monkeypatch):
    sizes, paged = set(), probe.paged_attention
    monkeypatch.setattr(probe, "paged_attention", lambda q, k, *rest: sizes.add(k.shape[1]) or paged(q, k, *rest))
    for page_size in (64, 16):
        shapes = dataclasses.replace(SHAPES, page_size=page_size, ranks=2)
        IntegerProbe(torch.device("cpu"), shapes, "chunk64", ProbeReport("chunk64", ())).attention()
        assert sizes == {page_size}
        sizes.clear()


def test_attention_without_another_schedule_is_refused_by_shape_and_schedule(checks, some_attention, monkeypatch):
    some_attention[attention.HOPPER] = some_attention[attention.SPLIT] = 1
    monkeypatch.setattr(attention, "forbid", lambda name: attention._forbidden.add(name) or some_attention.pop(name))
    paged = probe.paged_attention
    monkeypatch.setattr(probe, "paged_attention", lambda *given: paged(*given) + 1)
    with pytest.raises(ContractError) as error:
        checks.attention()
    for words in (ATTENTION, "(prefill:triton, chunks, last 5 rows, pages of 64)", "trainer=stock"):
        assert words in str(error.value)


def test_a_library_that_differs_names_the_other_contract(some_attention, monkeypatch):
    checks = IntegerProbe(torch.device("cpu"), SHAPES, "fa3", ProbeReport("fa3", ()))
    paged = probe.paged_attention
    monkeypatch.setattr(probe, "paged_attention", lambda *given: paged(*given) + 1)
    with pytest.raises(ContractError, match=r"attention\(fa3, 4/2 heads of 16\).*\(fa3, .*attention=chunk64 on both"):
        checks.attention()


def test_a_head_schedule_that_differs_is_dropped(checks, monkeypatch):
    def some(hidden, wrong):
        return hidden[:, 0].float() + wrong * (head.schedule_of(len(hidden)) == head.STREAM)

    class Drawn:
        def __init__(self, hidden):
            self.log_prob_B, self.token_B = some(hidden, 1), hidden[:, 1].long()

    monkeypatch.setattr(probe, "draw", lambda hidden, *_: Drawn(hidden))
    monkeypatch.setattr(probe, "token_log_probs", lambda hidden, *_: (some(hidden, 1), None))
    checks.head()
    assert checks.report.forbidden == ["head(64, 48): stream"]
    assert head.schedule_of(1) == head.SLABS


def test_swiglu_in_a_product_that_differs_is_dropped(checks, monkeypatch):
    few = few_rows.swiglu
    monkeypatch.setattr(few_rows, "swiglu", lambda x, w: None if (got := few(x, w)) is None else got + 1)
    x, weight = checks.random(16, 128), checks.random(64, 128)
    product = torch.empty(16, 64, dtype=torch.bfloat16)
    gemm.REFERENCE.run(x, weight, None, product)
    checks.gate_up(x, weight, product)
    assert checks.report.forbidden == [f"gate_up(64, 128): {few_rows.SWIGLU}"]
    assert few_rows.swiglu(x, weight) is None


@pytest.mark.parametrize("module", [attention, few_rows, head], ids=lambda module: module.__name__.split(".")[-1])
def test_what_no_other_schedule_can_stand_in_for_is_not_forbidden(module):
    with pytest.raises(ContractError, match="can be forbidden; there"):
        module.forbid("slabs")


@pytest.mark.parametrize("name", ["token_B", "log_prob_B", "kept_mass_B"])
def test_a_cut_that_differs_alone_is_refused(checks, name, monkeypatch):
    def drawn(hidden, weight, vocab_size, params, cut):
        value = params.position_B.float()
        rows = Sampled(value.long(), value, value, value.long())
        if len(hidden) == 1:
            setattr(rows, name, getattr(rows, name) + 1)
        return rows

    monkeypatch.setattr(probe, "draw", drawn)
    monkeypatch.setattr(probe, "token_log_probs", lambda hidden, *_: (torch.arange(len(hidden)).float(), None))
    with pytest.raises(
        ContractError, match=rf"cuts\(64, 48\) is not exact .*\(triton, {name[:-2]} of 1 rows, of which"
    ):
        checks.cuts()


def test_a_cut_whose_log_prob_is_not_the_trainers_is_refused(checks, monkeypatch):
    def drawn(hidden, weight, vocab_size, params, cut):
        value = params.position_B.float()
        return Sampled(value.long(), value, value, value.long())

    monkeypatch.setattr(probe, "draw", drawn)
    monkeypatch.setattr(probe, "token_log_probs", lambda hidden, *_: (torch.arange(1, len(hidden) + 1).float(), None))
    with pytest.raises(
        ContractError, match=r"cuts\(64, 48\) is not exact .*\(triton, sampler against trainer, 66 rows"
    ):
        checks.cuts()


def test_rope_of_many_rows_that_differs_is_refused(checks, monkeypatch):
    """Many tokens take another kernel than a decode step's."""
    monkeypatch.setattr(rope, "MANY_TOKENS", 80)
    right = probe.qk_norm_rope

    def wrong_for_many(q, *rest):
        got = right(q, *rest)
        if len(q) >= 80:
            got[0].add_(1)
        return got

    monkeypatch.setattr(probe, "qk_norm_rope", wrong_for_many)
    with pytest.raises(ContractError, match=r"qk_norm_rope\(4/2 heads of 16\) is not exact .* the last 1 of 85 rows"):
        checks.rope()
