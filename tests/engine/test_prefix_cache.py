"""Prefix cache: what is found again, that it changes nothing drawn, and that nothing stale is ever found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.support import check_output, fake_engine, run_all
from verl_tim.engine import SamplingParams
from verl_tim.engine.prefix_cache import extend_keys, root_key

PAGE = 4


def engine_with(**settings):
    return fake_engine(enable_prefix_cache=True, page_size=PAGE, **settings)


def hit_tokens(engine) -> int:
    return engine.stats().prefix_hit_tokens


def test_keys_depend_on_all_tokens_before_and_on_the_version():
    tokens = np.arange(12, dtype=np.int32)

    def keys(tokens, version=0):
        out: list[bytes] = []
        extend_keys(out, root_key(version), tokens, PAGE, len(tokens) // PAGE)
        return out

    base = keys(tokens)
    assert len(set(base)) == 3
    changed = tokens.copy()
    changed[0] += 1
    assert all(a != b for a, b in zip(base, keys(changed), strict=True))
    assert all(a != b for a, b in zip(base, keys(tokens, 1), strict=True))
    assert keys(tokens[:8]) == base[:2]
    extended = base[:1]
    extend_keys(extended, root_key(0), tokens, PAGE, 3)
    assert extended == base


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("budget", [3, 64])
def test_a_warm_prompt_draws_what_a_cold_one_does(length, budget):
    """At every offset to the page border, a prompt of whole pages included (its last token is computed again)."""
    prompt = [2 + i for i in range(length)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=11)
    engine = engine_with(max_num_batched_tokens=budget)
    engine.add("cold", prompt, params)
    cold = run_all(engine)["cold"]
    engine.add("warm", prompt, params)
    warm = run_all(engine)["warm"]
    assert (warm.token_ids, warm.log_probs) == (cold.token_ids, cold.log_probs)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, (length - 1) // PAGE * PAGE)
    check_output(warm, prompt, params)


def test_samples_of_one_prompt_share_within_one_step():
    """The n samples of a prompt arrive together: the first computes the prompt, the others join in the same step."""
    prompt = [2 + i for i in range(22)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine = engine_with(max_num_seqs=8)
    for index in range(8):
        engine.add(str(index), prompt, params)
    engine.step()
    stats = engine.stats()
    assert stats.num_running == 8
    assert stats.prefix_hit_tokens == 7 * 20
    assert stats.prefill_tokens == 22 + 7 * 2
    assert stats.total_pages - stats.free_pages == 5 + 8
    outputs = run_all(engine)
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 8
    for output in outputs.values():
        check_output(output, prompt, params)


def test_a_cut_prefill_is_shared_as_far_as_it_is_computed():
    prompt = [2 + i for i in range(30)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine = engine_with(max_num_batched_tokens=14)
    engine.add("a", prompt, params)
    engine.step()
    engine.add("b", prompt, params)
    outputs = {}
    for _ in range(50):
        outputs.update((output.request_id, output) for output in engine.step())
        engine.audit()
    assert 0 < outputs["b"].num_cached_tokens < 30
    for output in outputs.values():
        check_output(output, prompt, params)


def test_a_response_is_found_again_as_a_prompt():
    """The next turn of a conversation finds the whole of the last one, drawn tokens included."""
    engine = engine_with()
    params = SamplingParams(max_tokens=11, ignore_eos=True)
    engine.add("turn 1", [2, 3, 4, 5, 6], params)
    first = run_all(engine)["turn 1"]
    prompt = [2, 3, 4, 5, 6, *first.token_ids, 9, 9]
    engine.add("turn 2", prompt, params)
    second = run_all(engine)["turn 2"]
    # 15 of the 16 tokens have KV (the last drawn one has none): 3 whole pages.
    assert second.num_cached_tokens == 12
    check_output(second, prompt, params)


def test_a_preempted_sequence_finds_its_own_pages():
    engine = engine_with(kv_cache_tokens=64, watermark=0.0)
    requests = {"old": ([2] * 8, 12), "young": ([2 + i for i in range(44)], 10)}
    for name, (prompt, max_tokens) in requests.items():
        engine.add(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    outputs = run_all(engine)
    stats = engine.stats()
    assert (outputs["young"].num_preempted, stats.preemptions) == (1, 1)
    assert 40 <= stats.prefix_hit_tokens <= stats.preempted_tokens
    assert outputs["young"].num_cached_tokens == 0, "what it found later was its own"
    for name, (prompt, max_tokens) in requests.items():
        check_output(outputs[name], prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.parametrize("change", ["update_weights", "clear", "sleep"])
def test_nothing_is_found_after_a_change(change):
    engine = engine_with()
    prompt = [2 + i for i in range(20)]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.add("before", prompt, params)
    run_all(engine)
    assert engine.stats().cached_pages > 0
    if change == "update_weights":
        engine.update_weights([("salt", torch.tensor(1))], 1)
    elif change == "clear":
        engine.clear_kv_cache()
    else:
        engine.release_kv_cache()
        engine.resume_kv_cache()
    assert engine.stats().cached_pages == 0
    engine.add("after", prompt, params)
    check_output(run_all(engine)["after"], prompt, params)
    assert hit_tokens(engine) == 0


def test_a_repeated_version_number_finds_nothing_old():
    engine = engine_with()
    prompt = [2 + i for i in range(20)]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for salt in (1, 2):  # two loads that carry the same version, as after a rollback
        engine.update_weights([("salt", torch.tensor(salt))], 7)
        engine.add(str(salt), prompt, params)
        check_output(run_all(engine)[str(salt)], prompt, params, salts={7: salt})
    assert hit_tokens(engine) == 0


def test_cached_pages_give_way_to_new_work():
    engine = engine_with(kv_cache_tokens=64)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for index in range(10):
        prompt = [2 + index * 3 + i for i in range(25)]
        engine.add(str(index), prompt, params)
        check_output(run_all(engine)[str(index)], prompt, params)
    assert engine.stats().evicted_pages > 0


def test_off_means_off():
    engine = fake_engine(enable_prefix_cache=False)
    for name in ("a", "b"):
        engine.add(name, [2] * 20, SamplingParams(max_tokens=5))
    run_all(engine)
    stats = engine.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_queried_tokens, stats.cached_pages) == (0, 0, 0)
