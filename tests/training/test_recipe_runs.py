"""Recipes run for real and keep their promises: several turns are exact, REINFORCE's own ratio is 1 to the bit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import yaml

from verl_tim.training.accelerator import host_has_accelerator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU"),
]
ONE = torch.tensor(1.0).view(torch.int32).item()


def train(folder, recipe, *overrides, steps=2):
    """`verl-tim train` of a recipe, every batch dumped; (metrics by step, batches, what the updates saw)."""
    words = [
        *("-m", "verl_tim.cli", "train", f"recipe={recipe}", f"trainer.total_training_steps={steps}"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", f"tim.run_dir={folder}/run", "tim.dump.every=1"),
        *overrides,
    ]
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=1500, errors="replace"
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    dumps = folder / "run" / "dumps"
    numbers = range(1, steps + 1)
    batches, updates = (
        [torch.load(dumps / f"{kind}_{number:06d}.pt", weights_only=False) for number in numbers]
        for kind in ("step", "update")
    )
    return {line["step"]: line["data"] for line in lines}, batches, updates


def assert_exact(metrics, batches):
    assert all(step["tim/exact_fraction"] == 1.0 for step in metrics.values())
    assert all(step["tim/missing_tokens"] == 0 for step in metrics.values())
    assert all(step["actor/grad_norm"] > 0 for step in metrics.values())
    for batch in batches:
        kept = batch["response_mask"].bool()
        assert kept.sum() > 100
        ours, theirs = (batch[name].float()[kept].view(torch.int32) for name in ("rollout_log_probs", "old_log_probs"))
        assert torch.equal(ours, theirs)
        assert batch["old_log_probs"].float()[kept].isfinite().all()


def test_conversations_with_a_tool_are_exact(tmp_path):
    from transformers import AutoTokenizer

    metrics, batches, _ = train(tmp_path, "cpu_tool_grpo")
    assert_exact(metrics, batches)
    assert all(step["num_turns/max"] > 4 for step in metrics.values()), "no conversation had a second turn"
    assert all(step["tim/delta_abs_mean_by_turn_2"] == 0.0 for step in metrics.values())
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    tokenizer = AutoTokenizer.from_pretrained(config["actor_rollout_ref"]["model"]["path"])
    verdicts = set()
    for batch in batches:
        for ids, mask in zip(batch["responses"], batch["response_mask"].bool(), strict=True):
            of_tool = tokenizer.decode([one for one, kept in zip(ids, mask, strict=False) if not kept])
            for said in filter(None, of_tool.split("\n<|im_start|>tool\n")):
                # what is outside the mask is the tool's turn and the opening of the next reply, no more and no less
                verdict, _, rest = said.partition("<|im_end|>")
                assert rest == "\n<|im_start|>assistant\n"
                verdicts.add(verdict)
    assert {"too low", "too high"} <= verdicts <= {"right", "too low", "too high", "no number"}


def test_reinforce_updates_with_a_ratio_of_one_on_every_token(tmp_path):
    """One optimiser step per batch under the contract: exp(log p_now - log p_scored) has the bits of 1.0, though the
    update cuts the batch into other micro-batches than the scoring pass did."""
    small = ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024"]
    other_cut = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096"
    metrics, batches, updates = train(tmp_path, "cpu_reinforce", *small, other_cut)
    assert_exact(metrics, batches)
    for batch, update in zip(batches, updates, strict=True):
        kept = batch["response_mask"].bool()
        assert {record["mini_batch"] for record in update["records"]} == {0}, "more than one optimiser step"
        assert len(update["records"]) > 1, "one micro-batch: nothing was cut"
        seen = torch.zeros_like(kept)
        for record in update["records"]:
            rows, width = record["rows"], record["log_prob"].shape[1]
            mask = kept[rows, :width]
            ratio = torch.exp(record["log_prob"].float() - batch["old_log_probs"].float()[rows, :width])
            assert (ratio[mask].view(torch.int32) == ONE).all()
            seen[rows, :width] |= mask if record["kept"] is None else record["kept"].bool()
        assert torch.equal(seen, kept), "tokens that no update saw"
    assert all(step["tim/trainer_self_delta_max"] == 0.0 for step in metrics.values())
    # whitened over the whole batch: mean 0 and Bessel's variance 1 over the drawn tokens
    for batch in batches:
        advantages = batch["advantages"].float()[batch["response_mask"].bool()]
        if advantages.abs().max() > 0:
            assert advantages.mean().abs() < 1e-5
            assert advantages.var(unbiased=True) == pytest.approx(1.0, abs=1e-3)
