"""Replay in one model: each router's choice is taken from the pass under way, in the forward and where it is repeated.

Whether a router runs in a forward or in recomputation is read from autograd itself: inside a backward there is a graph
task, outside there is none. Which micro-batch is computed again is known from the checkpointed function, which carries
its pass; both forms of checkpointing run that function, `use_reentrant` or not.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl_tim.replay.cursor import Pass, RouterCursor
from verl_tim.replay.errors import ReplayError
from verl_tim.replay.interception import run
from verl_tim.replay.routers import Router, find_routers

_CHECKPOINT = "_gradient_checkpointing_func"  # of transformers' layers


class _Free:
    """In place of a pass: routers choose for themselves, because somebody said so (`RoutingReplay.free`)."""


_FREE = _Free()


class _Bound(threading.local):
    """The pass of the checkpointed function that runs in this thread; a GPU's backward has a thread of its own."""

    token: Pass | _Free | None = None


class RoutingReplay:
    """The handles of a model's routers, one each.

    Args:
        model: a causal LM; its routers' forwards are replaced. Gradient checkpointing must be switched on before.
        contract: the model is served by `models.apply_contract`, whose layers choose in place of the router modules:
            give it `choose`.

    Attributes:
        routers: in layer order.

    Raises:
        ReplayError: see `find_routers`.
    """

    def __init__(self, model: nn.Module, *, contract: bool = False) -> None:
        self.routers: list[Router] = find_routers(model)
        self._index = {router.layer: index for index, router in enumerate(self.routers)}
        self._cursors = [RouterCursor() for _ in self.routers]
        self._number = 0
        self._open: Pass | _Free | None = None
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()  # that checkpointed functions still hold
        self._bound = _Bound()
        if not contract:
            for index, router in enumerate(self.routers):
                self._take_over(index, router)
        for module in model.modules():
            if _CHECKPOINT in module.__dict__:
                setattr(module, _CHECKPOINT, self.carrying(getattr(module, _CHECKPOINT)))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(router.layer for router in self.routers)

    @property
    def top_k(self) -> int:
        return self.routers[0].top_k

    @property
    def num_experts(self) -> int:
        return self.routers[0].num_experts

    def cursor(self, layer: int) -> RouterCursor:
        return self._cursors[self._index[layer]]

    # ------------------------------------------------------------------------------------------------- micro-batches

    def begin(self, rows: int, given_TLK: Tensor | None) -> Pass:
        """The next forward is a micro-batch whose routers see `rows` rows; see `Pass`."""
        if self._open is not None:
            raise ReplayError("a forward begins before the last one ended")
        self._open = opened = Pass(self._number, self.routers, self._cursors, rows, given_TLK)
        self._number += 1
        self._passes.add(opened)
        return opened

    def end(self) -> tuple[Pass, Tensor, Tensor]:
        """(the pass, what its routers would have chosen, what they handed on), int16 [rows, routers, k].

        Raises:
            ReplayError: a router did not run.
        """
        ended, self._open = self._open, None
        if not isinstance(ended, Pass):
            raise ReplayError("no forward is under way")
        live_TLK, used_TLK = ended.choices()
        return ended, live_TLK, used_TLK

    @contextmanager
    def free(self) -> Iterator[None]:
        """Inside, routers choose for themselves: a reference model's forward in this model's parameters."""
        before, self._open = self._open, _FREE
        try:
            yield
        finally:
            self._open = before

    def clear(self) -> None:
        """Forget every micro-batch: a step is over, or it failed."""
        self._open = None
        for one in list(self._passes):
            one.clear()
        self._passes.clear()
        for cursor in self._cursors:
            cursor.forward = cursor.backward = -1
        self._number = 0

    # -------------------------------------------------------------------------------------------------------- routers

    def choose(self, layer: int, live_TK: Tensor) -> Tensor | None:
        """What layer `layer`'s router is to take in place of `live_TK`; None: that.

        Raises:
            ReplayError: no micro-batch is under way, or the backward's is not known.
        """
        index = self._index[layer]
        token = self._token(index)
        if isinstance(token, _Free):
            return None
        if in_backward():
            return token.again(index, live_TK)
        chosen = token.forward(index, live_TK)
        token.used(index, live_TK if chosen is None else chosen)
        return chosen

    def _token(self, index: int) -> Pass | _Free:
        where = f"layer {self.routers[index].layer}: {self.routers[index].name}"
        if in_backward():
            if self._bound.token is None:
                raise ReplayError(
                    f"{where} is computed again by something that does not say for which micro-batch: use "
                    "transformers' gradient checkpointing (actor_rollout_ref.model.enable_gradient_checkpointing)"
                )
            return self._bound.token
        if self._open is None:
            raise ReplayError(f"{where} runs outside of a micro-batch, so it has no routes")
        return self._open

    def _take_over(self, index: int, router: Router) -> None:
        original = router.module.forward

        @functools.wraps(original)
        def forward(_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            choose = functools.partial(self.choose, router.layer)
            result, handed_on = run(router, original, choose, *args, **kwargs)
            if not in_backward() and isinstance(self._open, Pass):
                self._open.used(index, handed_on)
            return result

        router.module.forward = types.MethodType(forward, router.module)  # type: ignore[method-assign]

    def carrying(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpoint function whose checkpointed function carries the pass that is under way when it is called."""

        @functools.wraps(checkpoint)
        def carried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(self._run_bound, self._open, function), *args, **kwargs)

        return carried

    def _run_bound(self, token: Pass | _Free | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._bound.token = self._bound.token, token
        try:
            return function(*args, **kwargs)
        finally:
            self._bound.token = before


def in_backward() -> bool:
    """Whether this thread is inside autograd's backward, as `torch.utils.checkpoint` asks, too."""
    return torch._C._current_graph_task_id() != -1
