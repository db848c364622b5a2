"""What routing replay costs: routes in memory and on their way, their checks, and a router that takes given experts."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from verl_tim.bench.measure import Measured, measure
from verl_tim.replay import RecordedRoutes, Router, RouterMap, agreement, converted
from verl_tim.replay.interception import run

HIDDEN = 2048  # of the router that is measured; Qwen3-30B-A3B's


@dataclass(frozen=True)
class Shape:
    """tokens: of all sequences, prompts included; sequences: equally long."""

    layers: int
    experts: int
    top_k: int
    tokens: int
    sequences: int

    @property
    def bytes_per_token(self) -> int:
        """Of routes as they travel and are kept: int16 per layer and place."""
        return 2 * self.layers * self.top_k

    @property
    def length(self) -> int:
        return self.tokens // self.sequences


@dataclass(frozen=True)
class Cost:
    """What was measured.

    Attributes:
        wire_bytes: of the routes of all sequences as Ray ships them (pickle), per token.
        host_bytes: of the record of all sequences (r2), pinned where there is a GPU.
        parts: what was timed, over all tokens.
    """

    wire_bytes: float
    host_bytes: int
    parts: dict[str, Measured]


class _TopKRouter(nn.Module):
    """Linear, softmax, top k, renormalised, as Qwen3-MoE's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k, self.weight = shape.top_k, nn.Parameter(torch.randn(shape.experts, HIDDEN) * 0.02)

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = nn.functional.linear(hidden_TD, self.weight)
        score_TK, expert_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(self.top_k, -1)
        return logits_TE, score_TK / score_TK.sum(-1, keepdim=True), expert_TK


def random_routes(shape: Shape, seed: int = 0) -> np.ndarray:
    """int16 [length - 1, layers, k] of one sequence, as a rollout returns them: distinct neighbours."""
    first = np.random.default_rng(seed).integers(0, shape.experts, (shape.length - 1, shape.layers, 1))
    return ((first + np.arange(shape.top_k)) % shape.experts).astype(np.int16)


def benchmark(shape: Shape, device: torch.device, *, repeats: int, done: Callable[[], None] = lambda: None) -> Cost:
    """Measure every stage that a route passes on the trainer's side."""
    routers = RouterMap(tuple(range(shape.layers)), shape.layers, shape.experts, shape.top_k)
    raw = [random_routes(shape, seed) for seed in range(shape.sequences)]
    prompt = max(1, shape.length // 4)

    def convert() -> list[np.ndarray]:
        return [
            converted(one, routers, prompt=prompt, response=len(one) + 1 - prompt, sample=str(number))
            for number, one in enumerate(raw)
        ]

    def ship() -> int:
        return len(pickle.loads(pickle.dumps(raw, protocol=5)))

    whole = torch.from_numpy(np.concatenate(convert()))
    on_device = whole.to(device)
    lengths, rows = [shape.length] * shape.sequences, list(range(shape.sequences))
    kept = RecordedRoutes()
    kept.keep(rows, lengths, on_device)
    hidden_TD = torch.randn(shape.length, HIDDEN, device=device)
    router = _TopKRouter(shape).to(device)
    handle = Router(0, "router", router, shape.top_k, shape.experts)
    given_TK = on_device[: shape.length - 1, 0].long()
    given_TK = torch.cat([given_TK, given_TK[:1]])

    def record() -> None:
        RecordedRoutes().keep(rows, lengths, on_device)

    functions: dict[str, Callable[[], object]] = {
        "conversion and checks": convert,
        "pickled and back": ship,
        "recorded, device to host": record,
        "given back, host to device": lambda: kept.of(rows, lengths, device),
        "agreement of two choices": lambda: agreement(on_device, on_device),
        "one router, one sequence, live": lambda: router(hidden_TD),
        "one router, one sequence, replayed": lambda: run(handle, router.forward, lambda live: given_TK, hidden_TD),
    }
    parts = measure(functions, device, repeats=repeats, done=done)
    wire = len(pickle.dumps(raw, protocol=5)) / (shape.sequences * shape.length)
    return Cost(wire, kept.nbytes, parts)
