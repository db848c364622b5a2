"""Real runs of verl with vLLM's build for CPUs: weights arrive at every update, and corrections act on what it drew.

All runs share one process and one Ray cluster. A trainer whose new weights do not reach vLLM, or reach it in another
order than its kernels read, shows as a mismatch of many nats from the second step on.
"""

from __future__ import annotations

import pytest
import torch

from tests.training.dumped_updates import mini_batches, size_of_terms
from tests.training.tiny import model_folder, parquet
from tests.training.verl_run import CONTRACT, overrides_of, run_together
from verl_tim.correction import policy_loss
from verl_tim.rollout.vllm_cpu import installed, is_cpu_build
from verl_tim.training.accelerator import host_has_accelerator
from verl_tim.training.correction_config import of_mapping

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU"),
    pytest.mark.skipif(installed() is None, reason="vLLM is not installed"),
    pytest.mark.skipif(installed() is not None and not is_cpu_build(), reason="vLLM is not built for CPUs"),
]

STEPS = 3
ROLLOUT = "actor_rollout_ref.rollout"
RC = "algorithm.rollout_correction"
# what cluster=cpu and rollout=vllm set
COMMON = (
    *CONTRACT,
    f"{ROLLOUT}.calculate_log_probs=true",
    f"{ROLLOUT}.logprobs_mode=processed_logprobs",
    f"{ROLLOUT}.enforce_eager=true",
    f"+{ROLLOUT}.enable_sleep_mode=false",
    f"+{ROLLOUT}.engine_kwargs.vllm={{kv_cache_memory_bytes: 268435456}}",
    f"{ROLLOUT}.max_model_len=128",
    "+tim.dump={every: 1}",
)
RUNS = {
    "token_tis": ("qwen3", (f"++{RC}.preset=token_tis",)),
    "bypass": ("qwen3", (f"++{RC}.preset=bypass_ppo", "trainer.use_v1=false")),
    # one tensor is embedding and head, as in most small models
    "tied": ("tied", ()),
    "moe": ("qwen3_moe", ("+actor_rollout_ref.actor.fsdp_config.router_replay.mode=R2",)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("together"), tmp_path_factory.mktemp("data")
    parquet(data / "train.parquet", 64)
    parquet(data / "val.parquet", 8, split="test", seed=1)
    models = {
        kind: str(model_folder(tmp_path_factory.mktemp(kind), kind, head_dim=32))  # the smallest that vLLM has on a CPU
        for kind in ("qwen3", "qwen3_moe")
    }
    models["tied"] = str(model_folder(tmp_path_factory.mktemp("tied"), head_dim=32, tied=True))
    overrides = {
        name: [
            *overrides_of(folder / name, models[kind], data, rollout="vllm", steps=STEPS),
            *COMMON,
            *more,
        ]
        for name, (kind, more) in RUNS.items()
    }
    return run_together(folder, overrides)


def dumped(run, step):
    return (torch.load(run.folder / f"dumps/{kind}_{step:06d}.pt", weights_only=True) for kind in ("step", "update"))


@pytest.mark.parametrize("name", RUNS)
def test_new_weights_reach_vllm(runs, name):
    run = runs[name]
    assert run.returncode == 0, run.output[-4000:]
    assert run.manifest()["rollout"]["facts"]["backend"] == "vllm"
    assert all(norm > 0 for norm in run.series("actor/grad_norm"))
    assert run.series("tim/missing_tokens") == [0.0] * STEPS
    assert run.series("tim/staleness_max") == [0.0] * STEPS
    largest = run.series("tim/delta_abs_max")
    assert len(largest) == STEPS
    assert min(largest) > 0, "not one bit of mismatch: was this vLLM?"
    assert max(largest) < 1.0, largest
    assert all(tokens > 0 for tokens in run.series("tim/top1_tokens"))


def loss_of(config, batch, part):
    loss, metrics = policy_loss(
        config,
        log_prob=torch.cat(part.log_prob),
        old_log_probs=None if config.bypass_mode else batch["old_log_probs"][part.rows],
        rollout_log_probs=batch["rollout_log_probs"][part.rows],
        advantages=batch["advantages"][part.rows],
        response_mask=batch["response_mask"][part.rows],
        loss_agg_mode="token-mean",
    )
    return float(loss), metrics


@pytest.mark.parametrize("name", ["token_tis", "bypass"])
def test_the_correction_is_in_the_loss(runs, name):
    """The worker's loss is the correction's of what vLLM drew, and not the one without it."""
    run = runs[name]
    assert run.returncode == 0, run.output[-4000:]
    config = of_mapping({"preset": "token_tis" if name == "token_tis" else "bypass_ppo"}, "vanilla")
    differing = 0
    for step in range(1, STEPS + 1):
        batch, update = dumped(run, step)
        parts = mini_batches(update, batch["response_mask"].shape[1])
        assert len(parts) == 2
        for number, part in parts.items():
            rounding = 1e-6 * size_of_terms(batch, part, "token-mean")
            loss, _ = loss_of(config, batch, part)
            assert update["policy_loss"][number] == pytest.approx(loss, abs=rounding), (step, number)
            if name == "token_tis":
                plain, _ = loss_of(of_mapping({}, "vanilla"), batch, part)
                differing += abs(plain - loss) > 10 * rounding
    if name == "token_tis":
        assert differing > 0, "the weights change nothing"


def test_token_weights_are_near_one(runs):
    run = runs["token_tis"]
    assert run.returncode == 0, run.output[-4000:]
    # Not nearer: verl lets vLLM draw from the tokenizer's 98 tokens, and the trainer's softmax has the model's 104, to
    # which a random model gives as much.
    assert run.series("rollout_corr/rollout_is_mean") == pytest.approx([1.0] * STEPS, abs=0.1)
    assert all(0.9 < size <= 1.0 for size in run.series("rollout_corr/rollout_is_eff_sample_size"))
    assert run.series("rollout_corr/kept_tokens") == run.series("rollout_corr/valid_tokens")
    assert all(weight <= 2.0 for weight in run.series("rollout_corr/rollout_is_max"))
    assert len(run.series("timing_s/old_log_prob")) == STEPS


def test_bypass_scores_no_batch_again(runs):
    run = runs["bypass"]
    assert run.returncode == 0, run.output[-4000:]
    assert run.manifest()["old_log_probs"] == "bypass"
    assert run.series("timing_s/old_log_prob") == []
    assert run.series("training/rollout_probs_diff_max") == []
    # PPO's ratio starts from vLLM's log-probs, so it is not 1 before the first update
    assert all(k3 > 0 for k3 in run.series("rollout_corr/ppo_k3"))
    assert all(share < 1 for share in run.series("tim/sampled_share"))


def test_r2_replays_the_trainers_routes_whoever_drew_the_tokens(runs):
    run = runs["moe"]
    assert run.returncode == 0, run.output[-4000:]
    assert run.manifest()["routing_replay"] == "r2"
    assert all(pairs > 1000 for pairs in run.series("tim/replay_pairs"))
    for name in ("flip_rate_after", "order_mismatch_after", "expert_mismatch_after"):
        assert run.series(f"tim/replay_{name}") == [0.0] * STEPS
