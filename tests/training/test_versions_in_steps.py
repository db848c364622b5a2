"""Steps whose tokens come from several versions of the weights: what the gate compares, and what it cannot."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from tests.training.test_observer import batch, bypassed, flip_one_bit, observer, recorded, records
from verl_tim.commands.headline import mismatch_of
from verl_tim.diagnosis.token_dump import read_dumps
from verl_tim.replay import Agreement
from verl_tim.rollout.versions import UNKNOWN
from verl_tim.training.config import ConfigError, DumpConfig, SamplesConfig, TimConfig
from verl_tim.training.forward_records import ForwardRecord
from verl_tim.training.observer import MismatchError, StepBatch, StepObserver
from verl_tim.training.replay_report import ReplayReport
from verl_tim.training.trainer_v1 import _Part

STEP = 7  # its update starts from version 6


def mixed(**changes):
    """Four rows of 5, 4, 5, 4 tokens: drawn under 6, under 5 then 6, under 4, and one without a record."""
    versions = torch.tensor([[6] * 5, [5, 5, 6, 6, 0], [4] * 5, [UNKNOWN] * 5])
    values = {"versions_BT": versions, "versions_B": torch.tensor([6, 5, 4, 5]), **changes}
    return batch(**values)


def stale_moved(step_batch, by=0.5):
    """The rollout's log-probs of older tokens are those of older weights."""
    old = step_batch.versions_BT != 6
    step_batch.rollout_log_probs_BT = torch.where(
        old, step_batch.rollout_log_probs_BT - by, step_batch.rollout_log_probs_BT
    )
    return step_batch


def test_only_tokens_of_the_trainers_version_are_compared():
    made, step_batch = observer(), stale_moved(mixed())
    made.before_update(STEP, step_batch)
    metrics = made.after_update(STEP, step_batch, records(step_batch))
    assert metrics["tim/compared_tokens"] == 5 + 2
    assert metrics["tim/uncompared_tokens"] == 2 + 5 + 4
    assert metrics["tim/compared_delta_abs_max"] == 0.0
    assert mismatch_of(metrics) == 0.0
    assert metrics["tim/exact_fraction"] == pytest.approx(7 / 18)
    assert metrics["tim/delta_abs_mean_by_version_lag_0"] == 0.0
    assert metrics["tim/delta_abs_mean_by_version_lag_1"] == pytest.approx(0.5)
    assert metrics["tim/delta_abs_mean_by_version_lag_2"] == pytest.approx(0.5)
    assert metrics["tim/staleness_max"] == 2.0
    assert metrics["tim/mixed_version_rows"] == 1.0


def test_what_is_shown_as_mismatch_holds_no_staleness_without_a_gate():
    """rollout=vllm or stock under an asynchronous trainer: older tokens are off by what the weights moved, too."""
    made, step_batch = observer(gated=False), stale_moved(mixed())
    step_batch.rollout_log_probs_BT = step_batch.rollout_log_probs_BT - 0.01
    made.before_update(STEP, step_batch)
    metrics = made.after_update(STEP, step_batch, records(step_batch))
    assert metrics["tim/delta_abs_max"] == pytest.approx(0.51, abs=1e-5)
    assert mismatch_of(metrics) == pytest.approx(0.01, abs=1e-5)
    stale = stale_moved(mixed(versions_BT=torch.full((4, 5), 5)))
    made.before_update(STEP + 1, stale)
    assert mismatch_of(made.after_update(STEP, stale, records(stale))) is None


@pytest.mark.parametrize(
    ("row", "token", "stops"), [(0, 4, True), (1, 2, True), (1, 1, False), (2, 0, False), (3, 0, False)]
)
def test_a_differing_bit_counts_where_the_version_is_the_trainers(row, token, stops):
    made, step_batch = observer(), mixed()
    flip_one_bit(step_batch.rollout_log_probs_BT, row, token)
    if not stops:
        made.before_update(STEP, step_batch)
        return
    with pytest.raises(MismatchError, match=f"row {row} is uid{row}_0_0, response token {token} "):
        made.before_update(STEP, step_batch)


def test_a_step_of_older_tokens_only_compares_nothing_and_says_so():
    made, step_batch = observer(), stale_moved(mixed(versions_BT=torch.full((4, 5), 5)))
    made.before_update(STEP, step_batch)
    metrics = made.after_update(STEP, step_batch, records(step_batch))
    assert metrics["tim/compared_tokens"] == 0
    assert metrics["tim/uncompared_tokens"] == 18
    assert metrics["tim/exact_fraction"] == 0.0
    assert "tim/delta_abs_mean_by_version_lag_0" not in metrics
    assert "tim/compared_delta_abs_max" not in metrics
    assert mismatch_of(metrics) is None


def test_a_synchronous_step_that_compares_nothing_still_fails():
    step_batch = batch()
    step_batch.response_mask_BT = torch.zeros_like(step_batch.response_mask_BT)
    with pytest.raises(MismatchError, match="nothing to compare"):
        observer().before_update(STEP, step_batch)


def test_bypass_compares_by_version_too():
    step_batch, log_probs = bypassed()
    step_batch.versions_BT = mixed().versions_BT
    made = observer(bypass=True)
    made.before_update(STEP, step_batch)
    moved = log_probs.clone()
    flip_one_bit(moved, 1, 1)  # version 5
    metrics = made.after_update(STEP, step_batch, records(step_batch, moved))
    assert metrics["tim/compared_tokens"] == 7
    assert metrics["tim/uncompared_tokens"] == 11
    flip_one_bit(moved, 1, 2)
    with pytest.raises(MismatchError, match="row 1 is uid1_0_0, response token 2"):
        made.after_update(STEP, step_batch, records(step_batch, moved))


def test_choices_of_older_weights_are_no_mismatch():
    rollout, other, routes = recorded(4, moved=[0, 1])
    step_batch = mixed(recorded=[None, rollout, None, None])
    forwards = [ForwardRecord(1, other, routes, (0, 1))]
    metrics = observer().after_update(STEP, step_batch, records(step_batch), (), forwards)
    assert metrics["tim/top1_tokens"] == 2
    assert metrics["tim/top1_flip_rate"] == 0.0


@pytest.mark.parametrize(("lag", "kept"), [(0, [5, 2, 0, 0]), (1, [5, 4, 0, 0]), (2, [5, 4, 5, 0])])
def test_tokens_within_a_lag(lag, kept):
    step_batch = mixed()
    mask = step_batch.response_mask_BT.bool() & observer().within_lag(STEP, step_batch, lag)
    assert mask.sum(1).tolist() == kept
    assert bool(observer().within_lag(STEP, batch(), lag).all()), "without versions all are of the trainer's"


@pytest.mark.parametrize("lag", [-1, True, 1.5, "0"])
def test_a_lag_is_a_number_of_versions(lag):
    with pytest.raises(ConfigError, match=r"tim\.partial_rollout\.max_version_lag"):
        TimConfig.of({"tim": {"partial_rollout": {"max_version_lag": lag}}})


def test_token_dumps_name_the_version_of_each_token(tmp_path):
    step_batch = mixed()
    observer(TimConfig(run_dir=str(tmp_path))).after_update(STEP, step_batch, records(step_batch))
    versions = {}
    for row in read_dumps(tmp_path).to_pylist():
        versions.setdefault(row["row"], []).append(row["weight_version"])
    assert versions == {0: [6] * 5, 1: [5, 5, 6, 6], 2: [4] * 5, 3: [None] * 4}


# ------------------------------------------------------------------------------------------------- a step in two parts


def halves():
    """One step's batch as two parts of two rows, of different widths."""
    whole = mixed()
    parts = []
    for rows, width in (([0, 1], 5), ([2, 3], 5)):
        values = {}
        for field in dataclasses.fields(StepBatch):
            value = getattr(whole, field.name)
            if isinstance(value, torch.Tensor):
                values[field.name] = value[rows][:, :width] if value.dim() == 2 else value[rows]
            elif isinstance(value, dict):
                values[field.name] = {name: [column[row] for row in rows] for name, column in value.items()}
            else:
                values[field.name] = [value[row] for row in rows] if value else value
        parts.append(StepBatch(**values))
    return whole, parts


def test_parts_joined_are_the_whole():
    whole, parts = halves()
    joined = StepBatch.joined(parts)
    for field in dataclasses.fields(StepBatch):
        mine, theirs = getattr(joined, field.name), getattr(whole, field.name)
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(mine, theirs), field.name
        else:
            assert (mine or None) == (theirs or None), field.name


def test_parts_of_different_width_are_padded():
    _, (first, second) = halves()
    narrow = dataclasses.replace(
        second,
        **{
            f.name: getattr(second, f.name)[:, :3]
            for f in dataclasses.fields(StepBatch)
            if isinstance(getattr(second, f.name), torch.Tensor) and getattr(second, f.name).dim() == 2
        },
    )
    joined = StepBatch.joined([first, narrow])
    assert joined.response_mask_BT[2:, 3:].sum() == 0
    assert (joined.versions_BT[2:, 3:] == UNKNOWN).all()
    without = dataclasses.replace(narrow, rollout_log_probs_BT=None)
    assert StepBatch.joined([first, without]).rollout_log_probs_BT is None


def test_a_step_in_parts_reports_as_one(tmp_path, monkeypatch):
    whole, parts = halves()
    plain = observer(TimConfig())
    plain.before_update(STEP, whole)
    want = plain.after_update(STEP, whole, records(whole))
    (tmp_path / "config.yaml").write_text("{}")
    tim = TimConfig(run_dir=str(tmp_path), dump=DumpConfig(every=1), samples=SamplesConfig(per_step=1))
    made, updated, looked = observer(tim), [], []
    mismatch = StepObserver._mismatch
    monkeypatch.setattr(StepObserver, "_mismatch", lambda *args: looked.append(args[2]) or mismatch(*args))
    for number, part in enumerate(parts):
        made.before_update(STEP, part, whole=False)
        seen = [dataclasses.replace(record, row_B=record.row_B - 2 * number) for record in [records(whole)[number]]]
        made.dump_update(STEP, seen, ())
        replayed = ReplayReport("old", Agreement(pairs=1), Agreement(pairs=1))
        updated.append(_Part(part, seen, [], [ForwardRecord(0, np.zeros(5, np.int32))], [replayed]))
    joined = _Part.joined(updated)
    assert [record.row_B.tolist() for record in joined.records] == [[1, 0], [3, 2]]
    assert [forward.row for forward in joined.forwards] == [0, 2]
    assert len(joined.replays) == len(updated)
    assert made.after_update(STEP, joined.batch, joined.records) == want
    assert [one is joined.batch for one in looked] == [True], "of a part nothing is computed that nobody asks for"
    files = sorted(path.name for path in (tmp_path / "dumps").iterdir())
    assert files == [
        "step_000007.pt", "step_000007_part1.pt", "update_000007.pt", "update_000007_part1.pt",
    ]  # fmt: skip
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1
    made.before_update(STEP + 1, batch(versions_B=None))
    made.dump_update(STEP + 1, [], ())
    assert (tmp_path / "dumps" / "step_000008.pt").exists(), "the next step begins anew"
    assert json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[-1])["step"] == STEP + 1
