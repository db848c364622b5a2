"""Real runs of verl's two trainers that take old log-probs from the rollout, beside one that recomputes them."""

from __future__ import annotations

import pytest

from tests.training.tiny import parquet
from tests.training.verl_run import CONTRACT, overrides_of, run_together, selected
from verl_tim.training.accelerator import host_has_accelerator

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU"),
]

STEPS = 4
REUSE = ("+tim.reuse_rollout_log_probs={enabled: true, audit_every: 3}",)
LEGACY = ("trainer.use_v1=false",)
RUNS = {"recompute": (), "reuse": REUSE, "legacy-recompute": LEGACY, "legacy-reuse": (*LEGACY, *REUSE)}


@pytest.fixture(scope="module")
def runs(request, folders, tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("together"), tmp_path_factory.mktemp("data")
    parquet(data / "train.parquet", 64)
    parquet(data / "val.parquet", 8, split="test", seed=1)
    return run_together(
        folder,
        {
            name: [*overrides_of(folder / name, folders("qwen3_moe"), data, steps=STEPS), *CONTRACT, *more]
            for name, more in RUNS.items()
            if name.removesuffix("recompute").removesuffix("reuse") in selected(request, "trainer")
        },
    )


@pytest.mark.parametrize("trainer", ["", "legacy-"])
def test_reuse_is_recomputation_without_the_pass(runs, trainer):
    plain, reused = runs[f"{trainer}recompute"], runs[f"{trainer}reuse"]
    for run in (plain, reused):
        assert run.returncode == 0, run.output[-4000:]
        assert run.series("tim/exact_fraction") == [1.0] * STEPS
    # every number that the weights decide, to the last bit
    for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "tim/ppo_k1"):
        assert reused.series(name) == plain.series(name), name
    assert all(norm > 0 for norm in plain.series("actor/grad_norm")), "the weights did not move"
    assert reused.series("tim/audited") == [1.0, 0.0, 1.0, 0.0]
    assert reused.series("tim/audited_steps") == [1.0, 1.0, 2.0, 2.0]
    assert reused.series("tim/reused_steps") == [0.0, 1.0, 1.0, 2.0]
    whole = plain.series("tim/compared_tokens")
    assert plain.series("tim/uncompared_tokens") == [0.0] * STEPS
    compared = reused.series("tim/compared_tokens")
    assert [compared[0], compared[2]] == [whole[0], whole[2]]
    assert all(0 < compared[at] < whole[at] for at in (1, 3)), "the first of two mini-batches"
    # what comes with the pass is absent without it, not 0
    for name in ("actor/entropy", "training/rollout_probs_diff_max", "rollout_corr/kl"):
        assert [name in reused.steps[step] for step in range(1, STEPS + 1)] == [True, False, True, False], name
        assert [name in plain.steps[step] for step in range(1, STEPS + 1)] == [True] * STEPS, name
    assert all(seconds > 0 for seconds in reused.series("tim/reuse_saved_seconds"))
    assert len(reused.series("tim/reuse_saved_seconds")) == 2
    # routes come from the update's own forward, where there was no other
    assert reused.series("tim/router_flip_rate") == [0.0] * len(reused.series("tim/router_flip_rate"))
    assert len(reused.series("tim/router_compared")) >= 2
    assert reused.manifest()["old_log_probs"] == "reuse"
    assert plain.manifest()["old_log_probs"] == "recompute"
