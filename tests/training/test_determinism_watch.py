"""Answers of processes held against the mode: each planted disagreement is named with its process."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from verl_tim.numerics import determinism
from verl_tim.training import determinism_watch as watch
from verl_tim.training.determinism import VARIABLES

VALUES = {name: variable.value for name, variable in VARIABLES.items()}
HASH = 1234


def report(**changes):
    """Of a process as it should be."""
    return {
        "device": "cpu AVX2",
        "threads": 1,
        "flags": dict(determinism.FLAGS_WHEN_ON),
        "hash": HASH,
        "hash_randomization": False,
        "variables": dict(VALUES),
        "digests": {"gemm": "aa", "index_add": "bb"},
        "unstable": {},
        "blas_workspace": None,
        **changes,
    }


@pytest.fixture
def good():
    sums = {"backend": "gloo", "ranks": 2, "digest": "cc", "unstable": []}
    return {
        "actor 0": report(dropout={}, collective=dict(sums)),
        "actor 1": report(dropout={}, collective=dict(sums)),
        "server 0": report(flags={}, digests={"gemm": "aa"}),
        "server 0 rank 1": report(flags={}, digests={"gemm": "aa"}),
        "agent loop 0": report(flags={}, seeds=watch.probe_seeds(42)),
        "reward 0": report(flags={}),
        "driver": report(),
    }


def lines(reports, seed=42):
    return watch.disagreements(reports, variables=VALUES, seed=seed, expected_hash=HASH)


def test_processes_as_they_should_be_are_in_agreement(good):
    assert lines(good) == []


def change(reports, process, *path, value):
    node = reports[process]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


@pytest.mark.parametrize(
    ("process", "path", "value", "said"),
    [
        ("actor 1", ("flags", "deterministic_algorithms"), False, "deterministic_algorithms must be True, it is False"),
        ("actor 0", ("flags", "warn_only"), True, "warn_only must be False, it is True"),
        ("driver", ("flags", "fill_uninitialized_memory"), True, "fill_uninitialized_memory must be False"),
        ("actor 0", ("flags", "inductor_deterministic"), None, "inductor_deterministic must be True, it is None"),
        ("server 0 rank 1", ("variables", "NCCL_ALGO"), "Tree", "NCCL_ALGO must be Ring, it is Tree"),
        ("reward 0", ("variables", "PYTHONHASHSEED"), "1", "PYTHONHASHSEED must be 0, it is 1"),
        ("agent loop 0", ("hash",), 5, "it is 5: the variable was set after this Python started"),
        ("actor 1", ("unstable", "index_add"), "2 results in 3 runs", "index_add must repeat its bits: 2 results"),
        ("actor 0", ("dropout", "ref.layers.0"), 0.1, "dropout of ref.layers.0 must be 0, it is 0.1"),
        ("actor 1", ("collective", "unstable"), ["all_reduce"], "all_reduce of the trainer's ranks must repeat"),
        ("actor 1", ("collective", "digest"), "xx", "an all-reduce gives xx, and cc in actor 0"),
        ("actor 1", ("digests", "gemm"), "xx", "the probe gemm gives xx, and aa in actor 0"),
        ("server 0 rank 1", ("digests", "gemm"), "xx", "the probe gemm gives xx, and aa in server 0"),
        ("actor 1", ("threads",), 8, "torch has 8 threads, and 1 in actor 0"),
        ("actor 0", ("blas_workspace",), 33554432, "cuBLAS's workspace must be 131072 bytes"),
        ("agent loop 0", ("seeds",), [7] * 8, "samples of one prompt must have seeds of their own"),
        ("server 0", ("batch_invariant",), False, "vLLM's batch-invariant kernels must be on"),
    ],
)
def test_a_planted_disagreement_is_named_with_its_process(good, process, path, value, said):
    change(good, process, *path, value=value)
    found = lines(good)
    assert any(said in line for line in found), found
    assert all(line.startswith(f"{process}: ") for line in found), found


def test_graphs_of_other_shapes_are_named(good):
    for name, shapes in (("server 0", [1, 2]), ("server 0 rank 1", [1, 4])):
        good[name]["graph_shapes"] = shapes
    assert lines(good) == ["server 0 rank 1: graphs of [1, 4] rows, and of [1, 2] in server 0"]


class Workers:
    """Stands for a worker group of verl: a call runs here, at once."""

    def __init__(self, *names):
        self.workers = [
            SimpleNamespace(_actor_id=name, __ray_call__=SimpleNamespace(remote=lambda f, *a, n=name: f(n, *a)))
            for name in names
        ]


def test_a_process_that_leaves_the_mode_later_is_found_in_that_step(monkeypatch):
    monkeypatch.setattr(watch.ray, "get", lambda answers: answers)
    found = {"a": dict(determinism.FLAGS_WHEN_ON), "b": dict(determinism.FLAGS_WHEN_ON)}
    monkeypatch.setattr(watch, "_flags", lambda worker: found[worker])
    # the reference model lives in the actor's process
    groups = {"actor": Workers("a", "b"), "ref": Workers("a", "b")}
    watch.check_flags(groups, 3)
    found["b"]["deterministic_algorithms"] = False
    with pytest.raises(watch.DeterminismError) as caught:
        watch.check_flags(groups, 4)
    assert "in step 4 a process left the mode: actor 1: deterministic_algorithms must be True" in str(caught.value)
    assert "ref" not in str(caught.value)


def test_a_variable_that_did_not_arrive_is_unset(good):
    del good["server 0"]["variables"]["FLASH_ATTENTION_DETERMINISTIC"]
    assert lines(good) == ["server 0: FLASH_ATTENTION_DETERMINISTIC must be 1, it is unset"]


def test_seeds_of_another_run_are_not_this_runs(good):
    (line,) = lines(good, seed=43)
    assert line.startswith("agent loop 0: the seeds of samples must follow from actor_rollout_ref.rollout.seed=43")


def test_processes_on_other_devices_are_no_peers(good):
    change(good, "server 0 rank 1", "device", value="NVIDIA H200")
    change(good, "server 0 rank 1", "digests", "gemm", value="xx")
    assert lines(good) == []


def test_the_workspace_of_either_setting_is_known(good):
    change(good, "actor 0", "blas_workspace", value=131072)
    assert lines(good) == []


def test_the_run_stops_with_all_of_it(good):
    bad = copy.deepcopy(good)
    change(bad, "actor 1", "flags", "deterministic_algorithms", value=False)
    change(bad, "driver", "variables", "NCCL_ALGO", value="Tree")
    for reports in (good, bad):
        for one in reports.values():
            one["hash"] = watch.hash_under("0")

    from omegaconf import OmegaConf

    config = OmegaConf.create({"tim": {"deterministic": True}, "actor_rollout_ref": {"rollout": {"seed": 42}}})
    watch.check_processes(config, good)
    with pytest.raises(watch.DeterminismError) as caught:
        watch.check_processes(config, bad)
    text = str(caught.value)
    assert "actor 1: deterministic_algorithms must be True" in text
    assert "driver: NCCL_ALGO must be Ring, it is Tree" in text
    assert "tim.deterministic=false" in text


def test_the_hash_of_a_python_with_that_seed_is_computed_and_differs_by_seed():
    assert watch.hash_under("0") == watch.hash_under("0")
    assert watch.hash_under("0") != watch.hash_under("1")


def test_a_worker_reports_the_dropouts_of_all_its_models(monkeypatch):
    monkeypatch.setattr(watch, "_device", lambda: torch.device("cpu"))

    def engine(p):
        return SimpleNamespace(engine=SimpleNamespace(module=torch.nn.Sequential(torch.nn.Dropout(p))))

    actor_and_ref = SimpleNamespace(actor=engine(0.0), ref=engine(0.2))
    critic = engine(0.3)
    alone = watch._observe_trainer(actor_and_ref, ())
    assert alone["dropout"] == {"ref.0": 0.2}
    together = SimpleNamespace(worker_dict={"actor_rollout_ref": actor_and_ref, "critic": critic})
    assert watch._observe_trainer(together, ())["dropout"] == {"ref.0": 0.2, "critic.0": 0.3}


def test_an_agent_loop_reports_the_seeds_it_would_give(monkeypatch):
    from verl_tim.rollout.agent_loop import SeededResponses

    class Worker(SeededResponses):
        rollout = SimpleNamespace(name="vexact", seed=42)
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))

    assert watch._observe_agent_loop(Worker(), ())["seeds"] == watch.probe_seeds(42)
