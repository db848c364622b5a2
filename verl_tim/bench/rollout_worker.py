"""One engine's side of `bench rollout`: `python -m verl_tim.bench.rollout_worker SPEC RESULT`.

SPEC is the JSON that `rollout.run` writes; RESULT gets a list with one entry per load, written anew after each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from verl_tim.bench.rollout import Load

_STD = 0.02
_BATCHED_TOKENS = 8192
_PROFILED_STEPS = 10
_WARM_UP_TOKENS = 16


def prompts_of(load: Load, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(load.requests * load.prompt)
    return rng.integers(0, vocab_size, (load.requests, load.prompt)).tolist()


class Ours:
    """This engine, with random weights made on its device."""

    def __init__(self, spec: dict[str, Any], loads: list[Load]) -> None:
        from verl_tim.engine import EngineConfig, start_engine

        on_gpu = spec["device"] != "cpu"
        longest = max(load.prompt + load.output for load in loads)
        settings: dict[str, Any] = {"gpu_memory_utilization": spec["memory"]}
        if not on_gpu:
            settings = {"kv_cache_tokens": max(load.requests * (load.prompt + load.output + 16) for load in loads)}
        tensor, stages = spec["split"]
        self.engine = start_engine(
            EngineConfig(
                spec["folder"],
                numerics="contract" if spec["engine"] == "vexact" else "stock",
                device="cuda:0" if on_gpu else "cpu",
                max_num_seqs=max(load.requests for load in loads),
                max_num_batched_tokens=_BATCHED_TOKENS,
                max_model_len=longest + 1,
                load_weights=False,
                tensor_parallel_size=tensor,
                pipeline_parallel_size=stages,
                **settings,
            )
        )
        self.engine.update_weights(self._weights(), 1)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        model: Any = self.engine.model
        generator = torch.Generator(model.device).manual_seed(0)
        for name, shape in model.weight_shapes().items():
            weight = torch.empty(shape, dtype=model.dtype, device=model.device)
            if name.endswith("norm.weight"):
                yield name, weight.fill_(1.0)
            else:
                yield name, weight.normal_(0.0, _STD, generator=generator)

    def run(self, load: Load, output: int) -> tuple[float, dict[str, float]]:
        """Seconds from the first request to the last token; host time per step."""
        engine = self._add(load, output)
        before = engine.stats().as_dict()
        began = time.perf_counter()
        tokens = 0
        while engine.has_work():
            for ended in engine.step():
                tokens += len(ended.token_ids)
        seconds = time.perf_counter() - began
        assert tokens == load.requests * output, f"{tokens} tokens were drawn, {load.requests * output} were asked"
        after = engine.stats().as_dict()
        return seconds, _per_step(before, after)

    def _add(self, load: Load, output: int) -> Any:
        from verl_tim.engine import SamplingParams

        params = SamplingParams(max_tokens=output, ignore_eos=True)
        for index, prompt in enumerate(prompts_of(load, self.engine.vocab_size)):
            self.engine.add(str(index), prompt, params)
        return self.engine

    def profile(self, load: Load, file: Path) -> None:
        """Write the kernels of some decode steps, by time, to ``file``."""
        engine = self._add(load, load.output)
        before = engine.stats().decode_tokens
        while engine.has_work() and engine.stats().decode_tokens - before < 4 * load.requests:
            engine.step()
        with torch.profiler.profile() as profiler:
            for _ in range(_PROFILED_STEPS):
                engine.step()
            engine.drain()
        engine.abort()
        by = "self_device_time_total" if self.engine.model.device.type == "cuda" else "self_cpu_time_total"
        file.write_text(profiler.key_averages().table(sort_by=by, row_limit=60), encoding="utf-8")


def _per_step(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    steps = after["steps"] - before["steps"]
    times = {name: after[name] - before[name] for name in after if name.endswith("_seconds")}
    per_step = {name.removesuffix("seconds") + "us": 1e6 * value / steps for name, value in times.items()}
    return {"steps": steps, **per_step}


class VLLM:
    """vLLM, with its dummy weights."""

    def __init__(self, spec: dict[str, Any], loads: list[Load]) -> None:
        from vllm import LLM

        from verl_tim.models import load_model_config

        self.llm = LLM(
            model=spec["folder"],
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=max(load.prompt + load.output for load in loads) + 1,
            max_num_seqs=max(load.requests for load in loads),
            gpu_memory_utilization=spec["memory"],
            enable_prefix_caching=False,
            tensor_parallel_size=spec["split"][0],
            pipeline_parallel_size=spec["split"][1],
            seed=0,
        )
        self.vocab_size = load_model_config(spec["folder"]).vocab_size

    def run(self, load: Load, output: int) -> tuple[float, dict[str, float]]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=1.0, max_tokens=output, ignore_eos=True, logprobs=0, detokenize=False, seed=None
        )
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in prompts_of(load, self.vocab_size)]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(request.outputs[0].token_ids) for request in outputs)
        assert tokens == load.requests * output, f"{tokens} tokens were drawn, {load.requests * output} were asked"
        assert all(len(request.outputs[0].logprobs or ()) == output for request in outputs), "log-probs are missing"
        return seconds, {}


class Together:
    """Replicas that begin each repeat at the same moment."""

    def __init__(self, file: str, replicas: int) -> None:
        self._store = torch.distributed.FileStore(file, replicas)
        self._replicas, self._round = replicas, 0

    def wait(self) -> None:
        self._round += 1
        arrived = self._store.add(f"round {self._round}", 1)
        while arrived < self._replicas:
            time.sleep(0.001)
            arrived = self._store.add(f"round {self._round}", 0)


def measure(spec: dict[str, Any], tell: Callable[[list[dict[str, Any]]], None]) -> None:
    """Run the spec's loads; ``tell`` gets all results after each load."""
    loads = [Load(**load) for load in spec["loads"]]
    engine: Ours | VLLM = VLLM(spec, loads) if spec["engine"].startswith("vllm") else Ours(spec, loads)
    start_seconds = time.time() - psutil.Process().create_time()
    together = Together(**spec["together"]) if "together" in spec else None
    results = []
    for number, load in enumerate(loads):
        engine.run(load, min(_WARM_UP_TOKENS, load.output))
        runs = []
        for _ in range(spec["repeats"]):
            if together is not None:
                together.wait()
            runs.append(engine.run(load, load.output))
        host = {name: float(np.median([run[1][name] for run in runs])) for name in runs[0][1]}
        results.append({"seconds": [run[0] for run in runs], "start_seconds": start_seconds, "host": host})
        tell(results)
        if number == 0 and spec["profile"] is not None and isinstance(engine, Ours):
            engine.profile(load, Path(spec["profile"]))


def main(asked: Path, told: Path) -> None:
    spec = json.loads(asked.read_text(encoding="utf-8"))
    measure(spec, lambda results: _write(told, results))


def _write(told: Path, results: list[dict[str, Any]]) -> None:
    whole = told.with_suffix(".part")
    whole.write_text(json.dumps(results), encoding="utf-8")
    whole.replace(told)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
