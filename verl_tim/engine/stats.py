"""Counters of one engine: what it did, and where its host time went."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """Counters since the engine was made, and gauges of this moment. Times are seconds."""

    steps: int = 0
    prefill_tokens: int = 0  # rows of prompts, and of recomputed sequences
    decode_tokens: int = 0  # rows that carried a sequence's last drawn token
    drawn_tokens: int = 0
    overrun_tokens: int = 0  # drawn for sequences that had ended in the step before, and dropped
    chunk_cuts: int = 0  # steps that left a sequence's prefill unfinished, summed over sequences
    preemptions: int = 0
    preempted_tokens: int = 0  # KV given up by preemption; all of it is recomputed or found in the prefix cache
    prefix_queried_tokens: int = 0  # known tokens of admitted sequences (prefix cache on)
    prefix_hit_tokens: int = 0  # of those, tokens whose KV was reused
    evicted_pages: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    weight_updates: int = 0

    num_running: int = 0
    num_waiting: int = 0
    total_pages: int = 0
    free_pages: int = 0  # available to allocate: free and cached
    cached_pages: int = 0

    # Marks since they were begun (`begin_marks`).
    max_running: int = 0
    max_waiting: int = 0
    min_free_pages: int = 0

    schedule_seconds: float = 0.0
    build_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    wait_seconds: float = 0.0  # on a GPU: for results of a step that still ran
    post_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """In which steps were made; from the first request of a batch to its last token, where nothing else is done."""
        return (
            self.schedule_seconds
            + self.build_seconds
            + self.forward_seconds
            + self.sample_seconds
            + self.wait_seconds
            + self.post_seconds
        )

    @property
    def max_kv_use(self) -> float:
        """Share of the pages that were in use at most, since the marks were begun."""
        return 1 - self.min_free_pages / self.total_pages if self.total_pages else 0.0

    @property
    def kv_use(self) -> float:
        """Share of the pages that are in use; what only the prefix cache holds is free."""
        return 1 - self.free_pages / self.total_pages if self.total_pages else 0.0

    def mark(self, running: int, waiting: int, free_pages: int) -> None:
        """What holds in a step."""
        self.max_running = max(self.max_running, running)
        self.max_waiting = max(self.max_waiting, waiting)
        self.min_free_pages = min(self.min_free_pages, free_pages)

    def begin_marks(self) -> None:
        """Forget the marks, and begin with the gauges of this moment."""
        self.max_running, self.max_waiting, self.min_free_pages = self.num_running, self.num_waiting, self.free_pages

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)
