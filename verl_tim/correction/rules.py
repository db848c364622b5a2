"""Rejection rules by name: what each looks at, and the bound it was given."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .. import extensions  # of the standard library alone, so that this package still knows nothing of a trainer
from .errors import ConfigError
from .thresholds import Band, one_per_rule, parse_band_on_ratio, parse_upper_bound

TOKEN, SEQUENCE = "token", "sequence"

# name -> (level, reduction over the row, estimator)
_KINDS: dict[str, tuple[str, str | None, str]] = {
    **{f"token_{k}": (TOKEN, None, k) for k in ("k1", "k2", "k3")},
    **{f"seq_sum_{k}": (SEQUENCE, "sum", k) for k in ("k1", "k2", "k3")},
    **{f"seq_mean_{k}": (SEQUENCE, "mean", k) for k in ("k1", "k2", "k3")},
    **{f"seq_max_{k}": (SEQUENCE, "max", k) for k in ("k2", "k3")},
    "opsm": (SEQUENCE, "mean", "opsm"),
    "token_kpop": (TOKEN, None, "kpop"),
}
RULE_NAMES = tuple(_KINDS)
_REDUCTIONS = {TOKEN: (None,), SEQUENCE: ("sum", "mean", "max")}

# (log_p, log_q, log_r) -> statistic, all (B, T); see `register_rule`
Statistic = Callable[[Tensor, Tensor, Tensor], Tensor]
_STATISTICS: dict[str, Statistic] = {}


def register_rule(name: str, statistic: Statistic, *, level: str, reduction: str | None = None) -> None:
    """One more rule for `rollout_rs`: a token or a sequence is rejected where its statistic exceeds the threshold.

    Args:
        name: as `rollout_rs` will say it.
        statistic: of (log_p, log_q, log_r), each (B, T) float32 without gradient: numerator, denominator and ratio that
            `rollout_rs_signal` names (0 in log_r where a token has no known log-prob). Returns (B, T). What it says of
            unknown tokens is not used; what is not finite rejects.
        level: "token", or "sequence": a row is kept or rejected as a whole.
        reduction: of a sequence's tokens: "sum", "mean" or "max" (of values that are never negative).

    Raises:
        ValueError: the name is taken, or level and reduction do not go together.
    """
    if name in _KINDS and _STATISTICS.get(name) is not statistic:
        raise ValueError(f"rule {name!r} exists: choose another name")
    if level not in _REDUCTIONS or reduction not in _REDUCTIONS[level]:
        known = "; ".join(f"level={level}: reduction in {options}" for level, options in _REDUCTIONS.items())
        raise ValueError(f"rule {name!r}: level={level!r} with reduction={reduction!r} is none of {known}")
    _STATISTICS[name] = statistic
    _KINDS[name] = (level, reduction, name)


def registered_statistic(estimator: str) -> Statistic | None:
    """The statistic of a rule that an extension added, by `Rule.estimator`; None for this package's own."""
    return _STATISTICS.get(estimator)


def rule_names() -> tuple[str, ...]:
    """Every rule: this package's and those of installed extensions."""
    extensions.load()
    return tuple(_KINDS)


class Rule(NamedTuple):
    """One rejection rule.

    ``bound`` is a :class:`Band` on the ratio for the K1 rules (token ratio, its product, or its geometric mean over the
    row) and an upper bound on the statistic for all others.
    """

    name: str
    level: str  # "token" | "sequence"
    reduction: str | None  # "sum" | "mean" | "max" over the row; None at token level
    estimator: str  # "k1" | "k2" | "k3" | "kpop" | "opsm", or a registered rule's name
    bound: float | Band

    @property
    def reads_signal(self) -> bool:
        """Whether the rule looks at the ratio that ``rollout_rs_signal`` names. OPSM always looks at log q - log p."""
        return self.estimator != "opsm"


def takes_band(name: str) -> bool:
    """Whether the rule's bound is a band on the ratio (the K1 rules) and not an upper bound."""
    return _KINDS[name][2] == "k1"


def parse_rule_names(value: Any) -> tuple[str, ...] | None:
    """``rollout_rs`` as written (null, "a, b" or a list) -> names in order, repeats dropped as verl does.

    Raises:
        ConfigError: an unknown rule, an empty list, or a value that is neither text nor a list.
    """
    if value is None:
        return None
    if isinstance(value, str):
        names = [part.strip() for part in value.split(",")]
    elif isinstance(value, Sequence) and all(isinstance(part, str) for part in value):
        names = [part.strip() for part in value]
    else:
        raise ConfigError(
            "rollout_rs", value, "not a rule or a list of rules", f"Known rules: {', '.join(rule_names())}"
        )
    if not any(names):
        raise ConfigError("rollout_rs", value, "names no rule", "Write null to reject nothing")
    for name in names:
        if name not in rule_names():
            raise ConfigError("rollout_rs", value, f"unknown rule {name!r}", _remedy_for_unknown(name))
    return tuple(dict.fromkeys(names))


def _remedy_for_unknown(name: str) -> str:
    if name == "seq_max_k1":
        return "The largest -log r alone bounds one side; use token_k1 for a band on every token, or seq_max_k2"
    close = difflib.get_close_matches(name, rule_names(), n=1)
    return (f"Did you mean {close[0]!r}? " if close else "") + f"Known rules: {', '.join(rule_names())}"


def parse_rules(names: tuple[str, ...], threshold: Any) -> tuple[Rule, ...]:
    """Rules with their bounds: one threshold per rule, or one for all.

    Raises:
        ConfigError: a threshold is missing, malformed, of the wrong kind for its rule, or their number does not fit.
    """
    entries = one_per_rule(threshold, [takes_band(name) for name in names], names)
    rules = []
    for name, entry in zip(names, entries, strict=True):
        bound = parse_band_on_ratio(entry, name) if takes_band(name) else parse_upper_bound(entry, name)
        rules.append(Rule(name, *_KINDS[name], bound))
    return tuple(rules)
