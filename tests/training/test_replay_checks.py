"""Routing replay is refused wherever it would not take effect, in a config of this package and in a plain verl one."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from verl_tim.replay import ReplayError
from verl_tim.training.config import uses_verl_tim
from verl_tim.training.replay_checks import replay_findings
from verl_tim.training.replay_config import REPLAY_KEY, ROUTES_KEY, mode_of_engine
from verl_tim.training.start_checks import findings

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
GROUP = REPLAY_KEY.removesuffix(".mode")
AGENT = f"{ROLLOUT}.agent.agent_loop_manager_class"


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    (folder / "config.json").write_text(json.dumps({"num_experts": 8}))
    return str(folder)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    (folder / "config.json").write_text(json.dumps({"num_experts": 0, "hidden_size": 8}))
    return str(folder)


def config(moe, mode="R3", **changes):
    made = OmegaConf.create()
    good = {
        f"{ACTOR}.strategy": "fsdp2",
        REPLAY_KEY: mode,
        ROUTES_KEY: mode == "R3",
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.prompt_length": 8,
        f"{ROLLOUT}.response_length": 8,
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ROLLOUT}.seed": 0,
        f"{ROLLOUT}.max_num_seqs": 8,
        f"{ROLLOUT}.max_num_batched_tokens": 64,
        AGENT: "verl_tim.rollout.agent_loop.SeededAgentLoopManager",
        f"{MODEL}.external_lib": "verl_tim.training.external",
        f"{MODEL}.path": moe,
        "algorithm.rollout_correction.bypass_mode": False,
    }
    for key, value in {**good, **changes}.items():
        OmegaConf.update(made, key, value, force_add=True)
    return made


def keys(given, *, cpu_only=False):
    return [finding.key for finding in replay_findings(given, cpu_only=cpu_only)]


def test_vllm_returns_no_routes_on_a_cpu(moe):
    """Its engine would die at its start; R2 needs none of the rollout's."""
    (found,) = replay_findings(config(moe), cpu_only=True)
    assert found.key == f"{ROLLOUT}.name"
    assert "die at its start" in found.problem
    assert "routing_replay=r2" in found.remedy
    assert keys(config(moe)) == []
    assert keys(config(moe, "R2"), cpu_only=True) == []


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_what_is_whole_is_taken(moe, mode):
    assert keys(config(moe, mode)) == []
    assert keys(config(moe, mode, **{f"{ROLLOUT}.name": "stock"}), cpu_only=True) == []
    exact = {f"{ROLLOUT}.name": "vexact", f"{MODEL}.fused_kernel_options.impl_backend": "contract"}
    assert keys(config(moe, mode, **exact)) == []


def test_off_and_other_trainers_are_left_alone(moe, dense):
    assert keys(config(moe, "disabled", **{f"{MODEL}.path": dense})) == []
    megatron = {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.router_replay.mode": "R3", ROUTES_KEY: True}
    assert keys(config(moe, "disabled", **megatron, **{AGENT: None})) == []


REFUSED = [
    ("R3", {f"{ACTOR}.strategy": "fsdp"}, f"{ACTOR}.strategy"),
    ("R3", {f"{ACTOR}.strategy": "megatron"}, REPLAY_KEY),
    ("R2", {f"{MODEL}.external_lib": None}, f"{MODEL}.external_lib"),
    ("R3", {ROUTES_KEY: False}, REPLAY_KEY),
    ("R2", {ROUTES_KEY: True}, ROUTES_KEY),
    ("disabled", {ROUTES_KEY: True}, ROUTES_KEY),
    ("R4", {}, REPLAY_KEY),
    ("disabled", {GROUP: "R3"}, REPLAY_KEY),
    (False, {}, REPLAY_KEY),  # YAML's off
    ("disabled", {f"{ACTOR}.megatron.router_replay.mode": "R3"}, f"{ACTOR}.megatron.router_replay.mode"),
    ("R2", {f"{ACTOR}.router_replay.mode": "R2"}, f"{ACTOR}.router_replay.mode"),
    (
        "R3",
        {"actor_rollout_ref.ref.fsdp_config.router_replay.mode": "R3"},
        "actor_rollout_ref.ref.fsdp_config.router_replay.mode",
    ),
    ("R2", {"algorithm.rollout_correction.bypass_mode": True}, "algorithm.rollout_correction.bypass_mode"),
    ("R3", {AGENT: None}, AGENT),
    ("R3", {f"{ROLLOUT}.name": "sglang"}, f"{ROLLOUT}.name"),
    (  # on a GPU
        "R3",
        {f"{ROLLOUT}.name": "vexact", f"{ROLLOUT}.pipeline_model_parallel_size": 2},
        f"{ROLLOUT}.pipeline_model_parallel_size",
    ),
    ("R3", {f"{ACTOR}.ulysses_sequence_parallel_size": 2}, f"{ACTOR}.ulysses_sequence_parallel_size"),
    ("R2", {f"{MODEL}.enable_activation_offload": True}, f"{MODEL}.enable_activation_offload"),
    ("R2", {f"{GROUP}.record_file": "routes.pt"}, f"{GROUP}.record_file"),
    ("R3", {f"{GROUP}.replay_file": "routes.pt"}, f"{GROUP}.replay_file"),
]


@pytest.mark.parametrize(("mode", "changes", "key"), REFUSED)
def test_what_would_not_take_effect_is_refused(moe, monkeypatch, mode, changes, key):
    monkeypatch.setattr("verl_tim.training.accelerator.host_has_accelerator", lambda: True)
    given = config(moe, mode, **changes)
    assert keys(given) == [key]
    # as start-up checks do, of a config without a `tim` group, too
    assert uses_verl_tim(given)
    assert key in [finding.key for finding in findings(given)]


def test_a_dense_model(moe, dense):
    assert keys(config(moe, **{f"{MODEL}.path": dense})) == [f"{MODEL}.path"]


def test_r3_with_bypass_is_taken(moe):
    assert keys(config(moe, "R3", **{"algorithm.rollout_correction.bypass_mode": True})) == []


def test_the_workers_mode():
    from verl.workers.config import EngineRouterReplayConfig, FSDPEngineConfig

    assert mode_of_engine(FSDPEngineConfig(strategy="fsdp2")) == "off"
    assert mode_of_engine(FSDPEngineConfig(strategy="fsdp2", router_replay=EngineRouterReplayConfig(mode="R2"))) == "r2"
    # a YAML without _target_ arrives as it is
    plain = OmegaConf.create({"router_replay": {"mode": "R3"}})
    assert mode_of_engine(plain) == "r3"
    with pytest.raises(ReplayError, match=r"router_replay\.mode=R3, without \.mode: choose disabled, R2, R3"):
        mode_of_engine(FSDPEngineConfig(strategy="fsdp2", router_replay="R3"))
    with pytest.raises(ReplayError, match=r"router_replay\.mode=r3: choose disabled, R2, R3"):
        mode_of_engine(OmegaConf.create({"router_replay": {"mode": "r3"}}))
