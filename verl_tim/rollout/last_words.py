"""Why a server's process ended, for whoever asks after its end: its successor, and the run.

Ray tells of an actor that exited no more than its exit code. The words lie in Ray's own key-value store, which lives as
long as the run's cluster; Ray's libraries use it so (`ray.experimental.internal_kv`, Ray 2.55 to 2.60).
"""

from __future__ import annotations

from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

_NAMESPACE = "verl_tim"
_PREFIX = "last_words:"
_CHARACTERS = 2000


def leave(error: BaseException) -> None:
    """Runs in the actor that is about to end with this error; class and message are kept, in one line."""
    words = " ".join(f"{type(error).__name__}: {error}".split())[:_CHARACTERS]
    _internal_kv_put(_key(_own_id()), words, overwrite=True, namespace=_NAMESPACE)


def take() -> str:
    """Runs in the actor that Ray started again: what its predecessor left, once; empty where it left nothing, since it
    was killed or lost."""
    key = _key(_own_id())
    found = _internal_kv_get(key, namespace=_NAMESPACE)
    _internal_kv_del(key, namespace=_NAMESPACE)
    return (found or b"").decode(errors="replace")


def of(actor: Any) -> str:
    """What an actor left that Ray does not start again.

    Args:
        actor: its handle.
    """
    found = _internal_kv_get(_key(actor._actor_id.hex()), namespace=_NAMESPACE)
    return (found or b"").decode(errors="replace")


def _key(actor_id: str) -> str:
    return _PREFIX + actor_id


def _own_id() -> str:
    return str(ray.get_runtime_context().get_actor_id())
