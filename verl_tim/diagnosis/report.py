"""One run: its curves, and what the token dumps say about where and on which tokens it mismatches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from verl_tim.diagnosis.compare import Comparison, Options, compare
from verl_tim.diagnosis.dumped import Dumped
from verl_tim.diagnosis.metric_log import RunFolderError
from verl_tim.diagnosis.metrics import mismatch_metrics
from verl_tim.diagnosis.own_file import mark
from verl_tim.diagnosis.token_dump import dumped_steps

MAX_STEPS = 10  # of dumps that are read unless steps are named
WORST = 20
CONTEXT = 12  # tokens shown on either side
LAYER = "tim/router_flip_rate/layer_"
TAIL = (0.5, 0.95, 0.99, 0.999)


@dataclass(frozen=True)
class WorstToken:
    """A token with a large |d| in its text. Log-probs in nats. `place`: among the `length` tokens that the model wrote;
    `position`: in the response, with what tools wrote. Both from 0."""

    step: int
    row: int
    position: int
    place: int
    length: int
    delta: float
    old_log_prob: float
    rollout_log_prob: float
    advantage: float
    kept: bool
    top1_flip: bool | None
    before: str
    text: str
    after: str


@dataclass(frozen=True)
class Effect:
    """One figure before and after the correction's mask; None where it has no value."""

    label: str
    kind: str
    valid: float | None
    kept: float | None


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        comparison: of this run alone: curves, verdict, manifest.
        dumped: what was read of its token dumps, or None.
        no_dumps: why there are none.
        known: the dumped tokens with both log-probs.
        tail: quantiles of |d|, the largest, and the shares above the thresholds, from the dumps.
        flips: layer -> share of tokens whose experts differ; from the dumps, or the metrics' mean over steps.
    """

    comparison: Comparison
    dumped: Dumped | None
    no_dumps: str
    known: pd.DataFrame
    tail: dict[str, float]
    worst: list[WorstToken]
    flips: dict[int, float]
    flips_from: str
    effects: list[Effect]

    @classmethod
    def read(cls, run_dir: str | Path, steps: Sequence[int] | None = None) -> Report:
        """Read a run folder and its token dumps.

        Args:
            steps: dumped steps to read; None: up to `MAX_STEPS`, evenly over the run.
        Raises:
            RunFolderError, ManifestError, TokenDumpError: nothing to read, steps that were not dumped, or something
                corrupt.
        """
        comparison = compare([run_dir], options=Options())
        path = comparison.runs[0].path
        found = dumped_steps(path) if path.is_dir() else []
        nothing = comparison.runs[0].nothing_logged()
        if nothing is not None and not found:
            raise RunFolderError(f"{nothing}, and there are no token dumps")
        flips = _logged_flips(comparison)
        if not found and steps is None:
            return cls(comparison, None, NO_DUMPS, pd.DataFrame(), {}, [], flips, "metrics", [])
        dumped = Dumped.read(path, spread(found) if steps is None else steps)
        known = dumped.tokens[dumped.tokens["delta"].notna()]
        from_dumps = _dumped_flips(dumped)
        return cls(
            comparison=comparison,
            dumped=dumped,
            no_dumps="" if len(known) else NOTHING_KNOWN,
            known=known,
            tail=tail(known["delta"].abs()) if len(known) else {},
            worst=worst_tokens(dumped),
            flips=from_dumps or flips,
            flips_from="dumps" if from_dumps else "metrics",
            effects=effects(dumped) if len(known) else [],
        )

    @property
    def steps(self) -> list[int]:
        """Dumped steps that were read."""
        return [] if self.dumped is None else sorted(self.dumped.tokens["step"].unique().tolist())

    def to_dict(self) -> dict[str, Any]:
        """`report.json`."""
        run = self.comparison.to_dict()
        return {
            **mark("report"),
            **{key: run[key] for key in ("runs", "verdict", "mismatch", "restarts", "speed")},
            "dumped_steps": self.steps,
            "dumped_tokens": 0 if self.dumped is None else len(self.dumped.tokens),
            "no_dumps": self.no_dumps,
            "tail": self.tail,
            "worst_tokens": [asdict(token) for token in self.worst],
            "router_flips": {"from": self.flips_from, "layers": self.flips},
            "correction": [asdict(effect) for effect in self.effects],
        }

    def write(self, folder: str | Path, stem: str = "report") -> list[Path]:
        """Write `<stem>.json` and `<stem>.html` into a folder (made if need be); returns both paths."""
        from verl_tim.diagnosis.report_page import render_report

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{stem}.json", folder / f"{stem}.html"]
        content = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        paths[0].write_text(content + "\n", encoding="utf-8")
        paths[1].write_text(render_report(self), encoding="utf-8")
        return paths


NO_DUMPS = (
    "No token dumps in this run, so places, tokens and the correction's effect are not shown: "
    "set tim.dump.tokens_per_step above 0 (default 20000)."
)
NOTHING_KNOWN = (
    "The token dumps hold no token with both log-probs: under bypass raise tim.dump.tokens_per_step, so that rows of "
    "the first mini-batch are among them, or set old_forward."
)


def spread(steps: Sequence[int]) -> list[int]:
    """At most `MAX_STEPS` of them, first and last included."""
    at = np.unique(np.linspace(0, len(steps) - 1, min(MAX_STEPS, len(steps))).round().astype(int))
    return [steps[i] for i in at]


def tail(size: pd.Series) -> dict[str, float]:
    """Mean, quantiles, largest and shares of |d|."""
    found = {"mean": float(size.mean())}
    found |= {f"p{100 * q:g}": float(value) for q, value in size.quantile(TAIL).items()}
    found["max"] = float(size.max())
    return found | {f"above {limit:g}": float((size > limit).mean()) for limit in (0.01, 0.1, 0.5, 1.0)}


def worst_tokens(dumped: Dumped, count: int = WORST) -> list[WorstToken]:
    """The tokens with the largest |d| above 0, each with the text around it."""
    tokens = dumped.tokens
    size = tokens["delta"].abs()
    worst = size[size > 0].nlargest(count)
    found = []
    for at in worst.index:
        token = tokens.loc[at]
        around = tokens.iloc[max(0, at - CONTEXT) : at + CONTEXT + 1]
        around = around[around["sequence"] == token["sequence"]]
        sides = (token["top1_rollout"], token["top1_train"])
        found.append(
            WorstToken(
                step=int(token["step"]),
                row=int(token["row"]),
                position=int(token["position"]),
                place=int(token["place"]),
                length=int(token["length"]),
                delta=float(token["delta"]),
                old_log_prob=float(token["old_log_prob"]),
                rollout_log_prob=float(token["rollout_log_prob"]),
                advantage=float(token["advantage"]),
                kept=bool(token["kept"]),
                top1_flip=None if pd.isna(sides[0]) or pd.isna(sides[1]) else bool(sides[0] != sides[1]),
                before="".join(around.loc[around.index < at, "text"]),
                text=str(token["text"]),
                after="".join(around.loc[around.index > at, "text"]),
            )
        )
    return found


def effects(dumped: Dumped) -> list[Effect]:
    """What the mask after rejection changes, by the metrics of this package on all and on the kept tokens."""
    kept = dumped.mask("kept")
    before, after = (
        mismatch_metrics(
            old_log_probs=dumped.tensor("old_log_prob"),
            rollout_log_probs=dumped.tensor("rollout_log_prob"),
            response_mask=mask,
            advantages=dumped.tensor("advantage"),
            kept_mask=kept,
        )
        for mask in (dumped.mask(), kept)
    )
    rows = (
        ("tokens", "valid_tokens", "count"),
        ("contribution skew", "contribution_skew", "number"),
        ("|d| mean, nats", "delta_abs_mean", "number"),
        ("|d| p99, nats", "delta_abs_p99", "number"),
        ("|d| max, nats", "delta_abs_max", "number"),
        ("k3 of trainer / rollout", "k3", "number"),
        ("largest accumulated |sum d|", "seq_delta_sum_max", "number"),
    )
    found = [Effect(label, kind, before.get(f"tim/{name}"), after.get(f"tim/{name}")) for label, name, kind in rows]
    for sign in ("pos", "neg"):
        share = before.get(f"tim/rejected_share_{sign}_adv")
        words = "positive" if sign == "pos" else "negative"
        found.append(Effect(f"rejected with {words} advantage", "share", share, None))
    return found


def _dumped_flips(dumped: Dumped) -> dict[int, float]:
    routes = dumped.route_tensors()
    if routes is None:
        return {}
    metrics = mismatch_metrics(
        old_log_probs=dumped.tensor("old_log_prob"),
        rollout_log_probs=dumped.tensor("rollout_log_prob"),
        response_mask=dumped.mask(),
        rollout_routes=routes[0],
        train_routes=routes[1],
    )
    shares = {layer: metrics.get(f"{LAYER}{at}") for at, layer in enumerate(dumped.layers)}
    return {layer: share for layer, share in shares.items() if share is not None}


def _logged_flips(comparison: Comparison) -> dict[int, float]:
    log = comparison.runs[0].log
    layers = sorted(int(name.removeprefix(LAYER)) for name in log.names() if name.startswith(LAYER))
    return {layer: float(np.mean(log.series(f"{LAYER}{layer}")[1])) for layer in layers}
