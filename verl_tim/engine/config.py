"""Settings of one engine, checked when made."""

from __future__ import annotations

import dataclasses
import difflib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_tim.engine.errors import EngineConfigError

Numerics = Literal["contract", "stock"]

_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    Args:
        model_path: folder of a Hugging Face model.
        dtype: "bfloat16" or "float32": weights, activations and KV cache.
        numerics: "contract" (log-probs equal to the trainer's bit for bit) or "stock" (plain PyTorch kernels).
        device: "cpu", or "cuda" with an index.
        attention: the attention contract, "auto", "chunk64" or "fa3" (`numerics.attention.resolve_attention`); the
            trainer's must be the same.
        page_size: tokens per KV page; None is 16 on a CPU and 64 on a GPU, whose decode reads larger pages faster.
        kv_cache_tokens: tokens the KV pool holds (rounded down to whole pages). None derives it from kv_cache_bytes, or
            where that is None too, from the device's free memory times kv_memory_fraction, but never more than
            max_num_seqs sequences of max_model_len.
        kv_cache_bytes: bytes of the KV pool.
        kv_memory_fraction: share of the memory that is free after the weights are loaded.
        gpu_memory_utilization: on a GPU, share of all its memory that this engine may hold, weights, graphs and
            activations included; the KV pool gets the rest of that share (memory.py). It takes the place of
            kv_memory_fraction where the pool's size is not given.
        enforce_eager: on a GPU, record no CUDA graphs.
        max_num_seqs: most sequences in a step.
        max_num_batched_tokens: most token rows in a step, decode and prefill together; a longer prefill is cut.
        max_prefill_chunk: most rows of one sequence in a step; None leaves the cut to the token budget.
        max_model_len: longest prompt plus response; None takes the model's max_position_embeddings.
        enable_prefix_cache: keep the KV pages of finished work and reuse those of an equal prefix and weight version.
        watermark: share of the pool that stays free when a request is admitted while others run, so that those can
            grow before anything is preempted. At least one page per running sequence stays free in any case.
        seed: base of the seeds of requests that bring none.
        load_weights: read the checkpoint at start; False waits for the first update_weights.
        tensor_parallel_size: ranks that share the outputs of every weight; each has its own device.
        pipeline_parallel_size: stages that share the layers, each of tensor_parallel_size ranks. With more than one
            rank in all, `parallel_engine.start_engine` starts them; bits and tokens are those of one rank. Sizes of
            the KV pool (kv_cache_bytes, shares of memory) are per rank.

    Raises:
        EngineConfigError: names the key and the remedy.
    """

    model_path: str
    dtype: str = "bfloat16"
    numerics: Numerics = "contract"
    device: str = "cpu"
    attention: str = "auto"
    page_size: int | None = None
    kv_cache_tokens: int | None = None
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float = 0.3
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_prefill_chunk: int | None = None
    max_model_len: int | None = None
    enable_prefix_cache: bool = False
    watermark: float = 0.02
    seed: int = 0
    load_weights: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise EngineConfigError(f"dtype={self.dtype!r}: expected one of {', '.join(_DTYPES)}")
        if self.numerics not in ("contract", "stock"):
            raise EngineConfigError(f"numerics={self.numerics!r}: expected 'contract' or 'stock'")
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size"):
            self._positive(name)
        if self.num_ranks > 1 and self.numerics != "contract":
            raise EngineConfigError(
                f"numerics={self.numerics!r} runs on one rank: set tensor_parallel_size and pipeline_parallel_size to 1"
            )
        for name in ("page_size", "kv_cache_tokens", "kv_cache_bytes", "max_prefill_chunk", "max_model_len"):
            if getattr(self, name) is not None:
                self._positive(name)
        if self.kv_cache_tokens is not None and self.kv_cache_bytes is not None:
            raise EngineConfigError("kv_cache_tokens and kv_cache_bytes both size the KV pool; set one of them")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.tokens_per_page:
            raise EngineConfigError(
                f"kv_cache_tokens={self.kv_cache_tokens} is less than one page of {self.tokens_per_page} tokens; "
                "raise kv_cache_tokens"
            )
        for name in ("kv_memory_fraction", "watermark"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise EngineConfigError(f"{name}={value!r}: expected a fraction")
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1):
            raise EngineConfigError(f"gpu_memory_utilization={share!r}: expected a fraction in (0, 1]")
        if not 0 < self.kv_memory_fraction <= 1:
            raise EngineConfigError(f"kv_memory_fraction={self.kv_memory_fraction}: expected a fraction in (0, 1]")
        if not 0 <= self.watermark < 1:
            raise EngineConfigError(f"watermark={self.watermark}: expected a fraction in [0, 1)")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise EngineConfigError(f"seed={self.seed!r}: expected an integer")
        for name in ("enable_prefix_cache", "load_weights", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise EngineConfigError(f"{name}={getattr(self, name)!r}: expected true or false")

    @property
    def num_ranks(self) -> int:
        """Processes, and devices, of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tokens_per_page(self) -> int:
        """`page_size`, or what None stands for."""
        return self.page_size or (64 if self.device.startswith("cuda") else 16)

    def _positive(self, name: str) -> None:
        value = getattr(self, name)
        try:
            if isinstance(value, bool):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise EngineConfigError(f"{name}={value!r}: expected a positive integer") from None
        if number < 1:
            raise EngineConfigError(f"{name}={number}: expected a positive integer")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Settings from a mapping; an unknown key is an error that names the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise EngineConfigError(f"unknown engine setting {key!r}{hint} Known: {', '.join(known)}")
        if "model_path" not in values:
            raise EngineConfigError("model_path is missing: the folder of a Hugging Face model")
        return cls(**values)
