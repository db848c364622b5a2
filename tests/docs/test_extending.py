"""docs/extending.md is followed to the letter: its files are written, its package installed, its commands typed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import commands_of, write_files
from verl_tim.training.accelerator import host_has_accelerator

PAGE = "extending.md"
INSTALL = "pip install -e mine"


def run(words, folder, timeout=900):
    """A command in the reader's folder, with the reader's package installed there and not in this environment."""
    programs = {"python": [sys.executable], "verl-tim": [sys.executable, "-m", "verl_tim.cli"]}
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*programs[words[0]], *words[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, errors="replace",
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(words)}\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The reader's folder: the page's files, the package installed (into the folder, so that it is gone afterwards)."""
    folder = tmp_path_factory.mktemp("reader")
    write_files(PAGE, folder)
    install = ["install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", "site", "./mine"]
    run(["python", "-m", "pip", *install], folder)
    return folder


REGISTERED = """
import json, transformers, torch
from verl_tim.correction import RolloutCorrectionConfig, correct
from verl_tim.correction.errors import ConfigError
from verl_tim.models import ModelError, config_from_hf
import verl
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl_tim.launch.start import composed

shape = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
mistral = config_from_hf(transformers.MistralConfig(**shape, sliding_window=None))
try:
    config_from_hf(transformers.MistralConfig(**shape, sliding_window=4096))
    refused = ""
except ModelError as error:
    refused = str(error)
rejected = {}
for rule in ("token_gap", "seq_max_gap"):
    config = RolloutCorrectionConfig.from_mapping({"rollout_rs": rule, "rollout_rs_threshold": 0.1})
    q = torch.tensor([[0.5, 0.5], [0.5, 0.01]]).log()
    p = torch.tensor([[0.5, 0.7], [0.5, 0.02]]).log()
    result = correct(config, old_log_probs=p, rollout_log_probs=q, response_mask=torch.ones(2, 2))
    rejected[rule] = (~result.mask).tolist()
    metric = result.metrics[f"rollout_corr/rollout_rs_{rule}_max"]
try:
    RolloutCorrectionConfig.from_mapping({"rollout_rs": "token_gab", "rollout_rs_threshold": 0.1})
except ConfigError as error:
    near = str(error)
run = composed(["recipe=mine.yaml"])
print(json.dumps({
    "architecture": mistral.architecture, "refused": refused, "rejected": rejected, "metric": metric, "near": near,
    "replica": RolloutReplicaRegistry.get("hf").__module__,
    "rollout": run.actor_rollout_ref.rollout.name,
    "rule": run.algorithm.rollout_correction.rollout_rs,
    "reward": run.reward.custom_reward_function.path,
}))
"""


def test_what_the_package_registers_is_there(folder):
    found = json.loads(run(["python", "-c", REGISTERED], folder).splitlines()[-1])
    assert found["architecture"] == "MistralForCausalLM"
    assert "sliding_window=4096" in found["refused"]
    # 0.2 of probability is beyond 0.1, a factor of two at one per cent is not
    assert found["rejected"] == {
        "token_gap": [[False, True], [False, False]],
        "seq_max_gap": [[True, True], [False, False]],
    }
    assert found["metric"] == pytest.approx(0.2)
    assert "'token_gap'" in found["near"]
    assert found["replica"] == "mine.hf_rollout"
    assert (found["rollout"], found["rule"], found["reward"]) == ("hf", "token_gap", "reward.py")


def test_an_extension_that_is_broken_stops_with_its_cause(folder):
    site = folder / "broken"
    (site / "broken-1.dist-info").mkdir(parents=True)
    (site / "broken-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (site / "broken-1.dist-info" / "entry_points.txt").write_text("[verl_tim.extensions]\nbroken = not_there\n")
    code = "from verl_tim.correction.rules import rule_names; rule_names()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "ExtensionError: extension broken (not_there" in done.stderr
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU")
def test_the_pages_commands_do_what_it_says(folder):
    commands = commands_of(PAGE)
    assert commands[0] == INSTALL
    printed = {command: run(shlex.split(command), folder) for command in commands[1:]}
    assert any("0 bits differ" in text for command, text in printed.items() if "verify small_mistral" in command)
    assert any("agree bit for bit" in text for command, text in printed.items() if "--layers" in command)
    assert (folder / "runs" / "compare.html").is_file()
    runs = {name: read(folder / "runs" / name) for name in ("hf", "vexact")}
    assert [step["tim/exact_fraction"] for step in runs["vexact"]] == [1.0, 1.0]
    assert all(0 < step["tim/delta_abs_max"] < 0.5 for step in runs["hf"]), "another engine: near, and not equal"
    for step in runs["hf"]:
        assert step["tim/top1_tokens"] > 20
        assert step["rollout_corr/rollout_rs_token_gap_max"] > 0
        assert step["actor/grad_norm"] > 0
        assert step["tim/missing_tokens"] == 0
    manifest = json.loads((folder / "runs" / "hf" / "manifest.json").read_text())
    assert manifest["run"]["rollout"] == "hf"
    assert manifest["rollout"]["facts"]["attention_backend"] == "sdpa"


def read(folder: Path):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["data"] for line in lines if line["step"]]
