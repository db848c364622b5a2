"""The reward's KL penalty with verl's own function: missing log-probs add nothing, all else keeps its bits."""

from __future__ import annotations

import types
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.v1 import trainer_base

from verl_tim.training.reward_kl import finite_or_reference, missing_is_neutral
from verl_tim.training.trainer_legacy import TimRayPPOTrainer
from verl_tim.training.trainer_v1 import TimTrainerSync

ROWS, WIDTH = 4, 6
LENGTHS = [6, 4, 5, 2]
NAN, INF = float("nan"), float("inf")
# (row, token) -> what the rollout recorded there; the last one is at a masked position
MISSING = {(0, 1): NAN, (1, 3): -INF, (2, 0): INF, (3, 4): NAN}


def batch(*, spoiled=True):
    random = torch.Generator().manual_seed(0)
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    old = -torch.rand(ROWS, WIDTH, generator=random)
    if spoiled:
        for place, value in MISSING.items():
            old[place] = value
    reference = -torch.rand(ROWS, WIDTH, generator=random)
    scores = torch.zeros(ROWS, WIDTH)
    scores[torch.arange(ROWS), torch.tensor(LENGTHS) - 1] = torch.tensor([1.0, 0.0, 0.5, 1.0])
    return DataProto.from_dict(
        tensors={"response_mask": mask, "old_log_probs": old, "ref_log_prob": reference, "token_level_scores": scores}
    )


def penalise(data, kind="kl"):
    _, metrics = ray_trainer.apply_kl_penalty(data, kl_ctrl=FixedKLController(0.1), kl_penalty=kind)
    return data.batch["token_level_rewards"], metrics


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "k3+"])
def test_a_missing_token_keeps_its_score_and_the_others_their_penalty(kind):
    data = batch()
    before = data.batch["old_log_probs"].clone()
    with missing_is_neutral():
        rewards, metrics = penalise(data, kind)
    whole, _ = penalise(batch(spoiled=False), kind)
    missing = ~before.isfinite()
    assert int(missing.sum()) == len(MISSING)
    assert torch.equal(rewards[missing], data.batch["token_level_scores"][missing])
    assert torch.equal(rewards[~missing], whole[~missing])
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    # what tells missing tokens later is as it was
    assert torch.equal(data.batch["old_log_probs"].isfinite(), before.isfinite())


def test_without_missing_tokens_it_is_verls_bit_for_bit():
    with missing_is_neutral():
        ours, our_metrics = penalise(batch(spoiled=False))
    verls, metrics = penalise(batch(spoiled=False))
    assert torch.equal(ours, verls)
    assert our_metrics == metrics


def test_other_runs_keep_verls_arithmetic():
    rewards, _ = penalise(batch())
    assert rewards.isnan().any()


def test_a_broken_reference_is_not_hidden():
    data = batch()
    data.batch["ref_log_prob"][0, 0] = NAN
    with missing_is_neutral():
        rewards, _ = penalise(data)
    assert rewards[0, 0].isnan()


def test_the_gap_is_zero_in_a_narrow_dtype():
    reference = torch.tensor([[-0.1234567]])
    filled = finite_or_reference(torch.tensor([[NAN]], dtype=torch.bfloat16), reference)
    assert torch.equal(filled - reference, torch.zeros(1, 1))


def nested(rows_BT):
    parts = [row[:length] for row, length in zip(rows_BT, LENGTHS, strict=True)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize("ours", [True, False])
def test_the_v1_trainers_advantages_are_finite(monkeypatch, ours):
    data = batch()
    stored = {
        "response_mask": nested(data.batch["response_mask"]),
        "old_log_probs": nested(data.batch["old_log_probs"]),
        "ref_log_prob": nested(data.batch["ref_log_prob"]),
        "rm_scores": nested(data.batch["token_level_scores"]),
    }
    keys = [f"{uid}_{session}_0" for uid in "ab" for session in range(2)]

    def get(**_):
        fields = TensorDict(dict(stored), batch_size=ROWS)
        fields["uid"] = [key[0] for key in keys]
        return fields

    written = {}

    def put(*, fields, **_):
        written.update(fields.items())

    monkeypatch.setattr(trainer_base, "tq", types.SimpleNamespace(kv_batch_get=get, kv_batch_put=put))
    trainer = object.__new__(TimTrainerSync)
    trainer.tim, trainer.correction = (object() if ours else None), None
    trainer.kl_ctrl_in_reward = FixedKLController(0.1)
    trainer.config = OmegaConf.create(
        {
            "algorithm": {
                "use_kl_in_reward": True,
                "kl_penalty": "kl",
                "adv_estimator": "grpo",
                "gamma": 1.0,
                "lam": 1.0,
                "rollout_correction": {"bypass_mode": True},
            },
            "actor_rollout_ref": {"rollout": {"n": 2}},
        }
    )

    class Meta(list):
        partition_id = "train"

    meta = Meta(keys)
    meta.keys = keys
    metrics = {}
    trainer._compute_advantage(meta, metrics)
    finite = all(row.isfinite().all() for row in written["advantages"].unbind())
    assert finite == ours
    assert torch.tensor(metrics["actor/reward_kl_penalty"]).isfinite() == ours


@pytest.mark.parametrize("ours", [True, False])
def test_the_legacy_trainers_rewards_are_finite(monkeypatch, ours):
    seen = []
    monkeypatch.setattr(ray_trainer.RayPPOTrainer, "fit", lambda self: seen.append(penalise(batch())[0]))
    trainer = object.__new__(TimRayPPOTrainer)
    trainer.tim = object() if ours else None
    trainer.train_dataloader, trainer.val_dataloader = SimpleNamespace(), SimpleNamespace()
    trainer.processes = SimpleNamespace(named_when_dead=nullcontext) if ours else None
    monkeypatch.setattr(TimRayPPOTrainer, "_raise_if_stopped", lambda self, *, at_end=False: None)
    trainer.fit()
    (rewards,) = seen
    assert bool(rewards.isfinite().all()) == ours
