"""Streams of distinct problems, in two pools that never share one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_tim.tasks.catalog import Task, make_generator
from verl_tim.tasks.verifier import verify

Pool = Literal["train", "validation"]

# One problem in VALIDATION_SHARE belongs to validation.
VALIDATION_SHARE = 4
_CHUNK = 4096


@dataclass(frozen=True)
class Problem:
    """One problem as the generator made it."""

    question: str
    answer: str
    metadata_json: str

    @property
    def metadata(self) -> dict[str, Any]:
        """What the generator says about the problem."""
        return json.loads(self.metadata_json)

    @property
    def pool(self) -> Pool:
        return pool_of(self.question)


def pool_of(question: str) -> Pool:
    """The pool a problem belongs to, by a hash of its text alone.

    So training and validation are disjoint by construction, across seeds, sizes and runs: whatever a model was
    warmed up on and whatever it was trained on, no validation problem was among them.
    """
    digest = hashlib.sha256(" ".join(question.split()).encode()).digest()
    return "validation" if digest[0] % VALIDATION_SHARE == 0 else "train"


def stream_problems(task: Task, difficulty: Mapping[str, Any], seed: int) -> Iterator[Problem | None]:
    """Endless problems of both pools, in an order that depends on (task, difficulty, seed) only.

    Yields None in place of a problem whose own ground truth the verifier does not score 1.0 (reasoning-gym's
    verifiers of negative or rounded answers have such corners): it could never be solved. Duplicates are not removed.
    """
    chunk = 0
    while True:
        # reasoning-gym draws entry i from Random(seed + i): neighbouring seeds would give the same problems shifted
        # by one, so every chunk of every seed gets a seed of its own from a hash
        label = f"{task.name}/{seed}/{chunk}".encode()
        generator = make_generator(
            task, difficulty, seed=int.from_bytes(hashlib.sha256(label).digest()[:6], "big"), size=_CHUNK
        )
        for index in range(_CHUNK):
            entry = generator[index]
            solvable = verify(task, entry["answer"], entry) == 1.0
            yield Problem(entry["question"], entry["answer"], _metadata_json(entry["metadata"])) if solvable else None
        chunk += 1


def stream_pool(task: Task, difficulty: Mapping[str, Any], seed: int, pool: Pool) -> Iterator[Problem]:
    """The problems of one pool out of `stream_problems`."""
    for problem in stream_problems(task, difficulty, seed):
        if problem is not None and problem.pool == pool:
            yield problem


def _metadata_json(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, sort_keys=True, default=str)
