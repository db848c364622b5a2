"""What a worker process says of itself, under the manifest's keys (`verl_tim.diagnosis.manifest.ProcessFacts`)."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch
from verl.plugin.platform import get_platform

from verl_tim.diagnosis.process import process_facts
from verl_tim.training.compute_device import compute_device
from verl_tim.training.dtypes import canonical


def describe_engine(engine: Any) -> dict[str, Any]:
    """Facts of a running FSDP engine of verl, ours or verl's own.

    Args:
        engine: `FSDPEngineWithLMHead` or a subclass.
    """
    config, model_config = engine.engine_config, engine.model_config
    parameters = list(engine.module.parameters())
    device = compute_device()
    numerics = getattr(engine, "numerics", "stock")
    compute = getattr(engine, "compute_dtype", engine._autocast_dtype)
    mixed_precision = config.mixed_precision or {}
    exact = numerics == "contract"
    kernels = "contract" if exact else "torch"
    facts = {
        **process_facts(device),
        "backend": config.strategy,
        "backend_version": f"verl {metadata.version('verl')}",
        "numerics": numerics,
        "contract_id": _contract_id(device, compute, engine.contract.attention_on(device)) if exact else None,
        "param_dtype": _name(parameters[0].dtype),
        "compute_dtype": _name(compute),
        "reduce_dtype": canonical(str(mixed_precision.get("reduce_dtype", "fp32"))),
        "head_dtype": "float32" if exact else _name(compute),
        "attention_backend": engine.contract.attention_on(device)
        if exact
        else engine.module.config._attn_implementation,
        "gemm_kernel": kernels,
        "gemm_batch_invariant": exact,
        "norm_kernel": kernels,
        "norm_batch_invariant": exact,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "sequence_parallel": engine.ulysses_sequence_parallel_size,
        "expert_parallel": 1,
        "data_parallel": engine.get_data_parallel_size(),
        "log_prob_mode": "full vocabulary, at the sampling temperature",
        "model": {
            "architecture": (model_config.architectures or [type(engine.module).__name__])[0],
            "parameters": sum(parameter.numel() for parameter in parameters),
        },
        "extra": {
            "use_remove_padding": bool(engine.use_remove_padding),
            "gradient_checkpointing": bool(model_config.enable_gradient_checkpointing),
            "engine_class": f"{type(engine).__module__}.{type(engine).__qualname__}",
        },
    }
    if _is_moe(engine.module):
        facts |= {"moe_kernel": kernels, "moe_batch_invariant": exact}
    contract = getattr(engine, "contract", None)
    if contract is not None:
        # the model itself has no name, and MLflow takes no parameter without one
        from verl_tim.numerics.probe import dropped_schedules

        facts["extra"]["dropped_schedules"] = dropped_schedules()
        facts["extra"]["contract_table"] = {name or "root": op for name, op in contract.table.items()}
    return facts


def describe_foreign_server(server: Any, name: str) -> dict[str, Any]:
    """Facts of a rollout server that is not ours, read in its process from what verl keeps there (vllm, sglang), and,
    over that, what its own method `describe()` says, where it has one."""
    config = server.config
    package = {"trtllm": "tensorrt-llm"}.get(name, name)
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "unknown"
    # The engine computes in child processes; asking for the GPU's name here would open a CUDA context in the server.
    facts = {**process_facts("cpu"), "device_type": get_platform().device_name, "device": None}
    own = server.describe() if callable(getattr(server, "describe", None)) else {}
    return {
        **facts,
        "backend": name,
        "backend_version": version,
        "compute_dtype": canonical(str(config.dtype)),
        "tensor_parallel": config.tensor_model_parallel_size,
        "pipeline_parallel": config.pipeline_model_parallel_size,
        "data_parallel": config.data_parallel_size,
        "prefix_cache": bool(config.enable_prefix_caching),
        "log_prob_mode": config.logprobs_mode,
        "extra": {"enforce_eager": bool(config.enforce_eager), "full_determinism": bool(config.full_determinism)},
        **own,
    }


def _contract_id(device: torch.device, dtype: torch.dtype, attention: str) -> str:
    from verl_tim.numerics.contract import contract_id

    return contract_id(device, dtype, attention)


def _is_moe(module: torch.nn.Module) -> bool:
    return any(hasattr(child, "experts") for child in module.modules())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
