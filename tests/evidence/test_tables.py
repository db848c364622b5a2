"""The tables say what stands in the runs."""

import json
import math
import shutil
from statistics import fmean

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.diagnosis.fake_dumps import normal, one_sign, write_dumps
from tests.evidence.conftest import write_matrix
from verl_tim.diagnosis.curves import REWARD
from verl_tim.diagnosis.dumped import Dumped
from verl_tim.diagnosis.formats import short
from verl_tim.diagnosis.halves import part_of
from verl_tim.evidence.effect import effect_of
from verl_tim.evidence.names import VARIANTS, RunName
from verl_tim.evidence.runs import Evidence
from verl_tim.evidence.tables import (
    Table,
    first_to_leave,
    forecasts,
    lengths,
    rejected_in_training,
    speeds,
    speeds_side_by_side,
    tail,
    thresholds,
)


@pytest.fixture(scope="module")
def evidence(runs):
    return Evidence.read(runs)


def rows(table: Table, variant: str) -> dict[str, str]:
    (row,) = (row for row in table.rows if row[1] == variant)
    return dict(zip(table.columns, row, strict=True))


def test_runs_are_grouped_by_name(evidence):
    (pair,) = evidence.pairs
    assert pair.name == "dense-grpo"
    assert pair.variants == list(VARIANTS)
    assert all(len(group.logs) == 2 for group in pair.comparison.groups)
    assert pair.comparison.baseline is pair.group("vexact")
    assert len(evidence.finished) == 10


def test_a_name_is_its_lengths():
    name = RunName("moe", "reinforce", "vllm_tis", 3)
    assert RunName.parse(str(name)) == name
    assert RunName.parse("dense-grpo-vexact") is None
    assert RunName.parse("compare") is None
    assert RunName.parse("dense-grpo-<b>-data.seed=1") is None, "it is written into a page"


def test_signals_leave_an_exact_band_at_once_and_the_reward_stays(evidence):
    found = rows(first_to_leave(evidence), "vllm_recompute")
    assert found["contribution skew"].startswith("1 (")
    assert found["reward"] == "stays"
    assert not any(row[1] == "vexact" for row in first_to_leave(evidence).rows)


def test_shares_are_of_all_tokens(evidence):
    exact, vllm = rows(tail(evidence), "vexact"), rows(tail(evidence), "vllm_recompute")
    assert (exact["|d| > 0.01"], exact["largest"], exact["top-1 flips"]) == ("0 %", "0", "0 %")
    assert (vllm["|d| > 0.01"], vllm["> 0.1"], vllm["> 1"]) == ("4.0 %", "0.2 %", "0 %")
    assert vllm["router flips"] == "–"
    assert not any("tim.vllm_routes" in note for note in tail(evidence).notes), "a dense model has no router"


def test_a_run_that_logged_no_mismatch_has_none_of_size_0(tmp_path):
    folder = (
        write_matrix(tmp_path, variants=("vexact", "vllm_tis"), seeds=(1,), steps=3) / "dense-grpo-vllm_tis-data.seed=1"
    )
    (folder / "metrics.jsonl").write_text('{"step": 0, "data": {"val-core/acc": 0.1}}\n')
    found = rows(tail(Evidence.read(tmp_path)), "vllm_tis")
    assert {found[name] for name in ("|d| > 0.01", "mean |d|", "largest")} == {"–"}


def test_why_there_is_no_row_is_said(tmp_path):
    write_matrix(tmp_path, variants=("vexact",), seeds=(1,), steps=3)
    table = rejected_in_training(Evidence.read(tmp_path))
    assert not table.rows
    assert table.notes == ["No run logged a rejection."]


def test_what_all_variants_lack_is_said_once(tmp_path):
    write_matrix(tmp_path, variants=("vexact", "vllm_tis", "vllm_bypass"), seeds=(1,), steps=12)
    notes = forecasts(Evidence.read(tmp_path)).notes
    assert len(notes) == len(set(notes)) > 0


def test_why_a_mixture_on_vllm_has_no_router_flips_is_said(tmp_path):
    write_matrix(tmp_path, ("moe-grpo",), ("vexact", "vllm_recompute"), (1,), steps=3)
    assert any("tim.vllm_routes" in note for note in tail(Evidence.read(tmp_path)).notes)


def test_a_step_counts_by_its_tokens(tmp_path):
    import json

    root = write_matrix(tmp_path, variants=["vexact", "vllm_recompute"], seeds=[1], steps=4)
    path = root / "dense-grpo-vllm_recompute-data.seed=1" / "metrics.jsonl"
    lines = []
    for step, (share, tokens) in enumerate([(0.1, 100), (0.4, 300)], 1):
        lines.append({"step": step, "data": {"tim/delta_gt_0.01": share, "tim/valid_tokens": tokens}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = rows(tail(Evidence.read(root)), "vllm_recompute")
    assert (found["tokens"], found["|d| > 0.01"]) == ("400", "32.5 %")


def test_lengths_come_from_the_dumps(evidence):
    found = lengths(evidence)
    assert {row[1] for row in found.rows} == {"vllm_recompute", "vllm_tis", "vllm_invariant"}
    assert any("vllm_bypass" in note for note in found.notes), "its trainer scored nothing"
    tokens = sum(int(row[3].replace(",", "")) for row in found.rows if row[1] == "vllm_tis")
    folder = evidence.pairs[0].dumped("vllm_tis")
    assert tokens == len(Dumped.read(folder).tokens)


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    dumped = Dumped.read(write_dumps(tmp_path_factory.mktemp("dumps"), one_sign(1.0, 0.1), steps=2))
    return part_of(dumped, np.ones(dumped.sequences, bool))


def test_without_a_correction_the_skew_is_that_of_the_metrics(skewed):
    found = effect_of("none", skewed)
    assert (found.tokens, found.sequences, found.cut, found.effective) == (0, 0, None, 1)
    assert found.skew == pytest.approx(skewed.skew(skewed.mask), rel=1e-6)
    # e - 1 on a tenth of the sequences with negative advantage
    assert found.skew == pytest.approx(0.1 * (math.e - 1), rel=0.5)


def test_weights_leave_what_the_cap_cuts(skewed):
    found = effect_of("token_tis", skewed)
    hit = skewed.mask & (skewed.old - skewed.rollout > math.log(2))
    assert found.cut == pytest.approx(float(hit.sum() / skewed.mask.sum()))
    left = effect_of("none", skewed).skew * (math.e - 2) / (math.e - 1)
    assert found.skew == pytest.approx(left, rel=0.05)
    assert found.effective < 1


def test_rejection_takes_the_sequences_and_their_skew(skewed):
    found = effect_of("seq_reject_corr_k3", skewed)
    hit = ((skewed.old - skewed.rollout) > 0.5).any(dim=-1) & skewed.mask.any(dim=-1)
    assert found.sequences == pytest.approx(float(hit.double().mean()))
    assert abs(found.skew) < 0.01 * abs(effect_of("none", skewed).skew)
    assert effect_of("paper_tis_seq_k3", skewed).sequences == found.sequences


def test_small_noise_leaves_rounding_alone(tmp_path):
    dumped = Dumped.read(write_dumps(tmp_path, normal(0.01), steps=2))
    half = part_of(dumped, np.ones(dumped.sequences, bool))
    assert abs(effect_of("token_tis", half).skew) < 1e-7
    assert effect_of("token_tis", half).cut == 0
    assert torch.isfinite(half.old).all()


def test_calibrate_is_asked_for_thresholds(evidence):
    found = thresholds(evidence)
    assert found.rows[0][1] == "no rejection"
    assert 1 < len(found.rows) <= 4
    assert any("half that had no part in the choice" in note for note in found.notes)


def test_a_skew_that_is_chance_is_said_to_be(tmp_path):
    """d of one sign leaves a skew, of both signs none; thresholds are tried on either."""
    said = {}
    for name, mismatch in (("leans", one_sign(0.3, 0.05)), ("noise", normal(0.01))):
        root = write_matrix(tmp_path / name, variants=["vexact", "vllm_recompute"], seeds=[1])
        write_dumps(root / "dense-grpo-vllm_recompute-data.seed=1", mismatch, seed=1, steps=4)
        said[name] = thresholds(Evidence.read(root)).notes[-1].partition("Standard error of the skew: ")[2]
    assert "within two of it" in said["noise"]
    assert said["leans"]
    assert "within" not in said["leans"]


def test_times_of_runs_that_shared_the_machine_say_so(evidence):
    shared = speeds_side_by_side(evidence)
    assert any("shared the GPU" in note for note in shared.notes)
    assert float(rows(shared, "vexact")["step, s"]) > float(rows(shared, "vllm_recompute")["step, s"])


def test_times_of_runs_that_were_alone(evidence, runs, tmp_path):
    none = speeds(evidence)
    assert not none.rows
    assert any("--alone" in note for note in none.notes)
    alone = write_matrix(tmp_path, variants=["vexact"], seeds=[1], steps=6)
    found = speeds(Evidence.read(runs, alone))
    assert [row[1] for row in found.rows] == ["vexact"]
    assert any("alone on the machine" in note for note in found.notes)
    config_path = alone / "dense-grpo-vexact-data.seed=1" / "config.yaml"
    config = OmegaConf.load(config_path)
    OmegaConf.update(config, "tim.poll_interval", 0.3, force_add=True)
    OmegaConf.save(config, config_path)
    looks = [note for note in speeds(Evidence.read(runs, alone)).notes if "poll_interval" in note]
    assert [note.split(" for ")[0] for note in looks] == ["The trainer looks every 0.300 s"]


def test_forecast_of_runs_that_do_not_part(evidence):
    found = rows(forecasts(evidence), "vllm_recompute")
    assert found["parted"] == "no"
    assert "not before" in found["by the skew"]
    assert found["or with a skew of"].endswith("×")


def rewards(folder):
    data = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [one[REWARD[0]] for one in data if REWARD[0] in one]


def test_a_gap_is_taken_between_runs_of_one_seed(tmp_path):
    variants = ["vexact", "vllm_recompute"]
    root = write_matrix(tmp_path, variants=variants, seeds=[1, 2, 3])
    # the variant's first seed is not there, so places in the groups differ
    shutil.rmtree(root / "dense-grpo-vllm_recompute-data.seed=1")
    found = rows(forecasts(Evidence.read(root)), "vllm_recompute")
    ends = {
        seed: [fmean(rewards(root / f"dense-grpo-{variant}-data.seed={seed}")[-4:]) for variant in variants]
        for seed in (2, 3)
    }
    gap = fmean(other - exact for exact, other in ends.values())
    assert found["seeds"] == "2"
    assert found["reward's gap at the end"].split(" ± ")[0] == short(gap)

    shutil.rmtree(root / "dense-grpo-vexact-data.seed=2")
    one = forecasts(Evidence.read(root))
    assert rows(one, "vllm_recompute")["reward's gap at the end"].endswith("(one seed)")
    assert any("of 2 seeds of vllm_recompute 1 are compared" in note for note in one.notes)

    shutil.rmtree(root / "dense-grpo-vllm_recompute-data.seed=3")
    write_matrix(root, variants=["vexact"], seeds=[4])
    none = forecasts(Evidence.read(root))
    assert rows(none, "vllm_recompute")["seeds"] == "means"
    assert any("vllm_recompute has no seed that vexact has" in note for note in none.notes)


def test_forecast_of_a_larger_skew_is_earlier(tmp_path):
    root = write_matrix(tmp_path, skew={"vllm_recompute": 0.001, "vllm_bypass": 0.01}, variants=VARIANTS[:3], steps=30)
    table = forecasts(Evidence.read(root))
    near, far = (rows(table, name)["by the skew"].split(" ")[0] for name in ("vllm_bypass", "vllm_recompute"))
    assert int(far.replace(",", "")) == pytest.approx(10 * int(near.replace(",", "")), rel=0.02)


def test_without_an_exact_run_there_is_no_band(tmp_path):
    evidence = Evidence.read(write_matrix(tmp_path, variants=["vllm_recompute"], seeds=[1], steps=5))
    assert first_to_leave(evidence).rows == []
    assert "no exact run" in first_to_leave(evidence).markdown()
    assert forecasts(evidence).rows == []
    assert "no exact run" in forecasts(evidence).markdown()


def test_responses_of_one_length_are_one_row(tmp_path):
    root = write_matrix(tmp_path, variants=["vexact", "vllm_recompute"], seeds=[1], steps=4)
    write_dumps(root / "dense-grpo-vllm_recompute-data.seed=1", normal(0.01), steps=2, lengths=(7, 8))
    (row,) = lengths(Evidence.read(root)).rows
    assert row[2:4] == ("7", f"{2 * 128 * 7:,}")


def test_markdown_keeps_bars_inside_cells():
    assert Table(("|d|", "b"), [("1", "2")], ["note"]).markdown() == "| \\|d\\| | b |\n| --- | --- |\n| 1 | 2 |\n\nnote"
    assert Table(("a",), [], ["nothing"]).markdown() == "nothing"
