"""Named corrections: each preset is the set of keys it turns on; every other key keeps its default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
# |mean log r| <= 0.001, as a band on the geometric mean of the ratio.
_MEAN_K1 = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": (math.exp(-0.001), math.exp(0.001))}
_MEAN_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.001}
# The sums have no default threshold: a sum over the trajectory grows with its length, so the user gives it.
_SUM_K1 = {"rollout_rs": "seq_sum_k1"}
_SUM_K3 = {"rollout_rs": "seq_sum_k3"}
_CORR = {"rollout_rs_signal": "r_corr"}
_PPO = {"rollout_rs_signal": "r_ppo"}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "none": {},
        "recompute": {},
        "bypass_ppo": {"bypass_mode": True, "loss_type": "ppo_clip"},
        "bypass_reinforce": {"bypass_mode": True, "loss_type": "reinforce", **_TOKEN_TIS},
        "token_tis": _TOKEN_TIS,
        "sequence_tis": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
        "icepop": {"rollout_is": "token", "rollout_is_threshold": (0.5, 5.0)},
        "token_tis_ratio": {**_TOKEN_TIS, "rollout_is_in": "ratio"},
        "seq_reject_corr_k1": {**_MEAN_K1, **_CORR},
        "seq_reject_corr_k3": {**_MEAN_K3, **_CORR},
        "seq_reject_ppo_k1": {**_MEAN_K1, **_PPO},
        "seq_reject_ppo_k3": {**_MEAN_K3, **_PPO},
        "seq_reject_corr_sum_k1": {**_SUM_K1, **_CORR},
        "seq_reject_corr_sum_k3": {**_SUM_K3, **_CORR},
        "seq_reject_ppo_sum_k1": {**_SUM_K1, **_PPO},
        "seq_reject_ppo_sum_k3": {**_SUM_K3, **_PPO},
        "paper_tis_seq_k1": {**_TOKEN_TIS, **_MEAN_K1, **_CORR},
        "paper_tis_seq_k3": {**_TOKEN_TIS, **_MEAN_K3, **_CORR},
        "paper_tis_seq_sum_k3": {**_TOKEN_TIS, **_SUM_K3, **_CORR},
        # A lower bound on the accumulated ratio: sum of log r_corr >= log 0.001.
        "paper_tis_seq_sum": {**_TOKEN_TIS, **_SUM_K1, "rollout_rs_threshold": (0.001, None), **_CORR},
    }
)
