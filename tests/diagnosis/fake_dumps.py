"""Token dumps with a mismatch of known size, made up from a seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from verl_tim.diagnosis.token_dump import DumpedSequence, write_step

WORDS = ("3", "+", "4", "=", "7", " so", " the", " answer", " is", ".")

# d of one sequence's tokens: (places 0.., advantage, random generator) -> nats.
Mismatch = Callable[[np.ndarray, float, np.random.Generator], np.ndarray]


def none(place_N: np.ndarray, advantage: float, noise: np.random.Generator) -> np.ndarray:
    return np.zeros(len(place_N))


def offset(size: float) -> Mismatch:
    return lambda place_N, advantage, noise: np.full(len(place_N), size)


def normal(size: float) -> Mismatch:
    return lambda place_N, advantage, noise: noise.normal(0, size, len(place_N))


def drift(slope: float) -> Mismatch:
    """|d| grows with the place."""
    return lambda place_N, advantage, noise: slope * place_N


def heavy_tail(size: float, share: float) -> Mismatch:
    """Almost nothing, and `size` on a small share of the tokens."""

    def d(place_N: np.ndarray, advantage: float, noise: np.random.Generator) -> np.ndarray:
        return np.where(noise.random(len(place_N)) < share, size, noise.normal(0, 1e-4, len(place_N)))

    return d


def one_sign(size: float, share: float) -> Mismatch:
    """`size` on a share of the sequences with negative advantage, noise elsewhere: skews the objective."""

    def d(place_N: np.ndarray, advantage: float, noise: np.random.Generator) -> np.ndarray:
        hit = advantage < 0 and noise.random() < share
        return noise.normal(0, 1e-3, len(place_N)) + (size if hit else 0.0)

    return d


def write_dumps(
    run_dir: Path,
    mismatch: Mismatch,
    *,
    steps: int = 4,
    prompts: int = 16,
    per_prompt: int = 8,
    lengths: tuple[int, int] = (6, 14),
    seed: int = 0,
    kept: Callable[[np.ndarray], np.ndarray] | None = None,
    flips: dict[int, float] | None = None,
    text: tuple[str, ...] = WORDS,
    fields: tuple[str, ...] = ("old_log_prob_N", "rollout_log_prob_N"),
    gap: int = 0,
) -> Path:
    """Dumps of `steps` steps.

    Args:
        kept: d -> mask after rejection; all kept without it.
        flips: layer -> share of tokens whose second expert differs.
        fields: log-probs that are recorded.
        gap: tokens that a tool wrote in the middle of each response.
    """
    noise = np.random.default_rng(seed)
    layers = list(flips or {})
    for step in range(1, steps + 1):
        sequences = []
        for row in range(prompts * per_prompt):
            count = int(noise.integers(*lengths))
            advantage = 1.0 if row % 2 else -1.0
            place_N = np.arange(count)
            rollout_N = (-2.0 - noise.gamma(1.0, 0.5, count)).astype(np.float32)
            # rounded to the rollout's grid, so that a d of 0 is 0 after fp32
            old_N = (rollout_N + mismatch(place_N, advantage, noise)).astype(np.float32)
            log_probs = {"old_log_prob_N": old_N, "rollout_log_prob_N": rollout_N}
            routes = {}
            if layers:
                rollout_NLK = np.tile(np.array([0, 1], np.int16), (count, len(layers), 1))
                train_NLK = rollout_NLK.copy()
                for at, share in enumerate((flips or {}).values()):
                    train_NLK[noise.random(count) < share, at, 1] = 2
                routes = {
                    "routes_rollout_NJ": rollout_NLK.reshape(count, -1),
                    "routes_train_NJ": train_NLK.reshape(count, -1),
                }
            sequences.append(
                DumpedSequence(
                    row=row,
                    uid=f"{step}-{row // per_prompt}",
                    group=row // per_prompt,
                    position_N=place_N + gap * (place_N >= count // 2),
                    token_id_N=noise.integers(0, len(text), count),
                    text_N=[text[i % len(text)] for i in range(count)],
                    advantage_N=np.full(count, advantage, np.float32),
                    kept_N=np.ones(count, bool) if kept is None else kept(old_N - rollout_N),
                    turn_N=1 + (place_N >= count // 2) * (gap > 0),
                    weight_version_N=np.full(count, step),
                    **{name: log_probs[name] for name in fields},
                    **routes,
                )
            )
        write_step(run_dir, step, sequences, layers=layers, top_k=2 if layers else 0, correction={"rollout_rs": None})
    return run_dir
