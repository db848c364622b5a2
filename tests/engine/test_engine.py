"""The engine's verbs over the fake model: what is drawn, when it ends, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.engine.deferred_device import DeferredDevice
from tests.engine.fake_model import EOS, MAX_LEN, VOCAB, FakeModel
from tests.engine.support import check_output, fake_engine, random_prompts, run_all
from tests.engine.tiny_models import save
from verl_tim.engine import (
    Engine,
    EngineConfig,
    EngineConfigError,
    EngineDeadError,
    EngineStateError,
    RequestError,
    SamplingParams,
)

PROMPTS = random_prompts(24, 1, 40, VOCAB)


def mixed_params(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=[0.0, 0.6, 1.0, 1.3][index % 4],
        max_tokens=1 + index * 3 % 29,
        seed=None if index % 3 else index,
        stop_token_ids=[(), (5,), (7, 9, 11, 13, 15, 17)][index % 3],
        ignore_eos=index % 5 == 0,
    )


def run_mixed(**settings):
    engine = fake_engine(**settings)
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"r{index}", prompt, mixed_params(index))
    return engine, run_all(engine)


def test_mixed_requests_draw_what_their_tokens_demand():
    engine, outputs = run_mixed()
    assert len(outputs) == len(PROMPTS)
    reasons = set()
    for index, prompt in enumerate(PROMPTS):
        check_output(outputs[f"r{index}"], prompt, mixed_params(index))
        reasons.add(outputs[f"r{index}"].finish_reason)
    assert reasons == {"stop", "length"}
    stats = engine.stats()
    assert stats.drawn_tokens == sum(len(output.token_ids) for output in outputs.values())
    # Without preemption each token is run once, except the last one of each response, which is never run.
    assert stats.preemptions == 0
    assert stats.decode_tokens == stats.drawn_tokens - len(outputs)
    assert stats.prefill_tokens == sum(map(len, PROMPTS))


BASELINE = run_mixed()[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 64},
        {"max_prefill_chunk": 1},
        {"max_prefill_chunk": 5},
        {"page_size": 1},
        {"page_size": 7},
        {"page_size": 64, "kv_cache_tokens": 1024},
        {"max_num_seqs": 1},
        {"max_num_seqs": 64},
        {"kv_cache_tokens": 72, "watermark": 0.0},
        {"kv_cache_tokens": 72, "page_size": 1, "watermark": 0.0, "max_num_seqs": 32},
        {"kv_cache_tokens": 72, "max_num_batched_tokens": 7},
        {"enable_prefix_cache": True},
        {"enable_prefix_cache": True, "kv_cache_tokens": 72, "watermark": 0.0},
        {"enable_prefix_cache": True, "kv_cache_tokens": 72, "page_size": 1, "max_num_batched_tokens": 7},
    ],
    ids=str,
)
def test_schedule_changes_nothing(settings):
    engine, outputs = run_mixed(**settings)
    for request_id, output in outputs.items():
        want = BASELINE[request_id]
        assert (output.token_ids, output.log_probs) == (want.token_ids, want.log_probs)
        assert output.finish_reason == want.finish_reason
    if settings.get("kv_cache_tokens") == 72:
        assert engine.stats().preemptions > 0, "the pool was meant to force preemptions"
        assert sum(output.num_preempted for output in outputs.values()) == engine.stats().preemptions
    if settings.get("max_prefill_chunk") or settings.get("max_num_batched_tokens", 64) < 64:
        assert engine.stats().chunk_cuts > 0


def test_order_and_company_change_nothing():
    engine = fake_engine()
    for index in reversed(range(len(PROMPTS))):
        engine.add(f"r{index}", PROMPTS[index], mixed_params(index))
    together = run_all(engine)
    for index, prompt in enumerate(PROMPTS):
        alone = fake_engine()
        alone.add(f"r{index}", prompt, mixed_params(index))
        output = run_all(alone)[f"r{index}"]
        assert output.token_ids == together[f"r{index}"].token_ids == BASELINE[f"r{index}"].token_ids


def test_default_seed_follows_engine_seed_and_request_id():
    def draw(engine_seed, request_id):
        engine = fake_engine(seed=engine_seed)
        engine.add(request_id, [2, 3, 4], SamplingParams(max_tokens=30, ignore_eos=True))
        return run_all(engine)[request_id].token_ids

    assert draw(0, "a") == draw(0, "a")
    assert draw(0, "a") != draw(0, "b")
    assert draw(0, "a") != draw(1, "a")


def test_a_decode_step_runs_new_tokens_only():
    model = FakeModel()
    engine = fake_engine(model)
    for index in range(4):
        engine.add(str(index), [2] * 10, SamplingParams(max_tokens=8, ignore_eos=True))
    run_all(engine)
    assert model.rows_seen == [40] + [4] * 7


def test_length_is_clamped_to_the_context():
    engine = fake_engine(kv_cache_tokens=1024)
    prompt = [2] * (MAX_LEN - 3)
    for name, max_tokens in (("none", None), ("more", 1000), ("exact", 3)):
        engine.add(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    for output in run_all(engine).values():
        assert len(output.token_ids) == 3
        assert output.finish_reason == "length"


def test_max_model_len_below_the_models():
    engine = fake_engine(max_model_len=16)
    engine.add("a", [2] * 10, SamplingParams(ignore_eos=True))
    assert len(run_all(engine)["a"].token_ids) == 6
    with pytest.raises(RequestError, match=r"request b: .*max_model_len=16.*raise max_model_len"):
        engine.add("b", [2] * 16)
    with pytest.raises(EngineConfigError, match=r"max_model_len=513.*max_position_embeddings=512"):
        fake_engine(max_model_len=MAX_LEN + 1)


@pytest.mark.parametrize("eos", [(EOS,), (33, EOS), [EOS, 33], EOS])
def test_eos_may_be_a_list_or_one_token(eos):
    engine = fake_engine(FakeModel(eos=eos))
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"r{index}", prompt, SamplingParams(temperature=2.0, max_tokens=200))
    outputs = run_all(engine)
    ends = {output.token_ids[-1] for output in outputs.values() if output.finish_reason == "stop"}
    assert ends == {eos} if isinstance(eos, int) else ends == set(eos)


def test_stop_tokens_stop_even_when_eos_is_ignored():
    params = SamplingParams(temperature=2.0, max_tokens=300, ignore_eos=True, stop_token_ids=(20, 30))
    engine = fake_engine(kv_cache_tokens=4096)
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"r{index}", prompt, params)
    outputs = run_all(engine)
    assert {output.token_ids[-1] for output in outputs.values() if output.finish_reason == "stop"} == {20, 30}
    assert any(EOS in output.token_ids for output in outputs.values())


def test_a_stop_token_at_the_length_limit_is_a_stop():
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine = fake_engine()
    engine.add("a", [2, 3], greedy)
    fifth = run_all(engine)["a"].token_ids[4]
    assert fifth not in run_prefix(engine, 4)
    engine.add("b", [2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, stop_token_ids=(fifth,)))
    output = run_all(engine)["b"]
    assert (len(output.token_ids), output.finish_reason) == (5, "stop")


def run_prefix(engine, count):
    engine.add("prefix", [2, 3], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    return run_all(engine)["prefix"].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], None, "prompt_ids is empty"),
        ([2, VOCAB], None, rf"prompt_ids\[1\]={VOCAB} is outside the model's vocabulary of {VOCAB}"),
        ([-1], None, r"prompt_ids\[0\]=-1 is outside"),
        ([0.5], None, "expected integer token ids"),
        (["a"], None, "expected integer token ids"),
        ([[2, 3]], None, "flat list"),
        ([[2, 3], [4]], None, "flat list"),
        ([2] * MAX_LEN, None, "leaves no room for one more; shorten the prompt or raise max_model_len"),
        ([2] * 300, {"max_tokens": 10}, "need 78 KV pages .* raise kv_cache_tokens to at least 312, or lower max_tok"),
        ([2], {"max_tokens": 300}, "raise kv_cache_tokens"),
        ([2], {"temprature": 1.0}, "unknown sampling parameter 'temprature'; known: .*temperature"),
        ([2], {"stop_token_ids": [VOCAB]}, f"stop_token_ids has {VOCAB}"),
    ],
)
def test_bad_request_is_refused_at_admission_and_leaves_nothing(prompt, params, message):
    engine = fake_engine()
    engine.add("good", [2, 3], SamplingParams(max_tokens=4))
    with pytest.raises(RequestError, match=f"request bad: .*{message}"):
        engine.add("bad", prompt, params)
    assert engine.request_ids() == ["good"]
    check_output(run_all(engine)["good"], [2, 3], SamplingParams(max_tokens=4))


def test_the_largest_request_that_the_pool_holds_is_served():
    engine = fake_engine(kv_cache_tokens=64)  # the last drawn token has no KV: 60 + 5 - 1 = 64
    engine.add("a", [2] * 60, SamplingParams(max_tokens=5, ignore_eos=True))
    with pytest.raises(RequestError, match="need 17 KV pages"):
        engine.add("b", [2] * 60, SamplingParams(max_tokens=6))
    assert len(run_all(engine)["a"].token_ids) == 5


def test_request_ids_are_unique_in_flight_and_free_afterwards():
    engine = fake_engine()
    engine.add("a", [2], SamplingParams(max_tokens=3))
    with pytest.raises(RequestError, match=r"request a: .*still in flight"):
        engine.add("a", [3])
    engine.step()
    with pytest.raises(RequestError, match=r"request a: .*still in flight"):
        engine.add("a", [3])
    run_all(engine)
    engine.add("a", [3], SamplingParams(max_tokens=3))
    check_output(run_all(engine)["a"], [3], SamplingParams(max_tokens=3))
    for bad in ("", None, 3):
        with pytest.raises(RequestError, match="request_id"):
            engine.add(bad, [3])


def test_prompts_may_be_arrays_and_tensors():
    engine = fake_engine()
    prompt = [2, 3, 4, 5]
    forms = {
        "list": prompt,
        "tuple": tuple(prompt),
        "int32": np.array(prompt, np.int32),
        "uint8": np.array(prompt, np.uint8),
        "tensor": torch.tensor(prompt),
    }
    params = SamplingParams(max_tokens=6, seed=5)
    for name, form in forms.items():
        engine.add(name, form, params)
    outputs = run_all(engine)
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 1


def test_the_prompt_is_copied():
    engine = fake_engine()
    prompt = np.array([2, 3, 4])
    engine.add("a", prompt, SamplingParams(max_tokens=5))
    prompt[:] = 9
    check_output(run_all(engine)["a"], [2, 3, 4], SamplingParams(max_tokens=5))


def test_abort_returns_what_was_drawn_and_frees_the_pages():
    engine = fake_engine(max_num_seqs=2)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    for name in "abcd":
        engine.add(name, [2, 3, ord(name) % VOCAB], params)
    for _ in range(5):
        engine.step()
    outputs = {output.request_id: output for output in engine.abort(["d", "a", "unknown", "a"])}
    engine.audit()
    assert {name: len(output.token_ids) for name, output in outputs.items()} == {"a": 5, "d": 0}
    assert {output.finish_reason for output in outputs.values()} == {"abort"}
    check_output(outputs["a"], [2, 3, ord("a") % VOCAB], params)
    assert engine.abort("unknown") == []
    rest = run_all(engine)
    assert {name: len(output.token_ids) for name, output in rest.items()} == {"b": 50, "c": 50}


def test_abort_all():
    engine = fake_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, [2], SamplingParams(max_tokens=50))
    engine.step()
    assert {output.request_id for output in engine.abort()} == {"a", "b", "c"}
    assert not engine.has_work()
    engine.audit()
    assert engine.step() == []
    assert engine.stats().finished["abort"] == 3


def test_a_request_with_broken_logits_fails_alone():
    model = FakeModel()
    model.poison = {13}
    engine = fake_engine(model, enable_prefix_cache=True)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = {"a": [2, 3], "bad": [13, 2, 3, 4, 5, 6], "b": [5, 6]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, params)
    outputs = run_all(engine)
    bad = outputs.pop("bad")
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert isinstance(bad.error, RequestError)
    assert "request bad: the model's logits for position 6 are not finite" in str(bad.error)
    for name, output in outputs.items():
        check_output(output, prompts[name], params)
    model.poison = set()
    engine.add("again", prompts["bad"], params)
    again = run_all(engine)["again"]
    assert again.num_cached_tokens == 0, "KV from the faulty step was found again"
    check_output(again, prompts["bad"], params)


def test_weights_change_between_steps_and_kv_is_recomputed():
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine = fake_engine(enable_prefix_cache=True, max_num_seqs=3)
    for name in "abcde":
        engine.add(name, [2, 3, 4, 5, 6, 7, 8, 9, ord(name) % VOCAB], params)
    done = {}
    for version in (5, 6, 9):
        for _ in range(7):
            done.update((output.request_id, output) for output in engine.step())
            engine.audit()
        assert engine.update_weights([("salt", torch.tensor(version))], version) == []
        assert engine.weight_version == version
        engine.audit()
    done.update(run_all(engine))
    for name in "abcde":
        check_output(done[name], [2, 3, 4, 5, 6, 7, 8, 9, ord(name) % VOCAB], params)
        assert done[name].weight_versions == sorted(done[name].weight_versions)
        assert done[name].num_preempted == 0, "a weight update is no preemption"
    assert done["a"].weight_versions == [0] * 7 + [5] * 7 + [6] * 6


def test_weight_update_may_abort_what_is_in_flight():
    engine = fake_engine()
    engine.add("a", [2], SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    (output,) = engine.update_weights([("salt", torch.tensor(1))], 1, in_flight="abort")
    assert (output.request_id, output.finish_reason, len(output.token_ids)) == ("a", "abort", 1)
    with pytest.raises(ValueError, match="in_flight='drop'"):
        engine.update_weights([], 2, in_flight="drop")
    with pytest.raises(ValueError, match="version='2'"):
        engine.update_weights([], "2")


@pytest.mark.parametrize("ahead", [False, True])
def test_weight_update_may_wait_for_what_is_in_flight(ahead):
    engine = fake_engine(device=DeferredDevice() if ahead else None, max_num_seqs=1)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for name in "ab":
        engine.add(name, [2], params)
    engine.step()
    outputs = engine.update_weights([("salt", torch.tensor(1))], 1, in_flight="finish")
    assert [output.request_id for output in outputs] == ["a", "b"]
    assert all(output.weight_versions == [0] * 9 for output in outputs)
    assert not engine.has_work()
    engine.add("c", [2], params)
    engine.release_kv_cache()
    with pytest.raises(EngineStateError, match="resume_kv_cache"):
        engine.update_weights([("salt", torch.tensor(2))], 2, in_flight="finish")
    assert engine.weight_version == 1
    engine.resume_kv_cache()
    (output,) = engine.update_weights([("salt", torch.tensor(2))], 2, in_flight="finish")
    assert output.weight_versions == [1] * 9


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("in_flight", ["abort", "finish"])
def test_a_failed_weight_update_loses_nothing_that_ended_before(ahead, in_flight):
    engine = fake_engine(device=DeferredDevice() if ahead else None, max_num_seqs=1)
    for name in "ab":
        engine.add(name, [2], SamplingParams(max_tokens=9, ignore_eos=True))
    with pytest.raises(KeyError, match="pepper"):
        engine.update_weights([("pepper", torch.tensor(1))], 1, in_flight=in_flight)
    assert [output.request_id for output in engine.drain()] == ["a", "b"]
    assert not engine.has_work()


def test_a_failed_weight_update_stops_the_engine_until_one_succeeds():
    engine = fake_engine()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.add("a", [2], params)
    engine.step()
    with pytest.raises(KeyError, match="unknown weight pepper"):
        engine.update_weights([("pepper", torch.tensor(1))], 1)
    with pytest.raises(
        EngineStateError, match=r"last weight update failed \(KeyError: .*pepper.*repeat update_weights"
    ):
        engine.step()
    assert engine.weight_version == 0
    engine.update_weights([("salt", torch.tensor(1))], 1)
    output = run_all(engine)["a"]
    assert output.weight_versions == [0] + [1] * 8
    check_output(output, [2], params)


def test_a_failed_step_is_the_end():
    model = FakeModel()
    model.fail_at = 3
    engine = fake_engine(model, enable_prefix_cache=True)
    engine.add("a", [2] * 9, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    with pytest.raises(FloatingPointError):
        engine.step()
    model.fail_at = None
    for verb in (
        engine.step,
        engine.abort,
        lambda: engine.add("b", [2]),
        lambda: engine.update_weights([("salt", torch.tensor(1))], 1),
    ):
        with pytest.raises(EngineDeadError, match="a step failed before: FloatingPointError: forward 3") as caught:
            verb()
        assert isinstance(caught.value.__cause__, FloatingPointError)


def test_a_model_that_cannot_be_had_is_named(tmp_path):
    folder = str(save("qwen3", tmp_path / "model"))
    for device in ("tpu", "cuda:99", "meta", 3.5):
        with pytest.raises(EngineConfigError, match=f"device='?{device}"):
            Engine(EngineConfig(folder, device=device))
    with pytest.raises(ValueError, match=r"model folder .*nowhere.* does not exist"):
        Engine(EngineConfig(str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no config.json"):
        Engine(EngineConfig(str(tmp_path / "empty")))


def test_sleep_and_wake():
    engine = fake_engine(enable_prefix_cache=True)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.add("a", [2, 3, 4, 5, 6], params)
    engine.step()
    engine.release_kv_cache()
    engine.audit()
    assert not engine.has_kv_cache
    with pytest.raises(EngineStateError, match="resume_kv_cache"):
        engine.step()
    engine.resume_kv_cache()
    engine.step()
    engine.release_kv_cache()
    engine.release_weights()
    engine.resume_kv_cache()
    with pytest.raises(EngineStateError, match="weights are released; call update_weights"):
        engine.step()
    engine.update_weights([("salt", torch.tensor(3))], 3)
    output = run_all(engine)["a"]
    check_output(output, [2, 3, 4, 5, 6], params, salts={0: 0, 3: 3})


def test_no_weights_at_start():
    engine = fake_engine(load_weights=False)
    engine.add("a", [2], SamplingParams(max_tokens=4))
    with pytest.raises(EngineStateError, match="load_weights=false"):
        engine.step()
    engine.update_weights([("salt", torch.tensor(7))], 7)
    check_output(run_all(engine)["a"], [2], SamplingParams(max_tokens=4))


def test_log_probs_are_exact_fp32_values():
    for output in BASELINE.values():
        for value in output.log_probs:
            assert float(np.float32(value)) == value
            assert math.isfinite(value)
            assert value <= 0


def test_kv_pool_is_sized_from_bytes_tokens_or_memory():
    page = 2 * 2 * 4 * 1 * 2 * 4  # k and v, layers, page size, heads, head dim, fp32
    assert fake_engine(kv_cache_tokens=103).stats().total_pages == 25
    assert fake_engine(kv_cache_tokens=None, kv_cache_bytes=page * 10).stats().total_pages == 9
    with pytest.raises(EngineConfigError, match=f"kv_cache_bytes={page} leaves no room"):
        fake_engine(kv_cache_tokens=None, kv_cache_bytes=page)
    by_memory = fake_engine(kv_cache_tokens=None, max_num_seqs=3)
    assert by_memory.stats().total_pages == 3 * MAX_LEN // 4
    assert by_memory.describe()["kv_cache_tokens"] == 3 * MAX_LEN


def test_describe_is_plain():
    import json

    description = fake_engine(seed=3).describe()
    assert json.loads(json.dumps(description)) == description
    assert description["seed"] == 3
    assert description["numerics"] == "stock"
    assert description["contract"] is None
