"""Rollout throughput: this engine beside vLLM, the same requests on the same machine in one run.

Every engine runs in a process of its own (`rollout_worker.py`), one after the other, over all workloads of a model:
random weights in the model's shape, random prompts, temperature 1, end-of-sequence ignored, the drawn tokens' log-probs
returned, prefix cache off, a warm-up before each workload. So one and the same amount of work is compared.

The floor is what a decode step must read (weights it touches, keys and values of all contexts) over the memory's
bandwidth; prefill, which is bound by arithmetic, is not in it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_tim.models.config import ModelConfig

ENGINES = {
    "vexact": "this engine under the contract",
    "stock": "this engine on plain PyTorch kernels",
    "vllm": "vLLM with its defaults",
    "vllm-batch-invariant": "vLLM with VLLM_BATCH_INVARIANT=1",
}
_BF16 = 2  # bytes


@dataclass(frozen=True)
class Load:
    """Requests of one size: each `prompt` tokens long, drawing `output` tokens."""

    requests: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.requests} x {self.prompt} -> {self.output}"

    @classmethod
    def parse(cls, text: str) -> Load:
        """From ``REQUESTSxPROMPTxOUTPUT``. Raises ValueError, which names the form."""
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
        sizes = [int(size) for size in found.groups()] if found else [0]
        if min(sizes) < 1:
            raise ValueError(f"{text!r}: give REQUESTSxPROMPTxOUTPUT, such as 256x128x512")
        return cls(*sizes)


WORKLOADS: dict[str, tuple[Load, ...]] = {
    "qwen3-1.7b": (Load(256, 128, 512), Load(16, 128, 512), Load(64, 512, 4096), Load(16, 512, 4096)),
    "qwen3-30b-a3b": (Load(256, 128, 512), Load(64, 128, 512)),
}
"""By shape (`tasks.random_model.SHAPES`)."""


@dataclass
class Figures:
    """One engine on one load.

    seconds: of each repeat. host: where the engine tells, host and waiting time per step in microseconds, and steps.
    problem: why there are no seconds.
    """

    engine: str
    load: Load
    seconds: list[float] = field(default_factory=list)
    host: dict[str, float] = field(default_factory=dict)
    problem: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Drawn tokens per second, of the median repeat."""
        if not self.seconds:
            return None
        return self.load.requests * self.load.output / statistics.median(self.seconds)

    @property
    def spread(self) -> float | None:
        """Slowest over fastest repeat, less 1."""
        return max(self.seconds) / min(self.seconds) - 1 if self.seconds else None


def floor_tokens_per_second(config: ModelConfig, load: Load, bytes_per_second: float) -> float:
    """Tokens per second of decode steps that only read, each byte once: touched weights in bf16, and all KV at the mean
    context (prompt and half the output)."""
    layer = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    weights = config.vocab_size * config.hidden_size  # the head; of the embedding a step reads a row per sequence
    for index in range(config.num_layers):
        weights += layer
        if config.is_moe_layer(index):
            assert config.moe is not None
            moe = config.moe
            # Experts that a step touches, were the choices independent and even.
            touched = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** load.requests)
            weights += config.hidden_size * moe.num_experts
            weights += round(touched * 3 * config.hidden_size * moe.intermediate_size)
        else:
            weights += 3 * config.hidden_size * config.intermediate_size
    kv_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    context = load.prompt + load.output / 2
    step_bytes = _BF16 * (weights + load.requests * context * kv_per_token)
    return load.requests * bytes_per_second / step_bytes


def unavailable(engine: str, device: str) -> str | None:
    """Why an engine cannot run here; None if it can."""
    if not engine.startswith("vllm"):
        return None
    if device == "cpu":
        return "vLLM is compared on a GPU only"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return None


def run(
    folder: Path,
    engines: Sequence[str],
    loads: Sequence[Load],
    *,
    device: str,
    repeats: int,
    memory: float,
    split: tuple[int, int] = (1, 1),
    profile: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Figures]:
    """Measure every engine on every load.

    Args:
        folder: of the model; its config.json suffices, weights are made up.
        memory: share of the GPU that each engine may hold.
        split: tensor and pipeline parallel ranks of every engine, each with a GPU.
        profile: file for a profile of this engine's decode steps under the first load.
    """
    figures = []
    for engine in engines:
        problem = unavailable(engine, device)
        if problem is not None:
            figures += [Figures(engine, load, problem=problem) for load in loads]
            continue
        progress(engine)
        spec = {
            "engine": engine,
            "folder": str(folder),
            "loads": [asdict(load) for load in loads],
            "device": device,
            "repeats": repeats,
            "memory": memory,
            "split": list(split),
            "profile": str(profile) if profile is not None and engine == "vexact" else None,
        }
        figures += _in_a_process(spec, loads)
    return figures


def _in_a_process(spec: dict[str, Any], loads: Sequence[Load]) -> list[Figures]:
    environment = dict(os.environ)
    if spec["engine"] == "vllm-batch-invariant":
        environment["VLLM_BATCH_INVARIANT"] = "1"
    with tempfile.TemporaryDirectory() as place:
        asked, told, log = (Path(place) / name for name in ("spec.json", "result.json", "log"))
        asked.write_text(json.dumps(spec), encoding="utf-8")
        with log.open("wb") as output:
            command = [sys.executable, "-m", "verl_tim.bench.rollout_worker", str(asked), str(told)]
            code = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
        results = json.loads(told.read_text(encoding="utf-8")) if told.exists() else []
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    figures = [
        Figures(spec["engine"], load, result["seconds"], result["host"])
        for load, result in zip(loads, results, strict=False)
    ]
    # An engine that ends early keeps what it had measured.
    why = f"exit code {code}: {last[0] if last else 'no output'}"
    return figures + [Figures(spec["engine"], load, problem=why) for load in loads[len(figures) :]]


def as_json(figures: Sequence[Figures], config: ModelConfig, bytes_per_second: float | None) -> list[dict[str, Any]]:
    """One entry per engine and load, with tokens per second, the share of the floor and the ratio to vLLM's default."""
    vllm = {row.load: row.tokens_per_second for row in figures if row.engine == "vllm"}
    entries = []
    for row in figures:
        speed = row.tokens_per_second
        floor = None if bytes_per_second is None else floor_tokens_per_second(config, row.load, bytes_per_second)
        peer = vllm.get(row.load)
        entries.append(
            {
                "engine": row.engine,
                "load": asdict(row.load),
                "seconds": row.seconds,
                "tokens_per_second": speed,
                "spread": row.spread,
                "floor_tokens_per_second": floor,
                "share_of_floor": None if speed is None or floor is None else speed / floor,
                "over_vllm": None if speed is None or peer is None else speed / peer,
                "host": row.host,
                "problem": row.problem,
            }
        )
    return entries
