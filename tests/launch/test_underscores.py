"""A band that YAML takes for a number (0.5_5 is 0.55) is refused wherever it was written, before anything starts."""

import subprocess
import sys

import pytest
from hydra import compose
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.launch.callback import Launch
from verl_tim.launch.compose import hydra_for
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.recipes import find_recipe
from verl_tim.launch.start import composed

KEY = "algorithm.rollout_correction.rollout_is_threshold"
RECIPE = """\
hydra:
  searchpath: ["pkg://verl.trainer.config", "pkg://verl_tim.configs"]
defaults:
  - ppo_trainer
  - tim
  - cluster: cpu
  - tracker: file
  - task: chain_sum
  - model: tiny_qwen3
  - rollout: vexact
  - trainer: contract
  - _self_
  - correction: {correction}
tim: {{choices: {{recipe: mine}}}}
algorithm: {{rollout_correction: {{rollout_is: token, rollout_is_threshold: {threshold}}}}}
"""
CORRECTION = """\
# @package _global_
defaults: [token_tis, _self_]
tim: {{choices: {{correction: mine}}}}
algorithm:
  rollout_correction:
    rollout_is_threshold: {threshold}
"""


@pytest.fixture
def write(tmp_path):
    """A recipe of the user's own, with a correction file beside it."""

    def make(recipe="[0.5, 5]", correction="[0.5, 5]", chosen="mine"):
        (tmp_path / "correction").mkdir()
        (tmp_path / "correction/mine.yaml").write_text(CORRECTION.format(threshold=correction))
        path = tmp_path / "mine.yaml"
        path.write_text(RECIPE.format(threshold=recipe, correction=chosen))
        return path

    return make


def refused(*overrides):
    with pytest.raises(LaunchError) as caught:
        composed(overrides)
    (finding,) = caught.value.findings
    assert finding.key == KEY
    assert "0.55" in finding.problem
    assert '[0.5, 5] or "0.5_5" in quotes' in finding.remedy
    return finding.problem


def test_files_are_found_once_for_a_choice_of_groups_and_anew_for_another(write):
    recipe = f"recipe={write(correction='0.5_5', chosen='none')}"
    for seed in (1, 2):
        composed([recipe, f"data.seed={seed}"])
    for seed in (1, 2):
        assert "mine.yaml" in refused(recipe, "correction=mine", f"data.seed={seed}")
    composed([recipe, "data.seed=1"])


def test_in_an_override():
    assert f"'{KEY}=0.5_5'" in refused("correction=token_tis", f"{KEY}=0.5_5")


def test_in_a_recipe(write):
    path = write(recipe="0.5_5", chosen="none")
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "0.5_5" in text)
    assert f"{path}:{line}" in refused(f"recipe={path}")


def test_in_a_correction_file(write, tmp_path):
    path = write(correction="0.5_5")
    assert f"{tmp_path}/correction/mine.yaml:6" in refused(f"recipe={path}")


@pytest.mark.parametrize("threshold", ["[0.5, 5]", '"0.5_5"'])
def test_a_list_or_quotes_are_a_band(write, threshold):
    from verl_tim.training.correction_config import of_run

    path = write(recipe=threshold, correction=threshold)
    assert of_run(composed([f"recipe={path}"])).band == (0.5, 5.0)
    assert of_run(composed(["correction=token_tis", f"{KEY}={threshold.replace(' ', '')}"])).band == (0.5, 5.0)


def test_a_file_that_is_not_chosen_is_not_read(write):
    assert composed([f"recipe={write(correction='0.5_5', chosen='icepop')}"]).tim.choices.correction == "icepop"


def test_an_interpolation_in_an_override_is_left_as_it_is():
    worker = "actor_rollout_ref.actor.policy_loss.rollout_correction"
    config = composed(["correction=token_tis", f"{worker}=${{algorithm.rollout_correction}}"])
    assert OmegaConf.select(config, f"{worker}.rollout_is") == "token"


def test_a_quoted_band_is_still_text_in_the_stored_config():
    """verl's process reads config.yaml of the run folder."""
    node = composed(["correction=token_tis", f'{KEY}="0.5_5"']).algorithm.rollout_correction
    assert OmegaConf.create(OmegaConf.to_yaml(node)).rollout_is_threshold == "0.5_5"


def test_train_says_it_without_a_traceback(tmp_path):
    result = CliRunner().invoke(app, ["train", f"tim.run_dir={tmp_path}/run", f"{KEY}=0.5_5"])
    assert result.exit_code == 2
    assert KEY in result.stderr
    assert "in quotes" in result.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_the_callback_of_a_plain_verl_command(write, capsys):
    recipe = find_recipe(str(write(recipe="0.5_5", chosen="none")))
    with hydra_for(recipe):
        config = compose(recipe.config_name, return_hydra_config=True)
        with pytest.raises(SystemExit) as caught:
            Launch().on_run_start(config)
    assert caught.value.code == 2
    assert "mine.yaml" in capsys.readouterr().err


MAIN = """
import hydra, verl
from verl.utils.config import validate_config

@hydra.main(config_path=None, config_name="mine", version_base=None)
def main(config):
    validate_config(config, use_reference_policy=False, use_critic=False)

main()
"""


@pytest.mark.parametrize("where", ["override", "file"])
def test_verls_own_validation_in_a_process_of_hydra(tmp_path, where):
    """A config without `tim.yaml` and so without its callback, that uses a rollout of ours."""
    threshold = "0.5_5" if where == "file" else "2.0"
    (tmp_path / "mine.yaml").write_text(
        "actor_rollout_ref: {rollout: {name: vexact}}\n"
        f"algorithm: {{rollout_correction: {{rollout_is_threshold: {threshold}}}}}\n"
    )
    words = [f"{KEY}=0.5_5"] if where == "override" else []
    result = subprocess.run(
        [sys.executable, "-c", MAIN, "--config-dir", str(tmp_path), *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert result.returncode != 0
    assert f"{KEY}='0.5_5'" in result.stderr
    assert ("mine.yaml:2" if where == "file" else "override") in result.stderr
