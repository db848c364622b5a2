"""How far the run in a folder has come, as a config that would run there sees it."""

import json

import pytest
from omegaconf import OmegaConf

from verl_tim.diagnosis.run_folder import RunFolder, progress_of
from verl_tim.launch.run_folder import State, state_of


@pytest.mark.parametrize(
    ("total", "last", "exit_code", "state", "words"),
    [
        (3, 3, None, State.FINISHED, "finished at step 3/3"),
        (3, 3, 1, State.FINISHED, "finished at step 3/3"),
        (3, 2, 130, State.UNFINISHED, "stopped at step 2/3"),
        (3, 2, None, State.UNFINISHED, "last step 2/3"),
        (3, None, 130, State.UNFINISHED, ""),
        # by epochs, verl's own way
        (None, 2, 0, State.FINISHED, "finished at step 2"),
        (None, 2, 1, State.UNFINISHED, "stopped at step 2"),
        (None, 2, None, State.UNFINISHED, "last step 2"),
    ],
)
def test_finished_or_stopped_where_the_folder_tells(tmp_path, total, last, exit_code, state, words):
    config = {"tim": {"run_dir": str(tmp_path)}, "trainer": {"total_training_steps": total}}
    RunFolder.create(tmp_path, config)
    if last is not None:
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": last, "data": {"a": 1.0}}) + "\n")
    if exit_code is not None:
        (tmp_path / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "exit_code": exit_code}) + "\n")
    assert str(progress_of(tmp_path)) == words
    assert state_of(OmegaConf.create(config)) == (state, "")


def test_an_earlier_start_says_nothing_of_the_present_one(tmp_path):
    config = {"tim": {"run_dir": str(tmp_path)}, "trainer": {"total_training_steps": 9}}
    RunFolder.create(tmp_path, config)
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "data": {}}\n')
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 1, "exit_code": 130}\n')
    RunFolder.create(tmp_path, config, resume=True)
    assert str(progress_of(tmp_path)) == "last step 4/9"
