"""What is made at the start is checked before it is made, and so is the place for it."""

import pytest

from verl_tim.launch import prepare
from verl_tim.launch.checks import made
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.run_folder import claim


@pytest.mark.parametrize(
    ("override", "key", "problem"),
    [
        ("tim.task.name=unknown", "tim.task.name", "unknown task 'unknown'"),
        ("tim.task.train_size=-5", "tim.task.train_size", "-5"),
        ("+tim.task.difficulty.min_trms=3", "tim.task.difficulty", "min_trms"),
        ("tim.model.kind=gpt", "tim.model.kind", "gpt"),
        ("+tim.model.difficulty.min_trms=3", "tim.model.difficulty", "min_trms"),
    ],
)
def test_settings_of_which_nothing_can_be_made(resolved, override, key, problem):
    (finding,) = made.check_settings(resolved(override))
    assert finding.key == key
    assert problem in finding.problem


def test_settings_that_nobody_reads_are_left_alone(resolved):
    config = resolved(
        "tim.task.name=unknown",
        "data.train_files=a.parquet",
        "data.val_files=b.parquet",
        "actor_rollout_ref.model.path=m",
    )
    assert list(made.check_settings(config)) == []


def test_places(resolved, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    config = resolved(f"tim.run_dir={file}/run", "tim.cache_dir=/proc/cache")
    findings = {finding.key: finding.problem for finding in made.check_places(config)}
    assert str(file) in findings["tim.run_dir"]
    assert "cannot be written" in findings["tim.cache_dir"]
    assert list(made.check_places(resolved())) == []


def test_every_folder_that_the_run_writes_to_is_tried(resolved):
    config = resolved(
        "trainer.save_freq=1",
        "trainer.default_local_dir=/proc/checkpoints",
        "tim.dump={every: 1, dir: /sys/dumps}",
        "trainer.rollout_data_dir=/proc/rollouts",
    )
    # one finding per place, whatever the number of folders in it
    assert [finding.key for finding in made.check_places(config)] == ["trainer.default_local_dir", "tim.dump.dir"]
    config.trainer.save_freq = -1
    config.tim.dump.every = 0
    assert [finding.key for finding in made.check_places(config)] == ["trainer.rollout_data_dir"]


def test_a_folder_on_a_full_disk(resolved, monkeypatch, tmp_path):
    """Permissions say nothing about it, so a file is made, and gone again."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    config = resolved()
    assert list(made.check_places(config)) == []
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(made.tempfile, "TemporaryFile", full)
    (finding,) = made.check_places(config)
    assert finding.key == "tim.run_dir"
    assert "No space left" in finding.problem


def test_a_folder_that_fails_all_the_same(resolved, monkeypatch):
    config = resolved()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl_tim.launch.run_folder.RunFolder.create", full)
    with pytest.raises(LaunchError, match=r"tim\.run_dir.*No space left"):
        claim(config)
    monkeypatch.setattr("verl_tim.tasks.dataset.build_dataset", full)
    with pytest.raises(LaunchError, match=r"tim\.cache_dir.*No space left"):
        prepare.make_data(config)


def test_a_warm_up_that_fails_names_the_difficulty(resolved, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("the model scores 0.01 on chain_sum after its work stage")

    monkeypatch.setattr("verl_tim.tasks.base_model.build_base_model", fails)
    with pytest.raises(LaunchError, match=r"tim\.model\.difficulty.*0\.01"):
        prepare.make_model(resolved())
