"""verl's client for partial rollouts, with what the servers say of each part of a response.

verl's `FullyAsyncLLMServerClient` sends an aborted request again with the tokens it has drawn, until it ends, and keeps
four of the extra fields (llm_server.py:347), of vLLM's neither the recorded choices nor the version of each token. Here
the answers of all attempts are looked at: every token keeps the version of the weights that drew it, and the recorded
choices of the parts are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

from verl_tim.rollout.failover import FailoverClient
from verl_tim.rollout.recorded import RECORDED_FIELD, Recorded
from verl_tim.rollout.versions import Runs, joined, segment_runs, version_fields

# Answers to the attempts of the request under way; every request runs in a task, and so in a context, of its own turn.
_attempts: ContextVar[list[Any] | None] = ContextVar("verl_tim_attempts", default=None)


class _Attempts(FailoverClient):
    """Stands between verl's two clients: each attempt passes here."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await super().generate(*args, **kwargs)
        attempts = _attempts.get()
        if attempts is not None:
            attempts.append(output)
        return output


class PartialRolloutClient(FullyAsyncLLMServerClient, _Attempts):
    """`FullyAsyncLLMServerClient` whose output says what all of its parts say."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        attempts: list[Any] = []
        token = _attempts.set(attempts)
        try:
            output = await super().generate(*args, **kwargs)
        finally:
            _attempts.reset(token)
        output.extra_fields.update(merged_fields(attempts))
        return output


def merged_fields(attempts: Sequence[Any]) -> dict[str, Any]:
    """Extra fields of a response from verl's TokenOutputs of its parts, in order.

    Raises:
        ValueError: a part names no version for its tokens.
    """
    runs: Runs = joined([segment_runs(part.extra_fields, len(part.token_ids)) for part in attempts])
    # a response without a token has the version of the weights that would have drawn it
    fields = version_fields(runs) if runs else {}
    drew = [part for part in attempts if part.token_ids]
    fields[RECORDED_FIELD] = _recorded([part.extra_fields.get(RECORDED_FIELD) for part in drew])
    kept = [part.extra_fields["kept_mass_min"] for part in drew if "kept_mass_min" in part.extra_fields]
    if kept:
        fields["kept_mass_min"] = min(kept)
    return fields


def _recorded(wires: Sequence[Any]) -> dict[str, Any] | None:
    parts = [Recorded.of_wire(wire) for wire in wires]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    routes = [part.routes_NLK for part in known if part.routes_NLK is not None]
    whole = np.concatenate(routes) if len(routes) == len(known) else None
    return Recorded(
        np.concatenate([part.top1_N for part in known]), whole, known[0].layers if whole is not None else ()
    ).wire()
