"""`verl-tim same` and the comparison behind it: what counts as equal, what is left out, what is named first."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from fake_runs import write_run
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.diagnosis.metric_log import RunFolderError
from verl_tim.diagnosis.run_folder import CONFIG_NAME, METRICS_NAME, SAMPLES_NAME
from verl_tim.diagnosis.same import RESTARTS, left_out, same_runs
from verl_tim.diagnosis.token_dump import DumpedSequence, write_step

runner = CliRunner()


@pytest.fixture
def pair(tmp_path):
    """Two equal runs with everything that a run can keep."""
    first = write_run(tmp_path / "one", steps=3)
    for step in (1, 2):
        write_dump(first, step)
    checkpoint(first, 2)
    (first / "dumps").mkdir()
    torch.save({"step": 2, "keys": ["a_0_0"], "old_log_probs": torch.randn(2, 3)}, first / "dumps" / "step_000002.pt")
    second = tmp_path / "two"
    shutil.copytree(first, second)
    return first, second


def write_dump(run: Path, step: int, *, uid: str = "a", log_prob: float = -0.5) -> None:
    sequence = DumpedSequence(
        row=0,
        uid=uid,
        group=0,
        position_N=np.arange(3),
        token_id_N=np.array([5, 6, 7]),
        text_N=["a", "b", "c"],
        advantage_N=np.ones(3, np.float32),
        kept_N=np.ones(3, bool),
        turn_N=np.ones(3, np.int64),
        old_log_prob_N=np.array([-0.25, log_prob, math.nan], np.float32),
        routes_rollout_NJ=np.zeros((3, 2), np.int16),
    )
    write_step(run, step, [sequence], layers=[0], top_k=2)


def checkpoint(run: Path, step: int, nudge: float = 0.0) -> None:
    folder = run / "checkpoints" / f"global_step_{step}" / "actor"
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(step)
    weights = {"layer.weight": torch.randn(4, 3, generator=generator).bfloat16(), "empty": torch.zeros(0)}
    weights["layer.weight"][2, 1] += nudge
    torch.save(weights, folder / "model_world_size_1_rank_0.pt")
    state = {"state": {0: {"exp_avg": torch.zeros(2), "step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1}]}
    torch.save(state, folder / "optim_world_size_1_rank_0.pt")
    rng = {"rng": {"cpu": generator.get_state(), "numpy": np.random.RandomState(0).get_state()}}
    torch.save(rng, folder / "extra_state_world_size_1_rank_0.pt")


def edit_metrics(run: Path, change) -> None:
    path = run / METRICS_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change({line["step"]: line["data"] for line in lines})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def section(answer, name):
    return next(one for one in answer.sections if one.name == name)


def test_copies_are_equal_and_everything_in_them_was_compared(pair):
    answer = same_runs(*pair)
    assert answer.equal
    assert answer.first is None
    assert [one.name for one in answer.sections] == [
        "samples",
        "tokens",
        "dumps",
        "checkpoints",
        "generators",
        "metrics",
    ]
    assert all(one.compared > 0 for one in answer.sections)
    assert [one.name for one in answer.sections if one.note] == ["generators"]
    # of two steps: the weights' 12 elements, the optimiser's 2 + 1 + lr
    assert section(answer, "checkpoints").compared >= 12 + 3 + 1
    assert section(answer, "generators").compared > 5056
    # names and places of a run are no differences of its config
    assert answer.config == ()


def test_one_ulp_of_a_metric_is_found_and_named_with_its_step(pair):
    def one_ulp(steps):
        steps[2]["actor/grad_norm"] = math.nextafter(steps[2]["actor/grad_norm"], 10)
        steps[3]["actor/entropy"] += 1

    edit_metrics(pair[1], one_ulp)
    answer = same_runs(*pair)
    assert not answer.equal
    where, found = answer.first
    assert (where, found.step, found.name) == ("metrics", 2, "actor/grad_norm")
    assert found.first != found.second
    assert section(answer, "metrics").differing == 2


def test_a_zero_of_the_other_sign_differs_and_two_nans_do_not(pair):
    edit_metrics(pair[0], lambda steps: steps[1].update({"actor/x": 0.0, "actor/y": None}))
    edit_metrics(pair[1], lambda steps: steps[1].update({"actor/x": -0.0, "actor/y": None}))
    answer = same_runs(*pair)
    assert section(answer, "metrics").differing == 1
    assert answer.first[1].name == "actor/x"


@pytest.mark.parametrize(
    "name",
    [
        "timing_s/step",
        "timing_per_token_ms/gen",
        "perf/throughput",
        "actor/perf/max_memory_allocated_gb",
        "perf/mfu/actor",
        "tim/reuse_saved_seconds",
        "tim/rollout_steps",
        "tim/rollout_prefix_hit_tokens",
        "tim/rollout_max_kv_use",
        "tim/rollout_tokens_per_second",
        "tim/rollout_restarts",
    ],
)
def test_clocks_memory_and_schedule_are_left_out(pair, name):
    assert left_out(name)
    edit_metrics(pair[0], lambda steps: steps[1].update({name: 1.0}))
    edit_metrics(pair[1], lambda steps: steps[1].update({name: 2.0}))
    answer = same_runs(*pair)
    assert answer.equal
    assert name in answer.left_out


@pytest.mark.parametrize(
    "name", ["perf/total_num_tokens", "tim/rollout_drawn_tokens", "actor/grad_norm", "val-core/x/reward/mean@1"]
)
def test_what_says_something_of_the_computation_is_not_left_out(name):
    assert not left_out(name)


@pytest.mark.parametrize(("restarts", "equal"), [(1.0, True), (0.0, False)])
def test_counts_are_not_compared_in_the_step_in_which_a_replica_died_with_its_own(pair, restarts, equal):
    name = "tim/rollout_drawn_tokens"
    for run in pair:
        edit_metrics(run, lambda steps: [step.update({name: 9.0, RESTARTS: 0.0}) for step in steps.values()])
    edit_metrics(pair[1], lambda steps: steps[1].update({name: 4.0, RESTARTS: restarts}))
    assert same_runs(*pair).equal == equal
    edit_metrics(pair[1], lambda steps: steps[2].update({name: 8.0}))
    assert same_runs(*pair).first[1].name == name


def test_a_metric_or_a_step_that_one_run_lacks_is_a_difference(pair):
    edit_metrics(pair[1], lambda steps: steps[2].pop("actor/entropy"))
    found = same_runs(*pair).first[1]
    assert (found.name, found.second) == ("actor/entropy", None)
    path = pair[1] / METRICS_NAME
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert section(same_runs(*pair), "metrics").differing == 2


def test_a_sample_differs_by_its_text_and_not_by_verls_random_name(pair):
    path = pair[1] / SAMPLES_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["extra"]["key"] = "another_0_0"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert same_runs(*pair).equal
    lines[1]["response"] += "!"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    where, found = same_runs(*pair).first
    assert (where, found.step, found.name) == ("samples", 1, "sample 1: response")


def test_a_token_differs_by_one_bit_of_a_log_prob_and_not_by_its_uid(pair):
    write_dump(pair[1], 1, uid="b")
    assert same_runs(*pair).equal
    write_dump(pair[1], 2, log_prob=float(np.nextafter(np.float32(-0.5), np.float32(0))))
    answer = same_runs(*pair)
    where, found = answer.first
    assert (where, found.step, found.name) == ("tokens", 2, "old_log_prob of row 0, position 1")
    assert section(answer, "tokens").differing == 1


def test_one_weight_of_a_checkpoint_is_found_with_its_place(pair):
    checkpoint(pair[1], 2, nudge=1.0)
    answer = same_runs(*pair)
    where, found = answer.first
    assert where == "checkpoints"
    assert found.name == "actor/model_world_size_1_rank_0.pt: layer.weight[2, 1]"
    assert section(answer, "checkpoints").differing == 1


@pytest.mark.parametrize("asked", [False, True])
def test_generators_that_nobody_seeded_are_counted_apart(pair, asked):
    file = pair[1] / "checkpoints" / "global_step_2" / "actor" / "extra_state_world_size_1_rank_0.pt"
    state = torch.load(file, weights_only=False)
    state["rng"]["cpu"][0] ^= 1
    torch.save(state, file)
    for run in pair:
        config = yaml.safe_load((run / CONFIG_NAME).read_text())
        config.setdefault("tim", {})["deterministic"] = asked
        (run / CONFIG_NAME).write_text(yaml.safe_dump(config))
    answer = same_runs(*pair)
    assert (section(answer, "checkpoints").differing, section(answer, "generators").differing) == (0, 1)
    assert section(answer, "generators").decides == asked
    assert answer.equal == (not asked)
    assert answer.first[0] == "generators"
    checkpoint(pair[1], 2, nudge=1.0)
    torch.save(state, file)
    assert same_runs(*pair).first[0] == "checkpoints"
    assert not same_runs(*pair).equal


def test_a_number_of_the_optimiser_and_a_missing_file_are_differences(pair):
    folder = pair[1] / "checkpoints" / "global_step_2" / "actor"
    state = torch.load(folder / "optim_world_size_1_rank_0.pt", weights_only=False)
    state["param_groups"][0]["lr"] = math.nextafter(0.1, 1)
    torch.save(state, folder / "optim_world_size_1_rank_0.pt")
    assert same_runs(*pair).first[1].name == "actor/optim_world_size_1_rank_0.pt: param_groups[0].lr"
    (folder / "extra_state_world_size_1_rank_0.pt").unlink()
    assert section(same_runs(*pair), "checkpoints").differing == 2


def test_what_a_run_has_lost_is_a_difference(pair):
    shutil.rmtree(pair[1] / "checkpoints")
    answer = same_runs(*pair)
    assert not answer.equal
    found = section(answer, "checkpoints")
    assert found.note == "only the first run kept checkpoints"
    assert (found.differing, found.first.name, found.first.second) == (1, "(all checkpoints)", None)


def test_what_a_run_was_told_not_to_keep_is_said_and_decides_nothing(pair):
    shutil.rmtree(pair[1] / "checkpoints")
    config = yaml.safe_load((pair[1] / "config.yaml").read_text())
    config.setdefault("trainer", {})["save_freq"] = -1
    (pair[1] / "config.yaml").write_text(yaml.safe_dump(config))
    answer = same_runs(*pair)
    assert answer.equal
    note = "only the first run kept checkpoints: the other has trainer.save_freq=-1"
    assert section(answer, "checkpoints").note == note


def test_batch_dumps_are_where_the_config_says(pair):
    for run in pair:
        (run / "dumps").rename(run.parent / f"{run.name}-dumps")
        config = yaml.safe_load((run / "config.yaml").read_text())
        config.setdefault("tim", {})["dump"] = {"dir": str(run.parent / f"{run.name}-dumps")}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert section(same_runs(*pair), "dumps").compared > 0


def test_the_earliest_step_comes_first_and_in_it_what_is_computed_first(pair):
    edit_metrics(pair[1], lambda steps: steps[2].update({"actor/entropy": 5.0}))
    write_dump(pair[1], 2, log_prob=-0.75)
    assert same_runs(*pair).first[0] == "tokens"
    edit_metrics(pair[1], lambda steps: steps[1].update({"actor/entropy": 5.0}))
    assert same_runs(*pair).first[0] == "metrics"


def test_a_torn_checkpoint_cannot_be_compared(pair):
    path = pair[1] / "checkpoints" / "global_step_2" / "actor" / "model_world_size_1_rank_0.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunFolderError, match="cannot be read"):
        same_runs(*pair)


def test_another_seed_is_named_among_the_settings(tmp_path):
    runs = [write_run(tmp_path / name, steps=2, seed=seed) for name, seed in (("one", 1), ("two", 2))]
    answer = same_runs(*runs)
    assert not answer.equal
    assert [difference.key for difference in answer.config] == ["data.seed"]
    assert "run.seed" in [difference.key for difference in answer.facts]


def test_answers_of_processes_are_compared_where_both_runs_have_them(pair):
    def answer(run, digest):
        path = run / "manifest.json"
        content = json.loads(path.read_text())
        content["deterministic"] = {"processes": {"actor 0": {"threads": 1, "digests": {"gemm": digest}}}}
        path.write_text(json.dumps(content))

    answer(pair[0], "aa")
    assert [difference.key for difference in same_runs(*pair).facts] == ["deterministic"]
    answer(pair[1], "bb")
    (found,) = same_runs(*pair).facts
    assert found.key == "deterministic.processes.actor 0.digests.gemm"
    assert same_runs(*pair).equal


def test_the_command_answers_with_its_exit_code(pair, tmp_path):
    result = runner.invoke(app, ["same", *map(str, pair)])
    assert result.exit_code == 0
    assert "Every bit that was compared is equal" in result.stdout
    edit_metrics(pair[1], lambda steps: steps[2].update({"actor/grad_norm": 1.0}))
    result = runner.invoke(app, ["same", *map(str, pair)])
    assert result.exit_code == 1
    assert "first: step 2, metrics, actor/grad_norm" in result.stdout
    result = runner.invoke(app, ["same", *map(str, pair), "--json"])
    assert result.exit_code == 1
    content = json.loads(result.stdout)
    assert content["equal"] is False
    assert content["first"]["step"] == 2
    result = runner.invoke(app, ["same", str(pair[0]), str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "does not exist" in " ".join(result.stderr.split())


def test_one_folder_given_twice_is_refused(pair, tmp_path):
    (tmp_path / "link").symlink_to(pair[0])
    for other in (pair[0], tmp_path / "link"):
        with pytest.raises(RunFolderError, match="given twice"):
            same_runs(pair[0], other)


def test_a_line_that_was_cut_off_in_both_is_said(pair):
    for run in pair:
        path = run / METRICS_NAME
        path.write_bytes(path.read_bytes()[:-20])
    answer = same_runs(*pair)
    assert answer.equal
    assert "cut off and was not compared" in section(answer, "metrics").note
    text = " ".join(runner.invoke(app, ["same", *map(str, pair)]).output.split())
    assert f"{section(answer, 'metrics').compared:,} values" in text
    assert "cut off" in text


def test_a_config_with_another_shape_raises_nothing(pair):
    (pair[0] / "config.yaml").write_text("tim: 3\ntrainer: text\n")
    same_runs(*pair)


def test_a_trackers_folder_cannot_be_compared(pair, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "events")) as writer:
        writer.add_scalar("actor/grad_norm", 0.1, 1)
    with SummaryWriter(str(pair[1])) as writer:  # a run that logged to the tracker alone
        writer.add_scalar("actor/grad_norm", 0.1, 1)
    (pair[1] / METRICS_NAME).unlink()
    for runs in ((pair[0], tmp_path / "events"), (tmp_path / "events", pair[0]), pair):
        result = runner.invoke(app, ["same", *map(str, runs)])
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert "has no metrics.jsonl, and a tracker's folder keeps neither samples" in " ".join(result.stderr.split())
