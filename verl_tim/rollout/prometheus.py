"""A server's metrics as Prometheus text (`actor_rollout_ref.rollout.prometheus.enable`).

The names follow vLLM's, so that a dashboard for one reads the other after a change of prefix. What is a rate there is a
counter here: tokens per second are `rate(verl_tim_generation_tokens_total[1m])`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verl_tim.engine import EngineDeadError, EngineStats

_PREFIX = "verl_tim_"

_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prompt_tokens": ("Tokens of prompts, and of recomputed sequences, that were computed", lambda s: s.prefill_tokens),
    "generation_tokens": ("Tokens that were drawn", lambda s: s.drawn_tokens),
    "num_preemptions": ("Sequences that gave their pages to others, and are recomputed", lambda s: s.preemptions),
    "prefix_cache_queries": ("Known tokens of admitted sequences", lambda s: s.prefix_queried_tokens),
    "prefix_cache_hits": ("Of those, tokens whose keys and values were there", lambda s: s.prefix_hit_tokens),
    "engine_steps": ("Steps of the engine", lambda s: s.steps),
    "engine_busy_seconds": ("Seconds in which steps were made", lambda s: s.busy_seconds),
    "weight_updates": ("Weight updates", lambda s: s.weight_updates),
}
_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Requests that have a place in the batch", lambda s: s.num_running),
    "num_requests_waiting": ("Requests that have none", lambda s: s.num_waiting),
    "kv_cache_usage_perc": ("Share of the KV pages that is in use; 1 is all of it", lambda s: s.kv_use),
}


@dataclass(frozen=True)
class MetricsAddress:
    """Where a server serves its metrics.

    Attributes:
        address: of its node.
        port: 0 until it has one.
        model_name: a label of every metric; None: the name of the model's folder.
    """

    address: str
    port: int
    model_name: str | None


class EngineCollector(Collector):
    """Reads one engine at each scrape.

    Args:
        stats: a copy of the engine's, from any thread; None while it does what takes longer than a scrape may, such as
            a weight update; raises EngineDeadError where it has failed.
        weight_version: of the weights in use, as verl counts them.
        labels: of every metric.
    """

    def __init__(
        self, stats: Callable[[], EngineStats | None], weight_version: Callable[[], int], labels: Mapping[str, str]
    ) -> None:
        self._stats, self._weight_version = stats, weight_version
        self._names, self._values = tuple(labels), tuple(labels.values())

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(f"{_PREFIX}engine_up", "0: the engine has failed", labels=self._names)
        try:
            stats = self._stats()
        except EngineDeadError:
            up.add_metric(self._values, 0)
            yield up
            return
        up.add_metric(self._values, 1)
        yield up
        if stats is None:
            return
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=self._names)
            counter.add_metric(self._values, read(stats))
            yield counter
        for name, (text, read) in _GAUGES.items():
            yield self._gauge(name, text, read(stats))
        yield self._gauge("weight_version", "Version of the weights in use", self._weight_version())
        ended = CounterMetricFamily(
            f"{_PREFIX}requests_finished", "Requests that ended", labels=(*self._names, "finished_reason")
        )
        for reason, number in stats.finished.items():
            ended.add_metric((*self._values, reason), number)
        yield ended

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(_PREFIX + name, text, labels=self._names)
        gauge.add_metric(self._values, value)
        return gauge

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry would otherwise collect once to learn the names."""
        return iter(())


def serve(collector: EngineCollector, address: str, port: int = 0) -> int:
    """Answer scrapes in a thread of this process; the port.

    Args:
        address: at which to listen.
        port: 0: one that is free.

    Raises:
        OSError: somebody else has the port.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    server, _ = start_http_server(port, addr=address, registry=registry)
    return server.server_port
