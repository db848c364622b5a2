"""Small base models for reinforcement learning without a download: tokenizer and model in a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from verl_tim.tasks import all_experts
from verl_tim.tasks.architectures import MAX_POSITION_EMBEDDINGS, init_model, resolve_shape
from verl_tim.tasks.artifact import cached_folder, make_once
from verl_tim.tasks.catalog import Task, get_task, resolve_difficulty
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.measure import logit_statistics, router_statistics
from verl_tim.tasks.problems import stream_pool
from verl_tim.tasks.published.sources import PUBLISHED
from verl_tim.tasks.sampling import mean_score
from verl_tim.tasks.tokenizer import build_tokenizer, tokenizer_spec
from verl_tim.tasks.warmup import WarmupConfig, answer_room, warm_up
from verl_tim.tasks.worked import check_has_worked_solutions

CARD = "model.json"
DTYPES = ("float32", "bfloat16")
FORMAT = 1  # part of the content key: raise it when the same settings shall give other weights

# Sums over a matrix product's inner dimension depend on how it is split over threads; a fixed number makes the
# weights a function of the seed on every machine of one kind. One: matrices this small gain little from a second
# thread, and lose a hundredfold where two threads wait for each other on a busy machine.
_THREADS = 1
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def build_base_model(
    kind: str = "qwen3",
    out_dir: str | os.PathLike[str] | None = None,
    *,
    task: str = "chain_sum",
    seed: int = 0,
    difficulty: Mapping[str, Any] | None = None,
    shape: Mapping[str, Any] | None = None,
    warmup: Mapping[str, Any] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    cache_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Make, or find again, a small model that can solve the task's problems and seldom does (see `warmup`).

    The folder is a Hugging Face one (config, safetensors, generation config, fast tokenizer with chat template)
    with `model.json` beside: how the model was made and how it scores before RL. By default weights are fp32, the
    master weights that verl's trainer loads; a bf16 engine rounds them on load, just as the trainer's bf16 compute
    does. The scores are measured in bf16.

    Args:
        kind: `qwen3` or `qwen3_moe`.
        out_dir: folder to make; by default one in the cache, named after the content key.
        task, difficulty: what it is warmed up on; as in `build_dataset`.
        seed: of weights, problems and sampling.
        shape: values over the kind's own (`architectures.SHAPES`).
        warmup: settings over the defaults of `WarmupConfig`.
        device: `cpu`, `cuda`, or `auto` for a GPU where there is one. Weights of one kind of device are not those of
            another: each has a content key of its own.
        dtype: of the saved weights: `float32`, or `bfloat16` as published models are, which halves the folder.
        cache_dir: `tim.cache_dir`; by default ~/.cache/verl_tim.
        overwrite: replace an `out_dir` made from other settings.
        progress: show a progress bar.

    Raises:
        InputError: unknown kind, task or setting; a task without worked solutions; an `out_dir` that holds something
            else.
        RuntimeError: the model did not reach the scores that `WarmupConfig` asks for (a harder task than its shape
            can do).
    """
    row = get_task(task)
    spec = base_model_spec(
        kind, task=task, seed=seed, difficulty=difficulty, shape=shape, warmup=warmup, device=device, dtype=dtype
    )
    config = WarmupConfig(**spec["warmup"])
    folder = Path(out_dir) if out_dir is not None else cached_folder("models", f"{kind}-{row.name}", spec, cache_dir)
    return make_once(
        folder, CARD, spec, lambda work: _build(work, row, spec, config, progress=progress), overwrite=overwrite
    )


def base_model_spec(
    kind: str = "qwen3",
    *,
    task: str = "chain_sum",
    seed: int = 0,
    difficulty: Mapping[str, Any] | None = None,
    shape: Mapping[str, Any] | None = None,
    warmup: Mapping[str, Any] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> dict[str, Any]:
    """What a model is a function of, checked; makes nothing. Arguments and errors as of `build_base_model`."""
    if task in PUBLISHED:
        raise InputError(
            f"task: small models are warmed up on tasks made here, not on {task}; give a model that can do it: "
            "model=hf actor_rollout_ref.model.path=FOLDER"
        )
    row = get_task(task)
    check_has_worked_solutions(row)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed: must be an integer of at least 0, got {seed!r}")
    if dtype not in DTYPES:
        raise InputError(f"dtype: unknown dtype {dtype!r}; known dtypes: {', '.join(DTYPES)}")
    made_on = _resolve_device(device)
    return {
        "format": FORMAT,
        "kind": kind,
        "shape": resolve_shape(kind, shape),
        "task": row.name,
        "difficulty": resolve_difficulty(row, difficulty),
        "warmup": asdict(_resolve_warmup(warmup)),
        "tokenizer": tokenizer_spec(),
        "seed": seed,
        "versions": {name: version(name) for name in ("reasoning-gym", "tokenizers", "torch", "transformers")},
        # absent for what was made before they could be chosen, so that it keeps its key
        **({"device": made_on} if made_on != "cpu" else {}),
        **({"dtype": dtype} if dtype != "float32" else {}),
    }


def _resolve_device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device: unknown device {device!r}; known devices: auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device: this machine has no GPU; set tim.model.device=cpu, or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def _resolve_warmup(overrides: Mapping[str, Any] | None) -> WarmupConfig:
    config = WarmupConfig()
    unknown = sorted(set(overrides or {}) - set(asdict(config)))
    if unknown:
        raise InputError(f"warmup: unknown setting {', '.join(unknown)}; known settings: {', '.join(asdict(config))}")
    return replace(config, **(overrides or {}))


def _build(work: Path, task: Task, spec: Mapping[str, Any], config: WarmupConfig, *, progress: bool) -> dict[str, Any]:
    tokenizer = build_tokenizer(model_max_length=MAX_POSITION_EMBEDDINGS)
    model = init_model(
        spec["kind"],
        spec["shape"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=spec["seed"],
    )
    device = torch.device(spec.get("device", "cpu"))
    # made on the CPU whatever the device: the weights before the warm-up are the same
    torch.nn.Module.to(model, device)
    if device.type == "cuda" and spec["kind"] == "qwen3_moe":
        # transformers' grouped products are made for bf16, and this phase is fp32
        model.set_experts_implementation(all_experts.NAME)
    difficulty, seed = spec["difficulty"], spec["seed"]
    with _threads(_THREADS), _repeatable(device):
        history = warm_up(model, tokenizer, task, difficulty, config, seed=seed, progress=progress)
        # problems that no decision of the warm-up was based on
        train, validation = (
            list(islice(stream_pool(task, difficulty, seed + 2, pool), config.measured_problems))
            for pool in ("train", "validation")
        )
        room = answer_room(tokenizer, task, [*train, *validation])
        before_rl = {
            f"{pool}_{name}_score": mean_score(
                model, tokenizer, task, problems, temperature=temperature, seed=seed, max_tokens=room
            )
            for pool, problems in (("train", train), ("validation", validation))
            for name, temperature in (("sampled", 1.0), ("greedy", 0.0))
        }
        before_rl |= logit_statistics(model, tokenizer, train, seed=seed, max_tokens=room)
        router = router_statistics(model, tokenizer, train)
    with _quiet_transformers():
        model.to(getattr(torch, spec.get("dtype", "float32")))
        model.cpu().save_pretrained(work)
        tokenizer.save_pretrained(work)
    return {
        "parameters": model.num_parameters(),
        "warmup": history,
        "before_rl": before_rl,
        **({"router": router} if router else {}),
    }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """On a GPU the kernels whose sums have one order, so that the seed decides the weights there, too.

    An operation without such a kernel is warned of by PyTorch. Nothing changes for a CPU.
    """
    if device.type != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(_CUBLAS_WORKSPACE)
    os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        # the other backends' backward adds in the order in which blocks finish
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        # a run that is started afterwards inherits the environment, and shall compute as it would alone
        if workspace is None:
            del os.environ[_CUBLAS_WORKSPACE]
        torch.cuda.empty_cache()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    # its own bars (one shard of 0.6 MB) would tear ours apart
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
