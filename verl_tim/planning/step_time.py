"""A training step in seconds, part by part, and what of it rests on what."""

from __future__ import annotations

from dataclasses import dataclass

from verl_tim.planning.decode import Decode
from verl_tim.planning.lengths import Lengths
from verl_tim.planning.rates import Speeds, rate
from verl_tim.planning.rollout_memory import RolloutMemory
from verl_tim.planning.rollout_time import RolloutTime, batch_rollout
from verl_tim.planning.settings import Settings
from verl_tim.planning.shape import Shape
from verl_tim.planning.sync_time import SyncTime, sync_time
from verl_tim.planning.trainer_time import PassTime, TrainerTime


@dataclass(frozen=True)
class Part:
    """One part of a step.

    Attributes:
        name, seconds: of it.
        of: the sum it comes from, for a reader.
        basis: "measured rate", or why it is extrapolated or assumed; never empty.
    """

    name: str
    seconds: float
    of: str
    basis: tuple[str, ...]


@dataclass(frozen=True)
class StepTime:
    """A step. Validation and checkpoints are not in it."""

    parts: tuple[Part, ...]
    rollout: RolloutTime
    update: PassTime
    sync: SyncTime
    tokens: float  # of all sequences, prompts and answers
    drawn: float  # of all answers

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)


MEASURED = "measured rate"
_HOST = "the host link's speed is assumed"


def step_time(shape: Shape, settings: Settings, speeds: Speeds, prompts: Lengths, answers: Lengths) -> StepTime:
    """Of a run whose memory fits."""
    s = settings
    pool = RolloutMemory(shape, s, speeds.gpu.memory).pool_tokens
    rollout = batch_rollout(Decode(shape, s, speeds), prompts, answers, pool_tokens=pool)
    trainer = TrainerTime(shape, s, speeds)
    batch = trainer.work(prompts, answers, s.sequences)
    mini = trainer.work(prompts, answers, s.mini_prompts * s.samples)
    forward = trainer.forward(batch, s.micro_tokens(update=False))
    update = trainer.update(mini, s.micro_tokens(update=True))
    updates = s.prompts // s.mini_prompts * s.epochs
    sync = sync_time(shape, s, speeds)
    reasons, training = speeds.reasons(shape), speeds.reasons(shape, training=True)
    network = ["collectives are assumed, not measured"] if s.gpus > 1 else []
    parts = [
        Part(
            "rollout",
            rollout.seconds,
            f"{rollout.sequences} sequences on the slowest of {s.replicas} replicas, "
            f"{rollout.tokens_per_second:,.0f} tokens/s, {rollout.share_of_floor:.0%} of the memory's speed",
            _basis(reasons, _rollout_reasons(s, rollout)),
        ),
        Part(
            "verl's own work",
            s.sequences * rate("verl_per_sample").value / s.agent_workers,
            f"{s.sequences} samples / {s.agent_workers} agent-loop workers",
            ("measured on a CPU with one worker, an upper bound; nothing hides it here",),
        ),
    ]
    if s.recompute_share:
        of = f"{batch.tokens:,.0f} tokens per GPU" + ("" if s.recompute_share == 1 else ", in audited steps only")
        seconds = s.recompute_share * forward.seconds
        parts.append(Part("old log-probs", seconds, of, _basis(training, [*network, *_host(forward)])))
    if s.reference:
        reference = trainer.reference(batch, s.micro_tokens(update=False))
        of = f"{batch.tokens:,.0f} tokens per GPU, weights from the host"
        parts.append(Part("reference", reference.seconds, of, _basis(training, [*network, *_host(reference)])))
    parts += [
        Part(
            "update",
            updates * update.seconds + trainer.moving_states,
            f"{updates} optimiser steps of {update.micro_batches} micro-batches per GPU; of one: arithmetic "
            f"{update.arithmetic:.3g}, collectives {update.network:.3g}, AdamW {update.optimizer:.2g} s",
            _basis(training, [*network, *(_host(update) or _moved(trainer))]),
        ),
        Part(
            "weight sync",
            sync.seconds,
            f"copies {sync.copies:.2g}, gathers {sync.network:.2g}, per tensor and bucket {sync.host:.2g} s",
            _basis(reasons, ["launches and calls are assumed, not measured"]),
        ),
    ]
    tokens = s.sequences * (prompts.mean + answers.mean)
    return StepTime(tuple(parts), rollout, update, sync, tokens, s.sequences * answers.mean)


def _basis(*reasons: list[str]) -> tuple[str, ...]:
    return tuple(reason for group in reasons for reason in group) or (MEASURED,)


def _host(time: PassTime) -> list[str]:
    return [_HOST] if time.host else []


def _moved(trainer: TrainerTime) -> list[str]:
    return [_HOST] if trainer.moving_states else []


def _rollout_reasons(s: Settings, rollout: RolloutTime) -> list[str]:
    found = []
    if s.engine == "stock":
        found.append("stock's decode was not measured; vexact's stands for it")
    if s.replica_gpus > 1:
        found.append("replicas of several GPUs were not measured")
    if rollout.at_once > 256:
        found.append("measured up to 256 sequences at once")
    if rollout.most_context / max(1, rollout.at_once) > 4608:
        found.append("measured up to a context of 4,608 tokens")
    return found
