"""Real runs over two Ray nodes, and what is left of them when something dies.

The nodes are on this machine; where this process may make network namespaces, the second has an address and an
interface of its own. A run that lost a process and went on from its checkpoint must have the curve of one that lost
none, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.training.ray_nodes import can_make_namespaces, two_nodes
from tests.training.tiny import model_folder, parquet
from tests.training.verl_run import REWARD
from verl_tim.diagnosis.manifest import Manifest
from verl_tim.diagnosis.run_folder import RunFolder
from verl_tim.diagnosis.same import same_runs
from verl_tim.diagnosis.token_dump import dumped_steps

STEPS, SAVE_EVERY, KILL_AFTER = 5, 2, 3
NOTICED_WITHIN = 60.0
"""Seconds from a death to the end of the run; Ray and gloo notice at once, the rest is verl closing down."""


@dataclass
class Trained:
    """A `verl-tim train` that has ended."""

    folder: Path
    code: int
    output: str
    seconds_after_kill: float

    @property
    def attempts(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "attempts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    model_folder(folder / "model")
    parquet(folder / "train.parquet", 24)
    parquet(folder / "val.parquet", 4, split="test", seed=1)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def nodes(work):
    with two_nodes(work, namespaces=can_make_namespaces()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def train(work, nodes):
    def run(
        name: str, *words: str, kill: Callable[[Path, subprocess.Popen], int] | None = None, timeout: float = 900
    ) -> Trained:
        """`verl-tim train` on the cluster.

        Args:
            kill: called when step KILL_AFTER is in the metrics; the process it names gets SIGKILL.
        """
        folder = work / name
        command = [sys.executable, "-m", "verl_tim.cli", "train", "recipe=cpu_grpo", "cluster=cpu2x1", *words]
        command += [
            f"tim.run_dir={folder}",
            f"data.train_files={work}/train.parquet",
            f"data.val_files={work}/val.parquet",
            f"actor_rollout_ref.model.path={work}/model",
            f"reward.custom_reward_function.path={work}/reward.py",
            "data.train_batch_size=8",
            "data.max_prompt_length=48",
            "data.max_response_length=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=3e-3",
            "actor_rollout_ref.rollout.n=4",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            f"trainer.save_freq={SAVE_EVERY}",
            f"trainer.total_training_steps={STEPS}",
        ]
        killed_at = None
        log = work / f"{name}-{time.monotonic_ns()}.txt"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, env={**os.environ, **nodes.environment}, stdout=sink, stderr=subprocess.STDOUT, cwd=work
            )
        deadline = time.monotonic() + timeout
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if kill is not None and killed_at is None and _logged(folder) >= KILL_AFTER:
                    os.kill(kill(folder, process), signal.SIGKILL)
                    killed_at = time.monotonic()
                time.sleep(0.1)
        finally:
            in_time = process.poll() is not None
            if not in_time:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
        if not in_time:
            pytest.fail(f"still running after {timeout:.0f} s:\n{log.read_text()[-4000:]}")
        after = 0.0 if killed_at is None else time.monotonic() - killed_at
        output = log.read_text(errors="replace")
        print(f"{name}: exit code {process.returncode}, {after:.1f} s after the kill\n{output[-1500:]}")
        return Trained(folder, process.returncode, output, after)

    return run


def _logged(folder: Path) -> int:
    """The last step in the metrics of the attempt under way; 0: none, or later than the first attempt."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or (folder / "metrics.1.jsonl").exists():
        return 0
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return json.loads(lines[-1])["step"] if lines else 0


@pytest.fixture(scope="module")
def whole(train):
    """The run that nothing happens to."""
    trained = train("whole")
    assert trained.code == 0, trained.output[-4000:]
    return trained


def pid_of(name: str) -> Callable[[Path, subprocess.Popen], int]:
    """A process by its name in the manifest."""

    def find(folder: Path, _: subprocess.Popen) -> int:
        manifest = Manifest.read(folder)
        return {**manifest.trainer.places, **manifest.rollout.places}[name].pid

    return find


def task_runner(folder: Path, process: subprocess.Popen) -> int:
    """verl's TaskRunner, the Ray actor in which the trainer's loop runs, on whichever node."""
    (found,) = [one.pid for one in psutil.process_iter(["cmdline"]) if _is_task_runner(one, folder)]
    return found


def _is_task_runner(process: psutil.Process, folder: Path) -> bool:
    try:
        titles = " ".join(process.info["cmdline"] or [])
        # other runs of this machine have one, too
        return titles.startswith("ray::TaskRunner") and any(
            file.path == str(folder / "metrics.jsonl") for file in process.open_files()
        )
    except psutil.Error:
        return False


def driver(folder: Path, process: subprocess.Popen) -> int:
    """`python -m verl.trainer.main_ppo`."""
    (found,) = psutil.Process(process.pid).children()
    return found.pid


def itself(folder: Path, process: subprocess.Popen) -> int:
    """`verl-tim train`."""
    return process.pid


def same_curve(trained: Trained, whole: Trained) -> None:
    """Every step once, and every value of the run that nothing happened to, with its bits: metrics, tokens, samples,
    and the weights, optimiser states and places in the data of the checkpoints.

    The random states in a checkpoint are left out: verl seeds no worker, so they differ between any two runs, and
    nothing that a run of this recipe computes is drawn from them.
    """
    found = {section.name: section for section in same_runs(whole.folder, trained.folder).sections}
    for name in ("samples", "tokens", "metrics"):
        assert found[name].compared
        assert not found[name].differing, found[name].first
    for step in (SAVE_EVERY, 2 * SAVE_EVERY, STEPS):
        files = [
            *(f"actor/{part}_world_size_2_rank_{rank}.pt" for part in ("model", "optim") for rank in range(2)),
            "data.pt",
        ]
        for name in files:
            here, there = (state(one.folder / f"checkpoints/global_step_{step}/{name}") for one in (trained, whole))
            assert here == there, f"step {step}: {name}"
    every = list(range(1, STEPS + 1))
    assert RunFolder(trained.folder).metrics().steps == every
    assert dumped_steps(trained.folder) == every
    assert [sample.step for sample in RunFolder(trained.folder).samples()] == sorted(4 * every)


def state(file: Path) -> dict[str, object]:
    """Dotted name -> value of a state dict, tensors (of this rank's shard) as bytes."""

    def plain(tree: object, name: str) -> Iterator[tuple[str, object]]:
        if isinstance(tree, DTensor):
            tree = tree._local_tensor
        if isinstance(tree, torch.Tensor):
            yield name, (tree.dtype, tuple(tree.shape), tree.contiguous().numpy().tobytes())
        elif isinstance(tree, dict):
            for key, value in tree.items():
                yield from plain(value, f"{name}.{key}")
        elif isinstance(tree, (list, tuple)):
            for number, value in enumerate(tree):
                yield from plain(value, f"{name}.{number}")
        else:
            yield name, tree

    return dict(plain(torch.load(file, weights_only=False), ""))


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_both_nodes_train_and_generate(whole, nodes):
    manifest = Manifest.read(whole.folder)
    for side in (manifest.trainer, manifest.rollout):
        assert len(side.processes) == 2
        assert len(side.nodes) == 2
        assert [place.ip for place in side.places.values()] == list(nodes.ips)
    assert manifest.trainer.facts.data_parallel == 2
    # a replica is where its trainer rank is, which sends it the weights
    assert manifest.trainer.nodes == manifest.rollout.nodes
    log = RunFolder(whole.folder).metrics()
    steps, exact = log.series("tim/exact_fraction")
    assert steps == list(range(1, STEPS + 1))
    assert set(exact) == {1.0}
    assert len(set(log.series("critic/score/mean")[1])) > 1


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_killed_trainer_rank_is_named_and_the_run_starts_again_with_the_same_bits(train, whole):
    trained = train("worker", "--restarts", "1", kill=pid_of("actor 1"))
    assert trained.code == 0, trained.output[-4000:]
    first, second = trained.attempts
    assert (first["exit_code"], second["exit_code"]) == (1, 0)
    assert "ProcessDied: actor 1 on node" in " ".join(first["cause"])
    assert second["first_step"] == KILL_AFTER // SAVE_EVERY * SAVE_EVERY + 1
    run = Manifest.read(trained.folder).run
    assert (run.attempt, run.resumed_from) == (2, 2)
    same_curve(trained, whole)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_killed_replica_comes_back_within_the_run_with_the_same_bits(train, whole):
    trained = train("replica", kill=pid_of("server 1"))
    assert trained.code == 0, trained.output[-4000:]
    assert len(trained.attempts) == 1
    log = RunFolder(trained.folder).metrics()
    _, restarts = log.series("tim/rollout_restarts")
    assert sum(restarts) == 1
    assert set(log.series("tim/exact_fraction")[1]) == {1.0}
    same_curve(trained, whole)


FOR_GOOD = "+actor_rollout_ref.rollout.engine_kwargs.vexact.max_restarts=0"


@pytest.mark.exhaustive
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("name", "kill", "code", "says"),
    [
        (f"for_good {FOR_GOOD}", pid_of("server 1"), 1, "ProcessDied: server 1 on node"),
        ("runner", task_runner, 1, "ActorDiedError"),
        ("driver", driver, 137, "was ended by SIGKILL"),
        ("itself", itself, -signal.SIGKILL, ""),
    ],
)
def test_whatever_is_killed_the_run_ends_soon_and_goes_on_with_the_same_bits(train, whole, name, kill, code, says):
    name, *words = name.split()
    killed = train(name, *words, kill=kill)
    assert killed.code == code
    assert says in killed.output
    assert killed.seconds_after_kill < NOTICED_WITHIN
    resumed = train(name, *words, "trainer.resume_mode=auto")
    assert resumed.code == 0, resumed.output[-4000:]
    run = Manifest.read(resumed.folder).run
    assert (run.attempt, run.resumed_from) == (2, 2)
    same_curve(resumed, whole)
