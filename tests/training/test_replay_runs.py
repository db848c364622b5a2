"""Real GRPO runs of a small mixture of experts on this machine's CPU with routing replay, in verl's two trainers."""

from __future__ import annotations

import json

import pytest

from tests.training.verl_run import CONTRACT, run_verl
from verl_tim.training.accelerator import host_has_accelerator

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU"),
]
slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive

MODE = "+actor_rollout_ref.actor.fsdp_config.router_replay.mode"
R2 = (f"{MODE}=R2",)
R3 = (f"{MODE}=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=true")
LEGACY = ("trainer.use_v1=false",)
CHECKPOINTING = ("actor_rollout_ref.model.enable_gradient_checkpointing=true",)
DYNAMIC = (
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=256",
)
FLOAT32 = (
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
)
POOL = "{page_size: 8, kv_cache_tokens: 176, enable_prefix_cache: true}"  # small enough to preempt


def assert_replayed(run, mode, steps=2):
    assert run.returncode == 0, run.output[-4000:]
    assert run.manifest()["routing_replay"] == mode
    assert len(run.series("tim/replay_pairs")) == steps
    assert all(pairs > 1000 for pairs in run.series("tim/replay_pairs"))
    for name in ("flip_rate_after", "order_mismatch_after", "expert_mismatch_after"):
        assert run.series(f"tim/replay_{name}") == [0.0] * steps
    assert all(rate < 0.5 for rate in run.series("tim/replay_flip_rate_before")), "routes of other tokens"
    assert all(norm > 0 for norm in run.series("actor/grad_norm")), "the weights did not move"


RUNS = {
    # trainer, ranks: marks, overrides
    "V1, stock rollout": (
        slow,
        1,
        (*CHECKPOINTING, *DYNAMIC, *FLOAT32, f"+actor_rollout_ref.rollout.engine_kwargs.stock={POOL}"),
    ),
    "V1, two ranks, padded": (exhaustive, 2, ("actor_rollout_ref.model.use_remove_padding=false",)),
    "legacy": (exhaustive, 1, (*LEGACY, *CHECKPOINTING)),
    "colocated, asynchronous": (exhaustive, 1, ("trainer.v1.trainer_mode=colocate_async",)),
}


FLIPPING = {"V1, stock rollout"}  # a trainer in float32 against a rollout in bfloat16


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, (marks, _, _) in RUNS.items()])
def test_r3(folders, data, tmp_path, name):
    _, ranks, overrides = RUNS[name]
    run = run_verl(
        tmp_path / "run", folders("qwen3_moe"), data, *R3, *overrides, rollout="stock", ranks=ranks, steps=2
    )  # fmt: skip
    assert_replayed(run, "r3")
    if name in FLIPPING:
        assert all(rate > 0 for rate in run.series("tim/replay_flip_rate_before")), "no route differs"
    assert all(found > 0 for found in run.series("tim/replay_probed_tokens"))
    assert all(found > 0 for found in run.series("tim/replay_live_pairs")), "the last tokens have no route"
    assert all(found > 0 for found in run.series("tim/delta_abs_mean")), "log-probs differ still"


@exhaustive
@pytest.mark.parametrize("trainer", ["V1", "legacy"])
def test_r2(folders, data, tmp_path, trainer):
    overrides = (*R2, *CHECKPOINTING, *DYNAMIC, *(LEGACY if trainer == "legacy" else ()))
    run = run_verl(tmp_path / "run", folders("qwen3_moe"), data, *overrides, rollout="stock", steps=2)
    assert_replayed(run, "r2")
    assert all(held > 0 for held in run.series("tim/replay_host_mb"))


@exhaustive
def test_off(folders, data, tmp_path):
    run = run_verl(tmp_path / "run", folders("qwen3_moe"), data, rollout="stock", steps=2)
    assert run.returncode == 0, run.output[-4000:]
    assert run.manifest()["routing_replay"] is None
    assert not [name for name in run.steps[1] if "replay" in name]


@exhaustive
def test_with_vexact_no_bit_changes(folders, data, tmp_path):
    """The gate: two runs that repeat themselves and differ in replay alone have equal losses, gradients and rewards.

    With one optimiser step per batch: in a second one the weights have moved, and routers without replay with them.
    """
    made = {}
    for mode, replay in (("off", ()), ("r3", R3)):
        overrides = (
            "+tim.deterministic=true",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            *CONTRACT,
            *CHECKPOINTING,
            *replay,
            f"+actor_rollout_ref.rollout.engine_kwargs.vexact={POOL}",
        )
        made[mode] = run_verl(tmp_path / mode, folders("qwen3_moe"), data, *overrides, steps=2)
    assert_replayed(made["r3"], "r3")
    for run in made.values():
        assert run.returncode == 0, run.output[-4000:]
        assert run.series("tim/exact_fraction") == [1.0] * 2
    for when in ("before", "policy"):
        assert made["r3"].series(f"tim/replay_flip_rate_{when}") == [0.0] * 2
    for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "tim/train_nll_mean", "actor/entropy"):
        series = [json.dumps(run.series(name)) for run in made.values()]
        assert series[0] == series[1], name
    assert made["off"].series("actor/grad_norm")


@exhaustive
def test_routes_that_are_refused_end_the_run(folders, data, tmp_path):
    """A server that loses a position: the run stops and names sample, layer and position."""
    plant = """
from verl_tim.rollout import server

original = server.EngineServer.generate

async def generate(self, *args, **kwargs):
    output = await original(self, *args, **kwargs)
    if output.routed_experts is not None:
        routes = output.routed_experts.copy()
        routes[2, 1] = -1
        output.routed_experts = routes
    return output

server.EngineServer.generate = generate
"""
    run = run_verl(
        tmp_path / "run", folders("qwen3_moe"), data, *R3, rollout="stock", steps=2, modules={"losing_routes": plant}
    )
    assert run.returncode != 0
    assert "the rollout's routes cannot be used: sample " in run.output
    assert "layer 1, position 2: a hole" in run.output
