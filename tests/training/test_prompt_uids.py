"""Names of prompts: random as verl's, or counted within a step and in order."""

from __future__ import annotations

import uuid

from verl_tim.training.prompt_uids import PROMPT_UIDS, PromptUids, prompt_order


def test_random_unless_counted():
    uids = PromptUids()
    assert uids.uuid4() != uids.uuid4()
    assert uids.uuid4().version == 4


def test_counted_names_repeat_start_anew_with_each_step_and_are_in_order():
    def names():
        step, uids = [0], PromptUids()
        uids.count_by(lambda: step[0])
        found = []
        for step[0] in (0, 0, 1, 1, 1, 300):
            found.append(str(uids.uuid4()))
        return found

    first = names()
    assert first == names()
    assert len(set(first)) == 6
    assert first == sorted(first)
    assert all(uuid.UUID(name) for name in first)
    # verl takes the parts of a row's name apart at underscores
    assert not any("_" in name for name in first)


def test_a_resumed_run_gives_a_step_the_names_it_had():
    step = [7]
    whole, resumed = PromptUids(), PromptUids()
    whole.count_by(lambda: step[0])
    for step[0] in (6, 7):
        last = whole.uuid4()
    resumed.count_by(lambda: 7)
    assert resumed.uuid4() == last


def test_they_can_be_random_again():
    uids = PromptUids()
    uids.count_by(lambda: 1)
    uids.count_by(None)
    assert uids.uuid4().version == 4


def test_rows_are_sorted_by_prompt_session_and_output():
    keys = ["b_0_0", "a_10_0", "a_2_1", "a_2_0"]
    assert sorted(keys, key=prompt_order) == ["a_2_0", "a_2_1", "a_10_0", "b_0_0"]


def test_both_of_verls_trainers_name_prompts_by_it():
    import verl.trainer.ppo.ray_trainer as legacy
    import verl.trainer.ppo.v1.trainer_base as v1

    assert legacy.uuid is PROMPT_UIDS
    assert v1.uuid is PROMPT_UIDS
