"""The step observer: the gate names what differs, metrics come from the right rows, samples are what they say."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

from verl_tim.correction import MetricSums
from verl_tim.diagnosis.token_dump import read_dumps
from verl_tim.rollout.recorded import Recorded
from verl_tim.training.config import DumpConfig, GateConfig, SamplesConfig, TimConfig
from verl_tim.training.correction_report import LossReport
from verl_tim.training.forward_records import ForwardRecord
from verl_tim.training.observer import MismatchError, StepBatch, StepObserver
from verl_tim.training.records import RECORD_METRIC, LossRecord, assemble, take


def observer(tim=None, *, gated=True, bypass=False, **more):
    return StepObserver(
        tim or TimConfig(),
        **more,
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
        "advantages_BT": torch.tensor([1.0, -1.0] * (rows // 2)).unsqueeze(1).expand(-1, width).clone(),
        "scores_B": torch.arange(rows) / rows,
        "prompts": [[1, 2]] * rows,
        "responses": [list(range(n)) for n in lengths],
        "versions_B": torch.full((rows,), 6),
        "data": {"ground_truth": [str(row) for row in range(rows)], "index": list(range(rows))},
    }
    return StepBatch(**{**values, **changes})


def records(step_batch, log_probs=None, *, fresh_rows=(0, 1), kept=None):
    """Two mini-batches of two rows, in an order of their own; each padded to its own longest row."""
    log_probs = step_batch.old_log_probs_BT if log_probs is None else log_probs
    kept = step_batch.response_mask_BT.bool() if kept is None else kept
    made = []
    for number, rows in enumerate(([1, 0], [3, 2])):
        width = max(len(step_batch.responses[row]) for row in rows)
        made.append(
            LossRecord(
                torch.tensor(rows).numpy(),
                log_probs[rows, :width].numpy(),
                kept[rows, :width].numpy(),
                number,
                fresh=set(rows) <= set(fresh_rows),
            )
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
    assert (metrics["tim/compared_tokens"], metrics["tim/uncompared_tokens"]) == (18, 0)
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
    metrics = made.after_update(7, step_batch, records(step_batch))
    assert metrics["tim/exact_fraction"] == pytest.approx(17 / 18)
    assert metrics["tim/compared_delta_abs_max"] == metrics["tim/delta_abs_max"] > 0


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
    kept = step_batch.response_mask_BT.bool()
    kept[0] = False
    metrics = observer().after_update(7, step_batch, records(step_batch, kept=kept))
    assert metrics["tim/valid_tokens"] == 18
    assert metrics["tim/rejected_share_pos_adv"] == pytest.approx(0.5)
    assert metrics["tim/rejected_share_neg_adv"] == 0.0


@pytest.mark.parametrize("width", [5, 8, 50])
@pytest.mark.parametrize("bypass", [False, True])
def test_a_length_is_in_one_bin_however_wide_a_steps_batch_is(width, bypass):
    """V1 pads a batch to its own longest response, legacy to the run's limit: five tokens are five of fifty in both."""
    step_batch = batch()
    names = ("old_log_probs_BT", "rollout_log_probs_BT", "response_mask_BT", "advantages_BT")
    wide = {name: torch.nn.functional.pad(getattr(step_batch, name), (0, width - 5)) for name in names}
    seen = records(step_batch)
    if bypass:
        wide["old_log_probs_BT"] = None
    made = observer(gated=False, bypass=bypass, longest_response=50)
    metrics = made.after_update(7, batch(**wide), seen)
    bins = {name.rpartition("_")[2] for name in metrics if "by_length" in name}
    assert bins == {"0", "1"}  # rows of four and of five tokens


# ------------------------------------------------------------------------------------------------------------- bypass


def bypassed(**changes):
    step_batch = batch(old_log_probs_BT=None, **changes)
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
    assert (metrics["tim/compared_tokens"], metrics["tim/uncompared_tokens"]) == (9, 9)
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


def test_bypass_counts_rejection_over_the_rows_it_speaks_of():
    step_batch, log_probs = bypassed()
    kept = step_batch.response_mask_BT.bool()
    kept[[0, 3]] = False
    metrics = observer(bypass=True).after_update(7, step_batch, records(step_batch, log_probs, kept=kept))
    assert metrics["tim/rejected_share_pos_adv"] == 1.0  # row 0, and not row 2 of the second mini-batch
    assert metrics["tim/rejected_share_neg_adv"] == 0.0


def test_bypass_with_an_old_forward_speaks_of_the_whole_batch():
    step_batch = batch()
    moved = step_batch.old_log_probs_BT.clone()
    moved[2:] += 0.5
    made = observer(bypass=True)
    made.before_update(7, step_batch)
    metrics = made.after_update(7, step_batch, records(step_batch, moved))
    assert metrics["tim/valid_tokens"] == 18
    assert metrics["tim/exact_fraction"] == 1.0
    assert "tim/sampled_share" not in metrics
    assert metrics["tim/ppo_k1"] == pytest.approx(-0.25, abs=1e-6)
    flip_one_bit(step_batch.rollout_log_probs_BT, 2, 3)
    with pytest.raises(MismatchError, match="row 2 is uid2_0_0"):
        made.before_update(7, step_batch)


def test_bypass_without_a_fresh_row_says_so():
    step_batch, _ = bypassed()
    made = observer(bypass=True)
    metrics = made.after_update(7, step_batch, records(step_batch, step_batch.rollout_log_probs_BT, fresh_rows=()))
    assert metrics.pop("tim/sampled_share") == 0.0
    assert (metrics.pop("tim/compared_tokens"), metrics.pop("tim/uncompared_tokens")) == (0, 18)
    # what is left is of the loss's own ratio, which needs no p_old
    assert all(name.startswith(("tim/ppo_k", "tim/clipped_share_")) for name in metrics)


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


def test_the_dump_of_an_update_is_enough_to_compute_its_loss_again(tmp_path):
    made = observer(TimConfig(dump=DumpConfig(every=1, dir=str(tmp_path))))
    step_batch = batch()
    reports = [LossReport(number, number == 0, 9, 0.5 + number, MetricSums()) for number in range(2)]
    made.dump_update(7, records(step_batch), reports)
    dumped = torch.load(tmp_path / "update_000007.pt", weights_only=True)
    assert [part["mini_batch"] for part in dumped["records"]] == [0, 1]
    assert dumped["records"][1]["rows"].tolist() == [3, 2]
    assert torch.equal(dumped["records"][1]["log_prob"], step_batch.old_log_probs_BT[[3, 2]])
    assert torch.equal(dumped["records"][1]["kept"], step_batch.response_mask_BT[[3, 2]].bool())
    assert dumped["policy_loss"] == {0: 0.5, 1: 1.5}
    assert dumped["kept_tokens"] == {0: 9, 1: 9}


def recorded(tokens, moved=()):
    """Of the rollout and, with some top-1 ids moved, of the trainer."""
    top1 = np.arange(tokens, dtype=np.int32)
    other = top1.copy()
    other[list(moved)] += 50
    routes = np.tile(np.array([[0, 1], [2, 3]], np.int16), (tokens, 1, 1))
    return Recorded(top1, routes, (0, 1)), other, routes


def test_choices_of_sampled_rows_arrive(tmp_path):
    rollout, other, routes = recorded(5, moved=[1])
    step_batch = batch(recorded=[rollout, None, rollout, None])
    forwards = [ForwardRecord(0, other, routes, (0, 1)), ForwardRecord(2, rollout.top1_N, routes, (0, 1))]
    made = observer(TimConfig(run_dir=str(tmp_path)))
    metrics = made.after_update(7, step_batch, records(step_batch), (), forwards)
    assert metrics["tim/top1_tokens"] == 10
    assert metrics["tim/top1_flip_rate"] == pytest.approx(0.1)
    assert metrics["tim/router_compared"] == 20
    assert metrics["tim/router_flip_rate"] == 0.0
    assert metrics["tim/valid_tokens"] == 18, "the others are of the whole batch"
    table = read_dumps(tmp_path).to_pylist()
    assert [row["top1_train"] for row in table if row["row"] == 0] == [0, 51, 2, 3, 4]
    assert {row["row"] for row in table if row["routes_train"] is not None} == {0, 2}


def test_what_only_one_side_recorded_is_no_metric():
    rollout, other, routes = recorded(5)
    step_batch = batch(recorded=[rollout, None, None, None])
    metrics = observer().after_update(7, step_batch, records(step_batch))
    assert not any("top1" in name or "router" in name for name in metrics)
    metrics = observer().after_update(7, batch(), records(step_batch), (), [ForwardRecord(0, other, routes, (0, 1))])
    assert not any("top1" in name or "router" in name for name in metrics)


def test_bypass_compares_choices_of_the_rows_it_saw():
    step_batch, log_probs = bypassed()
    rollout, other, routes = recorded(5, moved=[0])
    step_batch.recorded = [rollout, None, rollout, None]
    metrics = observer(bypass=True).after_update(
        7, step_batch, records(step_batch, log_probs), (), [ForwardRecord(0, other, routes, (0, 1))]
    )
    assert metrics["tim/top1_tokens"] == 5
    assert metrics["tim/top1_flip_rate"] == pytest.approx(0.2)


def test_the_loss_ratio_is_of_every_epoch():
    step_batch = batch()
    first = records(step_batch)
    again = [LossRecord(r.row_B, r.log_prob_BT + np.float32(0.5), r.kept_BT, r.number + 2, fresh=False) for r in first]
    metrics = observer().after_update(7, step_batch, [*first, *again])
    assert metrics["tim/ppo_k1"] == pytest.approx(-0.25, abs=1e-6)
    assert metrics["tim/clipped_share_pos_adv"] == pytest.approx(0.5)
    assert metrics["tim/clipped_share_neg_adv"] == 0.0


def test_token_dumps(tmp_path):
    tim = TimConfig(run_dir=str(tmp_path), dump=DumpConfig(tokens_per_step=10))
    made, step_batch = observer(tim), batch(uids=["a", "a", "b", "b"])
    kept = step_batch.response_mask_BT.bool()
    kept[:, 0] = False
    step_batch.rollout_log_probs_BT[:, 1] = float("nan")
    made.after_update(7, step_batch, records(step_batch, kept=kept))
    table = read_dumps(tmp_path).to_pylist()
    assert 5 <= len(table) <= 10
    for row in table:
        assert row["step"] == 7
        assert row["length"] == len(step_batch.responses[row["row"]])
        assert row["text"] == "ABCDE"[row["position"]]
        assert (row["uid"], row["group"]) == (("a", 0) if row["row"] < 2 else ("b", 1))
        assert row["kept"] == (row["position"] > 0)
        assert (row["rollout_log_prob"] is None) == (row["position"] == 1)
        assert row["old_log_prob"] == row["log_prob"] == float(step_batch.old_log_probs_BT[row["row"], row["position"]])
        assert (row["weight_version"], row["turn"], row["top1_rollout"]) == (6, 1, None)


def test_token_dumps_under_bypass_have_the_old_log_probs_that_the_first_mini_batch_saw(tmp_path):
    """The forward of the first mini-batch ran under the weights that drew the tokens; without it in the dump neither
    report nor calibrate has anything to say of a bypass run, though `tim/*` come from just there."""
    step_batch, log_probs = bypassed()
    made = observer(TimConfig(run_dir=str(tmp_path)), bypass=True)
    made.after_update(7, step_batch, records(step_batch, log_probs)[:1])
    table = read_dumps(tmp_path).to_pylist()
    assert len(table) == 18
    assert {row["row"] for row in table if row["old_log_prob"] is not None} == {0, 1}
    assert all(row["old_log_prob"] == row["log_prob"] for row in table)
    assert all((row["log_prob"] is None) == (row["row"] > 1) for row in table), "no mini-batch drew rows 2 and 3"
    assert all(row["kept"] for row in table)


def test_token_dumps_take_no_log_prob_of_other_weights_for_the_old_one(tmp_path):
    step_batch, log_probs = bypassed()
    made = observer(TimConfig(run_dir=str(tmp_path)), bypass=True)
    metrics = made.after_update(7, step_batch, records(step_batch, log_probs))
    table = read_dumps(tmp_path).to_pylist()
    assert all(row["log_prob"] is not None for row in table)
    assert {row["row"] for row in table if row["old_log_prob"] is not None} == {0, 1}
    known = [row["old_log_prob"] - row["rollout_log_prob"] for row in table if row["old_log_prob"] is not None]
    assert len(known) == metrics["tim/valid_tokens"]
    assert np.abs(known).mean() == pytest.approx(metrics["tim/delta_abs_mean"])


def test_turns_and_tool_tokens(tmp_path):
    step_batch = batch()
    step_batch.response_mask_BT[0] = torch.tensor([1, 1, 0, 1, 1])
    observer(TimConfig(run_dir=str(tmp_path))).after_update(7, step_batch, records(step_batch))
    rows = [row for row in read_dumps(tmp_path).to_pylist() if row["row"] == 0]
    assert [(row["position"], row["turn"], row["length"], row["text"]) for row in rows] == [
        (0, 1, 4, "A"), (1, 1, 4, "B"), (3, 2, 4, "D"), (4, 2, 4, "E")
    ]  # fmt: skip


def test_a_budget_too_small_says_so_once(tmp_path, caplog):
    made = observer(TimConfig(run_dir=str(tmp_path), dump=DumpConfig(tokens_per_step=3)))
    for step in (1, 2):
        made.after_update(step, batch(versions_B=None), records(batch()))
    assert caplog.text.count("tim.dump.tokens_per_step=3, the shortest has 4 tokens") == 1
    assert read_dumps(tmp_path).num_rows == 0


def test_no_token_dumps(tmp_path):
    made = observer(TimConfig(run_dir=str(tmp_path), dump=DumpConfig(tokens_per_step=0)))
    made.after_update(7, batch(), records(batch()))
    assert not (tmp_path / "tokens").exists()


def test_a_baseline_sees_every_steps_metrics():
    class Baseline:
        def check(self, step, metrics):
            seen.append((step, metrics["tim/delta_abs_max"]))
            return {"tim/baseline_factor_max": 0.5}

    seen, made = [], observer()
    made.baseline = Baseline()
    metrics = made.after_update(7, batch(), records(batch()))
    assert seen == [(7, 0.0)]
    assert metrics["tim/baseline_factor_max"] == 0.5


@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("spoil", ["masked", "one token", "nan", "no records"])
def test_input_without_an_answer(tmp_path, spoil, bypass):
    step_batch = batch(old_log_probs_BT=None) if bypass else batch()
    seen = records(step_batch, step_batch.rollout_log_probs_BT)
    if spoil == "masked":
        step_batch.response_mask_BT[:] = 0
    elif spoil == "one token":
        step_batch.response_mask_BT[:] = 0
        step_batch.response_mask_BT[0, 0] = 1
    elif spoil == "nan":
        step_batch.rollout_log_probs_BT[:] = float("nan")
    else:
        seen = []
    made = observer(TimConfig(run_dir=str(tmp_path)), gated=False, bypass=bypass)
    metrics = made.after_update(7, step_batch, seen)
    assert all(np.isfinite(value) for value in metrics.values())
    if spoil == "one token":
        assert metrics["tim/valid_tokens"] == 1
        assert "tim/delta_adv_pearson" not in metrics
    read_dumps(tmp_path)


# ------------------------------------------------------------------------------------------------------------ records


def test_records_are_taken_out_under_any_prefix():
    first, second = records(batch())
    metrics = {f"actor/{RECORD_METRIC}": [first, second], "actor/loss": [1.0]}
    assert take(metrics, RECORD_METRIC) == [first, second]
    assert metrics == {"actor/loss": [1.0]}
    assert take(metrics, RECORD_METRIC) == []


def test_assemble_puts_rows_back_and_keeps_the_first_epoch():
    step_batch = batch()
    again = [LossRecord(r.row_B, r.log_prob_BT + 1, ~r.kept_BT, 2, fresh=False) for r in records(step_batch)]
    seen = assemble([*records(step_batch), *again], rows=4, width=5)
    valid = step_batch.response_mask_BT.bool()
    assert torch.equal(seen.log_prob_BT[valid], step_batch.old_log_probs_BT[valid])
    assert seen.seen_B.tolist() == [True] * 4
    assert seen.fresh_B.tolist() == [True, True, False, False]
    assert torch.equal(seen.kept_BT, valid)
    assert not bool(assemble([], 2, 3).seen_B.any())


def test_a_row_that_stands_in_a_record_twice_counts_as_it_came_first():
    values = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    values.setflags(write=False)
    kept = np.array([[True, False], [True, True], [False, True]])
    seen = assemble([LossRecord(np.array([2, 0, 2]), values, kept, 0, fresh=True)], rows=3, width=3)
    assert seen.log_prob_BT[[2, 0], :2].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert bool(seen.log_prob_BT[:, 2].isnan().all())
    assert bool(seen.log_prob_BT[1].isnan().all())
    assert seen.kept_BT.tolist() == [[True, True, False], [False] * 3, [True, False, False]]
    assert (seen.seen_B.tolist(), seen.fresh_B.tolist()) == ([True, False, True],) * 2


@pytest.mark.parametrize("chunk", [1, 11, 1 << 17])
def test_how_many_micro_batches_are_looked_at_together_changes_nothing(monkeypatch, chunk):
    step_batch = batch()
    moved = step_batch.old_log_probs_BT + 0.1 * torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    whole = observer().after_update(7, step_batch, records(step_batch, moved))
    monkeypatch.setattr("verl_tim.training.observer.LOSS_CHUNK", chunk)
    found = observer().after_update(7, step_batch, records(step_batch, moved))
    assert found == pytest.approx(whole, rel=1e-13)
    assert found["tim/ppo_k2"] > 0


def test_what_needs_no_loss_is_computed_while_the_workers_update(monkeypatch):
    step_batch = batch()
    step_batch.rollout_log_probs_BT += 0.25
    threads, plain, done = [], StepObserver._mismatch, threading.Event()

    def watched(self, *args):
        threads.append(threading.current_thread())
        found = plain(self, *args)
        done.set()
        return found

    monkeypatch.setattr(StepObserver, "_mismatch", watched)
    want = observer(gated=False).after_update(7, step_batch, records(step_batch))
    made = observer(gated=False)
    done.clear()
    made.before_update(7, step_batch)
    assert done.wait(30), "the update takes longer"
    assert made.after_update(7, step_batch, records(step_batch)) == want
    assert len(threads) == 2
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()
    assert made.timing()["timing_s/tim_beside_workers"] > 0
    # of another batch than the one that was looked at nothing is taken over
    made.before_update(8, step_batch)
    assert made.after_update(8, batch(), records(step_batch))["tim/delta_abs_max"] == 0


def test_what_fails_while_the_workers_update_fails_the_step():
    step_batch = batch(versions_B=torch.full((4,), 9))
    made = observer()
    made.before_update(7, step_batch)
    with pytest.raises(ValueError, match="weight_versions holds version 9"):
        made.after_update(7, step_batch, records(step_batch))


def test_token_ids_may_be_arrays(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    step_batch = batch(prompts=[np.array([1, 2])] * 4, responses=[np.arange(5 - row % 2) for row in range(4)])
    made = observer(TimConfig(run_dir=str(tmp_path)))
    made.before_update(7, step_batch)
    made.after_update(7, step_batch, records(step_batch))
    (first, *_) = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert (first["prompt"], first["response"]) == ("BC", "ABCDE")
    assert read_dumps(tmp_path)["text"].to_pylist()[:5] == list("ABCDE")
    flip_one_bit(step_batch.rollout_log_probs_BT, 2, 3)
    with pytest.raises(MismatchError, match=r"has id 3 \('D'\)"):
        observer().before_update(7, step_batch)


def test_a_step_is_told_what_it_cost_and_the_next_one_begins_at_zero(monkeypatch):
    now = iter([10.0, 10.5, 20.0, 22.0, 30.0, 30.25])
    monkeypatch.setattr("verl_tim.training.observer.time.perf_counter", lambda: next(now))
    watching = observer()
    with watching.timed():
        pass
    with pytest.raises(MismatchError), watching.timed():
        raise MismatchError
    assert watching.timing() == {"timing_s/tim": 2.5}
    with watching.timed():
        pass
    assert watching.timing() == {"timing_s/tim": 0.25}


def test_responses_at_the_limit_are_counted_by_the_limit():
    """verl's response_length/clip_ratio is of the batch's width, which V1 pads to its longest response."""
    step_batch = batch(width=5)  # two rows of 5, two of 4

    def share(limit, step_batch=step_batch):
        made = observer(gated=False, longest_response=limit)
        made.before_update(7, step_batch)
        return made.after_update(7, step_batch, records(step_batch)).get("tim/response_at_limit")

    assert share(5) == 0.5
    assert share(8) == 0.0
    assert share(None) is None, "no limit is known"
    unrecorded = batch(rollout_log_probs_BT=None)
    assert share(5, unrecorded) == 0.5
    padding = batch()
    padding.response_mask_BT[0] = 0
    assert share(5, padding) == pytest.approx(1 / 3)
