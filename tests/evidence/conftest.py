"""A matrix of runs as they come home, made up from seeds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.diagnosis.fake_dumps import none, normal, one_sign, write_dumps
from tests.diagnosis.fake_runs import write_run
from verl_tim.evidence.names import VARIANTS, RunName


def write_matrix(root: Path, pairs=("dense-grpo",), variants=VARIANTS, seeds=(1, 2), *, steps=40, skew=None) -> Path:
    """Run folders below `root`.

    Args:
        skew: variant -> mean contribution skew, in place of the made-up one.
    """
    for pair in pairs:
        model, algorithm = pair.split("-")
        for variant in variants:
            for seed in seeds:
                folder = root / str(RunName(model, algorithm, variant, seed))
                write_one(folder, variant, seed, steps=steps, skew=(skew or {}).get(variant))
    return root


def write_one(folder: Path, variant: str, seed: int, *, steps: int, skew: float | None = None) -> None:
    rollout = variant if variant in ("vexact", "vllm_invariant") else "vllm"
    correction = {"vllm_bypass": "bypass_ppo", "vllm_tis": "paper_tis_seq_k3", "vexact": "none"}.get(
        variant, "recompute"
    )
    write_run(folder, rollout=rollout, correction=correction, steps=steps, seed=seed)
    noise = random.Random(seed)
    path, exact = folder / "metrics.jsonl", variant == "vexact"
    lines = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["step"]:
            data = entry["data"]
            mean = data["tim/delta_abs_mean"]
            data |= {f"tim/delta_abs_mean_by_position_{n}": mean * (0.5 + 0.1 * n) for n in range(10)}
            data |= {"tim/delta_gt_0.01": 0.0 if exact else 0.04, "tim/delta_gt_0.1": 0.0 if exact else 0.002}
            data |= {"tim/delta_gt_1": 0.0, "tim/top1_flip_rate": 0.0 if exact else 0.003, "tim/top1_tokens": 60}
            if skew is not None:
                data["tim/contribution_skew"] = skew + noise.gauss(0, 1e-4)
            if variant == "vllm_tis":
                data |= {"rollout_corr/rollout_rs_masked_fraction": 0.02, "tim/rejected_share_pos_adv": 0.01}
        lines.append(json.dumps(entry) + "\n")
    path.write_text("".join(lines))
    (folder / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "exit_code": 0, "seconds": 100.0}) + "\n")
    known = ("old_log_prob_N", "rollout_log_prob_N")
    mismatch = none if exact else one_sign(0.3, 0.05) if variant == "vllm_recompute" else normal(0.01)
    write_dumps(folder, mismatch, seed=seed, steps=2, fields=known[1:] if variant == "vllm_bypass" else known)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return write_matrix(tmp_path_factory.mktemp("evidence"))
