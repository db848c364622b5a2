"""What goes wrong on a GPU: memory that runs out in a step, weights that are not finite, an error of the device."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from tests.engine.support import random_prompts
from verl_tim.engine import Engine, EngineConfig, EngineDeadError, SamplingParams
from verl_tim.models.weights import checkpoint_weights
from verl_tim.tasks.random_model import save_random_model

pytestmark = pytest.mark.gpu

PROMPTS = random_prompts(8, 200, 400, 151936, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_model("qwen3-0.6b", tmp_path_factory.mktemp("model") / "model", layers=2, device="cuda")


def make(folder, **settings) -> Engine:
    return Engine(EngineConfig(str(folder), device="cuda:0", kv_cache_tokens=8192, max_num_seqs=8, **settings))


def all_that_is_free() -> list[torch.Tensor]:
    """The device's memory to the last block, also what PyTorch keeps for later."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held, size = [], torch.cuda.mem_get_info()[0]
    while size >= 512:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


def drawn(engine: Engine) -> dict:
    """Name -> (finish reason, tokens, log-probs) of the prompts."""
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, SamplingParams(max_tokens=8, seed=index, ignore_eos=True))
    return to_the_end(engine)


def to_the_end(engine: Engine) -> dict:
    outputs = {}
    while engine.has_work():
        outputs |= {
            output.request_id: (output.finish_reason, output.token_ids, output.log_probs) for output in engine.step()
        }
    return outputs


def test_memory_that_runs_out_in_a_step_is_named_and_comes_back_with_the_engines_end(folder):
    engine = make(folder, enforce_eager=True)
    want = drawn(engine)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, SamplingParams(max_tokens=8, seed=index, ignore_eos=True))
    hog = all_that_is_free()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            to_the_end(engine)
        with pytest.raises(EngineDeadError, match="OutOfMemoryError"):
            engine.step()
        held = torch.cuda.memory_allocated()
        engine.close()
        assert torch.cuda.memory_allocated() < held - (8192 * 2 * 2 * 8 * 128 * 2) // 2, (
            "its keys and values are still there"
        )
    finally:
        hog.clear()  # the next test wants a device, too
        torch.cuda.empty_cache()
    assert drawn(make(folder)) == want


def test_weights_that_are_not_finite_end_the_requests_and_nothing_of_them_stays(folder):
    engine = make(folder, enable_prefix_cache=True)
    want = drawn(engine)
    good = list(checkpoint_weights(str(folder)))
    engine.update_weights([(name, weight * float("nan")) for name, weight in good], 1)
    assert {reason for reason, _, _ in drawn(engine).values()} == {"error"}
    engine.update_weights(good, 2)
    assert drawn(engine) == want
    engine.close()


def test_an_error_of_the_device_ends_the_engine_by_name(folder):
    """In a process of its own, which can use the device no more."""
    script = f"""
        import torch
        from verl_tim.engine import Engine, EngineConfig, EngineDeadError, SamplingParams

        engine = Engine(EngineConfig({str(folder)!r}, device="cuda:0", kv_cache_tokens=4096, max_num_seqs=8))
        engine.add("a", [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
        engine.step()
        torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]  # out of bounds: an assertion on the device
        try:
            while engine.has_work():
                engine.step()
        except EngineDeadError:
            raise
        except Exception as error:
            print("died of", type(error).__name__, flush=True)
        try:
            engine.step()
        except EngineDeadError as error:
            print("dead:", str(error)[:300], flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240)
    assert "died of" in done.stdout, done.stderr[-2000:]
    assert "dead: a step failed before: " in done.stdout
    assert "CUDA error" in done.stdout
