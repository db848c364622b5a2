"""How much of a GPU the KV pool gets: the engine's share of the memory, less what everything else of it takes.

Measured, not guessed: the weights by what is free before and after them, the activations by a full eager step, the
graphs by recording the two largest. Nothing is allocated after start-up beyond what was measured there, so what is left
of the share can go to the pool to the last page.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_tim.engine.errors import EngineConfigError

GIB = float(1 << 30)
_RESERVE = 256 << 20  # bytes for what no measurement saw: modules loaded late, fragmentation


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the device.

    total: of the device; free: now, with everything below but `activations` and `graphs` in place; held: by this
    engine now (weights, and what came with them); activations: most that a step takes; graphs: of all recordings.
    """

    total: int
    free: int
    held: int
    activations: int
    graphs: int

    def kv_bytes(self, utilization: float) -> int:
        """Bytes for the KV pool within ``utilization`` of the device.

        Raises:
            EngineConfigError: nothing is left, or others hold the memory that the share counts on.
        """
        asked = f"gpu_memory_utilization={utilization}"
        others = self.held + self.activations + self.graphs + _RESERVE
        room = int(self.total * utilization) - others
        parts = (
            f"weights {self.held / GIB:.2f}, a step {self.activations / GIB:.2f}, graphs {self.graphs / GIB:.2f}, "
            f"reserve {_RESERVE / GIB:.2f} GiB"
        )
        if room <= 0:
            raise EngineConfigError(
                f"{asked} of {self.total / GIB:.2f} GiB leaves no room for KV pages ({parts}): raise it, or lower "
                "max_num_batched_tokens or max_num_seqs"
            )
        left = self.free - self.activations - self.graphs - _RESERVE
        if room > left:
            raise EngineConfigError(
                f"{asked} leaves {room / GIB:.2f} GiB for KV pages ({parts}), but only {max(left, 0) / GIB:.2f} GiB of "
                "the device are free: lower it, or free what other processes hold"
            )
        return room
