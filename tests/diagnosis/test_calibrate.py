"""Thresholds from evidence: planted mismatches must be found, and too little data refused."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from fake_dumps import heavy_tail, none, normal, one_sign, write_dumps
from fake_runs import write_run
from test_compare_page import Page
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.commands.calibrate import how_to_use
from verl_tim.correction import RolloutCorrectionConfig, correct
from verl_tim.diagnosis.calibrate import (
    Calibration,
    CalibrationError,
    Candidate,
    Figures,
    calibrate,
    calibrated_rules,
    choose,
    figures,
    thresholds,
)
from verl_tim.diagnosis.calibrate_page import render_calibration
from verl_tim.diagnosis.dumped import Dumped
from verl_tim.diagnosis.halves import halves
from verl_tim.diagnosis.token_dump import TokenDumpError


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A run where 2 % of the sequences with negative advantage are off by 0.3 nats a token, and an exact one."""
    root = tmp_path_factory.mktemp("pair")
    return (
        write_dumps(root / "stock", one_sign(0.3, 0.02), steps=10),
        write_dumps(root / "vexact", none, steps=10, seed=1),
    )


@pytest.fixture(scope="module")
def found(pair):
    return calibrate(*pair, max_share=0.02)


def test_the_planted_skew_is_removed_and_stays_removed_on_the_other_half(found):
    assert found.none.skew == pytest.approx((math.exp(0.3) - 1) * 0.02, rel=0.5)
    assert found.chosen is not None
    assert abs(found.chosen.mismatch.skew) < 0.1 * found.none.skew
    assert 0 < found.chosen.mismatch.rejected <= 0.02
    assert abs(found.held_out.skew) < 0.1 * found.held_out_none.skew


def test_a_skew_within_its_error_is_said_to_be_chance(found, tmp_path, pair):
    (unknown,) = found.notes
    assert "No manifest in stock, vexact" in unknown
    assert 0 < found.skew_error < found.none.skew / 2
    noise = calibrate(write_dumps(tmp_path / "noise", normal(0.02), steps=10), pair[1], rules=["token_k1"])
    assert noise.skew_error == pytest.approx(
        2 * 0.02 / math.sqrt(noise.mismatch_tokens / 2 / 2) / math.sqrt(2), rel=0.6
    )
    assert abs(noise.none.skew) < 2 * noise.skew_error
    assert "rests on chance" in noise.notes[-1]
    assert "rests on chance" in Page(render_calibration(noise)).text


def test_every_rule_is_tried_and_nothing_exact_is_rejected(found):
    assert {candidate.rule for candidate in found.candidates} == set(calibrated_rules())
    assert all(candidate.exact_rejected == 0 for candidate in found.candidates)
    assert all(c.admitted == (c.mismatch.rejected <= 0.02) for c in found.candidates)


def test_figures_are_those_of_the_correction(pair, found):
    """The share of tokens that `correct` masks with the very settings that are written."""
    half, _ = halves(Dumped.read(pair[0]))
    for candidate in found.candidates[::15]:
        config = RolloutCorrectionConfig.from_mapping(
            {"rollout_rs": candidate.rule, "rollout_rs_threshold": candidate.threshold}
        )
        result = correct(config, old_log_probs=half.old, rollout_log_probs=half.rollout, response_mask=half.mask)
        assert candidate.mismatch.rejected == pytest.approx(1 - int(result.mask.sum()) / half.tokens)
        assert candidate.mismatch.rejected == pytest.approx(result.metrics["rollout_corr/rollout_rs_masked_fraction"])


def test_effective_size_is_of_capped_weights_on_what_is_left(pair):
    half, _ = halves(Dumped.read(pair[0]))
    weight = (half.old.double() - half.rollout.double()).exp().clamp(max=2.0)[half.mask]
    expected = float(weight.sum() ** 2 / (len(weight) * weight.square().sum()))
    assert figures(half, None, None).effective == pytest.approx(expected, rel=1e-5)


def test_thresholds_follow_the_statistic(tmp_path):
    half, _ = halves(Dumped.read(write_dumps(tmp_path / "run", heavy_tail(1.0, 0.03), steps=10)))
    k1, k2 = thresholds("token_k1", half), thresholds("token_k2", half)
    assert k1 == sorted(set(k1))
    assert k1[-1] == pytest.approx(1.0)
    assert k2[-1] == pytest.approx(0.5)
    assert min(k1) < 1e-3


def test_a_rule_with_a_band_and_one_with_a_bound_are_written_as_they_are_read():
    seen = Figures(0.01, 0.02, 0.0, 0.99)
    assert Candidate("token_k1", 0.5, seen, 0.0, True).threshold == [math.exp(-0.5), math.exp(0.5)]
    assert Candidate("seq_max_k3", 0.5, seen, 0.0, True).threshold == 0.5


def candidate(rule, rejected, skew, exact=0.0, limit=0.01):
    admitted = exact == 0 and rejected <= limit and skew is not None
    return Candidate(rule, 1.0, Figures(rejected, rejected, skew, 1 - rejected), exact, admitted)


def test_the_criterion():
    none_at_all = Figures(0.0, 0.0, 0.1, 1.0)
    tried = [
        candidate("token_k1", 0.005, 0.05),
        candidate("token_k2", 0.02, 0.0),  # rejects too much
        candidate("token_k3", 0.005, 0.0, exact=1e-4),  # rejects something exact
        candidate("seq_mean_k1", 0.008, -0.02),
        candidate("seq_mean_k2", 0.004, 0.02),  # as good, rejects less
        candidate("seq_mean_k3", 0.005, None),  # a sign is lost
        candidate("seq_max_k2", 0.0, 0.0),  # rejects nothing
    ]
    assert choose(tried, none_at_all).rule == "seq_mean_k2"
    assert choose(tried, Figures(0.0, 0.0, 0.01, 1.0)) is None
    assert choose([], none_at_all) is None


def test_too_little_data_is_refused_with_the_minimum(tmp_path, pair):
    small = write_dumps(tmp_path / "small", one_sign(0.3, 0.02), steps=1, prompts=4)
    with pytest.raises(
        CalibrationError, match=r"small has 32 dumped sequences .* at least 200 sequences and 2000 tokens"
    ):
        calibrate(small, pair[1])
    with pytest.raises(CalibrationError, match="small has 32"):
        calibrate(pair[0], small)
    with pytest.raises(TokenDumpError, match="no token dumps"):
        calibrate(write_run(tmp_path / "none", steps=2), pair[1])


def test_sequences_without_a_known_token_count_for_nothing(tmp_path, pair):
    """Under bypass only the first mini-batch's rows have old log-probs: 384 dumped sequences may be 100 that tell."""
    run = write_dumps(tmp_path / "run", one_sign(0.3, 0.02), steps=3)
    for file in sorted((run / "tokens").glob("*.parquet")):
        table = pq.read_table(file)
        old = pc.if_else(pc.less(table["row"], 32), table["old_log_prob"], None)
        pq.write_table(table.set_column(table.column_names.index("old_log_prob"), "old_log_prob", old), file)
    with pytest.raises(CalibrationError, match="run has 96 dumped sequences"):
        calibrate(run, pair[1])


def test_the_minimum_follows_the_share(tmp_path, pair):
    small = write_dumps(tmp_path / "small", one_sign(0.3, 0.2), steps=1, prompts=16)
    with pytest.raises(CalibrationError, match="at least 200"):
        calibrate(small, pair[1], rules=["seq_mean_k1"])
    assert calibrate(small, pair[1], max_share=0.1, rules=["seq_mean_k1"]).mismatch_sequences == 128


def test_input_that_cannot_be_used(tmp_path, pair):
    with pytest.raises(CalibrationError, match="mismatching run first"):
        calibrate(pair[1], pair[0])
    with pytest.raises(CalibrationError, match="no mismatch at all"):
        calibrate(pair[1], pair[1])
    with pytest.raises(CalibrationError, match="between 0 and 1"):
        calibrate(*pair, max_share=1.0)
    with pytest.raises(CalibrationError, match="no rule 'opsm' to calibrate: choose among"):
        calibrate(*pair, rules=["opsm"])
    bypass = write_dumps(tmp_path / "bypass", one_sign(0.3, 0.02), steps=10, fields=("rollout_log_prob_N",))
    with pytest.raises(CalibrationError, match="old_forward=true"):
        calibrate(bypass, pair[1])


def test_advantages_of_one_sign_have_no_skew(tmp_path, pair, monkeypatch):
    run = write_dumps(tmp_path / "run", normal(0.01), steps=10)
    read = Dumped.read

    def all_solved(path, steps=None):
        dumped = read(path, steps)
        dumped.tokens["advantage"] = 0.0
        return dumped

    monkeypatch.setattr(Dumped, "read", all_solved)
    with pytest.raises(CalibrationError, match="one sign only"):
        calibrate(run, pair[1])


def test_where_no_rule_helps_nothing_is_written(tmp_path, pair):
    """Every token has the same |d|, so that a rule rejects about half of them or none."""

    def by_sign(place_N, advantage, noise):
        return np.full(len(place_N), 2.0**-9 if advantage > 0 else -(2.0**-9))

    run = write_dumps(tmp_path / "run", by_sign, steps=10)
    found = calibrate(run, pair[1], rules=["token_k2"])
    assert found.none.skew == pytest.approx(-(2.0**-8), rel=1e-3)
    assert found.chosen is None
    with pytest.raises(CalibrationError, match="leaves less skew than rejecting nothing"):
        found.config(weights=True)
    assert "No threshold within 1.0 %" in Page(render_calibration(found)).text
    words = ["calibrate", str(run), str(pair[1]), "--rule", "token_k2", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, "an answer, and no bad input"
    assert "leaves less skew than rejecting nothing" in " ".join(result.stderr.split())
    assert (tmp_path / "out" / "calibrate.html").exists()
    assert not (tmp_path / "out" / "correction").exists()


def test_a_choice_that_the_other_half_does_not_confirm_is_not_written(found, tmp_path):
    refuted = dataclasses.replace(
        found, held_out=dataclasses.replace(found.held_out, skew=-2 * found.held_out_none.skew)
    )
    assert found.confirmed
    assert not refuted.confirmed
    with pytest.raises(CalibrationError, match="what it gained was chance"):
        refuted.write_yaml(tmp_path, "calibrated_x", weights=True)
    assert not list(tmp_path.iterdir())
    assert "Not confirmed." in Page(render_calibration(refuted)).text


def test_tokens_without_a_log_prob_are_not_counted(tmp_path, pair):
    def holes(place_N, advantage, noise):
        d = one_sign(0.3, 0.02)(place_N, advantage, noise)
        return np.where(place_N == 1, np.nan, d)

    half, _ = halves(Dumped.read(write_dumps(tmp_path / "run", holes, steps=10)))
    assert not half.mask[:, 1].any()
    assert torch.isfinite(half.old).all()


def test_the_page_shows_criterion_choice_and_every_threshold(found):
    page = Page(render_calibration(found))
    assert found.criterion() in page.text
    assert page.text.count("chosen") >= 1
    figures = page.data()["figures"]
    assert figures.keys() == {"skew", "effective"}
    assert {trace["name"] for trace in figures["skew"]["data"]} == set(calibrated_rules())
    assert figures["skew"]["layout"]["shapes"][0]["x0"] == 0.02
    assert "zero-mismatch sequences rejected" in page.text


def test_the_command_writes_an_option_that_composes(pair, tmp_path):
    """The written file, chosen as `correction=`, gives back the very settings."""
    out = tmp_path / "out"
    words = ["calibrate", *map(str, pair), "--max-share", "0.02", "--out", str(out), "--name", "my run", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert json.loads((out / "calibrate.json").read_text()) == content
    path = out / "correction" / "calibrated_my_run.yaml"
    assert path.read_text().startswith("# @package _global_\n")
    settings = yaml.safe_load(path.read_text())["algorithm"]["rollout_correction"]
    assert settings["rollout_rs"] == [content["chosen"]["rule"]]
    assert settings["rollout_rs_threshold"] == [content["chosen"]["threshold"]]

    from omegaconf import OmegaConf

    from verl_tim.launch.compose import compose_config, hydra_for, split_recipe
    from verl_tim.training.correction_config import of_run

    chosen, searchpath = how_to_use(path).removeprefix("verl-tim train ... ").replace("'", "").split(" ")
    recipe, overrides = split_recipe(["recipe=cpu_grpo", chosen, searchpath])
    with hydra_for(recipe):
        config = compose_config(recipe, overrides)
    assert OmegaConf.select(config, "tim.choices.correction") == "calibrated_my_run"
    assert of_run(config).to_mapping() == RolloutCorrectionConfig.from_mapping(settings).to_mapping()


def test_the_command_refuses_clearly(pair):
    result = CliRunner().invoke(app, ["calibrate", str(pair[1]), str(pair[0])])
    assert result.exit_code == 2
    assert "mismatching run first" in " ".join(result.stderr.split())


def test_the_halves_do_not_hang_on_verls_random_names(pair, tmp_path):
    run = Dumped.read(pair[0])
    names = run.tokens["uid"].unique()
    renamed = dict(zip(names, np.random.default_rng(3).permutation(names), strict=True))
    other = dataclasses.replace(run, tokens=run.tokens.assign(uid=run.tokens["uid"].map(renamed)))
    for one, two in zip(halves(run), halves(other), strict=True):
        assert torch.equal(one.mask, two.mask)
        assert torch.equal(one.old, two.old)


def test_runs_of_different_models_are_refused_and_of_different_tasks_noted(tmp_path):
    runs = {}
    for name, changes in {"stock": {"rollout": "stock"}, "large": {"parameters": 999}, "small": {}}.items():
        runs[name] = write_run(tmp_path / name, steps=3, **changes)
        write_dumps(runs[name], none if name != "stock" else one_sign(0.3, 0.02), steps=10)
    with pytest.raises(CalibrationError, match=r"different models.*parameters 612480 and 999"):
        calibrate(runs["stock"], runs["large"], rules=["token_k1"])
    assert calibrate(runs["stock"], runs["small"], rules=["token_k1"]).notes == []
    manifest = json.loads((runs["small"] / "manifest.json").read_text())
    manifest["run"]["task"] = "another"
    (runs["small"] / "manifest.json").write_text(json.dumps(manifest))
    assert "another" in calibrate(runs["stock"], runs["small"], rules=["token_k1"]).notes[0]


def test_an_option_of_an_earlier_call_is_not_left_without_a_word(pair, tmp_path, monkeypatch):
    """Nothing is written, and what stands there would be taken for the answer."""
    monkeypatch.setattr(Calibration, "confirmed", property(lambda self: False))
    earlier = tmp_path / "out" / "correction" / "calibrated_x.yaml"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("# written by verl-tim calibrate\ntim: {}\n")
    words = ["calibrate", *map(str, pair), "--out", str(tmp_path / "out"), "--name", "x", "--max-share", "0.02"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert "is of an earlier call" in " ".join(result.stderr.split())
    assert earlier.read_text().endswith("tim: {}\n")
