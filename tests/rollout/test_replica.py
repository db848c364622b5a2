"""verl's registries know the rollouts, and a replica refuses what it cannot do before anything starts."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, get_rollout_replica_class

from verl_tim.rollout.adapter import ServerAdapter
from verl_tim.rollout.replica import StockReplica, VexactReplica, server_name
from verl_tim.training.config import ConfigError
from verl_tim.training.pairing import IdentifiedWeights


@pytest.fixture(scope="module")
def verl_config():
    with initialize_config_module("verl.trainer.config", version_base=None):
        yield lambda *overrides: compose("ppo_trainer", overrides=list(overrides))


def rollout(verl_config, *overrides):
    settings = {"name": "vexact", "tensor_model_parallel_size": 1, "prompt_length": 16, "response_length": 16}
    given = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in settings.items()]
    return verl_config(*given, *overrides).actor_rollout_ref.rollout


def test_registered():
    assert get_rollout_replica_class("vexact") is VexactReplica
    assert get_rollout_replica_class("stock") is StockReplica
    assert get_rollout_class("vexact") is get_rollout_class("stock") is ServerAdapter


def test_the_replica_is_verls_with_every_call(verl_config):
    replica = VexactReplica(3, rollout(verl_config), None, gpus_per_node=1, name_suffix="x")
    assert isinstance(replica, RolloutReplica)
    assert replica.world_size == 1
    assert replica.max_concurrency >= 1000
    for name, member in inspect.getmembers(RolloutReplica, inspect.iscoroutinefunction):
        assert inspect.iscoroutinefunction(getattr(replica, name)), name
        ours = inspect.signature(getattr(VexactReplica, name))
        for parameter in inspect.signature(member).parameters:
            assert parameter in ours.parameters or any(p.kind is p.VAR_KEYWORD for p in ours.parameters.values()), (
                name,
                parameter,
            )


DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


@pytest.mark.parametrize(
    ("kind", "key"),
    [(VexactReplica, "data_parallel_size"), *[(StockReplica, key) for key in (*DEGREES, "data_parallel_size")]],
)
def test_what_a_replica_has_not_is_refused_by_key(verl_config, kind, key):
    name = {VexactReplica: "vexact", StockReplica: "stock"}[kind]
    overrides = [f"actor_rollout_ref.rollout.name={name}", f"actor_rollout_ref.rollout.{key}=2"]
    with pytest.raises(ConfigError, match=f"rollout.{key}=2"):
        kind(0, rollout(verl_config, *overrides), None)


def test_a_replica_of_several_ranks_lives_on_one_node(verl_config):
    split = rollout(verl_config, *[f"actor_rollout_ref.rollout.{key}=4" for key in DEGREES])
    assert VexactReplica(0, split, None, gpus_per_node=16).world_size == 16
    with pytest.raises(ConfigError, match="is 16 ranks, and a node has 8 devices"):
        VexactReplica(0, split, None, gpus_per_node=8)


def test_names_are_unique():
    names = {
        server_name("vexact", rank, role=role, suffix=suffix)
        for rank in range(3)
        for role in ("", "reward", "teacher")
        for suffix in ("", "_x")
    }
    assert len(names) == 18


ALONE = "alone nobody answers its requests meanwhile"


@pytest.mark.parametrize(
    ("given", "kind", "restarts", "never"),
    [
        (["n_gpus_per_node=2", "nnodes=1"], {}, 3, ""),
        (["n_gpus_per_node=1", "nnodes=2"], {}, 3, ""),
        (["n_gpus_per_node=2", "nnodes=1", "+engine_kwargs.vexact.max_restarts=0"], {}, 0, ""),
        (["n_gpus_per_node=2", "nnodes=1", "+engine_kwargs.vexact.max_restarts=7"], {}, 7, ""),
        (["n_gpus_per_node=1", "nnodes=1"], {}, 0, ALONE),
        (["n_gpus_per_node=2", "nnodes=1", "tensor_model_parallel_size=2"], {}, 0, ALONE),
        (["n_gpus_per_node=2", "nnodes=1"], {"is_reward_model": True}, 0, "a reward model is sent no weights again"),
        (["n_gpus_per_node=2", "nnodes=1"], {"is_teacher_model": True}, 0, "a teacher is sent no weights again"),
    ],
)
def test_one_of_several_replicas_is_started_again(verl_config, folder, given, kind, restarts, never):
    settings = rollout(verl_config, *[f"{'+' * (w[0] == '+')}actor_rollout_ref.rollout.{w.lstrip('+')}" for w in given])
    replica = VexactReplica(0, settings, OmegaConf.create({"path": folder}), **kind)
    replica.rollout_mode = RolloutMode.STANDALONE
    assert replica._options().max_restarts == restarts
    assert replica._never_again() == never


@pytest.mark.asyncio
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_hybrid_replica_counts_its_peers_by_the_trainers_ranks(verl_config, folder, ranks, monkeypatch):
    async def launched(self):
        pass

    monkeypatch.setattr(VexactReplica, "launch_servers", launched)
    replica = VexactReplica(0, rollout(verl_config), OmegaConf.create({"path": folder}))
    await replica.init_hybrid(SimpleNamespace(workers=["worker"] * ranks))
    assert replica.workers == ["worker"]
    assert replica._options().max_restarts == (3 if ranks > 1 else 0)


async def _drain(stream, pulled):
    for item in stream:
        pulled.append(item)


@pytest.mark.asyncio
async def test_the_adapter_refuses_what_no_server_takes(verl_config, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    adapter = ServerAdapter(rollout(verl_config), {"_target_": "builtins.dict"}, None)
    assert (adapter.replica_rank, adapter.is_leader_rank) == (2, True)
    assert ServerAdapter(rollout(verl_config), {"_target_": "builtins.dict"}, None, replica_rank=5).replica_rank == 5
    split = rollout(verl_config, *[f"actor_rollout_ref.rollout.{key}=2" for key in DEGREES])
    monkeypatch.setenv("RANK", "6")
    member = ServerAdapter(split, {"_target_": "builtins.dict"}, None)
    assert (member.replica_rank, member.rollout_rank, member.is_leader_rank) == (1, 2, False)
    with pytest.raises(NotImplementedError, match="delta_sharded"):
        await adapter.update_weights(iter(()), wire_format="delta_flush")
    with pytest.raises(NotImplementedError, match="LoRA"):
        await adapter.update_weights(iter(()), peft_config={"r": 8})


class _Call:
    def __init__(self, function):
        self.remote = function


class _RefusingServer:
    """A server's actor handle: refuses every card."""

    def __init__(self):
        self.abandoned: list[str] = []
        self.cards: list[object] = []
        self.begin_weights, self.abandon_weights = _Call(self._begin), _Call(self._abandon)

    async def _begin(self, global_steps, rank, identity, *, trainer):
        self.cards.append(trainer)
        raise ConfigError("rollout server 0 has torch 2.0.0")

    async def _abandon(self, reason):
        self.abandoned.append(reason)


@pytest.mark.asyncio
async def test_a_refused_update_is_given_up_and_its_stream_pulled_for_the_other_ranks(verl_config):
    adapter = ServerAdapter(rollout(verl_config), {"_target_": "builtins.dict"}, None)
    adapter._server = server = _RefusingServer()
    card = {"process": "actor 0", "contract_id": "x", "versions": {}}
    pulled = []

    def stream():
        for name in ("a", "b"):
            pulled.append(name)
            yield name, None

    with pytest.raises(ConfigError, match=r"torch 2\.0\.0"):
        await adapter.update_weights(IdentifiedWeights(stream(), card), global_steps=3)
    assert server.cards == [card]
    assert pulled == ["a", "b"]
    assert len(server.abandoned) == 1
    assert "could not begin: ConfigError" in server.abandoned[0]
