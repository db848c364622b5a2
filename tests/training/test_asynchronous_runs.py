"""Real runs of verl's asynchronous trainers on a CPU, with vexact: partial rollouts, exact at each token's version.

Every step leaves its batch and a checkpoint of its weights, so that afterwards each token of each batch is scored by a
trainer that holds the weights which the token names.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.training.tiny import parquet
from tests.training.verl_run import CONTRACT, overrides_of, run_together
from verl_tim.training.accelerator import host_has_accelerator
from verl_tim.training.asynchronous_checks import GLOO_MODULE
from verl_tim.training.in_process import InProcessTrainer, ScoredSequence, single_rank_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU"),
]

STEPS = 4
ROLLOUT = "actor_rollout_ref.rollout"
COMMON = (
    *CONTRACT,
    f"{ROLLOUT}.max_num_seqs=3",  # few rows, so that a step's end meets responses half drawn
    "+tim.poll_interval=0.02",
    "+tim.dump={every: 1}",
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    "ray_kwargs.ray_init.num_gpus=2",  # the first run starts Ray for all
)
RUNS = {
    "colocate": (
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=2",
        f"+{ROLLOUT}.engine_kwargs.vexact={{in_flight: abort, page_size: 8, kv_cache_tokens: 176}}",
        "+tim.partial_rollout={max_version_lag: 0}",
        "algorithm.rollout_correction.rollout_is=token",
    ),
    "separate": (
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.num_warmup_batches=0",
        "trainer.v1.separate_async.parameter_sync_step=2",
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node=1",
        f"{ROLLOUT}.checkpoint_engine.backend=gloo",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module={GLOO_MODULE}",
        f"+{ROLLOUT}.engine_kwargs.vexact={{in_flight: keep}}",
    ),
}


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("together"), tmp_path_factory.mktemp("data")
    parquet(data / "train.parquet", 64)
    parquet(data / "val.parquet", 8, split="test", seed=1)
    overrides = {
        name: [
            *overrides_of(folder / name, folders("qwen3"), data, steps=STEPS),
            f"trainer.default_local_dir={folder}/{name}/checkpoints",
            *COMMON,
            *more,
        ]
        for name, more in RUNS.items()
    }
    return run_together(folder, overrides)


def batches(run):
    """(step, dumped batch) of every part of every step."""
    for path in sorted((run.folder / "dumps").glob("step_*.pt")):
        dumped = torch.load(path, weights_only=True)
        yield dumped["step"], dumped


@pytest.mark.parametrize("name", RUNS)
def test_each_token_is_exact_at_its_version(runs, folders, name):
    run = runs[name]
    assert run.returncode == 0, run.output[-4000:]
    compared = {}
    with single_rank_group():
        for version in range(STEPS):
            trained = run.folder / f"checkpoints/global_step_{version}/actor/huggingface"
            trainer = InProcessTrainer(str(trained) if version else folders("qwen3"))
            for step, dumped in batches(run):
                mine_BT = dumped["response_mask"] & (dumped["versions"] == version)
                if not mine_BT.any():
                    continue
                assert version < step, "drawn under weights that did not exist"
                rows = mine_BT.any(1).nonzero().squeeze(1).tolist()
                sequences = [
                    ScoredSequence(np.array(dumped["prompts"][row]), np.array(dumped["responses"][row])) for row in rows
                ]
                for row, scored_T in zip(rows, trainer.log_probs(sequences), strict=True):
                    mine_T = mine_BT[row, : len(scored_T)]
                    rollout_T = dumped["rollout_log_probs"][row, : len(scored_T)]
                    assert torch.equal(
                        scored_T[mine_T].view(torch.int32), rollout_T[mine_T].float().view(torch.int32)
                    ), (step, version, row)
                    compared[version] = compared.get(version, 0) + int(mine_T.sum())
    assert all(compared.get(version, 0) > 100 for version in range(STEPS)), compared
    assert sum(compared.values()) == sum(int(dumped["response_mask"].sum()) for _, dumped in batches(run))


@pytest.mark.parametrize("name", RUNS)
def test_the_gate_says_what_it_compared(runs, name):
    run = runs[name]
    assert run.returncode == 0, run.output[-4000:]
    own, older = [0] * STEPS, [0] * STEPS
    for step, dumped in batches(run):
        fresh_BT = dumped["response_mask"] & (dumped["versions"] == step - 1)
        own[step - 1] += int(fresh_BT.sum())
        older[step - 1] += int((dumped["response_mask"] & ~fresh_BT).sum())
    assert run.series("tim/compared_tokens") == own
    assert run.series("tim/uncompared_tokens") == older
    assert min(own) > 0
    assert run.series("tim/valid_tokens") == [a + b for a, b in zip(own, older, strict=True)]
    assert run.series("tim/delta_abs_mean_by_version_lag_0") == [0.0] * STEPS
    assert all(norm > 0 for norm in run.series("actor/grad_norm"))


def test_partial_rollouts_happened(runs):
    run = runs["colocate"]
    assert max(run.series("tim/mixed_version_rows")) > 0
    assert max(run.series("tim/uncompared_tokens")) > 0
    assert max(run.series("tim/staleness_max")) >= 1
    assert max(run.series("tim/delta_abs_mean_by_version_lag_1")) > 0


def test_a_step_in_parts_scores_each_part_under_the_weights_it_began_with(runs):
    run = runs["separate"]
    assert len(list(batches(run))) == 2 * STEPS
    # the second part is compared after the first one's update, so the weights were put back
    parts = [int((dumped["response_mask"] & (dumped["versions"] == step - 1)).sum()) for step, dumped in batches(run)]
    assert sum(tokens > 0 for tokens in parts[1::2]) > 0


def test_stale_tokens_are_left_out_of_the_loss(runs):
    run = runs["colocate"]
    masked = run.series("tim/masked_stale_tokens")
    assert masked == run.series("tim/uncompared_tokens")
    assert max(masked) > 0
    assert run.series("rollout_corr/kept_tokens") == run.series("tim/compared_tokens")
    # what is left was drawn under the trainer's own weights, where nothing is to be corrected
    assert run.series("rollout_corr/rollout_is_mean") == [1.0] * STEPS
    assert run.series("rollout_corr/log_ratio_abs_max") == [0.0] * STEPS
    assert "tim/masked_stale_tokens" not in runs["separate"].steps[STEPS]
