"""The command's own part: what is read from a config, and what it refuses; the nodes are fakes."""

import contextlib
import json

import pytest
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.commands import preflight
from verl_tim.preflight import cluster
from verl_tim.preflight.judge import CHECKS, GIB, Trial

from .test_judge import FACTS, GOOD, nodes


@pytest.fixture
def looked(monkeypatch):
    """Runs the command on fake nodes; what it would have looked at."""
    seen = []

    def run(made, *words):
        monkeypatch.setattr(cluster, "look", lambda what, say: seen.append(what) or made)
        monkeypatch.setattr(preflight, "_ray", lambda config, address: contextlib.nullcontext())
        result = CliRunner().invoke(app, ["preflight", *words], env={"COLUMNS": "220"})
        return result, seen[-1] if seen else None

    return run


def test_a_good_cluster_is_one_table_and_exit_code_0(looked):
    result, what = looked(nodes())
    assert result.exit_code == 0, result.output
    assert "Preflight: 3 node(s)" in result.stdout
    assert "Nothing found: the run may start." in result.stdout
    assert set(CHECKS) - set(what.checks) == {"contract"}, "without a config there is no model to probe"


def test_a_wrong_version_fails_and_names_node_package_and_both_versions(looked):
    result, _ = looked(nodes(versions={**FACTS.versions, "torch": "2.10.0"}))
    assert result.exit_code == 1
    assert "n3: versions: torch is 2.10.0, elsewhere 2.11.0" in result.stderr
    assert "FAILS" in result.stdout
    assert "the run must not start" in result.stdout


def test_warnings_let_the_run_start(looked):
    result, _ = looked(nodes(clock=(9.0, 0.1)))
    assert result.exit_code == 0
    assert "0 error(s), 1 warning(s): the run may start" in result.stdout


def test_json_says_the_same(looked):
    result, _ = looked(nodes(collective=Trial(False, "no answer")), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["ok"] is False
    assert [node["name"] for node in report["nodes"]] == ["n1", "n2", "n3"]
    assert report["findings"][0]["node"] == "n3"


def test_a_config_says_what_is_wanted(looked, model_folder, tmp_path):
    words = ["recipe=cpu_grpo", "model=hf", f"actor_rollout_ref.model.path={model_folder}", "trainer.nnodes=3"]
    _, what = looked([GOOD], *words, f"tim.run_dir={tmp_path}/run", "--min-disk", "2", "--wait", "7", "--timeout", "9")
    wanted = what.wanted
    assert (wanted.nodes, wanted.gpus, wanted.cpu, wanted.min_disk) == (3, 1, True, 2 * GIB)
    assert wanted.files == {"actor_rollout_ref.model.path": str(model_folder)}
    assert what.model == str(model_folder)
    assert what.checks == CHECKS
    assert what.run_dir == what.places["tim.run_dir"] == f"{tmp_path}/run"
    assert (what.limits.wait, what.limits.answer, what.limits.collective) == (7, 9, 9)


def test_a_stock_trainer_has_no_contract_to_probe(looked):
    _, what = looked([GOOD], "recipe=cpu_grpo", "rollout=stock", "trainer=stock")
    assert "contract" not in what.checks


def test_an_unknown_check_is_refused_with_the_nearest(looked):
    result, what = looked([GOOD], "--checks", "version")
    assert result.exit_code == 2
    assert "did you mean 'versions'?" in " ".join(result.stderr.split())
    assert what is None


@pytest.mark.parametrize("by", ["environment", "option"])
def test_local_is_a_ray_of_its_own_with_what_the_config_says_of_it(monkeypatch, by):
    import ray
    from omegaconf import OmegaConf

    began = []
    monkeypatch.setattr(ray, "init", lambda **given: began.append(given))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", "local" if by == "environment" else "")
    config = OmegaConf.create({"ray_kwargs": {"ray_init": {"num_cpus": 4}}})
    with preflight._ray(config, "local" if by == "option" else None):
        pass
    assert (began[0]["address"], began[0]["num_cpus"]) == ("local", 4)


def test_a_recipe_is_named_as_for_plan_and_a_misspelt_one_is_answered_with_the_near_one(looked):
    result, what = looked(nodes(), "cpu_grpo", "--checks", "nodes")
    assert result.exit_code == 0, result.output
    assert what.wanted.cpu
    result, _ = looked(nodes(), "cpu_grop")
    assert result.exit_code == 2
    assert "did you mean 'cpu_grpo'?" in result.stderr
