"""verl's client for partial rollouts on our server: weight updates in flight, responses kept or sent again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from tests.rollout.test_server import SAMPLED, make, update
from verl_tim.rollout.partial_client import PartialRolloutClient, merged_fields
from verl_tim.rollout.recorded import RECORD_PARAM, RECORDED_FIELD
from verl_tim.rollout.versions import VERSIONS_FIELD, token_versions
from verl_tim.verification.replay import response_hidden, response_log_probs

LENGTH = 40
UPDATES = 3


class Client(PartialRolloutClient):
    """On a server in this process."""

    def __init__(self, server):
        rollout = {"name": "vexact", "response_length": LENGTH, "full_determinism": False}
        super().__init__(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))
        self.attempts = 0
        self._server = SimpleNamespace(generate=SimpleNamespace(remote=self._generate))
        self._target = server

    async def _generate(self, **request):
        self.attempts += 1
        return await self._target.generate(**request)

    async def _acquire_server(self, request_id, **extra):
        return "server", self._server

    def _release_server(self, server_id, request_id=None):
        pass


@pytest.fixture
def weights_of(folder):
    """version -> weights; each version's differ from the others'."""
    first = load_file(f"{folder}/model.safetensors")

    def weights(version):
        generator = torch.Generator().manual_seed(version)
        scale = 0.05 if version else 0.0
        return {
            name: x + scale * x.abs().mean() * torch.randn(x.shape, generator=generator) for name, x in first.items()
        }

    return weights


@pytest.fixture(params=["keep", "abort"])
def server(request, folder):
    options = {"in_flight": request.param, "page_size": 4, "kv_cache_tokens": 160}
    made = make(folder, response_length=LENGTH, max_num_seqs=3, engine_kwargs={"vexact": options}, ignore_eos=True)
    yield made
    made.engine.shutdown()


@pytest.fixture
def no_pause(monkeypatch):
    """verl's client waits a second before it sends an aborted request again."""
    original = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *rest: original(min(seconds, 0.01), *rest))


async def drawn(server, tokens):
    """Wait until the server has drawn so many more."""
    goal = (await server.stats())["drawn_tokens"] + tokens
    while (await server.stats())["drawn_tokens"] < goal:
        await asyncio.sleep(0.001)


@pytest.mark.asyncio
async def test_each_token_has_the_log_prob_and_the_version_of_its_weights(server, folder, weights_of, no_pause):
    client = Client(server)
    prompts = [[5 + n, 6, 7 + n] for n in range(5)]
    asked = [
        asyncio.create_task(
            client.generate(
                f"r{n}", prompt_ids=prompt, sampling_params={**SAMPLED, "seed": n, RECORD_PARAM: n % 2 == 0}
            )
        )
        for n, prompt in enumerate(prompts)
    ]
    for version in range(1, UPDATES + 1):
        await drawn(server, 30)
        await server.abort_all_requests()  # as verl does before an update; a colocated server also sleeps
        await server.sleep()
        await server.wake_up(["weights"])
        await update(server, weights_of(version), version)
        await server.wake_up(["kv_cache"])
        await server.resume_generation()
    outputs = await asyncio.gather(*asked)

    judge = make(folder, response_length=LENGTH)
    compared = dict.fromkeys(range(UPDATES + 1), 0)
    for version in compared:
        await update(judge, weights_of(version), version)
        model = judge.engine._engine.model
        for prompt, output in zip(prompts, outputs, strict=True):
            versions = token_versions(output.extra_fields, len(output.token_ids))
            response = np.asarray(output.token_ids)
            hidden = response_hidden(model, np.asarray(prompt), response)
            expected = response_log_probs(model, hidden, response, 1.0)
            mine = torch.from_numpy(versions == version)
            recorded = torch.tensor(output.log_probs, dtype=torch.float32)
            assert torch.equal(expected[mine].view(torch.int32), recorded[mine].view(torch.int32))
            assert bool(expected.isfinite().all())
            compared[version] += int(mine.sum())
    judge.engine.shutdown()
    assert min(compared.values()) > 5, compared
    assert sum(compared.values()) == len(prompts) * LENGTH
    for n, output in enumerate(outputs):
        assert len(output.token_ids) == len(output.log_probs) == LENGTH
        assert output.stop_reason in ("completed", "length")
        versions = token_versions(output.extra_fields, LENGTH)
        fields = output.extra_fields
        assert (fields["min_global_steps"], fields["max_global_steps"]) == (versions.min(), versions.max())
        assert fields["global_steps"] == versions[-1]
        assert (np.diff(versions) >= 0).all()
        recorded = fields[RECORDED_FIELD]
        assert (recorded is not None) == (n % 2 == 0)
        assert recorded is None or len(recorded["top1"]) == LENGTH
    assert any(VERSIONS_FIELD in output.extra_fields for output in outputs)
    if server.options.in_flight == "keep":
        assert client.attempts == len(prompts), "nothing was sent twice"
    else:
        assert client.attempts > len(prompts)


@pytest.mark.asyncio
async def test_a_server_that_leaves_the_balancer_aborts_in_any_case(server, no_pause):
    asked = asyncio.create_task(server.generate([5, 6], {**SAMPLED, "max_tokens": LENGTH}, "a"))
    await drawn(server, 3)
    await server.abort_all_requests(reject_request=True)
    output = await asked
    assert output.stop_reason == "aborted"
    assert 0 < len(output.token_ids) < LENGTH
    late = await server.generate([5, 6], dict(SAMPLED), "late")
    assert (late.stop_reason, late.token_ids) == ("aborted", [])


@pytest.mark.asyncio
async def test_requests_side_by_side_keep_their_parts_apart(server):
    client = Client(server)
    outputs = await asyncio.gather(
        *[
            client.generate(f"r{n}", prompt_ids=[5, 6], sampling_params={**SAMPLED, "seed": n, RECORD_PARAM: True})
            for n in range(6)
        ]
    )
    assert all(len(output.extra_fields[RECORDED_FIELD]["top1"]) == len(output.token_ids) for output in outputs)


def part(tokens, versions, **fields):
    extra = {"min_global_steps": min(versions), "max_global_steps": max(versions), **fields}
    return SimpleNamespace(token_ids=list(range(tokens)), extra_fields=extra)


def test_vllms_answers_name_one_version_each_and_keep_their_choices():
    """verl's own client drops what was recorded, and a version that changed on the way."""

    def answer(tokens, version):
        recorded = {"top1": np.arange(tokens), "routes": None, "layers": []}
        return SimpleNamespace(
            token_ids=list(range(tokens)), extra_fields={"global_steps": version, RECORDED_FIELD: recorded}
        )

    merged = merged_fields([answer(2, 3), answer(0, 4), answer(1, 4)])
    assert merged[RECORDED_FIELD]["top1"].tolist() == [0, 1, 0]
    assert (merged["min_global_steps"], merged["max_global_steps"]) == (3, 4)
    assert token_versions(merged, 3).tolist() == [3, 3, 4]
    with pytest.raises(ValueError, match="names versions None"):
        merged_fields([answer(2, None)])


@pytest.mark.parametrize(("rollout", "ours"), [("vexact", True), ("stock", True), ("vllm", True), ("sglang", False)])
def test_asynchronous_trainers_take_it_for_servers_that_it_understands(rollout, ours):
    from verl_tim.training.trainer_v1_async import _client

    trainer = SimpleNamespace(
        tim=object(), config=OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": rollout}}})
    )
    manager = SimpleNamespace(get_client=lambda client_cls: client_cls)
    assert _client(trainer, manager) is (PartialRolloutClient if ours else None)
    trainer.tim = None
    assert _client(trainer, manager) is None


def test_parts_without_a_token_say_nothing():
    merged = merged_fields([part(0, [3]), part(4, [5]), part(0, [6])])
    assert (merged["min_global_steps"], merged["max_global_steps"]) == (5, 5)
    assert merged_fields([part(0, [3])]) == {RECORDED_FIELD: None}


def test_the_smallest_kept_mass_counts():
    merged = merged_fields([part(2, [1], kept_mass_min=0.9), part(2, [2]), part(1, [2], kept_mass_min=0.7)])
    assert merged["kept_mass_min"] == 0.7
    assert merged[VERSIONS_FIELD] == [[1, 2], [2, 3]]


def test_choices_are_joined_only_where_every_part_recorded_them():
    routes = np.zeros((2, 1, 2), np.int16)
    one = {"top1": np.array([1, 2]), "routes": routes, "layers": [0]}
    merged = merged_fields([part(2, [1], **{RECORDED_FIELD: one}), part(2, [2], **{RECORDED_FIELD: one})])
    assert merged[RECORDED_FIELD]["top1"].tolist() == [1, 2, 1, 2]
    assert merged[RECORDED_FIELD]["routes"].shape == (4, 1, 2)
    assert merged_fields([part(2, [1], **{RECORDED_FIELD: one}), part(2, [2])])[RECORDED_FIELD] is None


@pytest.mark.asyncio
async def test_a_server_that_finishes_what_it_has_mixes_no_versions(folder, weights_of):
    options = {"in_flight": "finish", "page_size": 4, "kv_cache_tokens": 160}
    server = make(folder, response_length=LENGTH, max_num_seqs=3, engine_kwargs={"vexact": options}, ignore_eos=True)
    try:
        before = asyncio.create_task(server.generate([5, 6], {**SAMPLED, "max_tokens": LENGTH}, "before"))
        await drawn(server, 3)
        closing = asyncio.create_task(server.abort_all_requests())
        await asyncio.sleep(0)
        late = asyncio.create_task(server.generate([5, 6], {**SAMPLED, "max_tokens": LENGTH}, "late"))
        assert (await closing)["aborted_count"] == 0
        assert before.done()
        await update(server, weights_of(1), 1)
        assert not late.done()
        await server.resume_generation()
        for version, task in enumerate((before, late)):
            output = await task
            assert len(output.token_ids) == LENGTH
            assert token_versions(output.extra_fields, LENGTH).tolist() == [version] * LENGTH
    finally:
        server.engine.shutdown()
