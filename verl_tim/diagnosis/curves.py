"""Which logged metric answers which question: verl's and this package's names behind the plots and the summary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from verl_tim.diagnosis.metric_log import MetricLog

Kind = Literal["number", "share", "nats", "seconds", "tokens"]


@dataclass(frozen=True)
class Line:
    """One metric of a plot; the first name that any run logged is used."""

    names: tuple[str, ...]
    label: str = ""
    dash: str = "solid"


@dataclass(frozen=True)
class Plot:
    """A plot over steps.

    Attributes:
        id: stable key, also the anchor on the page.
        title, unit: what stands above it.
        about: one line on how to read it.
        lines: metrics drawn together.
        log: log scale, with exact zeros on a line of their own below it.
        kind: how values are written.
        sparse: logged at few steps, so points are marked.
        whole: the axis shows all of 0 to 100 %.
    """

    id: str
    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    about: str = ""
    kind: Kind = "number"
    log: bool = False
    sparse: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        names = [name for line in self.lines for name in line.names]
        if any(CORR_K.match(name) for name in names) and any(PPO_K.match(name) for name in names):
            raise ValueError(
                f"plot {self.id!r} puts k* (trainer / rollout) and ppo_k* (the loss's ratio) on one axis: they are "
                "estimates of two different ratios"
            )


# The estimators of trainer / rollout, and those of the ratio that the loss uses: never on one axis.
CORR_K, PPO_K = re.compile(r"tim/k\d"), re.compile(r"tim/ppo_k\d")

REWARD = ("critic/score/mean", "critic/rewards/mean")
DELTA_MEAN = ("tim/delta_abs_mean",)
DELTA_MAX = ("tim/delta_abs_max",)
DELTA_P99 = ("tim/delta_abs_p99",)
PROBS_MAX = ("training/rollout_probs_diff_max",)
EXACT_FRACTION = ("tim/exact_fraction",)
RESPONSE_AT_LIMIT = ("tim/response_at_limit", "response_length/clip_ratio")

PLOTS: tuple[tuple[str, tuple[Plot, ...]], ...] = (
    (
        "Learning",
        (
            Plot("reward", "Reward", (Line(REWARD),), about="Mean verifier score of the step's responses."),
            Plot("validation", "Validation", (), about="Unseen problems.", sparse=True),
        ),
    ),
    (
        "Mismatch",
        (
            Plot(
                "mismatch",
                "Mismatch |d|",
                (Line(DELTA_MAX, "max"), Line(DELTA_P99, "p99", "dash"), Line(DELTA_MEAN, "mean", "dot")),
                unit="nats",
                about="|log p trainer − log q rollout| over the step's tokens. Solid: largest, dashed: p99, "
                "dotted: mean. Exact zeros lie on the line marked 0.",
                kind="nats",
                log=True,
            ),
            Plot(
                "exact_fraction",
                "Exact tokens",
                (Line(EXACT_FRACTION),),
                about="Share of tokens whose two log-probs agree bit for bit.",
                kind="share",
                whole=True,
            ),
            Plot(
                "r_corr_k3",
                "K3 of trainer / rollout",
                (Line(("tim/k3",)),),
                about="KL estimate of the mismatch ratio.",
                kind="nats",
                log=True,
            ),
            Plot(
                "skew",
                "Contribution skew",
                (Line(("tim/contribution_skew",)),),
                about="Lean of the loss contributions that the mismatch adds, by sign of advantage; 0 is unbiased.",
            ),
            Plot(
                "top1",
                "Top-1 flips",
                (Line(("tim/top1_flip_rate",)),),
                about="Share of tokens where the two sides' most likely token differs.",
                kind="share",
            ),
            Plot(
                "routes",
                "Router flips",
                (Line(("tim/router_flip_rate",)),),
                about="Share of (token, layer) with another set of experts.",
                kind="share",
            ),
        ),
    ),
    (
        "Optimisation",
        (
            Plot("grad_norm", "Gradient norm", (Line(("actor/grad_norm", "actor/grad_norm/mean")),)),
            Plot("entropy", "Entropy", (Line(("actor/entropy", "actor/entropy_loss")),), unit="nats", kind="nats"),
            Plot("loss", "Policy loss", (Line(("actor/pg_loss",)),)),
            Plot(
                "ppo_k3",
                "K3 of the PPO ratio",
                (Line(("tim/ppo_k3",)),),
                about="How far the policy moved within a step. Under recomputation it contains no mismatch.",
                kind="nats",
                log=True,
            ),
            Plot(
                "clipped",
                "Clipped share",
                (Line(("actor/pg_clipfrac",)),),
                about="Tokens whose PPO clip binds.",
                kind="share",
            ),
            Plot(
                "rejected",
                "Rejected share",
                (Line(("rollout_corr/rollout_rs_masked_fraction",)),),
                about="Tokens removed by rejection.",
                kind="share",
            ),
        ),
    ),
    (
        "Responses and time",
        (
            Plot(
                "response_length", "Response length", (Line(("response_length/mean",)),), unit="tokens", kind="tokens"
            ),
            Plot(
                "truncated",
                "Responses at the length limit",
                (Line(RESPONSE_AT_LIMIT),),
                about="Share as long as data.max_response_length, so mostly cut off. A run without tim/* has verl's "
                "response_length/clip_ratio instead: with the V1 trainer the share as long as the batch's longest.",
                kind="share",
            ),
            Plot("step_time", "Step time", (Line(("timing_s/step", "perf/time_per_step")),), unit="s", kind="seconds"),
            Plot(
                "throughput",
                "Throughput",
                (Line(("perf/throughput",)),),
                unit="tokens/s/device",
                about="Prompt and response tokens of the batch per second of the step.",
            ),
        ),
    ),
)


def first_logged(names: Sequence[str], logs: Sequence[MetricLog]) -> str | None:
    """The first of `names` that any of the logs has."""
    return next((name for name in names if any(log.series(name)[0] for log in logs)), None)


def validation_names(logs: Sequence[MetricLog]) -> list[str]:
    """Validation scores: `val-core/<data source>/<reward or acc>/mean@<n>`, else whatever `val-core` holds."""
    core = sorted({name for log in logs for name in log.names() if name.startswith("val-core/")})
    return [name for name in core if re.search(r"/mean@\d+$", name)] or core


def validation_label(name: str) -> str:
    """The data source inside a validation metric's name."""
    return name.removeprefix("val-core/").rsplit("/", 2)[0] or name
