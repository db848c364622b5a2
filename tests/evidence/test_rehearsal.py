"""The whole way with real runs of verl on a CPU, tiny and short: side by side, packed, unpacked, drawn.

A rehearsal of the machinery. Its figures say nothing: the rollout is stock in vLLM's place, the model has 156 K
parameters, and there are three steps.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib import resources

import pytest

from verl_tim.evidence.names import PLANNED
from verl_tim.launch.recipes import CONFIGS_PACKAGE, RECIPES_PACKAGE
from verl_tim.launch.record import RECORD
from verl_tim.launch.side_by_side import TIME_IS_UP
from verl_tim.training.accelerator import host_has_accelerator

# The product's matrix, run for run, on a CPU: this takes the place of that.
INSTEAD = {
    "model=evidence_qwen3]": "model=tiny_qwen3, cluster=cpu, task=chain_sum]",
    "model=evidence_qwen3_moe]": "model=tiny_qwen3_moe, cluster=cpu, task=chain_sum]",
    "recipe=evidence_grpo,": "recipe=evidence_grpo, actor_rollout_ref.actor.ppo_mini_batch_size=8,",
    "rollout=vllm,": "rollout=stock,",
    "rollout=vllm_invariant,": "rollout=stock,",
}
SHORT = (
    *("trainer.total_training_steps=3", "trainer.val_before_train=false", "trainer.test_freq=-1"),
    "data.train_batch_size=16",
)
TWO = ("tim.only=[dense-grpo-vexact,dense-grpo-vllm_recompute]", "data.seed=1")


def matrix():
    text = resources.files(CONFIGS_PACKAGE).joinpath("matrix", "evidence.yaml").read_text()
    for word, other in INSTEAD.items():
        assert word in text
        text = text.replace(word, other)
    return text


def verl_tim(folder, *words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "verl_tim.cli", *words],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == code, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU")
def test_from_runs_to_the_page(tmp_path):
    recipe = resources.files(RECIPES_PACKAGE).joinpath("evidence_grpo", "evidence_grpo.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(recipe)
    (tmp_path / "matrix").mkdir()
    (tmp_path / "matrix" / "rehearsal.yaml").write_text(matrix())
    words = ["train", "recipe=mine.yaml", "+matrix=rehearsal", *SHORT]
    listed = json.loads(verl_tim(tmp_path, *words, "tim.run_dir=runs", "data.seed=1", "--dry-run", "--json"))
    assert {run["run"] for run in listed} == {str(name) for name in PLANNED if name.seed == 1}
    # the time is up before the first run
    few = [*words, *TWO, "--at-once", "2", "--json"]
    cut = json.loads(verl_tim(tmp_path, *few, "tim.run_dir=runs", "--minutes", "0.1", code=TIME_IS_UP))
    assert [run["state"] for run in cut["runs"]] == ["waiting"] * 2
    found = json.loads(verl_tim(tmp_path, *few, "tim.run_dir=runs", "--minutes", "20"))
    assert [(run["state"], run["steps"]) for run in found["runs"]] == [("finished", 3)] * 2
    # another machine, to which the record alone was carried
    (tmp_path / "there").mkdir()
    shutil.copy(tmp_path / "runs" / RECORD, tmp_path / "there")
    again = json.loads(verl_tim(tmp_path, *few, "tim.run_dir=there"))
    assert all(run["earlier"] for run in again["runs"])

    verl_tim(tmp_path, "evidence", "pack", "runs", "--out", "archives", "--used")
    (archive,) = (tmp_path / "archives").iterdir()
    verl_tim(tmp_path, "evidence", "unpack", str(archive), "--out", "home")
    tail = json.loads(verl_tim(tmp_path, "evidence", "figure", "tail", "home", "--json"))
    rows = {row[1]: dict(zip(tail["columns"], row, strict=True)) for row in tail["rows"]}
    assert rows["vexact"]["largest"] == "0"
    assert float(rows["vllm_recompute"]["largest"]) > 0
    assert rows["vllm_recompute"]["top-1 flips"] != "–"
    verl_tim(tmp_path, "evidence", "page", "home", "--out", "docs")
    page = (tmp_path / "docs" / "evidence.md").read_text()
    assert "2 of 60 runs finished" in page
    assert "these settings differ" not in page
    assert len(list((tmp_path / "docs" / "evidence").glob("*.png"))) == 2
