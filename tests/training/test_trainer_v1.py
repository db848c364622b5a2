"""What our V1 trainer adds, apart from a run."""

from __future__ import annotations

import random

from verl_tim.training.trainer_v1 import in_order_of_data


def test_rows_go_back_into_the_order_of_the_data():
    uids = [f"{number:x}-uuid" for number in (9, 3, 7, 1)]
    submitted = {uid: place for place, uid in enumerate(uids)}
    keys = [f"{uid}_{session}_{index}" for uid in uids for session in range(11) for index in range(2)]
    shuffled = random.Random(0).sample(keys, len(keys))
    assert [shuffled[row] for row in in_order_of_data(shuffled, submitted)] == keys


def test_a_prompt_that_was_not_submitted_here_comes_last():
    keys = ["stranger_0_0", "b_1_0", "b_0_0", "a_0_0"]
    assert in_order_of_data(keys, {"a": 0, "b": 1}) == [3, 2, 1, 0]
