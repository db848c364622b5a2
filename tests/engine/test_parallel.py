"""A split engine gives the tokens and the bits of one device, whatever it is doing besides; and it ends when it ends.

Ranks are processes on the CPU. A crew of them serves all engines of one split, since starting it takes seconds.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.engine import faults
from tests.engine.deferred_device import DeferredDevice
from tests.engine.support import kept_crews, random_prompts, run_all
from tests.engine.tiny_models import hf_model, save
from verl_tim.engine import Engine, EngineConfig, SamplingParams, start_engine
from verl_tim.engine.weight_reader import LocalTensors
from verl_tim.models import WeightError
from verl_tim.numerics.contract import VOCAB_TILE

# name -> kind, changes to the config. Heads divide by four; vocabularies do not, and have two tiles or one
MODELS = {
    "dense": ("qwen3", {"num_key_value_heads": 4, "vocab_size": VOCAB_TILE + 77}),
    "tied": ("qwen3", {"num_key_value_heads": 4, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "moe": ("qwen3_moe", {"num_key_value_heads": 4, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
}
SPLITS = {"tp2": (2, 1), "tp4": (4, 1), "pp2": (1, 2), "tp2pp2": (2, 2)}
PROMPTS = [*random_prompts(9, 1, 50, 151, seed=3), random_prompts(1, 130, 130, 151, seed=4)[0]]
PROMPTS[7] = PROMPTS[9][:48] + PROMPTS[7]  # two that share a beginning
SMALL = {"kv_cache_tokens": 168, "page_size": 4, "watermark": 0.0, "max_model_len": 168}


def params(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=[1.0, 0.6, 1.3, 0.0][index % 4],
        top_k=[-1, 5][index // 4 % 2],
        top_p=[1.0, 0.9][index // 2 % 2],
        min_p=[0.0, 0.0, 0.05][index % 3],
        max_tokens=20 + 3 * index % 17,
        ignore_eos=index % 2 == 0,
        record_routes=True,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save(kind, tmp_path_factory.mktemp(name), **changes) for name, (kind, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def crews():
    """Crews by the name of their split."""
    with kept_crews("cpu") as of:
        yield lambda name: of(*SPLITS[name])


def settings(folder, changes: dict, split: str | None = None) -> EngineConfig:
    values = {"kv_cache_tokens": 2048, "max_num_seqs": 16, "dtype": "bfloat16", **changes}
    if split is not None:
        values |= dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), SPLITS[split], strict=True))
    return EngineConfig(str(folder), **values)


def add_all(engine: Engine) -> None:
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"r{index}", prompt, params(index))


def bits(output) -> tuple:
    patterns = np.array(output.log_probs, np.float32).view(np.int32).tolist()
    masses = np.array(output.kept_mass, np.float32).view(np.int32).tolist()
    return output.token_ids, patterns, masses, output.top1_ids, output.finish_reason, output.weight_versions


def routes(output) -> list | None:
    return None if output.routes_TLK is None else output.routes_TLK.tolist()


@pytest.fixture(scope="module")
def reference(folders):
    """Of one device, per model and dtype: the outputs, and the checksum of the weights."""
    cache: dict = {}

    def of(name: str, dtype: str = "bfloat16"):
        if (name, dtype) not in cache:
            engine = Engine(settings(folders[name], {"dtype": dtype}))
            add_all(engine)
            outputs = run_all(engine, audit=False)
            log_probs = np.concatenate([output.log_probs for output in outputs.values()])
            assert np.isfinite(log_probs).all()
            assert log_probs.std() > 0.5, "the logits are meant to be peaked"
            assert min(min(output.kept_mass) for output in outputs.values()) < 1, "some rows must cut"
            cache[name, dtype] = outputs, engine.weight_checksum()
        return cache[name, dtype]

    return of


SCHEDULES = [
    {},
    {"max_num_batched_tokens": 16, "max_prefill_chunk": 7, "page_size": 5},
    {**SMALL, "preempts": True},
    {"enable_prefix_cache": True, "max_num_batched_tokens": 64, "hits": True},
    {"ahead": True, "enforce_eager": True, "max_num_batched_tokens": 64},
    {"ahead": True, "max_num_seqs": 3},
    {"ahead": True, **SMALL, "enable_prefix_cache": True, "preempts": True},
]


@pytest.mark.parametrize(
    ("split", "name", "schedule"),
    # Both splits and experts with every schedule; of the rest a fifth, every split, model and schedule among it.
    [
        pytest.param(split, name, schedule, marks=[pytest.mark.slow] if split == "tp4" else [])
        for i, split in enumerate(SPLITS)
        for j, name in enumerate(MODELS)
        for k, schedule in enumerate(SCHEDULES)
        if (split, name) == ("tp2pp2", "moe") or (i + j + k) % 5 == 0
    ],
    ids=str,
)
def test_no_split_changes_a_bit(folders, reference, crews, split, name, schedule):
    changes = dict(schedule)
    ahead, preempts, hits = (changes.pop(key, False) for key in ("ahead", "preempts", "hits"))
    outputs, checksum = reference(name)
    engine = start_engine(
        settings(folders[name], changes, split), device=DeferredDevice if ahead else None, crew=crews(split)
    )
    add_all(engine)
    got = run_all(engine, audit=False)
    assert {key: bits(output) for key, output in got.items()} == {k: bits(output) for k, output in outputs.items()}
    if ahead and "pp" in split:  # whose stages give out none
        assert all(routes(output) is None for output in got.values())
    else:
        assert {key: routes(output) for key, output in got.items()} == {k: routes(o) for k, o in outputs.items()}
        assert (routes(got["r0"]) is None) == (name != "moe")
    stats = engine.stats()
    assert (stats.preemptions > 0) == preempts
    assert (stats.prefix_hit_tokens > 0) >= hits
    assert engine.weight_checksum() == checksum
    engine.each_rank(faults.audit)
    assert engine.each_rank(faults.rank) == list(range(engine.config.num_ranks))
    whole = Engine(settings(folders[name], {})).model.nbytes
    assert max(engine.each_rank(faults.weight_bytes)) < whole
    engine.close()


@pytest.mark.parametrize("split", ["tp2", "tp2pp2"])
def test_float32(folders, reference, crews, split):
    outputs, checksum = reference("moe", "float32")
    engine = start_engine(settings(folders["moe"], {"dtype": "float32"}, split), crew=crews(split))
    add_all(engine)
    assert {k: bits(o) for k, o in run_all(engine).items()} == {k: bits(o) for k, o in outputs.items()}
    assert engine.weight_checksum() == checksum
    engine.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pipeline_has_a_plan_per_stage_under_way(folders, crews, ahead):
    device = DeferredDevice if ahead else None
    engine = start_engine(settings(folders["tied"], {}, "pp2"), device=device, crew=crews("pp2"))
    add_all(engine)
    seen = []
    while engine.has_work():
        engine.step()
        seen.append(faults.under_way(engine))
    assert max(seen) == 1  # after a step the last stage is done with its plan, the first one's moves on
    assert np.mean(seen) > 0.8, "most steps must find work for the first stage"
    assert seen[-1] == 0
    decodes = engine.stats().decode_tokens / engine.stats().steps
    assert decodes < 0.6 * len(PROMPTS), "a step takes its share of the decodes, so that the others run beside it"
    engine.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("split", ["tp2", "pp2", "tp2pp2"])
def test_weight_updates_sleep_and_abort_in_the_middle(folders, crews, split, ahead):
    """The same verbs at the same tokens on one device and on several: same outputs, versions and checksums."""
    new = list(hf_model("qwen3_moe", seed=5, **MODELS["moe"][1]).state_dict().items())

    def life(engine: Engine):
        outputs = {}

        def take(some):
            outputs.update({output.request_id: output for output in some})

        def steps_until(tokens: int) -> None:
            while engine.has_work() and engine.stats().drawn_tokens < tokens:
                take(engine.step())

        add_all(engine)
        take(engine.abort(["r1", "unknown"]))
        steps_until(25)
        take(engine.drain())
        engine.clear_kv_cache()
        engine.release_kv_cache()
        engine.resume_kv_cache()
        take(engine.update_weights(iter(new), 7))
        checksum = engine.weight_checksum()
        steps_until(60)
        engine.release_weights()
        with pytest.raises(RuntimeError, match="weights are released"):
            engine.step()
        take(engine.update_weights(iter(new), 8, in_flight="abort"))
        assert not engine.request_ids()
        engine.add("last", PROMPTS[3], params(3))
        engine.step()
        take(engine.update_weights(iter(new), 9, in_flight="finish"))
        assert not engine.has_work()
        return outputs, checksum

    config = {"max_num_batched_tokens": 64, "enable_prefix_cache": True}
    one, one_checksum = life(Engine(settings(folders["moe"], config)))
    device = DeferredDevice if ahead else None
    engine = start_engine(settings(folders["moe"], config, split), device=device, crew=crews(split))
    several, checksum = life(engine)
    assert checksum == one_checksum
    assert bits(several["last"]) == bits(one["last"])
    assert set(several["last"].weight_versions) == {8}
    assert several.keys() == one.keys()
    engine.each_rank(faults.audit)
    assert engine.each_rank(faults.requests) == [[]] * engine.config.num_ranks
    engine.close()


def test_tokens_of_each_version_have_the_bits_of_that_version(folders, crews):
    """After an update in the middle, what a request draws is what one device draws from the same tokens."""
    new = list(hf_model("qwen3", seed=6, **MODELS["tied"][1]).state_dict().items())
    engine = start_engine(settings(folders["tied"], {}, "tp2pp2"), crew=crews("tp2pp2"))
    add_all(engine)
    while engine.stats().drawn_tokens < 40:
        engine.step()
    engine.update_weights(iter(new), 3)
    outputs = run_all(engine)
    single = Engine(settings(folders["tied"], {}))
    single.update_weights(iter(new), 3)
    mixed = {key: output for key, output in outputs.items() if set(output.weight_versions) == {0, 3}}
    assert len(mixed) > 3
    for key, output in mixed.items():
        index, old = int(key[1:]), output.weight_versions.count(0)
        prompt = [*PROMPTS[index], *output.token_ids[:old]]
        rest = SamplingParams(
            **{**{f: getattr(params(index), f) for f in ("temperature", "top_k", "top_p", "min_p", "ignore_eos")},
               "max_tokens": params(index).max_tokens - old,
               "seed": engine_seed(key)}
        )  # fmt: skip
        single.add(key, prompt, rest)
    again = run_all(single)
    for key, output in mixed.items():
        old = output.weight_versions.count(0)
        assert again[key].token_ids == output.token_ids[old:]
        assert again[key].log_probs == output.log_probs[old:]
    engine.close()


def engine_seed(request_id: str) -> int:
    from verl_tim.engine.core import default_seed

    return default_seed(0, request_id)


def test_weights_that_each_rank_reads_by_itself(folders, crews):
    single = Engine(settings(folders["moe"], {"load_weights": False}))
    shapes = single.model.weight_shapes()
    names = list(shapes)
    single.update_weights([(name, faults.own_tensor(name, shapes[name], 9)) for name in names], 1)
    engine = start_engine(settings(folders["moe"], {"load_weights": False}, "tp2pp2"), crew=crews("tp2pp2"))
    half = len(names) // 2
    stream = [
        LocalTensors([{"names": names[:half], "seed": 9}] * 4),
        (names[half], faults.own_tensor(names[half], shapes[names[half]], 9)),  # the ways may alternate
        LocalTensors([{"names": names[half + 1 :], "seed": 9}] * 4),
    ]
    engine.update_weights(stream, 1, reader=faults.OwnTensors(shapes))
    assert engine.weight_checksum() == single.weight_checksum()
    engine.close()


@pytest.mark.parametrize("split", ["tp2", "tp2pp2"])
def test_a_failed_update_leaves_all_ranks_without_weights_and_the_next_one_heals(folders, reference, crews, split):
    outputs, checksum = reference("dense")
    engine = start_engine(settings(folders["dense"], {}, split), crew=crews(split))
    state = hf_model("qwen3", **MODELS["dense"][1]).state_dict()
    name = "model.layers.1.mlp.down_proj.weight"
    misshapen = {**state, name: state[name][:, :-1]}
    missing = {key: value for key, value in state.items() if key != name}
    with pytest.raises(WeightError, match=rf"'{name}' is \(64, 87\), the model needs \(64, 88\)"):
        engine.update_weights(misshapen.items(), 1)
    with pytest.raises(RuntimeError, match="repeat update_weights"):
        engine.step()

    def broken_stream():
        yield from list(state.items())[:3]
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError, match="the sender is gone"):
        engine.update_weights(broken_stream(), 1)
    with pytest.raises(WeightError, match=f"missing: {name}"):
        engine.update_weights(missing.items(), 1)
    engine.update_weights(state.items(), 0)
    add_all(engine)
    assert {k: bits(o) for k, o in run_all(engine).items()} == {k: bits(o) for k, o in outputs.items()}
    assert engine.weight_checksum() == checksum
    engine.close()


def test_engines_of_one_crew_do_not_disturb_each_other(folders, reference, crews):
    first = start_engine(settings(folders["moe"], {}, "tp2"), crew=crews("tp2"))
    second = start_engine(settings(folders["tied"], {"page_size": 4}, "tp2"), crew=crews("tp2"))
    add_all(first)
    add_all(second)
    ended: list[dict] = [{}, {}]
    while first.has_work() or second.has_work():
        for outputs, engine in zip(ended, (first, second), strict=True):
            if engine.has_work():
                outputs |= {output.request_id: bits(output) for output in engine.step()}
    for outputs, name in zip(ended, ("moe", "tied"), strict=True):
        assert outputs == {key: bits(output) for key, output in reference(name)[0].items()}
    first.close()
    second.close()


def test_the_pool_has_the_pages_that_every_rank_has(folders, crews):
    engine = start_engine(
        settings(folders["tied"], {"kv_cache_tokens": None, "kv_cache_bytes": 1 << 20}, "pp2"), crew=crews("pp2")
    )
    page = 2 * 2 * 16 * 4 * 16 * 2  # keys and values; the first stage has two of the three layers
    assert engine.each_rank(faults.pages) == [math.floor((1 << 20) / page) - 1] * 2
    engine.close()


def test_a_collective_that_hands_back_no_work_is_done(monkeypatch):
    """As NCCL's do on the current stream."""
    from verl_tim.engine import parallel

    class NoWork:
        def __init__(self, group):
            self._group = group

        def _allgather_base(self, *arguments):
            self._group._allgather_base(*arguments).wait()

        def broadcast(self, *arguments):
            self._group.broadcast(*arguments).wait()

    made = torch.distributed.ProcessGroupGloo
    monkeypatch.setattr(
        parallel.dist, "ProcessGroupGloo", type("Gloo", (), {
            "_Options": made._Options, "create_device": staticmethod(made.create_device),
            "__new__": lambda cls, *arguments: NoWork(made(*arguments)),
        }),
    )  # fmt: skip
    group = parallel.Communicator(torch.distributed.HashStore(), "alone", [0], 0, torch.device("cpu"))
    x = torch.arange(3.0)
    assert torch.equal(group.gather(x), x[None])
    assert torch.equal(group.broadcast(x.clone(), 0), x)
