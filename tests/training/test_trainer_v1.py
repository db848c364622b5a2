"""What our V1 trainer adds, apart from a run."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_tim.training.errands import Errands
from verl_tim.training.trainer_v1 import EARLY_FIELDS, TimTrainerSync, in_order_of_data


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


def nested(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


FIELDS = {
    "prompts": nested([[1, 2], [3]]),
    "responses": nested([[4, 5, 6], [7, 8]]),
    "response_mask": nested([[1, 1, 1], [1, 1]]),
    "rollout_log_probs": nested([[-1.0, -2.0, -3.0], [-4.0, -5.0]]),
    "old_log_probs": nested([[-1.5, -2.0, -3.0], [-4.0, -5.0]]),
    "advantages": nested([[1.0, 1.0, 1.0], [-1.0, -1.0]]),
    "rm_scores": nested([[0.0, 0.0, 1.0], [0.0, 0.5]]),
}


class Fetched:
    """A trainer in whose place TransferQueue's fields are looked up here."""

    asynchronous = False
    _reuses = False
    _recorded = (None, None)
    _early = None

    def __init__(self):
        self.observer = SimpleNamespace(bypass=False, errands=Errands())
        self.asked = []

    def _fields(self, batch, *names):
        self.asked.append(set(names))
        return TensorDict({name: FIELDS[name] for name in names if name in FIELDS}, batch_size=2)

    def step_batch(self, keys=("a_0_0", "b_0_0")):
        return TimTrainerSync._step_batch(self, KVBatchMeta(keys=list(keys), tags=[{}, {}], partition_id="train"))


def test_what_was_fetched_early_is_not_fetched_again():
    plain, ahead = Fetched(), Fetched()
    want = plain.step_batch()
    ahead._early = ["a_0_0", "b_0_0"], ahead.observer.errands.send(ahead._fields, None, *EARLY_FIELDS, delay=600)
    found = ahead.step_batch()
    (everything,) = plain.asked
    late, early = ahead.asked
    assert early == set(EARLY_FIELDS)
    assert late == everything - early == {"old_log_probs", "advantages"}
    for name in ("old_log_probs_BT", "rollout_log_probs_BT", "response_mask_BT", "advantages_BT", "scores_B"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name
    assert found.old_log_probs_BT.tolist() == [[-1.5, -2.0, -3.0], [-4.0, -5.0, 0.0]]
    assert [ids.tolist() for ids in found.responses] == [[4, 5, 6], [7, 8]]
    assert found.tokens == 8
    ahead.step_batch()
    assert ahead.asked[2] == everything, "what was fetched early is of one step"


@pytest.mark.parametrize("step", [2, 3])
def test_a_step_that_only_warms_up_the_critic_fetches_nothing_early(monkeypatch, step):
    batch = KVBatchMeta(keys=["a_0_0", "b_0_0"], tags=[{}, {}], partition_id="train")
    trainer = object.__new__(TimTrainerSync)
    trainer.observer, trainer.global_steps = SimpleNamespace(errands=Errands()), step
    trainer.config = SimpleNamespace(trainer=SimpleNamespace(critic_warmup=3))
    trainer.correction = trainer.reuse = trainer._early = None
    asked = []
    monkeypatch.setattr(TimTrainerSync, "_fields", lambda self, _, *names: asked.append(names) or {names[0]: [{}, {}]})
    monkeypatch.setattr(TimTrainerSync, "_put", lambda self, batch, fields: batch)
    monkeypatch.setattr(PPOTrainerSync, "_compute_old_log_prob", lambda self, batch, metrics: batch)
    assert trainer._compute_old_log_prob(batch, {}) is batch
    trainer.observer.errands.send(int).result()
    assert asked == [("extra_fields",), *([EARLY_FIELDS] if step == 3 else [])]
    assert (trainer._early is None) == (step == 2)


def test_what_was_fetched_for_other_rows_is_not_taken():
    trainer = Fetched()
    trainer._early = ["b_0_0", "a_0_0"], trainer.observer.errands.send(trainer._fields, None, *EARLY_FIELDS)
    trainer._early[1].result()
    trainer.step_batch()
    assert trainer.asked[1] >= set(EARLY_FIELDS)


def test_a_failed_fetch_fails_the_step():
    trainer = Fetched()
    trainer._early = ["a_0_0", "b_0_0"], trainer.observer.errands.send(lambda: {}["gone"])
    with pytest.raises(KeyError, match="gone"):
        trainer.step_batch()


def test_old_log_probs_are_not_fetched_where_the_step_reuses_the_rollouts():
    trainer = Fetched()
    trainer._reuses = True
    assert trainer.step_batch().old_log_probs_BT is None
    assert "old_log_probs" not in trainer.asked[0]
