"""Real runs under a baseline: both trainers stop at the step that leaves it, with that step's checkpoint on disk."""

from __future__ import annotations

import dataclasses

import pytest

from tests.training.tiny import parquet
from tests.training.verl_run import CONTRACT, overrides_of, run_together
from verl_tim.diagnosis.baseline import Level, baseline_of
from verl_tim.training.accelerator import host_has_accelerator

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU"),
]


def test_both_trainers_stop_after_a_checkpoint(folders, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    parquet(data / "train.parquet", 64)
    parquet(data / "val.parquet", 8, split="test", seed=1)

    def runs(folder, **overrides):
        plans = {}
        for name, more in overrides.items():
            common = overrides_of(folder / name, folders("qwen3"), data, rollout="stock", steps=3)
            saves = f"trainer.default_local_dir={folder / name / 'checkpoints'}"
            plans[name] = [*common, *CONTRACT, saves, *more]
        return run_together(folder, plans)

    usual = runs(tmp_path / "usual", usual=[])["usual"]
    assert usual.returncode == 0, usual.output
    # what METRICS_NAME is in a run folder; these runs share one logger's folder
    (usual.folder / "metrics.jsonl").write_bytes(usual.metrics.read_bytes())
    baseline = baseline_of([usual.folder])
    lowered = {name: Level(*(v / 100 for v in dataclasses.astuple(level))) for name, level in baseline.metrics.items()}
    fits, left = baseline.write(tmp_path / "fits.json"), tmp_path / "left.json"
    dataclasses.replace(baseline, metrics=lowered).write(left)
    made = runs(
        tmp_path / "watched",
        fits=[f"+tim.gate.baseline={fits}"],
        v1=[f"+tim.gate.baseline={left}"],
        legacy=[f"+tim.gate.baseline={left}", "trainer.use_v1=false"],
    )
    assert made["fits"].returncode == 0, made["fits"].output
    assert len(made["fits"].series("tim/baseline_factor_max")) == 3
    for name in ("v1", "legacy"):
        run = made[name]
        assert run.returncode == 1
        assert "BaselineExceeded" in run.output
        assert "step 1: tim/" in run.output
        assert run.series("tim/baseline_factor_max")[0] > 10
        assert sorted(run.steps) == [1]
        checkpoint = run.folder / "checkpoints" / "global_step_1"
        assert f"checkpoint: {checkpoint}" in run.output
        assert any((checkpoint / "actor").iterdir())
