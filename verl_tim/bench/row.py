"""One line of a benchmark table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class BenchRow:
    """Ours beside a peer, on the same inputs in the same run.

    op: what was timed; shape: its sizes, short; ours_us, peer_us: median microseconds of one call (peer None: no peer
    does it); peer: its name; note: anything a reader needs to judge the row (TFLOP/s, TB/s, share of a floor).
    """

    op: str
    shape: str
    ours_us: float
    peer: str = ""
    peer_us: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Peer's time over ours: above 1, ours is faster."""
        return None if self.peer_us is None else self.peer_us / self.ours_us

    def as_json(self) -> dict[str, Any]:
        """The fields and the ratio, for `--json`."""
        return {**asdict(self), "ratio": self.ratio}
