"""Real runs of verl's two trainers: what the worker reports for each mini-batch is what its dumped batch gives again.

All runs share one process and one Ray cluster; together they pair every trainer, mode and loss with each other and with
every estimator, aggregation and setting below. Two of them, which meet every value of the first three, are in
scripts/test.sh, all in scripts/test.sh --all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.training.dumped_updates import mini_batches, size_of_terms
from tests.training.tiny import parquet
from tests.training.verl_run import CONTRACT, overrides_of, run_together, selected
from verl_tim.correction import policy_loss
from verl_tim.training.accelerator import host_has_accelerator
from verl_tim.training.correction_config import of_mapping

RC = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"
KL = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", "actor_rollout_ref.ref.strategy=fsdp2")
ONE_STEP = (f"{ACTOR}.ppo_mini_batch_size=8",)
STEPS = 2


@dataclass(frozen=True)
class Plan:
    """One run; the first five are what is paired."""

    trainer: str
    mode: str
    loss: str
    estimator: str
    aggregation: str
    correction: dict[str, Any]
    overrides: tuple[str, ...] = ()
    loss_mode: str = "vanilla"
    ranks: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        mode = {"bypass_mode": "true"} if self.mode == "bypass" else {}
        loss = {"loss_type": self.loss} if self.loss_mode == "vanilla" else {}
        return {**mode, **loss, **self.correction}

    @property
    def all_overrides(self) -> list[str]:
        return [
            *CONTRACT,
            f"trainer.use_v1={'true' if self.trainer == 'V1' else 'false'}",
            f"algorithm.adv_estimator={self.estimator}",
            f"{ACTOR}.loss_agg_mode={self.aggregation}",
            f"{ACTOR}.policy_loss.loss_mode={self.loss_mode}",
            *(f"++{RC}.{key}={value}" for key, value in self.settings.items()),
            "+tim.dump={every: 1}",
            *self.overrides,
        ]


PLANS = {
    "a": Plan("V1", "recompute", "ppo_clip", "grpo", "token-mean", {"preset": "paper_tis_seq_k1"}),
    "b": Plan(
        "V1", "bypass", "reinforce", "rloo", "seq-mean-token-sum",
        {"preset": "bypass_reinforce", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 1e-3,
         "rollout_rs_signal": "r_ppo"},
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",),
    ),
    "c": Plan(
        "V1", "recompute", "reinforce", "reinforce_plus_plus", "seq-mean-token-mean",
        {"preset": "icepop", "rollout_is_threshold": "[0.99,1.01]"}, loss_mode="gpg",
    ),
    "d": Plan(
        "V1", "bypass", "ppo_clip", "reinforce_plus_plus_baseline", "seq-mean-token-sum-norm",
        {"preset": "seq_reject_ppo_k1"}, (*KL, f"{ACTOR}.entropy_coeff=0.01"),
    ),
    "e": Plan(
        "legacy", "bypass", "ppo_clip", "grpo", "seq-mean-token-mean",
        {"old_forward": "true", "rollout_rs": "[opsm,token_k1]", "rollout_rs_threshold": "[1e-4,[0.99,1.01]]"},
    ),
    "f": Plan("legacy", "recompute", "ppo_clip", "rloo", "seq-mean-token-sum-norm", {"preset": "token_tis_ratio"}, KL),
    "g": Plan(
        "legacy", "bypass", "reinforce", "reinforce_plus_plus", "token-mean",
        {"rollout_is": "sequence", "rollout_is_batch_normalize": "true", "rollout_rs": "seq_mean_k1",
         "rollout_rs_threshold": "[0.998,1.002]"},
        ONE_STEP,
    ),
    "h": Plan(
        "legacy", "recompute", "reinforce", "reinforce_plus_plus_baseline", "seq-mean-token-sum",
        {"preset": "seq_reject_corr_k1", "baseline_scope": "kept", "denominator": "all"},
    ),
    "i": Plan(
        "V1", "bypass", "reinforce", "grpo", "seq-mean-token-sum-norm",
        {"preset": "paper_tis_seq_k3", "old_forward": "true", "rollout_rs_threshold": 1e-5},
        (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=160",
         "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true"),
        ranks=2,
    ),
    "j": Plan(
        "V1", "recompute", "ppo_clip", "reinforce_plus_plus", "seq-mean-token-sum",
        {"preset": "seq_reject_corr_k1", "baseline_scope": "kept"},
    ),
}  # fmt: skip


BRIEF = ("f", "i")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in BRIEF else pytest.mark.exhaustive) for name in PLANS]


def test_the_brief_ones_meet_every_side():
    for side in ("trainer", "mode", "loss", "ranks"):
        assert {getattr(PLANS[name], side) for name in BRIEF} == {getattr(plan, side) for plan in PLANS.values()}, side


def test_the_runs_cover_the_pairs():
    sides = {"trainer": 2, "mode": 2, "loss": 2}
    others = {"estimator": 4, "aggregation": 4}
    for one, two in itertools.combinations([*sides, *others], 2):
        if one in others and two in others:
            continue
        pairs = {(getattr(plan, one), getattr(plan, two)) for plan in PLANS.values()}
        assert len(pairs) == (sides | others)[one] * (sides | others)[two], (one, two, sorted(pairs))


@pytest.fixture(scope="module")
def runs(request, folders, tmp_path_factory):
    if host_has_accelerator():
        pytest.skip("these runs are for a CPU")
    folder = tmp_path_factory.mktemp("together")
    data = tmp_path_factory.mktemp("data")
    parquet(data / "train.parquet", 64)
    parquet(data / "val.parquet", 8, split="test", seed=1)
    overrides = {
        name: [
            *overrides_of(folder / name, folders("qwen3"), data, rollout="stock", ranks=plan.ranks, steps=STEPS),
            # the first run starts Ray for all
            "ray_kwargs.ray_init.num_gpus=2",
            *plan.all_overrides,
        ]
        for name, plan in PLANS.items()
        if name in selected(request, "name")
    }
    return run_together(folder, overrides)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_the_workers_loss_is_the_one_its_batch_gives_again(runs, name):
    run, plan = runs[name], PLANS[name]
    assert run.returncode == 0, run.output[-4000:]
    written = {**run.manifest()["correction"]}
    config = of_mapping({key: value for key, value in written.items() if key != "loss_mode"}, plan.loss_mode)
    assert config.bypass_mode is (plan.mode == "bypass")
    assert config.loss_type == plan.loss
    rejected = 0
    for step in range(1, STEPS + 1):
        batch = torch.load(run.folder / f"dumps/step_{step:06d}.pt", weights_only=True)
        update = torch.load(run.folder / f"dumps/update_{step:06d}.pt", weights_only=True)
        metrics = run.steps[step]
        parts = mini_batches(update, batch["response_mask"].shape[1])
        assert len(parts) == (1 if f"{ACTOR}.ppo_mini_batch_size=8" in plan.overrides else 2)
        kept = 0.0
        for number, part in parts.items():
            loss, found = policy_loss(
                config,
                log_prob=torch.cat(part.log_prob),
                old_log_probs=None if config.bypass_mode else batch["old_log_probs"][part.rows],
                old_forward_log_probs=batch["old_log_probs"][part.rows] if config.old_forward else None,
                rollout_log_probs=batch["rollout_log_probs"][part.rows],
                advantages=batch["advantages"][part.rows],
                response_mask=batch["response_mask"][part.rows],
                loss_agg_mode=plan.aggregation,
                loss_scale_factor=24,
            )
            rounding = 1e-6 * size_of_terms(batch, part, plan.aggregation)
            assert update["policy_loss"][number] == pytest.approx(float(loss), abs=rounding), (step, number)
            assert update["kept_tokens"][number] == found["rollout_corr/kept_tokens"]
            assert int(torch.cat(part.kept).sum()) == found["rollout_corr/kept_tokens"]
            kept += found["rollout_corr/kept_tokens"]
        assert sorted(row for part in parts.values() for row in part.rows) == list(range(len(batch["keys"])))
        reported = list(update["policy_loss"].values())
        assert metrics["actor/pg_loss"] == pytest.approx(sum(reported) / len(reported), abs=1e-12)
        assert metrics["rollout_corr/kept_tokens"] == kept
        assert metrics["rollout_corr/valid_tokens"] == float(batch["response_mask"].sum())
        assert metrics["tim/rejected_share_pos_adv"] <= 1.0
        rejected += metrics["rollout_corr/valid_tokens"] - kept
    if config.rules or config.band:
        assert rejected > 0, "nothing was rejected, so this shows less than it should"
    for wanted in ("rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/training_ppl", "rollout_corr/missing_tokens"):
        assert len(run.series(wanted)) == STEPS
    if config.rollout_is is not None:
        assert len(run.series("rollout_corr/rollout_is_eff_sample_size")) == STEPS
    assert ("actor/pg_clipfrac" in run.steps[1]) is (plan.loss == "ppo_clip")
    assert ("actor/kl_loss" in run.steps[1]) is ("use_kl_loss=true" in "".join(plan.overrides))
    assert not any(name.startswith("actor/rollout_corr") for name in run.steps[1]), "verl's own correction ran as well"
    assert all(norm > 0 for norm in run.series("actor/grad_norm"))
    assert all(delta > 0 for delta in run.series("tim/delta_abs_max"))
    assert ("training/rollout_probs_diff_max" in run.steps[1]) is not config.bypass_mode, "who scored the batch again?"
    assert run.manifest()["old_log_probs"] == ("bypass" if config.bypass_mode else "recompute")
    shares = run.series("tim/sampled_share")
    if config.mismatch_needs_forward:  # of the rows, those of the mini-batches before the first update
        assert all(share == 1.0 if len(parts) == 1 else 0.2 < share < 0.8 for share in shares)
        assert len(shares) == STEPS
    else:
        assert shares == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in NAMES if name.values[0] in ("h", "j")])
def test_advantages_of_kept_rows_are_those_among_kept_rows(runs, name):
    """REINFORCE++ whitens over the tokens of the rows that count, to mean 0 and deviation 1."""
    run = runs[name]
    assert run.returncode == 0, run.output[-4000:]
    outside = 0
    for step in range(1, STEPS + 1):
        batch = torch.load(run.folder / f"dumps/step_{step:06d}.pt", weights_only=True)
        mismatch = (batch["old_log_probs"] - batch["rollout_log_probs"]).double() * batch["response_mask"]
        mean = mismatch.sum(dim=1) / batch["response_mask"].sum(dim=1).clamp(min=1)
        counts = (mean.abs() <= 0.001) & batch["response_mask"].any(dim=1)
        outside += int((~counts).sum())
        values = batch["advantages"][counts][batch["response_mask"][counts]]
        if counts.sum() > 1 and values.std() > 0:
            assert float(values.mean()) == pytest.approx(0.0, abs=1e-5)
            assert float(values.std()) == pytest.approx(1.0, abs=1e-4)
    assert outside > 0
