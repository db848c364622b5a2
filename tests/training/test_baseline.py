"""`baseline_scope: kept` against statistics written out: who counts, for each estimator of verl."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage

from verl_tim.correction import RolloutCorrectionConfig, whiten
from verl_tim.training.baseline import counted_rows, take_kept_baseline, whole_sessions
from verl_tim.training.correction_config import KEPT_BASELINES

REJECT = RolloutCorrectionConfig.from_mapping(
    {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.1, "baseline_scope": "kept"}
)
ROWS, WIDTH = 8, 5
SCORES = torch.tensor([1.0, 0.0, 0.5, 4.0, 0.0, 2.0, -3.0, 1.0])
UIDS = np.array(list("aaaabbbb"), dtype=object)
REJECTED = [3, 6]
COUNTED = [0, 1, 2, 4, 5, 7]


def batch(rejected=REJECTED):
    lengths = [5, 3, 4, 5, 2, 5, 3, 4]
    mask = (torch.arange(WIDTH) < torch.tensor(lengths).unsqueeze(1)).long()
    rewards = torch.zeros(ROWS, WIDTH)
    rewards[torch.arange(ROWS), torch.tensor(lengths) - 1] = SCORES
    old = -torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    rollout = old.clone()
    rollout[rejected] -= 1.0
    return DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_rewards": rewards,
            "old_log_probs": old,
            "rollout_log_probs": rollout,
            "values": torch.zeros(ROWS, WIDTH),
        },
        non_tensors={"uid": UIDS},
    )


def advantages(data, estimator, rejected_rows_count):
    config = OmegaConf.create({"gamma": 0.9, "use_pf_ppo": False})

    def compute(part, rows=None):
        return compute_advantage(part, adv_estimator=estimator, gamma=0.9, lam=0.95, config=config)

    data = compute(data)
    if not rejected_rows_count:
        take_kept_baseline(data, counted_rows(REJECT, data), estimator, compute)
    return data.batch["advantages"], data.batch["returns"]


def by_hand(estimator, counted):
    """(row -> advantage of its first token) for outcome estimators, from the rows that count."""
    out = {}
    for group in "ab":
        rows = [row for row in counted if UIDS[row] == group]
        scores = SCORES[rows]
        for row in rows:
            mean, others = scores.mean(), (scores.sum() - SCORES[row]) / max(len(rows) - 1, 1)
            if estimator.startswith("grpo"):
                out[row] = (SCORES[row] - mean) / (scores.std() + 1e-6)
            elif estimator.startswith("rloo"):
                out[row] = SCORES[row] - others
            elif estimator == "gpg":
                nonzero = torch.count_nonzero(SCORES[counted])
                out[row] = len(counted) / nonzero * (SCORES[row] - mean)
            elif estimator == "opo":
                lengths = batch().batch["response_mask"].sum(dim=1)[rows].float()
                out[row] = SCORES[row] - (lengths * scores).sum() / lengths.sum()
    return out


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "gpg", "opo"])
def test_group_baselines_leave_rejected_rows_out(estimator):
    for all_rows, counted in ((True, list(range(ROWS))), (False, COUNTED)):
        got, _ = advantages(batch(), estimator, all_rows)
        for row, expected in by_hand(estimator, counted).items():
            assert float(got[row, 0]) == pytest.approx(float(expected), abs=1e-5), (estimator, row)


def test_whitening_leaves_rejected_rows_out():
    data = batch()
    got, returns = advantages(data, "reinforce_plus_plus", False)
    mask, rewards = data.batch["response_mask"], data.batch["token_level_rewards"]
    wanted = torch.zeros(ROWS, WIDTH)
    for row in range(ROWS):
        running = 0.0
        for token in reversed(range(int(mask[row].sum()))):
            running = float(rewards[row, token]) + 0.9 * running
            wanted[row, token] = running
    assert torch.allclose(returns, wanted, atol=1e-6)
    assert torch.allclose(got[COUNTED], whiten(wanted[COUNTED], mask[COUNTED]), atol=1e-5)
    # rows that do not count keep what they had: their returns are whole, too, for a critic
    before, _ = advantages(batch(), "reinforce_plus_plus", True)
    assert torch.equal(got[REJECTED], before[REJECTED])
    assert not torch.allclose(got[COUNTED], before[COUNTED])


@pytest.mark.parametrize("estimator", KEPT_BASELINES)
def test_what_a_rejected_row_scored_changes_nothing_for_the_others(estimator):
    data, other = batch(), batch()
    other.batch["token_level_rewards"][REJECTED] *= 17.0
    first, second = (advantages(each, estimator, False)[0] for each in (data, other))
    assert torch.allclose(first[COUNTED], second[COUNTED])
    assert first[COUNTED].abs().sum() > 0


@pytest.mark.parametrize("estimator", KEPT_BASELINES)
@pytest.mark.parametrize("rejected", [[], list(range(ROWS))])
def test_with_none_or_all_rejected_both_scopes_are_one(estimator, rejected):
    whole, kept = (advantages(batch(rejected), estimator, all_rows)[0] for all_rows in (True, False))
    assert torch.equal(whole, kept)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"])
def test_one_token_left_is_no_error(estimator):
    data = batch([row for row in range(ROWS) if row != 4])
    data.batch["response_mask"][4, 1] = 0
    got, _ = advantages(data, estimator, False)
    assert got[4].tolist() == [0.0] * WIDTH


def test_a_session_counts_while_one_of_its_outputs_does():
    keys = ["u_0_0", "u_0_1", "u_1_0", "u_1_1", "v_0_0"]
    assert whole_sessions(torch.tensor([True, False, False, False, True]), keys).tolist() == [
        True,
        True,
        False,
        False,
        True,
    ]
