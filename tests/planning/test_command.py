import json
import re

import pytest
from typer.testing import CliRunner

from tests.planning.conftest import DENSE
from verl_tim.cli import app
from verl_tim.planning.host import Host

runner = CliRunner()
GPU = ["--gpu", "H100"]

YAML = """
hydra: {searchpath: ["pkg://verl.trainer.config", "pkg://verl_tim.configs"]}
defaults: [ppo_trainer, tim, {cluster: gpu8}, {tracker: file}, {task: parquet}, {model: hf}, {rollout: vexact},
           {trainer: contract}, _self_, {correction: none}]
tim: {choices: {recipe: mine}}
data: {train_files: /nowhere/train.parquet, val_files: /nowhere/val.parquet, train_batch_size: 512,
       max_prompt_length: 2048, max_response_length: 20480}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-30B-A3B-Base}
  actor: {ppo_mini_batch_size: 512, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 32768}
  rollout: {n: 16, tensor_model_parallel_size: 4, gpu_memory_utilization: 0.6}
algorithm: {adv_estimator: reinforce_plus_plus}
trainer: {nnodes: 8}
"""


def run(*words):
    return runner.invoke(app, ["plan", *words])


def test_a_recipe_that_fits():
    result = run(*DENSE, *GPU, "--json", "--mean-response", "2000", "--steps", "100")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["fits"]
    assert plan["misfits"] == plan["remedies"] == []
    assert [phase["name"] for phase in plan["phases"]] == ["rollout", "log-probs", "update", "weight sync"]
    for phase in plan["phases"]:
        assert phase["bytes"] == pytest.approx(sum(item["bytes"] for item in phase["items"]), abs=100)
    step = plan["step"]
    assert step["seconds"] == pytest.approx(sum(part["seconds"] for part in step["parts"]))
    assert plan["lengths"]["answer"]["mean"] == 2000
    assert plan["run"]["gpu_hours"] == pytest.approx(step["seconds"] * 100 * 8 / 3600)
    # nothing on an H100 was measured, and the plan says so
    assert all("measured rate" not in part["basis"] for part in step["parts"])


def test_the_measured_case_says_measured():
    words = [*DENSE, "cluster=gpu1", "data.max_response_length=1024", "data.train_batch_size=32",
             "actor_rollout_ref.actor.ppo_mini_batch_size=32"]  # fmt: skip
    plan = json.loads(run(*words, "--json").stdout)
    basis = {part["name"]: part["basis"] for part in plan["step"]["parts"]}
    assert basis["rollout"] == basis["update"] == basis["old log-probs"] == ["measured rate"]
    assert basis["weight sync"] != ["measured rate"]


def test_tables_and_notes():
    result = run(*DENSE, *GPU)
    assert result.exit_code == 0
    for text in (
        "KV pool",
        "AdamW moments",
        "preempted",
        "extrapolated 1",
        "scaled to H100",
        "guessed: half",
        "GPU hours",
    ):
        assert text in " ".join(result.stdout.split()), text


def test_a_yaml_of_ones_own_without_model_or_data(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(YAML)
    result = run(str(file), *GPU, "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["gpus"] == 64
    assert plan["replicas"] == 16
    assert plan["model"] == "qwen3-30b-a3b"
    assert plan["run"]["steps"] is None
    assert plan["run"]["gpu_hours"] is None


def test_what_does_not_fit_is_refused_with_remedies(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(YAML)
    result = run(str(file), "trainer.nnodes=1", *GPU)
    assert result.exit_code == 1
    assert "rollout: needs" in result.stderr
    assert "update: needs" in result.stderr
    assert "trainer.nnodes=2  (planned: fits" in result.stderr
    plan = json.loads(run(str(file), "trainer.nnodes=1", *GPU, "--json").stdout)
    assert not plan["fits"]
    assert plan["step"] is None
    assert ["trainer.nnodes=2"] in [one["overrides"] for one in plan["remedies"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cpu_grpo", "trainer.nnode=2"], "did you mean trainer.nnodes"),
        (["cpu_grpo", "tim.gat.exact=true"], "tim.gat"),
        (["cpu_grpo", "+tim.nothing=1"], "tim.nothing"),
        (["cpu_grpo", "rollout=exact"], "has no option"),
        (["cpu_grpo", "trainer.nnodes=many"], "trainer.nnodes"),
        (["no_such_recipe"], "no_such_recipe"),
        (["cpu_grop"], "did you mean 'cpu_grpo'?"),
        (["recipe=cpu_grop"], "did you mean 'cpu_grpo'?"),
        (["cpu_grpo", "--gpu", "H300"], "known: "),
        (["cpu_grpo", "--gpu", "A100"], "A100 80GB"),
        (["cpu_grpo", "--shape", "qwen9"], "qwen3-1.7b"),
        (["cpu_grpo", "--mean-response", "4000"], "--mean-response"),
        (["cpu_grpo", "model=hf", "actor_rollout_ref.model.path=some/model"], "whose shape is known"),
        (["--anchors", "--scaling"], "one of the two"),
        (["cpu_grpo", "--anchors"], "leave it out"),
        (["--gpu", "H100"], "name a recipe"),
    ],
)
def test_bad_input(words, message):
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


def test_alone_it_says_what_is_missing_and_not_the_whole_help():
    result = run()
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 2
    assert "verl-tim plan cpu_grpo" in result.stderr


def test_unknown_keys_fail_as_they_do_in_train():
    ours, theirs = run("cpu_grpo", "trainer.nnode=2"), runner.invoke(app, ["train", "trainer.nnode=2", "--dry-run"])
    assert (ours.exit_code, theirs.exit_code) == (2, 2)
    assert ours.stderr.strip() in theirs.stderr


CPU_RECIPES = ["cpu_grpo", "cpu_moe_grpo", "cpu_reinforce"]


@pytest.mark.parametrize("recipe", CPU_RECIPES)
def test_recipes_for_a_cpu_are_planned_for_a_gpu_where_one_is_named(recipe):
    result = run(recipe, "--json", "--gpu", "H200")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["run"]["steps"] > 1
    assert any("bound by launches" in reason for part in plan["step"]["parts"] for reason in part["basis"])
    assert "as if each of its processes had a GPU" in run(recipe, "--gpu", "H200").stderr


@pytest.mark.parametrize("recipe", CPU_RECIPES)
def test_recipes_for_a_cpu_are_planned_for_this_machine(recipe, monkeypatch):
    monkeypatch.setattr(Host, "here", lambda: Host(16 << 30, 12 << 30))
    result = run(recipe)
    assert result.exit_code == 0, result.stderr
    told = " ".join(result.stdout.split())
    for text in ("this machine, no GPU", "of 16 GiB (12 GiB free now)", "not estimated", "AdamW moments", "KV pool"):
        assert text in told, text
    for text in ("CUDA", "NCCL", "GPU hours", "H200", "decode graphs", "seconds"):
        assert text not in told, text
    plan = json.loads(run(recipe, "--json").stdout)
    assert plan["fits"]
    assert plan["step"] is None
    assert plan["machine"]["memory"] == 16 << 30
    assert "gpu_hours" not in plan["run"]
    assert plan["run"]["tokens"] > plan["run"]["drawn_tokens"] > 0


def test_a_machine_that_is_too_small_is_said(monkeypatch):
    monkeypatch.setattr(Host, "here", lambda: Host(4 << 30, 3 << 30))
    result = run("cpu_grpo")
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "rollout: needs" in said
    assert "of 4 GiB (this machine) at its fullest" in said
    assert "-> a machine with more memory" in said
    assert not json.loads(run("cpu_grpo", "--json").stdout)["fits"]


def test_a_machine_whose_memory_is_taken_is_said(monkeypatch):
    monkeypatch.setattr(Host, "here", lambda: Host(16 << 30, 1 << 30))
    result = run("cpu_grpo")
    assert result.exit_code == 0, "what holds it may end"
    assert "only 1 GiB are free now" in " ".join(result.stderr.split())


@pytest.mark.parametrize("words", [["cpu_grpo"], ["cpu_grpo", "--steps", "1"], [*DENSE, *GPU, "--steps", "100"]])
def test_no_figure_that_is_not_zero_is_shown_as_zero(words):
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    assert not re.search(r"(?<![\d.,])0\.?0*(?=\s|$)(?! tokens computed)", result.stdout), result.stdout
    assert "GiB" in result.stdout


def test_anchors():
    result = run("--anchors", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert all(row["good"] for row in rows)
    assert run("--anchors").exit_code == 0
