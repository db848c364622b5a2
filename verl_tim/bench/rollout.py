"""Rollout throughput: this engine beside vLLM, the same requests on the same machine in one run.

Every engine runs in a process of its own (`rollout_worker.py`), one after the other, over all workloads of a model:
random weights in the model's shape, random prompts, temperature 1, end-of-sequence ignored, the drawn tokens' log-probs
returned, prefix cache off, a warm-up before each workload. So one and the same amount of work is compared.

The floor is what a decode step must read (weights it touches, keys and values of all contexts) over the memory's
bandwidth; prefill, which is bound by arithmetic, is not in it.

On several devices an engine is split (tensor and pipeline parallel ranks) or there are several of it, each with its
share of the requests (data parallel), as in a training run; those begin together, and the slowest counts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from verl_tim.launch.gpus import VISIBLE, listed_gpus
from verl_tim.launch.process import end_trees, tie_to_parent
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


@dataclass(frozen=True)
class Split:
    """How an engine uses devices: ranks that share each weight, stages that share the layers, whole replicas."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    def __str__(self) -> str:
        parts = [f"{short}{ranks}" for short, ranks in self._parts() if ranks > 1]
        return "".join(parts) or "tp1"

    @classmethod
    def parse(cls, text: str) -> Split:
        """From a form such as ``tp2``, ``pp2``, ``dp2`` or ``tp2dp2``. Raises ValueError, which names the forms."""
        found = re.findall(r"(tp|pp|dp)([1-9]\d*)", text)
        ranks = {short: int(number) for short, number in found}
        if not found or len(ranks) < len(found) or "".join(map("".join, found)) != text:
            raise ValueError(
                f"{text!r}: give tpN (tensor), ppN (pipeline), dpN (data parallel) or several, as in tp2dp2"
            )
        return cls(ranks.get("tp", 1), ranks.get("pp", 1), ranks.get("dp", 1))

    def _parts(self) -> tuple[tuple[str, int], ...]:
        return ("tp", self.tensor), ("pp", self.pipeline), ("dp", self.data)

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    def shares(self, load: Load) -> list[Load]:
        """The requests of each replica, the first ones with one more where they do not divide."""
        each, more = divmod(load.requests, self.data)
        return [replace(load, requests=each + (replica < more)) for replica in range(self.data)]


@dataclass
class Figures:
    """One engine on one load.

    seconds: of each repeat. start_seconds: from its process's start until it takes requests. host: where the engine
    tells, host and waiting time per step in microseconds, and steps (of the first replica). problem: why there are no
    seconds.
    """

    engine: str
    load: Load
    split: Split = Split()
    seconds: list[float] = field(default_factory=list)
    start_seconds: float | None = None
    host: dict[str, float] = field(default_factory=dict)
    problem: str = ""

    @property
    def name(self) -> str:
        return name_of(self.engine, self.split)

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
    engines: Sequence[tuple[str, Split]],
    loads: Sequence[Load],
    *,
    device: str,
    repeats: int,
    memory: float,
    limit: float = math.inf,
    profile: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
    stopping: Callable[[], object] = lambda: None,
) -> Iterator[Figures]:
    """Measure every engine on every load; the rows of an engine when it has ended.

    A KeyboardInterrupt ends the engine's processes and is raised again, after the rows that it had measured.

    Args:
        folder: of the model; its config.json suffices, weights are made up.
        engines: names, and how each uses the devices.
        memory: share of each GPU that an engine may hold.
        limit: seconds that an engine may take for its start and the first load, and for each further one.
        profile: file for a profile of the first vexact's decode steps under the first load.
        progress: told which engine begins.
        stopping: called after a KeyboardInterrupt, before processes are ended; another one must not come then.
    """
    for engine, split in engines:
        problem = unavailable(engine, device)
        if problem is not None:
            yield from (Figures(engine, load, split, problem=problem) for load in loads)
            continue
        progress(name_of(engine, split))
        spec = {
            "engine": engine,
            "folder": str(folder),
            "device": device,
            "repeats": repeats,
            "memory": memory,
            "split": [split.tensor, split.pipeline],
            "profile": str(profile) if profile is not None and engine == "vexact" else None,
        }
        if engine == "vexact":
            profile = None
        yield from _in_processes(spec, loads, split, limit, stopping)


def name_of(engine: str, split: Split) -> str:
    """As it is asked for: ``vexact`` on one device, ``vexact:tp2`` on several."""
    return engine if split.devices == 1 else f"{engine}:{split}"


def _in_processes(
    spec: dict[str, Any], loads: Sequence[Load], split: Split, limit: float, stopping: Callable[[], object]
) -> Iterator[Figures]:
    """One process per replica. An engine that ends early keeps what all of its replicas had measured."""
    shares = list(zip(*(split.shares(load) for load in loads), strict=True))
    why, stopped = "", None
    with tempfile.TemporaryDirectory() as name:
        place, replicas = Path(name), []
        try:
            for replica, share in enumerate(shares):
                asked = {**spec, "loads": [asdict(load) for load in share]}
                replicas.append(_start(place, replica, asked, split))
            why = _wait(place, replicas, limit)
        except KeyboardInterrupt as interrupt:
            stopping()
            stopped = interrupt
        finally:
            _end(replicas)
        told = [_read(place / f"result{replica}.json") for replica in range(split.data)]
    measured = 0
    for load, results in zip(loads, zip(*told, strict=False), strict=False):
        seconds = [max(times) for times in zip(*(result["seconds"] for result in results), strict=True)]
        start = max(result["start_seconds"] for result in results)
        yield Figures(spec["engine"], load, split, seconds, start, results[0]["host"])
        measured += 1
    if stopped is not None:
        raise stopped
    yield from (Figures(spec["engine"], load, split, problem=why) for load in loads[measured:])


def _start(place: Path, replica: int, spec: dict[str, Any], split: Split) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if spec["engine"] == "vllm-batch-invariant":
        environment["VLLM_BATCH_INVARIANT"] = "1"
    if split.data > 1:
        spec = {**spec, "together": {"file": str(place / "together"), "replicas": split.data}}
        if replica:
            spec["profile"] = None
        if spec["device"] == "cuda":
            environment[VISIBLE] = ",".join(_visible_devices(split)[replica])
    asked, told = place / f"spec{replica}.json", place / f"result{replica}.json"
    asked.write_text(json.dumps(spec), encoding="utf-8")
    command = [sys.executable, "-m", "verl_tim.bench.rollout_worker", str(asked), str(told)]
    with (place / f"log{replica}").open("wb") as output:
        # a session of its own: a Ctrl-C in the terminal reaches us only, and we end vLLM's processes, too
        return subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(tie_to_parent, os.getpid()),
        )


def _visible_devices(split: Split) -> list[list[str]]:
    """The devices of each replica, as CUDA_VISIBLE_DEVICES names them."""
    names = listed_gpus() or [str(index) for index in range(split.devices)]
    each = split.tensor * split.pipeline
    return [names[replica * each : (replica + 1) * each] for replica in range(split.data)]


def _wait(place: Path, replicas: list[subprocess.Popen[bytes]], limit: float) -> str:
    """Wait for all, or for the first that fails, for which the others would wait for ever; why that one failed."""
    told, deadline = 0, time.monotonic() + limit
    while True:
        codes = [process.poll() for process in replicas]
        for replica, code in enumerate(codes):
            if code:
                return f"exit code {code}: {_last_line(place, replica)}"
        if None not in codes:
            return ""
        fewest = min(len(_read(place / f"result{replica}.json")) for replica in range(len(replicas)))
        if fewest > told:
            told, deadline = fewest, time.monotonic() + limit
        if time.monotonic() > deadline:
            return f"ended after {limit:.0f} s without a figure: {_last_line(place, codes.index(None))}"
        time.sleep(0.1)


def _last_line(place: Path, replica: int) -> str:
    text = (place / f"log{replica}").read_text(encoding="utf-8", errors="replace")
    last = text.strip().splitlines()[-1:]
    return last[0] if last else "no output"


def _end(replicas: list[subprocess.Popen[bytes]]) -> None:
    """End what runs, and what those left behind that died: each began a session, in which its own processes are."""
    end_trees([process for process in replicas if process.poll() is None])
    # A number that is a process's again is a stranger's: as a session's it is kept while the session has members.
    sessions = {process.pid for process in replicas if not psutil.pid_exists(process.pid)}
    left = [process for process in psutil.process_iter() if _session(process.pid) in sessions]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended, or is nothing of ours
        return None


def _read(told: Path) -> list[dict[str, Any]]:
    return json.loads(told.read_text(encoding="utf-8")) if told.exists() else []


def as_json(figures: Sequence[Figures], config: ModelConfig, bytes_per_second: float | None) -> list[dict[str, Any]]:
    """One entry per engine, split and load, with tokens per second, the share of the floor and the ratio to vLLM's
    default in its fastest split.

    Args:
        bytes_per_second: of one device's memory; None where nobody knows it.
    """
    vllm: dict[Load, float] = {}
    for row in figures:
        if row.engine == "vllm" and row.tokens_per_second is not None:
            vllm[row.load] = max(row.tokens_per_second, vllm.get(row.load, 0.0))
    entries = []
    for row in figures:
        speed = row.tokens_per_second
        floor = None
        if bytes_per_second is not None:
            # Each replica reads all weights.
            each = row.split.devices / row.split.data * bytes_per_second
            floor = sum(floor_tokens_per_second(config, load, each) for load in row.split.shares(row.load))
        peer = vllm.get(row.load)
        entries.append(
            {
                "engine": row.name,
                "load": asdict(row.load),
                "seconds": row.seconds,
                "tokens_per_second": speed,
                "spread": row.spread,
                "start_seconds": row.start_seconds,
                "floor_tokens_per_second": floor,
                "share_of_floor": None if speed is None or floor is None else speed / floor,
                "over_vllm": None if speed is None or peer is None else speed / peer,
                "host": row.host,
                "problem": row.problem,
            }
        )
    return entries
