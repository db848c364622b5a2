"""A server of verl's ends with its killed vLLM engine; of one that failed by itself each request says so shortly."""

from __future__ import annotations

import signal
import traceback
from types import SimpleNamespace

import pytest

from verl_tim.rollout import vllm_death
from verl_tim.rollout.end import EXIT_CODE
from verl_tim.rollout.vllm_death import EngineEnded, end_with_the_engine, killed


class DeadError(Exception):
    pass


class Left(BaseException):
    """Instead of the process's end."""


ONE = DeadError("see above")  # vLLM's output handler puts one object into every request's queue


@pytest.fixture
def server(monkeypatch):
    def leave(code):
        raise Left(code)

    monkeypatch.setattr(vllm_death.os, "_exit", leave)

    class VLLMHttpServer:
        def __init__(self, manager):
            self.engine = SimpleNamespace(
                engine_core=SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
            )

        async def generate(self, answer):
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def sleep(self):
            raise ONE

    module = SimpleNamespace(vLLMHttpServer=VLLMHttpServer)
    end_with_the_engine(module, DeadError)
    return lambda **codes: module.vLLMHttpServer(SimpleNamespace(finished_procs=lambda: codes))


def test_only_a_signal_that_nobody_asked_for_is_a_kill():
    assert killed({"EngineCore": -signal.SIGKILL}) == "EngineCore was ended by SIGKILL"
    assert killed({"a": 0, "b": -signal.SIGSEGV}) == "b was ended by SIGSEGV"
    for code in (0, 1, -signal.SIGTERM, -signal.SIGINT):
        assert killed({"EngineCore": code}) is None
    assert killed({}) is None


@pytest.mark.asyncio
async def test_the_server_ends_with_a_killed_engine(server, caplog):
    with pytest.raises(Left, match=str(EXIT_CODE)):
        await server(EngineCore=-signal.SIGKILL).generate(ONE)
    assert "EngineCore was ended by SIGKILL" in caplog.text


@pytest.mark.asyncio
async def test_it_ends_whatever_is_asked_of_it_next(server):
    """Killed while the trainer works, the engine is missed when it shall sleep, or get weights."""
    with pytest.raises(Left):
        await server(EngineCore=-signal.SIGKILL).sleep()
    with pytest.raises(EngineEnded):
        await server(EngineCore=1).sleep()
    made = server()
    del made.engine  # on the other nodes of a replica
    with pytest.raises(EngineEnded):
        await made.sleep()


@pytest.mark.asyncio
@pytest.mark.parametrize("codes", [{}, {"EngineCore": 1}, {"EngineCore": -signal.SIGTERM}])
async def test_an_engine_that_failed_gives_every_request_a_short_error(server, codes):
    lengths = set()
    for _ in range(5):
        with pytest.raises(EngineEnded, match=r"begin with \(EngineCore") as raised:
            await server(**codes).generate(ONE)
        lengths.add(len("".join(traceback.format_exception(raised.value))))
    assert len(lengths) == 1, "it grows"
    assert max(lengths) < 5000


@pytest.mark.asyncio
async def test_where_the_engine_is_an_actor_of_ray_nothing_is_known_of_its_process(server):
    made = server()
    made.engine.engine_core.resources.engine_manager = None
    with pytest.raises(EngineEnded):
        await made.generate(ONE)


@pytest.mark.asyncio
async def test_everything_else_is_left_alone(server):
    assert await server().generate("tokens") == "tokens"
    with pytest.raises(ValueError, match="no room"):
        await server().generate(ValueError("no room"))
