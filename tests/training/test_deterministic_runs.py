"""Runs of verl with tim.deterministic=true: two are equal bit for bit, V1 and legacy, on two ranks.

The reward is a fraction that no binary number holds, so that a mean in another order is another mean; the mini-batches
are shuffled; validation samples. That the comparison can fail is shown by a run with another seed, and that a worker
cannot leave the mode unseen by a module that undoes it in one process. V1's pair and that module are in
scripts/test.sh, all in scripts/test.sh --all.
"""

from __future__ import annotations

import shutil

import pytest

from tests.training.tiny import parquet
from tests.training.verl_run import CONTRACT, overrides_of, run_together, selected
from verl_tim.diagnosis.same import same_runs
from verl_tim.training.accelerator import host_has_accelerator

slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU"),
]

STEPS = 2
ON = (
    "+tim.deterministic=true",
    "actor_rollout_ref.actor.shuffle=true",
    "trainer.test_freq=2",
    f"trainer.save_freq={STEPS}",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "+tim.dump.every=1",
)
LEGACY = ("trainer.use_v1=false",)
# name -> overrides, ranks. Ray starts with the first.
RUNS = {
    "v1": ((), 2),
    "v1-again": ((), 2),
    "legacy": (LEGACY, 2),
    "legacy-again": (LEGACY, 2),
    "other-seed": (("actor_rollout_ref.rollout.seed=43",), 2),
    "undone": ((), 1),
}
# In the trainer worker of a run on one rank nothing switches deterministic kernels on.
UNDO = """
import os
import torch
if os.environ.get("WORLD_SIZE") == "1" and "RANK" in os.environ:
    torch.use_deterministic_algorithms = lambda *args, **kwargs: None
"""


# What a test compares.
PAIRS = [
    pytest.param(("v1", "v1-again"), marks=slow, id="v1"),
    pytest.param(("legacy", "legacy-again"), marks=exhaustive, id="legacy"),
]
SEEDS = [pytest.param(("v1", "other-seed"), marks=exhaustive, id="seeds")]
UNDONE = [pytest.param(("undone",), marks=slow, id="undone")]


@pytest.fixture(scope="module")
def runs(request, folders, tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("together"), tmp_path_factory.mktemp("data")
    parquet(data / "train.parquet", 64)
    parquet(data / "val.parquet", 8, split="test", seed=1)
    plans = {}
    wanted = set().union(*selected(request, "names"))
    for name, (more, ranks) in RUNS.items():
        if name not in wanted:
            continue
        common = overrides_of(folder / name, folders("qwen3_moe"), data, ranks=ranks, steps=STEPS)
        where = (f"trainer.default_local_dir={folder / name}/checkpoints",)
        plans[name] = [*common, *CONTRACT, *ON, *where, *more]
    made = run_together(folder, plans, modules={"undo": UNDO})
    for run in made.values():
        if run.metrics.exists():
            shutil.copy(run.metrics, run.folder / "metrics.jsonl")
    return made


@pytest.mark.parametrize("names", PAIRS)
def test_two_runs_are_equal_bit_for_bit(runs, names):
    first, second = (runs[name] for name in names)
    for run in (first, second):
        assert run.returncode == 0, run.output[-4000:]
        assert all(norm > 0 for norm in run.series("actor/grad_norm")), "the weights did not move"
    answer = same_runs(first.folder, second.folder)
    assert answer.equal, answer.first
    compared = {section.name: section.compared for section in answer.sections}
    # 8 samples of 4 rows each step; every value of two ranks' weights and moments, generators and place in the data
    assert compared["samples"] == 4 * STEPS
    assert compared["checkpoints"] > 200_000
    assert min(compared["tokens"], compared["dumps"], compared["metrics"]) > 100, compared
    # the processes are the same, answer for answer; only where and when they ran is another
    assert answer.facts == ()
    assert any(name.startswith("val-") for name in first.steps[STEPS])


@pytest.mark.parametrize("names", PAIRS)
def test_every_process_of_a_run_has_answered(runs, names):
    for name in names:
        processes = runs[name].manifest()["deterministic"]["processes"]
        assert list(processes) == [
            "actor 0", "actor 1", "server 0", "server 1", "agent loop 0", "reward 0", "driver"
        ]  # fmt: skip
        assert processes["actor 0"]["collective"]["ranks"] == 2
        assert all(not report["hash_randomization"] for report in processes.values())
        assert all(report["variables"]["NCCL_ALGO"] == "Ring" for report in processes.values())


@pytest.mark.parametrize("names", SEEDS)
def test_another_seed_is_another_run_and_the_first_difference_is_what_was_drawn(runs, names):
    first, other = (runs[name] for name in names)
    assert other.returncode == 0, other.output[-4000:]
    answer = same_runs(first.folder, other.folder)
    assert not answer.equal
    section, found = answer.first
    assert section == "samples"
    assert found.step == 1
    assert answer.to_dict()["first"]["section"] == "samples"


@pytest.mark.parametrize("names", UNDONE)
def test_a_worker_in_which_the_mode_was_undone_stops_the_run_before_its_first_step(runs, names):
    (run,) = (runs[name] for name in names)
    assert run.returncode != 0
    assert "DeterminismError" in run.output
    assert "actor 0: deterministic_algorithms must be True, it is False" in run.output
    assert run.series("actor/grad_norm") == []
    # the answers are kept, also those of the process that disagrees
    flags = run.manifest()["deterministic"]["processes"]["actor 0"]["flags"]
    assert flags["deterministic_algorithms"] is False
