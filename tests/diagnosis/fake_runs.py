"""Run folders as a small CPU run writes them, made up from a seed: verl's metric names, plausible curves."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from verl_tim.diagnosis.manifest import Manifest
from verl_tim.diagnosis.run_folder import METRICS_NAME, RunFolder, Sample


def describe(backend: str, **facts: Any) -> dict[str, Any]:
    """A `describe()` dict of a CPU process."""
    contract = facts.pop("numerics", "contract") == "contract"
    return {
        "backend": backend,
        "backend_version": "0.1.0",
        "numerics": "contract" if contract else "stock",
        "contract_id": "chunk64/cpu-e/bfloat16/1" if contract else None,
        "device_type": "cpu",
        "device": "AMD EPYC 9554",
        "threads": 2,
        "param_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
        "head_dtype": "float32" if contract else "bfloat16",
        "attention_backend": "chunk64" if contract else "sdpa",
        "gemm_kernel": "chunk512" if contract else "torch.linear",
        "gemm_batch_invariant": contract,
        "norm_kernel": "ascending fp32" if contract else "torch",
        "norm_batch_invariant": contract,
        "tensor_parallel": 1,
        "determinism": {"OMP_NUM_THREADS": "2"},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "verl": "0.9.1", "transformers": "5.10.4"},
        "model": {"architecture": "Qwen3ForCausalLM", "parameters": 612_480, "num_layers": 4, "vocab_size": 128},
        **facts,
    }


def config_of(path: Path, rollout: str, correction: str, trainer: str, steps: int, seed: int) -> dict[str, Any]:
    return {
        "tim": {
            "run_dir": str(path),
            "trainer_numerics": trainer,
            "choices": {"recipe": "cpu_grpo", "rollout": rollout, "correction": correction, "task": "chain_sum"},
        },
        "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": correction == "bypass_ppo"}},
        "data": {"train_batch_size": 16, "seed": seed},
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": 8, "optim": {"lr": 1e-3}},
            "rollout": {"name": rollout, "n": 8, "temperature": 1.0, "engine_kwargs": {rollout: {"page_size": 16}}},
        },
        "trainer": {"total_training_steps": steps, "experiment_name": path.name, "project_name": "verl_tim"},
    }


def metric_lines(
    *,
    steps: int,
    seed: int,
    delta: float,
    start: float = 0.22,
    gain: float = 0.42,
    collapse_at: int | None = None,
    speed: float = 1.0,
    drop: tuple[str, ...] = (),
    validate_every: int = 5,
) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`. `delta`: mean |d| in nats, 0 for an exact rollout."""
    noise = random.Random(seed)
    lines = []
    for step in range(0, steps + 1):
        progress = 1 - math.exp(-3.2 * step / max(steps, 1))
        reward = start + gain * progress
        if collapse_at is not None and step > collapse_at:
            reward *= math.exp(-0.12 * (step - collapse_at))
        data: dict[str, Any] = {}
        if step % validate_every == 0 or step == steps:
            value = min(1.0, max(0.0, reward - 0.02 + noise.gauss(0, 0.012)))
            data["val-core/chain_sum/reward/mean@1"] = value
            data["val-aux/chain_sum/reward/std@1"] = 0.0
        if step == 0:
            lines.append({"step": 0, "data": data})
            continue
        score = min(1.0, max(0.0, reward + noise.gauss(0, 0.03)))
        length = 7.4 + 1.6 * progress + noise.gauss(0, 0.15)
        gen = (1.45 if delta == 0 else 0.95) * speed * (1 + abs(noise.gauss(0, 0.06)))
        times = {
            "gen": gen,
            "reward": 0.02,
            "old_log_prob": 0.21,
            "adv": 0.01,
            "update_actor": 0.83,
            "update_weights": 0.06,
        }
        times = {name: value * (1 + noise.gauss(0, 0.03)) for name, value in times.items()}
        step_time = sum(times.values()) + 0.12 + (1.1 if step == 1 else 0.0)
        tokens = int(128 * (length + 11.5))
        response_tokens = int(128 * length)
        mean = delta * (1 + 0.35 * progress) * math.exp(noise.gauss(0, 0.10))
        largest = delta and min(1.4, mean * 38 * math.exp(noise.gauss(0, 0.35)))
        data |= {
            "training/global_step": step,
            "training/epoch": 0,
            "critic/score/mean": score,
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "critic/rewards/mean": score,
            "critic/advantages/mean": noise.gauss(0, 0.01),
            "critic/advantages/max": 2.4,
            "critic/advantages/min": -2.4,
            "response_length/mean": length,
            "response_length/max": 16.0,
            "response_length/min": 2.0,
            "response_length/clip_ratio": max(0.0, 0.04 * (1 - progress)),
            "prompt_length/mean": 11.5,
            "actor/grad_norm": 0.9 * math.exp(-1.1 * progress) * math.exp(noise.gauss(0, 0.18)) + 0.1,
            "actor/entropy": 1.35 * math.exp(-1.3 * progress) + abs(noise.gauss(0, 0.02)),
            "actor/pg_loss": noise.gauss(0.0, 0.01),
            "actor/pg_clipfrac": abs(noise.gauss(0.012, 0.006)),
            "actor/ppo_kl": abs(noise.gauss(4e-4, 2e-4)),
            "actor/lr": 1e-3,
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": step_time,
            "perf/throughput": tokens / step_time,
            "timing_s/step": step_time,
            **{f"timing_s/{name}": value for name, value in times.items()},
            "timing_per_token_ms/gen": 1000 * times["gen"] / response_tokens,
            "training/rollout_probs_diff_valid": 1,
            "training/rollout_probs_diff_max": min(1.0, largest * 0.3),
            "training/rollout_probs_diff_mean": mean * 0.2,
            "tim/valid_tokens": response_tokens,
            "tim/missing_tokens": 0,
            "tim/delta_abs_mean": mean,
            "tim/delta_abs_p50": mean * 0.7,
            "tim/delta_abs_p95": mean * 2.9,
            "tim/delta_abs_p99": mean * 5.2,
            "tim/delta_abs_max": largest,
            "tim/delta_mean": mean * noise.gauss(0, 0.1) if delta else 0.0,
            "tim/exact_fraction": 1.0 if delta == 0 else max(0.0, 0.11 + noise.gauss(0, 0.01)),
            "tim/contribution_skew": delta and noise.gauss(-0.4, 0.2) * mean,
            "tim/k1": mean * noise.gauss(0, 0.1) if delta else 0.0,
            "tim/k3": mean * mean * 1.1,
            "tim/ppo_k1": noise.gauss(0, 2e-4),
            "tim/ppo_k3": abs(noise.gauss(3e-4, 1e-4)),
        }
        if delta:
            data["tim/delta_adv_pearson"] = noise.gauss(0.02, 0.02)
        lines.append(
            {"step": step, "data": {k: v for k, v in data.items() if not k.startswith(drop)} if drop else data}
        )
    return lines


PROBLEMS = ("3+4+9=", "12-5+7=", "8+8-1=", "21-6-4=")
ANSWERS = ("16", "14", "15", "11")


def write_run(
    path: Path,
    *,
    rollout: str = "vexact",
    correction: str = "none",
    trainer: str = "contract",
    steps: int = 30,
    seed: int = 1,
    delta: float | None = None,
    manifest: bool = True,
    samples: bool = True,
    parameters: int | None = 612_480,
    facts: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    correction_facts: dict[str, Any] | None = None,
    **curves: Any,
) -> Path:
    """A whole run folder. `delta` is 0 for vexact unless given, and 2e-3 nats for other rollouts."""
    if delta is None:
        delta = 0.0 if rollout == "vexact" else 2e-3
    resolved = config_of(path, rollout, correction, trainer, steps, seed)
    for dotted, value in (config or {}).items():
        *parents, leaf = dotted.split(".")
        node = resolved
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    folder = RunFolder.create(path, resolved)
    lines = metric_lines(steps=steps, seed=seed + 1000 * len(rollout), delta=delta, **curves)
    (path / METRICS_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if manifest:
        model = {"architecture": "Qwen3ForCausalLM", "num_layers": 4, "vocab_size": 128}
        if parameters is not None:
            model["parameters"] = parameters
        Manifest.from_processes(
            run={
                "name": path.name,
                "rollout": rollout,
                "correction": correction,
                "trainer_numerics": trainer,
                "recipe": "cpu_grpo",
                "task": "chain_sum",
                "algorithm": "grpo",
                "seed": seed,
            },
            trainer={"actor 0": describe("fsdp2", numerics=trainer, model=model, **(facts or {}))},
            rollout={
                "server 0": describe(
                    rollout,
                    numerics="contract" if rollout == "vexact" else "stock",
                    kv_dtype="bfloat16",
                    page_size=16,
                    model=model,
                )
            },
            old_log_probs="bypass" if correction == "bypass_ppo" else "recompute",
            correction=correction_facts,
        ).write(path)
    if samples:
        noise = random.Random(seed)
        for step in (1, max(1, steps // 2), steps):
            folder.add_samples(
                Sample(
                    step=step,
                    prompt=f"What is {problem[:-1]}?",
                    response=f"{problem}{(answer if (right := noise.random() < 0.25 + 0.5 * step / steps) else '7')}",
                    reward=float(right),
                    uid=str(i),
                    ground_truth=answer,
                )
                for i, (problem, answer) in enumerate(zip(PROBLEMS, ANSWERS, strict=True))
            )
    return path
