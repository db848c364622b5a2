"""The ladder: each rung passes on vexact, fails alone under its own planted fault, and is sized on stock."""

from __future__ import annotations

import contextlib

import pytest

from verl_tim.diagnosis.gate import climb
from verl_tim.training.in_process import single_rank_group
from verl_tim.verification.faults import RUNG_FAULTS
from verl_tim.verification.ladder import RUNGS, preempted, six_rungs
from verl_tim.verification.random_models import make_random_model
from verl_tim.verification.subject import Subject

# Words of the failure that the rung's fault must cause.
NAMED = {
    "kept_generator": "drew other tokens",
    "batch_dependent_kernel": ", in company -",
    "stock_activation": "model.layers.0.mlp: first op whose bits differ",
    "rerouted_recomputation": "routes name other experts",
    "sorted_experts": "another order; first at model.layers.0.mlp",
    "stale_kv": ": fresh engine -",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: str(make_random_model(kind, tmp_path_factory.mktemp(kind))) for kind in ("qwen3", "qwen3_moe")}


def rungs_of(folders, rollout="vexact"):
    sides = {
        kind: Subject(path, dtype="float32", rollout=rollout, requests=6, response_tokens=10)
        for kind, path in folders.items()
    }
    return six_rungs(sides["qwen3"], sides["qwen3"], sides["qwen3_moe"])


def test_every_rung_passes(folders):
    with single_rank_group():
        result = climb(rungs_of(folders))
    assert result.passed, result.summary()
    assert [rung.name for rung in result.rungs] == list(RUNGS)
    totals = result.totals()
    for name in ("preemptions", "chunk cuts", "weight updates", "routes", "non-zero gradients", "tokens after it"):
        assert totals[name] > 0, name
    assert totals["other experts"] == totals["other order"] == 0


@pytest.mark.parametrize(("requests", "tokens"), [(4, 4), (4, 5), (8, 6)])
def test_the_smallest_ladder_still_preempts(folders, requests, tokens):
    with single_rank_group():
        result = preempted(Subject(folders["qwen3"], requests=requests, response_tokens=tokens))
    assert result.passed, result.failures
    assert result.counts["preemptions"] > 0


@pytest.mark.parametrize(("place", "fault"), enumerate(RUNG_FAULTS))
def test_a_fault_fails_its_own_rung_only(folders, place, fault):
    with single_rank_group(), RUNG_FAULTS[fault]():
        # every rung on its own: the ladder would stop at the first that fails
        results = [climb([rung]) for rung in rungs_of(folders)]
    assert [at for at, result in enumerate(results) if not result.passed] == [place]
    failures = "; ".join(reason for s in results[place].rungs[0].results for reason in s.failures)
    assert NAMED[fault] in failures, failures


def test_it_stops_at_the_first_failing_rung(folders):
    with single_rank_group(), contextlib.ExitStack() as stack:
        for fault in ("batch_dependent_kernel", "stock_activation"):
            stack.enter_context(RUNG_FAULTS[fault]())
        result = climb(rungs_of(folders))
    assert [rung.passed for rung in result.rungs[:2]] == [True, False]
    assert all(rung.skipped for rung in result.rungs[2:])
    assert result.exit_code == 1


def test_stock_is_sized_not_judged(folders):
    with single_rank_group():
        result = climb(rungs_of(folders, rollout="stock"))
    assert result.passed, result.summary()
    sizes = {rung.name: max(s.report.max_abs for s in rung.results) for rung in result.rungs}
    assert sizes["3 aligned, dense"] > 0
    assert "sizes reported" in result.summary()
