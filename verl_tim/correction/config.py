"""The correction's settings: parsed, checked when built, and printable with the origin of every value."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType, NoneType
from typing import Any

from .errors import ConfigError
from .presets import PRESETS
from .rules import Rule, parse_rule_names, parse_rules
from .thresholds import Band, is_list, parse_is_threshold

# The seven keys that verl itself has, with its defaults (verl 0.9.1, trainer/config/algorithm/rollout_correction.yaml).
VERL_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
        "bypass_mode": False,
        "loss_type": "ppo_clip",
    }
)

_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "rollout_is": (None, "token", "sequence", "sequence_mean"),
    "rollout_rs_signal": ("r_corr", "r_ppo"),
    "loss_type": ("ppo_clip", "reinforce"),
    "rollout_is_in": ("loss", "ratio"),
    "denominator": ("kept", "all"),
    "baseline_scope": ("all", "kept"),
}
_SWITCHES = ("rollout_is_batch_normalize", "bypass_mode", "old_forward")


@dataclasses.dataclass(frozen=True)
class RolloutCorrectionConfig:
    """How the gap between rollout and trainer log-probs is corrected. docs/correction.md defines every term.

    Values may be given as users write them (``"0.5_5"``, ``[0.5, 5]``); after construction they are normalised: bands
    are :class:`Band` tuples, ``rollout_rs`` is a tuple of names and ``rollout_rs_threshold`` a tuple with one bound per
    rule, both None without rejection.

    Attributes:
        rollout_is: level of the importance weight: None, "token" exp(d), "sequence" exp(sum d), "sequence_mean"
            exp(mean d).
        rollout_is_threshold: a number truncates weights at it; a band zeroes what lies outside and drops it.
        rollout_is_batch_normalize: divide weights by their mean over kept tokens (sequences) of all ranks.
        rollout_rs: rejection rules; all must pass.
        rollout_rs_threshold: one bound per rule: a band on the ratio for K1 rules, an upper bound for the others.
        rollout_rs_signal: the ratio that rules look at: "r_corr" trainer over rollout, "r_ppo" the ratio in the loss.
        bypass_mode: True lets PPO's old log-probs be the rollout's; False recomputes them with the trainer.
        loss_type: "ppo_clip", or "reinforce" (-A log p times the weights, no clip).
        rollout_is_in: "loss": weights multiply the clipped loss; "ratio": they enter PPO's ratio before it is clipped.
        old_forward: bypass only: one more forward without gradient over the whole batch gives d everywhere.
        denominator: loss aggregation divides by "kept" tokens or by "all" valid ones.
        baseline_scope: whether fully rejected rows count in their group's baseline: "all" yes, "kept" no.
        preset: the preset this was built from, for display.
        group: the preset whose file in the config group ``correction`` spelled the keys out, for display.
        origins: per key "default", "preset" or "given".

    Raises:
        ConfigError: an unknown key or value, or a combination that cannot take effect; names key, value and remedy.
    """

    rollout_is: str | None = None
    rollout_is_threshold: Any = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: Any = None
    rollout_rs_threshold: Any = None
    rollout_rs_signal: str = "r_corr"
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"
    rollout_is_in: str = "loss"
    old_forward: bool = False
    denominator: str = "kept"
    baseline_scope: str = "all"
    preset: str | None = dataclasses.field(default=None, compare=False)
    group: str | None = dataclasses.field(default=None, compare=False, repr=False)
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for key, choices in _CHOICES.items():
            _check_choice(key, getattr(self, key), choices)
        for key in _SWITCHES:
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(key, getattr(self, key), "not a bool", "Write true or false")
        self._set("rollout_is_threshold", self._parsed_is_threshold())
        names = parse_rule_names(self.rollout_rs)
        rules = () if names is None else parse_rules(names, self.rollout_rs_threshold)
        self._set("rollout_rs", names)
        self._set("rollout_rs_threshold", tuple(rule.bound for rule in rules) or None)
        object.__setattr__(self, "_rules", rules)
        self._check_ratio()
        self._check_old_forward()
        self._check_baseline_scope()

    def _set(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)

    def _parsed_is_threshold(self) -> float | Band | None:
        if self.rollout_is_threshold is not None:
            return parse_is_threshold(self.rollout_is_threshold)
        if self.rollout_is is not None:
            raise ConfigError(
                "rollout_is_threshold",
                None,
                f"rollout_is={self.rollout_is} needs a threshold",
                "Give a number to truncate at or a band [lo, hi]; or write rollout_is: null for no weights",
            )
        return None

    def _check_ratio(self) -> None:
        if self.rollout_is_in != "ratio":
            return
        problems = {
            "rollout_is": (self.rollout_is != "token", "rollout_is: token"),
            "rollout_is_threshold": (isinstance(self.rollout_is_threshold, Band), "one number, not a band"),
            "rollout_is_batch_normalize": (self.rollout_is_batch_normalize, "rollout_is_batch_normalize: false"),
            "bypass_mode": (self.bypass_mode, "bypass_mode: false (under bypass q is in the ratio already)"),
            "loss_type": (self.loss_type != "ppo_clip", "loss_type: ppo_clip"),
        }
        for key, (wrong, need) in problems.items():
            if wrong:
                raise ConfigError(
                    "rollout_is_in",
                    "ratio",
                    "only token truncation under recomputation with ppo_clip can stand inside the ratio, and here "
                    f"{key}={getattr(self, key)!s}",
                    f"Use {need}, or rollout_is_in: loss",
                )

    def _check_old_forward(self) -> None:
        if self.old_forward and not self.bypass_mode:
            raise ConfigError(
                "old_forward",
                True,
                "under recomputation the trainer's old log-probs are there already",
                "Use old_forward: false, or bypass_mode: true",
            )

    def _check_baseline_scope(self) -> None:
        if self.baseline_scope != "kept":
            return
        obstacle = None
        if self.bypass_mode:
            obstacle = "bypass_mode: true"
        elif self.rollout_rs_signal != "r_corr":
            obstacle = f"rollout_rs_signal: {self.rollout_rs_signal}"
        elif any(rule.estimator == "opsm" for rule in self.rules):
            obstacle = "opsm among the rules"
        if obstacle:
            raise ConfigError(
                "baseline_scope",
                "kept",
                f"the mask is needed before the advantages, and {obstacle} makes it depend on what comes after them",
                "Use recomputation with rollout_rs_signal: r_corr and no opsm, or baseline_scope: all",
            )

    # --- building ---------------------------------------------------------------------------------------------------

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """The setting's names, verl's seven included."""
        return tuple(f.name for f in dataclasses.fields(cls) if f.name not in ("preset", "group", "origins"))

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any] | None = None, *, preset: str | None = None
    ) -> RolloutCorrectionConfig:
        """Build from a plain mapping. Keys beside ``preset`` override what the preset sets, null included.

        Args:
            mapping: settings by name, optionally with a key ``preset``; None is an empty mapping.
            preset: the preset's name, when it is not in the mapping.

        Raises:
            ConfigError: see the class.
        """
        _check_mapping(mapping)
        given = dict(mapping or {})
        named = given.pop("preset", None)
        if named is not None and preset is not None and named != preset:
            raise ConfigError("preset", preset, f"the mapping names {named!r}", "Name one preset")
        preset = named if preset is None else preset
        if preset is not None and not (isinstance(preset, str) and preset in PRESETS):
            raise ConfigError("preset", preset, "unknown preset", _known(preset, PRESETS))
        for key in given:
            if key not in cls.setting_names():
                raise ConfigError(str(key), given[key], "unknown key", _known(key, cls.setting_names()))
        base = PRESETS[preset] if preset is not None else {}
        origins = {
            key: "given" if key in given else "preset" if key in base else "default" for key in cls.setting_names()
        }
        return cls(**{**base, **given}, preset=preset, origins=origins)

    @classmethod
    def from_verl(cls, mapping: Mapping[str, Any] | None, *, group: str | None = None) -> RolloutCorrectionConfig:
        """Build from ``algorithm.rollout_correction`` of a composed verl config.

        There verl's seven keys are always present, so beside a preset a key of the seven that still has verl's default
        does not count as given. The other keys have no value null, so null means that they are not given (tim.yaml
        declares them so). Hydra's ``_target_`` is ignored.

        Args:
            mapping: the node, as a plain mapping or as OmegaConf's.
            group: the option of the config group ``correction=`` that was chosen, if any. A preset's file spells every
                key out, so this decides no value, only what ``origins`` and ``describe`` say.

        Raises:
            ConfigError: see the class; and a ``preset`` key beside a preset's file, whose keys would override it all.
        """
        _check_mapping(mapping)
        given = {
            key: value
            for key, value in (mapping or {}).items()
            if key != "_target_" and not (value is None and key in cls.setting_names() and key not in VERL_DEFAULTS)
        }
        preset = given.get("preset")
        file = group if group in PRESETS else None
        if preset is not None and file is not None:
            raise ConfigError(
                "preset",
                preset,
                f"correction={file} is chosen too, and spells every key out",
                f"Choose correction={preset} instead, or leave the group correction out of the defaults list",
            )
        if preset is not None:
            given = {k: v for k, v in given.items() if k not in VERL_DEFAULTS or not _same(v, VERL_DEFAULTS[k])}
        config = cls.from_mapping(given)
        if file is not None:
            config._set("group", file)
            config._set("origins", cls._origins_beside(file, given))
        return config

    @classmethod
    def _origins_beside(cls, preset: str, given: Mapping[str, Any]) -> dict[str, str]:
        """The origin of every key where all keys are present: given is what differs from the preset's file."""
        file = {**_defaults(cls), **PRESETS[preset]}
        unchanged = {key for key in file if _tupled(given.get(key, file[key])) == _tupled(file[key])}
        return {
            key: "given" if key not in unchanged else "preset" if key in PRESETS[preset] else "default"
            for key in cls.setting_names()
        }

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rejection rules with their bounds; empty without rejection."""
        return self._rules  # type: ignore[attr-defined, no-any-return]

    @property
    def enabled(self) -> bool:
        """Whether anything is corrected, so that rollout log-probs are required."""
        return self.rollout_is is not None or bool(self.rules) or self.bypass_mode

    @property
    def band(self) -> Band | None:
        """The band outside which weights are zeroed (IcePop); None when weights are truncated or absent."""
        threshold = self.rollout_is_threshold
        return threshold if self.rollout_is is not None and isinstance(threshold, Band) else None

    @property
    def weights_are_logged_only(self) -> bool:
        """Bypass with ppo_clip: the ratio has q below it already, so weights appear in metrics and nowhere else."""
        return self.bypass_mode and self.loss_type == "ppo_clip"

    @property
    def weights_multiply_loss(self) -> bool:
        """Whether the per-token loss is multiplied by the weights."""
        return self.rollout_is is not None and not self.weights_are_logged_only and self.rollout_is_in == "loss"

    @property
    def mismatch_needs_forward(self) -> bool:
        """Whether d is known only from the worker's own forward: bypass without ``old_forward``."""
        return self.bypass_mode and not self.old_forward

    @property
    def mask_needs_forward(self) -> bool:
        """Whether the kept mask depends on the worker's forward, so that denominators are known only after it.

        Apart from this, a non-finite log-prob in the worker's forward always drops its token.
        """
        drops_by_weight = self.band is not None and not self.weights_are_logged_only
        by_mismatch = self.mismatch_needs_forward and (bool(self.rules) or drops_by_weight)
        return by_mismatch or any(r.estimator == "opsm" or self.rollout_rs_signal == "r_ppo" for r in self.rules)

    def check_schedule(self, optimizer_steps_per_batch: int) -> None:
        """Refuse rejection by r_corr under bypass when later optimiser steps would feed real drift into it.

        Args:
            optimizer_steps_per_batch: mini-batches times epochs over one rollout batch.

        Raises:
            ConfigError: bypass without ``old_forward``, rules on r_corr, and more than one step per batch.
        """
        by_signal = any(rule.reads_signal for rule in self.rules) and self.rollout_rs_signal == "r_corr"
        if self.mismatch_needs_forward and by_signal and optimizer_steps_per_batch > 1:
            raise ConfigError(
                "rollout_rs_signal",
                "r_corr",
                f"with bypass_mode and {optimizer_steps_per_batch} optimiser steps per batch, later mini-batches no "
                "longer see the weights that generated it, so r_corr would hold real drift",
                "Set old_forward: true, or rollout_rs_signal: r_ppo, or take one optimiser step per batch",
            )

    def unused_keys(self) -> dict[str, str]:
        """Settings away from their default that cannot act here, each with the reason."""
        unused = {}
        if self.rollout_is is None:
            reason = "rollout_is is null"
            if self.rollout_is_threshold is not None and self.rollout_is_threshold != 2.0:
                unused["rollout_is_threshold"] = reason
            if self.rollout_is_batch_normalize:
                unused["rollout_is_batch_normalize"] = reason
        elif self.weights_are_logged_only:
            unused["rollout_is"] = "bypass with ppo_clip has q in its ratio: weights are logged, not multiplied in"
        if self.rollout_rs_signal != "r_corr" and not any(rule.reads_signal for rule in self.rules):
            unused["rollout_rs_signal"] = "no rule reads it"
        if not self.rules and (self.band is None or self.weights_are_logged_only):
            for key, default in (("denominator", "kept"), ("baseline_scope", "all")):
                if getattr(self, key) != default:
                    unused[key] = "nothing is rejected or dropped"
        return unused

    def to_mapping(self) -> dict[str, Any]:
        """Every key with plain values (lists, numbers, text); ``from_mapping`` of it gives an equal config."""
        out = {}
        for key in self.setting_names():
            value = getattr(self, key)
            if key == "rollout_rs_threshold" and value is not None:
                out[key] = [list(bound) if isinstance(bound, Band) else bound for bound in value]
            else:
                out[key] = list(value) if isinstance(value, tuple) else value
        return out

    def describe(self) -> str:
        """The resolved correction as a table: key, value, what it means, and where it came from."""
        unused = self.unused_keys()
        rows = []
        for key in self.setting_names():
            note = f"no effect: {unused[key]}" if key in unused else self._meaning(key)
            rows.append((key, _plain(getattr(self, key)), self.origins.get(key, "given"), note))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        named = self.preset or self.group
        head = f"rollout correction (preset {named})" if named else "rollout correction"
        lines = [head]
        for *cells, note in rows:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append("  ".join(["", *padded, note]).rstrip())
        return "\n".join(lines)

    def _meaning(self, key: str) -> str:
        if key == "rollout_is_threshold" and self.rollout_is is not None:
            threshold = self.rollout_is_threshold
            if isinstance(threshold, Band):
                return f"weights outside {threshold} are zeroed and dropped"
            return f"weights are truncated at {threshold:g}"
        if key == "rollout_rs_threshold" and self.rules:
            return "; ".join(
                f"{rule.name}: keep ratios in {rule.bound}"
                if isinstance(rule.bound, Band)
                else f"{rule.name} <= {rule.bound:g}"
                for rule in self.rules
            )
        return ""


def _check_mapping(mapping: Any) -> None:
    if mapping is not None and not isinstance(mapping, Mapping):
        what = "a mapping of keys to values"
        named = isinstance(mapping, str) and mapping in PRESETS
        remedy = f"Write {{preset: {mapping}}}" if named else f"Give {what}, or null"
        raise ConfigError("*", mapping, f"not {what}", remedy)


def _check_choice(key: str, value: Any, choices: tuple[str | None, ...]) -> None:
    # an array would compare by its elements
    if not (value is None or isinstance(value, str)) or value not in choices:
        shown = ", ".join("null" if choice is None else str(choice) for choice in choices)
        raise ConfigError(key, value, "unknown value", f"Known values: {shown}")


def _known(name: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return (f"Did you mean {close[0]!r}? " if close else "") + f"Known: {', '.join(known)}"


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, bool) or isinstance(default, bool):
        return value is default
    return isinstance(value, (str, Real, NoneType)) and bool(value == default)


def _defaults(cls: type[RolloutCorrectionConfig]) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls) if field.name in cls.setting_names()}


def _tupled(value: Any) -> Any:
    """Lists of whatever kind as tuples, so that they compare by content."""
    return tuple(_tupled(item) for item in value) if is_list(value) else value


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Band):
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
