"""The end of an engine: what it held of the device is given back at once, and it says so to whoever comes later."""

from __future__ import annotations

import pytest

from tests.engine.deferred_device import DeferredDevice
from tests.engine.fake_model import VOCAB, FakeModel
from tests.engine.support import fake_engine, random_prompts
from tests.engine.tiny_models import save
from verl_tim.engine import Engine, EngineConfig, EngineDeadError, SamplingParams
from verl_tim.engine.graph_runner import GraphRunner

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("device", [None, DeferredDevice], ids=["plain", "graphs"])
def test_weights_pages_and_graphs_are_given_back_with_a_step_in_flight(tmp_path, device):
    folder = save("qwen3", tmp_path / "model")
    config = EngineConfig(model_path=str(folder), dtype="float32", kv_cache_tokens=256)
    engine = Engine(config, device=None if device is None else device())
    engine.add("a", [3, 4, 5], LONG)
    for _ in range(3):
        engine.step()
    assert engine.model.nbytes > 0
    engine.close()
    engine.close()
    assert not engine.has_kv_cache
    assert engine.model.nbytes == 0
    runner = engine._runner
    assert not (isinstance(runner, GraphRunner) and runner.recorded_graphs)
    assert engine.describe()["numerics"] == "contract"
    for verb in (
        engine.step,
        engine.drain,
        engine.abort,
        lambda: engine.add("b", [1], LONG),
        lambda: engine.update_weights([], 1),
    ):
        with pytest.raises(EngineDeadError, match="the engine was closed; make a new engine"):
            verb()


def test_a_model_that_was_made_elsewhere_keeps_its_weights():
    model = FakeModel()
    engine = fake_engine(model)
    engine.close()
    again = fake_engine(model)
    again.add("a", random_prompts(1, 4, 8, VOCAB)[0], LONG)
    assert again.step() == []


class BrokenDevice(DeferredDevice):
    broken = False

    def forget_captures(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        super().forget_captures()


def test_a_device_that_frees_nothing_more_is_raised_of_the_living_and_logged_of_the_dead(tmp_path, caplog):
    folder = save("qwen3", tmp_path / "model")
    config = EngineConfig(model_path=str(folder), dtype="float32", kv_cache_tokens=256)
    alive, dead = (Engine(config, device=BrokenDevice()) for _ in range(2))
    dead._failure = RuntimeError("CUDA error")
    for engine in (alive, dead):
        engine._graph_runner._device.broken = True
    with pytest.raises(RuntimeError, match="device-side assert"):
        alive.close()
    dead.close()
    assert "a dead engine could not give its memory back" in caplog.text


def test_what_killed_the_engine_is_still_named_when_it_is_closed():
    class Broken(FakeModel):
        def forward(self, *args, **kwargs):
            raise FloatingPointError("broken")

    engine = fake_engine(Broken())
    engine.add("a", [1, 2], LONG)
    with pytest.raises(FloatingPointError):
        engine.step()
    engine.close()
    assert not engine.has_kv_cache
    with pytest.raises(EngineDeadError, match="a step failed before: FloatingPointError: broken"):
        engine.step()
