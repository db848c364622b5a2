"""Reused log-probs: which steps are audits, and what a planted difference does on each kind of step."""

from __future__ import annotations

import pytest

from tests.training.test_observer import batch, flip_one_bit, records
from verl_tim.correction import RolloutCorrectionConfig, correct
from verl_tim.training.config import ReuseConfig, TimConfig
from verl_tim.training.correction_report import LossReport, step_metrics
from verl_tim.training.observer import MismatchError, StepObserver
from verl_tim.training.reuse import LogProbReuse, ReuseError


def observer(every=4):
    return StepObserver(
        TimConfig(reuse_rollout_log_probs=ReuseConfig(True, every)),
        gated=True,
        bypass=False,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        decode=lambda ids: "".join(chr(65 + i) for i in ids),
        reuse=LogProbReuse(every),
    )


def step(made, number, *, spoil=None, fresh_rows=(0, 1)):
    """One step as the trainers make it: scored on an audit, unscored otherwise; the update's own forward is the
    trainer's. `spoil`: a (row, token) where the rollout recorded another bit than the trainer computes."""
    audits = made.reuse.audits(number)
    step_batch = batch(versions_B=None)
    trainer = step_batch.old_log_probs_BT
    if spoil is not None:
        flip_one_bit(step_batch.rollout_log_probs_BT, *spoil)
    if audits:
        made.reuse.timed(2.0)
    else:
        step_batch.old_log_probs_BT = None
    made.before_update(number, step_batch)
    return made.after_update(number, step_batch, records(step_batch, trainer, fresh_rows=fresh_rows))


def test_the_first_step_and_every_kth_are_audits():
    made = observer(every=4)
    audited = [step(made, number)["tim/audited"] for number in range(1, 10)]
    assert audited == [1, 0, 0, 1, 0, 0, 0, 1, 0]
    assert (made.reuse.audited_steps, made.reuse.reused_steps) == (3, 6)
    # another process that goes on from a checkpoint has compared nothing yet
    assert step(observer(every=4), 7)["tim/audited"] == 1.0


def test_every_step_can_be_an_audit():
    made = observer(every=1)
    assert [step(made, number)["tim/audited"] for number in (1, 2, 3)] == [1, 1, 1]


def test_steps_are_audits_until_one_has_compared():
    made = observer()
    assert made.reuse.audits(1)
    assert made.reuse.audits(2), "nothing was compared in step 1 (a critic's warm-up updates no actor)"
    step(made, 2)
    assert not made.reuse.audits(3)


def test_an_audit_speaks_of_the_whole_batch():
    metrics = step(observer(), 1)
    assert metrics["tim/compared_tokens"] == metrics["tim/valid_tokens"] == 18
    assert metrics["tim/uncompared_tokens"] == 0
    assert metrics["tim/exact_fraction"] == 1.0
    assert metrics["tim/audited_steps"] == 1
    assert metrics["tim/reused_steps"] == 0
    assert "tim/reuse_saved_seconds" not in metrics
    assert metrics["tim/trainer_self_delta_max"] == 0.0


def test_other_steps_speak_of_what_the_update_itself_saw():
    made = observer()
    step(made, 1)
    metrics = step(made, 2)
    assert metrics["tim/compared_tokens"] == metrics["tim/valid_tokens"] == 9
    assert metrics["tim/uncompared_tokens"] == 9
    assert metrics["tim/sampled_share"] == 0.5
    assert metrics["tim/audited"] == 0.0
    assert metrics["tim/audited_steps"] == 1
    assert metrics["tim/reused_steps"] == 1
    # batches alike, so the pass would have taken what it took in the audit
    assert metrics["tim/reuse_saved_seconds"] == pytest.approx(2.0)
    assert metrics["tim/ppo_k1"] == 0.0


def test_a_step_that_compared_nothing_reports_no_agreement():
    made = observer()
    step(made, 1)
    metrics = step(made, 2, fresh_rows=())
    assert metrics["tim/compared_tokens"] == 0
    assert metrics["tim/uncompared_tokens"] == 18
    assert metrics["tim/audited"] == 0.0
    assert not any("delta" in name or "exact" in name or "/k" in name for name in metrics), metrics


def test_a_difference_on_an_audit_stops_the_run():
    made = observer()
    with pytest.raises(MismatchError) as error:
        step(made, 1, spoil=(2, 3))
    for part in ("step 1", "uid2_0_0", "token 3", "1 of 18", "trainer -0x", "rollout -0x"):
        assert part in str(error.value)
    assert "took old log-probs" not in str(error.value)


def test_a_difference_between_audits_is_found_by_the_next_one():
    made = observer(every=4)
    step(made, 1)
    for number in (2, 3):  # in a row that only the second mini-batch sees, after the weights have moved
        step(made, number, spoil=(2, 3))
    with pytest.raises(MismatchError) as error:
        step(made, 4, spoil=(2, 3))
    for part in ("step 4", "uid2_0_0", "token 3", "steps 2 to 3 took old log-probs from the rollout"):
        assert part in str(error.value)


def test_a_difference_in_the_first_mini_batch_is_found_at_once():
    made = observer()
    step(made, 1)
    with pytest.raises(MismatchError, match=r"step 2: .* row 1 is uid1_0_0, response token 2 .*step 2 took"):
        step(made, 2, spoil=(1, 2))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_missing_log_prob_cannot_be_an_old_one(value):
    made = observer()
    step(made, 1)
    step_batch = batch(old_log_probs_BT=None)
    step_batch.rollout_log_probs_BT[3, 1] = value
    with pytest.raises(ReuseError, match=r"step 2: 1 response tokens .* row 3 \(uid3_0_0\) at token 1"):
        made.before_update(2, step_batch)
    step_batch.response_mask_BT[3, 1] = 0  # what an agent added itself, and masked
    made.before_update(2, step_batch)


def test_no_log_probs_cannot_be_old_ones():
    made = observer()
    step(made, 1)
    with pytest.raises(ReuseError, match="calculate_log_probs"):
        made.before_update(2, batch(old_log_probs_BT=None, rollout_log_probs_BT=None))


def test_the_loss_compares_no_batch_with_itself():
    """`rollout_corr/kl` and its like would say 0 of a step that compared nothing."""
    step_batch, config = batch(), RolloutCorrectionConfig()
    sums = correct(
        config,
        old_log_probs=step_batch.rollout_log_probs_BT,
        rollout_log_probs=step_batch.rollout_log_probs_BT,
        response_mask=step_batch.response_mask_BT,
    ).sums
    reports = [LossReport(0, True, 18, 0.5, sums)]
    assert step_metrics(reports, config)["rollout_corr/kl"] == 0.0
    reused = step_metrics(reports, config, reused=True)
    assert "rollout_corr/kl" not in reused
    assert "rollout_corr/k3_kl" not in reused
    assert "rollout_corr/ppl_ratio" not in reused
    assert reused["rollout_corr/valid_tokens"] == 18
