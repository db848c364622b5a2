"""Real vLLM beside both trainers: `probe`, its dump, and what `verify` says of that dump. A minute or two each."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.training.tiny import model_folder, parquet
from verl_tim.training.accelerator import host_has_accelerator
from verl_tim.verification.engine_dump import read_dump

pytest.importorskip("vllm", reason="these tests run real vLLM, which is not installed here")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU"),
]

HIDDEN, ROWS = 4, 12
KINDS = {"qwen3": ("contract", ".npz"), "qwen3_moe": ("stock", ".safetensors")}


def verl_tim(*words):
    """(standard output, standard error) of a command that ends well."""
    ended = subprocess.run(
        [sys.executable, "-m", "verl_tim.cli", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    # vLLM's processes name the cause on standard output
    causes = [line for line in (ended.stdout + ended.stderr).splitlines() if "Error" in line]
    assert ended.returncode == 0, "\n".join(causes[:20] or ended.stderr.splitlines()[-20:])
    return ended.stdout, ended.stderr


@pytest.fixture(scope="module", params=sorted(KINDS))
def probed(request, tmp_path_factory):
    """(kind, model folder, dump, probe's JSON) of answers drawn by vLLM at temperature 1, with hidden states.

    The engine's token budget is a prompt and its answer, so that it would cut prompts if it were let.
    """
    kind = request.param
    trainer, suffix = KINDS[kind]
    folder = tmp_path_factory.mktemp(kind)
    # vLLM's attention for CPUs knows no heads of 16
    model = str(model_folder(folder / "model", kind, head_dim=32))
    dump = folder / f"dump{suffix}"
    verl_tim(
        *("probe", model, "--data", str(parquet(folder / "data.parquet", ROWS)), "--rollout", "vllm"),
        *("--trainer", trainer, "--temperature", "1.0", "--max-tokens", "12", "--seed", "3"),
        *("--dump", str(dump), "--hidden", str(HIDDEN), "--out", str(folder)),
    )
    return kind, model, dump, json.loads((folder / "probe.json").read_text())


def test_probe_measures_a_small_mismatch(probed):
    _, _, dump, report = probed
    metrics = report["metrics"]
    assert metrics["tim/valid_tokens"] >= ROWS
    # two implementations in bfloat16: few tokens agree by chance, and none is far off
    assert 1e-4 < metrics["tim/delta_abs_mean"] < 0.05
    assert metrics["tim/exact_fraction"] < 0.5
    assert sum(report["counts"]) + report["zero"] == metrics["tim/valid_tokens"]
    assert 0 <= report["flips_total"] < metrics["tim/valid_tokens"] / 4
    assert "+cpu" in report["facts"]["rollout version"]
    assert len(read_dump(dump, vocab_size=104)) == HIDDEN


@pytest.mark.parametrize("trainer", ["contract", "stock"])
def test_layers_name_where_vllm_begins_to_differ(probed, tmp_path, trainer):
    kind, model, dump, _ = probed
    verl_tim("verify", model, "--layers", "--dump", str(dump), "--trainer", trainer, "--out", str(tmp_path))
    (subject,) = json.loads((tmp_path / "layers.json").read_text())["subjects"]
    ops = {op["name"]: op for op in subject["ops"]}
    for layer in ("model.layers.0", "model.layers.1"):
        inside = [name.removeprefix(f"{layer}.") for name in ops if name.startswith(layer)]
        routes = ["mlp.router", "mlp.routes"] if kind == "qwen3_moe" else []
        assert [name.split(" ")[0] for name in inside] == [
            *("input_layernorm", "self_attn.v_proj", "self_attn.q", "self_attn.k", "self_attn.attention"),
            *("self_attn.o_proj", "post_attention_layernorm", *routes, "mlp"),
        ]
    assert (subject["only_rollout"], subject["only_trainer"]) == ([], ["lm_head"])
    # what a norm adds to in place was copied before
    assert ops["model.embed_tokens"]["differing"] == 0
    assert ops[subject["first_differing"]]["layer"] == 0
    # the same tensors on both sides: swapped heads or axes, or another residual, would be of order 1
    first_layer = [op for name, op in ops.items() if op["layer"] == 0 and not name.endswith(("mlp", ".routes"))]
    assert all(op["mean_rel"] < 0.1 for op in first_layer), {op["name"]: op["mean_rel"] for op in first_layer}
    if kind == "qwen3_moe":
        routes = ops["model.layers.0.mlp.routes"]
        assert routes["differing"] <= routes["elements"] / 10


def test_the_ladder_reports_the_size_of_a_dump(probed):
    kind, model, dump, _ = probed
    out, _ = verl_tim("verify", model, "--ladder", "--dump", str(dump), "--dtype", "bfloat16", "--json")
    (subject,) = json.loads(out)["subjects"]
    (rung,) = subject["rungs"]
    assert rung["name"].startswith("5 MoE" if kind == "qwen3_moe" else "3 aligned")
    (scenario,) = rung["scenarios"]
    assert not scenario["exact"]
    assert scenario["report"]["differing"] > 0
