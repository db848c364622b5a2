"""`verl-tim bench kernels`: what it says where it cannot run, and its means. Its figures need a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch
from typer.testing import CliRunner

from verl_tim.bench.row import BenchRow
from verl_tim.cli import app
from verl_tim.commands.bench import kernels


def test_the_means_are_geometric_and_leave_out_rows_without_a_peer():
    rows = [
        BenchRow("a", "1", 1.0, "peer", 4.0),
        BenchRow("a", "2", 2.0, "peer", 2.0),
        BenchRow("b", "1", 5.0),
    ]
    assert kernels.geometric_means(rows) == {"a": pytest.approx(2.0)}
    assert rows[0].as_json()["ratio"] == 4.0
    assert rows[2].as_json()["ratio"] is None


@pytest.mark.parametrize("part", kernels.PARTS)
def test_every_part_names_a_module_with_a_run(part):
    assert callable(importlib.import_module(f"verl_tim.bench.{kernels.PARTS[part]}").run)


@pytest.mark.parametrize("arguments", [[], ["--part", "tensors"]])
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_what_cannot_run_is_refused_with_a_remedy(arguments):
    result = CliRunner().invoke(app, ["bench", "kernels", *arguments])
    assert result.exit_code == 2
    named = "--part: 'tensors' is unknown" if arguments else "bench kernels: PyTorch sees no GPU here"
    assert named in " ".join(result.stderr.split())
    assert "->" in result.stderr


def test_a_part_that_fails_does_not_hide_the_others(monkeypatch):
    from verl_tim.bench import kernels_gemm, kernels_moe

    def fails(quick):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(kernels_gemm, "run", lambda quick: [BenchRow("gemm", "8 x 8", 2.0, "torch.mm", 3.0)])
    monkeypatch.setattr(kernels_moe, "run", fails)
    result = CliRunner().invoke(app, ["bench", "kernels", "--part", "moe", "--part", "gemm"])
    assert result.exit_code == 1
    assert "1.50" in result.stdout
    assert "moe failed: RuntimeError: out of memory" in result.stderr
