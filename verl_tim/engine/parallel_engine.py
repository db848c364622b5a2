"""The driver of a split engine: an `Engine` whose verbs the other ranks run too.

    engine = start_engine(EngineConfig(model_path, tensor_parallel_size=2, pipeline_parallel_size=2))
    ...  # as any Engine
    engine.close()

A verb is checked here, told to all workers, and run here; they run it in the same order. What is drawn is known to all
ranks within the step, so that all schedulers decide alike and the driver's outputs are everyone's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from verl_tim.engine.config import EngineConfig
from verl_tim.engine.core import RequestOutput, SamplingParams
from verl_tim.engine.crew import Crew, Split
from verl_tim.engine.device import Device
from verl_tim.engine.engine import Engine, InFlight
from verl_tim.engine.errors import EngineConfigError, EngineDeadError, EngineStateError
from verl_tim.engine.weight_reader import Reader
from verl_tim.engine.weight_stream import SentWeights
from verl_tim.models import load_model_config
from verl_tim.models.place import misfits
from verl_tim.models.weights import checksum_of

T = TypeVar("T")


def start_engine(
    config: EngineConfig, *, device: Callable[[], Device] | None = None, crew: Crew | None = None
) -> Engine:
    """An engine on as many ranks as the config says; `Engine(config)` for one.

    Args:
        device: makes the device of each rank's graph runner; importable. None: CUDA on a GPU, else the plain runner.
        crew: processes to run on, of the config's split, which outlive the engine; None: its own.

    Raises:
        EngineConfigError: the model cannot be split so, or there are fewer GPUs than ranks.
        EngineDeadError: a worker process failed to start; the message holds its traceback.
    """
    if config.num_ranks == 1:
        return Engine(config, device=None if device is None else device())
    return ParallelEngine(config, device=device, crew=crew)


def check_split(model_path: str, tensor: int, stages: int) -> None:
    """Raises EngineConfigError, by key, where a model cannot be split over so many ranks."""
    degrees = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    found = misfits(load_model_config(model_path), tensor, stages)
    if found:
        raise EngineConfigError("; ".join(f"{key}={degrees[key]}: {reason}" for key, reason in found))


class ParallelEngine(Engine):
    """Rank 0 of a split engine, and the owner of its worker processes. Use as an `Engine`; `close` ends the workers.

    After a step failed on any rank the engine is dead: every call raises EngineDeadError, which names the rank and
    holds its traceback.
    """

    def __init__(
        self, config: EngineConfig, *, device: Callable[[], Device] | None = None, crew: Crew | None = None
    ) -> None:
        check_split(config.model_path, config.tensor_parallel_size, config.pipeline_parallel_size)
        self._within = False  # a verb that another verb calls is no word of its own
        self._owns_crew = crew is None
        self._crew = crew = Crew(Split.of(config)) if crew is None else crew
        assert crew.split == Split.of(config), f"a crew of {crew.split} for an engine of {Split.of(config)}"
        try:
            self._number = crew.enlist(config, device)
            super().__init__(config, device=None if device is None else device(), ranks=crew.ranks)
            crew.replies("ready")
        except BaseException as error:
            # The others may be anywhere in their own start.
            lost = crew.dead() if crew.lost(wait=True) else None
            crew.close(at_once=True)
            if lost is not None and not isinstance(error, EngineConfigError):
                raise lost from error
            raise
        self._dismiss = weakref.finalize(self, crew.close if self._owns_crew else _dismiss(crew, self._number))

    # Verbs.

    def add(self, request_id: str, prompt_ids: Any, params: SamplingParams | Mapping[str, Any] | None = None) -> None:
        self._check_crew()
        super().add(request_id, prompt_ids, params)
        request = self._scheduler.waiting[request_id]
        self._tell("add", request_id, request.prompt_P, request.params)

    def step(self) -> list[RequestOutput]:
        self._check_ready()
        with self._together("step"):
            return super().step()

    def drain(self) -> list[RequestOutput]:
        with self._together("drain"):
            return super().drain()

    def abort(self, request_ids: Iterable[str] | str | None = None) -> list[RequestOutput]:
        if request_ids is not None and not isinstance(request_ids, str):
            request_ids = list(request_ids)
        with self._together("abort", request_ids):
            return super().abort(request_ids)

    def release_kv_cache(self) -> None:
        with self._together("release_kv_cache"):
            super().release_kv_cache()

    def resume_kv_cache(self) -> None:
        with self._together("resume_kv_cache"):
            super().resume_kv_cache()

    def clear_kv_cache(self) -> None:
        with self._together("clear_kv_cache"):
            super().clear_kv_cache()

    def release_weights(self) -> None:
        with self._together("release_weights"):
            super().release_weights()

    def update_weights(
        self,
        weights: Iterable[Any],
        version: int,
        *,
        in_flight: InFlight = "keep",
        reader: Reader | None = None,
    ) -> list[RequestOutput]:
        """As `Engine.update_weights`; items may also be `LocalTensors` for `reader`, which is then sent to each rank.

        Raises:
            EngineDeadError: besides what `Engine.update_weights` raises, when ranks disagree on the outcome.
        """
        self._check_update(version, in_flight)
        self._check_crew()
        self._tell("update_weights", version, in_flight, reader)
        assert self._ranks is not None
        sent = SentWeights(weights, self._crew, self._ranks, self._model.dtype, reader)
        failure: BaseException | None = None
        outputs: list[RequestOutput] = []
        self._within = True
        try:
            outputs = super().update_weights(sent, version, in_flight=in_flight)
        except BaseException as error:
            failure = error
        finally:
            self._within = False
        try:
            sent.finish(f"{type(failure).__name__}: {failure}")
            problems = self._crew.replies("updated")
        except EngineDeadError as error:
            self._die(error)
            raise error from failure
        for rank, problem in enumerate(problems, 1):
            if (problem is None) != (failure is None):
                dead = EngineDeadError(f"rank {rank} disagrees on a weight update: {problem}; the driver: {failure}")
                self._die(dead)
                raise dead from failure
        if failure is not None:
            raise failure
        return outputs

    def weight_checksum(self) -> str:
        """The checksum that one device would give, over the parts of all ranks."""
        if self._no_weights is not None:
            raise EngineStateError(self._no_weights)
        digests: dict[str, str] = {}
        for part in self.each_rank(_digests):
            digests |= part
        return checksum_of(digests)

    def each_rank(self, function: Callable[[Engine], T]) -> list[T]:
        """`function(engine)` on every rank, between steps, in rank order; for diagnosis.

        Args:
            function: importable; what it does to the engine is its own affair, its result travels.
        """
        with self._together("each_rank", function):
            own = function(self)
            return [own, *self._crew.replies("result")]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "ranks": self.config.num_ranks}

    def end_ranks(self) -> None:
        self._crew.close(at_once=True)

    def close(self) -> None:
        """End the worker processes, or leave the crew they belong to, and give back what is held here; every later verb
        raises EngineDeadError.

        Idempotent.
        """
        if self._failure is None:
            self._failure = EngineDeadError("the engine was closed")  # no settling: the others are not asked any more
        self._dismiss()
        super().close()

    # Losses.

    def _tell(self, verb: str, *arguments: Any) -> None:
        self._crew.order(self._number, verb, *arguments)

    @contextlib.contextmanager
    def _together(self, verb: str, *arguments: Any) -> Iterator[None]:
        """Within, all ranks run the verb."""
        if self._within:
            yield
            return
        self._check_crew()
        self._tell(verb, *arguments)
        self._within = True
        try:
            yield
            self._crew.check()
        except BaseException as error:
            # The other ranks are in the middle of something; so nothing but the end is left.
            cause = self._crew.dead() if self._crew.lost(wait=True) else error
            self._die(cause)
            if cause is error:
                raise
            raise cause from error
        finally:
            self._within = False

    def _check_crew(self) -> None:
        self._check_alive()
        try:
            self._crew.check()
        except EngineDeadError as error:
            self._die(error)
            raise

    def _die(self, error: BaseException) -> None:
        if self._failure is None or isinstance(error, EngineDeadError):
            self._failure = error
        self._crew.close(at_once=True)


def _dismiss(crew: Crew, number: int) -> Callable[[], None]:
    return lambda: crew.dismiss(number)


def _digests(engine: Engine) -> dict[str, str]:
    model: Any = engine.model
    return model.weight_digests()
