"""Which checkpoint a run goes on from after it was killed, at any moment of writing one."""

from __future__ import annotations

import logging

import pytest
from omegaconf import OmegaConf
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from verl_tim.training.checkpoints import TRACKER, settle, whole_steps
from verl_tim.training.config import ConfigError

RANKS = 2


@pytest.fixture
def config(tmp_path):
    return OmegaConf.create(
        {
            "trainer": {
                "default_local_dir": str(tmp_path),
                "resume_mode": "auto",
                "resume_from_path": None,
                "nnodes": RANKS,
                "n_gpus_per_node": 1,
            },
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2", "checkpoint": {"load_contents": ["model", "optimizer", "extra"]}}
            },
        }
    )


def write(folder, step, *, without=(), tracked=True):
    """A checkpoint as verl leaves it, up to the point where it was killed."""
    checkpoint = folder / f"global_step_{step}"
    (checkpoint / "actor").mkdir(parents=True)
    parts = ("model", "optim", "extra_state")
    names = [f"actor/{part}_world_size_{RANKS}_rank_{rank}.pt" for part in parts for rank in range(RANKS)]
    for name in [*names, "data.pt"]:
        if name not in without:
            (checkpoint / name).write_bytes(b"state")
    if tracked:
        (folder / TRACKER).write_text(str(step))


def test_a_folder_without_a_checkpoint_is_a_start_from_scratch(config):
    assert settle(config) is None


def test_the_tracked_checkpoint_is_taken(config, tmp_path):
    write(tmp_path, 2)
    write(tmp_path, 4)
    assert settle(config) == 4


def test_one_that_was_being_written_is_not_taken_for_whole(config, tmp_path):
    write(tmp_path, 2)
    write(tmp_path, 4, without=["data.pt", "actor/optim_world_size_2_rank_1.pt"], tracked=False)
    assert settle(config) == 2
    assert whole_steps(tmp_path, config) == [2]


@pytest.mark.parametrize("torn", ["", "\0\0"])
def test_a_tracker_that_was_cut_off_is_repaired(config, tmp_path, torn, caplog):
    write(tmp_path, 2)
    write(tmp_path, 4)
    write(tmp_path, 6, without=["data.pt"])
    (tmp_path / TRACKER).write_text(torn)
    with pytest.raises(ValueError, match="invalid literal"):
        find_latest_ckpt_path(str(tmp_path))  # what verl makes of it
    with caplog.at_level(logging.WARNING):
        assert settle(config) == 4
    assert "step 4" in caplog.text
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_4")


def test_a_torn_tracker_without_a_whole_checkpoint_is_refused(config, tmp_path):
    write(tmp_path, 2, without=["data.pt"])
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        settle(config)


def test_a_checkpoint_that_lacks_files_is_refused_with_the_last_whole_one(config, tmp_path):
    write(tmp_path, 2)
    write(tmp_path, 4)
    (tmp_path / "global_step_4/actor/model_world_size_2_rank_1.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"lacks actor/model_world_size_2_rank_1\.pt; .*global_step_2"):
        settle(config)


def test_a_tracked_checkpoint_that_is_gone_is_refused_where_verl_would_begin_anew(config, tmp_path):
    (tmp_path / TRACKER).write_text("4")
    assert find_latest_ckpt_path(str(tmp_path)) is None
    with pytest.raises(ConfigError, match="start anew"):
        settle(config)


def test_another_number_of_ranks_is_refused(config, tmp_path):
    write(tmp_path, 2)
    config.trainer.nnodes = 4
    with pytest.raises(ConfigError, match=r"not whole for 4 trainer rank\(s\)"):
        settle(config)


def test_a_checkpoint_given_by_its_path(config, tmp_path):
    write(tmp_path, 2)
    config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", str(tmp_path / "global_step_2")
    assert settle(config) == 2
    config.trainer.resume_from_path = str(tmp_path / "global_step_3")
    with pytest.raises(ConfigError, match=r"trainer\.resume_from_path: .*global_step_3 is not whole"):
        settle(config)


def test_a_run_that_does_not_resume_is_left_alone(config, tmp_path):
    (tmp_path / TRACKER).write_text("")
    config.trainer.resume_mode = "disable"
    assert settle(config) is None
