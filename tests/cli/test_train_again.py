"""A second start in a folder that holds a run: what it says is there, and how to go on."""

import json

import pytest
from typer.testing import CliRunner

from verl_tim.cli import app

runner = CliRunner()
RESUME = "trainer.resume_mode=auto"


def train(*words):
    result = runner.invoke(app, ["train", *words])
    return result, " ".join(result.stderr.split())


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def leave_checkpoint(run, step):
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_a_finished_run_without_a_checkpoint_is_left_alone(small, fake_verl, run):
    fake_verl()
    assert train(*small)[0].exit_code == 0
    for more in ([], ["trainer.total_training_steps=4"]):
        result, said = train(*small, RESUME, *more)
        assert result.exit_code == 2, said
        assert (
            f"tim.run_dir: {run} holds a run, finished at step 2/2; there is nothing to go on from, no checkpoint in "
            f"{run}/checkpoints -> give another folder: tim.run_dir=runs/NAME"
        ) in said
    assert sorted(path.name for path in run.glob("metrics*")) == ["metrics.jsonl"]


def test_a_finished_run_with_a_checkpoint_may_be_made_longer(small, fake_verl, run):
    fake_verl()
    assert train(*small)[0].exit_code == 0
    leave_checkpoint(run, 2)
    fake_verl(rewards=(0.1, 0.2, 0.3))
    result, said = train(*small, RESUME, "trainer.total_training_steps=3")
    assert result.exit_code == 0, said
    assert "begins from step 0" not in said


def test_a_run_that_was_cut_off_before_its_first_checkpoint_says_that_it_begins_anew(small, fake_verl, run):
    fake_verl(rewards=(0.2,), exit_code=130)
    assert train(*small)[0].exit_code == 130
    fake_verl()
    result, said = train(*small, RESUME)
    assert result.exit_code == 0, said
    line = next(line for line in result.stderr.splitlines() if "begins from step 0" in line)
    assert line == (
        f"there is no checkpoint in {run}/checkpoints: this run begins from step 0; the earlier files are kept in "
        f"{run}: config.1.yaml, metrics.1.jsonl, train.1.log"
    )
    for name in line.rpartition(": ")[2].split(", "):
        assert (run / name).is_file()
    assert [json.loads(one)["exit_code"] for one in (run / "attempts.jsonl").read_text().splitlines()] == [130, 0]


def test_a_first_start_that_may_go_on_says_nothing_of_it(small, fake_verl):
    fake_verl()
    result, said = train(*small, RESUME)
    assert result.exit_code == 0, said
    assert "begins from step 0" not in said


def test_a_restart_before_the_first_checkpoint_begins_anew(small, fake_verl, monkeypatch, run):
    """--restarts of a run whose every start ends after its last step is no second start of a finished run."""
    monkeypatch.setattr("verl_tim.launch.restarts.PAUSE_SECONDS", 0.0)
    died = "Traceback (most recent call last):\n  File 'x'\nray.exceptions.ActorDiedError: gone"
    fake_verl(exit_code=1, last_words=died)
    result, said = train("--restarts", "1", *small, "trainer.save_freq=1")
    assert result.exit_code == 1
    assert "starting again from the beginning: restart 1 of 1" in said
    assert (run / "metrics.1.jsonl").is_file()


@pytest.mark.parametrize(
    ("rewards", "exit_code", "there"),
    [
        ((0.2, 0.4), 0, "finished at step 2/2"),
        ((0.2,), 130, "stopped at step 1/2"),
        ((0.2,), 3, "stopped at step 1/2"),
    ],
)
def test_a_folder_in_use_says_what_is_there(small, fake_verl, run, rewards, exit_code, there):
    fake_verl(rewards=rewards, exit_code=exit_code, last_words="ValueError: no")
    assert train(*small)[0].exit_code == exit_code
    result, said = train(*small)
    assert result.exit_code == 2
    assert f"{run} holds a run already (config.yaml, metrics.jsonl, {there})" in said
    other, said = train(*small, RESUME, "data.seed=77") if exit_code else (result, "")
    assert other.exit_code == 2
    if exit_code:
        assert f"holds a run with other settings (config.yaml, metrics.jsonl, {there}); it differs in data.seed" in said


def test_one_that_nobody_saw_end_is_not_said_to_have_stopped(small, fake_verl, run):
    fake_verl(rewards=(0.2,), exit_code=3, last_words="ValueError: no")
    train(*small)
    (run / "attempts.jsonl").unlink()
    assert "(config.yaml, metrics.jsonl, last step 1/2)" in train(*small)[1]


def test_a_run_that_was_stopped_says_how_to_go_on(small, fake_verl, run):
    fake_verl(rewards=(0.2,), exit_code=130)
    result, said = train(*small)
    assert result.exit_code == 130
    assert (
        f"it left no checkpoint to go on from (trainer.save_freq): to begin anew give another folder "
        f"(tim.run_dir=runs/NAME), or remove {run}"
    ) in said
    leave_checkpoint(run, 1)
    result, said = train(*small, RESUME)
    assert f"to go on from the checkpoint of step 1: the same command with {RESUME} tim.run_dir={run}" in said
