"""The published data sets this package prepares: one row of `PUBLISHED` each.

Where a fact comes from is said in the row; `inferred` lists what no source at hand states. A revision is a commit of
the repository, so that the same bytes are fetched for ever; `main` stands where none is known, and then the commit
that the hub resolved is recorded in the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from verl_tim.tasks.errors import InputError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
UNPINNED = "main"


@dataclass(frozen=True)
class HubFile:
    """One file of a repository.

    Attributes:
        split: the file it becomes.
        path: its path in the repository.
        sha256: of its bytes at the pinned revision; None where unknown.
    """

    split: Split
    path: str
    sha256: str | None = None


@dataclass(frozen=True)
class PublishedSet:
    """One published data set.

    Attributes:
        name: what `verl-tim data NAME` and `task=NAME` call it.
        summary: one line for listings.
        repo: its repository on the hub.
        revision: a commit, or `main` where none is known.
        files: what is taken of it.
        columns: what is read of a row, `problem` and `answer` (and `id`), by the name of the column; a dotted name is
            a field of a struct. A `problem` that holds a list of messages is the prompt as published.
        answer: how the true answer stands in its column (`problem.ANSWERS`).
        data_source: what the rows say; verl reports validation by it.
        prompt: `published`, or the template its users put the bare problem into (`prompt.TEMPLATES`).
        template: the template that the published prompts were made with, where it is known, so that another can be
            put in its place.
        licence: what the repository's card says.
        inferred: what of this row no source at hand states.
    """

    name: str
    summary: str
    repo: str
    revision: str
    files: tuple[HubFile, ...]
    columns: Mapping[str, str]
    answer: str
    data_source: str
    prompt: str
    licence: str
    template: str | None = None
    inferred: tuple[str, ...] = ()

    @property
    def pinned(self) -> bool:
        return is_commit(self.revision)

    @property
    def splits(self) -> tuple[Split, ...]:
        return tuple(file.split for file in self.files)

    def at(self, revision: str) -> PublishedSet:
        """The same set at another revision; the checksums of the pinned one do not bind it."""
        if revision == self.revision:
            return self
        return replace(self, revision=revision, files=tuple(replace(file, sha256=None) for file in self.files))


_VERL_COLUMNS = MappingProxyType({"problem": "prompt", "answer": "reward_model.ground_truth"})

PUBLISHED: Mapping[str, PublishedSet] = MappingProxyType(
    {
        row.name: row
        for row in (
            PublishedSet(
                name="sanity_r1d",
                summary="Sanity-Test-R1D-1.5B: 1,460 problems of MATH that R1-Distill-Qwen-1.5B solves now and then",
                # arXiv 2510.26788; VeXact 88ad2a9 examples/README.md; file names: slime examples/flash_reinforce
                repo="sail/Sanity-Test-R1D-1.5B",
                revision=UNPINNED,
                files=(HubFile("train", "train/math_1460.parquet"),),
                columns=_VERL_COLUMNS,
                answer="text",
                data_source="math_1460",
                prompt="published",
                licence="not known here: see the repository's card",
                inferred=(
                    "no commit of the repository is known here, so the revision is main",
                    "columns prompt and reward_model.ground_truth are those that TRL's and slime's examples read",
                    "the published prompts ask for \\boxed{}, in words not known here",
                    "data_source math_1460, after the file: that of the published rows is not known here",
                ),
            ),
            PublishedSet(
                name="dapo_math",
                summary="DAPO-Math-17k: competition problems with integer answers, one of each of the hundred copies",
                # revision, checksum, columns and template agree in several public users' records of this file; the
                # copies: the repository's own earlier card ("about 17k prompts ... duplicated by roughly 100x")
                repo="BytedTsinghua-SIA/DAPO-Math-17k",
                revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
                files=(
                    HubFile(
                        "train",
                        "data/dapo-math-17k.parquet",
                        "534375d6bb8630d22ab46a56e11f2ffec1d288d8f7d04099bc82d68948705941",
                    ),
                ),
                columns=MappingProxyType({**_VERL_COLUMNS, "id": "extra_info.index"}),
                answer="text",
                # verl 0.9.1 utils/reward_score/__init__.py knows this name
                data_source="math_dapo",
                prompt="published",
                template="answer_line",
                licence="Apache-2.0",
            ),
            PublishedSet(
                name="aime24",
                summary="AIME 2024, I and II: 30 problems",
                repo="Maxwell-Jia/AIME_2024",
                revision="8d88b2876a82a080e2f172cc9b25d0d9d2cb4792",
                files=(HubFile("validation", "aime_2024_problems.parquet"),),
                columns=MappingProxyType({"problem": "Problem", "answer": "Answer", "id": "ID"}),
                answer="text",
                data_source="aime24",
                prompt="boxed",
                licence="MIT (the card's; the problems are the MAA's)",
                inferred=("the file's checksum at the pinned revision is not known here",),
            ),
            PublishedSet(
                name="aime25",
                summary="AIME 2025, I and II: 30 problems",
                repo="math-ai/aime25",
                revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
                files=(
                    HubFile(
                        "validation",
                        "test.jsonl",
                        "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",
                    ),
                ),
                columns=MappingProxyType({"problem": "problem", "answer": "answer", "id": "id"}),
                answer="text",
                data_source="aime25",
                prompt="boxed",
                licence="Apache-2.0 (the card's; the problems are the MAA's)",
            ),
            PublishedSet(
                name="gsm8k",
                summary="GSM8K: grade-school word problems, 7,473 to train on and 1,319 to validate on",
                repo="openai/gsm8k",
                revision="740312add88f781978c0658806c59bc2815b9866",
                files=(
                    HubFile(
                        "train",
                        "main/train-00000-of-00001.parquet",
                        "ea82612ea9582142387730c793eb67d3b12849002bc0b7fa6f8efafa7351419d",
                    ),
                    HubFile(
                        "validation",
                        "main/test-00000-of-00001.parquet",
                        "ee7b8da9e381df27b9e3f7758a159ab2bdaa4dbaa910546cbbc47e0cb44e4f59",
                    ),
                ),
                columns=MappingProxyType({"problem": "question", "answer": "answer"}),
                answer="after_hash",
                data_source="openai/gsm8k",
                prompt="hash",
                licence="MIT",
            ),
        )
    }
)


def get_published(name: str) -> PublishedSet:
    """The row called `name`. Raises InputError that lists the known sets."""
    try:
        return PUBLISHED[name]
    except KeyError:
        raise InputError(
            f"task: unknown published data set {name!r}; known sets: {', '.join(sorted(PUBLISHED))}"
        ) from None


def is_commit(revision: str) -> bool:
    """Whether a revision names one commit, and not a branch that moves on."""
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None
