"""What a server's process leaves for the one that Ray starts in its place, and for the run.

Ray tells of an actor that exited no more than its exit code, and starts the next one with the same arguments. The rest
lies in Ray's own key-value store, which lives as long as the run's cluster; Ray's libraries use it so
(`ray.experimental.internal_kv`, Ray 2.55 to 2.60).
"""

from __future__ import annotations

from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

ENGINE_ERROR = "engine_error"
"""Why its engine failed, for which it ends: class and message."""
METRICS = "metrics"
"""Where it serves metrics, and under which name: `EngineServer.metrics`, as JSON."""
RESTARTS = "restarts"
"""How often it was started again: `restarts.Restarts`, as JSON."""

_NAMESPACE = "verl_tim"


def leave(what: str, text: str) -> None:
    """Runs in the actor."""
    _internal_kv_put(_key(what, _own_id()), text, overwrite=True, namespace=_NAMESPACE)


def left(what: str, actor: Any = None) -> str:
    """What the process before this one left, or that of another actor; empty where it left nothing.

    Args:
        actor: handle of one that may be dead; None: the actor that this runs in, which Ray has started again.
    """
    actor_id = _own_id() if actor is None else actor._actor_id.hex()
    found = _internal_kv_get(_key(what, actor_id), namespace=_NAMESPACE)
    return (found or b"").decode(errors="replace")


def forget(what: str) -> None:
    """Runs in the actor that Ray has started again: the end of the next process may be another."""
    _internal_kv_del(_key(what, _own_id()), namespace=_NAMESPACE)


def _key(what: str, actor_id: str) -> str:
    return f"{what}:{actor_id}"


def _own_id() -> str:
    return str(ray.get_runtime_context().get_actor_id())
