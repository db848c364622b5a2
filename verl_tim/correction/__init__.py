"""Rollout correction: what to do about tokens that the rollout engine and the trainer score differently.

Pure tensor code that knows nothing of any trainer. docs/correction.md defines every term.

    config = RolloutCorrectionConfig.from_mapping({"preset": "paper_tis_seq_k1"})
    loss, metrics = policy_loss(config, log_prob=..., old_log_probs=..., rollout_log_probs=..., advantages=...,
                                response_mask=...)
"""

from .aggregation import LOSS_AGG_MODES, LossCounts, gradient_scale, loss_numerator
from .baseline import baseline_mask, group_statistics, whiten
from .config import VERL_DEFAULTS, RolloutCorrectionConfig
from .correction import Correction, correct
from .errors import ConfigError
from .external import ExternalLoss, external_terms
from .loss import PolicyTerms, policy_loss, policy_terms
from .metrics import MetricSums
from .mismatch import MISMATCH_METRICS
from .presets import PRESETS
from .raw_yaml import UnderscoreNumber, find_in_overrides, find_in_yaml, refuse_underscore_numbers
from .returns import discounted_returns
from .rules import RULE_NAMES, Rule
from .thresholds import Band

__all__ = [
    "LOSS_AGG_MODES",
    "MISMATCH_METRICS",
    "PRESETS",
    "RULE_NAMES",
    "VERL_DEFAULTS",
    "Band",
    "ConfigError",
    "Correction",
    "ExternalLoss",
    "LossCounts",
    "MetricSums",
    "PolicyTerms",
    "RolloutCorrectionConfig",
    "Rule",
    "UnderscoreNumber",
    "baseline_mask",
    "correct",
    "discounted_returns",
    "external_terms",
    "find_in_overrides",
    "find_in_yaml",
    "gradient_scale",
    "group_statistics",
    "loss_numerator",
    "policy_loss",
    "policy_terms",
    "refuse_underscore_numbers",
    "whiten",
]
