"""Which weights drew which token of a response: runs of equal versions, from the engine to the trainer.

Under verl's asynchronous trainers weights change while responses are being drawn. The engine stamps every token; verl
carries the oldest and the newest version of a response as tags, which say all where the two are equal. Where they are
not, the runs travel beside them as one extra field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

VERSIONS_FIELD = "tim_versions"  # extra field of an output: `runs_of`, where a response has several versions
UNKNOWN = -1  # of a token whose version nobody recorded

Runs = list[tuple[int, int]]


def runs_of(versions: Iterable[int]) -> Runs:
    """(version, tokens) of each run of equal versions, in order."""
    return [(int(version), sum(1 for _ in run)) for version, run in groupby(versions)]


def segment_runs(extra_fields: Mapping[str, Any], tokens: int) -> Runs:
    """The runs of one answer of a server, from its extra fields.

    Raises:
        ValueError: the fields name no version for the tokens, or runs of another length.
    """
    if tokens == 0:
        return []
    given = extra_fields.get(VERSIONS_FIELD)
    if given is not None:
        runs = [(int(version), int(count)) for version, count in given]
        if sum(count for _, count in runs) != tokens:
            raise ValueError(f"{VERSIONS_FIELD}={given} is not of {tokens} tokens")
        return runs
    # vLLM's server of verl names the one version that it holds (verl 0.9.1, vllm_async_server.py:689)
    only = extra_fields.get("global_steps")
    oldest, newest = extra_fields.get("min_global_steps", only), extra_fields.get("max_global_steps", only)
    if oldest is None or oldest != newest:
        raise ValueError(
            f"an answer of {tokens} tokens names versions {oldest} to {newest} and no {VERSIONS_FIELD} beside them"
        )
    return [(int(oldest), tokens)]


def joined(parts: Sequence[Runs]) -> Runs:
    """The runs of answers that follow each other in one response."""
    versions = [run for part in parts for run in part]
    return [(version, sum(count for _, count in run)) for version, run in groupby(versions, key=lambda run: run[0])]


def version_fields(runs: Runs) -> dict[str, Any]:
    """verl's tags of a response with at least one token, and the runs where there are several."""
    versions = [version for version, _ in runs]
    fields: dict[str, Any] = {
        "global_steps": versions[-1],
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
    }
    return fields | ({VERSIONS_FIELD: [list(run) for run in runs]} if len(runs) > 1 else {})


def token_versions(extra_fields: Mapping[str, Any], length: int) -> np.ndarray:
    """int64 (length,): the version of each response token; `UNKNOWN` for all where not every one is known.

    Of a conversation verl keeps the extra fields of its first turn beside the newest version of all turns. With one
    version throughout that is enough; else the tokens of later turns have no record.

    Args:
        extra_fields: of verl's agent loop.
        length: response tokens.
    """
    oldest, newest = extra_fields.get("min_global_steps"), extra_fields.get("max_global_steps")
    if oldest is not None and oldest == newest:
        return np.full(length, int(oldest), np.int64)
    given = extra_fields.get(VERSIONS_FIELD)
    if given is None:
        return np.full(length, UNKNOWN, np.int64)
    versions = np.repeat([int(version) for version, _ in given], [int(count) for _, count in given])
    # what the agent cut off at the response's limit is no token of it
    return versions[:length].astype(np.int64) if len(versions) >= length else np.full(length, UNKNOWN, np.int64)
