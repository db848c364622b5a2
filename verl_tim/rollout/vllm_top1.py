"""The likeliest tokens of sampled sequences from vLLM's log-prob output (`verl_tim.plugin.patch_vllm_top1`)."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import numpy as np

from verl_tim.rollout.recorded import RECORD_PARAM, RECORDED_FIELD, Recorded

# Set while a recorded request is under way in this task; vLLM's last output goes in under "output".
_request: ContextVar[dict[str, Any] | None] = ContextVar("verl_tim_vllm_request", default=None)


class _Listening:
    """vLLM's engine, whose `generate` also leaves its last output with the request that asked for it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        request = _request.get()
        async for output in self._engine.generate(*args, **kwargs):
            if request is not None:
                request["output"] = output
            yield output


def top1_ids(token_logprobs: list[Mapping[int, Any]]) -> np.ndarray:
    """int32, per token the id with the largest log-prob among those that vLLM lists; ties to the lower id."""
    likeliest = [min(entry, key=lambda token: (-entry[token].logprob, token)) for entry in token_logprobs]
    return np.array(likeliest, np.int32)


def record_top1(module: ModuleType) -> None:
    """Patch verl's `vllm_async_server` so that requests marked with `RECORD_PARAM` return a `Recorded`."""
    make_params = module.SamplingParams
    generate_ = module.vLLMHttpServer.generate

    @functools.wraps(make_params)
    def sampling_params(*args: Any, **kwargs: Any) -> Any:
        if _request.get() is not None and kwargs.get("logprobs") == 0:
            kwargs["logprobs"] = 1  # the drawn token and the likeliest one
        return make_params(*args, **kwargs)

    @functools.wraps(generate_)
    async def generate(
        self: Any, prompt_ids: list[int], sampling_params: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        wanted = sampling_params.pop(RECORD_PARAM, False)
        if wanted and not isinstance(self.engine, _Listening):
            self.engine = _Listening(self.engine)
        request: dict[str, Any] | None = {} if wanted else None
        token = _request.set(request)
        try:
            result = await generate_(self, prompt_ids, sampling_params, *args, **kwargs)
        finally:
            _request.reset(token)
        result.extra_fields[RECORDED_FIELD] = None if request is None else _recorded(request.get("output"), result)
        return result

    module.SamplingParams = sampling_params  # type: ignore[attr-defined]
    module.vLLMHttpServer.generate = generate


def _recorded(output: Any, result: Any) -> dict[str, Any] | None:
    """None where vLLM gave no log-probs: switched off, aborted before the first token, or served by another server."""
    if output is None or not output.outputs or result.log_probs is None:
        return None
    return Recorded(top1_ids(output.outputs[0].logprobs)).wire()
