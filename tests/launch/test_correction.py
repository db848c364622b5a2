"""The check of the correction: unknown keys get a suggestion, wrong values name key and remedy."""

import json

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.launch.checks import correction, run_checks
from verl_tim.launch.start import composed
from verl_tim.training.correction_config import of_run

NODE = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout_is_treshold", "rollout_is_threshold"),
        ("rollout_rs_signals", "rollout_rs_signal"),
        ("denominater", "denominator"),
        ("bypass", "bypass_mode"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(resolved, key, meant):
    (finding,) = correction.check(resolved("correction=token_tis", f"+{NODE}.{key}=2"))
    assert finding.key == f"{NODE}.{key}"
    assert f"did you mean '{meant}'" in finding.remedy


def test_an_unknown_key_without_a_plus_gets_one_too():
    from verl_tim.launch.errors import LaunchError

    with pytest.raises(LaunchError, match=r"did you mean .*rollout_rs_threshold"):
        composed([f"{NODE}.rollout_rs_treshold=2"])


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        ("rollout_is=tokens", "rollout_is", "token, sequence, sequence_mean"),
        ("rollout_is_threshold=-1", "rollout_is_threshold", "positive"),
        ("rollout_is_threshold=[5,0.5]", "rollout_is_threshold", "lo <= hi"),
        ("rollout_is_threshold=nan", "rollout_is_threshold", "finite"),
        ("rollout_is_batch_normalize=maybe", "rollout_is_batch_normalize", "true or false"),
        ("rollout_rs=seq_mean_k4", "rollout_rs", "seq_mean_k1"),
        ("rollout_rs=seq_max_k1", "rollout_rs", "token_k1"),
        ("rollout_rs=token_k1", "rollout_rs_threshold", f"{NODE}.rollout_rs_threshold=[0.5,2.0]"),
        ("bypass_mode=2", "bypass_mode", "true or false"),
        ("loss_type=ppo", "loss_type", "ppo_clip, reinforce"),
        ("rollout_rs_signal=r_train", "rollout_rs_signal", "r_corr, r_ppo"),
        ("old_forward=true", "old_forward", "bypass_mode: true"),
        ("denominator=none", "denominator", "kept, all"),
    ],
)
def test_a_wrong_value_names_key_and_remedy_and_ends_the_list(resolved, override, key, remedy):
    results = run_checks(resolved("correction=token_tis", f"{NODE}.{override}"))
    assert results[-1][0].run is correction.check
    (finding,) = results[-1][1]
    assert finding.key == f"{NODE}.{key}"
    assert remedy in finding.remedy


def test_a_plain_verl_group_is_fine():
    config = OmegaConf.create({"algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2}}})
    assert list(correction.check(config)) == []
    config.algorithm.rollout_correction.preset = "icepop"
    assert of_run(config).band == (0.5, 5.0)
    assert list(correction.check(OmegaConf.create({"algorithm": {"rollout_correction": None}}))) == []


def test_the_resolved_correction_is_shown(model_folder, tmp_path):
    words = [
        f"actor_rollout_ref.model.path={model_folder}",
        f"tim.run_dir={tmp_path}/run",
        f"tim.cache_dir={tmp_path}/cache",
        "tim.task.train_size=32",
        "tim.task.val_size=4",
        "correction=icepop",
        f"{NODE}.denominator=all",
        f"{NODE}.rollout_is_batch_normalize=true",
    ]
    doctor = CliRunner().invoke(app, ["doctor", "--json", *words])
    assert doctor.exit_code == 0, doctor.output
    said = json.loads(doctor.stdout)
    assert said["correction"]["rollout_is_threshold"] == [0.5, 5.0]
    assert said["notes"] == []
    shown = CliRunner().invoke(app, ["doctor", *words]).stdout
    dry = CliRunner().invoke(app, ["train", "--dry-run", *words])
    for text in (shown, dry.stderr):
        lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
        assert "rollout correction (preset icepop)" in text
        assert "weights outside [0.5, 5] are zeroed" in lines["rollout_is_threshold"]
        assert lines["rollout_is"].split() == ["rollout_is", "token", "preset"]
        assert lines["denominator"].split() == ["denominator", "all", "given"]
        assert lines["loss_type"].split() == ["loss_type", "ppo_clip", "default"]


def test_doctor_says_what_has_no_effect(model_folder, tmp_path):
    words = [f"actor_rollout_ref.model.path={model_folder}", f"tim.run_dir={tmp_path}/run", f"tim.cache_dir={tmp_path}"]
    result = CliRunner().invoke(app, ["doctor", *words, f"{NODE}.rollout_is_threshold=3"])
    assert result.exit_code == 0
    assert "has no effect: rollout_is is null" in " ".join(result.stdout.split())
