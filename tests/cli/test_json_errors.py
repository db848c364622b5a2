"""With --json there is one document on stdout, also where a command has no result to show."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer.main
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.commands import compare
from verl_tim.commands.output import BAD_INPUT, CommandWithJson
from verl_tim.launch import process

runner = CliRunner()


def leaves(command, *words):
    """Every command that runs something, by its words."""
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from leaves(child, *words, name)
    else:
        yield " ".join(words), command


COMMANDS = dict(leaves(typer.main.get_command(app)))
WITH_JSON = {
    name: command
    for name, command in COMMANDS.items()
    if any("--json" in parameter.opts for parameter in command.params)
}

# What none of them can use. {tmp} is an empty folder.
BAD = [
    ("quickstart", "no.such.key=1 --dir {tmp}/quick"),
    ("plan", "no_such_recipe"),
    ("plan", "--anchors --scaling"),
    ("preflight", "--checks colour"),
    ("train", "rollout=stok"),
    ("train", "+matrix=no_such_matrix"),
    ("train", "--at-once 2 recipe=cpu_grpo"),
    ("verify", "{tmp}"),
    ("verify", "--dtype int8"),
    ("verify", "--ops {tmp}"),
    ("verify", "--ladder --layers"),
    ("verify", "--layers --trainer other"),
    ("verify", "--tensor-parallel 2 --ladder"),
    ("probe", "--rollout other --out {tmp}"),
    ("baseline", "{tmp}"),
    ("compare", "{tmp} --out {tmp}"),
    ("compare", "{tmp} --smooth round --out {tmp}"),
    ("same", "{tmp} {tmp}"),
    ("report", "{tmp} --out {tmp}"),
    ("calibrate", "{tmp} {tmp} --out {tmp}"),
    ("doctor", "{tmp}/none.yaml"),
    ("data", "no_such_task"),
    ("model", "no_such_kind --cache-dir {tmp}"),
    ("bench correction", "--device tpu"),
    ("bench determinism", "{tmp}"),
    ("bench kernels", "--part other"),
    ("bench rollout", "--device tpu"),
    ("bench routing", "--device tpu"),
    ("evidence pack", "{tmp} --out {tmp}/archives"),
    ("evidence unpack", "{tmp}/none.tar.xz --out {tmp}/runs"),
    ("evidence figure", "first {tmp} --out {tmp}/figures"),
]
INTERRUPTED_IMPORT = """
import sys

class Interrupting:
    begun = False

    def find_spec(self, name, *_):
        if name == "torch":
            error = ImportError("torch is half imported") if self.begun else KeyboardInterrupt()
            self.begun = True
            raise error

sys.meta_path.insert(0, Interrupting())
sys.argv = ["verl-tim", "verify", "--ops", "--json"]
from verl_tim.cli import main
main()
"""

# What they take, they can use.
NOTHING_BAD = {"bench diagnosis"}


def test_every_command_with_json_has_a_case_here_and_its_parameter_the_right_name():
    assert set(WITH_JSON) == {name for name, _ in BAD} | NOTHING_BAD
    for name, command in WITH_JSON.items():
        assert isinstance(command, CommandWithJson), name
        assert "as_json" in {parameter.name for parameter in command.params}, name


@pytest.mark.parametrize(("name", "words"), BAD)
def test_bad_input_is_a_document_on_stdout_and_words_on_stderr(name, words, tmp_path):
    result = runner.invoke(app, [*name.split(), "--json", *words.format(tmp=tmp_path).split()])
    assert result.exit_code == BAD_INPUT, result.stderr
    (error,) = json.loads(result.stdout).values()
    assert error["exit_code"] == BAD_INPUT
    assert error["problems"]
    for problem in error["problems"]:
        assert set(problem) == {"key", "problem", "remedy"}
        assert all(problem.values())
        assert "".join(problem["key"].split()) in "".join(result.stderr.split())  # long lines are folded
    plain = runner.invoke(app, [*name.split(), *words.format(tmp=tmp_path).split()])
    assert (plain.exit_code, plain.stdout, plain.stderr) == (BAD_INPUT, "", result.stderr)


def test_work_that_fails_is_a_document_too(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("verl_tim.bench.correction.make_batch", fails)
    result = runner.invoke(app, ["bench", "diagnosis", "--json"])
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)  # the interpreter prints its traceback
    (problem,) = json.loads(result.stdout)["error"]["problems"]
    assert problem["problem"] == "RuntimeError: out of memory"
    assert problem["key"].endswith("bench diagnosis")
    assert runner.invoke(app, ["bench", "diagnosis"]).stdout == ""


def test_an_interrupt_of_an_import_is_a_document_too():
    """Ctrl-C in the first seconds ends the import of torch, which cannot be begun again."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert json.loads(done.stdout)["error"]["exit_code"] == 130
    assert "Traceback" not in done.stderr


def test_work_that_is_interrupted_is_a_document_too(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("verl_tim.bench.correction.make_batch", interrupted)
    result = runner.invoke(app, ["bench", "diagnosis", "--json"])
    assert result.exit_code == 130
    assert json.loads(result.stdout)["error"]["exit_code"] == 130
    plain = runner.invoke(app, ["bench", "diagnosis"])
    assert (plain.exit_code, plain.stdout) == (130, "")


def test_a_usage_error_stays_text():
    result = runner.invoke(app, ["compare", "--json", "--no-such-option"])
    assert (result.exit_code, result.stdout) == (2, "")


def test_what_fails_after_the_result_is_the_one_document(monkeypatch, tmp_path):
    from verl_tim.launch.errors import LaunchError

    def refuse(*_):
        raise LaunchError.of("--wandb", "is not installed", "pip install wandb")

    comparison = SimpleNamespace(write=lambda out, png: [], to_dict=dict, table=lambda: "the table")
    monkeypatch.setattr(compare, "compare_runs", lambda *_: comparison)
    monkeypatch.setattr(compare, "_send", refuse)
    result = runner.invoke(app, ["compare", "--json", "--wandb", str(tmp_path)])
    assert json.loads(result.stdout)["error"]["problems"][0]["key"] == "--wandb"
    assert runner.invoke(app, ["compare", "--wandb", str(tmp_path)]).stdout == "the table\n"


def test_several_runs_one_after_another_are_one_document(monkeypatch, tmp_path, model_folder):
    outcome = process.Outcome(3, 1.0, (), tmp_path / "train.log", ("ValueError: no",))
    monkeypatch.setattr("verl_tim.commands.train.run", lambda config, label: outcome)
    words = ["-m", "data.seed=1,2", f"actor_rollout_ref.model.path={model_folder}", f"tim.cache_dir={tmp_path}/cache"]
    words += [f"tim.run_dir={tmp_path}/runs", "tim.task.train_size=32", "tim.task.val_size=4"]
    result = runner.invoke(app, ["train", "--json", *words])
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert found["exit_code"] == 3
    assert [(run["run"], run["exit_code"], run["cause"]) for run in found["runs"]] == [
        ("data.seed=1", 3, ["ValueError: no"]),
        ("data.seed=2", 3, ["ValueError: no"]),
    ]
