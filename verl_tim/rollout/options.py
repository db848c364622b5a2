"""verl's rollout config to the engine's: which keys are read, which are refused.

Our options live under `actor_rollout_ref.rollout.engine_kwargs.<name>`; verl's own rollout keys keep their meaning. A
key that this engine cannot honour is refused by name instead of being ignored; docs/configuration.md lists those that
mean nothing here. A request's `priority` is none of them: verl's client sends it to vLLM only (llm_server.py:147).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from verl_tim.engine import EngineConfig, EngineConfigError
from verl_tim.engine.engine import InFlight
from verl_tim.training.config import ConfigError

NUMERICS: dict[str, Literal["contract", "stock"]] = {"vexact": "contract", "stock": "stock"}
_PREFIX = "actor_rollout_ref.rollout"

# Options of the engine that a user may set; the others follow from verl's own keys.
ENGINE_OPTIONS = (
    "page_size",
    "kv_cache_tokens",
    "kv_cache_bytes",
    "kv_memory_fraction",
    "max_prefill_chunk",
    "enable_prefix_cache",
    "watermark",
)


DEFAULT_RESTARTS = 3
"""Of a replica that is one of several."""
DEFAULT_HANG_TIMEOUT = 600.0
"""Seconds; as long as verl's collectives wait (`nccl_timeout`). A step takes less than one on a GPU."""
LARGEST_RESTARTS = 2**31 - 1  # Ray counts in 64 bits, and says no key where a number is larger

# verl's keys of how a replica's engine is split.
DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def ranks_of(rollout: Any) -> int:
    """Ranks of a replica, each with a device of its own."""
    tensor, stages = (int(rollout.get(key) or 1) for key in DEGREES)
    return tensor * stages


@dataclass(frozen=True)
class RolloutOptions:
    """What one server needs beside its place.

    Attributes:
        engine: settings of the engine.
        prompt_length, response_length: verl's limits, tokens; they size the default of max_tokens.
        max_model_len: longest prompt plus response, tokens.
        ignore_eos: draw on past the end-of-sequence token.
        free_cache_engine: release weights and KV cache while the trainer works.
        num_threads: torch threads of the server; None leaves what Ray gave it.
        in_flight: what becomes of unfinished responses when verl calls for a weight update: "keep", "abort" or
            "finish".
        return_routes: every response comes with the experts of all its positions.
        max_restarts: how often Ray starts the server again when its process, or its engine, has died.
        hang_timeout: seconds without a sign of life after which the server is ended; None: never.
    """

    engine: EngineConfig
    prompt_length: int
    response_length: int
    max_model_len: int
    ignore_eos: bool = False
    free_cache_engine: bool = True
    num_threads: int | None = None
    in_flight: InFlight = "abort"
    return_routes: bool = False
    max_restarts: int = 0
    hang_timeout: float | None = None


def options_key(name: str) -> str:
    """Where a user sets the options of this engine."""
    return f"{_PREFIX}.engine_kwargs.{name}"


def refusals(rollout: Any) -> list[tuple[str, str]]:
    """Settings of verl's rollout config that this engine cannot honour: (key, remedy)."""

    def get(key: str, default: Any = None) -> Any:
        value = rollout
        for part in key.split("."):
            if value is None:
                return default
            value = value.get(part) if hasattr(value, "get") else getattr(value, part, None)
        return default if value is None else value

    name = get("name")
    found: list[tuple[str, str]] = []
    absent = {
        "data_parallel_size": "no data parallelism inside a replica: set it to 1; there are more replicas instead",
        "expert_parallel_size": "no expert parallelism: set it to 1, and tensor_model_parallel_size instead",
    }
    if NUMERICS.get(name) != "contract":
        absent |= dict.fromkeys(DEGREES, "no parallelism inside a replica: set it to 1; each rank gets a replica")
    for key, remedy in absent.items():
        if int(get(key, 1)) > 1:
            found.append((f"{_PREFIX}.{key}={get(key)}", f"rollout {name} has {remedy}"))
    if get("quantization") is not None or get("quantization_config_file") is not None:
        found.append((f"{_PREFIX}.quantization", f"rollout {name} computes in bfloat16 or float32: set it to null"))
    if get("qat.enable", False):
        found.append((f"{_PREFIX}.qat.enable", f"rollout {name} computes in bfloat16 or float32: set it to false"))
    fixed = {
        "scheduling_policy": ("fcfs", "serves requests in the order in which they come"),
        "logprobs_mode": ("processed_logprobs", "returns log-probs at the sampling temperature, as the trainer's are"),
    }
    for key, (value, remedy) in fixed.items():
        if get(key, value) != value:
            found.append((f"{_PREFIX}.{key}={get(key)}", f"rollout {name} {remedy}: set it to {value}"))
    if get("mtp.enable", False) and get("mtp.enable_rollout", False):
        found.append((f"{_PREFIX}.mtp.enable_rollout", f"rollout {name} has no speculative decoding: set it to false"))
    if get("disaggregation.enabled", False):
        found.append(
            (
                f"{_PREFIX}.disaggregation.enabled",
                f"rollout {name} does prefill and decode in one engine: set it to false",
            )
        )
    if float(get("repetition_penalty", 1.0)) != 1.0:
        found.append((f"{_PREFIX}.repetition_penalty", "the trainer's log-prob knows no penalty: set it to 1.0"))
    if get("load_format", "dummy") not in ("dummy", "auto", "safetensors", "hf"):
        found.append(
            (f"{_PREFIX}.load_format={get('load_format')}", "choose dummy (weights come from the trainer) or auto")
        )
    if str(get("dtype", "bfloat16")) not in ("bfloat16", "float32"):
        found.append((f"{_PREFIX}.dtype={get('dtype')}", "choose bfloat16 or float32"))
    if get("prometheus.enable", False) and get("disable_log_stats", False):
        found.append(
            (f"{_PREFIX}.disable_log_stats", "prometheus.enable asks for metrics: set it to false, as verl demands")
        )
    return found


def rollout_options(
    rollout: Any,
    *,
    model_path: str,
    max_position_embeddings: int,
    device: str,
    attention: str = "auto",
    load_weights: bool | None = None,
) -> RolloutOptions:
    """Settings of one server from verl's rollout config (dataclass or DictConfig).

    Args:
        rollout: `actor_rollout_ref.rollout`.
        model_path: local folder of the model.
        max_position_embeddings: the model's context, tokens.
        device: of the engine.
        attention: the attention contract (`actor_rollout_ref.model.fused_kernel_options.attention`).
        load_weights: read the checkpoint at start; None: unless `load_format` is dummy.

    Raises:
        ConfigError: names the key and the remedy.
    """
    found = refusals(rollout)
    if found:
        raise ConfigError("; ".join(f"{key}: {remedy}" for key, remedy in found))
    name = rollout.get("name")
    where = options_key(name)
    given = (rollout.get("engine_kwargs") or {}).get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given!r}: give options, such as {where}.kv_cache_tokens=65536")
    options = dict(given)
    if options.get("enable_prefix_cache") is None:  # stock has none unless its own option asks: see determinism.py
        verls = _flag(rollout, "enable_prefix_caching", True)
        options["enable_prefix_cache"] = verls and name == "vexact"
    num_threads, in_flight = options.pop("num_threads", None), options.pop("in_flight", "abort")
    max_restarts = options.pop("max_restarts", DEFAULT_RESTARTS)
    hang_timeout = options.pop("hang_timeout", DEFAULT_HANG_TIMEOUT)
    known = (*ENGINE_OPTIONS, "num_threads", "in_flight", "max_restarts", "hang_timeout")
    for key in options:
        if key not in ENGINE_OPTIONS:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown option {where}.{key}{hint} Known: {', '.join(known)}")
    if num_threads is not None and (
        isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1
    ):
        raise ConfigError(f"{where}.num_threads={num_threads!r}: give a number of threads, or null for torch's default")
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or not 0 <= max_restarts <= LARGEST_RESTARTS:
        raise ConfigError(
            f"{where}.max_restarts={max_restarts!r}: give how often a replica that died is started again, 0 to "
            f"{LARGEST_RESTARTS}"
        )
    if hang_timeout is not None and (
        isinstance(hang_timeout, bool) or not isinstance(hang_timeout, (int, float)) or not 1 <= hang_timeout < math.inf
    ):
        raise ConfigError(
            f"{where}.hang_timeout={hang_timeout!r}: give seconds, at least 1, after which a replica that gives no "
            "sign of life is ended, or null for never"
        )
    if in_flight not in get_args(InFlight):
        raise ConfigError(f"{where}.in_flight={in_flight!r}: choose {', '.join(get_args(InFlight))}")

    return_routes = _flag(rollout, "enable_rollout_routing_replay", False)
    stages = int(rollout.get("pipeline_model_parallel_size") or 1)
    if return_routes and device.startswith("cuda") and stages > 1:
        raise ConfigError(
            f"{_PREFIX}.enable_rollout_routing_replay: on a GPU the pipeline stages of rollout {name} give out no "
            f"routes: set {_PREFIX}.pipeline_model_parallel_size=1, or routing_replay=off (vexact needs no replay: its "
            "routes are the trainer's)"
        )
    prompt_length, response_length = int(rollout.get("prompt_length")), int(rollout.get("response_length"))
    max_model_len = rollout.get("max_model_len")
    if max_model_len is None:
        max_model_len = prompt_length + response_length
    if max_model_len > max_position_embeddings:
        raise ConfigError(
            f"data.max_prompt_length={prompt_length} plus data.max_response_length={response_length} (or "
            f"{_PREFIX}.max_model_len={rollout.get('max_model_len')}) is {max_model_len} tokens, longer than the "
            f"model's context of {max_position_embeddings} (max_position_embeddings): lower them"
        )
    if max_model_len <= prompt_length:
        raise ConfigError(
            f"{_PREFIX}.max_model_len={max_model_len} leaves no room after data.max_prompt_length={prompt_length}: "
            "raise it or set it to null"
        )
    if load_weights is None:
        load_weights = rollout.get("load_format") != "dummy"
    try:
        engine = EngineConfig(
            model_path=model_path,
            dtype=str(rollout.get("dtype")),
            numerics=NUMERICS[name],
            device=device,
            attention=attention,
            max_num_seqs=rollout.get("max_num_seqs"),
            max_num_batched_tokens=rollout.get("max_num_batched_tokens"),
            max_model_len=int(max_model_len),
            seed=int(rollout.get("seed")),
            load_weights=load_weights,
            tensor_parallel_size=int(rollout.get("tensor_model_parallel_size") or 1),
            pipeline_parallel_size=stages,
            **_gpu_options(rollout, device),
            **options,
        )
    except EngineConfigError as error:
        raise ConfigError(f"rollout {name}: {error} (options: {where}; sizes: {_PREFIX})") from error
    pool, page = engine.kv_cache_tokens, engine.tokens_per_page
    if pool is not None and pool // page * page < max_model_len - 1:
        raise ConfigError(
            f"{where}.kv_cache_tokens={pool} holds less than one prompt with its answer ({max_model_len} tokens): "
            f"raise it to at least {-(-max_model_len // page) * page}"
        )
    return RolloutOptions(
        engine=engine,
        prompt_length=prompt_length,
        response_length=response_length,
        max_model_len=int(max_model_len),
        ignore_eos=_flag(rollout, "ignore_eos", False),
        free_cache_engine=_flag(rollout, "free_cache_engine", True),
        num_threads=num_threads,
        in_flight=in_flight,
        return_routes=return_routes,
        max_restarts=max_restarts,
        hang_timeout=hang_timeout,
    )


def _flag(rollout: Any, key: str, default: bool) -> bool:
    """A key of verl's that is true or false; the text "false" would count as true."""
    value = rollout.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{_PREFIX}.{key}={value!r} is neither true nor false: give one of them, without quotes")
    return value


def _gpu_options(rollout: Any, device: str) -> dict[str, Any]:
    """verl's keys that mean something on a GPU only; a CPU's pool follows kv_memory_fraction."""
    if not device.startswith("cuda"):
        return {}
    share = rollout.get("gpu_memory_utilization")
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        raise ConfigError(
            f"{_PREFIX}.gpu_memory_utilization={share!r} is no number: give the share of the GPU's memory that the "
            "rollout may hold, such as 0.5"
        )
    return {
        "gpu_memory_utilization": float(share),
        "enforce_eager": _flag(rollout, "enforce_eager", False),
    }


def local_model_folder(path: str) -> str:
    """A model's local folder: `path` itself, or the snapshot of a Hugging Face hub name.

    Raises:
        ConfigError: neither a folder nor a name that can be fetched.
    """
    import os

    folder = os.path.expanduser(path)
    if os.path.isdir(folder):
        return folder
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*"])
    except Exception as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path={path} is neither a folder nor a model that can be fetched: {error}"
        ) from error
