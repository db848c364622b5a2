"""The engine: one thread, three verbs (add, step, update_weights) and what surrounds them.

    engine = Engine(EngineConfig(model_path))
    engine.add("a", prompt_ids, SamplingParams(max_tokens=64))
    while engine.has_work():
        for output in engine.step():
            ...

`async_engine.py` runs it in a thread of its own and hands out futures.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args

import psutil
import torch
from tqdm import tqdm

from verl_tim.engine.config import EngineConfig
from verl_tim.engine.core import (
    Request,
    RequestOutput,
    SamplingParams,
    as_token_ids,
    default_seed,
)
from verl_tim.engine.device import CudaDevice, Device, rank_device
from verl_tim.engine.errors import EngineConfigError, EngineDeadError, EngineStateError, RequestError
from verl_tim.engine.graph_runner import GraphRunner, Launched
from verl_tim.engine.kv_cache import PagePool
from verl_tim.engine.memory import MemoryUse
from verl_tim.engine.page_routes import PageRoutes
from verl_tim.engine.parallel import Ranks
from verl_tim.engine.rows import RowTable
from verl_tim.engine.runner import ModelRunner, RunnableModel
from verl_tim.engine.scheduler import Scheduler, StepPlan
from verl_tim.engine.stages import StageRunner
from verl_tim.engine.stats import EngineStats
from verl_tim.engine.weight_reader import Reader
from verl_tim.models import build_model, load_model_config
from verl_tim.models.place import WHOLE
from verl_tim.numerics.contract import contract_id
from verl_tim.numerics.probe import dropped_schedules

T = TypeVar("T")
logger = logging.getLogger(__name__)

InFlight = Literal["keep", "abort", "finish"]


class Engine:
    """A rollout engine on one device; not thread-safe.

    On a GPU it looks ahead: a step is launched while the one before it runs, and :meth:`step` returns what ended in
    that one. Every verb but `add` first waits for what is in flight, so none meets a step halfway.

    Args:
        config: settings.
        model: a model made elsewhere; None builds config.model_path's.
        device: runs the steps of a graph runner; None: CUDA on a GPU, else the plain runner.
        ranks: this process among the ranks of a split engine, all of which call the same verbs in the same order
            (`parallel_engine`); None for an engine on one device.

    Raises:
        EngineConfigError: settings that contradict each other or the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: RunnableModel | None = None,
        device: Device | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if config.num_ranks > 1 and ranks is None:
            raise EngineConfigError(
                f"tensor_parallel_size={config.tensor_parallel_size} and pipeline_parallel_size="
                f"{config.pipeline_parallel_size} need {config.num_ranks} ranks: make it with start_engine(config)"
            )
        self.config = config
        self._ranks = ranks
        self._in_flight: Launched | None = None
        self._ready: list[RequestOutput] = []  # ended in a step that another verb waited for
        self._closed = False
        self._owns_model = model is None
        if device is None and (where := rank_device(config.device, 0 if ranks is None else ranks.rank)).type == "cuda":
            device = CudaDevice(where)
        if device is None and config.gpu_memory_utilization is not None:
            raise EngineConfigError(
                f"gpu_memory_utilization={config.gpu_memory_utilization} is a share of a GPU, and device="
                f"{config.device!r}: leave it out; kv_memory_fraction, kv_cache_tokens or kv_cache_bytes size the pool"
            )
        free_before = 0 if device is None else device.free_and_total()[0]
        if model is None:
            model = _build_model(config, ranks)
        self._model = model
        self._no_weights: str | None = (
            None if config.load_weights else ("no weights were loaded (load_weights=false); call update_weights first")
        )
        if config.load_weights:
            model.load_checkpoint(config.model_path)
        self.max_model_len = self._context_length()
        self.vocab_size = int(model.config.vocab_size)
        self._eos_ids = _as_ids(model.config.eos_token_ids)
        self._stats = EngineStats()
        self._rows = RowTable(config.max_num_seqs, self.max_model_len, config.tokens_per_page)
        budget = config.max_num_batched_tokens
        self._runner: ModelRunner
        self._graph_runner: GraphRunner | None = None
        self._stage_runner: StageRunner | None = None
        stages = 1 if ranks is None else ranks.place.stages
        if device is None:
            num_pages = self._least(self._num_pages())
            routes = PageRoutes(num_pages, config.tokens_per_page)
            if ranks is not None and stages > 1:
                self._runner = self._stage_runner = StageRunner(
                    model, self._rows, self._stats, ranks,
                    num_pages=num_pages, max_num_batched_tokens=budget, routes=routes,
                )  # fmt: skip
            else:
                self._runner = ModelRunner(
                    model, self._rows, self._stats,
                    num_pages=num_pages, max_num_batched_tokens=budget, routes=routes,
                )  # fmt: skip
            self._runner.allocate_kv_cache()
        else:
            self._runner = self._graph_runner = GraphRunner(
                model, self._rows, self._stats, device,
                num_pages=1, max_num_batched_tokens=budget,
                # stock kernels read lengths back, which nothing can record
                use_graphs=not config.enforce_eager and (model.numerics == "contract" or device.records_anything),
                ranks=ranks,
            )  # fmt: skip
            with model.any_weights():
                num_pages = self._start_graph_runner(self._graph_runner, device, free_before)
            routes = PageRoutes(num_pages, config.tokens_per_page)
            self._graph_runner.keep_routes_in(routes)
        self._stats.total_pages = self._stats.min_free_pages = num_pages
        self._pool = PagePool(num_pages)
        self._scheduler = Scheduler(
            self._rows,
            self._pool,
            self._stats,
            max_num_batched_tokens=budget,
            max_prefill_chunk=config.max_prefill_chunk,
            watermark=config.watermark,
            enable_prefix_cache=config.enable_prefix_cache,
            routes=routes,
            stages=stages,
        )
        self._weight_version = 0
        self._scheduler.start_version(0)
        self._arrivals = 0
        self._failure: BaseException | None = None
        logger.info("engine ready: %s", self.describe())

    def _start_graph_runner(self, runner: GraphRunner, device: Device, free_before: int) -> int:
        """Size and make the KV pool, record the graphs; the number of pages."""
        config = self.config
        if config.gpu_memory_utilization is None or config.kv_cache_tokens or config.kv_cache_bytes:
            num_pages = self._num_pages()
        else:
            runner.allocate_kv_cache()  # of one page, to run on
            free, total = device.free_and_total()
            use = MemoryUse(
                total=total,
                free=free,
                held=max(0, free_before - free),
                activations=runner.activation_bytes(config.max_num_batched_tokens),
                graphs=runner.graph_bytes(),
            )
            runner.release_kv_cache()
            num_pages = self._pages_of(use.kv_bytes(config.gpu_memory_utilization), "gpu_memory_utilization")
            logger.info("device memory: %s", use)
        num_pages = self._least(num_pages)
        runner.set_num_pages(num_pages)
        runner.allocate_kv_cache()
        silent = None if self._ranks is None or self._ranks.rank == 0 else True  # None: without a terminal
        with tqdm(total=0, desc="recording decode graphs", unit="graph", disable=silent) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update()

            began = time.perf_counter()
            runner.record_graphs(progress)
            seconds = time.perf_counter() - began
            logger.info("recorded %d decode graphs in %.1f s", len(runner.recorded_graphs), seconds)
        return num_pages

    # Requests.

    def add(self, request_id: str, prompt_ids: Any, params: SamplingParams | Mapping[str, Any] | None = None) -> None:
        """Admit a request; it runs in the following steps.

        Args:
            prompt_ids: token ids, a flat list, NumPy array or tensor of integers.
            params: sampling parameters, or a mapping of them.

        Raises:
            RequestError: the request can never be served as asked; nothing of it stays behind.
            EngineDeadError: a step failed before.
        """
        self._check_alive()
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id={request_id!r}: expected a non-empty string")
        try:
            request = self._request(request_id, prompt_ids, params)
        except RequestError as error:
            raise RequestError(f"request {request_id}: {error}") from error
        self._arrivals += 1
        self._scheduler.add(request)

    def _request(self, request_id: str, prompt_ids: Any, params: SamplingParams | Mapping[str, Any] | None) -> Request:
        if request_id in self._scheduler:
            raise RequestError(
                "this request_id is still in flight; request ids must be unique among unfinished requests"
            )
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            params = SamplingParams.from_mapping(params)
        prompt = as_token_ids("prompt_ids", prompt_ids, self.vocab_size)
        for token in params.stop_token_ids:
            if token >= self.vocab_size:
                raise RequestError(
                    f"stop_token_ids has {token}, which the model's vocabulary of {self.vocab_size} tokens lacks"
                )
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and max_model_len={self.max_model_len} leaves no room for one "
                "more; shorten the prompt or raise max_model_len"
            )
        room = self.max_model_len - len(prompt)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        # The last drawn token never enters the KV cache.
        pages = -(-(len(prompt) + max_tokens - 1) // self.config.tokens_per_page)
        if pages > self._pool.num_pages:
            raise RequestError(
                f"a prompt of {len(prompt)} and max_tokens={max_tokens} need {pages} KV pages of "
                f"{self.config.tokens_per_page} tokens, and the whole pool has {self._pool.num_pages}; raise "
                f"kv_cache_tokens to at least {pages * self.config.tokens_per_page}, or lower max_tokens"
            )
        stops = params.stop_token_ids if params.ignore_eos else (*self._eos_ids, *params.stop_token_ids)
        return Request(
            request_id=request_id,
            prompt_P=prompt,
            params=params,
            seed=default_seed(self.config.seed, request_id) if params.seed is None else params.seed,
            max_total=len(prompt) + max_tokens,
            stop_ids=tuple(dict.fromkeys(stops)),
            arrival=self._arrivals,
        )

    def has_work(self) -> bool:
        return self._scheduler.has_work() or self._in_flight is not None or bool(self._ready) or self._is_busy()

    def _is_busy(self) -> bool:
        """Whether plans are on their way through the stages of a pipeline."""
        runner = self._stage_runner or self._graph_runner
        return runner is not None and runner.is_busy

    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests, running ones first."""
        return self._scheduler.request_ids()

    def step(self) -> list[RequestOutput]:
        """Run the model once over what the scheduler chose; the requests that ended in this step.

        Raises:
            EngineStateError: no weights, or the KV cache is released; nothing was changed.
            Whatever the model raises. The step is then half done and cannot be told apart from a whole one, so the
            engine is dead: every later call raises EngineDeadError.
        """
        self._check_ready()
        if self._graph_runner is not None:
            return self._step_ahead(self._graph_runner)
        if self._stage_runner is not None:
            return self._step_staged(self._stage_runner)
        began = time.perf_counter()
        try:
            plan = self._scheduler.schedule()
            if plan is None:
                return []
            scheduled = time.perf_counter()
            drawn = self._runner.execute(plan)
            ran = time.perf_counter()
            outputs = self._scheduler.commit(plan, drawn, self._weight_version)
        except BaseException as error:
            self._failure = error
            raise
        self._stats.steps += 1
        self._stats.schedule_seconds += scheduled - began
        self._stats.post_seconds += time.perf_counter() - ran
        return outputs

    def _step_ahead(self, runner: GraphRunner) -> list[RequestOutput]:
        """Launch the next step, then wait for the one before."""
        began = time.perf_counter()
        launched = None
        try:
            plan = self._scheduler.schedule()
            self._stats.schedule_seconds += time.perf_counter() - began
            if plan is not None or runner.is_busy:
                launched = runner.launch(plan, self._weight_version)
            if plan is not None:
                self._scheduler.advance(plan)
                self._stats.steps += 1
        except BaseException as error:
            self._failure = error
            raise
        self._collect()
        self._in_flight = launched
        outputs, self._ready = self._ready, []
        return outputs

    def _check_ready(self) -> None:
        """Raises what :meth:`step` raises before it changes anything."""
        self._check_alive()
        if self._no_weights is not None:
            raise EngineStateError(self._no_weights)
        if not self._runner.has_kv_cache:
            raise EngineStateError("the KV cache is released; call resume_kv_cache() first")

    def _step_staged(self, runner: StageRunner) -> list[RequestOutput]:
        """Start the next step, and move those under way on by a stage."""
        began = time.perf_counter()
        try:
            plan = self._scheduler.schedule()
            self._stats.schedule_seconds += time.perf_counter() - began
            self._tick(runner, plan)
        except BaseException as error:
            self._failure = error
            raise
        outputs, self._ready = self._ready, []
        return outputs

    def _tick(self, runner: StageRunner, plan: StepPlan | None) -> None:
        began = time.perf_counter()
        ended = runner.tick(plan)
        ran = time.perf_counter()
        self._stats.forward_seconds += ran - began
        if plan is not None:
            self._scheduler.advance(plan)
            self._stats.steps += 1
        if ended is not None:
            self._ready += self._scheduler.collect(*ended, self._weight_version)
        self._stats.post_seconds += time.perf_counter() - ran

    def _settle(self) -> None:
        """Wait for what is under way, if anything is, and book it."""
        self._collect()
        while self._is_busy():
            try:
                if self._stage_runner is not None:
                    self._tick(self._stage_runner, None)
                elif self._graph_runner is not None:
                    self._in_flight = self._graph_runner.launch(None, self._weight_version)
            except BaseException as error:
                self._failure = error
                raise
            self._collect()

    def _collect(self) -> None:
        """Wait for the step whose results are in flight, if there is one, and book it."""
        if self._in_flight is None or self._graph_runner is None:
            return
        launched, self._in_flight = self._in_flight, None
        try:
            drawn = self._graph_runner.collect(launched)
            began = time.perf_counter()
            self._ready += self._scheduler.collect(launched.plan, drawn, launched.weight_version)
        except BaseException as error:
            self._failure = error
            raise
        self._stats.post_seconds += time.perf_counter() - began

    def drain(self) -> list[RequestOutput]:
        """Wait for the step in flight; the requests that ended in it. When this returns no step is running."""
        self._check_alive()
        self._settle()
        outputs, self._ready = self._ready, []
        return outputs

    def abort(self, request_ids: Iterable[str] | str | None = None) -> list[RequestOutput]:
        """End the named requests (None: all) with finish_reason "abort" and what they drew. Unknown ids are skipped."""
        self._check_alive()
        self._settle()
        if request_ids is None:
            request_ids = self._scheduler.request_ids()
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        return self._scheduler.abort(dict.fromkeys(request_ids))

    def _check_alive(self) -> None:
        if self._closed and isinstance(self._failure, EngineDeadError):
            raise EngineDeadError(f"{self._failure}; make a new engine")
        if self._failure is not None:
            raise EngineDeadError(
                f"a step failed before: {type(self._failure).__name__}: {self._failure}; make a new engine"
            ) from self._failure

    @property
    def model(self) -> RunnableModel:
        """The model that runs here; for diagnosis, between steps."""
        return self._model

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the model's sparse layers, those of `RequestOutput.routes_TLK` in its order."""
        moe = getattr(self._model.config, "moe", None)
        return () if moe is None else tuple(sorted(moe.layers))

    # Weights and memory.

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @property
    def no_weights(self) -> str | None:
        """Why the engine cannot run for want of weights; None where it has them."""
        return self._no_weights

    @property
    def has_kv_cache(self) -> bool:
        return self._runner.has_kv_cache

    def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        in_flight: InFlight = "keep",
        reader: Reader | None = None,
    ) -> list[RequestOutput]:
        """Load new weights, a stream of (Hugging Face name, tensor); tokens drawn from now on carry ``version``.

        Each tensor is copied before the next one is asked for, so a sender may reuse its buffers.

        No KV of the old weights is used again: the prefix cache is emptied, and under ``keep`` every running request is
        recomputed with the new weights from its tokens. So each token's log-prob is exactly that of the version it
        carries, for tokens drawn before and after.

        Args:
            in_flight: "keep" unfinished requests, "abort" them, or "finish" them under the old weights first.
            reader: for a split engine only (`parallel_engine`).

        Returns:
            Outputs of aborted and of finished requests.

        Raises:
            EngineStateError: there are requests to finish, and no weights or no KV cache to do it with.
            Whatever the stream or the model raises (``models.WeightError`` names the tensor). The model is then in
            between: the engine refuses to run until an update succeeds; unfinished requests stay, and the outputs come
            with the next :meth:`drain` or :meth:`step`.
        """
        self._check_update(version, in_flight)
        if reader is not None:
            raise ValueError("reader: an engine on one device reads its weights itself")
        self._check_alive()
        self._settle()
        outputs = self.abort() if in_flight == "abort" else []
        if in_flight == "finish":
            if self._scheduler.has_work():
                self._check_ready()
            while self._scheduler.has_work():
                outputs += self.step()
            outputs += self.drain()
        try:
            self._model.load_weights(weights)
        except BaseException as error:
            self._ready = outputs + self._ready
            self._no_weights = f"the last weight update failed ({type(error).__name__}: {error}); repeat update_weights"
            raise
        self._no_weights = None
        self._weight_version = version
        self._scheduler.start_version(version)
        self._stats.weight_updates += 1
        return outputs

    @staticmethod
    def _check_update(version: int, in_flight: InFlight) -> None:
        if in_flight not in get_args(InFlight):
            raise ValueError(f"in_flight={in_flight!r}: expected 'keep', 'abort' or 'finish'")
        if isinstance(version, bool) or not isinstance(version, int):
            raise ValueError(f"version={version!r}: expected an integer")

    def release_kv_cache(self) -> None:
        """Free the KV tensors. Running requests wait and are recomputed after :meth:`resume_kv_cache`."""
        self.clear_kv_cache()
        self._runner.release_kv_cache()

    def resume_kv_cache(self) -> None:
        if not self._runner.has_kv_cache:
            self._runner.allocate_kv_cache()

    def clear_kv_cache(self) -> None:
        """Forget all KV: the prefix cache is emptied, running requests are recomputed."""
        self._settle()
        self._scheduler.preempt_all()
        self._pool.forget()

    def release_weights(self) -> None:
        """Free the weights; the engine runs again after :meth:`update_weights`."""
        self.clear_kv_cache()
        self._model.release_weights()
        if self._graph_runner is not None:
            self._graph_runner.forget_graphs()  # last, since it hands the device what is free by then
        self._no_weights = "the weights are released; call update_weights first"

    def weight_checksum(self) -> str:
        """The model's checksum over all weights."""
        if self._no_weights is not None:
            raise EngineStateError(self._no_weights)
        return self._model.weight_checksum()

    # Reports.

    def stats(self) -> EngineStats:
        """Counters since the start, with the gauges of now. A live object: copy what is to be kept."""
        stats = self._stats
        stats.num_running = len(self._rows)
        stats.num_waiting = len(self._scheduler.waiting)
        stats.free_pages = self._pool.num_available
        stats.cached_pages = self._pool.num_cached
        stats.evicted_pages = self._pool.num_evicted
        return stats

    def describe(self) -> dict[str, Any]:
        """What runs here, for a run's manifest: plain values only."""
        model, config = self._model, self.config
        contract = contract_id(model.device, model.dtype, model.attention) if model.numerics == "contract" else None
        return {
            "model_path": config.model_path,
            "architecture": getattr(model.config, "architecture", None),
            "numerics": model.numerics,
            "contract": contract,
            "attention": model.attention,
            "dropped_schedules": dropped_schedules(),
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_dtype": str(model.dtype).removeprefix("torch."),
            "page_size": config.tokens_per_page,
            "num_pages": self._pool.num_pages,
            "kv_cache_tokens": self._pool.num_pages * config.tokens_per_page,
            "kv_cache_bytes": (self._pool.num_pages + 1) * ModelRunner.page_bytes(model, config.tokens_per_page),
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_prefill_chunk": config.max_prefill_chunk,
            "max_model_len": self.max_model_len,
            "enable_prefix_cache": config.enable_prefix_cache,
            "watermark": config.watermark,
            "decode_graphs": [] if self._graph_runner is None else self._graph_runner.recorded_graphs,
            "seed": config.seed,
            "eos_token_ids": list(self._eos_ids),
            "weight_version": self._weight_version,
            "tensor_parallel_size": config.tensor_parallel_size,
            "pipeline_parallel_size": config.pipeline_parallel_size,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def each_rank(self, function: Callable[[Engine], T]) -> list[T]:
        """`function(engine)` on every rank, between steps; here on the only one."""
        return [function(self)]

    def end_ranks(self) -> None:
        """End the other ranks' processes at once, which may hang: for one who is about to end this process.

        Unlike every verb it may be called from any thread, and during a step.
        """

    def close(self) -> None:
        """Give back what the engine holds of its device: KV pages, graphs, and the weights of a model that it built.

        Every later verb raises EngineDeadError. Idempotent. Without it the memory is held until Python's garbage
        collector comes by, since a graph runner and its graphs hold each other.
        """
        if self._closed:
            return
        self._closed = True
        died = self._failure is not None
        try:
            if not died:
                self._settle()
        finally:
            if self._failure is None:
                self._failure = EngineDeadError("the engine was closed")
            self._no_weights = "the engine was closed"
            try:
                self._give_back()
            except Exception:
                if not died:
                    raise
                # what killed the engine may have been the device, which then frees nothing for this process
                logger.warning("a dead engine could not give its memory back", exc_info=True)

    def _give_back(self) -> None:
        self._runner.release_kv_cache()
        if self._owns_model:
            self._model.release_weights()
            if self._graph_runner is not None:
                self._graph_runner.forget_graphs()  # hands the device what the weights have left free

    def audit(self) -> None:
        """Check all accounting; an AssertionError names the rule that is broken."""
        self._scheduler.audit()

    # Sizes.

    def _context_length(self) -> int:
        longest = int(self._model.config.max_position_embeddings)
        wanted = self.config.max_model_len
        if wanted is None:
            return longest
        if wanted > longest:
            raise EngineConfigError(
                f"max_model_len={wanted} exceeds the model's max_position_embeddings={longest}; lower max_model_len"
            )
        if wanted < 2:
            raise EngineConfigError(f"max_model_len={wanted} holds no prompt and response; raise it to at least 2")
        return wanted

    def _num_pages(self) -> int:
        config = self.config
        if config.kv_cache_tokens is not None:
            return config.kv_cache_tokens // config.tokens_per_page
        if config.kv_cache_bytes is not None:
            return self._pages_of(config.kv_cache_bytes, "kv_cache_bytes", limited=False)
        free = _free_bytes(self._model.device)
        if self._model.device.type == "cpu":
            free //= config.num_ranks  # which all share it
        return self._pages_of(int(free * config.kv_memory_fraction), "kv_memory_fraction")

    def _least(self, num_pages: int) -> int:
        """The pages that every rank has room for."""
        return num_pages if self._ranks is None else self._ranks.minimum(num_pages)

    def _pages_of(self, nbytes: int, key: str, *, limited: bool = True) -> int:
        """Pages in ``nbytes``, at most what ``max_num_seqs`` longest sequences can use where ``limited``."""
        config = self.config
        page_bytes = ModelRunner.page_bytes(self._model, config.tokens_per_page)
        pages = nbytes // page_bytes - 1  # the null page takes one
        if limited:
            pages = min(pages, config.max_num_seqs * -(-self.max_model_len // config.tokens_per_page))
        if pages < 1:
            raise EngineConfigError(
                f"{key}={getattr(config, key)} leaves no room for a KV page of {page_bytes} bytes; raise {key}"
            )
        return int(pages)


def _build_model(config: EngineConfig, ranks: Ranks | None) -> RunnableModel:
    model = build_model(
        load_model_config(config.model_path),
        dtype=getattr(torch, config.dtype),
        device=rank_device(config.device) if ranks is None else ranks.device,
        numerics=config.numerics,
        attention=config.attention,
        place=WHOLE if ranks is None else ranks.place,
    )
    if config.numerics == "contract":
        # refuses a machine or a process whose kernels do not keep the contract
        model.probe(config.tokens_per_page)
    return model


def _as_ids(eos: int | Iterable[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (int(eos),) if isinstance(eos, int) else tuple(int(token) for token in eos)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
