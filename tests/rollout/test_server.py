"""The calls of verl's replica interface on a server, without Ray."""

from __future__ import annotations

import asyncio
import inspect
import socket
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from verl_tim.engine import EngineDeadError, EngineStateError, RequestError
from verl_tim.rollout.away import AwayEngine, ReplicaAwayError, ReplicaFailedError
from verl_tim.rollout.options import rollout_options
from verl_tim.rollout.server import KEPT_FAILURES, EngineServer
from verl_tim.rollout.weights import send
from verl_tim.training.config import ConfigError
from verl_tim.training.pairing import card_of

pytestmark = pytest.mark.asyncio

BOTH = ("weights", "kv_cache")
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 3}


def options_of(folder, *, load_format="auto", device="cpu", name="vexact", **changes):
    config = {
        "name": name,
        "dtype": "bfloat16",
        "prompt_length": 16,
        "response_length": 20,
        "max_model_len": None,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "seed": 0,
        "load_format": load_format,
        "engine_kwargs": {},
        **changes,
    }
    return rollout_options(config, model_path=folder, max_position_embeddings=128, device=device)


def make(folder, *, shared_memory=BOTH, name="vexact", away=None, **changes):
    options = options_of(folder, name=name, **changes)
    return EngineServer(options, name=name, replica_rank=0, shared_memory=shared_memory, away=away)


@pytest.fixture
def server(folder):
    made = make(folder)
    yield made
    made.engine.shutdown()


@pytest.fixture(scope="session")
def weights(folder):
    return load_file(f"{folder}/model.safetensors")


async def update(server, weights, version):
    await server.begin_weights(version)
    try:
        await send(iter(weights.items()), bucket_bytes=1 << 13, dtype=torch.bfloat16, deliver=server.receive_weights)
    except Exception as error:
        await server.abandon_weights(str(error))
        raise
    await server.finish_weights()


# ------------------------------------------------------------------------------------------------------------ requests


async def test_generate_returns_what_verl_reads(server):
    output = await server.generate([5, 6, 7], dict(SAMPLED), "a")
    assert type(output).__name__ == "TokenOutput"
    assert len(output.token_ids) == len(output.log_probs) > 0
    assert all(log_prob <= 0 for log_prob in output.log_probs)
    assert output.stop_reason == "completed"
    assert output.num_preempted == 0
    # V1 casts the tags to int (B46)
    tags = [output.extra_fields[name] for name in ("global_steps", "min_global_steps", "max_global_steps")]
    assert np.array(tags, dtype=int).tolist() == [0, 0, 0]


async def test_the_signature_is_verls(server):
    # Ray adds a parameter of its own to the methods of every class that it makes an actor of
    names = [name for name in inspect.signature(server.generate).parameters if not name.startswith("_ray_")]
    assert names == [
        "prompt_ids",
        "sampling_params",
        "request_id",
        "image_data",
        "video_data",
        "audio_data",
        "mm_processor_kwargs",
        "priority",
    ]
    for call in [
        "wake_up",
        "sleep",
        "clear_kv_cache",
        "release_kv_cache",
        "resume_kv_cache",
        "resume_generation",
        "set_global_steps",
        "start_profile",
        "stop_profile",
        "abort_all_requests",
    ]:
        assert inspect.iscoroutinefunction(getattr(server, call)), call
    assert "reject_request" in inspect.signature(server.abort_all_requests).parameters


async def test_temperature_zero_is_greedy_and_needs_no_seed(server):
    first, second = [await server.generate([5, 6, 7], dict(GREEDY), name) for name in ("a", "b")]
    assert first.token_ids == second.token_ids
    seeds = [await server.generate([5, 6, 7], {**SAMPLED, "seed": seed}, f"s{seed}") for seed in range(3)]
    assert len({tuple(output.token_ids) for output in seeds}) > 1


async def test_a_seed_fixes_the_response_in_any_company(server):
    alone = await server.generate([5, 6, 7], dict(SAMPLED), "alone")
    crowd = await asyncio.gather(
        *[server.generate([5 + n, 9], {**SAMPLED, "seed": n}, f"other-{n}") for n in range(6)],
        server.generate([5, 6, 7], dict(SAMPLED), "in company"),
    )
    assert crowd[-1].token_ids == alone.token_ids
    assert crowd[-1].log_probs == alone.log_probs


async def test_max_tokens_defaults_to_verls_limit(folder):
    server = make(folder, ignore_eos=True)
    try:
        short = await server.generate([5] * 4, dict(SAMPLED), "short")
        assert len(short.token_ids) == 20
        # a prompt that fills more than prompt_length eats into the response
        long = await server.generate([5] * 30, dict(SAMPLED), "long")
        assert len(long.token_ids) == 6
        asked = await server.generate([5] * 4, {**SAMPLED, "max_tokens": 3}, "asked")
        assert len(asked.token_ids) == 3
    finally:
        server.engine.shutdown()


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([5] * 200, {}, "prompt has 200 tokens"),
        ([5], {"temprature": 1.0}, "temprature"),
        ([5], {"repetition_penalty": 1.2}, "repetition_penalty"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5000], {}, "vocabulary"),
        ([], {}, "empty"),
    ],
)
async def test_a_bad_request_fails_alone(server, prompt, params, named):
    good = asyncio.ensure_future(server.generate([5, 6], dict(SAMPLED), "good"))
    with pytest.raises(RequestError, match=named):
        await server.generate(prompt, {**SAMPLED, **params}, "bad")
    assert (await good).stop_reason == "completed"


@pytest.mark.parametrize("prompt", [[5, 6.7], ["5", 6], "56", [[5], 6]], ids=str)
async def test_a_prompt_that_is_no_list_of_ids_is_refused_not_rounded(server, prompt):
    with pytest.raises(RequestError, match="request a"):
        await server.generate(prompt, dict(SAMPLED), "a")


async def test_images_are_refused(server):
    with pytest.raises(ValueError, match="image"):
        await server.generate([5], dict(SAMPLED), "a", image_data=[object()])


async def test_cut_distributions_report_the_kept_mass(server):
    whole = await server.generate([5, 6], dict(SAMPLED), "whole")
    assert "kept_mass_min" not in whole.extra_fields
    cut = await server.generate([5, 6], {**SAMPLED, "top_k": 2}, "cut")
    assert 0 < cut.extra_fields["kept_mass_min"] < 1


# ---------------------------------------------------------------------------------------------------------- the gate


async def test_abort_returns_what_was_drawn_and_parks_late_requests(folder):
    server = make(folder, ignore_eos=True, response_length=100)
    try:
        running = [asyncio.ensure_future(server.generate([5, n], dict(SAMPLED), f"r{n}")) for n in range(3)]
        while (await server.stats())["drawn_tokens"] < 3:
            await asyncio.sleep(0.002)
        report = await server.abort_all_requests(reject_request=False)
        assert report["aborted_count"] == 3
        for output in await asyncio.gather(*running):
            assert output.stop_reason == "aborted"
            assert len(output.token_ids) == len(output.log_probs)
            assert output.extra_fields["global_steps"] == 0
        late = asyncio.ensure_future(server.generate([5], {**SAMPLED, "max_tokens": 2}, "late"))
        await asyncio.sleep(0.05)
        assert not late.done()
        await server.resume_generation()
        assert (await late).stop_reason == "completed"
    finally:
        server.engine.shutdown()


async def test_reject_request_turns_late_requests_away(server):
    await server.abort_all_requests(reject_request=True)
    late = await asyncio.wait_for(server.generate([5], dict(SAMPLED), "late"), timeout=5)
    assert late.stop_reason == "aborted"
    assert late.token_ids == []
    assert int(late.extra_fields["global_steps"]) == 0
    await server.resume_generation()
    assert (await server.generate([5], dict(SAMPLED), "again")).stop_reason == "completed"


# ------------------------------------------------------------------------------------------------- weights and memory


async def test_the_version_is_the_weights_own(folder, weights):
    server = make(folder, load_format="dummy")
    try:
        with pytest.raises(EngineStateError, match="update_weights"):
            await server.generate([5], dict(SAMPLED), "too early")
        await update(server, weights, 4)
        output = await server.generate([5, 6, 7], dict(GREEDY), "a")
        assert output.extra_fields["global_steps"] == 4
        # the checkpoint and the stream are the same weights
        loaded = make(folder)
        try:
            assert await loaded.weight_checksum() == await server.weight_checksum()
            assert (await loaded.generate([5, 6, 7], dict(GREEDY), "a")).log_probs == output.log_probs
        finally:
            loaded.engine.shutdown()
    finally:
        server.engine.shutdown()


async def test_set_global_steps_renames_the_version(server):
    await server.set_global_steps(9)
    output = await server.generate([5], dict(SAMPLED), "a")
    assert [output.extra_fields[f"{k}global_steps"] for k in ("", "min_", "max_")] == [9, 9, 9]


async def test_sleep_wake_and_update_as_verl_calls_them(server, weights):
    before = await server.generate([5, 6, 7], dict(GREEDY), "a")
    await server.sleep()
    parked = asyncio.ensure_future(server.generate([5, 6, 7], dict(GREEDY), "b"))
    await server.wake_up(tags=["weights"])
    await update(server, weights, 1)
    assert not parked.done()
    await server.wake_up(tags=["kv_cache"])
    after = await asyncio.wait_for(parked, timeout=10)
    assert after.log_probs == before.log_probs
    assert after.extra_fields["global_steps"] == 1


async def test_release_and_resume_kv_cache_keep_the_weights(server):
    checksum = await server.weight_checksum()
    await server.release_kv_cache()
    await server.resume_kv_cache()
    await server.clear_kv_cache()
    assert await server.weight_checksum() == checksum
    assert (await server.generate([5], dict(SAMPLED), "a")).stop_reason == "completed"


async def test_a_colocated_server_keeps_its_weights(folder):
    server = make(folder, shared_memory=("kv_cache",))
    try:
        checksum = await server.weight_checksum()
        await server.sleep()
        await server.wake_up()
        assert await server.weight_checksum() == checksum
        assert (await server.generate([5], dict(SAMPLED), "a")).stop_reason == "completed"
    finally:
        server.engine.shutdown()


async def test_a_standalone_server_keeps_its_memory(folder):
    server = make(folder, shared_memory=())
    try:
        await server.sleep()
        assert (await server.generate([5], dict(SAMPLED), "a")).stop_reason == "completed"
    finally:
        server.engine.shutdown()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda w: w.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2)}), "model.layers.9.mlp.up_proj.weight"),
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight"),
    ],
    ids=["unknown", "missing", "misshapen"],
)
async def test_a_bad_weight_stream_surfaces_by_name_and_nothing_is_served(server, weights, spoil, named):
    spoiled = dict(weights)
    spoil(spoiled)
    with pytest.raises(Exception, match=named):
        await asyncio.wait_for(update(server, spoiled, 1), timeout=10)
    with pytest.raises(EngineStateError, match="failed"):
        await asyncio.wait_for(server.generate([5], dict(SAMPLED), "a"), timeout=10)
    await update(server, weights, 2)
    assert (await server.generate([5], dict(SAMPLED), "b")).extra_fields["global_steps"] == 2


# -------------------------------------------------------------------------- a server in the place of one that died


AWAY = r"rollout server 0 died and was started again; it has no weights before the trainer's next update"


@pytest.fixture(params=[BOTH, ("kv_cache",), ()], ids=["hybrid", "colocated", "standalone"])
def away(folder, request):
    made = make(folder, shared_memory=request.param, away=AwayEngine("rollout server 0"), ignore_eos=True)
    yield made
    if not isinstance(made.engine, AwayEngine):
        made.engine.shutdown()


async def test_away_it_serves_nothing_and_holds_up_nobody(away):
    with pytest.raises(ReplicaAwayError, match=AWAY):
        await away.generate([5], dict(SAMPLED), "a")
    assert await away.abort_all_requests() == {"aborted_count": 0, "request_ids": []}
    assert (await away.abort_request("a"))["aborted"] is False
    for call in (away.sleep, away.wake_up, away.release_kv_cache, away.resume_kv_cache, away.clear_kv_cache):
        await call()
    await away.resume_generation()
    await away.set_global_steps(5)
    await away.abandon_weights("the update before its end")
    assert away.away is not None
    assert not await away.is_ready()
    for call in (away.describe, away.weight_checksum, away.finish_weights):
        with pytest.raises(ReplicaAwayError, match=AWAY):
            await call()
    with pytest.raises(ReplicaAwayError, match=AWAY):
        await away.observe(())
    report = await away.report()
    assert (report["counters"]["restarts"], report["num_failures"]) == (1, 0)
    assert set(report["counters"].values()) == {0, 1}
    assert (await away.report())["counters"]["restarts"] == 0


async def test_one_whose_engine_had_failed_says_how(folder):
    away = make(folder, away=AwayEngine("rollout server 0", "AcceleratorError: an illegal memory access"))
    with pytest.raises(ReplicaFailedError, match=r"ended with its engine.*AcceleratorError: an illegal memory access"):
        await away.generate([5], dict(SAMPLED), "a")


async def test_who_waits_for_it_hears_when_it_is_ready(away, weights):
    waits = asyncio.ensure_future(away.until_ready())
    await away.wake_up(["weights"])
    await asyncio.sleep(0.05)
    assert not waits.done()
    await update(away, weights, 1)
    await away.wake_up(["kv_cache"])
    await asyncio.wait_for(waits, 1)


async def test_it_comes_back_with_the_next_weights(away, server, weights):
    whole = await server.generate([5, 6, 7], {**SAMPLED, "max_tokens": 9}, "a")
    await away.wake_up(["weights"])
    await away.begin_weights(7)
    with pytest.raises(ReplicaAwayError, match=AWAY):
        await away.generate([5], dict(SAMPLED), "too early")
    await send(iter(weights.items()), bucket_bytes=1 << 13, dtype=torch.bfloat16, deliver=away.receive_weights)
    await away.finish_weights()
    await away.wake_up(["kv_cache"])
    assert away.away is None
    assert await away.is_ready()
    again = await away.generate([5, 6, 7], {**SAMPLED, "max_tokens": 9}, "a")
    assert (again.token_ids, again.log_probs) == (whole.token_ids, whole.log_probs)
    assert again.extra_fields["global_steps"] == 7
    assert (await away.report())["counters"]["drawn_tokens"] == 9
    assert (await away.describe())["backend"] == "vexact"


async def test_weights_that_fail_leave_it_away_until_some_do_not(away, weights):
    with pytest.raises(Exception, match=r"model\.norm\.weight"):
        await update(away, {name: w for name, w in weights.items() if name != "model.norm.weight"}, 1)
    with pytest.raises(ReplicaAwayError):
        await away.generate([5], dict(SAMPLED), "a")
    await update(away, weights, 2)
    assert away.away is None


async def test_an_engine_that_cannot_be_made_again_says_so_to_the_trainer(folder, weights, monkeypatch):
    away = make(folder, away=AwayEngine("rollout server 0"))

    def fails(*args, **kwargs):
        raise MemoryError("the trainer holds it")

    with monkeypatch.context() as patched:
        patched.setattr("verl_tim.rollout.server.AsyncEngine.__init__", fails)
        with pytest.raises(MemoryError, match="the trainer holds it"):
            await away.begin_weights(1)
    assert away.away
    await update(away, weights, 1)
    away.engine.shutdown()


async def test_ready_is_open_and_awake(server, weights):
    assert await server.is_ready()
    await server.abort_all_requests()
    assert not await server.is_ready()
    await server.resume_generation()
    assert await server.is_ready()
    await server.sleep()
    await server.wake_up(["weights"])
    await update(server, weights, 1)
    assert not await server.is_ready()
    await server.wake_up(["kv_cache"])
    assert await server.is_ready()


async def test_a_sender_that_gives_up_frees_the_engine(server, weights):
    await server.begin_weights(1)
    await asyncio.wait_for(server.abandon_weights("the trainer died"), timeout=10)
    with pytest.raises(EngineStateError, match="the trainer died"):
        await server.generate([5], dict(SAMPLED), "a")
    with pytest.raises(RuntimeError, match=r"no weight update is running.*trainer\.resume_mode=auto"):
        await server.finish_weights()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"contract_id": "fa3/cuda-2-sm90/bfloat16/1"}, "keeps the contract chunk64/cpu-e/.*actor 1 keeps fa3"),
        ({"versions": {"torch": "2.0.0"}}, r"rollout server 0 has torch .*, actor 1 has 2\.0\.0"),
    ],
)
async def test_weights_of_a_trainer_that_cannot_agree_are_refused(server, weights, change, named):
    """A server that started again may have another installation than the start-up checks saw."""
    own = card_of("actor 1", (await server.describe())["contract_id"], "cpu")
    assert await server.begin_weights(1, trainer=own) is False
    await server.abandon_weights("only begun")
    await update(server, weights, 1)
    with pytest.raises(ConfigError, match=named):
        await server.begin_weights(2, trainer={**own, **change})
    await server.abandon_weights("refused")
    assert (await server.generate([5], dict(SAMPLED), "a")).extra_fields["global_steps"] == 1


async def test_stock_numerics_promise_nothing_that_a_card_could_break(folder):
    server = make(folder, name="stock")
    try:
        await server.begin_weights(1, trainer=card_of("actor 0", "another/contract", "cpu"))
        await server.abandon_weights("only begun")
    finally:
        server.engine.shutdown()


async def test_an_engine_failure_reaches_every_waiter_and_every_later_call(folder, monkeypatch):
    server = make(folder, ignore_eos=True, response_length=100)
    try:
        waiting = [asyncio.ensure_future(server.generate([5, n], dict(SAMPLED), f"r{n}")) for n in range(3)]
        while (await server.stats())["drawn_tokens"] < 3:
            await asyncio.sleep(0.002)

        def broken(*args, **kwargs):
            raise RuntimeError("a kernel failed")

        monkeypatch.setattr(server.engine._engine._runner, "execute", broken)
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), timeout=10)
        assert all(isinstance(result, EngineDeadError) and "a kernel failed" in str(result) for result in results)
        with pytest.raises(EngineDeadError, match="a kernel failed"):
            await server.generate([5], dict(SAMPLED), "later")
    finally:
        server.engine.shutdown()


async def test_describe_fits_the_manifest(server):
    from verl_tim.diagnosis.manifest import ProcessFacts

    facts = ProcessFacts.from_describe(await server.describe(), process="server 0")
    assert isinstance(facts.extra["dropped_schedules"], list)
    assert (facts.backend, facts.numerics, facts.compute_dtype, facts.head_dtype) == (
        "vexact",
        "contract",
        "bfloat16",
        "float32",
    )
    assert facts.contract_id
    assert facts.prefix_cache is True  # verl's default


async def test_a_server_says_what_holds_in_its_process(server, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    (report,) = await server.observe(("NCCL_ALGO", "NOT_THERE"))
    assert report["variables"] == {"NCCL_ALGO": "Ring"}
    assert set(report["digests"]) == {"gemm", "attention"}
    assert report["unstable"] == {}
    assert report["graph_shapes"] == []


async def test_a_report_holds_the_marks_of_its_time(server):
    await asyncio.gather(*[server.generate([5, 6, 7 + i], {**SAMPLED, "seed": i}, str(i)) for i in range(6)])
    marks = (await server.report())["marks"]
    assert marks["max_running"] == 4
    assert 1 <= marks["max_waiting"] <= 6
    assert 0 < marks["max_kv_use"] <= 1
    assert marks["tokens_per_second"] > 0
    await server.generate([5, 6, 7], dict(SAMPLED), "alone")
    alone = (await server.report())["marks"]
    assert alone["max_running"] == 1
    assert alone["max_waiting"] <= 1
    assert alone["max_kv_use"] < marks["max_kv_use"]
    nothing = (await server.report())["marks"]
    assert nothing == {"max_running": 0, "max_waiting": 0, "max_kv_use": 0, "tokens_per_second": 0}


async def scraped(address) -> dict[str, float]:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            return answer.read().decode()

    text = await asyncio.to_thread(get)
    return {
        sample.name + "".join(f"/{value}" for key, value in sample.labels.items() if key == "finished_reason"): (
            sample.value,
            sample.labels,
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_metrics_are_prometheus_text(folder):
    server = make(folder)
    try:
        address = await server.serve_metrics("127.0.0.1", "a-model")
        assert address.startswith("127.0.0.1:")
        before = await scraped(address)
        drawn = len((await server.generate([5, 6, 7], dict(SAMPLED), "a")).token_ids)
        after = await scraped(address)
        value, labels = after["verl_tim_generation_tokens_total"]
        assert value - before["verl_tim_generation_tokens_total"][0] == drawn
        assert labels == {"rollout": "vexact", "replica": "0", "model_name": "a-model"}
        assert after["verl_tim_prompt_tokens_total"][0] == 3
        assert after["verl_tim_engine_up"][0] == 1
        assert after["verl_tim_num_requests_running"][0] == after["verl_tim_num_requests_waiting"][0] == 0
        assert after["verl_tim_kv_cache_usage_perc"][0] == 0
        assert after["verl_tim_num_preemptions_total"][0] == 0
        finished = sum(
            value for name, (value, _) in after.items() if name.startswith("verl_tim_requests_finished_total/")
        )
        assert finished == 1
        await server.set_global_steps(7)
        assert (await scraped(address))["verl_tim_weight_version"][0] == 7
    finally:
        server.engine.shutdown()
    assert await scraped(address) == {"verl_tim_engine_up": (0, labels)}, "an engine that has failed"


async def test_scrapes_are_answered_whatever_the_engine_does(folder, monkeypatch):
    monkeypatch.setattr("verl_tim.rollout.server._STATS_SECONDS", 0.2)
    server, go_on = make(folder), asyncio.Event()
    weights = load_file(f"{folder}/model.safetensors")

    async def slow():
        await go_on.wait()
        for item in weights.items():
            yield item

    try:
        address = await server.serve_metrics("127.0.0.1", None)
        begun = asyncio.ensure_future(server.engine.update_weights(slow(), 1))
        during = await asyncio.wait_for(asyncio.gather(*[scraped(address) for _ in range(4)]), 30)
        assert [{name: value for name, (value, _) in each.items()} for each in during] == [
            {"verl_tim_engine_up": 1}
        ] * 4
        go_on.set()
        await begun
        monkeypatch.setattr("verl_tim.rollout.server._STATS_SECONDS", 30.0)
        assert (await scraped(address))["verl_tim_weight_version"][0] == 1
        await server.sleep()
        asleep = await scraped(address)
        assert asleep["verl_tim_engine_up"][0] == asleep["verl_tim_weight_updates_total"][0] == 1
        assert asleep["verl_tim_kv_cache_usage_perc"][0] == 0
        assert len(asyncio.all_tasks()) == 1, "of scrapes that were given up nothing is left"
    finally:
        go_on.set()
        server.engine.shutdown()


async def test_an_ipv6_address_is_written_as_urls_write_it(folder):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = make(folder)
    try:
        address = await server.serve_metrics("::1", None)
        assert address.startswith("[::1]:")
        assert (await scraped(address))["verl_tim_engine_up"][0] == 1
    finally:
        server.engine.shutdown()


async def test_two_servers_of_one_machine_listen_apart(folder):
    servers = [make(folder), make(folder)]
    try:
        one, two = [await server.serve_metrics("127.0.0.1", None) for server in servers]
        assert one != two
        assert (await scraped(one))["verl_tim_engine_up"][1]["model_name"] == Path(folder).name
        assert (await scraped(two))["verl_tim_engine_up"][0] == 1
    finally:
        for server in servers:
            server.engine.shutdown()


async def test_a_report_counts_and_names_failures_once(server):
    await server.generate([5, 6], dict(SAMPLED), "good")
    with pytest.raises(RequestError):
        await server.generate([5], {**SAMPLED, "temprature": 1}, "bad")
    report = await server.report()
    assert report["counters"]["drawn_tokens"] > 0
    assert report["num_failures"] == len(report["failures"]) == 1
    assert "temprature" in report["failures"][0]
    again = await server.report()
    assert again["counters"] == dict.fromkeys(report["counters"], 0)
    assert (again["num_failures"], again["failures"]) == (0, [])


async def test_a_server_that_nobody_asks_for_reports_keeps_few_of_its_failures(server):
    """Such are those of reward models and teachers, which verl starts and only its trainer's own rollout is asked."""
    wrong = [server.generate([5], {**SAMPLED, "temprature": n}, str(n)) for n in range(KEPT_FAILURES + 5)]
    assert all(isinstance(one, RequestError) for one in await asyncio.gather(*wrong, return_exceptions=True))
    report = await server.report()
    assert report["num_failures"] == KEPT_FAILURES + 5
    assert len(report["failures"]) == KEPT_FAILURES


async def test_a_profile_that_is_asked_for_is_declined_once(server, caplog):
    for _ in range(2):
        await server.start_profile()
        await server.stop_profile()
    said = [record.getMessage() for record in caplog.records if "profile" in record.getMessage()]
    assert len(said) == 1
    assert "actor_rollout_ref.rollout.profiler" in said[0]
    assert "verl-tim bench rollout --profile FILE" in said[0]
