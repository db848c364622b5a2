"""The seed of each response: from the run, the prompt's place in the data, the step and the sample, and nothing else.

A rerun therefore draws the same tokens, whatever the batch, the replica or the order of arrival; the n samples of a
prompt differ; and training and validation never share a stream.
"""

from __future__ import annotations

import hashlib
from typing import Any


def response_seed(run_seed: int, *, index: Any, prompt: Any, step: int, sample: int, validate: bool) -> int:
    """A seed in [0, 2**63).

    Args:
        run_seed: `actor_rollout_ref.rollout.seed`.
        index: the prompt's index in its data set (`extra_info.index`); a data set without indices gives 0 everywhere.
        prompt: the prompt itself (chat messages), so that prompts without an index still differ.
        step: `global_steps` of the trainer.
        sample: number of the response among those of the prompt.
        validate: validation and training draw from different streams.
    """
    parts = (int(run_seed), str(index), repr(prompt), int(step), int(sample), bool(validate))
    digest = hashlib.blake2b(repr(parts).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)
