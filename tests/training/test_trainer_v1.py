"""What our V1 trainer adds, apart from a run."""

from __future__ import annotations

import random

from transfer_queue import KVBatchMeta

from verl_tim.training.trainer_v1 import TimTrainerSync, in_order_of_data


def test_rows_go_back_into_the_order_of_the_data():
    uids = [f"{number:x}-uuid" for number in (9, 3, 7, 1)]
    submitted = {uid: place for place, uid in enumerate(uids)}
    keys = [f"{uid}_{session}_{index}" for uid in uids for session in range(11) for index in range(2)]
    shuffled = random.Random(0).sample(keys, len(keys))
    assert [shuffled[row] for row in in_order_of_data(shuffled, submitted)] == keys


def test_a_prompt_that_was_not_submitted_here_comes_last():
    keys = ["stranger_0_0", "b_1_0", "b_0_0", "a_0_0"]
    assert in_order_of_data(keys, {"a": 0, "b": 1}) == [3, 2, 1, 0]


def test_in_the_deterministic_mode_rows_come_in_the_order_of_prompts_whatever_was_finished_first():
    trainer = object.__new__(TimTrainerSync)

    class Buffer:
        def sample(self, **kwargs):
            assert kwargs == {"partition_id": "val"}
            keys = ["b_0_0", "a_1_0", "b_1_0", "a_0_0"]
            return KVBatchMeta(partition_id="val", keys=keys, tags=[{"key": key} for key in keys]), {"found": 4}

    trainer.replay_buffer = Buffer()
    trainer._sample_in_order()
    batch, metrics = trainer.replay_buffer.sample(partition_id="val")
    assert batch.keys == ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    # what belongs to a row moves with it
    assert [tag["key"] for tag in batch.tags] == batch.keys
    assert metrics == {"found": 4}
