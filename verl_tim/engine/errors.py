"""Errors of the engine: one request's fault, a wrong setting, or the end of the engine."""

from __future__ import annotations


class EngineConfigError(ValueError):
    """A setting of :class:`~verl_tim.engine.config.EngineConfig` is wrong; the message names the key and the remedy."""


class RequestError(ValueError):
    """One request cannot be served; it fails alone, the engine and every other request go on."""


class EngineStateError(RuntimeError):
    """A verb was called in a state that does not allow it (no weights, KV cache released); the engine goes on."""


class EngineDeadError(RuntimeError):
    """The engine failed or was shut down; it serves nothing any more. ``__cause__`` is the exception that ended it."""
