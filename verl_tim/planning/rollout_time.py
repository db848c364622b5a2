"""Generation of one step's answers on one replica, event by event.

All prompts are there at once. Sequences run while `max_num_seqs` and the KV pool allow; an ended one makes room for a
waiting one; when the pool is full the youngest is preempted and computes its context again later (engine/scheduler.py).
Between two such events all that changes is that every context grows, so time is summed over a few thousand intervals
instead of over tokens. Prefill costs arithmetic at the trainer's measured forward rate without the head. The replica
shown is the one that got the longest answer of the batch: a step ends with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verl_tim.planning.decode import Decode
from verl_tim.planning.lengths import Lengths

_MOST_EVENTS = 200_000


@dataclass(frozen=True)
class RolloutTime:
    """Generation on the replica with the longest answer.

    Attributes:
        seconds: until its last answer ends; prefill, tail: of which prefill, and time with less than a quarter of the
            sequences that ran at most.
        tokens: drawn by it; sequences: of it.
        floor_seconds: what reading alone would take.
        at_once, most_context: most sequences and most tokens of context that ran together.
        preemptions: sequences thrown out; recomputed_tokens: of their contexts.
        waited: sequences that could not start at once.
    """

    seconds: float
    prefill: float
    tail: float
    tokens: float
    sequences: int
    floor_seconds: float
    at_once: int
    most_context: float
    preemptions: int
    recomputed_tokens: float
    waited: int

    @property
    def tokens_per_second(self) -> float:
        """Drawn by this replica, over the whole of its generation."""
        return self.tokens / self.seconds

    @property
    def share_of_floor(self) -> float:
        return self.floor_seconds / (self.seconds - self.prefill)


def simulate(decode: Decode, prompt: float, answers: np.ndarray, *, pool_tokens: int, samples: int = 1) -> RolloutTime:
    """Run a replica's sequences.

    Args:
        prompt: tokens of every prompt.
        answers: float64 [sequences], tokens of each answer, in order of arrival.
        pool_tokens: that the KV pool holds; it must hold one prompt with its longest answer.
        samples: sequences that share one prompt's prefill (prefix cache).
    """
    s, shape = decode.settings, decode.shape
    assert pool_tokens >= prompt + answers.max(), "a sequence that the pool cannot hold never ends"
    numerics = "contract" if s.engine != "vllm" else "stock"
    degree = s.replica_gpus
    linear = shape.linear_flops(head=False) / decode.speeds.linear(numerics, shape) / degree
    square = shape.attention_flops_per_square / decode.speeds.attention(numerics) / degree

    def prefill_seconds(tokens: float) -> float:
        return linear * tokens + square * tokens**2

    waiting = list(range(len(answers)))[::-1]  # the next one is last
    drawn = np.zeros(len(answers))
    running: list[int] = []  # oldest first
    seconds = prefill = floor = tail = recomputed = most_context = 0.0
    preemptions = at_once = waited = 0
    first = True
    per_prompt = 1.0 / samples
    spans: list[tuple[int, float]] = []
    for _ in range(_MOST_EVENTS):
        context = float(sum(prompt + drawn[index] for index in running))
        # as the scheduler, keep some room for those that run (its watermark)
        while waiting and len(running) < s.max_sequences:
            need = prompt + float(drawn[waiting[-1]]) + 1
            if context + need > pool_tokens * (0.98 if running else 1.0):
                break
            index = waiting.pop()
            running.append(index)
            known = prompt + float(drawn[index])
            context += known
            took = prefill_seconds(known) if known > prompt else prefill_seconds(prompt) * per_prompt
            prefill += took
            seconds += took
        if first:
            waited, first = len(waiting), False
        if not running:
            break
        count = len(running)
        at_once = max(at_once, count)
        indices = np.array(running)
        to_end = float((answers[indices] - drawn[indices]).min())
        to_full = (pool_tokens - context) / count
        steps = max(0.0, min(to_end, to_full))
        middle = context + count * steps / 2
        step_floor = decode.floor_seconds(count, middle)
        span = steps * (step_floor + decode.excess_seconds(count))
        seconds += span
        floor += steps * step_floor
        spans.append((count, span))
        drawn[indices] += steps
        most_context = max(most_context, context + count * steps)
        ended = answers[indices] - drawn[indices] <= 1e-6
        if ended.any():
            running = [index for index, end in zip(running, ended, strict=True) if not end]
        elif to_full <= to_end and count > 1:
            victim = running.pop()
            waiting.append(victim)
            preemptions += 1
            recomputed += prompt + float(drawn[victim])
    else:
        raise RuntimeError(f"generation took more than {_MOST_EVENTS} events")
    tail = sum(span for count, span in spans if count < math.ceil(at_once / 4))
    return RolloutTime(
        seconds, prefill, tail, float(answers.sum()), len(answers), floor, at_once, most_context, preemptions,
        recomputed, waited,
    )  # fmt: skip


def batch_rollout(decode: Decode, prompts: Lengths, answers: Lengths, *, pool_tokens: int) -> RolloutTime:
    """A step's generation, on the replica that got the longest answer.

    Answers are dealt to the replicas by length, so that every replica gets a fair sample, this one the longest of each
    round; they arrive in an order drawn with a fixed seed.
    """
    s = decode.settings
    every = answers.quantiles(s.sequences)[::-1]
    mine = every[:: s.replicas].copy()
    np.random.default_rng(0).shuffle(mine)
    samples = s.samples if s.prefix_cache else 1
    return simulate(decode, prompts.mean, mine, pool_tokens=pool_tokens, samples=samples)
