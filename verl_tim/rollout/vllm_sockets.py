"""The sockets over which a trainer sends weights to vLLM, one set for each Ray cluster.

See `verl_tim.plugin.patch_vllm_sockets`.
"""

from __future__ import annotations

import functools
import os
import re
from types import ModuleType
from typing import Any

import ray

JOB_VARIABLE = "VERL_RAY_JOB_ID"
"""Read by verl's part of vLLM's workers (verl 0.9.1, workers/rollout/vllm_rollout/utils.py:425)."""


def own_job_id() -> str:
    """The job's id with the address of its cluster: one on this machine, and the same in all processes of the run."""
    context = ray.get_runtime_context()
    return f"{context.get_job_id()}-{re.sub(r'[^0-9A-Za-z.]+', '-', context.gcs_address)}"


def mark_server(module: ModuleType) -> None:
    """Patch verl's `vllm_async_server`: what its workers inherit names the cluster, too."""
    init_ = module.vLLMHttpServer.__init__

    @functools.wraps(init_)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        init_(self, *args, **kwargs)
        os.environ[JOB_VARIABLE] = own_job_id()

    module.vLLMHttpServer.__init__ = init


def mark_adapter(module: ModuleType) -> None:
    """Patch verl's `vllm_rollout`: the trainer's end of the same sockets."""
    init_ = module.ServerAdapter.__init__

    @functools.wraps(init_)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        init_(self, *args, **kwargs)
        job_id = ray.get_runtime_context().get_job_id()
        marked = self.zmq_handle.replace(f"-{job_id}-", f"-{own_job_id()}-")
        if marked == self.zmq_handle:
            raise RuntimeError(f"{self.zmq_handle} does not name the Ray job {job_id}: another verl than 0.9.1?")
        self.zmq_handle = marked

    module.ServerAdapter.__init__ = init
