"""The start of a run as its log has it: verl 0.9.1, Ray 2.60, both trainers."""

import pytest

from verl_tim.launch.stages import FIRST, Stages
from verl_tim.training.start_lines import ALL_ANSWER, SERVERS_ANSWER

ACTOR = "\x1b[36m(TaskRunnerV1 pid=14140)\x1b[0m "
START = (
    ("ray init kwargs: {'num_cpus': 16}", "starting Ray"),
    ("2026-12-03 05:15:31,013\tINFO worker.py:2038 -- Started a local Ray instance.", "Ray is up"),
    (ACTOR + "dataset len: 4096", "Ray is up"),
    (ACTOR + "colocated worker base class <class 'verl.single_controller.base.worker.Worker'>", "placing the workers"),
    ("\x1b[36m(WorkerDict pid=14442)\x1b[0m Monkey patch _flash_attention_forward", "loading the model"),
    ("\x1b[36m(WorkerDict pid=14442)\x1b[0m Total steps: 2, num_warmup_steps: 0", "the model is loaded"),
    (ACTOR + SERVERS_ANSWER, "the rollout's engine is ready"),
    (ACTOR + ALL_ANSWER, "all is up"),
    ("Training Progress:   0%|          | 0/2 [00:00<?, ?it/s]", "first step"),
)


def test_each_line_is_a_stage_further(tmp_path):
    log = tmp_path / "train.log"
    stages = Stages(log)
    assert stages.look() == FIRST
    with log.open("a", buffering=1) as sink:
        for line, stage in START:
            assert not stages.over
            sink.write(line + "\n")
            assert stage in stages.look()
    assert stages.over


@pytest.mark.parametrize("line", ["Connected to Ray cluster.", "Started a local Ray instance. View the dashboard at"])
def test_a_cluster_of_ones_own_or_another(tmp_path, line):
    (tmp_path / "train.log").write_text(f"INFO worker.py:2038 -- {line}\n")
    assert "Ray is up" in Stages(tmp_path / "train.log").look()


def test_what_one_engine_does_not_print_is_passed_over_and_nothing_goes_back(tmp_path):
    (tmp_path / "train.log").write_text(f"{ACTOR}{SERVERS_ANSWER}\n{START[4][0]}\n{START[0][0]}\n")
    assert "the rollout's engine is ready" in Stages(tmp_path / "train.log").look()
