"""One checkpoint, no training: a rollout answers, the trainer re-scores the same tokens, and what differs is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from rich.table import Table
from torch import Tensor

from verl_tim.diagnosis.formats import percent, short
from verl_tim.diagnosis.metrics import mismatch_metrics
from verl_tim.diagnosis.own_file import mark
from verl_tim.verification.answers import Answer, Top2
from verl_tim.verification.page import COLOR, Page, Section, plot
from verl_tim.verification.subject import padded

# Powers of ten of |d| in nats, four bins each; below the first and above the last is counted in the end bins.
LOWEST, HIGHEST, PER_DECADE = -8, 1, 4
CONTEXT_TOKENS = 12
SHOWN_FLIPS = 50


@dataclass(frozen=True)
class Flip:
    """A response token at which the likeliest token is another one on the trainer's side.

    Attributes:
        answer, position: which response, and the token's place in it.
        context: the text before it.
        rollout, trainer: the two likeliest tokens there, (text, log-prob) each, likeliest first.
        drawn: the token's text; delta: its d = trainer - rollout, nats.
    """

    answer: int
    position: int
    context: str
    drawn: str
    delta: float
    rollout: tuple[tuple[str, float], tuple[str, float]]
    trainer: tuple[tuple[str, float], tuple[str, float]]


@dataclass(frozen=True)
class BatchSize:
    """|d| of one batch of responses, nats."""

    responses: int
    tokens: int
    mean: float
    max: float
    flips: int


@dataclass
class ProbeReport:
    """What a probe found.

    Attributes:
        facts: what was probed (model, rollout, trainer, dtype, temperature, ...).
        batches: sizes batch by batch.
        metrics: `tim/*` over all tokens.
        zero: tokens with d = 0; counts: tokens per bin of log10 |d|, of the others.
        flips: the first `SHOWN_FLIPS`, the largest gap of the trainer's two log-probs first; flips_total: all.
    """

    facts: dict[str, Any]
    batches: list[BatchSize]
    metrics: dict[str, float]
    zero: int
    counts: list[int]
    flips: list[Flip]
    flips_total: int
    edges: list[float] = field(default_factory=lambda: [10.0 ** float(e) for e in bin_edges()])

    def summary(self) -> str:
        """One sentence."""
        tokens = int(self.metrics["tim/valid_tokens"])
        flips = f"{self.flips_total:,}" if self.flips_total else "none"
        if self.zero == tokens:
            return f"Rollout and trainer agree on all {tokens:,} tokens: every d is 0."
        return (
            f"On {tokens:,} tokens |d| is {short(self.metrics['tim/delta_abs_mean'])} nats on average and "
            f"{short(self.metrics['tim/delta_abs_max'])} at most; {percent(1 - self.zero / tokens)} of the tokens "
            f"differ, and the trainer's likeliest token is another one at {flips}."
        )

    def to_dict(self) -> dict[str, Any]:
        return {**mark("probe"), "summary": self.summary(), **asdict(self)}

    def table(self) -> Table:
        """For the terminal."""
        table = Table(title="|d| per batch, nats", title_justify="left")
        for heading in ("batch", "responses", "tokens", "mean |d|", "max |d|", "top-1 flips"):
            table.add_column(heading, justify="right")
        for row in self._batch_rows():
            table.add_row(*row)
        return table

    def _batch_rows(self) -> list[list[str]]:
        return [
            [str(at), str(b.responses), f"{b.tokens:,}", short(b.mean), short(b.max), f"{b.flips:,}"]
            for at, b in enumerate(self.batches)
        ]

    def page(self) -> Page:
        """The report as a page."""
        labels = [f"{short(low)} to {short(high)}" for low, high in zip(self.edges, self.edges[1:], strict=False)]
        bars = go.Bar(
            x=[f"{low:.3g}" for low in self.edges[:-1]],
            y=[count or None for count in self.counts],
            text=labels,
            textposition="none",
            marker={"color": COLOR},
            hovertemplate="%{text} nats: %{y:,} tokens<extra></extra>",
        )
        shares = {
            f"share above {threshold} nats": percent(self.metrics[f"tim/delta_gt_{threshold}"])
            for threshold in ("0.01", "0.1", "0.5", "1")
        }
        figure = plot(
            [bars], x="|d| in nats, from", y="tokens", yaxis={"type": "log"}, xaxis={"type": "category", "nticks": 10}
        )
        headings = ["response", "token", "text before it", "drawn", "d", "rollout's two", "trainer's two"]
        shown = f"{len(self.flips):,} of {self.flips_total:,}, " if len(self.flips) < self.flips_total else ""
        return Page(
            f"Probe: {self.facts['rollout']} against {self.facts['trainer']}",
            self.summary(),
            {**{name: str(value) for name, value in self.facts.items()}, **shares},
            [
                Section(
                    "How |d| is spread",
                    f"{self.zero:,} tokens with d = 0 are not drawn; both axes are logarithmic.",
                    figure,
                ),
                Section(
                    "Batch by batch",
                    headings=["batch", "responses", "tokens", "mean |d|", "max |d|", "top-1 flips"],
                    rows=self._batch_rows(),
                ),
                Section(
                    "Where the likeliest token flips",
                    f"{shown}where the trainer is surest first." if self.flips else "Nowhere.",
                    headings=headings,
                    rows=[
                        [
                            str(f.answer),
                            str(f.position),
                            f.context,
                            f.drawn,
                            short(f.delta),
                            *(
                                "\n".join(f"{text!r} {value:.4f}" for text, value in side)
                                for side in (f.rollout, f.trainer)
                            ),
                        ]
                        for f in self.flips
                    ],
                ),
            ],
        )


def bin_edges() -> np.ndarray:
    """log10 of the histogram's edges."""
    return np.linspace(LOWEST, HIGHEST, (HIGHEST - LOWEST) * PER_DECADE + 1)


def probe(
    batches: Iterable[Sequence[Answer]],
    score: Callable[[Answer], tuple[Tensor, Top2]],
    decode: Callable[[Sequence[int]], str],
    facts: dict[str, Any],
) -> ProbeReport:
    """Re-score every response and measure.

    Args:
        batches: responses, batch by batch as they were drawn.
        score: the trainer's log-probs (R,) and two likeliest tokens of a response.
        decode: token ids to text.
        facts: what is probed, for the report; `rollout` and `trainer` must be among them.

    Raises:
        ValueError: no response token at all.
    """
    sizes: list[BatchSize] = []
    rollouts: list[Tensor] = []
    trains: list[Tensor] = []
    tops: list[tuple[Tensor, Tensor]] = []
    flips: list[tuple[float, Flip]] = []
    for batch in batches:
        before, flipped = len(rollouts), len(flips)
        for answer in batch:
            log_prob_R, top = score(answer)
            rollouts.append(answer.log_prob_R)
            trains.append(log_prob_R)
            tops.append((answer.top.id_R2[:, 0], top.id_R2[:, 0]))
            flips += _flips(len(rollouts) - 1, answer, log_prob_R, top, decode)
        gaps = [(a.double() - b.double()).abs() for a, b in zip(trains[before:], rollouts[before:], strict=True)]
        gap_N = torch.cat(gaps) if gaps else torch.zeros(0)
        if gap_N.numel():
            sizes.append(
                BatchSize(len(gaps), gap_N.numel(), float(gap_N.mean()), float(gap_N.max()), len(flips) - flipped)
            )
    if not sizes:
        raise ValueError("no response has a token: there is nothing to score")
    (rollout_BT, mask_BT), (train_BT, _) = padded(rollouts), padded(trains)
    top1 = [padded([side[at] for side in tops])[0].long() for at in range(2)]
    metrics = mismatch_metrics(
        old_log_probs=train_BT,
        rollout_log_probs=rollout_BT,
        response_mask=mask_BT,
        rollout_top1=top1[0],
        train_top1=top1[1],
    )
    if metrics["tim/missing_tokens"]:
        raise ValueError(f"{int(metrics['tim/missing_tokens']):,} log-probs are not finite: the two cannot be compared")
    size_N = (train_BT.double() - rollout_BT.double()).abs()[mask_BT]
    moved = size_N[size_N > 0].log10().clamp(LOWEST, HIGHEST).numpy()
    counts, _ = np.histogram(moved, bins=bin_edges())
    flips.sort(key=lambda entry: -entry[0])
    return ProbeReport(
        facts=facts,
        batches=sizes,
        metrics=metrics,
        zero=int((size_N == 0).sum()),
        counts=counts.tolist(),
        flips=[flip for _, flip in flips[:SHOWN_FLIPS]],
        flips_total=len(flips),
    )


def _flips(
    number: int, answer: Answer, log_prob_R: Tensor, top: Top2, decode: Callable[[Sequence[int]], str]
) -> list[tuple[float, Flip]]:
    """(gap of the trainer's two log-probs, flip) of one response."""
    found = []
    response = answer.tokens.response_R.tolist()
    before = answer.tokens.prompt_P.tolist() + response
    prompt = len(answer.tokens.prompt_P)

    def pair(side: Top2, at: int) -> tuple[tuple[str, float], tuple[str, float]]:
        ids, values = side.id_R2[at].tolist(), side.log_prob_R2[at].tolist()
        return (decode([ids[0]]), values[0]), (decode([ids[1]]), values[1])

    for at in (answer.top.id_R2[:, 0] != top.id_R2[:, 0]).nonzero().squeeze(1).tolist():
        context = decode(before[max(0, prompt + at - CONTEXT_TOKENS) : prompt + at])
        delta = float(log_prob_R[at].double() - answer.log_prob_R[at].double())
        flip = Flip(
            number, at, context, decode([response[at]]), delta, rollout=pair(answer.top, at), trainer=pair(top, at)
        )
        found.append((float(top.log_prob_R2[at, 0] - top.log_prob_R2[at, 1]), flip))
    return found
