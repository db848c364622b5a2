"""What the trainer's workers get of a batch: tensors, and none of the Python objects that say things of its responses.

verl 0.9.1, trainer/ppo/v1/trainer_base.py:1658, 1707, 1860: a worker gets every field that the batch has. Beside
tensors those are some fifteen Python objects for each response: its messages, what its data set says of it, what its
rollout said. Each of them is packed, sent, unpacked, chosen for its mini-batch and its micro-batch, and "moved" to the
device, and nothing that a worker computes looks at it: of a small model that is half of what a step costs its worker.
Unnecessary once verl names the fields that a worker reads. No upstream issue is known.
"""

from __future__ import annotations

import copy
from typing import Any

from transfer_queue import KVBatchMeta

WITHHELD = frozenset(
    (
        # of verl's data set (utils/dataset/rl_dataset.py) and its step (trainer_base.py: _add_batch_to_generate)
        *("raw_prompt", "raw_prompt_ids", "full_prompts", "index", "uid", "agent_name", "global_steps", "session_id"),
        *("data_source", "ability", "reward_model", "extra_info", "tools_kwargs", "interaction_kwargs", "prompt"),
        # of verl's agent loop (agent_loop.py: AgentLoopOutput)
        *("extra_fields", "metrics", "num_turns", "mm_processor_kwargs", "mm_processor_output"),
    )
)
"""Fields that no worker reads. What a data set of the user's has beside them is handed on."""

# A dict for each response, with images and the like; the model's forward reads it.
_IMAGES = "multi_modal_inputs"


class LeanWorkers:
    """A worker group that is handed lean batches (`lean`) for forwards and updates; all else is the group's.

    Args:
        worker_group: verl's.
        text_only: there is no processor for images and the like.
    """

    def __init__(self, worker_group: Any, *, text_only: bool) -> None:
        self._worker_group, self._text_only = worker_group, text_only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker_group, name)

    def compute_log_prob(self, batch: KVBatchMeta) -> Any:
        return self._worker_group.compute_log_prob(lean(batch, text_only=self._text_only))

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> Any:
        return self._worker_group.compute_ref_log_prob(lean(batch, text_only=self._text_only))

    def update_actor(self, batch: KVBatchMeta) -> Any:
        return self._worker_group.update_actor(lean(batch, text_only=self._text_only))


def lean(batch: KVBatchMeta, *, text_only: bool) -> KVBatchMeta:
    """The batch without what no worker reads; as it is where it does not name its fields."""
    if batch.fields is None:
        return batch
    withheld = WITHHELD | {_IMAGES} if text_only else WITHHELD
    # no constructor: it copies 512 tags, each a dict
    slim = copy.copy(batch)
    slim.fields = [name for name in batch.fields if name not in withheld]
    return slim
