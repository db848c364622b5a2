"""One rollout server: an engine behind the calls that verl makes on a replica's server actor.

Runs as a Ray actor with an event loop; the engine steps in a thread of its own (`verl_tim.engine.AsyncEngine`), which
also keeps every verb apart from a running step. Errors of a request go to its caller; an error of the engine goes to
every waiting and every later caller, with its cause.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_tim.engine import AsyncEngine, EngineStats, RequestOutput, SamplingParams
from verl_tim.engine.device import rank_device
from verl_tim.engine.engine import Engine
from verl_tim.engine.weight_reader import LocalTensors, Reader
from verl_tim.numerics import determinism
from verl_tim.rollout.away import AwayEngine
from verl_tim.rollout.options import RolloutOptions
from verl_tim.rollout.prometheus import EngineCollector, MetricsAddress, serve
from verl_tim.rollout.recorded import RECORD_PARAM, RECORDED_FIELD, Recorded
from verl_tim.rollout.senders import Gathering, SendersError
from verl_tim.rollout.shared_buckets import BucketReader, SharedBuffers, device_identity
from verl_tim.rollout.versions import runs_of, version_fields
from verl_tim.rollout.weights import Bucket, Unpacker
from verl_tim.training.pairing import Card, card_of, check_update

logger = logging.getLogger(__name__)

# Counters of `EngineStats` that a report holds.
REPORTED_COUNTERS = ("steps", "drawn_tokens", "preemptions", "chunk_cuts", "prefix_hit_tokens", "weight_updates")

# A scrape waits so long for what the engine does. The Prometheus that verl sets up gives up after ten seconds.
_STATS_SECONDS = 5.0
# How often a server looks whether it is ready, while somebody waits for that.
_LOOK_SECONDS = 0.01
KEPT_FAILURES = 20
"""Messages of failed requests that are kept until the next report; all are counted. Nobody may ask for one."""

# verl's names for how a response ended (workers/rollout/vllm_rollout/vllm_async_server.py:724).
_STOP_REASONS = {"stop": "completed", "length": "completed", "abort": "aborted"}


class EngineServer:
    """The calls of verl 0.9.1's replica interface, on one engine.

    Args:
        options: of the engine and of verl's limits.
        name: rollout name, for messages.
        replica_rank: number of the replica.
        shared_memory: what `sleep` gives up, of "weights" and "kv_cache"; nothing where nobody else wants the memory.
        away: this server takes the place of one that died, and this stands for its engine, which is made when the next
            weights come; until they are in use it serves nothing (`ReplicaAwayError`).
        metrics: that the one that died served; they are served there again as soon as there is an engine.
    """

    def __init__(
        self,
        options: RolloutOptions,
        *,
        name: str,
        replica_rank: int,
        shared_memory: tuple[str, ...],
        away: AwayEngine | None = None,
        metrics: MetricsAddress | None = None,
    ) -> None:
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self.options = options
        self.name = name
        self.replica_rank = replica_rank
        self._shared_memory = shared_memory if options.free_cache_engine else ()
        self.engine: AsyncEngine | AwayEngine
        self.away = away  # None once weights are in use
        self.metrics = metrics
        self._coming_back = asyncio.Lock()
        self._num_restarts = int(away is not None)  # until the next report
        self.engine = AsyncEngine(options.engine) if away is None else away
        # verl may rename the weights' version without new weights (set_global_steps): engine version -> verl's
        self._renamed: dict[int, int] = {}
        self._update: _Update | None = None
        self._beginning: Gathering | None = None
        # what failed since the last report; verl's V1 trainer drops a failed response without a word
        self._num_failures, self._failures = 0, list[str]()
        self._reported = EngineStats()
        self._said_no_profile = False
        self._card: Card | None = None  # empty in stock numerics; made at the first update, when the engine stands

    # ---------------------------------------------------------------------------------------------------- requests

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> Any:
        """Token ids in, token ids out, with the log-prob of each drawn token.

        Returns:
            verl's TokenOutput. `extra_fields` holds `global_steps` (version of the weights that drew the last token),
            `min_global_steps`, `max_global_steps` and `num_cached_tokens`; `tim_versions` (`versions.runs_of`) where
            weights changed while it was drawn; `tim_recorded` is a `Recorded.wire()` where the sampling parameters ask
            for it, else None. `routed_experts` are `RequestOutput.routes_TLK` where the config asks for routes.

        Raises:
            RequestError: this request cannot be served; the message names what is wrong.
            EngineDeadError: the engine has failed, with the cause.
            ReplicaAwayError: this server was started again, and has no weights yet.
        """
        from verl.workers.rollout.replica import TokenOutput

        if self.away is not None:
            self.away.refuse()  # no failure of the request, which another server answers
        try:
            for kind, given in (("image", image_data), ("video", video_data), ("audio", audio_data)):
                if given:
                    raise ValueError(
                        f"rollout {self.name} serves text only, the request holds {kind} data: take rollout=vllm "
                        "trainer=stock for such data, or leave it out of the prompts"
                    )
            values = dict(sampling_params)
            wanted = bool(values.pop(RECORD_PARAM, False))
            routes = wanted or self.options.return_routes
            params = self._sampling_params({**values, "record_routes": routes}, len(prompt_ids))
            output = await self.engine.generate(request_id, prompt_ids, params)
        except Exception as error:
            self._num_failures += 1
            if len(self._failures) < KEPT_FAILURES:
                self._failures.append(f"{type(error).__name__}: {error}")
            raise
        return TokenOutput(
            token_ids=output.token_ids,
            log_probs=output.log_probs,
            stop_reason=_STOP_REASONS[output.finish_reason],
            num_preempted=output.num_preempted,
            routed_experts=output.routes_TLK if self.options.return_routes else None,
            extra_fields={**self._extra_fields(output), RECORDED_FIELD: self._recorded(output) if wanted else None},
        )

    def _sampling_params(self, values: dict[str, Any], prompt_len: int) -> SamplingParams:
        """verl's sampling parameters as the engine's; max_tokens defaults as in vllm_async_server.py:611."""
        if values.get("max_tokens") is None and values.get("max_new_tokens") is None:
            limits = self.options
            values["max_tokens"] = max(
                1, min(limits.response_length, limits.prompt_length + limits.response_length - prompt_len)
            )
        values.setdefault("ignore_eos", self.options.ignore_eos)
        return SamplingParams.from_mapping(values)

    def _extra_fields(self, output: RequestOutput) -> dict[str, Any]:
        runs = runs_of(self._renamed.get(version, version) for version in output.weight_versions)
        # without a token: the weights that would have drawn one
        fields = version_fields(runs or [(self.global_steps, 0)])
        fields["num_cached_tokens"] = output.num_cached_tokens
        if any(mass != 1.0 for mass in output.kept_mass):
            # top-k, top-p or min-p cut the distribution; the log-probs are of the full one
            fields["kept_mass_min"] = min(output.kept_mass)
        return fields

    def _recorded(self, output: RequestOutput) -> dict[str, Any]:
        layers = tuple(self.engine.moe_layers) if output.routes_NLK is not None else ()
        return Recorded(np.asarray(output.top1_ids, np.int32), output.routes_NLK, layers).wire()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """verl's announcement of a weight update (or of a rest): close the gate until `resume_generation`.

        What is in flight is kept, aborted or finished, as `in_flight` says. A kept response goes on from where it
        stands, under the weights that are there by then; of an aborted one the client sends prompt and tokens again, to
        the same end; for those that are to be finished this call waits.

        Args:
            reject_request: the server leaves the load balancer: abort in any case, and turn late requests away instead
                of letting them wait.
        """
        if self.options.in_flight == "keep" and not reject_request:
            await self.engine.pause()
            return {"aborted_count": 0, "request_ids": []}
        if self.options.in_flight == "finish" and not reject_request:
            await self.engine.finish()
            return {"aborted_count": 0, "request_ids": []}
        request_ids = await self.engine.abort_all(reject_new=reject_request)
        return {"aborted_count": len(request_ids), "request_ids": request_ids}

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """Abort one request; its caller gets what it drew."""
        return {"aborted": await self.engine.abort(request_id), "request_id": request_id}

    async def resume_generation(self) -> None:
        """Open the gate."""
        await self.engine.resume()

    async def is_ready(self) -> bool:
        """Whether a request that comes now is served at once."""
        return self.away is None and self.engine.is_open

    async def until_ready(self) -> None:
        """Returns when it is. Who waits here hears of it before the step's requests are handed out."""
        while not await self.is_ready():
            await asyncio.sleep(_LOOK_SECONDS)

    # ------------------------------------------------------------------------------------------- weights and memory

    async def sleep(self) -> None:
        """Free weights and KV cache for the trainer, if they share memory."""
        if self._shared_memory:
            await self.engine.sleep(self._shared_memory)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep` for "weights", "kv_cache" or, without tags, both. Weights come with the next update."""
        await self._wake(self._shared_memory if tags is None else tags)

    async def release_kv_cache(self) -> None:
        """Free the KV cache only; unfinished requests are recomputed later."""
        if "kv_cache" in self._shared_memory:
            await self.engine.sleep(("kv_cache",))

    async def resume_kv_cache(self) -> None:
        """Undo `release_kv_cache`."""
        await self._wake(("kv_cache",))

    async def _wake(self, tags: Iterable[str]) -> None:
        shared = tuple(tag for tag in tags if tag in self._shared_memory)
        if shared:
            await self.engine.wake(shared)

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes."""
        await self.engine.clear_kv_cache()

    async def set_global_steps(self, global_steps: int) -> None:
        """verl's announcement of the weights' version, for updates that carry none: what is drawn now bears it."""
        self._renamed[self.engine.weight_version] = int(global_steps)

    @property
    def global_steps(self) -> int:
        """Version of the weights in use, as verl counts."""
        version = self.engine.weight_version
        return self._renamed.get(version, version)

    async def begin_weights(
        self, global_steps: int | None, rank: int = 0, identity: str = "", trainer: Card | None = None
    ) -> bool:
        """Start a weight update; buckets follow through `receive_weights`, then `finish_weights`.

        Every rank of the replica calls all three; a call returns when all have made it.

        Args:
            global_steps: version of the new weights; None: one more than the last.
            rank: the caller's place in the replica.
            identity: of the caller's device (`shared_buckets.device_identity`).
            trainer: the card of the caller's trainer, if that is in contract numerics.

        Raises:
            ConfigError: this engine is in contract numerics, too, and its card is another.
            Whatever a new engine raises where the last one died: its memory may be taken.

        Returns:
            Whether each rank sends its own buckets in device memory that it shares with the engine's rank on the same
            GPU. Otherwise rank 0 alone sends, through host memory.
        """
        engine = await self._standing_engine()
        if trainer is not None:
            await self._check_pairing(trainer)
        if self._beginning is None:
            self._beginning = Gathering(self._num_ranks, "begin_weights")  # before any wait: the others come meanwhile
        beginning = self._beginning
        complete = beginning.come(rank, identity)
        await self._abandon_update("a new weight update began before the last one ended")
        if complete:
            self._beginning = None
            own = [device_identity(rank_device(self.options.engine.device, r)) for r in range(self._num_ranks)]
            shares = own == [beginning.said[r] for r in range(self._num_ranks)] and "" not in own
            version = engine.weight_version + 1 if global_steps is None else int(global_steps)
            self._update = _Update(engine, version, self._num_ranks, shares, torch.device(self.options.engine.device))
            beginning.go_on(shares)
        return await beginning.result()

    async def _standing_engine(self) -> AsyncEngine:
        """The engine; that of a server that was started again is made now. Its weights come with the update that
        begins, and verl wakes the KV cache after it, as that of every other replica."""
        async with self._coming_back:
            if isinstance(self.engine, AsyncEngine):
                return self.engine
            empty = dataclasses.replace(self.options.engine, load_weights=False)
            engine = await asyncio.to_thread(AsyncEngine, empty)
            if "kv_cache" in self._shared_memory:
                await engine.sleep(("kv_cache",))
            self.engine, self._renamed, self._reported = engine, {}, EngineStats()
            logger.warning("rollout server %d has an engine again, and takes weights", self.replica_rank)
            if self.metrics is not None:
                self._serve_again(self.metrics)
            return engine

    async def _check_pairing(self, trainer: Card) -> None:
        if self._card is None:
            engine = await self.engine.describe()
            self._card = {}
            if engine["numerics"] == "contract":
                process = f"rollout server {self.replica_rank}"
                self._card = card_of(process, engine["contract"], torch.device(engine["device"]).type)
        if self._card:
            check_update(trainer, self._card)

    @property
    def _num_ranks(self) -> int:
        return self.options.engine.num_ranks

    async def receive_weights(self, bucket: Bucket, rank: int = 0) -> None:
        """One bucket of the running update; returns when the model has taken it.

        Raises:
            Whatever the model raises (an unknown, doubled or misshapen tensor, by name).
        """
        await self._running_update().feed(bucket, rank)

    async def finish_weights(self, rank: int = 0) -> int:
        """End the stream; the version of the weights now in use.

        Raises:
            Whatever the model raises, e.g. for tensors that are missing.
        """
        update = self._running_update()
        try:
            await update.finish(rank)
        finally:
            if self._update is update:
                self._update = None
        self._renamed.pop(update.version, None)
        self.away = None
        return update.version

    async def abandon_weights(self, reason: str) -> None:
        """A sender failed; the engine serves nothing until an update succeeds."""
        beginning, self._beginning = self._beginning, None
        if beginning is not None:
            beginning.give_up(SendersError(reason))
        await self._abandon_update(reason)

    async def _abandon_update(self, reason: str) -> None:
        update, self._update = self._update, None
        if update is not None:
            await update.fail(reason)

    def _running_update(self) -> _Update:
        if self._update is None:
            if self.away is not None:
                self.away.refuse()  # the server that it was begun on is no more
            raise RuntimeError(
                f"rollout {self.name}: weights arrived, but no weight update is running: it was never begun, or was "
                "given up (the error before this one says why); the run cannot go on, restart it from its last "
                "checkpoint (trainer.resume_mode=auto)"
            )
        return self._update

    # ------------------------------------------------------------------------------------------- profiling, reports

    async def start_profile(self, **kwargs: Any) -> None:
        """verl profiles vLLM and SGLang through this call; this engine writes no profile there, and says so once."""
        if not self._said_no_profile:
            self._said_no_profile = True
            logger.warning(
                "rollout %s writes no profile in verl (global_profiler.steps, actor_rollout_ref.rollout.profiler): "
                "`verl-tim bench rollout --profile FILE` writes one of its decode steps",
                self.name,
            )

    async def stop_profile(self) -> None:
        """Nothing was started (`start_profile`)."""

    async def describe(self) -> dict[str, Any]:
        """Facts of this process and its engine, under the manifest's keys (`diagnosis.manifest.ProcessFacts`)."""
        from verl_tim.diagnosis.process import process_facts

        engine = await self.engine.describe()
        exact = engine["numerics"] == "contract"
        kernels = "contract" if exact else "torch"
        return {
            **process_facts(engine["device"]),
            "backend": self.name,
            "backend_version": f"verl-tim {metadata.version('verl-tim')}",
            "numerics": engine["numerics"],
            "contract_id": engine["contract"],
            "param_dtype": engine["dtype"],
            "compute_dtype": engine["dtype"],
            "kv_dtype": engine["kv_dtype"],
            "head_dtype": "float32" if exact else engine["dtype"],
            "attention_backend": engine["attention"] if exact else "sdpa",
            "kv_chunk": _chunk_keys() if engine["attention"] == "chunk64" else None,
            "page_size": engine["page_size"],
            "gemm_kernel": kernels,
            "gemm_batch_invariant": exact,
            "norm_kernel": kernels,
            "norm_batch_invariant": exact,
            "tensor_parallel": engine["tensor_parallel_size"],
            "pipeline_parallel": engine["pipeline_parallel_size"],
            "expert_parallel": 1,
            "data_parallel": 1,
            "graph_buckets": engine["decode_graphs"] or None,
            "prefix_cache": engine["enable_prefix_cache"],
            "sampling_backend": "gumbel noise by (seed, position, token id)",
            "log_prob_mode": "full vocabulary, at the sampling temperature",
            "model": {"architecture": engine["architecture"]},
            "extra": {
                name: engine[name]
                for name in (
                    "dropped_schedules",
                    "kv_cache_tokens",
                    "kv_cache_bytes",
                    "max_num_seqs",
                    "max_num_batched_tokens",
                    "max_prefill_chunk",
                    "max_model_len",
                    "watermark",
                    "seed",
                )
            },
        }

    async def observe(self, variables: Sequence[str]) -> list[dict[str, Any]]:
        """What holds in each rank's process, in rank order (`numerics.determinism.observe`).

        Args:
            variables: environment variables to report.
        """
        return await self.engine.each_rank(partial(_observe, variables=tuple(variables)))

    async def stats(self) -> dict[str, Any]:
        """Counters of the engine."""
        return dataclasses.asdict(await self.engine.stats())

    async def report(self) -> dict[str, Any]:
        """What happened since the last report: `counters` and `marks` of the engine, and how often this server was
        started again (`restarts`); `num_failures` of requests, and `failures`, the messages of the first of them (at
        most `KEPT_FAILURES`).

        Raises:
            EngineDeadError: the engine has failed, with the cause.
        """
        stats, before = await self.engine.stats(begin_marks=True), self._reported
        failures = {"num_failures": self._num_failures, "failures": self._failures}
        self._num_failures, self._failures, self._reported = 0, [], stats
        counters = {name: getattr(stats, name) - getattr(before, name) for name in REPORTED_COUNTERS}
        counters["restarts"], self._num_restarts = self._num_restarts, 0
        marks = {
            "max_running": stats.max_running,
            "max_waiting": stats.max_waiting,
            "max_kv_use": stats.max_kv_use,
            "tokens_per_second": counters["drawn_tokens"] / max(stats.busy_seconds - before.busy_seconds, 1e-9),
        }
        return {"counters": counters, "marks": marks, **failures}

    async def serve_metrics(self, address: str, model_name: str | None) -> str:
        """Serve the engine's metrics as Prometheus text until this process ends; "address:port", a URL's host.

        Args:
            address: of this node, at which to listen.
            model_name: a label of every metric; None: the name of the model's folder.
        """
        self.metrics = self._serve(MetricsAddress(address, 0, model_name))
        return f"[{address}]:{self.metrics.port}" if ":" in address else f"{address}:{self.metrics.port}"

    def _serve(self, metrics: MetricsAddress) -> MetricsAddress:
        loop = asyncio.get_running_loop()

        def stats() -> EngineStats | None:
            future = asyncio.run_coroutine_threadsafe(self.engine.stats(), loop)
            try:
                return future.result(_STATS_SECONDS)
            except concurrent.futures.TimeoutError:
                future.cancel()
                return None

        labels = {
            "rollout": self.name,
            "replica": str(self.replica_rank),
            "model_name": metrics.model_name or Path(self.options.engine.model_path).name,
        }
        port = serve(EngineCollector(stats, lambda: self.global_steps, labels), metrics.address, metrics.port)
        return dataclasses.replace(metrics, port=port)

    def _serve_again(self, metrics: MetricsAddress) -> None:
        try:
            self._serve(metrics)
        except OSError as error:  # no reason to end the run
            logger.warning(
                "rollout server %d serves no metrics any more: %s, port %d: %s",
                self.replica_rank, metrics.address, metrics.port, error,
            )  # fmt: skip

    async def weight_checksum(self) -> str:
        """Checksum over all weights in use."""
        return await self.engine.weight_checksum()


def _observe(engine: Engine, variables: tuple[str, ...]) -> dict[str, Any]:
    """Runs in each rank's process; generation has no gradients, and graphs hold cuBLAS's workspace."""
    facts = engine.describe()
    report = determinism.observe(facts["device"], variables=variables, backward=False, workspace=False)
    return {**report, "graph_shapes": facts["decode_graphs"]}


def _chunk_keys() -> int:
    from verl_tim.numerics.contract import CHUNK_KEYS

    return CHUNK_KEYS


class _Update:
    """One weight update: buckets from Ray calls become the stream that the engine pulls.

    Args:
        ranks: of the engine.
        shares: every rank's sender shares its own buckets with the engine's rank on the same device; with more than
            one rank a bucket is there when all have sent it, and each rank reads its own.
        device: of the engine's first rank.
    """

    def __init__(self, engine: AsyncEngine, version: int, ranks: int, shares: bool, device: torch.device) -> None:
        self.version = version
        self._shared = SharedBuffers(device)
        self._senders = ranks if shares else 1
        self._arriving: dict[int, Bucket] = {}  # of one number, by rank
        self._arrived: asyncio.Future | None = None  # of those
        # a bucket stays here until the engine has asked for the tensor after its last one
        self._buckets: asyncio.Queue[tuple[Bucket | list[Bucket] | None, asyncio.Future | None]] = asyncio.Queue()
        self._failed: str | None = None
        self._ending = Gathering(ranks, "finish_weights")
        reader: Reader | None = BucketReader() if self._senders > 1 else None
        self._task = asyncio.ensure_future(engine.update_weights(self._stream(), version, reader=reader))

    async def _stream(self) -> AsyncIterator[Any]:
        unpacker = Unpacker()
        while True:
            bucket, taken = await self._buckets.get()
            if bucket is None:
                self._shared.close()
                if self._failed is not None:
                    raise RuntimeError(self._failed)
                unpacker.finish()
                return
            if isinstance(bucket, list):
                yield LocalTensors(bucket)
            else:
                in_place = None if bucket.data is not None else self._shared.data(bucket)
                for item in unpacker.unpack(bucket, in_place):
                    yield item
                if in_place is not None:
                    del in_place
                    # the model's copies were only submitted; the sender fills the buffer again once it hears back
                    await asyncio.to_thread(self._shared.done)
            if taken is not None and not taken.done():
                taken.set_result(None)

    async def feed(self, bucket: Bucket, rank: int) -> None:
        if rank >= self._senders or rank in self._arriving:
            raise SendersError(f"receive_weights: rank {rank} sends a bucket that is not its turn")
        if self._arrived is None:
            self._arrived = asyncio.get_running_loop().create_future()
        taken = self._arrived
        self._arriving[rank] = bucket
        if len(self._arriving) == self._senders:
            every = [self._arriving[r] for r in range(self._senders)]
            self._arriving, self._arrived = {}, None
            self._buckets.put_nowait((every if len(every) > 1 else every[0], taken))
        await asyncio.wait({taken, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task  # raises what the engine raised
            if not taken.done():
                raise RuntimeError("the engine ended its weight update before the stream did")

    async def finish(self, rank: int) -> None:
        if self._ending.come(rank):
            self._buckets.put_nowait((None, None))
            try:
                await self._task
            except Exception as error:
                self._ending.give_up(error)
            else:
                self._ending.go_on(None)
        try:
            await self._ending.result()
        except SendersError as error:
            await self.fail(str(error))  # nobody else ends the stream, and the engine would wait for it for ever
            raise

    async def fail(self, reason: str) -> None:
        if self._failed is None:
            self._failed = reason
        self._ending.give_up(SendersError(reason))
        self._buckets.put_nowait((None, None))
        try:
            await self._task
        except Exception as error:
            logger.warning("weight update of version %d was abandoned: %s", self.version, error)
