"""`verl-tim data` for published sets and files of the user's own."""

import json
from pathlib import Path

import pytest
from fake_hub import COMMITS, write
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.tasks.published.sources import PUBLISHED


def run(*arguments):
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def said(result):
    return " ".join(result.stderr.split())


def test_the_sets_are_listed():
    listed = {row["task"]: row for row in json.loads(run("--json").stdout)}
    assert set(PUBLISHED) < set(listed)
    assert listed["gsm8k"]["repo"] == "openai/gsm8k"
    assert listed["sanity_r1d"]["pinned"] is False
    assert listed["sanity_r1d"]["inferred"]
    assert "chain_sum" in listed
    text = run().stdout
    assert "sanity_r1d" in text
    assert "chain_sum" in text


def test_text_output(hub, tmp_path):
    result = run("gsm8k", "--cache-dir", tmp_path)
    assert result.exit_code == 0, result.stderr
    train, validation = result.stdout.splitlines()
    assert train.startswith(f"data.train_files={tmp_path}/data/gsm8k-")
    assert validation.endswith("/validation.parquet")
    assert f"train: 12 of 12 rows of openai/gsm8k@{PUBLISHED['gsm8k'].revision}" in said(result)


def test_copies_are_said(hub, tmp_path):
    result = run("dapo_math", "--cache-dir", tmp_path)
    assert "train: 20 of 102 rows" in said(result)
    assert "(dropped: 81 copies, 1 problems with conflicting answers)" in said(result)


def test_an_unpinned_revision_and_what_is_inferred_are_said_and_recorded(hub, tmp_path):
    result = run("sanity_r1d", "--cache-dir", tmp_path)
    assert f"no pinned commit: revision main was resolved to {COMMITS['sanity_r1d']}" in said(result)
    assert "inferred: data_source math_1460" in said(result)
    as_json = json.loads(run("sanity_r1d", "--cache-dir", tmp_path, "--json").stdout)
    assert as_json["manifest"]["sources"]["train"]["commit"] == COMMITS["sanity_r1d"]
    assert as_json["validation"] is None
    assert json.loads(Path(as_json["card"]).read_text()) == as_json["manifest"]
    pinned = run("sanity_r1d", "--cache-dir", tmp_path, "--revision", COMMITS["sanity_r1d"])
    assert "no pinned commit" not in said(pinned)


def test_files_of_the_users_own(tmp_path):
    rows = [{"q": f"What is {n}+1?", "a": n + 1} for n in range(5)]
    train, validation = write(tmp_path / "t.jsonl", rows), write(tmp_path / "v.parquet", rows[:2])
    result = run(
        *("files", "--from", f"train={train}", "--from", f"validation={validation}"),
        *("--column", "problem=q", "--column", "answer=a", "--data-source", "mine", "--prompt-style", "hash"),
        *("--train-size", 3, "--out", tmp_path / "out", "--json"),
    )
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert made["train"] == f"{tmp_path}/out/train.parquet"
    assert made["manifest"]["counts"]["train"]["rows_written"] == 3
    assert made["manifest"]["data_source"] == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k", "--seed", "1"], "--seed: does not go with gsm8k, which has no generator"),
        (["gsm8k", "--difficulty", "a=1"], "--difficulty: does not go with gsm8k"),
        (["chain_sum", "--revision", "main"], "--revision: does not go with chain_sum, which is made from a seed"),
        (["chain_sum", "--from", "train=x"], "--from: does not go with chain_sum"),
        (["gsm8k", "--from", "test=x.csv"], "unknown split 'test'; known splits: train, validation"),
        (["gsm8k", "--from", "x.csv"], "--from: 'x.csv' is no pair -> write --from NAME=VALUE"),
        (["gsm8k", "--from", "train=a", "--from", "train=b"], "train is given twice"),
        (["gsm8k", "--column", "problem=q"], "they belong to --from"),
        (["files"], "no file given"),
        (["gsm9k"], "unknown task 'gsm9k'; known tasks: basic_arithmetic, chain_sum"),
        (["gsm8k", "--prompt-style", "loud"], "known styles: published, boxed, answer_line, hash, bare"),
        (["gsm8k", "--train-size", "0"], "train_size: must be an integer of at least 1"),
        (["gsm8k", "--revision", "v2"], "--revision: openai/gsm8k has no revision 'v2'; give a commit"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(hub, tmp_path, arguments, message):
    result = run(*arguments, "--cache-dir", tmp_path)
    assert result.exit_code == 2
    assert message in said(result)
    assert result.stdout == ""
