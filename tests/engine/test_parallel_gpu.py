"""A split engine on several GPUs: recorded steps that hold NCCL collectives, and the bits of one GPU."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch

from tests.engine import faults, link_watch
from tests.engine.support import kept_crews
from tests.engine.test_graph_runner_gpu import PROMPTS, bits, params
from verl_tim.engine import Engine, EngineConfig, EngineDeadError, start_engine
from verl_tim.models.weights import checkpoint_weights
from verl_tim.tasks.random_model import save_random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or more"),
]

SPLITS = {"tp2": (2, 1), "pp2": (1, 2), "tp4": (4, 1), "tp2pp2": (2, 2)}
SHAPES = ["qwen3-0.6b", "qwen3-30b-a3b"]


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    save_random_model(request.param, folder, layers=3, device="cuda")
    return folder


def settings(folder, **changes) -> EngineConfig:
    values = {"kv_cache_tokens": 16384, "max_num_seqs": 40, "max_model_len": 1024, "device": "cuda:0", **changes}
    return EngineConfig(str(folder), **values)


def run(engine: Engine) -> dict[str, tuple]:
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, params(index))
    outputs = {}
    while engine.has_work():
        outputs |= {output.request_id: bits(output) for output in engine.step()}
    return outputs


@pytest.fixture(scope="module")
def reference(folder):
    engine = Engine(settings(folder))
    outputs, checksum = run(engine), engine.weight_checksum()
    engine.close()  # its graphs would wait for the garbage collector, anywhere in the tests that follow
    log_probs = np.concatenate([np.array(o[1], np.int32).view(np.float32) for o in outputs.values()])
    assert np.isfinite(log_probs).all()
    assert log_probs.std() > 0.5, "the logits are meant to be peaked"
    return outputs, checksum


def whole(outputs: dict[str, tuple], name: str) -> dict[str, tuple]:
    """What every rank of this split can tell: pipeline stages give out no routes."""
    return {key: bits[:3] if "pp" in name else bits for key, bits in outputs.items()}


def split_of(name: str) -> dict[str, int]:
    tensor, stages = SPLITS[name]
    if torch.cuda.device_count() < tensor * stages:
        pytest.skip(f"{name} needs {tensor * stages} GPUs")
    return {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}


@pytest.fixture(scope="module")
def crews():
    """Crews by the name of their split."""
    with kept_crews("cuda:0") as of:
        yield lambda name: of(*SPLITS[name])


def check(engine: Engine, want: dict[str, tuple], name: str) -> None:
    """Draw all; a difference is told with the plan, the link and the rank that it comes from."""
    engine.each_rank(link_watch.begin)
    wanted = whole(want, name)
    got = whole(run(engine), name)
    if got != wanted:
        lens = {str(index): len(prompt) for index, prompt in enumerate(PROMPTS)}
        account = link_watch.account(engine, got, wanted, lens, lambda: whole(run(engine), name))
        pytest.fail(f"{name} differs from one GPU\n{account}")
    engine.each_rank(link_watch.end)


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 61, "enable_prefix_cache": True}],
    ids=["recorded", "eager", "chunks"],
)
def test_no_split_changes_a_bit(folder, reference, crews, name, changes):
    outputs, checksum = reference
    split = split_of(name)
    crew = crews(name)
    with link_watch.told(crew):
        engine = start_engine(settings(folder, **split, **changes), crew=crew)
        try:
            assert bool(engine.describe()["decode_graphs"]) == ("enforce_eager" not in changes)
            check(engine, outputs, name)
            assert engine.weight_checksum() == checksum
        finally:
            engine.close()


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_updates_sleep_and_the_share_of_memory(folder, reference, crews, name):
    outputs, checksum = reference
    memory = {"kv_cache_tokens": None, "gpu_memory_utilization": 0.2}
    crew = crews(name)
    with link_watch.told(crew):
        engine = start_engine(settings(folder, **split_of(name), **memory), crew=crew)
        try:
            assert len(set(engine.each_rank(faults.pages))) == 1
            check(engine, outputs, name)
            engine.update_weights(((n, torch.zeros_like(t)) for n, t in checkpoint_weights(folder)), 1)
            assert engine.weight_checksum() != checksum
            engine.update_weights(checkpoint_weights(folder), 2)
            check(engine, outputs, name)
            engine.release_kv_cache()
            engine.release_weights()
            engine.resume_kv_cache()
            engine.update_weights(checkpoint_weights(folder), 3)
            assert engine.weight_checksum() == checksum
            check(engine, outputs, name)
        finally:
            engine.close()


def test_a_worker_that_dies_does_not_leave_the_driver_waiting(folder):
    """NCCL notices nothing by itself: the exchange is aborted when the worker's socket closes."""
    engine = start_engine(settings(folder, **split_of("tp2")))
    for index, prompt in enumerate(PROMPTS[:8]):
        engine.add(str(index), prompt, params(index))
    engine.step()
    os.kill(engine._crew.processes[0].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 .* ended with exit code -9"):  # noqa: PT012
        while engine.has_work():
            engine.step()
    assert time.monotonic() - began < 60
