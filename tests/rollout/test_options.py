"""verl's rollout config: what is read, and what is refused by name."""

from __future__ import annotations

import math

import pytest

from verl_tim.rollout.options import DEFAULT_HANG_TIMEOUT, local_model_folder, ranks_of, rollout_options
from verl_tim.training.config import ConfigError


def config(**changes):
    base = {
        "name": "vexact",
        "dtype": "bfloat16",
        "prompt_length": 40,
        "response_length": 60,
        "max_model_len": None,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "seed": 7,
        "load_format": "dummy",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "engine_kwargs": {"vllm": {"anything": 1}},
    }
    return {**base, **changes}


def options(context=128, **changes):
    return rollout_options(config(**changes), model_path="/model", max_position_embeddings=context, device="cpu")


def test_verls_keys_reach_the_engine():
    engine = {
        "page_size": 8,
        "kv_cache_tokens": 512,
        "num_threads": 2,
        "in_flight": "keep",
        "max_restarts": 5,
        "hang_timeout": 90,
    }
    read = options(engine_kwargs={"vexact": engine})
    engine = read.engine
    assert (engine.numerics, engine.dtype, engine.seed, engine.max_num_seqs) == ("contract", "bfloat16", 7, 16)
    assert (engine.page_size, engine.kv_cache_tokens, engine.max_num_batched_tokens) == (8, 512, 256)
    assert engine.max_model_len == read.max_model_len == 100
    assert not engine.load_weights
    assert read.num_threads == 2
    assert read.in_flight == "keep"
    assert read.max_restarts == 5
    assert read.hang_timeout == 90
    assert options().hang_timeout == DEFAULT_HANG_TIMEOUT
    assert options(engine_kwargs={"vexact": {"hang_timeout": None}}).hang_timeout is None
    assert options(load_format="auto").engine.load_weights
    assert options(name="stock").engine.numerics == "stock"


@pytest.mark.parametrize("name", ["vexact", "stock"])
@pytest.mark.parametrize(
    ("own", "cached"),
    [
        ({}, None),
        ({"enable_prefix_cache": None}, None),
        ({"enable_prefix_cache": False}, False),
        ({"enable_prefix_cache": True}, True),
    ],
)
def test_the_prefix_cache_is_verls_unless_the_engines_own_option_says_otherwise(name, own, cached):
    for verls in (True, False):
        read = options(name=name, enable_prefix_caching=verls, engine_kwargs={name: own})
        assert read.engine.enable_prefix_cache is (verls and name == "vexact" if cached is None else cached)


def test_verls_defaults_are_served():
    from hydra import compose, initialize_config_module

    from verl_tim.rollout.options import refusals

    with initialize_config_module("verl.trainer.config", version_base=None):
        asked = ["actor_rollout_ref.rollout.name=vexact"]
        rollout = compose("ppo_trainer", overrides=asked).actor_rollout_ref.rollout
    assert refusals(rollout) == []
    read = rollout_options(rollout, model_path="/model", max_position_embeddings=4096, device="cpu")
    assert read.engine.enable_prefix_cache


def test_a_gpu_takes_verls_memory_share_and_eager_switch():
    asked = config(gpu_memory_utilization=0.6, enforce_eager=True)
    on_gpu = rollout_options(asked, model_path="/model", max_position_embeddings=128, device="cuda:0").engine
    assert (on_gpu.gpu_memory_utilization, on_gpu.enforce_eager) == (0.6, True)
    on_cpu = rollout_options(asked, model_path="/model", max_position_embeddings=128, device="cpu").engine
    assert (on_cpu.gpu_memory_utilization, on_cpu.enforce_eager) == (None, False)


def test_routes_come_from_gpus_but_not_from_their_stages():
    def on(device, **changes):
        asked = config(enable_rollout_routing_replay=True, gpu_memory_utilization=0.5, **changes)
        return rollout_options(asked, model_path="/model", max_position_embeddings=128, device=device)

    assert on("cuda:0").return_routes
    assert on("cuda:0", tensor_model_parallel_size=2).return_routes
    assert on("cpu", pipeline_model_parallel_size=2).return_routes
    with pytest.raises(ConfigError, match=r"enable_rollout_routing_replay: .*pipeline_model_parallel_size=1"):
        on("cuda:0", pipeline_model_parallel_size=2)


def test_the_engine_is_split_as_verl_asks():
    engine = options(tensor_model_parallel_size=2, pipeline_model_parallel_size=3).engine
    assert (engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.num_ranks) == (2, 3, 6)
    assert ranks_of(config(tensor_model_parallel_size=2, pipeline_model_parallel_size=3)) == 6
    assert options().engine.num_ranks == ranks_of(config()) == 1


def test_options_of_another_rollout_are_not_read():
    assert options(engine_kwargs={"stock": {"page_size": 4}}).engine.tokens_per_page == 16


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engine_kwargs": {"vexact": {"page_sise": 8}}}, r"engine_kwargs\.vexact\.page_sise.*did you mean page_size"),
        ({"engine_kwargs": {"vexact": {"attn_impl": "fa3"}}}, r"attn_impl.*Known: page_size"),
        ({"engine_kwargs": {"vexact": {"numerics": "stock"}}}, r"engine_kwargs\.vexact\.numerics"),
        ({"engine_kwargs": {"vexact": {"page_size": 0}}}, "page_size=0"),
        ({"engine_kwargs": {"vexact": {"num_threads": 0}}}, "num_threads=0"),
        ({"engine_kwargs": {"vexact": {"max_restarts": -1}}}, "max_restarts=-1"),
        ({"engine_kwargs": {"vexact": {"max_restarts": True}}}, "max_restarts=True"),
        ({"engine_kwargs": {"vexact": {"max_restarts": 10**30}}}, "max_restarts=10{30}: give"),
        ({"engine_kwargs": {"vexact": {"hang_timeout": 0}}}, "hang_timeout=0: give seconds, at least 1"),
        ({"engine_kwargs": {"vexact": {"hang_timeout": math.nan}}}, "hang_timeout=nan"),
        ({"engine_kwargs": {"vexact": {"hang_timeout": math.inf}}}, "hang_timeout=inf.* null for never"),
        ({"engine_kwargs": {"vexact": {"hang_timeout": True}}}, "hang_timeout=True"),
        ({"engine_kwargs": {"vexact": {"hang_timeout": "10m"}}}, "hang_timeout='10m'"),
        ({"engine_kwargs": {"vexact": {"in_flight": "drop"}}}, "in_flight='drop': choose keep, abort, finish"),
        ({"engine_kwargs": {"vexact": 5}}, r"engine_kwargs\.vexact=5"),
        ({"engine_kwargs": {"vexact": {"kv_cache_tokens": 96}}}, r"kv_cache_tokens=96 .*at least 112"),
        ({"name": "stock", "tensor_model_parallel_size": 2}, "rollout.tensor_model_parallel_size=2: rollout stock has"),
        ({"name": "stock", "pipeline_model_parallel_size": 4}, "rollout.pipeline_model_parallel_size=4"),
        ({"data_parallel_size": 2}, "rollout.data_parallel_size=2"),
        ({"expert_parallel_size": 2}, "rollout.expert_parallel_size=2"),
        ({"quantization": "fp8"}, "rollout.quantization"),
        ({"repetition_penalty": 1.1}, "rollout.repetition_penalty"),
        ({"mtp": {"enable": True, "enable_rollout": True}}, "mtp.enable_rollout"),
        ({"disaggregation": {"enabled": True}}, "disaggregation.enabled"),
        ({"prometheus": {"enable": True}, "disable_log_stats": True}, "rollout.disable_log_stats: prometheus.enable"),
        ({"scheduling_policy": "priority"}, r"rollout\.scheduling_policy=priority: .*set it to fcfs"),
        ({"logprobs_mode": "raw_logprobs"}, r"rollout\.logprobs_mode=raw_logprobs: .*set it to processed_logprobs"),
        ({"qat": {"enable": True}}, "rollout.qat.enable"),
        ({"enable_prefix_caching": "false"}, "enable_prefix_caching='false'"),
        ({"dtype": "float16"}, "rollout.dtype=float16"),
        ({"load_format": "gguf"}, "load_format=gguf"),
        ({"response_length": 200}, r"max_prompt_length=40.*max_response_length=200.*context of 128"),
        ({"max_model_len": 500}, "max_model_len=500"),
        ({"enable_rollout_routing_replay": "false"}, "enable_rollout_routing_replay='false' is neither true nor false"),
        ({"ignore_eos": "false"}, "ignore_eos='false'"),
        ({"free_cache_engine": "True"}, "free_cache_engine='True'"),
        ({"max_model_len": 40}, "max_model_len=40 leaves no room"),
    ],
)
def test_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match=named):
        options(**changes)


def test_several_refusals_at_once_name_every_key():
    with pytest.raises(ConfigError) as error:
        options(data_parallel_size=2, quantization="fp8")
    assert "data_parallel_size" in str(error.value)
    assert "quantization" in str(error.value)


def test_a_path_that_is_no_model(tmp_path, monkeypatch):
    assert local_model_folder(str(tmp_path)) == str(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"model\.path=nobody/nothing"):
        local_model_folder("nobody/nothing")


def test_keys_that_ask_for_a_schedule_only_are_taken_as_they_are():
    given = {"enable_chunked_prefill": False, "cudagraph_capture_sizes": [1, 8]}
    assert options(**given).engine == options().engine
