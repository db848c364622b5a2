"""Real runs of verl's two trainers, a mode each: every name of the diagnosis arrives, and the token dumps read back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.training.tiny import parquet
from tests.training.verl_run import CONTRACT, overrides_of, run_together
from verl_tim.diagnosis.token_dump import dumped_steps, read_dumps
from verl_tim.diagnosis.trackers import read_tensorboard_metrics, read_wandb_metrics, read_wandb_run, wandb_file
from verl_tim.training.accelerator import host_has_accelerator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU"),
]

STEPS = 2
RC = "algorithm.rollout_correction"

# Of every mode. Left out are by length (which of the ten bins are met depends on the answers), and by turn.
EVERYWHERE = {
    "tim/valid_tokens tim/missing_tokens tim/clamped_tokens tim/clamped_sequences",
    "tim/delta_abs_mean tim/delta_abs_p50 tim/delta_abs_p95 tim/delta_abs_p99 tim/delta_abs_max",
    "tim/delta_mean tim/delta_std tim/delta_gt_0.01 tim/delta_gt_0.1 tim/delta_gt_0.5 tim/delta_gt_1",
    "tim/ratio_p01 tim/ratio_p50 tim/ratio_p99 tim/exact_fraction tim/top1_flip_rate tim/top1_tokens",
    "tim/token_share_pos_adv tim/token_share_zero_adv tim/token_share_neg_adv",
    "tim/delta_mean_pos_adv tim/delta_mean_neg_adv",
    "tim/contribution_pos_train tim/contribution_neg_train tim/contribution_pos_rollout tim/contribution_neg_rollout",
    "tim/contribution_skew tim/clip_mismatch_only tim/clip_masked_by_mismatch tim/clip_both",
    "tim/seq_delta_sum_abs_mean tim/seq_delta_sum_p95 tim/seq_delta_sum_max",
    *(f"tim/delta_abs_mean_by_position_{tenth}" for tenth in range(10)),
    "tim/k1 tim/k2 tim/k3 tim/k1_seq tim/k1_seq_mean tim/k3_seq tim/k3_seq_mean tim/chi2_token tim/chi2_seq",
    "tim/ppo_k1 tim/ppo_k2 tim/ppo_k3 tim/clipped_share_pos_adv tim/clipped_share_neg_adv",
    "tim/rejected_share_pos_adv tim/rejected_share_neg_adv",
    "tim/router_flip_rate tim/router_expert_mismatch tim/router_order_mismatch tim/router_compared",
    "tim/staleness_mean tim/staleness_max tim/mixed_version_rows tim/delta_abs_mean_by_version_lag_0",
}
NAMES = {name for line in EVERYWHERE for name in line.split()}


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    parquet(data / "train.parquet", 64)
    parquet(data / "val.parquet", 8, split="test", seed=1)
    folder = tmp_path_factory.mktemp("runs")
    model = folders("qwen3_moe")
    exact = overrides_of(folder / "exact", model, data, rollout="vexact", steps=STEPS)
    stock = overrides_of(folder / "stock", model, data, rollout="stock", steps=STEPS)
    rejection = [f"++{RC}.rollout_rs=token_k1", f"++{RC}.rollout_rs_threshold='0.5_2.0'"]
    # the legacy trainer's run goes to trackers, too; both share one Ray cluster, and so these variables
    to = {"WANDB_MODE": "offline", "WANDB_DIR": folder / "stock", "TENSORBOARD_DIR": folder / "stock" / "tensorboard"}
    variables = [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in to.items()]
    trackers = ["trainer.logger=[console,file,wandb,tensorboard]", "+tim.tracking={group: g, tags: [t]}"]
    bypass = [f"++{RC}.bypass_mode=true", f"++{RC}.rollout_rs_signal=r_ppo", "+tim.sample_sequences=12"]
    return run_together(
        folder,
        {
            "exact": [*exact, *CONTRACT, *bypass, *rejection, *variables],
            "stock": [
                *(*stock, *CONTRACT, "trainer.use_v1=false", *rejection, *variables, *trackers),
                "+tim.dump={tokens_per_step: 150}",
            ],
        },
    )


@pytest.mark.parametrize("name", ["exact", "stock"])
def test_every_name_arrives(runs, name):
    run = runs[name]
    assert run.returncode == 0, run.output[-4000:]
    for step in (1, 2):
        assert sorted(NAMES - run.steps[step].keys()) == []
    bypass = name == "exact"
    assert len(run.series("tim/sampled_share")) == (STEPS if bypass else 0)
    assert len(run.series("tim/trainer_self_delta_max")) == (0 if bypass else STEPS)
    # d varies with the advantage only where there is any d
    assert len(run.series("tim/delta_adv_spearman")) == (0 if bypass else STEPS)


def test_an_exact_rollout_chooses_as_the_trainer(runs):
    run = runs["exact"]
    for name in ("top1_flip_rate", "router_flip_rate", "router_expert_mismatch", "router_order_mismatch"):
        assert run.series(f"tim/{name}") == [0.0] * STEPS
    assert all(tokens > 20 for tokens in run.series("tim/top1_tokens"))
    assert all(share == pytest.approx(0.5, abs=0.2) for share in run.series("tim/sampled_share"))


def test_a_stock_rollout_does_not(runs):
    run = runs["stock"]
    assert all(delta > 1e-4 for delta in run.series("tim/delta_abs_max"))
    assert max(run.series("tim/router_order_mismatch") + run.series("tim/router_flip_rate")) > 0
    # the default sample of 8 sequences, all of them seen by the forward of the old log-probs
    assert all(8 <= tokens <= 8 * 24 for tokens in run.series("tim/top1_tokens"))


def test_trackers_have_what_the_file_has_and_what_ran(runs):
    run = runs["stock"]
    told, metrics = read_wandb_run(run.folder), read_wandb_metrics(run.folder)
    assert (told.name, told.config["tim"]["manifest"]) == ("stock", run.manifest())
    assert {record.step: record.data for record in metrics.records} == run.steps
    events = read_tensorboard_metrics(run.folder)
    assert events.names() == metrics.names()
    content = wandb_file(run.folder).read_bytes()
    for word in (b"stock-contract-", b"rollout:stock", b"together"):
        assert word in content, word


def test_the_dumps_read_back(runs):
    for name in ("exact", "stock"):
        run = runs[name]
        assert dumped_steps(run.folder) == [1, 2]
        table = read_dumps(run.folder)
        frame = table.to_pandas()
        assert table.schema.metadata[b"top_k"] == b"2"
        assert json.loads(table.schema.metadata[b"correction"])["rollout_rs"] == ["token_k1"]
        for (step, _), sequence in frame.groupby(["step", "row"]):
            assert len(sequence) == sequence["length"].iloc[0], "whole sequences only"
            assert (sequence["weight_version"] == step - 1).all()
            assert sequence["position"].tolist() == list(range(len(sequence)))
        assert frame["log_prob"].notna().all()
        assert frame["text"].str.len().sum() > 0
        both = frame.dropna(subset=["top1_rollout", "top1_train"])
        assert len(both) > 50
        routes = [np.stack(both[side]) for side in ("routes_rollout", "routes_train")]
        layers = json.loads(table.schema.metadata[b"layers"])
        assert routes[0].shape == routes[1].shape == (len(both), 2 * len(layers))
        # four rows of a prompt in a batch of 32
        assert frame.groupby(["step", "uid"])["group"].nunique().eq(1).all()
    exact, stock = (read_dumps(runs[name].folder).to_pandas() for name in ("exact", "stock"))
    scored = exact.dropna(subset=["old_log_prob"])  # of the first mini-batch, for the pass was left out
    assert 0 < len(scored) < len(exact)
    assert (scored["old_log_prob"] == scored["rollout_log_prob"]).all()
    assert len(exact.groupby(["step", "row"])) == 2 * 32, "all of a small batch"
    seen = exact.dropna(subset=["top1_train"])
    assert (seen["log_prob"] == seen["rollout_log_prob"]).all()
    assert (seen["top1_train"] == seen["top1_rollout"]).all()
    assert stock.groupby("step").size().between(100, 150).all()
    deltas = (stock["old_log_prob"] - stock["rollout_log_prob"]).abs()
    assert 0 < deltas.max() <= max(runs["stock"].series("tim/delta_abs_max"))
