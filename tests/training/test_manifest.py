"""The manifest of a run, from processes that are not the config's."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import verl_tim.training.manifest as manifest_module
from tests.training.sides import RolloutSide, TrainerSide
from verl_tim.diagnosis.manifest import Manifest, ProcessFacts, flatten
from verl_tim.training.config import ConfigError, TimConfig
from verl_tim.training.describe import describe_engine
from verl_tim.training.manifest import run_manifest


def remote(result):
    return SimpleNamespace(remote=lambda *args: result() if callable(result) else result)


@pytest.fixture
def ask(folders, process_group, monkeypatch):
    """Asks a trainer and a server for the run's manifest; what is given replaces facts of the server."""
    monkeypatch.setattr(manifest_module.ray, "get", lambda refs: refs)
    trainer, rollout = TrainerSide(folders("qwen3_moe")), RolloutSide(folders("qwen3_moe"))
    worker = SimpleNamespace(
        worker_dict={"actor_rollout": SimpleNamespace(actor=SimpleNamespace(engine=trainer.engine))}
    )
    workers = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda function: function(worker)))]
    config = OmegaConf.create(
        {
            "tim": {
                "run_dir": "/runs/first",
                "choices": {"recipe": "cpu_grpo"},
                "task": {"name": "chain_sum"},
                "trainer_numerics": "contract",
            },
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": False, "rollout_is": "token"}},
            "actor_rollout_ref": {
                "actor": {"policy_loss": {"loss_mode": "vanilla"}},
                "rollout": {"name": "vexact", "seed": 42},
            },
            "trainer": {"experiment_name": "e"},
        }
    )

    def asked(**changes):
        server = SimpleNamespace(describe=remote(lambda: {**asyncio.run(rollout.server.describe()), **changes}))
        return run_manifest(
            TimConfig.of(config),
            config,
            SimpleNamespace(workers=workers),
            [SimpleNamespace(get_replicas=lambda: [SimpleNamespace(servers=[server])])],
        )

    yield asked
    rollout.close()


def test_sides_of_two_contracts_get_no_manifest(ask):
    with pytest.raises(ConfigError, match=r"server 0 keeps the contract fa3/other, .*fused_kernel_options\.attention"):
        ask(contract_id="fa3/other")


def test_both_sides_speak_for_themselves(ask, tmp_path):
    run = ask()
    assert (run.run.name, run.run.recipe, run.run.task, run.run.algorithm) == ("first", "cpu_grpo", "chain_sum", "grpo")
    assert (run.run.rollout, run.run.correction, run.old_log_probs) == ("vexact", "token_is", "recompute")
    trainer, rollout = run.trainer.facts, run.rollout.facts
    assert trainer.backend == "fsdp2"
    assert (trainer.param_dtype, trainer.compute_dtype, trainer.reduce_dtype) == ("float32", "bfloat16", "float32")
    assert (trainer.numerics, rollout.numerics) == ("contract", "contract")
    assert trainer.contract_id == rollout.contract_id
    assert trainer.moe_batch_invariant
    assert trainer.extra["contract_table"]["lm_head"]
    assert trainer.extra["contract_table"]["root"]
    # every key may become a parameter of MLflow, which takes these letters and no empty part
    for key in flatten(run.to_dict()):
        assert re.fullmatch(r"[\w.\- :]+(\.[\w.\- :]+)*", key), key
        assert not key.endswith("."), key
    assert run.parameters > 10_000
    assert Manifest.read(run.write(tmp_path)).to_dict() == run.to_dict()


def test_verls_own_engine_can_be_described_too(folders, process_group):
    stock = TrainerSide(folders("qwen3"), contract=False)
    facts = ProcessFacts.from_describe(describe_engine(stock.engine))
    assert (facts.numerics, facts.contract_id, facts.attention_backend) == ("stock", None, "sdpa")
    assert facts.head_dtype == facts.compute_dtype == "bfloat16"


def test_parameters_kept_elsewhere_between_turns_do_not_say_where_the_engine_computes(folders, process_group):
    """verl's param_offload leaves them in the host's memory; a GPU's trainer then named the contract of CPUs."""
    side = TrainerSide(folders("qwen3"))
    at_work = describe_engine(side.engine)
    side.engine.module.to("meta")
    away = describe_engine(side.engine)
    for key in ("contract_id", "device_type", "device", "attention_backend"):
        assert away[key] == at_work[key] is not None


def test_a_server_of_another_backend_is_described_from_verls_config_there():
    from hydra import compose, initialize_config_module

    from verl_tim.training.describe import describe_foreign_server

    with initialize_config_module("verl.trainer.config", version_base=None):
        rollout = compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm"]).actor_rollout_ref.rollout
    facts = ProcessFacts.from_describe(describe_foreign_server(SimpleNamespace(config=rollout), "vllm"))
    assert (facts.backend, facts.compute_dtype, facts.tensor_parallel, facts.prefix_cache) == (
        "vllm",
        "bfloat16",
        2,
        True,
    )
    assert facts.log_prob_mode == "processed_logprobs"
    assert facts.device is None
