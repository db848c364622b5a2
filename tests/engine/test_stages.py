"""Pipeline stages whose ranks and devices take their own time, and an account of a link that fails.

Ranks are processes on the CPU, whose devices work beside the host (`own_time_device.py`) and which sleep around every
exchange and forward, as their dice say: what depends on who is first shows up as other bits.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.engine import faults, link_watch
from tests.engine.support import kept_crews, random_prompts
from tests.engine.tiny_models import hf_model, save
from verl_tim.engine import Engine, EngineConfig, SamplingParams, start_engine
from verl_tim.engine.crew import Crew, Split

CHANGES = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
PROMPTS = [*random_prompts(11, 1, 40, 151, seed=5), random_prompts(1, 120, 120, 151, seed=6)[0]]
PROMPTS[4] = PROMPTS[11][:32] + PROMPTS[4]
LENS = {f"r{index}": len(prompt) for index, prompt in enumerate(PROMPTS)}


def params(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=[1.0, 0.6, 1.3, 0.0][index % 4],
        top_p=[1.0, 0.9][index // 2 % 2],
        max_tokens=4 + 5 * index % 23,
        ignore_eos=index % 3 != 0,
        record_routes=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save("qwen3_moe", tmp_path_factory.mktemp("moe"), **CHANGES)


@pytest.fixture(scope="module")
def crews():
    """Crews by their number of stages."""
    with kept_crews("cpu") as of:
        yield lambda stages: of(1, stages)


def settings(folder, **changes) -> EngineConfig:
    return EngineConfig(str(folder), **{"kv_cache_tokens": 2048, "max_num_seqs": 8, **changes})


def bits(output) -> tuple:
    patterns = np.array(output.log_probs, np.float32).view(np.int32).tolist()
    return output.token_ids, patterns, output.top1_ids


def add(engine: Engine, index: int) -> None:
    engine.add(f"r{index}", PROMPTS[index], params(index))


def run(engine: Engine) -> dict[str, tuple]:
    for index in range(len(PROMPTS)):
        add(engine, index)
    outputs = {}
    while engine.has_work():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


@pytest.fixture(scope="module")
def reference(folder):
    return run(Engine(settings(folder)))


SCHEDULES = [
    {},
    {"max_num_batched_tokens": 16, "enable_prefix_cache": True},
    {"kv_cache_tokens": 168, "page_size": 4, "watermark": 0.0, "max_model_len": 168, "enable_prefix_cache": True},
]


@pytest.mark.parametrize("ahead", [False, True], ids=["stages", "ahead"])
@pytest.mark.parametrize(("stages", "schedule"), [(2, 0), (2, 1), (3, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_no_delay_and_no_verb_changes_a_bit(folder, reference, crews, stages, schedule, ahead):
    """Late arrivals, aborts, drains, sleep, updates with the same weights: each answer is the reference's, or its
    beginning where it was aborted."""
    dice = random.Random(100 * stages + 10 * schedule + ahead)
    device = faults.own_time_device if ahead else None
    weights = list(hf_model("qwen3_moe", **CHANGES).state_dict().items())
    crew = crews(stages)
    with link_watch.told(crew):
        engine = start_engine(
            settings(folder, pipeline_parallel_size=stages, **SCHEDULES[schedule]), device=device, crew=crew
        )
        engine.each_rank(faults.hesitate)
        outputs, left, version = {}, list(range(len(PROMPTS))), 0

        def take(some) -> None:
            outputs.update({output.request_id: output for output in some})

        try:
            while left or engine.has_work():
                while left and dice.random() < 0.6:
                    add(engine, left.pop(0))
                verb = dice.choices(["step", "drain", "clear", "sleep", "abort", "update"], [30, 1, 1, 1, 1, 1])[0]
                if verb == "step":
                    take(engine.step())
                elif verb == "drain":
                    take(engine.drain())
                elif verb == "clear":
                    engine.clear_kv_cache()
                elif verb == "sleep":
                    engine.release_kv_cache()
                    engine.resume_kv_cache()
                elif verb == "abort":
                    take(engine.abort(engine.request_ids()[-1:]))
                else:
                    version += 1
                    take(engine.update_weights(iter(weights), version))
            engine.each_rank(faults.audit)
        finally:
            engine.each_rank(link_watch.end)
            engine.close()
    assert outputs.keys() == reference.keys()
    for request, output in outputs.items():
        drawn = len(output.token_ids)
        assert output.finish_reason in ("abort", reference[request].finish_reason)
        assert drawn == len(reference[request].token_ids) or output.finish_reason == "abort"
        assert bits(output) == tuple(row[:drawn] for row in bits(reference[request])), request
        if not ahead and drawn:
            routes = reference[request].routes_TLK[: LENS[request] + drawn - 1]
            assert output.routes_TLK[: len(routes)].tolist() == routes.tolist(), request


@pytest.mark.parametrize("ahead", [False, True], ids=["stages", "ahead"])
def test_a_link_that_changes_a_bit_is_named(folder, reference, crews, ahead):
    device = faults.own_time_device if ahead else None
    engine = start_engine(settings(folder, pipeline_parallel_size=2), device=device, crew=crews(2))
    want = {request: bits(output) for request, output in reference.items()}

    def again() -> dict:
        return {request: bits(output) for request, output in run(engine).items()}

    engine.each_rank(link_watch.begin)
    assert again() == want
    reports = engine.each_rank(link_watch.report)
    assert [len(report.plans) for report in reports] == [len(reports[0].digests["send"])] * 2
    assert link_watch.links_that_changed_bits(reports) == []
    engine.each_rank(link_watch.end)
    engine.each_rank(faults.change_a_bit_on_the_way)
    engine.each_rank(link_watch.begin)
    got = again()
    assert got != want
    account = link_watch.account(engine, got, want, LENS, again)
    engine.each_rank(link_watch.end)
    engine.close()
    changed = [line for line in account.splitlines() if "became" in line]
    assert len(changed) == 1, account
    assert changed[0].startswith("hidden states from stage 0 to 1, plan 5: "), account
    assert "drawn in plan 5: row" in account, account
    assert "once more on the same engine: no difference" in account, account


def test_an_error_tells_what_became_of_the_processes(folder):
    crew = Crew(Split(1, 2, "cpu"))
    engine = start_engine(settings(folder, pipeline_parallel_size=2), crew=crew)
    engine.each_rank(faults.raise_in_next_step)
    told = r"(?s)EngineDeadError: .*planted.*exit codes.*'rank 1': 1.*lost: rank 1 failed"
    with pytest.raises(AssertionError, match=told), link_watch.told(crew):
        run(engine)
    assert crew.is_over
