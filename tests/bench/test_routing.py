"""The benchmark of routing replay measures what replay does, and its command prints it."""

import json

import torch
from typer.testing import CliRunner

from verl_tim.bench.routing import Shape, benchmark, random_routes
from verl_tim.cli import app

SHAPE = Shape(layers=3, experts=8, top_k=2, tokens=64, sequences=4)


def test_sizes_are_those_of_the_formula():
    cost = benchmark(SHAPE, torch.device("cpu"), repeats=1)
    assert SHAPE.bytes_per_token == 12
    assert cost.host_bytes == 64 * 12
    # the last token of a sequence is never fed; the rest of the pickle is overhead
    assert 12 * 15 / 16 < cost.wire_bytes < 12 + 40
    assert all(part.seconds > 0 for part in cost.parts.values())
    assert random_routes(SHAPE).shape == (15, 3, 2)


def test_the_command():
    small = ["--layers", "2", "--experts", "4", "--top-k", "2", "--tokens", "64", "--sequences", "2", "--repeats", "1"]
    result = CliRunner().invoke(app, ["bench", "routing", *small, "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["bytes_per_token"] == 8
    assert {"conversion and checks", "one router, one sequence, replayed"} <= set(printed["results"])
    assert "conversion and checks" in CliRunner().invoke(app, ["bench", "routing", *small]).stdout
    for wrong in (["--top-k", "5"], ["--tokens", "3"]):
        result = CliRunner().invoke(app, ["bench", "routing", *small, *wrong])
        assert result.exit_code == 2
        assert wrong[0] in result.output
