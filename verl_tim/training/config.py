"""The `tim:` group of a run's config, as the trainer side reads it.

```yaml
tim:
  run_dir: null                # run folder for manifest.json and samples.jsonl (metrics.jsonl: verl's file logger)
  trainer_numerics: null       # contract | stock, as `BACKEND_KEY` says to the workers; null: whatever that is
  gate: {exact: true, on_mismatch: stop}   # stop | warn; acts with rollout vexact and trainer_numerics contract only
                                           # for other pairs: {baseline: FILE, warn: 2, stop: 10}, see `baseline_gate`
  samples: {per_step: 4}       # rows of each step kept in samples.jsonl
  dump: {every: 0, dir: null, tokens_per_step: 20000}  # every n-th step's batch and its loss as files; 0: never; dir:
                               # run_dir/dumps; and tokens of each step sampled into run_dir/tokens; 0: none
  reuse_rollout_log_probs: {enabled: false, audit_every: 10}  # old log-probs from an exact rollout, see `reuse`
  partial_rollout: {max_version_lag: null}  # asynchronous trainers: older tokens are left out of the loss; null: none
  tracking: {group: null, tags: []}  # how trackers file the run, see `tracking`
  restarts: {limit: 0, wait: 600}  # of `verl-tim train`, after a dead process or node; seconds for nodes
  sample_sequences: 8          # sequences of each step whose top-1 tokens and router choices are recorded; 0: none
  vllm_routes: false           # vLLM's router choices, too
  poll_interval: 0.1           # seconds between two looks of the V1 trainer at its replay buffer (verl: 2.0)
  reward_in_loop: false        # rewards are computed by the agent loop's process, see `rollout.own_reward`
  deterministic: false         # two runs equal bit for bit, see `determinism`
```

Every key may be left out. The workers never see this group: verl hands them `actor_rollout_ref` only, where
`BACKEND_KEY` says the same as `trainer_numerics`; the start checks compare the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.training.replay_config import asks_for_replay

TRAINER_NUMERICS = ("contract", "stock")
ROLLOUTS = ("vexact", "stock")

# verl's own switch for "another implementation computes the log-probs" is `model.use_fused_kernels`, and the name of
# the implementation is this key, which reaches actor and reference workers as it is. verl's monkey patch steps aside
# for a name it does not know (models/transformers/monkey_patch.py:246); the engine of `verl_tim.training.engine` reads
# it.
BACKEND_KEY = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
ATTENTION_KEY = "actor_rollout_ref.model.fused_kernel_options.attention"
"""The attention contract of trainer and rollout alike: auto (also where the key is absent), chunk64 or fa3."""
CONTRACT_BACKEND = "contract"
# Brings our FSDP engine into the workers (`actor_rollout_ref.model.external_lib`).
EXTERNAL_LIB = "verl_tim.training.external"
# The same, and deterministic kernels (`tim.deterministic`).
DETERMINISTIC_LIB = "verl_tim.training.external_deterministic"
EXTERNAL_LIBS = (EXTERNAL_LIB, DETERMINISTIC_LIB)
# Environment variables of a run's workers.
WORKER_ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"


OWN_CLUSTER = "local"
"""Ray's word, in place of an address, for a cluster of its own, whatever else runs on the machine."""


def joins_a_cluster(config: Any) -> bool:
    """True when Ray will join a cluster that runs already, whose size this process does not know yet."""
    address = _select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return bool(address) and address != OWN_CLUSTER


# verl's own (models/transformers/monkey_patch.py); another name it skips without a word.
VERL_BACKENDS = ("torch", "triton", "liger")


class ConfigError(ValueError):
    """A setting that cannot work; the message names the key and the remedy."""


@dataclass(frozen=True)
class GateConfig:
    """Exact gate: any differing fp32 bit between rollout and trainer stops (or is reported by) the run.

    Baseline gate, for pairs that mismatch: a metric above `warn` times its usual value is reported, above `stop` times
    it ends the run. `baseline`: a file that `verl-tim baseline` wrote.
    """

    exact: bool = True
    on_mismatch: str = "stop"
    baseline: str | None = None
    warn: float = 2.0
    stop: float = 10.0

    def __post_init__(self) -> None:
        if not isinstance(self.exact, bool):
            raise ConfigError(f"tim.gate.exact={self.exact!r}: choose true or false")
        if self.on_mismatch not in ("stop", "warn"):
            raise ConfigError(f"tim.gate.on_mismatch={self.on_mismatch!r}: choose stop or warn")
        if self.baseline is not None and not (isinstance(self.baseline, str) and self.baseline):
            raise ConfigError(
                f"tim.gate.baseline={self.baseline!r}: give the file that verl-tim baseline wrote, or null"
            )
        for name in ("warn", "stop"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and 1 < value < float("inf")):
                raise ConfigError(f"tim.gate.{name}={value!r}: give a factor above 1")
        if self.stop < self.warn:
            raise ConfigError(f"tim.gate.stop={self.stop:g} is below tim.gate.warn={self.warn:g}: raise stop")


@dataclass(frozen=True)
class SamplesConfig:
    """How many rows of each step go to samples.jsonl."""

    per_step: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.per_step, bool) or not isinstance(self.per_step, int) or self.per_step < 0:
            raise ConfigError(f"tim.samples.per_step={self.per_step!r}: give a number of rows, 0 for none")


@dataclass(frozen=True)
class DumpConfig:
    """Which steps' batches are written as files, and how many tokens of every step."""

    every: int = 0
    dir: str | None = None
    tokens_per_step: int = 20_000

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 0:
            raise ConfigError(f"tim.dump.every={self.every!r}: give a number of steps, 0 for never")
        tokens = self.tokens_per_step
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise ConfigError(f"tim.dump.tokens_per_step={tokens!r}: give a number of tokens, 0 for none")


@dataclass(frozen=True)
class ReuseConfig:
    """Old log-probs from the rollout; every so many steps, and the first, the trainer computes them and compares."""

    enabled: bool = False
    audit_every: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"tim.reuse_rollout_log_probs.enabled={self.enabled!r}: choose true or false")
        every = self.audit_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(
                f"tim.reuse_rollout_log_probs.audit_every={every!r}: give a number of steps, at least 1 (every step)"
            )


@dataclass(frozen=True)
class PartialRolloutConfig:
    """Responses drawn under several versions of the weights: tokens more than so many versions old are left out of the
    loss; null leaves none out."""

    max_version_lag: int | None = None

    def __post_init__(self) -> None:
        lag = self.max_version_lag
        if lag is not None and (isinstance(lag, bool) or not isinstance(lag, int) or lag < 0):
            raise ConfigError(
                f"tim.partial_rollout.max_version_lag={lag!r}: give a number of versions (0: only tokens of the "
                "trainer's own weights), or null to leave no token out"
            )


# What wandb takes.
MAX_TAG_LENGTH = 64


@dataclass(frozen=True)
class TrackingConfig:
    """How trackers file the run. group: null takes the recipe. tags: beside those of the run's choices."""

    group: str | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.group is not None and not (isinstance(self.group, str) and self.group):
            raise ConfigError(f"tim.tracking.group={self.group!r}: give a name, or null for the recipe's")
        tags = self.tags
        if isinstance(tags, str) or not all(isinstance(tag, str) and tag.strip() for tag in tags):
            raise ConfigError(f"tim.tracking.tags={tags!r}: give a list of words, [] for none")
        for tag in tags:
            if "," in tag or len(tag) > MAX_TAG_LENGTH:
                raise ConfigError(
                    f"tim.tracking.tags: {tag!r} has a comma or more than {MAX_TAG_LENGTH} characters: shorten or "
                    "split it"
                )
        object.__setattr__(self, "tags", tuple(tags))


@dataclass(frozen=True)
class RestartsConfig:
    """How often `verl-tim train` starts a run again after a process or a node died, and how many seconds such a run
    waits for a Ray cluster that it joins to have its nodes."""

    limit: int = 0
    wait: float = 600.0

    def __post_init__(self) -> None:
        if isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 0:
            raise ConfigError(f"tim.restarts.limit={self.limit!r}: give a number of restarts, 0 for none")
        number = isinstance(self.wait, (int, float)) and not isinstance(self.wait, bool)
        if not (number and 0 <= self.wait < float("inf")):
            raise ConfigError(f"tim.restarts.wait={self.wait!r}: give seconds, 0 for no waiting")


@dataclass(frozen=True)
class TimConfig:
    """The `tim` group, checked. Unknown keys raise `ConfigError` naming them."""

    run_dir: str | None = None
    trainer_numerics: str = "stock"
    gate: GateConfig = field(default_factory=GateConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    dump: DumpConfig = field(default_factory=DumpConfig)
    reuse_rollout_log_probs: ReuseConfig = field(default_factory=ReuseConfig)
    partial_rollout: PartialRolloutConfig = field(default_factory=PartialRolloutConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    restarts: RestartsConfig = field(default_factory=RestartsConfig)
    sample_sequences: int = 8
    vllm_routes: bool = False
    poll_interval: float = 0.1
    reward_in_loop: bool = False
    on_policy: bool = False
    deterministic: bool = False
    # Read by other parts of verl_tim (building data sets and models); here only so that they count as known.
    cache_dir: str | None = None
    choices: Any = None
    trackers: Any = None
    task: Any = None
    model: Any = None
    split: Any = None
    vllm_can: Any = None
    launch: Any = None
    manifest: Any = None  # written by the trainer at its start, for trackers

    def __post_init__(self) -> None:
        if self.trainer_numerics not in TRAINER_NUMERICS:
            raise ConfigError(
                f"tim.trainer_numerics={self.trainer_numerics!r}: choose one of {', '.join(TRAINER_NUMERICS)}"
            )
        sampled = self.sample_sequences
        if isinstance(sampled, bool) or not isinstance(sampled, int) or sampled < 0:
            raise ConfigError(f"tim.sample_sequences={sampled!r}: give a number of sequences, 0 for none")
        number = isinstance(self.poll_interval, (int, float)) and not isinstance(self.poll_interval, bool)
        if not (number and 0 < self.poll_interval < float("inf")):
            raise ConfigError(f"tim.poll_interval={self.poll_interval!r}: give seconds above 0")
        for name in ("on_policy", "deterministic", "vllm_routes", "reward_in_loop"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"tim.{name}={getattr(self, name)!r}: choose true or false")
        if self.dump.every and not (self.dump.dir or self.run_dir):
            raise ConfigError("tim.dump.every is set without a folder: set tim.dump.dir or tim.run_dir")

    @classmethod
    def of(cls, config: DictConfig | Mapping[str, Any]) -> TimConfig:
        """Read the group from a whole run config.

        Raises:
            ConfigError: an unknown key, or a value that cannot work.
        """
        group = dict(_plain(config).get("tim") or {})
        if group.get("trainer_numerics") is None:
            group["trainer_numerics"] = "contract" if _select(config, BACKEND_KEY) == CONTRACT_BACKEND else "stock"
        return _build(cls, group, "tim")

    @property
    def dump_dir(self) -> str | None:
        """Folder of the batch dumps, or None where dumping is off."""
        if not self.dump.every:
            return None
        return self.dump.dir or f"{self.run_dir}/dumps"


def uses_verl_tim(config: DictConfig | Mapping[str, Any]) -> bool:
    """True if a run asks for anything of verl_tim: a `tim` group, one of its rollouts, its engine, the contract, or
    routing replay with an FSDP trainer, which verl alone would switch off without a word."""
    return (
        _select(config, "tim") is not None
        or _select(config, "actor_rollout_ref.rollout.name") in ROLLOUTS
        or _select(config, BACKEND_KEY) == CONTRACT_BACKEND
        or _select(config, "actor_rollout_ref.model.external_lib") in EXTERNAL_LIBS
        or asks_for_replay(reader(config))
    )


def reader(config: DictConfig | Mapping[str, Any]) -> Callable[..., Any]:
    """`get(key, default=None)` of a config: a dotted key's value; the default where it is absent, null or not set."""

    def get(key: str, default: Any = None) -> Any:
        value = _select(config, key)
        return default if value is None else value

    return get


def _select(config: DictConfig | Mapping[str, Any], key: str) -> Any:
    """A dotted key's value; None where it is absent or not set (verl's `???`)."""
    if isinstance(config, DictConfig):
        return OmegaConf.select(config, key, throw_on_missing=False)
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _plain(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, DictConfig):
        # only this group: resolving all of verl's config here would demand its unset values
        group = OmegaConf.select(config, "tim")
        return {"tim": OmegaConf.to_container(group, resolve=True) if group is not None else None}
    return dict(config)


def _build(kind: type, values: Mapping[str, Any], where: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a group of keys, not {values!r}")
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown key {where}.{unknown[0]}: known are {', '.join(sorted(known))}")
    nested = {
        "gate": GateConfig,
        "samples": SamplesConfig,
        "dump": DumpConfig,
        "reuse_rollout_log_probs": ReuseConfig,
        "partial_rollout": PartialRolloutConfig,
        "tracking": TrackingConfig,
        "restarts": RestartsConfig,
    }
    arguments = {}
    for name, value in values.items():
        if kind is TimConfig and name in nested and value is not None:
            value = _build(nested[name], value, f"{where}.{name}")
        if value is None and name in nested:
            continue
        arguments[name] = value
    return kind(**arguments)
