"""Trainer and rollout pair only if the same things decide their bits: contract, its device part, library versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_tim.training.config import ATTENTION_KEY, ConfigError

PAIRED_VERSIONS = ("torch", "triton", "verl-tim", "cuda")
"""Packages whose version may change the order of a rounding; vLLM joins them where its FlashAttention is in use."""


def check_pairing(trainer: Mapping[str, Mapping[str, Any]], rollout: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse processes that cannot agree bit for bit, before the first step.

    Args:
        trainer, rollout: facts of each process (`ProcessFacts`), by its name; all in contract numerics.

    Raises:
        ConfigError: names each fact that differs, the processes and the remedy.
    """
    problems = []
    reference_name, reference = next(iter(trainer.items()))
    for name, facts in (*trainer.items(), *rollout.items()):
        here, there = facts.get("contract_id"), reference.get("contract_id")
        if here != there:
            problems.append(
                f"{name} keeps the contract {here}, {reference_name} keeps {there}: give both one device type and "
                f"dtype (actor_rollout_ref.rollout.dtype), and one attention contract ({ATTENTION_KEY}, default auto; "
                "chunk64 needs nothing but Triton)"
            )
        for package in _packages(reference):
            here, there = (side.get("versions", {}).get(package) for side in (facts, reference))
            if here != there:
                problems.append(
                    f"{name} has {package} {here}, {reference_name} has {there}: install one version for both"
                )
    if problems:
        raise ConfigError("rollout=vexact cannot be exact: " + "; ".join(dict.fromkeys(problems)))


def _packages(facts: Mapping[str, Any]) -> tuple[str, ...]:
    uses_vllm = str(facts.get("contract_id")).startswith("fa3")
    return (*PAIRED_VERSIONS, "vllm") if uses_vllm else PAIRED_VERSIONS
