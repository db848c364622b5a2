"""The benchmark of the diagnosis does what a step does, and its command prints it."""

import json

import torch
from typer.testing import CliRunner

from verl_tim.bench import diagnosis
from verl_tim.bench.correction import make_batch
from verl_tim.cli import app


def test_what_is_timed_is_a_steps_diagnosis():
    batch = make_batch(8, 64, torch.device("cpu"))
    step_batch, records = diagnosis._step(batch, 3)
    recorded, forwards = diagnosis._choices(batch, 2, diagnosis.Routed(3, 8, 2))
    step_batch.recorded = [recorded.get(row) for row in range(8)]
    metrics = diagnosis._observer(diagnosis.TimConfig()).after_update(1, step_batch, records, (), forwards)
    assert metrics["tim/valid_tokens"] == batch.response_mask.sum()
    assert metrics["tim/top1_tokens"] == batch.response_mask[:2].sum()
    assert metrics["tim/router_compared"] == 3 * metrics["tim/top1_tokens"]
    assert metrics["tim/trainer_self_delta_max"] > 0
    assert metrics["tim/rejected_share_pos_adv"] == 0


def test_the_command():
    small = ["--rows", "8", "--tokens", "64", "--layers", "2", "--experts", "4", "--repeats", "1"]
    result = CliRunner().invoke(app, ["bench", "diagnosis", *small, "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert set(printed["results"]) == {"metrics", "metrics, choices", "metrics, token dump"}
    assert all(one["seconds"] > 0 for one in printed["results"].values())
    result = CliRunner().invoke(app, ["bench", "diagnosis", *small, "--layers", "0"])
    assert "metrics, choices" in result.stdout
