"""Settings are strict; each error names its key."""

from __future__ import annotations

import pytest

from verl_tim.engine import EngineConfig, EngineConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"numerics": "fast"}, "numerics='fast'"),
        ({"page_size": 0}, "page_size=0"),
        ({"page_size": 16.0}, "page_size=16.0"),
        ({"page_size": True}, "page_size=True"),
        ({"max_num_seqs": -1}, "max_num_seqs=-1"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens=None"),
        ({"max_prefill_chunk": 0}, "max_prefill_chunk=0"),
        ({"max_model_len": "8"}, "max_model_len='8'"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens=0"),
        ({"kv_cache_tokens": 15, "page_size": 16}, "kv_cache_tokens=15 is less than one page"),
        ({"kv_cache_tokens": 64, "kv_cache_bytes": 64}, "set one of them"),
        ({"kv_memory_fraction": 0.0}, "kv_memory_fraction=0.0"),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization=1.2"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization=True"),
        ({"enforce_eager": "no"}, "enforce_eager='no'"),
        ({"watermark": 1.0}, "watermark=1.0"),
        ({"watermark": "1"}, "watermark='1'"),
        ({"seed": None}, "seed=None"),
        ({"enable_prefix_cache": 1}, "enable_prefix_cache=1"),
        ({"load_weights": "no"}, "load_weights='no'"),
        ({"kv_cache_token": 64}, "unknown engine setting 'kv_cache_token'; did you mean 'kv_cache_tokens'"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: expected a positive integer"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size=True: expected a positive integer"),
        ({"tensor_parallel_size": 2, "numerics": "stock"}, "numerics='stock' runs on one rank"),
        ({"tensor_parallel": 2}, "unknown engine setting 'tensor_parallel'; did you mean 'tensor_parallel_size'"),
    ],
    ids=str,
)
def test_bad_settings_are_named(values, message):
    with pytest.raises(EngineConfigError, match=message):
        EngineConfig.from_mapping({"model_path": "m", **values})


def test_good_settings():
    config = EngineConfig.from_mapping({"model_path": "m", "page_size": 8, "kv_cache_tokens": 64})
    assert config == EngineConfig("m", page_size=8, kv_cache_tokens=64)
    with pytest.raises(EngineConfigError, match="model_path is missing"):
        EngineConfig.from_mapping({})
