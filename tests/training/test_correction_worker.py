"""The worker's loss beside `test_correction_gradient`: nothing kept, verl's other losses, what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from tests.training.correction_bench import CLIP, ROWS, SCALE_FACTOR, Bench, Case
from tests.training.correction_cases import AGGREGATIONS
from verl_tim.correction import RolloutCorrectionConfig, correct
from verl_tim.training.config import ConfigError
from verl_tim.training.correction_config import PASSED_THROUGH
from verl_tim.training.correction_report import REPORT_METRIC, step_metrics
from verl_tim.training.records import RECORD_METRIC, ROW_FIELD, assemble, take

NOTHING = {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 1e-12}


def full(**settings):
    return RolloutCorrectionConfig.from_mapping(settings).to_mapping()


@pytest.fixture(scope="module")
def bench(folders, process_group):
    return Bench(folders("qwen3"))


def train(bench, case, micro_batch=2, *, config=None, drop=(), **replaced):
    """A whole `train_batch` of verl's engine, optimiser step and all; the metrics unreduced."""
    data = bench.data(bench.local, micro_batch, **replaced)
    for name in drop:
        data.pop(name)
    with bench.engine.train_mode():
        return bench.engine.train_batch(data, partial(ppo_loss, config=config or case.actor(micro_batch)))["metrics"]


# ---------------------------------------------------------------------------------------------------- nothing is kept


@pytest.mark.parametrize("denominator", ["kept", "all"])
@pytest.mark.parametrize("bypass_mode", [False, True])
def test_with_everything_rejected_no_parameter_moves(folders, process_group, bypass_mode, denominator):
    bench = Bench(folders("qwen3"), lr=1e-2)
    everything = Case(full(bypass_mode=bypass_mode), entropy_coeff=0.01, kl_loss_coef=0.1)
    nothing = Case(full(bypass_mode=bypass_mode, denominator=denominator, **NOTHING), entropy_coeff=0.01)
    before = bench.parameters()
    bench.engine.get_per_tensor_param()
    metrics = train(bench, everything)
    moved = bench.parameters()
    assert not torch.equal(moved, before), "the optimiser has no momentum, so this would show nothing"
    assert metrics["grad_norm"] > 0
    reports = take(metrics, REPORT_METRIC)
    assert step_metrics(reports, everything.config)["rollout_corr/empty_step"] == 0

    # row 4 has a missing log-prob whose token cannot be rejected by itself, so its row must go
    metrics = train(bench, nothing)
    (report,) = take(metrics, REPORT_METRIC)
    assert report.kept_tokens == 0
    assert torch.equal(bench.parameters(), moved)
    assert metrics["grad_norm"] == 0.0
    assert report.policy_loss == 0.0
    found = step_metrics([report], nothing.config)
    assert found["rollout_corr/empty_step"] == 1
    assert all(value == value for value in found.values())
    assert take(metrics, RECORD_METRIC)[0].kept_BT.sum() == 0
    # and the next mini-batch is an ordinary one
    train(bench, everything)
    assert not torch.equal(bench.parameters(), moved)


def test_a_skipped_step_leaves_the_forward_fresh(folders, process_group):
    bench = Bench(folders("qwen3"))
    bench.engine.get_per_tensor_param()
    reports = [take(train(bench, Case(full(**NOTHING))), REPORT_METRIC)[0] for _ in range(2)]
    reports += [take(train(bench, Case(full())), REPORT_METRIC)[0] for _ in range(2)]
    assert [report.fresh for report in reports] == [True, True, True, False]
    assert [report.number for report in reports] == [0, 1, 2, 3]


@pytest.mark.parametrize("bypass_mode", [False, True])
@pytest.mark.parametrize("loss_mode", [mode for mode in PASSED_THROUGH if mode != "dro"])
def test_with_everything_rejected_verls_other_losses_are_zero_too(bench, loss_mode, bypass_mode):
    nothing = bench.worker(Case(full(bypass_mode=bypass_mode, rollout_is="token", **NOTHING), loss_mode), 2)
    assert nothing.gradient.norm() == 0
    assert nothing.loss == 0
    assert nothing.metrics["rollout_corr/empty_step"] == 1
    assert all(value == value for value in nothing.metrics.values())


def test_batch_normalisation_of_a_batch_without_a_valid_token(bench):
    empty = [torch.zeros_like(mask) for mask in bench.fields["response_mask"]]
    for bypass_mode in (False, True):
        settings = full(bypass_mode=bypass_mode, rollout_is="token", rollout_is_batch_normalize=True)
        nothing = bench.worker(Case(settings), 2, response_mask=empty)
        assert nothing.gradient.norm() == 0
        assert all(value == value for value in nothing.metrics.values())


# ------------------------------------------------------------------------------------------------------ broken batches


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_a_rollout_that_recorded_nothing_trains_by_weight_one(bench, level):
    nothing = [torch.full_like(row, float("nan")) for row in bench.fields["rollout_log_probs"]]
    settings = full(bypass_mode=True, loss_type="reinforce", rollout_is=level, rollout_is_batch_normalize=True)
    spoiled = bench.worker(Case(settings), 2, rollout_log_probs=nothing)
    plain = bench.worker(Case(full(loss_type="reinforce")), 2)
    assert torch.equal(spoiled.gradient, plain.gradient)
    assert spoiled.metrics["rollout_corr/missing_tokens"] == spoiled.metrics["rollout_corr/valid_tokens"] > 0
    assert all(value == value for value in spoiled.metrics.values())


BY_SIZE = [
    {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True},
    {"rollout_rs": "opsm,token_k1", "rollout_rs_threshold": [0.01, [0.5, 1.5]], "rollout_rs_signal": "r_ppo"},
]


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("settings", BY_SIZE)
def test_micro_batches_by_tokens_do_not_change_the_gradient(bench, monkeypatch, settings, loss_agg_mode):
    """`use_dynamic_bsz` sorts rows into micro-batches of its own."""
    case = Case(full(**settings), loss_agg_mode=loss_agg_mode, entropy_coeff=0.1)
    whole = bench.whole(case)
    data = bench.data

    def by_tokens(*args, **replaced):
        made = data(*args, **replaced)
        tu.assign_non_tensor(made, use_dynamic_bsz=True, max_token_len_per_gpu=20)
        return made

    monkeypatch.setattr(bench, "data", by_tokens)
    worker = bench.worker(case, 2)
    assert (worker.gradient - whole.gradient).norm() <= 1e-5 * whole.gradient.norm()
    assert worker.loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-7)
    assert worker.metrics["rollout_corr/kept_tokens"] == whole.metrics["rollout_corr/kept_tokens"]


# ----------------------------------------------------------------------------------------------- verl's other losses


def whole_of_verl(bench, case):
    """Gradient and loss of verl's own function on the whole batch, with the kept counts below it."""
    found = {}

    def loss(model_output, data, dp_group=None):
        fields = data.select("response_mask", "old_log_probs", "rollout_log_probs", "advantages").to_padded_tensor()
        log_prob = no_padding_2_padding(model_output["log_probs"], data)
        config = case.config
        old = fields["rollout_log_probs"] if config.bypass_mode else fields["old_log_probs"]
        result = correct(
            config,
            log_prob=log_prob,
            old_log_probs=None if config.bypass_mode else old,
            rollout_log_probs=fields["rollout_log_probs"],
            response_mask=fields["response_mask"],
            advantages=fields["advantages"],
        )
        old = torch.where(old.isfinite(), old, log_prob.detach())
        counted = result.mask if config.denominator == "kept" else result.usable
        sequences = int(counted.any(dim=1).sum())
        actor = case.actor(ROWS)
        actor.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=int(counted.sum()),
            global_batch_size=sequences,
            loss_scale_factor=SCALE_FACTOR if case.loss_agg_mode == "seq-mean-token-sum-norm" else None,
        )
        value, _ = get_policy_loss_fn(case.loss_mode)(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=fields["advantages"],
            response_mask=result.mask,
            loss_agg_mode=case.loss_agg_mode,
            config=actor,
            rollout_is_weights=result.weights if config.weights_multiply_loss else None,
        )
        if case.loss_mode == "geo_mean":
            value = value * ROWS / sequences  # a mean over the sequences that have a kept token
        found["loss"] = value.item()
        return value, {}

    bench._backward(bench.data(list(range(ROWS)), ROWS), loss)
    return bench.gradient(), found["loss"]


REJECTING = {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": [[0.8, 1.25], 0.2]}


@pytest.mark.parametrize("bypass_mode", [False, True])
@pytest.mark.parametrize("loss_mode", ["gspo", "sapo", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "dro"])
def test_verls_other_losses_get_weights_mask_and_denominators(bench, loss_mode, bypass_mode):
    for number, aggregation in enumerate(AGGREGATIONS):
        correction = full(bypass_mode=bypass_mode, **REJECTING)
        case = Case(correction, loss_mode, aggregation)
        if loss_mode == "dro":
            case = DroCase(correction, loss_mode, aggregation)
        gradient, loss = whole_of_verl(bench, case)
        assert gradient.norm() > 1e-4
        worker = bench.worker(case, (1, 2, 4, 8)[number])
        assert (worker.gradient - gradient).norm() <= 1e-6 * gradient.norm(), aggregation
        assert worker.terms["actor/pg_loss"] == pytest.approx(loss, rel=2e-6, abs=1e-7)
        assert worker.metrics["rollout_corr/kept_tokens"] < worker.metrics["rollout_corr/valid_tokens"]
        assert worker.metrics["rollout_corr/rollout_is_max"] <= 2.0


class DroCase(Case):
    """DRO wants a strength of its own."""

    def actor(self, micro_batch):
        return FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=micro_batch,
            policy_loss=PolicyLossConfig(loss_mode="dro", dro_beta=0.5, rollout_correction=dict(self.correction)),
            loss_agg_mode=self.loss_agg_mode,
            loss_scale_factor=SCALE_FACTOR,
            **CLIP,
        )


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
def test_losses_that_compare_tokens_of_a_micro_batch_run_with_nothing_kept_in_one(bench, loss_mode):
    """Their covariances are the micro-batch's, so no whole batch equals them; micro-batches without a token must do."""
    worker = bench.worker(Case(full(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.001), loss_mode), 1)
    assert 0 < worker.metrics["rollout_corr/kept_sequences"] < 4
    assert worker.gradient.isfinite().all()
    assert worker.gradient.norm() > 1e-4


def test_gpg_is_reinforce(bench):
    reinforce = bench.worker(Case(full(loss_type="reinforce", rollout_is="token")), 2)
    gpg = bench.worker(Case(full(rollout_is="token"), "gpg"), 2)
    assert torch.equal(reinforce.gradient, gpg.gradient)
    bypassed = bench.worker(Case(full(bypass_mode=True), "bypass_mode"), 2)
    vanilla = bench.worker(Case(full(bypass_mode=True)), 2)
    assert torch.equal(bypassed.gradient, vanilla.gradient)


# ------------------------------------------------------------------------------------------------------------ plumbing


def test_records_hold_what_was_kept(bench):
    case = Case(full(rollout_rs="token_k1", rollout_rs_threshold=[0.8, 1.25]))
    bench.engine.get_per_tensor_param()
    metrics = train(bench, case, 2)
    seen = assemble(take(metrics, RECORD_METRIC), ROWS, max(len(row) for row in bench.fields["responses"]))
    expected = correct(
        case.config,
        old_log_probs=bench.padded("old_log_probs"),
        rollout_log_probs=bench.padded("rollout_log_probs"),
        response_mask=bench.padded("response_mask"),
    )
    assert torch.equal(seen.kept_BT, expected.mask)
    assert not seen.kept_BT[5, 1]


def test_no_rollout_log_probs_is_an_error_that_names_the_setting(bench):
    with pytest.raises(ValueError, match="calculate_log_probs"):
        train(bench, Case(full(rollout_is="token")), drop=["rollout_log_probs"])
    metrics = train(bench, Case(full()), drop=["rollout_log_probs"])
    (report,) = take(metrics, REPORT_METRIC)
    assert "rollout_corr/kl" not in step_metrics([report], RolloutCorrectionConfig())


def test_a_worker_that_was_told_nothing_keeps_verls_loss(bench):
    metrics = train(bench, None, config=FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2))
    assert take(metrics, REPORT_METRIC) == []
    assert "actor/pg_clipfrac" in metrics
    assert take(metrics, RECORD_METRIC)[0].kept_BT is None


def test_a_trainer_that_is_not_ours_may_not_correct(bench):
    metrics = train(bench, Case(full()), drop=[ROW_FIELD])
    assert take(metrics, REPORT_METRIC) == []
    with pytest.raises(ConfigError, match="does not go through verl_tim"):
        train(bench, Case(full(rollout_is="token")), drop=[ROW_FIELD])


def test_what_the_trainer_must_have_set(bench):
    with pytest.raises(ConfigError, match="old_forward"):
        train(bench, Case(full(bypass_mode=True, old_forward=True)), drop=["tim_old_forward_log_probs"])
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        loss_agg_mode="seq-mean-token-sum-norm",
        policy_loss=PolicyLossConfig(rollout_correction=full()),
    )
    with pytest.raises(ConfigError, match="loss_scale_factor"):
        train(bench, None, config=actor)


def test_a_bad_setting_raises_in_the_worker_too(bench):
    with pytest.raises(ValueError, match=r"algorithm\.rollout_correction\.rollout_is"):
        train(bench, Case({"rollout_is": "tokens"}))


def test_under_bypass_later_mini_batches_do_not_speak_of_the_mismatch(folders, process_group):
    bench = Bench(folders("qwen3"), lr=3e-2)
    case = Case(full(bypass_mode=True, rollout_is="token"))
    bench.engine.get_per_tensor_param()
    first, second = (take(train(bench, case), REPORT_METRIC)[0] for _ in range(2))
    assert (first.fresh, second.fresh) == (True, False)
    alone, both = step_metrics([first], case.config), step_metrics([first, second], case.config)
    drifted = step_metrics([second], case.config)
    for name in ("rollout_corr/kl", "rollout_corr/log_ratio_abs_max", "rollout_corr/rollout_is_mean"):
        assert both[name] == alone[name]
        assert name not in drifted
    assert both["rollout_corr/kept_tokens"] == 2 * alone["rollout_corr/kept_tokens"]
    assert both["actor/ppo_kl"] != alone["actor/ppo_kl"]
    assert set(both) == set(alone)
