"""What the runs of `+matrix=evidence` are called: MODEL-ALGORITHM-VARIANT-data.seed=N."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"(?P<model>\w+)-(?P<algorithm>\w+)-(?P<variant>\w+)-data\.seed=(?P<seed>\d+)", re.ASCII)

BASELINE = "vexact"
# In the order of columns and legends.
VARIANTS = (BASELINE, "vllm_recompute", "vllm_bypass", "vllm_tis", "vllm_invariant")
MIXTURE = "moe"
MODELS = ("dense", MIXTURE)
ALGORITHMS = ("reinforce", "grpo")
SEEDS = (1, 2, 3)
MISMATCHING = "vllm_recompute"
"""The variant from whose dumps corrections and thresholds are tried: nothing is done about its mismatch."""


@dataclass(frozen=True)
class RunName:
    """A run's place in the matrix."""

    model: str
    algorithm: str
    variant: str
    seed: int

    @classmethod
    def parse(cls, name: str) -> RunName | None:
        """None for a name of another form."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(match["model"], match["algorithm"], match["variant"], int(match["seed"]))

    def __str__(self) -> str:
        return f"{self.model}-{self.algorithm}-{self.variant}-data.seed={self.seed}"

    @property
    def pair(self) -> str:
        """What is compared on one page: the runs of a model under an algorithm."""
        return f"{self.model}-{self.algorithm}"


PLANNED = tuple(
    RunName(model, algorithm, variant, seed)
    for model in MODELS
    for algorithm in ALGORITHMS
    for variant in VARIANTS
    for seed in SEEDS
)
