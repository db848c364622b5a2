"""The engine behind a thread of its own, for asyncio callers.

One thread owns the engine and is the only one to touch it. Callers send it commands; it runs them between steps, in the
order sent, so no verb ever meets a step halfway: not a weight update, not a sleep, not an abort. Each command and each
request has a future, and every future is resolved exactly once:

    a request ends                 its output
    a request cannot be served     RequestError, to its caller alone
    a weight update fails          the cause to its caller; EngineStateError with that cause to every unfinished request
    a step fails                   EngineDeadError with that cause to every waiter at once, and to every later call
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from verl_tim.engine.config import EngineConfig
from verl_tim.engine.core import RequestOutput, SamplingParams
from verl_tim.engine.engine import Engine, InFlight
from verl_tim.engine.errors import EngineDeadError, EngineStateError
from verl_tim.engine.parallel_engine import start_engine
from verl_tim.engine.stats import EngineStats
from verl_tim.engine.weight_reader import Reader

logger = logging.getLogger(__name__)

T = TypeVar("T")
NamedTensors = Iterable[tuple[str, torch.Tensor]]
AsyncNamedTensors = AsyncIterable[tuple[str, torch.Tensor]]

MEMORY_TAGS = ("weights", "kv_cache")
_STOP_POLL_SECONDS = 0.1


@dataclasses.dataclass
class _Command:
    """``run`` in the stepping thread; it gets the future if it resolves it itself later, else its result does.

    settles: the engine waits for the step in flight before it.
    """

    run: Callable[[concurrent.futures.Future], Any]
    future: concurrent.futures.Future
    deferred: bool = False
    settles: bool = True


@dataclasses.dataclass(frozen=True)
class _Parked:
    """A request that the engine has not seen yet."""

    request_id: str
    prompt_ids: Any
    params: Any
    future: concurrent.futures.Future


class AsyncEngine:
    """An :class:`Engine` in a thread. All coroutines may be called from any event loop, also from several.

    The gate: ``pause``, ``abort_all`` and ``finish`` close it, ``resume`` opens it. Behind a closed gate no step runs;
    requests that arrive are parked, or answered at once as aborted if ``abort_all(reject_new=True)`` closed it. A
    sleeping engine parks them too.

    Args:
        config: settings of the engine, which is made in the calling thread.
        engine: an engine made elsewhere, which nobody else uses from now on.
    """

    def __init__(self, config: EngineConfig, *, engine: Engine | None = None) -> None:
        self.config = config
        self._engine = start_engine(config) if engine is None else engine
        self._condition = threading.Condition()
        self._inbox: deque[_Command] = deque()
        self._ended: BaseException | None = None  # set once, under the condition
        self._stop = False
        # Touched by the stepping thread only.
        self._waiters: dict[str, concurrent.futures.Future] = {}
        self._paused = False
        self._rejecting = False
        self._finishing: list[concurrent.futures.Future] = []  # callers of `finish` that wait
        # Came while others were being finished, in that order; by future, so that any of many may leave at once.
        self._parked: dict[concurrent.futures.Future, _Parked] = {}
        self._asleep: set[str] = set()
        self._turns, self._at_work = 0, False  # read by others, through `turns`
        self._thread = threading.Thread(target=self._loop, name="vexact-step", daemon=True)
        self._thread.start()

    # Requests.

    async def generate(
        self, request_id: str, prompt_ids: Any, params: SamplingParams | Mapping[str, Any] | None = None
    ) -> RequestOutput:
        """Serve one request to its end. Cancelling the call aborts the request.

        Raises:
            RequestError: this request cannot be served; others go on.
            EngineStateError: the engine has no weights.
            EngineDeadError: the engine failed; ``__cause__`` says how.
        """
        future = self._send(
            lambda future: self._admit(request_id, prompt_ids, params, future), deferred=True, settles=False
        )
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._condition:
                if self._ended is None:
                    abandon = _guard(lambda: self._abandon(request_id, future))
                    self._post(_Command(abandon, concurrent.futures.Future()))
            raise

    async def abort(self, request_id: str) -> bool:
        """Abort one request; its caller gets what it drew. False if it is not in flight."""

        def run() -> bool:
            ended = self._resolve(self._engine.abort(request_id))
            # only now: a parked one may have the name of one that was in flight
            self._let_in(lambda parked: parked.request_id == request_id)
            return bool(ended + self._resolve(self._engine.abort(request_id)))

        return await self._call(run)

    async def abort_all(self, *, reject_new: bool = False) -> list[str]:
        """Close the gate and abort every unfinished request; their callers get what they drew.

        Args:
            reject_new: answer requests that arrive before :meth:`resume` at once as aborted, instead of parking them.

        Returns:
            The ids of the aborted requests.
        """

        def run() -> list[str]:
            self._paused, self._rejecting = True, False
            self._wait_no_more()
            self._rejecting = reject_new
            return self._resolve(self._engine.abort())

        return await self._call(run)

    async def pause(self) -> None:
        """Close the gate. When this returns no step is running; unfinished requests wait."""

        def run() -> None:
            self._paused = True

        await self._call(run)

    async def finish(self) -> None:
        """Close the gate behind the unfinished requests: when this returns they have ended, and no step is running.

        Where no step can run (the gate is closed, the engine asleep or without weights) they wait, as by :meth:`pause`.
        """

        def run(future: concurrent.futures.Future) -> None:
            self._finishing.append(future)  # the list of that moment: each end makes a new one

        await asyncio.wrap_future(self._send(run, deferred=True, settles=False))

    async def resume(self) -> None:
        """Open the gate."""

        def run() -> None:
            self._paused = self._rejecting = False
            self._wait_no_more()
            self._fail_the_stuck()

        await self._call(run)

    # Weights and memory.

    async def update_weights(
        self,
        weights: NamedTensors | AsyncNamedTensors,
        version: int,
        *,
        in_flight: InFlight = "keep",
        reader: Reader | None = None,
    ) -> None:
        """Load new weights between two steps; see :meth:`Engine.update_weights`.

        Args:
            weights: (Hugging Face name, tensor) pairs; an asynchronous stream is pulled from the calling event loop.
            in_flight: "finish" makes its steps within this call, behind a closed gate, too, and every other call waits
                for them; :meth:`finish` before the update does not hold up the others.
            reader: of a split engine's `weight_stream.LocalTensors` among them.

        Raises:
            Whatever the stream or the model raises. Unfinished requests then fail with that cause, and the engine
            serves nothing until an update succeeds.
        """
        if isinstance(weights, AsyncIterable):
            weights = _pull(weights, asyncio.get_running_loop(), self._go_on)
        stream: NamedTensors = weights

        def run() -> None:
            try:
                self._resolve(self._engine.update_weights(stream, version, in_flight=in_flight, reader=reader))
            except Exception as error:
                try:
                    self._resolve(self._engine.drain())  # what had ended before
                except EngineDeadError:  # a step of "finish" failed, or a rank is lost
                    raise _Fatal(error) from error
                if self._engine.no_weights is not None:
                    self._fail_waiters(error)
                raise

        await self._call(run, own_errors=True)

    async def sleep(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Free memory: "weights", "kv_cache" or both. Unfinished requests are kept and recomputed after waking."""
        self._check_tags(tags)

        def run() -> None:
            if "kv_cache" in tags:
                self._engine.release_kv_cache()
            if "weights" in tags:
                self._engine.release_weights()
            self._asleep.update(tags)

        await self._call(run)

    async def wake(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Undo :meth:`sleep`. Released weights come back with the next :meth:`update_weights`, not by waking."""
        self._check_tags(tags)

        def run() -> None:
            if "kv_cache" in tags:
                self._engine.resume_kv_cache()
            self._asleep.difference_update(tags)
            self._fail_the_stuck()

        await self._call(run)

    async def clear_kv_cache(self) -> None:
        """Empty the prefix cache; running requests are recomputed."""
        await self._call(self._engine.clear_kv_cache)

    # Reports.

    async def stats(self, *, begin_marks: bool = False) -> EngineStats:
        """A copy.

        Args:
            begin_marks: what comes later is marked anew.
        """

        def read() -> EngineStats:
            stats = self._engine.stats()
            copy = dataclasses.replace(stats, finished=dict(stats.finished))
            if begin_marks:
                stats.begin_marks()
            return copy

        return await self._call(read, settles=False)

    async def describe(self) -> dict[str, Any]:
        return await self._call(self._engine.describe, settles=False)

    async def each_rank(self, function: Callable[[Engine], T]) -> list[T]:
        """As `Engine.each_rank`."""
        return await self._call(lambda: self._engine.each_rank(function))

    async def weight_checksum(self) -> str:
        return await self._call(self._engine.weight_checksum)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """As `Engine.moe_layers`."""
        return self._engine.moe_layers

    @property
    def weight_version(self) -> int:
        """Version of the weights in use."""
        return self._engine.weight_version

    @property
    def is_open(self) -> bool:
        """Whether what comes now is served without waiting for a call that opens the gate, or wakes the engine."""
        return not (self._paused or self._finishing or self._asleep)

    @property
    def turns(self) -> int | None:
        """Grows with each step and each call that the stepping thread has done, and while that waits for a caller's
        weights; None while it has nothing to do. One that stands still is of an engine that hangs."""
        return self._turns if self._at_work else None

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine has ended."""
        with self._condition:
            if self._ended is not None:
                raise self._dead()

    def end_ranks(self) -> None:
        """As `Engine.end_ranks`, for an engine that hangs."""
        self._engine.end_ranks()

    def shutdown(self) -> None:
        """End the thread after the step it is in, and the engine; unfinished requests fail with EngineDeadError.

        Idempotent.
        """
        with self._condition:
            self._stop = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # Callers' side of the inbox.

    def _send(
        self, run: Callable[[concurrent.futures.Future], Any], *, deferred: bool, settles: bool
    ) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._condition:
            if self._ended is not None:
                raise self._dead()
            self._post(_Command(run, future, deferred, settles))
        return future

    def _post(self, command: _Command) -> None:
        self._inbox.append(command)
        self._condition.notify()

    async def _call(self, run: Callable[[], T], *, own_errors: bool = False, settles: bool = True) -> T:
        """Run a verb in the stepping thread. With ``own_errors`` whatever it raises is the caller's alone."""
        guarded = (lambda _: run()) if own_errors else _guard(run)
        return await asyncio.wrap_future(self._send(guarded, deferred=False, settles=settles))

    @staticmethod
    def _check_tags(tags: Sequence[str]) -> None:
        unknown = set(tags) - set(MEMORY_TAGS)
        if unknown or isinstance(tags, str):
            raise ValueError(f"tags={tags!r}: expected a list of {', '.join(MEMORY_TAGS)}")

    # The stepping thread.

    def _loop(self) -> None:
        try:
            while True:
                with self._condition:
                    while not (self._stop or self._inbox or self._can_step()):
                        self._at_work = False
                        self._condition.wait()
                    self._at_work = True
                    if self._stop:
                        raise _Stopped("the engine was shut down")
                while self._inbox:
                    if self._inbox[0].settles:
                        self._resolve(self._engine.drain())
                    self._run(self._inbox.popleft())
                    self._turns += 1
                if self._can_step():
                    self._resolve(self._engine.step())
                    self._turns += 1
                if self._finishing and not self._can_step():
                    self._close_behind()
        except _Stopped as stopped:
            self._end(stopped)
        except _Fatal as fatal:
            self._end(fatal.error)
        except BaseException as error:
            self._end(error)
        finally:
            self._at_work = False

    def _go_on(self) -> bool:
        """Asked before each tensor of a caller's, and while one is waited for."""
        self._turns += 1
        return not self._stop

    def _can_step(self) -> bool:
        engine = self._engine
        return not self._paused and engine.has_work() and engine.has_kv_cache and engine.no_weights is None

    def _run(self, command: _Command) -> None:
        future = command.future
        if not future.set_running_or_notify_cancel():  # cancelled before it ran
            return
        try:
            result = command.run(future)
        except _Fatal as fatal:
            future.set_exception(_dead_error(fatal.error))
            raise
        except Exception as error:
            future.set_exception(error)
        else:
            if not command.deferred:
                future.set_result(result)

    def _admit(self, request_id: str, prompt_ids: Any, params: Any, future: concurrent.futures.Future) -> None:
        parked = _Parked(request_id, prompt_ids, params, future)
        if self._finishing:
            self._parked[future] = parked
        else:
            self._enter(parked)

    def _enter(self, request: _Parked) -> None:
        request_id, reason = request.request_id, self._engine.no_weights
        if reason is not None and not (self._asleep or self._paused):
            raise EngineStateError(f"request {request_id}: {reason}")
        self._engine.add(request_id, request.prompt_ids, request.params)  # checks it, also where it is then turned away
        self._waiters[request_id] = request.future
        if self._rejecting:
            self._resolve(self._engine.abort(request_id))

    def _close_behind(self) -> None:
        self._paused = True
        self._resolve(self._engine.drain())
        self._wait_no_more()

    def _wait_no_more(self) -> None:
        """Whoever waits in `finish` goes on, and what was parked meanwhile enters; behind a closed gate it waits."""
        finishing, self._finishing = self._finishing, []
        self._let_in(lambda _: True)
        for future in finishing:
            future.set_result(None)

    def _let_in(self, chosen: Callable[[_Parked], bool]) -> None:
        for each in [parked for parked in self._parked.values() if chosen(parked)]:
            del self._parked[each.future]
            try:
                self._enter(each)
            except Exception as error:  # its caller's alone, as in `_run`
                each.future.set_exception(error)

    def _abandon(self, request_id: str, future: concurrent.futures.Future) -> None:
        self._parked.pop(future, None)
        if self._waiters.get(request_id) is future:
            self._resolve(self._engine.abort(request_id))

    def _resolve(self, outputs: list[RequestOutput]) -> list[str]:
        for output in outputs:
            future = self._waiters.pop(output.request_id)
            if output.error is not None:
                future.set_exception(output.error)
            else:
                future.set_result(output)
        return [output.request_id for output in outputs]

    def _fail_the_stuck(self) -> None:
        """Open gate, awake, and yet no weights: nobody will move what waits, so say so."""
        if self._engine.no_weights is not None and not (self._asleep or self._paused):
            self._fail_waiters(None)

    def _fail_waiters(self, cause: BaseException | None) -> None:
        reason = self._engine.no_weights
        self._engine.abort()
        waiters, self._waiters = self._waiters, {}
        for request_id, future in waiters.items():
            error = EngineStateError(f"request {request_id}: {reason}")
            error.__cause__ = cause
            future.set_exception(error)

    def _end(self, error: BaseException) -> None:
        if isinstance(error, _Stopped):
            logger.info("engine shut down with %d unfinished requests", len(self._waiters))
        else:
            logger.critical("the engine failed; %d requests fail with it", len(self._waiters), exc_info=error)
        with self._condition:
            self._ended = error
            pending = [command.future for command in self._inbox if command.future.set_running_or_notify_cancel()]
            self._inbox.clear()
        waiters, self._waiters = self._waiters, {}
        parked, self._parked = self._parked, {}
        finishing, self._finishing = self._finishing, []
        for future in (*waiters.values(), *parked, *finishing, *pending):
            future.set_exception(self._dead())
        self._engine.close()

    def _dead(self) -> EngineDeadError:
        assert self._ended is not None
        return _dead_error(self._ended)


class _Stopped(Exception):
    """Ends the loop on request."""


class _Fatal(Exception):
    """Wraps an error that ends the engine."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _guard(run: Callable[[], T]) -> Callable[[concurrent.futures.Future], T]:
    """A verb whose unexpected errors end the engine, since its state can then no longer be trusted.

    EngineStateError and ValueError (of which RequestError is one) say that a caller asked for what cannot be; they are
    raised before anything changes, and go to that caller.
    """

    def guarded(_: concurrent.futures.Future) -> T:
        try:
            return run()
        except (EngineStateError, ValueError):
            raise
        except Exception as error:
            raise _Fatal(error) from error

    return guarded


def _dead_error(cause: BaseException) -> EngineDeadError:
    """A new exception for each waiter: one object raised in many tasks would mix their tracebacks."""
    if isinstance(cause, _Stopped):
        return EngineDeadError(str(cause))
    error = EngineDeadError(f"the engine failed and serves no more: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _pull(
    stream: AsyncNamedTensors, loop: asyncio.AbstractEventLoop, go_on: Callable[[], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over an asynchronous stream of ``loop`` from another thread, one item in flight at a time."""
    iterator = stream.__aiter__()
    end: Any = object()

    async def pull() -> Any:
        try:
            return await iterator.__anext__()
        except StopAsyncIteration:
            return end

    while True:
        future = asyncio.run_coroutine_threadsafe(pull(), loop)
        while (goes_on := go_on()) and not concurrent.futures.wait([future], timeout=_STOP_POLL_SECONDS).done:
            pass
        if not goes_on:
            future.cancel()
            raise EngineStateError("the engine was shut down in the middle of a weight update")
        item = future.result()
        if item is end:
            return
        yield item
