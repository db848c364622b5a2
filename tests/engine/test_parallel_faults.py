"""What goes wrong on some rank of a split engine ends in a clear error, and in no process left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.engine import faults
from tests.engine.support import run_all
from tests.engine.tiny_models import hf_model, save
from tests.processes import gone, runs
from verl_tim.engine import (
    AsyncEngine,
    Engine,
    EngineConfig,
    EngineConfigError,
    EngineDeadError,
    SamplingParams,
    start_engine,
)
from verl_tim.engine.crew import Crew, Split

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save("qwen3", tmp_path_factory.mktemp("model"))


def config(folder, **changes) -> EngineConfig:
    return EngineConfig(str(folder), **{"kv_cache_tokens": 1024, "tensor_parallel_size": 2, **changes})


def ends(processes, seconds: float = 15.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    return all(process.poll() is not None for process in processes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4: 4 does not divide .*num_key_value_heads=2: choose 2"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3: .*hidden_size=64.*choose 2 or less"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3: 3 stages for 2 layers: choose 2 or less"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused_before_anything_starts(folder, changes, message):
    began = time.monotonic()
    with pytest.raises(EngineConfigError, match=message):
        start_engine(config(folder, **changes))
    assert time.monotonic() - began < 2


def test_an_engine_of_several_ranks_is_not_made_alone(folder):
    with pytest.raises(EngineConfigError, match="need 2 ranks: make it with start_engine"):
        Engine(config(folder))


def test_an_error_in_a_step_of_a_worker_is_told_with_its_traceback(folder):
    engine = start_engine(config(folder))
    processes = engine._crew.processes
    engine.add("a", [3, 4, 5], LONG)
    engine.step()
    engine.each_rank(faults.raise_in_next_step)
    with pytest.raises(EngineDeadError, match=r"(?s)rank 1 failed:.*in forward.*FloatingPointError: planted"):
        engine.step()
    for call in (engine.step, lambda: engine.add("b", [3]), lambda: engine.update_weights([], 1), engine.abort):
        with pytest.raises(EngineDeadError, match="FloatingPointError: planted"):
            call()
    assert ends(processes)


@pytest.mark.parametrize("changes", [{}, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}], ids=str)
def test_a_worker_that_dies_in_a_step_is_named(folder, changes):
    engine = start_engine(config(folder, **changes))
    processes = engine._crew.processes
    engine.add("a", [3, 4, 5], LONG)
    engine.each_rank(faults.die_in_next_step)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) ended with exit code -9"):
        run_all(engine, audit=False)
    assert time.monotonic() - began < 20
    assert ends(processes)


def test_a_worker_that_dies_between_steps_is_noticed_by_the_next_verb(folder):
    engine = start_engine(config(folder))
    (process,) = engine._crew.processes
    os.kill(process.pid, signal.SIGKILL)
    assert engine._crew.lost(wait=True)
    with pytest.raises(EngineDeadError, match=r"rank 1 .* ended with exit code -9"):
        engine.clear_kv_cache()
    assert ends([process])


def test_ranks_that_disagree_on_an_update_end_the_engine(folder):
    engine = start_engine(config(folder))
    processes = engine._crew.processes
    engine.each_rank(faults.refuse_next_load)
    with pytest.raises(EngineDeadError, match="rank 1 disagrees on a weight update: MemoryError: planted"):
        engine.update_weights(hf_model("qwen3").state_dict().items(), 1)
    assert ends(processes)


def test_a_worker_that_cannot_start_is_told(folder, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "not a number")  # on which the interpreter gives up
    with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) ended with exit code 1"):
        start_engine(config(folder))


def test_an_engine_that_cannot_start_ends_its_workers(folder):
    crew = Crew(Split(2, 1, "cpu"))
    with pytest.raises(EngineConfigError, match="max_model_len=5000 exceeds"):
        start_engine(config(folder, max_model_len=5000), crew=crew)
    assert ends(crew.processes)


def test_close_ends_the_workers_and_so_does_forgetting_the_engine(folder):
    engine = start_engine(config(folder))
    processes = engine._crew.processes
    engine.close()
    engine.close()
    assert all(process.poll() == 0 for process in processes)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        engine.add("a", [3, 4, 5], LONG)
    engine = start_engine(config(folder))
    processes = engine._crew.processes
    del engine
    gc.collect()
    assert ends(processes)


_DRIVER = """
import time
from verl_tim.engine.crew import Crew, Split
print(Crew(Split(2, 1, "cpu")).processes[0].pid, flush=True)
time.sleep(600)
"""


def test_a_worker_ends_with_its_driver():
    """The driver's socket closes when it dies, whatever killed it."""
    with subprocess.Popen([sys.executable, "-c", _DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        worker = int(driver.stdout.readline())
        assert runs(worker)
        driver.kill()
    assert gone(worker, 15)


def test_in_an_async_engine(folder):
    async def run() -> None:
        engine = AsyncEngine(config(folder))
        processes = engine._engine._crew.processes
        output = await engine.generate("a", [3, 4, 5], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(output.token_ids) == 5
        assert (await engine.describe())["tensor_parallel_size"] == 2
        waiting = asyncio.ensure_future(engine.generate("b", [3, 4, 5], LONG))
        await asyncio.sleep(0.05)
        os.kill(processes[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 .* ended with exit code -9"):
            await asyncio.wait_for(waiting, 30)
        with pytest.raises(EngineDeadError):
            engine.check_health()
        engine.shutdown()
        assert ends(processes)

        engine = AsyncEngine(config(folder))
        processes = engine._engine._crew.processes
        engine.shutdown()
        assert all(process.poll() == 0 for process in processes)

    asyncio.run(run())
