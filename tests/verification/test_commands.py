"""`verify --ladder` and `--layers` on the command line: what they print and write, exit codes, bad input by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.engine import EngineConfigError
from verl_tim.training.in_process import single_rank_group
from verl_tim.verification.random_models import make_random_model

runner = CliRunner()
SMALL = ["--requests", "4", "--tokens", "6", "--dtype", "float32"]


def verify(*words):
    return runner.invoke(app, ["verify", *words, *SMALL])


def bare(*words):
    return runner.invoke(app, ["verify", *words])


def test_the_ladder_of_a_moe_model(random_models):
    result = verify(random_models["qwen3_moe"], "--ladder", "--json")
    assert result.exit_code == 0, result.output
    (subject,) = json.loads(result.stdout)["subjects"]
    assert [rung["passed"] for rung in subject["rungs"]] == [True] * 6
    scenarios = sum(len(rung["scenarios"]) for rung in subject["rungs"])
    assert sum(": passed, " in line for line in result.stderr.splitlines()) == scenarios > 6


def test_the_model_of_the_other_kind_has_the_runs_rollout(random_models, tmp_path):
    """The ladder of a MoE run with rollout=stock has a dense model for rung 3: exact bits of vexact there would say
    that stock is aligned."""
    config = {"actor_rollout_ref": {"rollout": {"name": "stock"}, "model": {"path": random_models["qwen3_moe"]}}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    result = verify(str(tmp_path), "--ladder", "--json")
    assert result.exit_code == 0, result.output
    (subject,) = json.loads(result.stdout)["subjects"]
    assert (subject["rollout"], subject["other"]) == ("stock", "random qwen3")
    scenarios = {rung["name"]: rung["scenarios"] for rung in subject["rungs"]}
    (dense,) = scenarios["3 aligned, dense"]
    assert not dense["exact"]
    assert dense["report"]["differing"] > 0


@pytest.mark.parametrize("mode", ["--layers", "--ladder"])
def test_a_file_stands_for_a_runs_rollout_that_verify_does_not_start(random_models, tmp_path, mode):
    """A run with rollout=vllm: its own is refused with the way by a file, and that way is open."""
    config = {"actor_rollout_ref": {"rollout": {"name": "vllm"}, "model": {"path": random_models["qwen3"]}}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    out = ("--out", str(tmp_path)) if mode == "--layers" else ()
    result = bare(str(tmp_path), mode, *out)
    assert result.exit_code == 2
    for word in ("rollout=vllm", "--rollout vexact or stock", "verl-tim probe", "--dump FILE"):
        assert word in result.stderr.replace("\n", " ")
    file = tmp_path / "dump.npz"
    np.savez(
        file,
        prompt_ids=np.array([1, 2, 3]),
        prompt_lengths=np.array([3]),
        response_ids=np.array([4, 5]),
        response_lengths=np.array([2]),
        log_probs=np.array([-1.0, -2.0], np.float32),
    )
    result = bare(str(tmp_path), mode, *out, "--dump", str(file), "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passed"]


def test_a_planted_fault_stops_the_ladder_with_exit_code_1(random_models):
    result = verify(random_models["qwen3"], "--ladder", "--plant", "stock_activation", "--json")
    assert result.exit_code == 1
    (subject,) = json.loads(result.stdout)["subjects"]
    assert subject["summary"].startswith("FAIL at 3 aligned, dense, trainer against rollout")
    assert [rung["skipped"] for rung in subject["rungs"]] == [False] * 3 + [True] * 3


def test_layers_of_a_pair_that_must_agree(random_models, tmp_path):
    result = verify(random_models["qwen3"], "--layers", "--out", str(tmp_path / "exact"))
    assert result.exit_code == 0, result.output
    assert "agree bit for bit" in result.stdout
    assert json.loads((tmp_path / "exact/layers.json").read_text())["passed"]
    failed = verify(
        random_models["qwen3"], "--layers", "--plant", "stock_kernel", "--json", "--out", str(tmp_path / "planted")
    )
    assert failed.exit_code == 1
    (subject,) = json.loads(failed.stdout)["subjects"]
    assert subject["first_differing"] == "model.layers.0.self_attn.attention"
    assert "stands out" in (tmp_path / "planted" / subject["page"]).read_text()


def test_layers_of_other_pairs_are_sizes(random_models, tmp_path):
    words = ["--layers", "--rollout", "stock", "--trainer", "stock", "--json", "--out", str(tmp_path)]
    result = verify(random_models["qwen3"], *words)
    assert result.exit_code == 0, result.output
    assert not json.loads(result.stdout)["subjects"][0]["exact"]


@pytest.fixture
def dump_of_twelve(tmp_path):
    """Twelve answers of another engine, each of three tokens that it found to have log-prob -1."""
    arrays = {
        "prompt_ids": np.arange(48) % 90,
        "prompt_lengths": np.full(12, 4),
        "response_ids": np.arange(36) % 90,
        "response_lengths": np.full(12, 3),
        "log_probs": np.full(36, -1.0, np.float32),
    }
    np.savez(tmp_path / "twelve.npz", **arrays)
    return str(tmp_path / "twelve.npz")


def test_layers_of_a_dump_say_how_much_of_it_they_saw(random_models, dump_of_twelve, tmp_path):
    words = [random_models["qwen3"], "--layers", "--dump", dump_of_twelve, "--out", str(tmp_path / "out")]
    assert "8 sequences of 12 (--requests), 56 tokens" in " ".join(bare(*words).stdout.split())
    (subject,) = json.loads(bare(*words, "--requests", "12", "--json").stdout)["subjects"]
    assert (subject["sequences"], subject["sequences_given"], subject["tokens"]) == (12, 12, 84)
    assert next(op for op in subject["ops"] if op["name"] == "log_prob")["elements"] == 36


def test_layers_draw_as_many_requests_as_asked_for(random_models, tmp_path):
    words = [random_models["qwen3"], "--layers", "--tokens", "4", "--out", str(tmp_path), "--json"]
    for more, expected in (([], 8), (["--requests", "11"], 11)):
        assert json.loads(bare(*words, "--dtype", "bfloat16", *more).stdout)["subjects"][0]["sequences"] == expected


@pytest.mark.parametrize("command", ["--ladder", "--layers"])
def test_a_dump_is_compared_in_one_dtype(random_models, dump_of_twelve, tmp_path, command):
    """It was computed once: in a second dtype the trainer would differ from the best of engines."""
    words = [random_models["qwen3"], command, "--dump", dump_of_twelve, "--json"]
    words += ["--out", str(tmp_path / "out")] * (command == "--layers")
    for more, dtype in (([], "bfloat16"), (["--dtype", "float32"], "float32")):
        result = bare(*words, *more)
        assert result.exit_code == 0, result.output
        assert [subject["dtype"] for subject in json.loads(result.stdout)["subjects"]] == [dtype]


@pytest.mark.parametrize("taken", ["layers.json", "layers.html"])
def test_a_place_of_layers_that_is_taken_is_named(random_models, tmp_path, taken):
    (tmp_path / taken).mkdir()
    words = ["--layers", "--dtype", "float32", "--requests", "4", "--tokens", "4", "--out", str(tmp_path)]
    result = verify(random_models["qwen3"], *words)
    assert result.exit_code == 2, result.output
    assert "--out: cannot write" in result.stderr


def test_the_attention_contract_of_a_run_is_verified(random_models, tmp_path):
    def run_with(attention):
        folder = tmp_path / attention
        folder.mkdir()
        model = {"path": str(random_models["qwen3"]), "fused_kernel_options": {"attention": attention}}
        sides = {"model": model, "rollout": {"name": "vexact", "dtype": "float32"}}
        (folder / "config.yaml").write_text(json.dumps({"actor_rollout_ref": sides, "data": {"train_files": None}}))
        return str(folder)

    words = ["--requests", "4", "--tokens", "4"]
    refused = bare(run_with("fa3"), *words)
    assert refused.exit_code == 2, refused.output
    assert "it needs a GPU" in " ".join(refused.stderr.split())
    assert "give --attention chunk64" in " ".join(refused.stderr.split())
    assert bare(str(tmp_path / "fa3"), *words, "--attention", "chunk64").exit_code == 0
    assert bare(run_with("chunk64"), *words).exit_code == 0


def test_bad_input_is_named(random_models, tmp_path):
    model = random_models["qwen3"]
    np.savez(tmp_path / "empty.npz", tokens=np.zeros(3))
    for words, named in (
        (["--ladder", "--layers"], "give one of them"),
        (["--ladder", "--ops"], "give one of them"),
        ([model, "--dump", "x.npz"], "goes with --ladder or --layers, not with the gate"),
        ([model, "--trainer", "stock"], "goes with --layers, not with the gate"),
        ([model, "--attention", "chunk32"], "--attention: "),
        ([model, "--layers", "--attention", "chunk32"], "use auto, chunk64, fa3"),
        ([model, "--ops"], "goes with --ladder or --layers or the gate, not with --ops"),
        (["--layers", "--dump", "x.npz"], "a dump is of one model"),
        ([model, "--ladder", "--dump", "x.npz", "--requests", "9"], "not with --ladder --dump"),
        ([model, "--layers", "--dump", "x.npz", "--rollout", "stock"], "not with --layers --dump"),
        ([model, "--layers", "--dump", "x.npz", "--tokens", "9"], "goes with --ladder or --layers or the gate"),
        ([model, "--layers", "--dump", str(tmp_path / "none.npz")], "there is no file"),
        ([model, "--ladder", "--dump", str(tmp_path / "empty.npz")], "lacks prompt_ids"),
        ([model, "--layers", "--trainer", "sglang"], "choose from contract, stock"),
        ([model, "--ladder", "--trainer", "stock"], "goes with --layers, not with --ladder"),
        ([model, "--ladder", "--plant", "one_ulp"], "choose from kept_generator"),
        ([str(tmp_path), "--ladder"], "neither a run folder"),
    ):
        result = (bare if "--dump" in words else verify)(*words)
        assert result.exit_code == 2, (words, result.output)
        assert named in " ".join(result.stderr.split()), (words, result.stderr)
        assert not result.exception or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("name", ["probe", "baseline"])
def test_the_new_commands_have_help(name):
    result = runner.invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output


@pytest.mark.parametrize(("peak", "flat"), [(10.0, False), (0.1, True)])
def test_a_flat_model_is_called_one(tmp_path, peak, flat):
    from verl_tim.commands.verify import flatness
    from verl_tim.verification.subject import Subject

    folder = make_random_model("qwen3", tmp_path / "model", peak=peak)
    with single_rank_group():
        spread = Subject(str(folder), dtype="float32", response_tokens=12).spread()
    note = flatness(spread)
    assert (note is not None) == flat
    assert not flat or "its distributions are flat (mean top probability 0.0" in note


@pytest.mark.parametrize("mode", ["the gate", "--ladder", "--layers"])
def test_what_an_engine_refuses_is_said_by_name(random_models, tmp_path, monkeypatch, mode):
    """As where other processes hold the memory: no traceback, in any mode."""

    def refuse(*_args, **_settings):
        raise EngineConfigError("gpu_memory_utilization=0.5: others hold the memory that it counts on")

    monkeypatch.setattr("verl_tim.verification.subject.start_engine", refuse)
    words = {"the gate": (), "--ladder": ("--ladder",), "--layers": ("--layers", "--out", str(tmp_path))}[mode]
    result = verify(random_models["qwen3"], *words, "--json")
    assert result.exit_code == 2, result.output
    (problem,) = json.loads(result.stdout)["error"]["problems"]
    assert problem["key"] == "MODEL"
    assert "others hold the memory" in problem["problem"]
