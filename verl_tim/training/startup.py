"""What a trainer does once at its start: check the running cluster, make the observer, write down what runs."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf, open_dict

from verl_tim.diagnosis.token_dump import FOLDER as TOKENS_FOLDER
from verl_tim.numerics import determinism
from verl_tim.training.baseline_gate import BaselineGate, check_setup
from verl_tim.training.config import ROLLOUTS, TimConfig
from verl_tim.training.correction_config import clip_range, of_run
from verl_tim.training.observer import StepObserver
from verl_tim.training.processes import RunProcesses, RunRoles, servers_of, worker_groups_of
from verl_tim.training.prompt_uids import PROMPT_UIDS
from verl_tim.training.reuse import LogProbReuse
from verl_tim.training.start_checks import Cluster, check, resource_findings
from verl_tim.training.start_lines import ALL_ANSWER, say

logger = logging.getLogger(__name__)

_LOOK_SECONDS, _TELL_SECONDS = 2.0, 30.0


def check_cluster(config: Any) -> None:
    """Run the start-up checks against the Ray cluster that is there, before verl waits for resources it does not have.

    A run that may start again waits up to `tim.restarts.wait` for what is missing: a node that died is replaced, and
    what the attempt before held is given back.

    Raises:
        ConfigError: names every key that cannot work and the remedy.
    """
    tim = TimConfig.of(config)
    BaselineGate.of(tim.gate)  # a missing file is found before the workers start
    deadline = time.monotonic() + (tim.restarts.wait if tim.restarts.limit else 0.0)
    told = 0.0
    while missing := _missing(config):
        now = time.monotonic()
        if now >= deadline:
            break
        if now >= told + _TELL_SECONDS:
            told = now
            logger.warning("the Ray cluster is not there yet, waiting up to %.0f s: %s", deadline - now, missing)
        time.sleep(_LOOK_SECONDS)
    check(config, cluster=cluster_of_now())


def _missing(config: Any) -> str:
    """What the cluster lacks, or has and does not give; empty: nothing."""
    found = resource_findings(config, cluster_of_now())
    if found:
        return "; ".join(str(finding) for finding in found)
    ranks = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    free = ray.available_resources().get("GPU", 0.0)
    return f"{ranks} GPU slots are needed and {free:g} are free" if free < ranks else ""


def cluster_of_now() -> Cluster:
    """What the Ray cluster that this process has joined consists of."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    sizes = tuple((float(has.get("CPU", 0.0)), float(has.get("GPU", 0.0))) for has in nodes)
    return Cluster(cpus=sum(cpus for cpus, _ in sizes), gpus=sum(gpus for _, gpus in sizes), nodes=sizes)


def make_observer(tim: TimConfig, config: Any, tokenizer: Any, reuse: LogProbReuse | None = None) -> StepObserver:
    """The step observer of a run. The gate acts only where exactness is promised: rollout vexact, trainer contract."""
    actor, correction = config.actor_rollout_ref.actor, of_run(config)
    low, high = clip_range(actor)
    gated = tim.gate.exact and config.actor_rollout_ref.rollout.name == "vexact" and tim.trainer_numerics == "contract"
    return StepObserver(
        tim,
        gated=gated,
        bypass=correction.bypass_mode,
        clip_ratio_low=low,
        clip_ratio_high=high,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        longest_response=int(config.data.max_response_length),
        reuse=reuse,
        correction=dataclasses.asdict(correction),
        model_path=str(config.actor_rollout_ref.model.path),
    )


class RolloutWatch:
    """Asks our servers and V1's agent loops after each step what happened; servers of other rollouts are left alone.

    verl's V1 trainer marks a prompt whose response failed as a failure and trains on without it (agent_loop_tq.py,
    replay_buffer.py), and validates as if it had not been asked. A failed request is a fault of the configuration or of
    the engine, a failed agent loop one of a reward function or a loop, so the run stops with the cause instead.
    """

    def __init__(self, config: Any, server_managers: Sequence[Any]) -> None:
        ours = config.actor_rollout_ref.rollout.name in ROLLOUTS
        self._servers = servers_of(server_managers) if ours else []
        self._loops: Sequence[Any] = ()

    def watch_loops(self, workers: Sequence[Any]) -> None:
        """From now on ask these `SeededWorkerV1` actors as well."""
        self._loops = workers

    def check(self) -> dict[str, float]:
        """Counters and marks since the last call as metrics: sums over the servers, and the highest of them (max_*).

        Raises:
            RolloutError: a request or an agent loop failed; names how many and the first cause. Ray's errors if a
                server or a worker is dead.
        """
        reports = ray.get([server.report.remote() for server in self._servers])
        failures = [failure for report in reports for failure in report["failures"]]
        if failures:
            count = sum(report["num_failures"] for report in reports)
            raise RolloutError(f"{count} requests to the rollout failed; the first: {failures[0]}")
        failures = [
            failure for some in ray.get([loop.take_failures.remote() for loop in self._loops]) for failure in some
        ]
        if failures:
            raise RolloutError(
                f"{len(failures)} responses failed in the agent loop (rollout, reward function or the loop itself); "
                f"the first: {failures[0]}"
            )
        merged = {}
        for kind in ("counters", "marks"):
            for name in reports[0][kind] if reports else ():
                values = [report[kind][name] for report in reports]
                merged[f"tim/rollout_{name}"] = float(max(values) if name.startswith("max_") else sum(values))
        return merged


class RolloutError(RuntimeError):
    """Requests to the rollout failed, and training on without them would hide it."""


def begin_deterministic(tim: TimConfig, config: Any, trainer: Any) -> None:
    """In the trainer's own process, before it makes anything: `tim.deterministic`, where it is on."""
    if not tim.deterministic:
        PROMPT_UIDS.count_by(None)  # a process may run one trainer after another
        return
    determinism.turn_on()
    determinism.seed_all(int(config.actor_rollout_ref.rollout.seed))
    PROMPT_UIDS.count_by(lambda: trainer.global_steps)


def watch_flags(tim: TimConfig, trainer: Any, step: int) -> None:
    """After each update: the trainer's workers are still in `tim.deterministic`, where it is on.

    Raises:
        DeterminismError: one is not.
    """
    from verl_tim.training.determinism_watch import check_flags

    if tim.deterministic:
        check_flags(worker_groups_of(trainer), step)


def record_run(tim: TimConfig, config: Any, roles: RunRoles, *, resumed_from: int | None) -> RunProcesses:
    """Read the manifest from the running processes; write it into the run folder, if any, and show it to trackers.

    verl hands every tracker the whole config at the start of training, so it goes in there, as `tim.manifest`.

    Args:
        resumed_from: step of the checkpoint that this run goes on from; None: from the beginning.

    Returns:
        The processes that were asked.

    Raises:
        DeterminismError: with `tim.deterministic`, a process does otherwise; the manifest, with all answers, is written
            first.
    """
    from verl_tim.training.determinism_watch import ask_processes, check_processes
    from verl_tim.training.manifest import run_manifest

    reports = {}
    if tim.deterministic:
        reports = ask_processes(config, roles.worker_groups, roles.server_managers, roles.agent_loops, roles.rewards)
    processes = RunProcesses.of(roles.actor, roles.server_managers)
    manifest = run_manifest(
        tim,
        config,
        roles.actor,
        roles.server_managers,
        processes=processes,
        resumed_from=resumed_from,
        deterministic={"processes": reports} if reports else None,
    )
    check_setup(tim.gate, manifest)
    if tim.run_dir is not None:
        folder = Path(tim.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        manifest.write(folder)
    if tim.deterministic:
        check_processes(config, reports)
    with open_dict(config):
        OmegaConf.update(config, "tim.manifest", manifest.to_dict(), force_add=True)
    say(ALL_ANSWER)
    return processes


def forget_later_steps(tim: TimConfig, step: int) -> None:
    """Remove token and batch dumps of steps after `step`, which a run that goes on from there does again.

    Metrics and samples of those steps stay in the files of their attempt, and readers leave them out.
    """
    folders = [(Path(tim.run_dir) / TOKENS_FOLDER, "step_*.parquet")] if tim.run_dir else []
    if tim.dump_dir is not None:
        folders += [(Path(tim.dump_dir), "step_*.pt"), (Path(tim.dump_dir), "update_*.pt")]
    for folder, pattern in folders:
        for path in folder.glob(pattern):
            number = path.stem.split("_")[1]
            if number.isdigit() and int(number) > step:
                path.unlink()
