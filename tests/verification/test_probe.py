"""The probe: known answers give the known numbers; a real one on small models; settings and prompts that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.training.in_process import ScoredSequence
from verl_tim.verification.answers import Answer, Top2, top2
from verl_tim.verification.engine_dump import read_dump
from verl_tim.verification.probe import probe
from verl_tim.verification.probe_settings import ProbeSettings, SettingsError
from verl_tim.verification.prompts import PromptError, read_prompts

runner = CliRunner()
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "probe_8b"


def answer(log_probs, top=((5, 6),) * 3):
    ids = torch.tensor(top[: len(log_probs)])
    tokens = ScoredSequence(np.array([1, 2]), np.array([5, 6, 7][: len(log_probs)]))
    return Answer(tokens, torch.tensor(log_probs), Top2(ids, torch.full(ids.shape, -0.5)), 1.0)


def measured(batches, shift, train_top=None):
    def score(given):
        top = given.top if train_top is None else Top2(torch.tensor(train_top), given.top.log_prob_R2)
        return given.log_prob_R + torch.tensor(shift[: len(given.log_prob_R)]), top

    return probe(batches, score, lambda ids: "".join(chr(65 + i) for i in ids), {"rollout": "r", "trainer": "t"})


def test_known_differences_give_known_numbers():
    report = measured([[answer([-1.0, -2.0, -3.0])], [answer([-1.0])]], [0.5, 0.0, -0.25])
    assert [(b.tokens, b.mean, b.max) for b in report.batches] == [(3, 0.25, 0.5), (1, 0.5, 0.5)]
    assert report.zero == 1
    assert sum(report.counts) == 3
    places = {edge for edge, count in zip(report.edges, report.counts, strict=False) if count}
    assert len(places) == 2
    assert max(places) <= 0.5 < max(places) * 10**0.25
    assert report.metrics["tim/delta_abs_max"] == 0.5
    assert (report.flips_total, report.metrics["tim/top1_flip_rate"]) == (0, 0.0)
    assert "0.500 at most" in report.summary()


def test_a_flip_is_shown_with_text_and_both_pairs():
    report = measured([[answer([-1.0, -2.0, -3.0])]], [0.0, 0.0, 0.125], train_top=((5, 6), (5, 6), (6, 5)))
    (flip,) = report.flips
    assert (flip.answer, flip.position, flip.context, flip.drawn, flip.delta) == (0, 2, "BCFG", "H", 0.125)
    assert (flip.rollout, flip.trainer) == ((("F", -0.5), ("G", -0.5)), (("G", -0.5), ("F", -0.5)))
    assert report.metrics["tim/top1_flip_rate"] == pytest.approx(1 / 3)
    assert "BCFG" in report.page().render()


def test_nothing_to_score_is_an_error():
    for batches in ([], [[]]):
        with pytest.raises(ValueError, match="nothing to score"):
            measured(batches, [0.0])
    with pytest.raises(ValueError, match="not finite"):
        measured([[answer([float("nan")])]], [0.0])


def test_top2_breaks_ties_to_the_lower_id():
    ids, values = top2(torch.tensor([[0.0, 3.0, 3.0, 1.0]]), 1.0)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(values, torch.log_softmax(torch.tensor([[0.0, 3.0, 3.0, 1.0]]), -1)[:, 1:3])


@pytest.fixture
def data(tmp_path):
    rows = [[{"role": "user", "content": f"{n}+{n}="}] for n in range(6)]
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": rows}), path)
    return path


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_the_recipes_cpu_version_runs(random_models, data, tmp_path, kind):
    words = ["probe", random_models[kind], "--settings", str(RECIPE / "cpu.yaml"), "--data", str(data)]
    result = runner.invoke(app, [*words, "--json", "--out", str(tmp_path / "out"), "--max-tokens", "10"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "out/probe.json").read_text())
    assert report["facts"]["rollout"] == "stock"
    assert report["metrics"]["tim/delta_abs_max"] > 0
    assert (
        report["metrics"]["tim/top1_tokens"]
        == report["metrics"]["tim/valid_tokens"]
        == sum(report["counts"]) + report["zero"]
    )
    page = (tmp_path / "out/probe.html").read_text()
    assert report["summary"].split(";")[0] in page


def test_vexact_and_contract_are_exact_and_the_dump_feeds_verify(random_models, data, tmp_path):
    model, dump = random_models["qwen3"], tmp_path / "dump.safetensors"
    words = ["--rollout", "vexact", "--temperature", "0.7", "--responses", "2", "--max-tokens", "8", "--prompts", "3"]
    result = runner.invoke(
        app,
        [
            "probe",
            model,
            "--data",
            str(data),
            *words,
            "--json",
            "--out",
            str(tmp_path),
            "--dump",
            str(dump),
            "--hidden",
            "4",
        ],
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["zero"] == report["metrics"]["tim/valid_tokens"]
    assert report["flips_total"] == 0
    assert len(read_dump(dump)) == 4
    result = runner.invoke(
        app, ["verify", model, "--layers", "--dump", str(dump), "--dtype", "bfloat16", "--json", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    (layers,) = json.loads(result.stdout)["subjects"]
    assert layers["exact"]
    assert len(layers["ops"]) == 20
    result = runner.invoke(app, ["verify", model, "--ladder", "--dump", str(dump), "--dtype", "float32", "--json"])
    assert result.exit_code == 0, result.output
    (ladder,) = json.loads(result.stdout)["subjects"]
    assert [rung["name"] for rung in ladder["rungs"]] == ["3 aligned, dense"]
    assert ladder["rungs"][0]["scenarios"][0]["report"]["differing"] > 0


def test_the_recipe_for_8b_is_valid(random_models):
    settings = ProbeSettings.of(RECIPE / "probe.yaml", {"model": random_models["qwen3"], "data": ["aime.parquet"]})
    assert (settings.rollout, settings.trainer, settings.prompts, settings.temperature) == ("vllm", "stock", 30, 0.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rollout": "sglang"}, "rollout: 'sglang' is unknown"),
        ({"dtype": "float16"}, "dtype: 'float16' is unknown"),
        ({"temperature": -1.0}, "temperature: is -1.0"),
        ({"prompts": 0}, "prompts: is 0"),
        ({"responses": 2}, "responses: 2 greedy responses"),
        ({"model": "/nowhere"}, "MODEL: /nowhere is no model folder"),
        ({"data": None}, "--data: is missing"),
    ],
)
def test_bad_settings_are_named(random_models, changes, named):
    with pytest.raises(SettingsError, match=named):
        ProbeSettings.of(None, {"model": random_models["qwen3"], "data": ["x"], **changes})


def test_bad_settings_files_are_named(random_models, tmp_path):
    with pytest.raises(SettingsError, match="there is no file"):
        ProbeSettings.of(tmp_path / "none.yaml", {})
    (tmp_path / "a.yaml").write_text("promts: 3\n")
    with pytest.raises(SettingsError, match="promts: is no setting"):
        ProbeSettings.of(tmp_path / "a.yaml", {"model": random_models["qwen3"], "data": ["x"]})


def test_bad_prompts_are_named(random_models, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(random_models["qwen3"])
    with pytest.raises(PromptError, match="there is no file"):
        read_prompts([tmp_path / "none.parquet"], tokenizer, limit=1)
    path = tmp_path / "a.parquet"
    for table, named in (
        ({"text": ["x"]}, "no column 'prompt'"),
        ({"prompt": ["x"]}, "row 0: prompt is 'x'"),
        ({"prompt": pa.array([], pa.list_(pa.string()))}, "no prompt in it"),
    ):
        pq.write_table(pa.table(table), path)
        with pytest.raises(PromptError, match=named):
            read_prompts([path], tokenizer, limit=1)


def test_a_dump_without_a_folder_is_refused_before_the_work(random_models, data, tmp_path):
    words = ["probe", random_models["qwen3"], "--data", str(data), "--out", str(tmp_path)]
    result = runner.invoke(app, [*words, "--dump", str(tmp_path / "none" / "a.npz")])
    assert result.exit_code == 2, result.output
    assert "--dump: there is no folder" in result.stderr


def test_a_dump_that_no_command_wrote_is_refused_before_the_work(random_models, data, tmp_path):
    other = tmp_path / "other.npz"
    other.write_bytes(b"mine")
    words = ["probe", random_models["qwen3"], "--data", str(data), "--out", str(tmp_path)]
    result = runner.invoke(app, [*words, "--dump", str(other)])
    assert result.exit_code == 2, result.output
    assert "--dump: " in result.stderr
    assert "other.npz is there already" in " ".join(result.stderr.split())
    assert other.read_bytes() == b"mine"


def test_a_place_that_is_taken_is_named(random_models, data, tmp_path):
    (tmp_path / "probe.json").mkdir()
    words = ["--prompts", "1", "--max-tokens", "2", "--dtype", "float32", "--out", str(tmp_path)]
    result = runner.invoke(app, ["probe", random_models["qwen3"], "--data", str(data), *words])
    assert result.exit_code == 2, result.output
    assert "--out: cannot write" in result.stderr


def test_missing_data_is_exit_code_2(random_models, tmp_path):
    result = runner.invoke(app, ["probe", random_models["qwen3"], "--data", str(tmp_path / "none.parquet")])
    assert result.exit_code == 2
    assert "there is no file" in result.stderr
