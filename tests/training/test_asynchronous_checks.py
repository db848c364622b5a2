"""What verl's asynchronous trainers can start with."""

from __future__ import annotations

import importlib.util

import pytest

from verl_tim.training.asynchronous_checks import GLOO_MODULE, asynchronous_findings, standalone_ranks, trainer_mode

ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
SEPARATE = {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.parameter_sync_step": 2,
    "data.train_batch_size": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 3,
    f"{ENGINE}.backend": "gloo",
    f"{ENGINE}.custom_backend_module": GLOO_MODULE,
}
COLOCATED = {"trainer.v1.trainer_mode": "colocate_async"}


def found(settings, *, cpu_only=True, ours=True):
    return list(
        asynchronous_findings(lambda key, default=None: settings.get(key, default), cpu_only=cpu_only, ours=ours)
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"trainer.use_v1": False, "trainer.v1.trainer_mode": "separate_async"},
        COLOCATED,
        {**COLOCATED, "tim.partial_rollout.max_version_lag": 0},
        SEPARATE,
    ],
)
def test_what_may_start(settings):
    assert found(settings) == []


@pytest.mark.parametrize(
    ("base", "changes", "key", "says"),
    [
        ({}, {"trainer.v1.trainer_mode": "async"}, "trainer.v1.trainer_mode", "no trainer async"),
        ({}, {"tim.partial_rollout.max_version_lag": 2}, "tim.partial_rollout.max_version_lag", "no effect"),
        (SEPARATE, {f"{ENGINE}.backend": "naive"}, f"{ENGINE}.backend", "inside one process"),
        (SEPARATE, {f"{ENGINE}.backend": "nccl", f"{ENGINE}.custom_backend_module": None},
         f"{ENGINE}.backend", "needs an accelerator"),
        (SEPARATE, {f"{ENGINE}.backend": "delta_sharded"}, f"{ENGINE}.backend", "full tensors only"),
        (SEPARATE, {f"{ENGINE}.custom_backend_module": None}, f"{ENGINE}.custom_backend_module", "no backend gloo"),
        (SEPARATE, {"actor_rollout_ref.rollout.nnodes": 0}, "actor_rollout_ref.rollout.nnodes", "GPUs of its own"),
        (SEPARATE, {"data.train_batch_size": 16}, "data.train_batch_size", "2 mini-batches of 4"),
        (SEPARATE, {"algorithm.rollout_correction.old_forward": True},
         "algorithm.rollout_correction.old_forward", "part of it by then"),
    ],
)  # fmt: skip
def test_what_is_refused(base, changes, key, says):
    findings = found({**base, **changes})
    assert [finding.key for finding in findings] == [key]
    assert says in findings[0].problem
    assert findings[0].remedy


@pytest.mark.parametrize("cupy", [True, False])
def test_on_a_gpu_verls_own_engines_do_where_they_have_what_they_need(monkeypatch, cupy):
    nccl = {**SEPARATE, f"{ENGINE}.backend": "nccl", f"{ENGINE}.custom_backend_module": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if cupy and name == "cupy" else None)
    findings = found(nccl, cpu_only=False)
    assert [finding.key for finding in findings] == ([] if cupy else [f"{ENGINE}.backend"])
    assert all("pip install cupy" in finding.remedy for finding in findings)
    assert (
        found({**SEPARATE, f"{ENGINE}.backend": "nccl", f"{ENGINE}.custom_backend_module": "mine"}, cpu_only=False)
        == []
    )
    assert "nccl" in found({**SEPARATE, f"{ENGINE}.backend": "naive"}, cpu_only=False)[0].remedy


def test_servers_apart_take_slots_of_their_own():
    assert standalone_ranks(lambda key, default=None: SEPARATE.get(key, default)) == 3
    assert standalone_ranks(lambda key, default=None: COLOCATED.get(key, default)) == 0
    legacy = {**SEPARATE, "trainer.use_v1": False}
    assert trainer_mode(lambda key, default=None: legacy.get(key, default)) == "sync"
