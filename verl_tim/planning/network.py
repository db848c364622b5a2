"""Collectives between GPUs: what they cost by the bytes that pass and by the hops of a ring.

A ring over N ranks moves (N - 1) / N of the bytes through every GPU. Within a node its speed is the link's; over nodes
every ring crosses the network cards, all of a node together, so that it is the slower one of the two. Latency is one
hop per rank of the ring. None of it was measured (rates.yaml: assumed).
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_tim.planning.rates import Speeds, rate


@dataclass(frozen=True)
class Network:
    """The links between `ranks` GPUs, `per_node` to a node."""

    speeds: Speeds
    per_node: int

    def ring_seconds(self, nbytes: float, ranks: int, *, calls: int = 1) -> float:
        """An all-gather or reduce-scatter of `nbytes` (the whole) over `ranks`, cut into `calls` collectives."""
        if ranks <= 1:
            return 0.0
        speed = self.speeds.link
        if ranks > self.per_node:
            share = rate("link_share").value * self.per_node / 8  # the assumed cards are those of eight GPUs
            speed = min(speed, rate("node_bandwidth").value * min(1.0, share))
        latency = rate("collective_seconds").value + rate("hop_seconds").value * (ranks - 1)
        return nbytes * (ranks - 1) / ranks / speed + calls * latency
