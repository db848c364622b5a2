"""Asks every process of a run with `tim.deterministic=true` what really holds in it, and stops the run if one differs.

Asked before the first step, and answered from the process itself by what torch and the interpreter say and by probes
(`verl_tim.numerics.determinism`); the variables a process sees stand beside them and are no proof.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray

from verl_tim.numerics import determinism
from verl_tim.rollout.seeds import response_seed
from verl_tim.training.config import ROLLOUTS
from verl_tim.training.determinism import SWITCH, variables_of
from verl_tim.training.processes import servers_of

DRIVER = "driver"
# Kinds of processes in which torch must refuse what it cannot repeat: those that compute gradients or advantages.
_STRICT = ("actor", "ref", "critic", DRIVER)
_PROBED_SEEDS = 8
_WORKSPACES = {":16:8": 8 * 16 * 1024, ":4096:8": 8 * 4096 * 1024}
"""Bytes that cuBLAS gets (NVIDIA, cuBLAS documentation, results reproducibility: `:SIZE:COUNT` in KiB)."""


class DeterminismError(RuntimeError):
    """A process does not do what `tim.deterministic` promises; names the process, what it was asked, and its answer."""


def ask_processes(
    config: Any,
    worker_groups: Mapping[str, Any],
    server_managers: Sequence[Any],
    agent_loops: Sequence[Any] = (),
    rewards: Sequence[Any] = (),
) -> dict[str, dict[str, Any]]:
    """The report of every process, by its name ("actor 0", "server 1", "agent loop 0", "reward 0", "driver").

    Args:
        worker_groups: verl's RayWorkerGroups by role; a process of several roles is asked once, under its first.
        server_managers: verl's LLMServerManagers.
        agent_loops, rewards: Ray handles of these workers.
    """
    names = tuple(variables_of(config))
    reports: dict[str, dict[str, Any]] = {}
    for role, workers in _once_each(worker_groups):
        found = _each(workers, _observe_trainer, names)
        # all at once, and only when every one of them has answered: a rank that is missing lets the others wait
        sums = _each(workers, _probe_collective)
        for rank, (report, collective) in enumerate(zip(found, sums, strict=True)):
            reports[f"{role} {rank}"] = {**report, "collective": collective}
    servers = servers_of(server_managers)
    if config.actor_rollout_ref.rollout.name in ROLLOUTS:
        answers = ray.get([server.observe.remote(names) for server in servers])
        reports |= {
            f"server {number}" + (f" rank {rank}" if rank else ""): report
            for number, ranks in enumerate(answers)
            for rank, report in enumerate(ranks)
        }
    else:
        reports |= _named("server", _each(servers, _observe_foreign_server, names))
    reports |= _named("agent loop", _each(agent_loops, _observe_agent_loop, names))
    reports |= _named("reward", _each(rewards, _observe_helper, names))
    reports[DRIVER] = determinism.observe("cpu", variables=names)
    return reports


def check_flags(worker_groups: Mapping[str, Any], step: int) -> None:
    """Raise `DeterminismError` if torch's flags are no longer on in a trainer worker: one may be set back later.

    A few milliseconds, so for every step.
    """
    found = [
        f"{role} {rank}: {flag} must be {value}, it is {flags.get(flag)}"
        for role, workers in _once_each(worker_groups)
        for rank, flags in enumerate(_each(workers, _flags))
        for flag, value in determinism.FLAGS_WHEN_ON.items()
        if flags.get(flag) != value
    ]
    if found:
        raise DeterminismError(f"{SWITCH}=true, and in step {step} a process left the mode: " + "; ".join(found))


def _once_each(worker_groups: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Role and its workers; a process of several roles under its first."""
    seen: set[Any] = set()
    for role, group in worker_groups.items():
        workers = [worker for worker in group.workers if worker._actor_id not in seen]
        seen.update(worker._actor_id for worker in workers)
        yield role, workers


def _each(workers: Sequence[Any], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return ray.get([worker.__ray_call__.remote(function, *arguments) for worker in workers])


def _named(kind: str, reports: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{kind} {number}": report for number, report in enumerate(reports)}


def check_processes(config: Any, reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `DeterminismError` with everything that a process does otherwise than the mode says, or than its peers."""
    found = disagreements(reports, variables=variables_of(config), seed=int(config.actor_rollout_ref.rollout.seed))
    if found:
        lines = "\n".join(f"  - {line}" for line in found)
        raise DeterminismError(
            f"{SWITCH}=true, and not every process of this run is deterministic:\n{lines}\n"
            "Something in these processes (a module in VERL_USE_EXTERNAL_MODULES or model.external_lib, a library, an "
            f"older Ray cluster's environment) undoes the mode: take it out, or set {SWITCH}=false"
        )


def disagreements(
    reports: Mapping[str, Mapping[str, Any]],
    *,
    variables: Mapping[str, str],
    seed: int,
    expected_hash: int | None = None,
) -> list[str]:
    """What is not as it should be, one line each: process, what was looked at, what must be, what is.

    Args:
        variables: as every process must see them.
        seed: `actor_rollout_ref.rollout.seed`.
        expected_hash: of `determinism.HASHED`; None: asked of a Python with this PYTHONHASHSEED.
    """
    if expected_hash is None:
        expected_hash = hash_under(variables["PYTHONHASHSEED"])
    found: list[str] = []
    for name, report in reports.items():
        found += [f"{name}: {line}" for line in _alone(_kind(name), report, variables, expected_hash)]
        if "seeds" in report:
            found += [f"{name}: {line}" for line in _seeds(report["seeds"], seed)]
    found += _peers(reports)
    return found


def _alone(kind: str, report: Mapping[str, Any], variables: Mapping[str, str], expected_hash: int) -> Iterator[str]:
    for name, value in variables.items():
        seen = report["variables"].get(name)
        if seen != value:
            yield f"{name} must be {value}, it is {'unset' if seen is None else seen}"
    if report["hash"] != expected_hash:
        yield (
            f"the hash of {determinism.HASHED!r} must be {expected_hash} (PYTHONHASHSEED="
            f"{variables['PYTHONHASHSEED']}), it is {report['hash']}: the variable was set after this Python started"
        )
    if kind in _STRICT:
        for flag, value in determinism.FLAGS_WHEN_ON.items():
            if report["flags"].get(flag) != value:
                yield f"{flag} must be {value}, it is {report['flags'].get(flag)}"
    for probe, what in report["unstable"].items():
        yield f"the probe {probe} must repeat its bits: {what}"
    for place, probability in report.get("dropout", {}).items():
        yield f"dropout of {place} must be 0, it is {probability}"
    for verb in report.get("collective", {}).get("unstable", ()):
        yield f"{verb} of the trainer's ranks must repeat its bits, and does not"
    workspace = report.get("blas_workspace")
    wanted = _WORKSPACES[variables["CUBLAS_WORKSPACE_CONFIG"]]
    if workspace is not None and workspace != wanted:
        yield (
            f"cuBLAS's workspace must be {wanted} bytes (CUBLAS_WORKSPACE_CONFIG="
            f"{variables['CUBLAS_WORKSPACE_CONFIG']}), it is {workspace}: cuBLAS read the variable before it was set"
        )
    if report.get("batch_invariant") is False:
        yield "vLLM's batch-invariant kernels must be on, and vLLM says that they are off"


def _seeds(seeds: Sequence[int], seed: int) -> Iterator[str]:
    if len(set(seeds)) < len(seeds):
        yield f"samples of one prompt must have seeds of their own, {len(seeds)} samples have {len(set(seeds))}"
    if list(seeds) != probe_seeds(seed):
        yield f"the seeds of samples must follow from actor_rollout_ref.rollout.seed={seed}, and do not"


def _peers(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Processes of one kind on one kind of device compute the same bits, with the same number of threads."""
    first: dict[Any, tuple[str, Mapping[str, Any]]] = {}
    for name, report in reports.items():
        peer, theirs = first.setdefault((_kind(name), report["device"]), (name, report))
        if peer == name:
            continue
        if report["threads"] != theirs["threads"]:
            yield f"{name}: torch has {report['threads']} threads, and {theirs['threads']} in {peer}"
            continue
        for probe, digest in report["digests"].items():
            if digest != theirs["digests"].get(probe):
                yield f"{name}: the probe {probe} gives {digest}, and {theirs['digests'].get(probe)} in {peer}"
        if report.get("graph_shapes") != theirs.get("graph_shapes"):
            yield f"{name}: graphs of {report.get('graph_shapes')} rows, and of {theirs.get('graph_shapes')} in {peer}"
        mine, its = (side.get("collective", {}).get("digest") for side in (report, theirs))
        if mine != its:
            yield f"{name}: an all-reduce gives {mine}, and {its} in {peer}"


def _kind(name: str) -> str:
    """The kind of a process, from its name."""
    return name.rstrip("0123456789 ").removesuffix(" rank").rstrip("0123456789 ")


def hash_under(seed: str) -> int:
    """Hash of `determinism.HASHED` in a Python that starts with this PYTHONHASHSEED."""
    answer = subprocess.run(
        [sys.executable, "-S", "-c", f"print(hash({determinism.HASHED!r}))"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(answer.stdout)


def probe_seeds(seed: int) -> list[int]:
    """Seeds that the samples of a prompt made up for the probe must have."""
    return [
        response_seed(seed, index=0, prompt=[], step=1, sample=sample, validate=False)
        for sample in range(_PROBED_SEEDS)
    ]


# ------------------------------------------------------------------------------------- run in the processes asked


def _observe_trainer(worker: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """In a trainer worker; verl may keep several roles in it, and several models."""
    models = dict(_models(worker))
    if not models:
        raise DeterminismError(f"{SWITCH}: no model was found in a trainer worker of verl, so none could be looked at")
    report = determinism.observe(_device(), variables=names, workspace=True)
    report["dropout"] = {
        f"{role}.{place}": probability
        for role, module in models.items()
        for place, probability in determinism.dropouts(module).items()
    }
    return report


def _models(worker: Any) -> Iterator[tuple[str, Any]]:
    """Name and module of every model of a worker."""
    roles = getattr(worker, "worker_dict", None) or {"": worker}
    for name, role in roles.items():
        parts = {part: getattr(role, part, None) for part in ("actor", "ref")}
        for part, holder in {**parts, name or "model": role}.items():
            engine = getattr(holder, "engine", None)
            modules = getattr(engine, "module", None)
            for number, module in enumerate(modules if isinstance(modules, list) else [modules]):
                if module is not None:
                    yield part + (f"[{number}]" if number else ""), module


def _device() -> Any:
    import torch
    from verl.plugin.platform import get_platform

    name = get_platform().device_name
    return torch.device(name) if name == "cpu" else torch.device(name, torch.cuda.current_device())


def _flags(_worker: Any) -> dict[str, Any]:
    return determinism.flags()


def _probe_collective(_worker: Any) -> dict[str, Any]:
    return determinism.collective(_device())


def _observe_helper(_worker: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return determinism.observe("cpu", variables=names, backward=False)


def _observe_agent_loop(worker: Any, names: tuple[str, ...]) -> dict[str, Any]:
    trajectory = {"sample_index": 0, "step": 1, "validate": False}
    params = [
        worker.with_seed({}, trajectory, sample=sample, prompt=[], record=False) for sample in range(_PROBED_SEEDS)
    ]
    return {**_observe_helper(worker, names), "seeds": [one["seed"] for one in params]}


def _observe_foreign_server(server: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """In a server of vLLM. Its engine computes in child processes, which inherit what it was started with and are not
    asked."""
    report = _observe_helper(server, names)
    report["batch_invariant"] = _vllm_is_batch_invariant()
    return report


def _vllm_is_batch_invariant() -> bool:
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)
