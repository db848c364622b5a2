"""VeXact: a rollout engine whose log-probs equal the trainer's bit for bit. Knows tensors and models, not verl.

A request's life: `add` (engine.py) makes a Request (core.py); the Scheduler (scheduler.py) moves it into a row
(rows.py) and gives it KV pages (kv_cache.py); the ModelRunner (runner.py) builds the step's batch, runs the model and
draws (sampler.py); the Scheduler books what was drawn; the request ends as a RequestOutput.

On several ranks `start_engine` (parallel_engine.py) starts workers (crew.py, worker.py), which run the same engine over
the same verbs; what they exchange is in parallel.py, and how a pipeline's stages keep time in stages.py.
"""

from verl_tim.engine.async_engine import AsyncEngine
from verl_tim.engine.config import EngineConfig
from verl_tim.engine.core import Request, RequestOutput, SamplingParams
from verl_tim.engine.engine import Engine
from verl_tim.engine.errors import EngineConfigError, EngineDeadError, EngineStateError, RequestError
from verl_tim.engine.parallel_engine import start_engine
from verl_tim.engine.stats import EngineStats

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "EngineConfigError",
    "EngineDeadError",
    "EngineStateError",
    "EngineStats",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "start_engine",
]
