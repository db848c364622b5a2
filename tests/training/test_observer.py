"""The step observer: the gate names what differs, metrics come from the right rows, samples are what they say."""

from __future__ import annotations

import json

import pytest
import torch

from verl_tim.training.config import DumpConfig, GateConfig, SamplesConfig, TimConfig
from verl_tim.training.observer import MismatchError, StepBatch, StepObserver
from verl_tim.training.records import RECORD_METRIC, LossRecord, assemble, take_records


def observer(tim=None, *, gated=True, bypass=False):
    return StepObserver(
        tim or TimConfig(),
        gated=gated,
        bypass=bypass,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        decode=lambda ids: "".join(chr(65 + i) for i in ids),
    )


def batch(rows=4, width=5, **changes):
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(rows, width, generator=generator) * 3
    lengths = [width - row % 2 for row in range(rows)]
    mask = torch.arange(width).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    values = {
        "keys": [f"uid{row}_0_0" for row in range(rows)],
        "old_log_probs_BT": log_probs.clone(),
        "rollout_log_probs_BT": log_probs.clone(),
        "response_mask_BT": mask.long(),
        "kept_mask_BT": mask.long(),
        "advantages_BT": torch.tensor([1.0, -1.0] * (rows // 2)).unsqueeze(1).expand(-1, width).clone(),
        "scores_B": torch.arange(rows) / rows,
        "prompts": [[1, 2]] * rows,
        "responses": [list(range(n)) for n in lengths],
        "versions_B": torch.full((rows,), 6),
        "data": {"ground_truth": [str(row) for row in range(rows)], "index": list(range(rows))},
    }
    return StepBatch(**{**values, **changes})


def records(step_batch, log_probs=None, *, fresh_rows=(0, 1)):
    """Two mini-batches of two rows, in an order of their own; each padded to its own longest row."""
    log_probs = step_batch.old_log_probs_BT if log_probs is None else log_probs
    made = []
    for rows in ([1, 0], [3, 2]):
        width = max(len(step_batch.responses[row]) for row in rows)
        made.append(
            LossRecord(torch.tensor(rows).numpy(), log_probs[rows, :width].numpy(), fresh=set(rows) <= set(fresh_rows))
        )
    return made


def flip_one_bit(tensor, row, token):
    bits = tensor.view(torch.int32)
    bits[row, token] ^= 1
    return tensor


def test_agreement_passes_and_is_reported():
    made, step_batch = observer(), batch()
    made.before_update(7, step_batch)
    metrics = made.after_update(7, step_batch, records(step_batch))
    assert metrics["tim/exact_fraction"] == 1.0
    assert metrics["tim/delta_abs_max"] == 0.0
    assert metrics["tim/valid_tokens"] == 18
    assert metrics["tim/trainer_self_delta_max"] == 0.0
    assert metrics["tim/ppo_k1"] == 0.0
    assert metrics["tim/staleness_max"] == 0.0
    assert "tim/sampled_share" not in metrics


def test_one_bit_stops_the_run_and_is_named():
    step_batch = batch()
    flip_one_bit(step_batch.rollout_log_probs_BT, 2, 3)
    with pytest.raises(MismatchError) as error:
        observer().before_update(7, step_batch)
    message = str(error.value)
    for part in ("step 7", "row 2", "uid2_0_0", "token 3", "1 of 18", "1 ulp", "id 3 ('D')", "0x"):
        assert part in message, message
    train, rollout = (float(side[2, 3]) for side in (step_batch.old_log_probs_BT, step_batch.rollout_log_probs_BT))
    assert float.hex(train) in message
    assert float.hex(rollout) in message


def test_bits_behind_the_mask_do_not_count():
    step_batch = batch()
    flip_one_bit(step_batch.rollout_log_probs_BT, 1, 4)
    step_batch.rollout_log_probs_BT[3, 4] = float("nan")
    observer().before_update(7, step_batch)


def test_warn_goes_on(caplog):
    step_batch = batch()
    flip_one_bit(step_batch.rollout_log_probs_BT, 2, 3)
    made = observer(TimConfig(gate=GateConfig(on_mismatch="warn")))
    made.before_update(7, step_batch)
    assert "row 2" in caplog.text
    assert made.after_update(7, step_batch, records(step_batch))["tim/exact_fraction"] == pytest.approx(17 / 18)


def test_without_a_gate_nothing_stops():
    step_batch = batch()
    flip_one_bit(step_batch.rollout_log_probs_BT, 2, 3)
    observer(gated=False).before_update(7, step_batch)


@pytest.mark.parametrize("spoil", ["nan", "missing"])
def test_a_gate_that_cannot_compare_does_not_pass(spoil):
    step_batch = batch()
    if spoil == "nan":
        step_batch.rollout_log_probs_BT[0, 0] = float("nan")
    else:
        step_batch.rollout_log_probs_BT = None
    with pytest.raises(MismatchError):
        observer().before_update(7, step_batch)


def test_a_trainer_that_disagrees_with_itself_is_seen():
    step_batch = batch()
    moved = step_batch.old_log_probs_BT + torch.tensor([0.25, 0.0, 9.0, 9.0]).unsqueeze(1)
    metrics = observer().after_update(7, step_batch, records(step_batch, moved))
    # rows 2 and 3 were scored after an update: their distance is the policy's, not noise
    assert metrics["tim/trainer_self_delta_max"] == pytest.approx(0.25, abs=1e-6)
    assert metrics["tim/ppo_k1"] != 0.0


def test_rejection_is_counted_against_the_mask_before_it():
    step_batch = batch()
    step_batch.kept_mask_BT[0] = 0
    metrics = observer().after_update(7, step_batch, records(step_batch))
    assert metrics["tim/valid_tokens"] == 18
    assert metrics["tim/rejected_share_pos_adv"] == pytest.approx(0.5)
    assert metrics["tim/rejected_share_neg_adv"] == 0.0


# ------------------------------------------------------------------------------------------------------------- bypass


def bypassed(**changes):
    step_batch = batch(old_log_probs_BT=None, kept_mask_BT=None, **changes)
    return step_batch, step_batch.rollout_log_probs_BT


def test_bypass_uses_only_the_rows_that_saw_the_rollouts_weights():
    step_batch, log_probs = bypassed()
    moved = log_probs.clone()
    moved[2:] += 0.5  # after the first update
    made = observer(bypass=True)
    made.before_update(7, step_batch)
    metrics = made.after_update(7, step_batch, records(step_batch, moved))
    assert metrics["tim/sampled_share"] == pytest.approx(0.5)
    assert metrics["tim/valid_tokens"] == 9
    assert metrics["tim/delta_abs_max"] == 0.0
    assert metrics["tim/exact_fraction"] == 1.0
    # the ratio that the loss used comes from all rows
    assert metrics["tim/ppo_k1"] == pytest.approx(-0.25, abs=1e-6)


def test_bypass_has_the_gate_too():
    step_batch, log_probs = bypassed()
    moved = flip_one_bit(log_probs.clone(), 1, 2)
    with pytest.raises(MismatchError, match=r"row 1 is uid1_0_0, response token 2"):
        observer(bypass=True).after_update(7, step_batch, records(step_batch, moved))
    moved = flip_one_bit(log_probs.clone(), 3, 2)
    observer(bypass=True).after_update(7, step_batch, records(step_batch, moved))


def test_bypass_without_a_fresh_row_says_so():
    step_batch, _ = bypassed()
    made = observer(bypass=True)
    metrics = made.after_update(7, step_batch, records(step_batch, step_batch.rollout_log_probs_BT, fresh_rows=()))
    assert metrics == {"tim/sampled_share": 0.0}


# ------------------------------------------------------------------------------------------------------ samples, dumps


def test_samples(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    made = observer(TimConfig(run_dir=str(tmp_path), samples=SamplesConfig(per_step=2)))
    made.before_update(7, batch())
    made.before_update(8, batch())
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [7, 7, 8, 8]
    assert lines[0]["prompt"] == "BC"
    assert lines[0]["response"] == "ABCDE"
    assert (lines[1]["reward"], lines[1]["ground_truth"], lines[1]["uid"]) == (0.25, "1", "1")


def test_dumps(tmp_path):
    made = observer(TimConfig(dump=DumpConfig(every=2, dir=str(tmp_path))))
    for step in range(1, 5):
        made.before_update(step, batch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002.pt", "step_000004.pt"]
    dumped = torch.load(tmp_path / "step_000002.pt", weights_only=True)
    assert torch.equal(dumped["old_log_probs"], batch().old_log_probs_BT)
    assert dumped["responses"][1] == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------------ records


def test_records_are_taken_out_under_any_prefix():
    first, second = records(batch())
    metrics = {f"actor/{RECORD_METRIC}": [first, second], "actor/loss": [1.0]}
    assert take_records(metrics) == [first, second]
    assert metrics == {"actor/loss": [1.0]}
    assert take_records(metrics) == []


def test_assemble_puts_rows_back_and_keeps_the_first_epoch():
    step_batch = batch()
    again = [LossRecord(r.row_B, r.log_prob_BT + 1, fresh=False) for r in records(step_batch)]
    seen = assemble([*records(step_batch), *again], rows=4, width=5)
    valid = step_batch.response_mask_BT.bool()
    assert torch.equal(seen.log_prob_BT[valid], step_batch.old_log_probs_BT[valid])
    assert seen.seen_B.tolist() == [True] * 4
    assert seen.fresh_B.tolist() == [True, True, False, False]
    assert not bool(assemble([], 2, 3).seen_B.any())
