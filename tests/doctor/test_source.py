"""What doctor reads: recipes, any YAML of verl's, run folders; and what it refuses, with key and remedy."""

import pytest
import yaml
from omegaconf import OmegaConf

from verl_tim.doctor.examine import examine
from verl_tim.doctor.source import read
from verl_tim.doctor.view import View
from verl_tim.launch.errors import LaunchError


def refusal(*words, **options):
    with pytest.raises(LaunchError) as caught:
        read(list(words), **options)
    (finding,) = caught.value.findings
    assert finding.remedy
    return finding


def test_a_yaml_without_defaults_stands_on_verls(plain, plain_file):
    source = read([str(plain_file), "actor_rollout_ref.rollout.n=4"])
    assert source.config.actor_rollout_ref.rollout.n == 4
    assert source.config.data.train_batch_size == plain["data"]["train_batch_size"]
    # verl's own, with its interpolation resolved against the file
    assert source.config.actor_rollout_ref.rollout.response_length == 256
    assert source.config.algorithm.rollout_correction.rollout_is_threshold == 2.0
    assert "tim" not in source.config
    assert not source.is_a_run


def test_a_critic_whose_model_is_nowhere_is_a_finding(plain, tmp_path):
    """PPO as verl ships it: GAE, and a critic of ~/models/... ."""
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump({**plain, "algorithm": {"adv_estimator": "gae"}}))
    source = read([str(tmp_path / "ppo.yaml"), "critic.model.path=/nowhere/at/all"])
    (found,) = (each for each in examine(View(source.config)).violations if each.key == "critic")
    assert "/nowhere/at/all" in found.problem
    assert "critic.model.path" in found.remedy


def test_a_primary_config_of_a_checkout_composes_anywhere(plain, tmp_path, monkeypatch):
    """verl's recipes search file://verl/trainer/config, which is not here."""
    head = {"hydra": {"searchpath": ["file://verl/trainer/config"]}, "defaults": ["ppo_trainer", "_self_"]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**head, **plain}))
    monkeypatch.chdir(tmp_path)
    of_file = read(["mine.yaml"]).config
    of_hydra = read([], config_path=".", config_name="mine").config
    assert of_file == of_hydra
    assert of_file.actor_rollout_ref.actor.ppo_mini_batch_size == 16
    assert of_file.trainer.nnodes == 1
    assert read(["recipe=./mine.yaml"]).config == of_file


def test_verls_own_config_by_package():
    config = read(["actor_rollout_ref.rollout.name=vllm"], config_path="pkg://verl.trainer.config").config
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2


@pytest.mark.parametrize("engine", ["megatron", "veomni", "torchtitan"])
def test_other_engines_of_verl(engine):
    words = [f"model_engine={engine}", "actor_rollout_ref.rollout.name=vllm"]
    config = read(words, config_path="pkg://verl.trainer.config").config
    assert config.actor_rollout_ref.actor.strategy == engine
    found = {one.rule for one in examine(View(config)).errors}
    assert {"exact.strategy", "exact.trainer-numerics"} <= found
    assert "start.values" not in found


def test_a_tim_group_by_hand_need_not_be_whole(plain, tmp_path):
    file = tmp_path / "hand.yaml"
    file.write_text(yaml.safe_dump({**plain, "tim": {"run_dir": str(tmp_path / "run")}}))
    view = View(read([str(file)]).config)
    report = examine(view)
    assert view.has_tim_group
    assert "run folder" not in {row.check.name for row in report.checks}
    # a correction of this package's now, which the workers would not be told
    view = View(read([str(file), "algorithm.rollout_correction.rollout_is=token"]).config)
    assert "start.correction-reaches-the-loss" in {one.rule for one in examine(view).errors}


def test_a_run_folder_is_read_as_it_ran(configs, tmp_path):
    OmegaConf.save(configs["vexact"], tmp_path / "config.yaml")
    source = read([str(tmp_path), "trainer.total_epochs=3"])
    assert source.is_a_run
    assert source.config.tim.run_dir == configs["vexact"].tim.run_dir
    assert source.config.trainer.total_epochs == 3
    hydras = tmp_path / "outputs"
    (hydras / ".hydra").mkdir(parents=True)
    OmegaConf.save(configs["verl"], hydras / ".hydra" / "config.yaml")
    assert read([str(hydras)]).config.actor_rollout_ref.rollout.name == "vllm"


def test_bands_that_yaml_reads_as_numbers_are_found_in_file_and_override(plain, tmp_path):
    key = "algorithm.rollout_correction.rollout_is_threshold"
    file = tmp_path / "band.yaml"
    file.write_text("algorithm:\n  rollout_correction:\n    rollout_is_threshold: 0.5_5\n")
    (number,) = read([str(file), "actor_rollout_ref.rollout.name=vllm"]).underscore_numbers
    assert number.where == f"{file}:3"
    (number,) = read([f"{key}=0.5_5"]).underscore_numbers
    assert key in number.where
    (tmp_path / "composed.yaml").write_text("defaults: [ppo_trainer, _self_]\n" + file.read_text())
    (number,) = read([str(tmp_path / "composed.yaml")]).underscore_numbers
    assert number.where == f"{tmp_path}/composed.yaml:4"


def test_what_cannot_be_read_is_refused_by_name(plain_file, tmp_path):
    assert "neither file nor folder" in refusal("nowhere.yaml").problem
    assert "holds no config.yaml" in refusal(str(tmp_path)).problem
    for text, words in (
        ("a: [", "cannot be read"),
        ("", "holds no keys"),
        ("- 1\n", "holds no keys"),
        ("model: {path: x}", "none of verl's groups"),
    ):
        file = tmp_path / "bad.yaml"
        file.write_text(text)
        found = refusal(str(file))
        assert found.key == str(file)
        assert words in found.problem
    assert "one config too many" in refusal(str(plain_file), "other.yaml").problem
    assert "one of the two" in refusal(str(plain_file), config_name="x").remedy
    assert "one of the two" in refusal(str(plain_file), "recipe=cpu_grpo").remedy
    unknown = refusal(str(plain_file), "actor_rollout_ref.rollout.temp=1")
    assert unknown.key == "actor_rollout_ref.rollout.temp"
    assert "actor_rollout_ref.rollout.temperature" in unknown.remedy
    assert "unknown recipe" in refusal("recipe=cpu_grop").problem
    file.write_text("data: 5\ntrainer: {nnodes: 1}\n")
    assert refusal(str(file)).key == "data"
