"""What deterministic kernels cost a trainer's update: the same batch with torch's flags off and on, in turn.

The trainer is verl's FSDP2 engine on one rank. Variables that a process reads when it starts (cuBLAS's workspace, NCCL,
FlashAttention) are as this process was started, for all variants alike, and one rank has no collective to order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from verl_tim.bench.measure import Measured, measure
from verl_tim.numerics import determinism
from verl_tim.training.in_process import InProcessTrainer, ScoredSequence

OFF, ON, FILLING = "off", "deterministic", "deterministic, new tensors filled"


def benchmark(
    model_path: str,
    *,
    numerics: str,
    dtype: str,
    sequences: int,
    tokens: int,
    repeats: int,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    """Forward, backward and optimiser step of `sequences` x `tokens` tokens; needs a process group.

    Args:
        numerics: "contract" or "stock".
        dtype: of the products, "bfloat16" or "float32".

    Returns:
        Measurements by variant: `OFF`, `ON` (`tim.deterministic`), `FILLING` (torch's default beside it, and so
        verl's `full_determinism`: every new tensor is filled with NaN).
    """
    with flags_kept():
        trainer = InProcessTrainer(model_path, dtype=dtype, numerics=numerics)
        device = next(trainer.engine.module.parameters()).device
        batch = _batch(sequences, tokens, trainer.engine.module.config.vocab_size)
        advantages = [1.0 if number % 2 else -1.0 for number in range(sequences)]

        def variant(switch: Callable[[], None]) -> Callable[[], object]:
            def run() -> object:
                switch()
                return trainer.update(batch, advantages)

            return run

        variants = {OFF: variant(_off), ON: variant(determinism.turn_on), FILLING: variant(_filling)}
        return measure(variants, device, repeats=repeats, done=done)


def _off() -> None:
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def _filling() -> None:
    determinism.turn_on()
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@contextmanager
def flags_kept() -> Iterator[None]:
    """The process's flags are afterwards what they were."""
    from torch._inductor import config as inductor

    mode, cudnn = torch.get_deterministic_debug_mode(), torch.backends.cudnn
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    before = cudnn.deterministic, cudnn.benchmark, inductor.deterministic
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        cudnn.deterministic, cudnn.benchmark, inductor.deterministic = before


def _batch(sequences: int, tokens: int, vocabulary: int) -> list[ScoredSequence]:
    rng = np.random.default_rng(0)
    prompt = max(1, tokens // 8)
    rows = rng.integers(0, vocabulary, size=(sequences, tokens), dtype=np.int64)
    return [ScoredSequence(row[:prompt], row[prompt:]) for row in rows]
