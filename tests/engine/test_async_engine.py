"""The engine behind its thread: futures, the gate, updates between steps, and what a failure does to whom."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import pytest
import torch

from tests.engine.deferred_device import DeferredDevice
from tests.engine.fake_model import VOCAB, FakeModel
from tests.engine.support import check_output, fake_engine, random_prompts
from verl_tim.engine import AsyncEngine, EngineDeadError, EngineStateError, RequestError, SamplingParams

LONG = SamplingParams(max_tokens=450, ignore_eos=True)


class GatedModel(FakeModel):
    """Stops inside a forward until told to go on, so that a test can act while a step runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.busy = False

    def forward(self, *args):
        if self.recording:
            return super().forward(*args)
        self.busy = True
        self.inside.set()
        assert self.go_on.wait(10)
        hidden = super().forward(*args)
        self.busy = False
        return hidden

    def load_weights(self, weights) -> None:
        assert not self.busy, "weights changed while a step ran"
        super().load_weights(weights)
        assert not self.busy, "a step began while weights changed"


@pytest.fixture(params=["plain", "ahead"])
def make_engine(request):
    """Engines of both runners: one step at a time, and one launched while the last one runs."""
    made = []

    def make(model=None, **settings) -> AsyncEngine:
        device = DeferredDevice() if request.param == "ahead" else None
        engine = fake_engine(model, device=device, **{"kv_cache_tokens": 4096, **settings})
        made.append(AsyncEngine(engine.config, engine=engine))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()
        assert not engine._thread.is_alive()


def salt(value: int):
    return [("salt", torch.tensor(value))]


async def until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.002)


@pytest.mark.asyncio
async def test_many_requests_at_once(make_engine):
    engine = make_engine(max_num_seqs=8, kv_cache_tokens=256)
    prompts = random_prompts(30, 1, 20, VOCAB)
    params = SamplingParams(max_tokens=12)
    outputs = await asyncio.gather(*(engine.generate(f"r{i}", p, params) for i, p in enumerate(prompts)))
    for index, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        assert output.request_id == f"r{index}"
        check_output(output, prompt, params)
    stats = await engine.stats()
    assert stats.free_pages == stats.total_pages
    assert sum(stats.finished.values()) == 30
    assert (await engine.describe())["numerics"] == "stock"
    assert await engine.weight_checksum() == "0"


@pytest.mark.asyncio
async def test_parameters_may_come_as_a_mapping(make_engine):
    engine = make_engine()
    output = await engine.generate("a", [2, 3], {"temperature": 0, "max_tokens": 5, "logprobs": True})
    check_output(output, [2, 3], SamplingParams(temperature=0, max_tokens=5))


@pytest.mark.asyncio
async def test_a_bad_request_in_a_good_batch_fails_alone(make_engine):
    model = FakeModel()
    model.poison = {13}
    engine = make_engine(model)
    params = SamplingParams(max_tokens=10)
    good = {name: [2, 3, ord(name) % VOCAB] for name in "abcd"}
    tasks = {name: asyncio.ensure_future(engine.generate(name, prompt, params)) for name, prompt in good.items()}
    with pytest.raises(RequestError, match=r"request empty: prompt_ids is empty"):
        await engine.generate("empty", [], params)
    with pytest.raises(RequestError, match="request typo: unknown sampling parameter 'max_token'"):
        await engine.generate("typo", [2], {"max_token": 3})
    with pytest.raises(RequestError, match=r"request huge: .*max_model_len=512"):
        await engine.generate("huge", [2] * 600, params)
    with pytest.raises(RequestError, match=r"request nan: .*logits for position 2 are not finite"):
        await engine.generate("nan", [13, 2], params)
    with pytest.raises(RequestError, match=r"request \[\]"):
        await asyncio.gather(engine.generate("x", [2, 3], params), engine.generate("[]", [[]], params))
    for name, task in tasks.items():
        check_output(await task, good[name], params)
    engine.check_health()


@pytest.mark.asyncio
async def test_a_request_in_flight_keeps_its_id(make_engine):
    engine = make_engine()
    await engine.pause()
    first = asyncio.ensure_future(engine.generate("a", [2], SamplingParams(max_tokens=3)))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="still in flight"):
        await engine.generate("a", [3], LONG)
    await engine.resume()
    check_output(await first, [2], SamplingParams(max_tokens=3))


@pytest.mark.asyncio
@pytest.mark.parametrize("step", [1, 2, 9])
async def test_a_failing_step_fails_every_waiter_at_once_with_its_cause(make_engine, step, caplog):
    model = FakeModel()
    model.fail_at = step
    engine = make_engine(model, max_num_seqs=4)
    tasks = [asyncio.ensure_future(engine.generate(f"r{i}", [2, 3], LONG)) for i in range(10)]
    began = time.monotonic()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1.0)
    assert time.monotonic() - began < 1.0
    for error in results:
        assert isinstance(error, EngineDeadError)
        assert f"FloatingPointError: forward {step} failed" in str(error)
        assert isinstance(error.__cause__, FloatingPointError)
    assert len({id(error) for error in results}) == len(results)
    assert "the engine failed" in caplog.text
    for late in (
        engine.generate("late", [2], LONG),
        engine.stats(),
        engine.pause(),
        engine.update_weights(salt(1), 1),
        engine.abort("r0"),
    ):
        with pytest.raises(EngineDeadError, match=r"forward .* failed"):
            await asyncio.wait_for(late, 1.0)
    with pytest.raises(EngineDeadError):
        engine.check_health()


@pytest.mark.asyncio
async def test_a_failing_step_fails_what_was_sent_while_it_ran(make_engine):
    model = GatedModel()
    model.fail_at = 1
    model.go_on.clear()
    engine = make_engine(model)
    running = asyncio.ensure_future(engine.generate("a", [2], LONG))
    await until(model.inside.is_set)
    sent = [
        asyncio.ensure_future(call)
        for call in (engine.generate("b", [2], LONG), engine.stats(), engine.update_weights(salt(1), 1))
    ]
    await asyncio.sleep(0.01)
    model.go_on.set()
    results = await asyncio.wait_for(asyncio.gather(running, *sent, return_exceptions=True), 1.0)
    assert [type(error) for error in results] == [EngineDeadError] * 4


@pytest.mark.asyncio
async def test_a_fault_of_the_engine_itself_is_fatal_too(make_engine):
    """An accounting fault met by a verb, not by a step: nothing can be trusted any more."""
    engine = make_engine()
    task = asyncio.ensure_future(engine.generate("a", [2], LONG))
    await until(lambda: engine._engine._stats.drawn_tokens > 0)
    await engine.pause()
    slot = int(engine._engine._rows.order[0])
    engine._engine._pool.release(engine._engine._rows.page_SM[slot, :1].copy())  # break the books
    with pytest.raises(EngineDeadError, match="released more often than owned"):
        await engine.abort("a")
    with pytest.raises(EngineDeadError, match="released more often than owned"):
        await asyncio.wait_for(task, 1.0)


@pytest.mark.asyncio
async def test_shutdown_fails_what_waits(make_engine):
    engine = make_engine()
    await engine.pause()
    task = asyncio.ensure_future(engine.generate("a", [2], LONG))
    await asyncio.sleep(0.01)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await asyncio.wait_for(task, 1.0)
    with pytest.raises(EngineDeadError, match="shut down"):
        await engine.generate("b", [2], LONG)


@pytest.mark.asyncio
async def test_shutdown_ends_an_update_whose_sender_has_gone(make_engine):
    engine = make_engine()

    async def stream():
        yield "salt", torch.tensor(1)
        await asyncio.sleep(60)

    task = asyncio.ensure_future(engine.generate("a", [2], SamplingParams(max_tokens=500, ignore_eos=True)))
    await until(lambda: engine._engine._stats.drawn_tokens > 0)
    update = asyncio.ensure_future(engine.update_weights(stream(), 1))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(asyncio.to_thread(engine.shutdown), 5.0)
    with pytest.raises(EngineStateError, match="shut down in the middle"):
        await asyncio.wait_for(update, 1.0)
    with pytest.raises(EngineStateError, match="last weight update failed"):
        await asyncio.wait_for(task, 1.0)


@pytest.mark.asyncio
async def test_abort_hands_back_what_was_drawn(make_engine):
    engine = make_engine()
    task = asyncio.ensure_future(engine.generate("a", [2], SamplingParams(max_tokens=500, ignore_eos=True)))
    await until(lambda: engine._engine._stats.drawn_tokens >= 5)
    assert await engine.abort("a") is True
    output = await task
    assert output.finish_reason == "abort"
    assert 5 <= len(output.token_ids) < 500
    check_output(output, [2], LONG)
    assert await engine.abort("a") is False
    assert await engine.abort("never seen") is False


@pytest.mark.asyncio
async def test_cancelling_a_call_aborts_its_request(make_engine):
    engine = make_engine()
    task = asyncio.ensure_future(engine.generate("a", [2], SamplingParams(max_tokens=500, ignore_eos=True)))
    await until(lambda: engine._engine._stats.drawn_tokens > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The id is free again at once, and the new request is not the one that is aborted.
    output = await engine.generate("a", [3], SamplingParams(max_tokens=4))
    check_output(output, [3], SamplingParams(max_tokens=4))
    stats = await engine.stats()
    assert (stats.num_running, stats.finished["abort"]) == (0, 1)


@pytest.mark.asyncio
async def test_a_late_cancellation_spares_the_next_request_of_that_id(make_engine):
    """The cancelled call's request had ended already when another call took its id."""
    engine = make_engine()
    ended = concurrent.futures.Future()
    task = asyncio.ensure_future(engine.generate("a", [2], LONG))
    await until(lambda: engine._engine._stats.drawn_tokens > 0)
    await engine._call(lambda: engine._abandon("a", ended))
    output = await task
    assert output.finish_reason == "length"


@pytest.mark.asyncio
async def test_the_gate_parks_or_rejects(make_engine):
    engine = make_engine()
    running = [asyncio.ensure_future(engine.generate(f"r{i}", [2], LONG)) for i in range(3)]
    await until(lambda: engine._engine._stats.drawn_tokens > 0)
    assert sorted(await engine.abort_all()) == ["r0", "r1", "r2"]
    assert [(await task).finish_reason for task in running] == ["abort"] * 3

    parked = asyncio.ensure_future(engine.generate("parked", [2], SamplingParams(max_tokens=3)))
    steps = (await engine.stats()).steps
    await asyncio.sleep(0.05)
    assert not parked.done()
    assert (await engine.stats()).steps == steps

    assert await engine.abort_all(reject_new=True) == ["parked"]
    assert (await parked).finish_reason == "abort"
    rejected = await asyncio.wait_for(engine.generate("rejected", [2], LONG), 1.0)
    assert (rejected.finish_reason, rejected.token_ids) == ("abort", [])
    with pytest.raises(RequestError, match="prompt_ids is empty"):
        await engine.generate("bad", [], LONG)

    await engine.resume()  # the matching resume ends the rejecting
    check_output(await engine.generate("open", [2], SamplingParams(max_tokens=3)), [2], SamplingParams(max_tokens=3))
    await engine.pause()
    parked = asyncio.ensure_future(engine.generate("after a pause", [2], SamplingParams(max_tokens=3)))
    await asyncio.sleep(0.02)
    assert not parked.done()
    await engine.abort_all(reject_new=True)
    assert (await parked).finish_reason == "abort"
    await engine.abort_all()  # a plain abort parks again
    parked = asyncio.ensure_future(engine.generate("again", [2], SamplingParams(max_tokens=3)))
    await asyncio.sleep(0.02)
    assert not parked.done()
    await engine.resume()
    check_output(await parked, [2], SamplingParams(max_tokens=3))


@pytest.mark.asyncio
async def test_pause_returns_when_no_step_runs(make_engine):
    model = GatedModel()
    engine = make_engine(model)
    task = asyncio.ensure_future(engine.generate("a", [2], SamplingParams(max_tokens=30, ignore_eos=True)))
    await until(model.inside.is_set)
    model.go_on.clear()
    model.inside.clear()
    await until(model.inside.is_set)
    pause = asyncio.ensure_future(engine.pause())
    await asyncio.sleep(0.03)
    assert not pause.done(), "paused while a step was running"
    model.go_on.set()
    await pause
    forwards = model.forwards
    await asyncio.sleep(0.03)
    assert model.forwards == forwards
    assert not task.done()
    await engine.resume()
    check_output(await task, [2], SamplingParams(max_tokens=30, ignore_eos=True))


@pytest.mark.asyncio
async def test_finish_ends_what_is_there_and_lets_the_others_wait_for_new_weights(make_engine):
    model = GatedModel()
    engine = make_engine(model, max_num_seqs=2)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    before = [asyncio.ensure_future(engine.generate(f"b{i}", [2 + i], params)) for i in range(3)]
    await until(model.inside.is_set)
    finish = asyncio.ensure_future(engine.finish())
    again = asyncio.ensure_future(engine.finish())
    await asyncio.sleep(0.01)
    after = [asyncio.ensure_future(engine.generate(f"a{i}", [2 + i], params)) for i in range(3)]
    wrong = asyncio.ensure_future(engine.generate("b0", [2], params))  # its name is free by then
    unfit = asyncio.ensure_future(engine.generate("unfit", [VOCAB], params))
    gone = asyncio.ensure_future(engine.generate("gone", [2], params))
    await asyncio.sleep(0.01)
    gone.cancel()
    assert not await engine.abort("nobody")
    assert await engine.abort("a2")
    assert (await after[2]).token_ids == []
    await asyncio.wait_for(asyncio.gather(finish, again), 10)
    assert all(task.done() for task in before)
    assert not any(task.done() for task in after[:2])
    with pytest.raises(RequestError, match="unfit"):
        await unfit
    forwards = model.forwards
    await engine.update_weights(salt(1), 1)
    await asyncio.sleep(0.02)
    assert model.forwards == forwards, "a step ran behind the closed gate"
    await engine.resume()
    for version, tasks in ((0, before), (1, [*after[:2], wrong])):
        for task in tasks:
            output = await asyncio.wait_for(task, 10)
            assert set(output.weight_versions) == {version}
            assert len(output.token_ids) == 40
    assert gone.cancelled()
    assert engine._engine.request_ids() == []


@pytest.mark.asyncio
@pytest.mark.parametrize("closed", ["paused", "asleep", "idle"])
async def test_finish_does_not_wait_for_what_cannot_go_on(make_engine, closed):
    engine = make_engine()
    if closed == "paused":
        await engine.pause()
    elif closed == "asleep":
        await engine.sleep(["kv_cache"])
    task = None
    if closed != "idle":
        task = asyncio.ensure_future(engine.generate("a", [2], SamplingParams(max_tokens=4)))
        await asyncio.sleep(0.01)
    await asyncio.wait_for(engine.finish(), 5)
    if closed == "asleep":
        await engine.wake(["kv_cache"])
    await asyncio.sleep(0.02)
    assert task is None or not task.done(), "the gate is closed"
    await engine.resume()
    check_output(
        await (task or engine.generate("a", [2], SamplingParams(max_tokens=4))), [2], SamplingParams(max_tokens=4)
    )


async def parked_behind_finish(make_engine, name: str) -> tuple:
    """(model, engine, request "a" under way, who waits for its end, request `name` that came after)."""
    model = GatedModel()
    engine = make_engine(model)
    running = asyncio.ensure_future(engine.generate("a", [2], LONG))
    await until(model.inside.is_set)
    finish = asyncio.ensure_future(engine.finish())
    await asyncio.sleep(0.01)
    parked = asyncio.ensure_future(engine.generate(name, [3], LONG))
    await asyncio.sleep(0.01)
    return model, engine, running, finish, parked


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", ["abort_all", "resume", "shutdown", "death"])
async def test_whoever_waits_for_the_end_hears_of_another_one(make_engine, ends):
    model, engine, task, finish, parked = await parked_behind_finish(make_engine, "parked")
    assert not finish.done()
    if ends == "abort_all":
        assert sorted(await engine.abort_all()) == ["a", "parked"]
        await finish
        assert {(await task).finish_reason, (await parked).finish_reason} == {"abort"}
        return
    if ends == "resume":
        await engine.resume()
        await finish
        await until(lambda: "parked" in engine._engine.request_ids())
        assert len(await engine.abort_all()) == 2
        return
    if ends == "shutdown":
        await asyncio.to_thread(engine.shutdown)
    else:
        model.fail_at = model.forwards + 2
    for waiting in (finish, task, parked):
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(waiting, 5)


@pytest.mark.asyncio
@pytest.mark.parametrize("before", ["resume", "abort_all", "finish"])
async def test_finish_hears_of_the_end_right_after_another_verb(make_engine, before):
    """Both verbs are sent while a step runs, and come one after the other."""
    model = GatedModel()
    engine = make_engine(model)
    task = asyncio.ensure_future(engine.generate("a", [2], SamplingParams(max_tokens=3, ignore_eos=True)))
    await until(model.inside.is_set)
    model.go_on.clear()
    model.inside.clear()
    await until(lambda: model.inside.is_set() or task.done())
    first = asyncio.ensure_future(getattr(engine, before)())
    second = asyncio.ensure_future(engine.finish())
    await asyncio.sleep(0.01)
    model.go_on.set()
    await asyncio.wait_for(asyncio.gather(first, second), 5)
    await asyncio.wait_for(task, 5)


@pytest.mark.asyncio
async def test_what_is_parked_harms_nobody(make_engine):
    """Odd requests fail alone, as they do outside of `finish`; an error that nobody foresaw, too."""
    model = GatedModel()
    engine = make_engine(model)
    task = asyncio.ensure_future(engine.generate("a", [2], SamplingParams(max_tokens=40, ignore_eos=True)))
    await until(model.inside.is_set)
    finish = asyncio.ensure_future(engine.finish())
    await asyncio.sleep(0.01)
    odd = [asyncio.ensure_future(engine.generate(f"o{i}", [2], p)) for i, p in enumerate([5, {1: 2, "x": 3}])]

    class Unforeseen:
        def __array__(self, *args, **kwargs):
            raise OSError("nobody foresaw this")

    odd.append(asyncio.ensure_future(engine.generate("o2", Unforeseen())))
    good = asyncio.ensure_future(engine.generate("good", [3], SamplingParams(max_tokens=4, ignore_eos=True)))
    await asyncio.wait_for(finish, 10)
    assert len((await task).token_ids) == 40
    for failed, kind in zip(odd, (RequestError, RequestError, OSError), strict=True):
        with pytest.raises(kind):
            await asyncio.wait_for(failed, 5)
    await engine.resume()
    assert len((await asyncio.wait_for(good, 5)).token_ids) == 4


class Watched(dict):
    """Counts how often it is looked through, rather than asked for a key."""

    searches = 0

    def __iter__(self):
        self.searches += 1
        return super().__iter__()

    def keys(self):
        self.searches += 1
        return super().keys()

    def values(self):
        self.searches += 1
        return super().values()

    def items(self):
        self.searches += 1
        return super().items()


@pytest.mark.asyncio
async def test_who_leaves_the_parked_ones_is_not_searched_for(make_engine):
    """Ten thousand that leave at once would hold the engine for as many looks at ten thousand."""
    _, engine, running, finish, parked = await parked_behind_finish(make_engine, "parked")
    others = [asyncio.ensure_future(engine.generate(f"p{i}", [3], LONG)) for i in range(8)]
    leaving = [parked, *others]
    await until(lambda: len(engine._parked) == len(leaving))
    engine._parked = watched = Watched(engine._parked)
    for call in leaving:
        call.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await engine.stats()
    assert engine._parked is watched
    assert len(watched) == watched.searches == 0
    assert all(call.cancelled() for call in leaving)
    assert await engine.abort("a")
    await asyncio.wait_for(asyncio.gather(finish, running), 10)


@pytest.mark.asyncio
async def test_abort_reaches_also_a_parked_request_of_the_same_name(make_engine):
    # its name is free once the first has ended
    _, engine, running, finish, parked = await parked_behind_finish(make_engine, "a")
    assert await engine.abort("a")
    await asyncio.wait_for(finish, 10)
    assert {(await running).finish_reason, (await parked).finish_reason} == {"abort"}


@pytest.mark.asyncio
async def test_abort_all_names_what_was_parked_also_where_it_turns_late_ones_away(make_engine):
    _, engine, running, finish, parked = await parked_behind_finish(make_engine, "parked")
    assert sorted(await engine.abort_all(reject_new=True)) == ["a", "parked"]
    await asyncio.wait_for(finish, 10)
    late = await asyncio.wait_for(engine.generate("late", [3], LONG), 5)
    assert {(await running).finish_reason, (await parked).finish_reason, late.finish_reason} == {"abort"}


@pytest.mark.asyncio
@pytest.mark.parametrize("in_flight", ["finish", "abort"])
async def test_what_ended_before_a_failed_update_is_handed_out(make_engine, in_flight):
    engine = make_engine()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    await engine.pause()
    tasks = [asyncio.ensure_future(engine.generate(str(i), [2 + i], params)) for i in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(KeyError, match="unknown weight pepper"):
        await engine.update_weights([("pepper", torch.tensor(1))], 1, in_flight=in_flight)
    for task in tasks:
        output = await asyncio.wait_for(task, 5)
        want = ("length", 40) if in_flight == "finish" else ("abort", 0)
        assert (output.finish_reason, len(output.token_ids)) == want


@pytest.mark.asyncio
async def test_a_step_that_fails_in_an_update_ends_the_engine_for_all(make_engine):
    model = GatedModel()
    engine = make_engine(model)
    await engine.pause()
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 30)]
    tasks = [asyncio.ensure_future(engine.generate(str(i), [2 + i], each)) for i, each in enumerate(params)]
    await asyncio.sleep(0.01)
    model.fail_at = model.forwards + 10
    with pytest.raises(EngineDeadError):
        await engine.update_weights(salt(1), 1, in_flight="finish")
    for task in tasks:
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, 5)
    with pytest.raises(EngineDeadError):
        engine.check_health()


@pytest.mark.asyncio
async def test_weights_change_only_between_steps_while_requests_run(make_engine):
    model = GatedModel()
    engine = make_engine(model, enable_prefix_cache=True, max_num_seqs=4)
    prompts = random_prompts(12, 4, 12, VOCAB)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    tasks = [asyncio.ensure_future(engine.generate(f"r{i}", p, params)) for i, p in enumerate(prompts)]
    for version in range(1, 9):
        drawn = engine._engine._stats.drawn_tokens
        await until(lambda drawn=drawn: engine._engine._stats.drawn_tokens > drawn + 40)
        await engine.update_weights(salt(version), version)
        assert engine.weight_version == version
    versions = set()
    for task, prompt in zip(tasks, prompts, strict=True):
        output = await task
        check_output(output, prompt, params)
        assert output.weight_versions == sorted(output.weight_versions)
        versions |= set(output.weight_versions)
    assert len(versions) >= 8


@pytest.mark.asyncio
async def test_weights_may_stream_in_asynchronously(make_engine):
    engine = make_engine()

    async def stream():
        await asyncio.sleep(0.01)
        yield "salt", torch.tensor(3)

    await engine.update_weights(stream(), 3)
    output = await engine.generate("a", [2], SamplingParams(max_tokens=4))
    assert set(output.weight_versions) == {3}
    check_output(output, [2], SamplingParams(max_tokens=4))


@pytest.mark.asyncio
async def test_an_update_may_abort_what_is_in_flight(make_engine):
    engine = make_engine()
    await engine.pause()
    task = asyncio.ensure_future(engine.generate("a", [2], LONG))
    await asyncio.sleep(0)
    await engine.update_weights(salt(1), 1, in_flight="abort")
    assert (await task).finish_reason == "abort"


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["model", "stream", "async stream"])
async def test_a_failed_update_tells_everyone_and_can_be_repeated(make_engine, fault):
    engine = make_engine()
    task = asyncio.ensure_future(engine.generate("a", [2], SamplingParams(max_tokens=500, ignore_eos=True)))
    await until(lambda: engine._engine._stats.drawn_tokens > 0)

    def stream():
        yield "salt", torch.tensor(1)
        raise ConnectionError("trainer went away")

    async def async_stream():
        yield "salt", torch.tensor(1)
        raise ConnectionError("trainer went away")

    weights = {"model": [("pepper", torch.tensor(1))], "stream": stream(), "async stream": async_stream()}[fault]
    kind = KeyError if fault == "model" else ConnectionError
    with pytest.raises(kind):
        await engine.update_weights(weights, 1)
    with pytest.raises(EngineStateError, match=f"request a: the last weight update failed .{kind.__name__}") as caught:
        await asyncio.wait_for(task, 1.0)
    assert isinstance(caught.value.__cause__, kind)
    with pytest.raises(EngineStateError, match="last weight update failed"):
        await engine.generate("b", [2], LONG)
    await engine.update_weights(salt(2), 2)
    output = await engine.generate("b", [2], SamplingParams(max_tokens=4))
    check_output(output, [2], SamplingParams(max_tokens=4))


@pytest.mark.asyncio
async def test_wrong_arguments_are_the_callers_alone(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match="tags="):
        await engine.sleep(["kv"])
    with pytest.raises(ValueError, match="tags="):
        await engine.wake("weights")
    with pytest.raises(ValueError, match="in_flight='drop'"):
        await engine.update_weights(salt(1), 1, in_flight="drop")
    output = await engine.generate("a", [2], SamplingParams(max_tokens=4))
    check_output(output, [2], SamplingParams(max_tokens=4))


@pytest.mark.asyncio
async def test_sleep_keeps_requests_and_parks_new_ones(make_engine):
    engine = make_engine()
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    before = asyncio.ensure_future(engine.generate("before", [2, 3], params))
    await until(lambda: engine._engine._stats.drawn_tokens > 5)
    await engine.sleep()
    during = asyncio.ensure_future(engine.generate("during", [4, 5], params))
    await asyncio.sleep(0.03)
    assert not before.done()
    assert not during.done()
    await engine.wake(["weights"])
    await engine.update_weights(salt(5), 5)
    await engine.wake(["kv_cache"])
    check_output(await before, [2, 3], params)
    output = await during
    assert set(output.weight_versions) == {5}
    check_output(output, [4, 5], params)


@pytest.mark.asyncio
async def test_waking_without_weights_is_said_to_those_who_wait(make_engine):
    engine = make_engine()
    await engine.sleep()
    parked = asyncio.ensure_future(engine.generate("a", [2], LONG))
    await asyncio.sleep(0.01)
    await engine.wake()
    with pytest.raises(EngineStateError, match="request a: the weights are released; call update_weights"):
        await asyncio.wait_for(parked, 1.0)
    with pytest.raises(EngineStateError, match="weights are released"):
        await engine.generate("b", [2], LONG)


@pytest.mark.asyncio
async def test_no_weights_at_start(make_engine):
    engine = make_engine(load_weights=False)
    with pytest.raises(EngineStateError, match="load_weights=false"):
        await engine.generate("a", [2], LONG)
    await engine.pause()
    parked = asyncio.ensure_future(engine.generate("a", [2], SamplingParams(max_tokens=3)))
    await engine.update_weights(salt(1), 1)
    await engine.resume()
    check_output(await parked, [2], SamplingParams(max_tokens=3))


def test_callers_may_live_in_several_event_loops(make_engine):
    engine = make_engine()
    outputs = {}

    def call(name: str) -> None:
        outputs[name] = asyncio.run(engine.generate(name, [2, 3], SamplingParams(max_tokens=8)))

    threads = [threading.Thread(target=call, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(outputs) == list("abcd")
    for output in outputs.values():
        check_output(output, [2, 3], SamplingParams(max_tokens=8))


def test_a_caller_whose_loop_has_ended_harms_nobody(make_engine):
    model = GatedModel()
    engine = make_engine(model)

    async def call_and_leave():
        task = asyncio.ensure_future(engine.generate("left", [2], LONG))
        await until(model.inside.is_set)
        del task

    asyncio.run(call_and_leave())
    output = asyncio.run(engine.generate("a", [2], SamplingParams(max_tokens=4)))
    check_output(output, [2], SamplingParams(max_tokens=4))


@pytest.mark.asyncio
async def test_an_idle_engine_does_not_spin(make_engine):
    engine = make_engine()
    await engine.generate("a", [2], SamplingParams(max_tokens=3))
    began = time.process_time()
    await asyncio.sleep(0.3)
    assert time.process_time() - began < 0.1
