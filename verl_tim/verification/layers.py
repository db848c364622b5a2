"""Two forwards over the same tokens, op by op in forward order: how far apart each result is, and which is the first.

Relative difference is |a - b| / max(|a|, |b|), 0 where both are 0. An ulp is a step of bfloat16 where all values of
both sides are bfloat16's, whatever they are kept in (a .npz has no bfloat16), of float32 else. Expert ids are equal or
not: they have no size and no ulp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from verl_tim.diagnosis.bits import bit_patterns, ulp_distance
from verl_tim.diagnosis.formats import short
from verl_tim.models.taps import ROTATED
from verl_tim.verification.forward import LOG_PROB
from verl_tim.verification.hf_taps import LOGITS
from verl_tim.verification.page import COLOR, MARKED, Page, Section, plot

BFLOAT16_STEP = 1 << 16  # float32 steps in one of bfloat16
# Ends of tap names and what they are called in tables, in the order of a layer.
OPS = (
    (r"embed_tokens", "embedding"),
    (r"layernorm|model\.norm", "norm"),
    (r"self_attn\.(v_proj|q |k )", "qkv"),
    (r"self_attn\.attention", "attention"),
    (r"self_attn\.o_proj", "o_proj"),
    (r"mlp\.(router|routes)", "router"),
    (r"mlp$", "MLP"),
    (rf"^{LOGITS}$", "logits"),
    (rf"^{LOG_PROB}$", "log-prob"),
)


HEADINGS = ("layer", "op", "result", "differing", "max |d|", "mean |d|", "max rel", "mean rel", "max ulp")
# What 80 columns have room for with a whole name and the largest numbers; the page has every column.
_IN_TERMINAL = ("layer", "result", "differing", "max |d|", "mean rel", "max ulp")


class LayersError(ValueError):
    """The two sides cannot be laid side by side; the message says what to change."""


def _holds_bfloat16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 or not bool((bit_patterns(x) & (BFLOAT16_STEP - 1)).any())


@dataclass
class OpDifference:
    """One op's results on all sequences.

    Attributes:
        name: tap name; layer: its number, None outside the layers; op: its kind.
        elements, differing: compared values, and those whose bits differ.
        max_abs, sum_abs, max_rel, sum_rel: over the compared values.
        max_steps: most float32 values between two compared ones; narrow: all of them are bfloat16's.
        first: (sequence, position) of the first differing value, in token order.
    """

    name: str
    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    sum_abs: float = 0.0
    max_rel: float = 0.0
    sum_rel: float = 0.0
    max_steps: int = 0
    narrow: bool = True
    first: tuple[int, int] | None = None

    @property
    def layer(self) -> int | None:
        found = re.search(r"layers\.(\d+)\.", self.name)
        return int(found[1]) if found else None

    @property
    def op(self) -> str:
        return next((label for pattern, label in OPS if re.search(pattern, self.name)), "other")

    @property
    def of_ids(self) -> bool:
        """Whether it is expert ids, which no distance is of."""
        return self.name.endswith(".routes")

    @property
    def ulp_format(self) -> str:
        return "bfloat16" if self.narrow else "float32"

    @property
    def max_ulp(self) -> int:
        """In steps of `ulp_format`."""
        return self.max_steps // (BFLOAT16_STEP if self.narrow else 1)

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / self.elements

    @property
    def mean_rel(self) -> float:
        return self.sum_rel / self.elements

    def add(self, sequence: int, a_TX: Tensor, b_TX: Tensor, first_position: int) -> None:
        """Add one sequence's results, rows in token order from `first_position`."""
        self.narrow = self.narrow and all(_holds_bfloat16(x) for x in (a_TX, b_TX))
        a, b = a_TX.to(torch.float64), b_TX.to(torch.float64)
        for side, x in (("first", a), ("second", b)):
            if not bool(torch.isfinite(x).all()):
                row = int((~torch.isfinite(x)).any(1).nonzero()[0])
                raise LayersError(
                    f"{self.name}: a value of the {side} side is not finite in sequence {sequence}, "
                    f"position {first_position + row}"
                )
        gap = (a - b).abs()
        scale = torch.maximum(a.abs(), b.abs())
        relative = torch.where(scale > 0, gap / scale.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        ulp = ulp_distance(a_TX, b_TX)
        other_T = (ulp > 0).any(1)
        self.elements += gap.numel()
        self.differing += int((ulp > 0).sum())
        self.max_abs = max(self.max_abs, float(gap.max()))
        self.sum_abs += float(gap.sum())
        self.max_rel = max(self.max_rel, float(relative.max()))
        self.sum_rel += float(relative.sum())
        self.max_steps = max(self.max_steps, int(ulp.max()))
        if self.first is None and bool(other_T.any()):
            self.first = (sequence, first_position + int(other_T.nonzero()[0]))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `max_ulp` and `ulp_format` in place of what they are computed from. Sizes are null for ids."""
        sizes = {
            "max_abs": self.max_abs,
            "sum_abs": self.sum_abs,
            "max_rel": self.max_rel,
            "sum_rel": self.sum_rel,
            "max_ulp": self.max_ulp,
            "ulp_format": self.ulp_format,
            "mean_abs": self.mean_abs,
            "mean_rel": self.mean_rel,
        }
        return {
            "name": self.name,
            "layer": self.layer,
            "op": self.op,
            "elements": self.elements,
            "differing": self.differing,
            "first": self.first,
            **(dict.fromkeys(sizes) if self.of_ids else sizes),
        }


@dataclass
class LayerReport:
    """All ops that both sides showed, in forward order.

    Attributes:
        rollout, trainer: names of the two sides, for people.
        ops: one entry per tap.
        only_rollout, only_trainer: taps that one side did not show (another engine's hooks see less).
        sequences, tokens: laid side by side; given: how many sequences there would have been, None for just those.
    """

    rollout: str
    trainer: str
    ops: list[OpDifference] = field(default_factory=list)
    only_rollout: list[str] = field(default_factory=list)
    only_trainer: list[str] = field(default_factory=list)
    sequences: int = 0
    tokens: int = 0
    given: int | None = None

    def add(self, rollout: Mapping[str, Tensor], trainer: Mapping[str, Tensor], *, tokens: int) -> None:
        """Lay one sequence's taps side by side; values by response token (logits, log-probs) end at the last token.

        Raises:
            LayersError: other shapes on the two sides, a non-finite value, nothing in common, or other taps than the
                sequences before had.
        """
        names = [name for name in trainer if name in rollout]
        if not names:
            raise LayersError(
                f"{self.rollout} and {self.trainer} show no result in common: {_few(rollout)} against {_few(trainer)}"
            )
        if self.sequences and names != [op.name for op in self.ops]:
            other = sorted(set(names) ^ {op.name for op in self.ops})
            raise LayersError(f"sequence {self.sequences} shows other results than the first one: {other[0]}")
        if not self.sequences:
            self.ops = [OpDifference(name) for name in names]
            self.only_rollout = [name for name in rollout if name not in trainer]
            self.only_trainer = [name for name in trainer if name not in rollout]
        for op in self.ops:
            a, b = rollout[op.name], trainer[op.name]
            if a.shape != b.shape:
                raise LayersError(
                    f"{op.name}: {self.rollout} has shape {tuple(a.shape)}, {self.trainer} {tuple(b.shape)} "
                    f"in sequence {self.sequences}: both sides must see the same tokens of the same model"
                )
            op.add(self.sequences, a, b, tokens - len(a))
        self.sequences += 1
        self.tokens += tokens

    @property
    def first(self) -> OpDifference | None:
        """The first op, in forward order, whose bits differ."""
        return next((op for op in self.ops if op.differing), None)

    def extent(self) -> str:
        """How much was laid side by side."""
        of = f" of {self.given:,} (--requests)" if self.given is not None and self.given > self.sequences else ""
        return f"{self.sequences:,} sequences{of}, {self.tokens:,} tokens"

    def summary(self) -> str:
        """One sentence."""
        if not self.ops:
            raise LayersError("no sequence was compared, so nothing is shown")
        first = self.first
        if first is None:
            return f"all {len(self.ops)} ops agree bit for bit on {self.tokens:,} tokens"
        assert first.first is not None
        sequence, position = first.first
        where = (
            f"{first.name} ({first.op}) is the first of {len(self.ops)} ops whose bits differ, from sequence "
            f"{sequence}, position {position}: {first.differing:,} of {first.elements:,}"
        )
        if first.of_ids:
            return f"{where} expert ids"
        sizes = f"max {first.max_ulp:,} {first.ulp_format} ulp, max relative difference {short(first.max_rel)}"
        return f"{where} values, {sizes}"

    def to_dict(self) -> dict[str, Any]:
        first = self.first
        return {
            "rollout": self.rollout,
            "trainer": self.trainer,
            "sequences": self.sequences,
            "sequences_given": self.sequences if self.given is None else self.given,
            "tokens": self.tokens,
            "exact": first is None,
            "summary": self.summary(),
            "first_differing": first.name if first else None,
            "only_rollout": self.only_rollout,
            "only_trainer": self.only_trainer,
            "ops": [op.to_dict() for op in self.ops],
        }

    def table(self) -> Table:
        """For the terminal: `_IN_TERMINAL` of the page's columns."""
        title = f"{self.rollout} against {self.trainer}, {self.extent()}"
        # without vertical lines, which would take a seventh of a narrow terminal
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.caption, table.caption_justify = "mean |d| and max rel stand on the page", "left"
        for heading in _IN_TERMINAL:
            words = heading in ("layer", "result")
            table.add_column(
                heading, no_wrap=heading != "result", overflow="fold", justify="left" if words else "right"
            )
        for op in self.ops:
            style = "" if not op.differing else "bold red" if op is self.first else "yellow"
            cells = dict(zip(HEADINGS, self.cells(op), strict=True))
            table.add_row(*(Text(cells[heading], style=style) for heading in _IN_TERMINAL))
        return table

    def page(self) -> Page:
        """The report as a page."""
        first = self.first
        sizes = [(self.ops.index(op), op) for op in self.ops if not op.of_ids]
        traces = [
            go.Scatter(
                x=[at for at, op in sizes if value(op) > 0],
                y=[value(op) for _, op in sizes if value(op) > 0],
                text=[op.name for _, op in sizes if value(op) > 0],
                name=label,
                mode="lines+markers",
                line={"color": color, "width": 1.5},
                marker={"size": 5},
                hovertemplate="%{text}: %{y:.3g}<extra></extra>",
            )
            for label, color, value in (
                ("max relative difference", MARKED, lambda op: op.max_rel),
                ("mean relative difference", COLOR, lambda op: op.mean_rel),
            )
        ]
        figure = plot(traces, x="op, in forward order", y="relative difference", yaxis={"type": "log"})
        shown = {"compared": self.extent(), "ops compared": str(len(self.ops))}
        for side, names in ((self.rollout, self.only_rollout), (self.trainer, self.only_trainer)):
            if names:
                shown[f"seen on {side} only"] = _few(names)
        return Page(
            f"{self.rollout} against {self.trainer}, layer by layer",
            self.summary(),
            shown,
            [
                Section("Growth through the model", "Ops without any difference have no point.", figure),
                Section(
                    "Every op",
                    "The first op that differs stands out: what comes after it inherits its difference.",
                    headings=HEADINGS,
                    rows=[self.cells(op) for op in self.ops],
                    marked=[self.ops.index(first)] if first else [],
                ),
            ],
        )

    @staticmethod
    def cells(op: OpDifference) -> list[str]:
        """One row of the table, as text."""
        layer = "" if op.layer is None else str(op.layer)
        name = re.sub(r"^model\.(layers\.\d+\.)?(self_attn\.)?", "", op.name).replace(ROTATED, "rotated")
        if op.of_ids:
            return [layer, op.op, name, f"{op.differing:,}", *["–"] * 5]
        sizes = (op.max_abs, op.mean_abs, op.max_rel, op.mean_rel)
        return [layer, op.op, name, f"{op.differing:,}", *(short(size) for size in sizes), f"{op.max_ulp:,}"]


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "nothing"
