"""Seeds: the same for a rerun and for both trainers, different for everything that should differ."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl_tim.rollout.seeds import response_seed

PROMPT = [{"role": "user", "content": "1+1="}]


def seed(run=42, index=3, prompt=PROMPT, step=1, sample=0, validate=False):
    return response_seed(run, index=index, prompt=prompt, step=step, sample=sample, validate=validate)


def test_a_rerun_draws_the_same():
    assert seed() == seed()
    assert 0 <= seed() < 2**63


@pytest.mark.parametrize(
    "change",
    [
        {"run": 43},
        {"index": 4},
        {"prompt": [{"role": "user", "content": "1+2="}]},
        {"step": 2},
        {"sample": 1},
        {"validate": True},
    ],
)
def test_every_part_counts(change):
    assert seed(**change) != seed()


def test_a_step_has_no_two_equal_seeds():
    seeds = {seed(index=i, sample=s, step=t) for i, s, t in itertools.product(range(64), range(8), range(4))}
    assert len(seeds) == 64 * 8 * 4


class Recorder:
    """verl's worker, reduced to what it is handed."""

    def __init__(self, config):
        self.config = config
        self.calls = []

    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        self.calls.append(sampling_params)
        return sampling_params


CONFIG = OmegaConf.create(
    {"actor_rollout_ref": {"rollout": {"name": "vexact", "seed": 42, "n": 4, "val_kwargs": {"n": 2}}}}
)


@pytest.mark.asyncio
async def test_why_a_response_failed_is_said_once(monkeypatch):
    from verl.experimental.agent_loop import AgentLoopWorker

    from verl_tim.rollout.agent_loop_v1 import SeededWorkerV1

    async def broken(self, sampling_params, trajectory, **kwargs):
        raise ValueError(f"no number in {kwargs['session_id']}")

    monkeypatch.setattr(AgentLoopWorker, "_run_agent_loop", broken)
    worker = object.__new__(SeededWorkerV1)
    worker.config, worker._failures = CONFIG, []
    trajectory = {"step": 2, "sample_index": 17, "rollout_n": 0, "validate": False}
    for session in (0, 3):
        with pytest.raises(ValueError, match="no number"):  # verl logs it and marks the prompt
            await worker._run_agent_loop({}, trajectory, raw_prompt=list(PROMPT), agent_name="a", session_id=session)
    assert await worker.take_failures() == ["ValueError: no number in 0", "ValueError: no number in 3"]
    assert await worker.take_failures() == []

    async def endless(self, sampling_params, trajectory, **kwargs):
        await asyncio.sleep(60)

    monkeypatch.setattr(AgentLoopWorker, "_run_agent_loop", endless)
    cancelled = asyncio.create_task(
        worker._run_agent_loop({}, trajectory, raw_prompt=list(PROMPT), agent_name="a", session_id=0)
    )
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await worker.take_failures() == ["CancelledError: "]


@pytest.mark.parametrize("calls", [1, 2])
def test_why_a_response_failed_in_another_process_is_said_without_its_traceback(calls):
    """Ray's own message is the traceback there: 2,000 lines of a server that many requests failed in."""
    from ray.exceptions import RayTaskError

    from verl_tim.rollout.agent_loop_v1 import _in_words

    error = ValueError("no number")
    for _ in range(calls):
        error = RayTaskError("generate", "Traceback: line\n" * 2000, error).as_instanceof_cause()
    assert _in_words(error) == "ValueError: no number"


@pytest.mark.asyncio
async def test_both_trainers_give_a_response_one_seed(monkeypatch):
    from verl.experimental.agent_loop import AgentLoopWorker

    from verl_tim.rollout import agent_loop, agent_loop_v1

    drawn = {}
    for name, worker_class, base, number in (
        ("legacy", agent_loop.SeededAgentLoopWorker, AgentLoopWorker, {"priority": np.int64(4 * 5 + 3)}),
        ("v1", agent_loop_v1.SeededWorkerV1, AgentLoopWorker, {"session_id": 3}),
    ):
        monkeypatch.setattr(base, "_run_agent_loop", Recorder._run_agent_loop)
        worker = object.__new__(worker_class)
        worker.config, worker.calls = CONFIG, []
        trajectory = {"step": 2, "sample_index": np.int64(17), "rollout_n": 0, "validate": False}
        sent = {"temperature": 1.0}
        prompt = np.array(PROMPT, dtype=object) if name == "legacy" else list(PROMPT)
        await worker._run_agent_loop(sent, trajectory, raw_prompt=prompt, agent_name="single_turn_agent", **number)
        assert sent == {"temperature": 1.0}, "the caller's parameters are shared by all responses"
        drawn[name] = worker.calls[0]["seed"]
    assert drawn["legacy"] == drawn["v1"]


def test_one_name_serves_both_trainers(monkeypatch):
    from verl_tim.rollout import agent_loop, agent_loop_v1

    made = []
    monkeypatch.setattr(agent_loop._SeededManager, "create", classmethod(lambda cls, *a, **k: made.append("legacy")))
    monkeypatch.setattr(agent_loop_v1.SeededManagerV1, "create", classmethod(lambda cls, *a, **k: made.append("v1")))
    for use_v1 in (True, False):
        agent_loop.SeededAgentLoopManager.create(config=OmegaConf.create({"trainer": {"use_v1": use_v1}}))
    assert made == ["v1", "legacy"]


@pytest.mark.parametrize(
    ("rollout", "given", "said"),
    [
        ("vllm", {}, False),
        ("vllm", {"stop": ["</answer>"]}, None),
        ("vllm", {"detokenize": True}, True),
        ("vexact", {}, None),
        ("stock", {}, None),
    ],
)
def test_only_vllm_is_asked_for_no_text(rollout, given, said):
    from verl_tim.rollout.agent_loop import SeededResponses

    responses = object.__new__(SeededResponses)
    responses.config = OmegaConf.merge(CONFIG, {"actor_rollout_ref": {"rollout": {"name": rollout}}})
    trajectory = {"step": 2, "sample_index": 17, "validate": False}
    params = responses.with_seed(given, trajectory, sample=0, prompt=PROMPT, record=False)
    assert params.pop("detokenize", None) is said
    assert {name: value for name, value in params.items() if name not in ("seed", "detokenize")} == {
        name: value for name, value in given.items() if name != "detokenize"
    }
