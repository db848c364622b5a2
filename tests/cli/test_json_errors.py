"""With --json there is one document on stdout, also where a command has no result to show."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.commands import compare
from verl_tim.commands.output import BAD_INPUT, CommandWithJson, first_line
from verl_tim.launch import process
from verl_tim.launch.exit_code import RESULT_LOST

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
    ("quickstart", "--against vlm --dir {tmp}/quick"),
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
    ("data", "chain_sum --difficulty min_terms=[1"),
    ("data", "chain_sum --difficulty min_terms=2 --difficulty min_terms=3"),
    ("model", "no_such_kind --cache-dir {tmp}"),
    ("bench correction", "--device tpu"),
    ("bench determinism", "{tmp}"),
    ("bench kernels", "--part other"),
    ("bench rollout", "--device tpu"),
    ("bench routing", "--device tpu"),
    ("evidence pack", "{tmp} --out {tmp}/archives"),
    ("evidence unpack", "{tmp}/none.tar.xz --out {tmp}/runs"),
    ("evidence pack-models", "--cache-dir {tmp} --out {tmp}/models"),
    ("evidence unpack-models", "{tmp}/none.part --cache-dir {tmp}"),
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


@pytest.fixture
def full(monkeypatch):
    with open("/dev/full", "w") as stream:
        yield stream
        monkeypatch.undo()  # before it is closed


def code_of(*words):
    with pytest.raises(SystemExit) as ended:
        app([*words])
    return ended.value.code


def test_a_stdout_that_is_full_is_one_line_to_the_end_of_the_process(full):
    """What the interpreter still holds it would write at its end, and complain."""
    command = [sys.executable, "-m", "verl_tim.cli", "plan", "--anchors", "--json"]
    done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == RESULT_LOST == 74
    (line,) = done.stderr.splitlines()
    assert line.startswith("stdout: No space left on device: the result is lost")


def test_a_pipe_without_a_reader_is_one_line():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "verl_tim.cli", "plan", "--anchors", "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == RESULT_LOST
    (line,) = done.stderr.splitlines()
    assert line.startswith("stdout: Broken pipe: the result is lost")


@pytest.mark.parametrize("words", [["--json"], []])
@pytest.mark.parametrize("closed", [False, True])
def test_a_stdout_that_takes_nothing_is_one_line(words, closed, full, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None if closed else full)
    assert code_of("plan", "--anchors", *words) == RESULT_LOST
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stdout: it is closed" if closed else "stdout: No space left on device")


def test_a_stderr_that_is_full_too_leaves_the_exit_code(full, monkeypatch):
    monkeypatch.setattr(sys, "stdout", full)
    monkeypatch.setattr(sys, "stderr", full)
    assert code_of("plan", "--anchors", "--json") == RESULT_LOST


@pytest.mark.parametrize(("name", "words"), [("plan", "no_such_recipe"), ("same", "{tmp} {tmp}")])
def test_bad_input_keeps_its_exit_code_where_stdout_is_full(name, words, full, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "stdout", full)
    assert code_of(name, "--json", *words.format(tmp=tmp_path).split()) == BAD_INPUT
    *said, line = capsys.readouterr().err.splitlines()
    assert said[0].startswith(("no_such_recipe: ", "RUN: "))
    assert line.startswith("stdout: No space left on device")


def test_a_failure_keeps_its_traceback_where_stdout_is_full(full, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("verl_tim.bench.correction.make_batch", fails)
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        app(["bench", "diagnosis", "--json"])


def test_results_reach_stdout_by_one_way():
    """So that each of the commands says what became of a result that stdout does not take."""
    folder = Path(compare.__file__).parent
    ways = re.compile(r"sys\.stdout|typer\.echo|(?<![\w.])print\(")
    wrong = [str(file) for file in sorted(folder.rglob("*.py")) if ways.search(file.read_text(encoding="utf-8"))]
    assert wrong == [str(folder / "output.py")]


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


def test_an_exception_without_words_is_named_by_its_class():
    assert first_line(ValueError("\n  no \n yes")) == "no"
    assert first_line(ConnectionError()) == "ConnectionError"


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
