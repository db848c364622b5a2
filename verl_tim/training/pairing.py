"""Trainer and rollout pair only if the same things decide their bits: contract, its device part, library versions.

Checked twice: of all processes at the start (`check_pairing`, from the manifest), and by each rollout server with each
weight update, whose stream brings the trainer rank's card (`IdentifiedWeights`, `check_update`): a server that is
another process by then may have another installation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from verl_tim.training.config import ATTENTION_KEY, ConfigError

PAIRED_VERSIONS = ("torch", "triton", "verl-tim", "cuda")
"""Packages whose version may change the order of a rounding; vLLM joins them where its FlashAttention is in use."""

Card = Mapping[str, Any]
"""What decides a process's bits: its `contract_id` and `versions`, as in `ProcessFacts`, and `process`, its name. Plain
values, since the other side may have another version of this package."""


def check_pairing(trainer: Mapping[str, Mapping[str, Any]], rollout: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse processes that cannot agree bit for bit, before the first step.

    Args:
        trainer, rollout: facts of each process (`ProcessFacts`), by its name; all in contract numerics.

    Raises:
        ConfigError: names each fact that differs, the processes and the remedy.
    """
    reference_name, reference = next(iter(trainer.items()))
    problems = []
    for name, facts in (*trainer.items(), *rollout.items()):
        problems += _differences(name, facts, reference_name, reference)
    if problems:
        raise ConfigError("rollout=vexact cannot be exact: " + "; ".join(dict.fromkeys(problems)))


def check_update(trainer: Card, server: Card) -> None:
    """Refuse weights from a trainer that cannot agree bit for bit with the server that would take them.

    Raises:
        ConfigError: names each fact that differs, both processes and the remedy.
    """
    problems = _differences(server["process"], server, trainer["process"], trainer)
    if problems:
        raise ConfigError(
            "weight update refused, since rollout=vexact would no longer be exact: "
            + "; ".join(problems)
            + "; then restart the run from its last checkpoint (trainer.resume_mode=auto)"
        )


def _differences(name: str, facts: Mapping[str, Any], other: str, reference: Mapping[str, Any]) -> list[str]:
    problems = []
    here, there = facts.get("contract_id"), reference.get("contract_id")
    if here != there:
        problems.append(
            f"{name} keeps the contract {here}, {other} keeps {there}: give both one device type and "
            f"dtype (actor_rollout_ref.rollout.dtype), and one attention contract ({ATTENTION_KEY}, default auto; "
            "chunk64 needs nothing but Triton)"
        )
    for package in _packages(reference):
        here, there = (side.get("versions", {}).get(package) for side in (facts, reference))
        if here != there:
            problems.append(f"{name} has {package} {here}, {other} has {there}: install one version for both")
    return problems


def _packages(facts: Mapping[str, Any]) -> tuple[str, ...]:
    uses_vllm = str(facts.get("contract_id")).startswith("fa3")
    return (*PAIRED_VERSIONS, "vllm") if uses_vllm else PAIRED_VERSIONS


@functools.cache
def _versions(device_type: str) -> Mapping[str, str]:
    """Of this process's packages, read once: what is installed later is not what runs here."""
    import torch

    from verl_tim.diagnosis.process import package_versions

    found = package_versions((*PAIRED_VERSIONS, "vllm"))
    return {**found, "cuda": str(torch.version.cuda)} if device_type == "cuda" else found


def card_of(process: str, contract: str, device_type: str) -> dict[str, Any]:
    """This process's card.

    Args:
        process: its name, for messages.
        contract: the contract id that it keeps.
        device_type: where it computes.
    """
    return {"process": process, "contract_id": contract, "versions": dict(_versions(device_type))}


class IdentifiedWeights:
    """A stream of (name, tensor) that knows from whom it comes. Iterates as the stream does."""

    def __init__(self, stream: Iterable[tuple[str, Any]], card: Card) -> None:
        self._stream, self._card = iter(stream), card

    async def card(self) -> Card:
        """The trainer rank's."""
        return self._card

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._stream

    def __next__(self) -> tuple[str, Any]:
        return next(self._stream)


async def card_with(weights: Any) -> Card | None:
    """The card that comes with a stream of weights, before its first tensor; None where none does (a trainer in stock
    numerics, or a checkpoint engine that carries tensors alone)."""
    return await weights.card() if hasattr(weights, "card") else None
