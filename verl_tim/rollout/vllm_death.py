"""The end of vLLM's engine, which is a process of its own under verl's server (`verl_tim.plugin.patch_vllm_death`).

Written against vLLM 0.24 and 0.28 (v1/engine/core_client.py, v1/engine/utils.py: `CoreEngineProcManager`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import signal
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from verl_tim.rollout.end import end_process

logger = logging.getLogger(__name__)

# Signals by which the kernel or somebody ends a process; vLLM itself ends its own with SIGTERM, after an error.
_KILLED = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL)


class EngineEnded(RuntimeError):
    """vLLM's engine stopped by an error of its own, which it printed."""


def killed(exit_codes: Mapping[str, int]) -> str | None:
    """Which process was killed, and how; None: none was.

    Args:
        exit_codes: of the engine's processes that are at their end, as `multiprocessing` has them.
    """
    for name, code in sorted(exit_codes.items()):
        if -code in _KILLED:
            return f"{name} was ended by {signal.Signals(-code).name}"
    return None


def end_with_the_engine(module: ModuleType, dead_error: type[Exception]) -> None:
    """Patch verl's `vllm_async_server`.

    Args:
        dead_error: vLLM's `EngineDeadError`.
    """
    server = module.vLLMHttpServer
    for name, method in list(vars(server).items()):
        if inspect.iscoroutinefunction(method):  # a killed engine shows at whatever is asked of it next
            setattr(server, name, _ending(method, dead_error))


def _ending(method: Any, dead_error: type[Exception]) -> Any:
    @functools.wraps(method)
    async def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        except dead_error:
            how = killed(_exit_codes(self))
            if how is not None:
                logger.error("vLLM's engine is gone (%s), and its server (pid %s) ends with it", how, os.getpid())
                end_process()
            # vLLM raises one object for all requests, and its traceback grows with each of them
            raise EngineEnded(
                "vLLM's engine ended by an error of its own: train.log has it above, in the first lines with ERROR "
                "that begin with (EngineCore or (Worker"
            ) from None

    return asked


def _exit_codes(server: Any) -> dict[str, int]:
    """Of the engine's processes on this node; empty where there is no engine, or its processes are actors of Ray."""
    engine = getattr(server, "engine", None)
    manager: Any = None if engine is None else engine.engine_core.resources.engine_manager
    return manager.finished_procs() if hasattr(manager, "finished_procs") else {}
