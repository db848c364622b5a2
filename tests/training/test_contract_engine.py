"""Rollout and trainer agree bit for bit, in one process: verl's FSDP2 engine against a server's recorded log-probs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.training.sides import RolloutSide, TrainerSide, some_prompts
from verl_tim.diagnosis.gate import compare_bits
from verl_tim.training.config import ConfigError
from verl_tim.training.engine import ContractFSDPEngineWithLMHead
from verl_tim.training.pairing import card_with
from verl_tim.training.records import RECORD_METRIC, assemble, take


def bits(train: list[list[float]], rollout: list[list[float]]):
    flat = [torch.tensor(list(itertools.chain(*side)), dtype=torch.float32) for side in (train, rollout)]
    return compare_bits(*flat)


def test_the_weights_bring_the_card_of_what_the_manifest_names(folders, process_group):
    from verl_tim.training.describe import describe_engine

    trainer = TrainerSide(folders("qwen3"), param_dtype="bf16")
    weights, _ = trainer.engine.get_per_tensor_param()
    card = _run(card_with(weights))
    facts = describe_engine(trainer.engine)
    assert isinstance(facts["extra"]["dropped_schedules"], list)
    assert (card["process"], card["contract_id"]) == ("actor 0", facts["contract_id"])
    assert card["versions"].items() <= facts["versions"].items()
    assert next(name for name, _ in weights) == "model.embed_tokens.weight"


CASES = [
    # kind, param_dtype, packed, T, micro_batch, gradient checkpointing
    ("qwen3", "bf16", True, 1.0, 4, False),
    ("qwen3", "bf16", False, 0.6, 2, True),
    ("qwen3", "fp32", True, 1.3, 8, True),
    ("qwen3", "fp32", False, 1.0, 4, False),
    ("qwen3_moe", "bf16", True, 0.6, 2, False),
    ("qwen3_moe", "bf16", False, 1.3, 8, False),
    ("qwen3_moe", "fp32", True, 1.0, 4, True),
]


@pytest.mark.parametrize(("kind", "param_dtype", "packed", "temperature", "micro_batch", "checkpointing"), CASES)
def test_bits_agree_over_updates_and_preemption(
    folders, process_group, kind, param_dtype, packed, temperature, micro_batch, checkpointing
):
    folder = folders(kind)
    trainer = TrainerSide(
        folder,
        param_dtype=param_dtype,
        packed=packed,
        micro_batch=micro_batch,
        temperature=temperature,
        checkpointing=checkpointing,
    )
    assert type(trainer.engine) is ContractFSDPEngineWithLMHead
    # a pool for three sequences of the eight that want to run
    rollout = RolloutSide(
        folder, dtype={"bf16": "bfloat16", "fp32": "float32"}[param_dtype], page_size=4, kv_cache_tokens=128
    )
    tokens = 0
    checksums = set()
    try:
        for step in range(3):
            rollout.take_weights(trainer, version=step)
            checksums.add(_run(rollout.server.weight_checksum()))
            rows = rollout.draw(some_prompts(8, seed=step), seed=100 * step, temperature=temperature)
            assert {row.version for row in rows} == {step}
            forwards = trainer.engine.contract.forward_calls
            old = trainer.log_probs(rows)
            assert trainer.engine.contract.forward_calls == forwards + 8 // micro_batch, "the trainer did not recompute"
            report = bits(old, [row.log_probs for row in rows])
            assert report.passed, str(report)
            tokens += report.tokens
            advantages = [1.0 if number % 2 else -1.0 for number in range(8)]
            metrics = trainer.train(rows, old, advantages)
            records = take(metrics, RECORD_METRIC)
            seen = assemble(records, rows=8, width=max(len(row.response) for row in rows))
            assert bool(seen.seen_B.all())
            # the first mini-batch saw the rollout's weights, so its log-probs are the old ones, under autograd, too
            assert bool(seen.fresh_B.all())
            assert bits([seen.log_prob_BT[i, : len(r.response)].tolist() for i, r in enumerate(rows)], old).passed
            again = take(trainer.train(rows, old, advantages), RECORD_METRIC)
            assert not any(record.fresh for record in again), "weights moved, so these log-probs are not p_old"
        stats = _run(rollout.server.stats())
        assert stats["preemptions"] > 0
        assert stats["weight_updates"] == 3
        assert len(checksums) == 3, "the weights did not change"
        assert tokens > 300
    finally:
        rollout.close()


def _run(coroutine):
    from tests.training.sides import run

    return run(coroutine)


def test_tied_embeddings_agree(folders, process_group):
    folder = folders("qwen3", tied=True)
    trainer = TrainerSide(folder)
    rollout = RolloutSide(folder)
    try:
        rollout.take_weights(trainer, version=0)
        rows = rollout.draw(some_prompts(8), temperature=1.0)
        assert bits(trainer.log_probs(rows), [row.log_probs for row in rows]).passed
    finally:
        rollout.close()


@pytest.mark.parametrize("contract", [True, False], ids=["contract trainer", "stock trainer"])
def test_stock_rollout_mismatches(folders, process_group, contract):
    folder = folders("qwen3")
    trainer = TrainerSide(folder, contract=contract)
    rollout = RolloutSide(folder, name="stock")
    try:
        rollout.take_weights(trainer, version=0)
        rows = rollout.draw(some_prompts(8), temperature=1.0)
        report = bits(trainer.log_probs(rows), [row.log_probs for row in rows])
        assert report.differing > 0.5 * report.tokens
        assert 1e-4 < report.max_abs < 2.0
    finally:
        rollout.close()


def test_a_skipped_weight_update_is_seen(folders, process_group):
    folder = folders("qwen3")
    trainer = TrainerSide(folder)
    rollout = RolloutSide(folder)
    try:
        rollout.take_weights(trainer, version=0)
        rows = rollout.draw(some_prompts(8), temperature=1.0)
        trainer.train(rows, [row.log_probs for row in rows], [1.0, -1.0] * 4)
        rows = rollout.draw(some_prompts(8, seed=5), temperature=1.0)
        assert bits(trainer.log_probs(rows), [row.log_probs for row in rows]).differing > 0
    finally:
        rollout.close()


def test_reference_engine_runs_on_a_cpu_and_agrees(folders, process_group):
    """Forward only: verl asks for pinned CPU offloading there, which a CPU does not have."""
    folder = folders("qwen3")
    reference = TrainerSide(folder, forward_only=True)
    actor = TrainerSide(folder)
    rollout = RolloutSide(folder)
    try:
        rollout.take_weights(actor, version=0)
        rows = rollout.draw(some_prompts(4), temperature=1.0)
        assert bits(reference.log_probs(rows), [row.log_probs for row in rows]).passed
    finally:
        rollout.close()


@pytest.mark.parametrize(
    ("device", "vendor", "ours"),
    [("cuda", "nvidia", True), ("cuda", "amd", False), ("cpu", "cpu", True), ("npu", "huawei", False)],
)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_where_verl_finds_our_engine(folders, process_group, monkeypatch, device, vendor, ours, strategy):
    from verl.workers.engine.base import EngineRegistry

    TrainerSide(folders("qwen3"))  # imports the module named by external_lib
    monkeypatch.setenv("VERL_ENGINE_DEVICE", device)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    found = EngineRegistry.get_engine_cls("language_model", strategy)
    assert (found is ContractFSDPEngineWithLMHead) is ours


def test_stock_trainer_is_verls_own_path(folders, process_group):
    trainer = TrainerSide(folders("qwen3"), contract=False)
    assert trainer.engine.numerics == "stock"
    assert trainer.engine.contract is None
    assert "forward" not in vars(trainer.engine.module), "the model's forward was replaced"
    assert trainer.engine._autocast_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_fused_kernels": False}, "use_fused_kernels"),
        ({"fused_kernel_options": {"impl_backend": "nonsense"}}, "impl_backend"),
        ({"lora_rank": 8}, "lora_rank"),
        ({"use_liger": True}, "use_liger"),
        ({"tiled_mlp": {"enabled": True}}, "tiled_mlp"),
    ],
)
def test_what_would_bypass_the_contract_is_refused(folders, process_group, monkeypatch, changes, named):
    from tests.training import sides

    original = sides.HFModelConfig
    monkeypatch.setattr(sides, "HFModelConfig", lambda **kwargs: original(**{**kwargs, **changes}))
    with pytest.raises(ConfigError, match=named):
        TrainerSide(folders("qwen3"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"strategy": "fsdp"}, "strategy"),
        ({"ulysses_sequence_parallel_size": 2}, "actor.fsdp_config.ulysses_sequence_parallel_size=2"),
        ({"ulysses_sequence_parallel_size": 2, "forward_only": True}, "ref.fsdp_config.ulysses_sequence_parallel_size"),
        ({"mixed_precision": {"param_dtype": "fp16"}}, "param_dtype"),
        ({"pad_to_length": True}, "actor.fsdp_config.pad_to_length_bucket.*1023 tokens.*pad_to_length=false"),
        ({"pad_to_length": True, "forward_only": True}, "ref.fsdp_config.pad_to_length_bucket"),
    ],
)
def test_engine_settings_that_the_contract_cannot_hold_with(folders, process_group, monkeypatch, changes, named):
    from tests.training import sides

    original = sides.FSDPEngineConfig
    monkeypatch.setattr(sides, "FSDPEngineConfig", lambda **kwargs: original(**{**kwargs, **changes}))
    with pytest.raises(ConfigError, match=named):
        TrainerSide(folders("qwen3"))


def test_kernels_are_probed_where_the_engine_computes(monkeypatch):
    """verl's CPUOffloadPolicy (ref, fsdp_config.offload_policy) builds a module whose parameters are the host's."""
    import verl_tim.numerics.probe as probes
    import verl_tim.training.engine as engines

    probed = []
    monkeypatch.setattr(engines, "compute_device", lambda: torch.device("meta"))
    monkeypatch.setattr(probes, "probe", lambda device, *_, attention: probed.append((device.type, attention)))
    monkeypatch.setattr(engines.FSDPEngineWithLMHead, "_build_fsdp_module", lambda _, module: module)
    engine = object.__new__(engines.ContractFSDPEngineWithLMHead)
    engine.numerics, engine._replay_mode, engine._autocast_dtype = "contract", "off", torch.bfloat16
    engine.contract = SimpleNamespace(
        attention_on=lambda device: f"attention of {device.type}", config=SimpleNamespace(probe_shapes=())
    )
    engine._build_fsdp_module(torch.nn.Linear(1, 1))
    assert probed == [("meta", "attention of meta")]
