"""Workers get what they read of a batch, and the trainer keeps the rest."""

from __future__ import annotations

import pytest
from transfer_queue import KVBatchMeta

from verl_tim.training.lean_workers import WITHHELD, LeanWorkers, lean
from verl_tim.training.trainer_v1 import TimTrainerSync

TENSORS = ["input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask", "rollout_log_probs"]


def batch(fields):
    return KVBatchMeta(keys=["a", "b"], tags=[{"n": 1}, {}], partition_id="train", fields=fields, extra_info={"t": 1.0})


def test_objects_are_withheld_and_all_else_is_handed_on_in_order():
    mine = ["my_own", *TENSORS, "tim_row", "multi_modal_inputs"]
    given = batch(["uid", *mine, "extra_fields", "raw_prompt"])
    slim = lean(given, text_only=False)
    assert slim.fields == mine
    assert lean(given, text_only=True).fields == mine[:-1]
    assert len(given.fields) == len(mine) + 3, "the trainer's own stays whole"
    assert (slim.keys, slim.tags, slim.partition_id, slim.size) == (given.keys, given.tags, "train", 2)
    assert slim.extra_info == {"t": 1.0}


def test_a_batch_that_does_not_name_its_fields_is_handed_on_as_it_is():
    given = batch(None)
    assert lean(given, text_only=True) is given


def test_no_tensor_that_a_loss_reads_is_withheld():
    from verl_tim.training.correction_loss import _FIELDS
    from verl_tim.training.forward_records import SAMPLED_FIELD
    from verl_tim.training.records import ROW_FIELD
    from verl_tim.training.replay_step import ROUTES_FIELD

    assert not WITHHELD & {
        *TENSORS,
        *_FIELDS,
        ROW_FIELD,
        SAMPLED_FIELD,
        ROUTES_FIELD,
        "routed_experts",
        "attention_mask",
    }


class Group:
    world_size = 3

    def __init__(self):
        self.got = []

    def compute_log_prob(self, given):
        self.got.append(given.fields)
        return "its answer"

    compute_ref_log_prob = update_actor = compute_log_prob


def test_a_group_answers_as_before():
    group = Group()
    workers = LeanWorkers(group, text_only=True)
    for call in (workers.compute_log_prob, workers.compute_ref_log_prob, workers.update_actor):
        assert call(batch(["uid", "input_ids"])) == "its answer"
    assert group.got == [["input_ids"]] * 3
    assert workers.world_size == 3


@pytest.mark.parametrize("tim", [None, object()])
def test_the_trainer_has_its_groups_again_after_a_failure(tim):
    trainer = object.__new__(TimTrainerSync)
    group = Group()
    trainer.tim, trainer.processor, trainer.actor_rollout_wg = tim, None, group

    def fails():
        with trainer._lean_workers():
            assert isinstance(trainer.actor_rollout_wg, LeanWorkers) == (tim is not None)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert trainer.actor_rollout_wg is group
    assert not hasattr(trainer, "ref_policy_wg")
