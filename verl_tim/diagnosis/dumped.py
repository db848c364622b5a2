"""Token dumps as tensors: one row per dumped sequence, one column per place in the response."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from verl_tim.diagnosis.token_dump import read_dumps

NO_ROUTE = -1


@dataclass(frozen=True)
class Dumped:
    """All dumped sequences of some steps of a run, R of them, up to T places.

    Attributes:
        tokens: the table without its route columns, sorted by step, row and position; its index is 0 to N - 1, and it
            has the columns `sequence` (0 to R - 1), `place` (among the sequence's tokens, from 0; `position` counts
            what a tool wrote between them, too) and `delta` (old - rollout in nats, NaN where either is missing).
        layers, top_k: what the routes hold; empty where none were recorded.
        correction: the run's settings, as the dump states them.
    """

    path: Path
    tokens: pd.DataFrame
    layers: list[int]
    top_k: int
    correction: dict[str, Any]
    routes: dict[str, pd.Series]

    @classmethod
    def read(cls, run_dir: str | Path, steps: Iterable[int] | None = None) -> Dumped:
        """Read a run's dumps.

        Raises:
            TokenDumpError: see read_dumps.
        """
        table = read_dumps(run_dir, steps)
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        tokens = table.to_pandas().sort_values(["step", "row", "position"], kind="stable", ignore_index=True)
        routes = {side: tokens.pop(f"routes_{side}") for side in ("rollout", "train")}
        tokens["sequence"] = tokens.groupby(["step", "row"], sort=False).ngroup()
        tokens["place"] = tokens.groupby("sequence", sort=False).cumcount()
        old, rollout = (tokens[name].astype("float64") for name in ("old_log_prob", "rollout_log_prob"))
        tokens["delta"] = (old - rollout).where(np.isfinite(old) & np.isfinite(rollout))
        return cls(
            path=Path(run_dir),
            tokens=tokens,
            layers=json.loads(metadata["layers"]),
            top_k=int(metadata["top_k"]),
            correction=json.loads(metadata["correction"]),
            routes=routes,
        )

    @property
    def sequences(self) -> int:
        return 0 if self.tokens.empty else int(self.tokens["sequence"].iloc[-1]) + 1

    @property
    def width(self) -> int:
        """T: one more than the last place."""
        return 0 if self.tokens.empty else int(self.tokens["position"].max()) + 1

    def tensor(self, column: str) -> Tensor:
        """(R, T) float32 of a numeric column, NaN where it is null or the sequence has no token."""
        values_N = self.tokens[column].astype("float32").to_numpy(copy=True)
        return self._placed(torch.from_numpy(values_N), float("nan"))

    def mask(self, column: str | None = None) -> Tensor:
        """(R, T) bool: where there is a token, and where a bool column of it is true."""
        count = len(self.tokens)
        flag_N = np.ones(count, bool) if column is None else self.tokens[column].to_numpy(bool, copy=True)
        return self._placed(torch.from_numpy(flag_N), False)

    def route_tensors(self) -> tuple[Tensor, Tensor] | None:
        """(R, T, layers, k) int64 of rollout and trainer, -1 where a token lacks one; None if no token has both."""
        recorded_N = (self.routes["rollout"].notna() & self.routes["train"].notna()).to_numpy(copy=True)
        if not recorded_N.any() or not self.layers:
            return None
        shape = (len(self.layers), self.top_k)
        placed = []
        for side in ("rollout", "train"):
            routes_NLK = torch.full((len(self.tokens), *shape), NO_ROUTE, dtype=torch.int64)
            stacked = np.stack(self.routes[side][recorded_N].to_list()).astype("int64").reshape(-1, *shape)
            routes_NLK[torch.from_numpy(recorded_N)] = torch.from_numpy(stacked)
            placed.append(self._placed(routes_NLK, NO_ROUTE))
        return placed[0], placed[1]

    def _placed(self, values_N: Tensor, blank: float | bool) -> Tensor:
        out = torch.full((self.sequences, self.width, *values_N.shape[1:]), blank, dtype=values_N.dtype)
        row_N, column_N = (
            torch.from_numpy(self.tokens[n].to_numpy("int64", copy=True)) for n in ("sequence", "position")
        )
        out[row_N, column_N] = values_N
        return out
