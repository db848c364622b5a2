"""What vLLM says of sampled sequences (`verl_tim.plugin.patch_vllm_recorded`): the likeliest tokens, from its log-prob
output, and of a mixture of experts the routes, where its engine returns them (`tim.vllm_routes`, or replay of them).

vLLM returns the experts of every position but the last one's, which no forward saw: those of drawn token n stand at
position prompt + n - 1.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import numpy as np

from verl_tim.replay import ReplayError, RouterMap, converted
from verl_tim.rollout.recorded import RECORD_PARAM, RECORDED_FIELD, Recorded
from verl_tim.rollout.routes import ROUTE_ERROR_FIELD

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


def record_choices(module: ModuleType) -> None:
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
        output = None if request is None else request.get("output")
        result.extra_fields[RECORDED_FIELD] = None
        # no log-probs: switched off, aborted before the first token, or served by another server
        if output is not None and output.outputs and result.log_probs is not None:
            routers = None
            if getattr(output.outputs[0], "routed_experts", None) is not None:
                model = self.model_config
                # the first time it makes the model's modules, and other requests go on meanwhile
                routers = await asyncio.to_thread(_routers, model.local_path, bool(model.trust_remote_code))
            try:
                result.extra_fields[RECORDED_FIELD] = recorded(output, routers).wire()
            except ReplayError as error:
                result.extra_fields[ROUTE_ERROR_FIELD] = str(error)  # ends the run: `raise_route_errors`
        return result

    module.SamplingParams = sampling_params  # type: ignore[attr-defined]
    module.vLLMHttpServer.generate = generate


@functools.cache
def _routers(path: str, trust_remote_code: bool) -> RouterMap:
    return RouterMap.of_folder(path, trust_remote_code=trust_remote_code)


def recorded(output: Any, routers: RouterMap | None) -> Recorded:
    """Of vLLM's last `RequestOutput` of a request with `logprobs=1`.

    Args:
        routers: the model's, where the output has routes; None: they are left out.

    Raises:
        ReplayError: routes that are none; names request, layer and position.
    """
    drawn = output.outputs[0]
    top1_N = top1_ids(drawn.logprobs)
    if routers is None:
        return Recorded(top1_N)
    prompt, response = len(output.prompt_token_ids), len(drawn.token_ids)
    routes_TLK = converted(
        drawn.routed_experts, routers, prompt=prompt, response=response, sample=f"of vLLM's request {output.request_id}"
    )
    return Recorded(top1_N, routes_TLK[prompt - 1 : prompt - 1 + response], routers.layers)
