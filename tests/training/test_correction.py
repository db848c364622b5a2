"""verl's native correction really reaches the loss: what the worker computed, on verl's own code."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass

from tests.training.sides import RolloutSide, TrainerSide
from tests.training.test_contract_engine import some_prompts

BYPASS = [
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
    "+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}",
]


@pytest.fixture(scope="module")
def policy_loss_of():
    """The worker's policy-loss config, as it becomes of the composed YAML."""
    with initialize_config_module("verl.trainer.config", version_base=None):

        def make(*overrides):
            config = compose(
                "ppo_trainer",
                overrides=[
                    "actor_rollout_ref.rollout.name=vexact",
                    "actor_rollout_ref.actor.strategy=fsdp2",
                    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
                    *overrides,
                ],
            )
            return omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss

        yield make


@pytest.fixture(scope="module")
def mismatching(folders, process_group):
    """A stock rollout's rows, and a fresh trainer for each test."""
    rollout = RolloutSide(folders("qwen3"), name="stock")
    rollout.take_weights(TrainerSide(folders("qwen3")), version=0)
    rows = rollout.draw(some_prompts(8), temperature=1.0)
    rollout.close()
    return rows, lambda: TrainerSide(folders("qwen3"), micro_batch=8)


ADVANTAGES = [1.5, -0.5] * 4


def update(trainer, rows, policy_loss, old=None):
    old = [row.log_probs for row in rows] if old is None else old
    return trainer.train(rows, old, ADVANTAGES, policy_loss=policy_loss)


def flat(rows_of_values):
    return torch.tensor(list(itertools.chain(*rows_of_values)), dtype=torch.float64)


def scalar(metrics, name):
    value = metrics[name]
    value = value.aggregate() if hasattr(value, "aggregate") else value
    return float(
        np.mean([v.aggregate() if hasattr(v, "aggregate") else v for v in value] if isinstance(value, list) else value)
    )


def expected_loss(trainer, rows, anchor):
    """PPO-clip over all tokens, ratio of the trainer against `anchor`, written down once more."""
    current, anchor = flat(trainer.log_probs(rows)), flat(anchor)
    advantage = flat([[a] * len(row.response) for row, a in zip(rows, ADVANTAGES, strict=True)])
    ratio = (current - anchor).exp()
    return float(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean())


def test_bypass_ppo_takes_the_ratio_against_the_rollout(mismatching, policy_loss_of):
    rows, make = mismatching
    trainer = make()
    rollout_log_probs = [row.log_probs for row in rows]
    wanted = expected_loss(trainer, rows, rollout_log_probs)
    delta = flat(trainer.log_probs(rows)) - flat(rollout_log_probs)
    assert float(delta.abs().max()) > 1e-3, "no mismatch, so this would show nothing"
    metrics = update(trainer, rows, policy_loss_of(*BYPASS))
    assert scalar(metrics, "actor/pg_loss") == pytest.approx(wanted, abs=1e-6)
    # only verl's bypass loss reports these from the worker
    assert scalar(metrics, "rollout_corr/kl") == pytest.approx(float(-delta.mean()), abs=1e-6)
    assert scalar(metrics, "actor/ppo_kl") == pytest.approx(float(-delta.mean()), abs=1e-6)


def test_recompute_takes_the_ratio_against_the_trainer(mismatching, policy_loss_of):
    rows, make = mismatching
    trainer = make()
    old = trainer.log_probs(rows)
    metrics = update(trainer, rows, policy_loss_of(), old=old)
    # before any update the ratio is one for every token, whatever the rollout recorded
    advantage = flat([[a] * len(row.response) for row, a in zip(rows, ADVANTAGES, strict=True)])
    assert scalar(metrics, "actor/pg_loss") == pytest.approx(float(-advantage.mean()), abs=1e-6)
    assert scalar(metrics, "actor/ppo_kl") == 0.0
    assert not any(name.startswith("rollout_corr/") for name in metrics)


def test_rejection_in_bypass_reaches_the_gradient(mismatching, policy_loss_of):
    rows, make = mismatching
    everything = update(make(), rows, policy_loss_of(*BYPASS))
    nothing = update(
        make(),
        rows,
        policy_loss_of(
            *BYPASS,
            "algorithm.rollout_correction.rollout_rs=seq_max_k2",
            "algorithm.rollout_correction.rollout_rs_threshold=1e-12",
        ),
    )
    assert everything["grad_norm"] > 1e-3
    assert nothing["grad_norm"] == 0.0


def test_without_our_mirror_the_worker_corrects_nothing(policy_loss_of):
    """What the mirrored keys are for: verl's worker keeps the loss it was started with."""
    plain = policy_loss_of("algorithm.rollout_correction.bypass_mode=true")
    assert plain.loss_mode == "vanilla"
    mirrored = policy_loss_of(*BYPASS)
    assert mirrored.loss_mode == "bypass_mode"
    assert mirrored.rollout_correction["bypass_mode"] is True
    assert mirrored.rollout_correction["rollout_is"] is None
