"""The gate: bits and nothing else, no pass without a comparison, and a ladder that stops."""

from __future__ import annotations

import io
import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from verl_tim.diagnosis.bits import ulp_distance
from verl_tim.diagnosis.gate import BitReport, GateError, Rung, ScenarioResult, climb, compare_bits

fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def log_probs(rows=4, width=16, seed=0):
    return -torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) * 8


def test_b37_identical_arrays_pass():
    x = log_probs()
    report = compare_bits(x, x.clone())
    assert report.passed
    assert report.to_dict() == {
        "tokens": 64,
        "differing": 0,
        "max_ulp": 0,
        "max_abs": 0.0,
        "first": None,
        "exact_fraction": 1.0,
        "passed": True,
    }


@pytest.mark.parametrize("at", [(0, 0), (2, 7), (3, 15)])
def test_b37_one_ulp_fails_and_is_named(at):
    x = log_probs()
    y = x.clone()
    y[at] = torch.nextafter(y[at], torch.tensor(-torch.inf))
    report = compare_bits(x, y)
    assert not report.passed
    assert report.differing == report.max_ulp == 1
    first = report.first
    assert (first.row, first.token, first.ulp) == (*at, 1)
    assert (first.train, first.rollout) == (float(x[at]), float(y[at]))
    assert f"row {at[0]}, token {at[1]}" in str(report)
    assert "1 ulp" in str(report)


def test_b37_a_bf16_copy_that_is_close_fails():
    x = log_probs()
    rounded = x.bfloat16()
    assert torch.allclose(x, rounded.float(), atol=1e-1, rtol=1e-2)
    for other in (rounded, rounded.float()):
        report = compare_bits(x, other)
        assert not report.passed
        assert report.differing > 60
        assert report.max_abs == pytest.approx(float((x.double() - rounded.double()).abs().max()))


def test_first_is_first_in_row_major_order():
    x = log_probs()
    y = x.clone()
    y[1, 9] -= 1
    y[3, 0] -= 1
    y[1, 4] -= 0.5
    report = compare_bits(x, y)
    assert (report.first.row, report.first.token) == (1, 4)
    assert report.differing == 3
    assert report.exact_fraction == 61 / 64


def test_only_masked_in_tokens_are_read():
    x = log_probs()
    y = x.clone()
    mask = torch.ones_like(x)
    mask[:, 10:] = 0
    y[:, 10:] = torch.nan
    x[:, 12:] = torch.inf
    assert compare_bits(x, y, mask).tokens == 40
    y[2, 9] = 0.0
    report = compare_bits(x, y, mask.bool())
    assert (report.first.row, report.first.token) == (2, 9)


def test_one_dimension_is_one_row():
    x = log_probs(1, 5)[0]
    y = x.clone()
    y[3] = 0.0
    report = compare_bits(x, y)
    assert (report.first.row, report.first.token) == (0, 3)


def test_signs_of_zero_are_different_bits():
    report = compare_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert report.differing == report.max_ulp == 1
    assert report.max_abs == 0.0


@given(fp32, fp32)
def test_ulp_distance_counts_representable_steps(a, b):
    def place(x):
        bits = struct.unpack("<i", struct.pack("<f", x))[0]
        return bits if bits >= 0 else -(bits & 0x7FFFFFFF) - 1

    distance = int(ulp_distance(torch.tensor(a), torch.tensor(b)))
    assert distance == abs(place(a) - place(b))
    assert (distance == 0) == (struct.pack("<f", a) == struct.pack("<f", b))


@pytest.mark.parametrize(
    ("train", "rollout", "mask", "message"),
    [
        (torch.zeros(0, 4), torch.zeros(0, 4), None, "nothing to compare"),
        (torch.zeros(2, 0), torch.zeros(2, 0), None, "nothing to compare"),
        (torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2), "nothing to compare"),
        (torch.zeros(2, 2), torch.zeros(2, 3), None, "differ in shape"),
        (torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2, 3), "response_mask has shape"),
        (torch.zeros(2, 2).double(), torch.zeros(2, 2), None, "fp32 bit patterns"),
        (torch.zeros(2, 2).int(), torch.zeros(2, 2), None, "fp32 bit patterns"),
        (torch.zeros(2, 2).bfloat16(), torch.zeros(2, 2).bfloat16(), None, "both sides are 16 bit"),
        (torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), None, "must be"),
        (torch.tensor([[0.0, torch.nan]]), torch.zeros(1, 2), None, "train_log_probs is nan at row 0, token 1"),
        (torch.zeros(1, 2), torch.tensor([[-torch.inf, 0.0]]), None, "rollout_log_probs is -inf at row 0, token 0"),
        # NaN on both sides has equal bits and must not pass either.
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), None, "is nan"),
    ],
)
def test_what_shows_nothing_is_refused(train, rollout, mask, message):
    with pytest.raises(GateError, match=message):
        compare_bits(train, rollout, mask)


def test_merge_keeps_counts_and_the_first():
    x = log_probs()
    y = x.clone()
    y[3, 5] -= 1.0
    whole = compare_bits(x, y)
    parts = [(compare_bits(x[i : i + 2], y[i : i + 2]), i) for i in (0, 2)]
    assert BitReport.merge(parts) == whole
    with pytest.raises(GateError, match="no reports"):
        BitReport.merge([])


# The ladder ------------------------------------------------------------


def passing(name="ok", **fields):
    return ScenarioResult(name, compare_bits(log_probs(), log_probs()), **fields)


def failing(name="bad", **fields):
    return ScenarioResult(name, compare_bits(log_probs(), log_probs() + 0.5), **fields)


def rung(name, *results):
    return Rung(name, [(result.name, lambda result=result: result) for result in results])


def text_of(renderable):
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()


def test_all_pass():
    seen, begun = [], []
    outcome = climb(
        [rung("1 reproducible", passing("twice")), rung("2 invariant", passing("alone"), passing("in company"))],
        on_result=lambda name, result: seen.append((name, result.name)),
        on_begin=lambda *names: begun.append((names, len(seen))),
    )
    assert outcome.exit_code == 0
    assert seen == [("1 reproducible", "twice"), ("2 invariant", "alone"), ("2 invariant", "in company")]
    assert begun == [(names, number) for number, names in enumerate(seen)]
    assert outcome.summary() == "PASS: 3 scenarios, 192 log-probs compared, 0 bits differ"
    json.dumps(outcome.to_dict())


def test_stops_at_the_first_failing_rung_but_finishes_it():
    def never():
        raise AssertionError("a rung above a failed one ran")

    outcome = climb([rung("1", failing(), passing()), Rung("2", [("later", never)]), Rung("3", [("later", never)])])
    assert outcome.exit_code == 1
    assert [len(r.results) for r in outcome.rungs] == [2, 0, 0]
    assert [r.skipped for r in outcome.rungs] == [False, True, True]
    assert outcome.summary().startswith("FAIL at 1, bad: 64 of 64 log-probs differ")
    table = text_of(outcome.table())
    assert "not reached" in table
    assert "FAIL" in table
    assert "first at row 0, token 0" in table.replace("\n", " ")


def test_the_op_where_the_forwards_part_is_named():
    assert (
        "the forwards part at model.layers.0.input_layernorm"
        in failing(parted_at="model.layers.0.input_layernorm").failures[0]
    )


def test_a_scenario_that_did_not_happen_fails():
    result = passing("preempted", counts={"preemptions": 0, "chunk cuts": 3}, required=("preemptions", "chunk cuts"))
    assert result.failures == ["preemptions: 0, the scenario did not happen"]
    assert passing("no counts", required=("weight updates",)).failures
    assert passing("fine", counts={"preemptions": 2}, required=("preemptions",)).passed


def test_a_refused_comparison_fails_and_other_errors_propagate():
    def refuses():
        return ScenarioResult("empty", compare_bits(torch.zeros(0), torch.zeros(0)))

    outcome = climb([Rung("1", [("empty", refuses)])])
    assert outcome.exit_code == 1
    assert "nothing to compare" in outcome.summary()

    def broken():
        raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        climb([Rung("1", [("x", broken)])])


def test_nothing_compared_is_no_pass():
    outcome = climb([Rung("1", [("empty", lambda: ScenarioResult("empty"))])])
    assert outcome.exit_code == 1
    assert outcome.rungs[0].results[0].failures == ["nothing was compared"]
    for ladder in ([], [Rung("1", [])]):
        with pytest.raises(ValueError, match="a ladder needs rungs"):
            climb(ladder)


def test_sizes_are_reported_and_not_judged_for_other_rollouts():
    outcome = climb([rung("3 aligned", failing("vllm", exact=False)), rung("4", passing(exact=False))])
    assert outcome.exit_code == 0
    assert outcome.summary() == "sizes reported, not judged: 1 of 2 scenarios differ, max |d| 0.5 nats"
    assert "size" in text_of(outcome.table())


def test_counts_add_up():
    outcome = climb(
        [rung("1", passing("a", counts={"preemptions": 2}), passing("b", counts={"preemptions": 3, "x": 1}))]
    )
    assert outcome.totals() == {"preemptions": 5, "x": 1}
    assert outcome.to_dict()["totals"] == {"preemptions": 5, "x": 1}


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_shortens_no_number_and_no_name_in_a_narrow_terminal(width):
    """A log file and most terminals have 80 columns; the words of what was counted are broken between words alone."""
    left, right = torch.tensor([[0.0, -1.0]]), torch.tensor([[1e-3, -1.5]])
    counts = {"responses aborted and sent again": 9, "log-probs that other weights move": 96, "preemptions": 12}

    def differs():
        return ScenarioResult(
            "tokens and log-probs twice", report=compare_bits(left, right), counts=counts, exact=False
        )

    def fails():
        return ScenarioResult("trainer against rollout", error="nothing was recomputed in model.layers.0.mlp")

    outcome = climb([Rung("2 batch-invariant", [("a", differs)]), Rung("4 MoE, training", [("b", fails)])])
    console = Console(width=width, file=io.StringIO())
    console.print(outcome.table("random qwen3 (other kind: random qwen3_moe), bfloat16, rollout=stock"))
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    (row,) = [line for line in text.splitlines() if "tokens and log-probs twice" in line]
    report = outcome.rungs[0].results[0].report
    assert row.split()[-4:] == ["2", "2", f"{report.max_abs:.3g}", f"{report.max_ulp:,}"]
    words = " ".join(text.split())
    assert ", ".join(f"{name} {n}" for name, n in counts.items()) in words
    assert "nothing was recomputed in model.layers.0.mlp" in words
