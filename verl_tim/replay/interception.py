"""Takes the choice of experts out of a router's own forward, and leaves everything else in it as it is.

A router is `torch.topk` over its scores, with code before and after it that differs by family: softmax or sigmoid,
biases, groups, normalisation, dtypes. While its forward runs, the one `topk` over all its experts is answered with the
given experts and with the live scores at their places; so scores, and their gradients, are always live, and a family
needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from verl_tim.numerics.moe import Choose, chosen_scores
from verl_tim.replay.errors import ReplayError
from verl_tim.replay.routers import Router


class _Intercepted(TorchFunctionMode):
    """Active while one router's forward runs."""

    def __init__(self, router: Router, choose: Choose) -> None:
        super().__init__()
        self.router, self.choose = router, choose
        self.choices: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        scores, k, dim = _arguments(*args, **kwargs)
        live = func(*args, **kwargs)
        ours = k == self.router.top_k and scores.shape[-1] == self.router.num_experts
        if not ours or dim not in (-1, scores.dim() - 1):
            return live
        chosen = self.choose(live.indices.flatten(0, -2))
        if chosen is None:
            self.choices.append(live.indices)
            return live
        chosen = chosen.to(live.indices.dtype).view_as(live.indices)
        self.choices.append(chosen)
        return torch.return_types.topk((chosen_scores(scores, chosen), chosen))


def _arguments(input: Tensor, k: int, dim: int = -1, *rest: Any, **more: Any) -> tuple[Tensor, int, int]:
    return input, int(k), -1 if dim is None else int(dim)


def run(router: Router, forward: Callable[..., Any], choose: Choose, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
    """(the result of the router's forward, the experts [T, k] that it handed on).

    Raises:
        ReplayError: the forward did not choose exactly once.
    """
    mode = _Intercepted(router, choose)
    with mode:
        result = forward(*args, **kwargs)
    if len(mode.choices) != 1:
        raise ReplayError(
            f"layer {router.layer}: {router.name} ({type(router.module).__name__}) chose {len(mode.choices)} times in "
            f"one forward by topk of {router.top_k} among {router.num_experts}, expected once: this family's router "
            "cannot be replayed; set routing_replay=off"
        )
    return result, _handed_on(result, mode.choices[0]).flatten(0, -2)


def _handed_on(result: Any, chosen: Tensor) -> Tensor:
    """The expert ids in a router's result; those it chose where the block around it takes them itself."""
    parts = result if isinstance(result, tuple) else (result,)
    for part in parts:
        if isinstance(part, Tensor) and not part.is_floating_point() and part.shape[-1] == chosen.shape[-1]:
            return part
    return chosen
