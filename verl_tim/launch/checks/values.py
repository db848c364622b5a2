"""Values that cannot be meant: of another type than verl's own, out of range, not one of the choices.

verl reads most of them inside its workers, minutes after the start, and passes some over in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch.errors import Finding
from verl_tim.launch.recipes import closest

# verl's default configs, composed and flat, as verl ships them: one per kind of training engine.
_VERL_DEFAULTS = "_generated_ppo_trainer.yaml"
_VERL_DEFAULTS_OF = {engine: f"_generated_ppo_{engine}_trainer.yaml" for engine in ("megatron", "torchtitan", "veomni")}

# verl's word for it in model_engine; the strategy is fsdp or fsdp2.
_FSDP = "dp"

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

# Whole numbers of at least 1; null, where it is verl's own default, means another way to say it.
_COUNTS = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{_ACTOR}.ppo_mini_batch_size",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ACTOR}.ppo_epochs",
    f"{_ROLLOUT}.n",
    f"{_ROLLOUT}.val_kwargs.n",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.tensor_model_parallel_size",
    f"{_ROLLOUT}.pipeline_model_parallel_size",
    f"{_ROLLOUT}.data_parallel_size",
    f"{_ROLLOUT}.agent.num_workers",
    "reward.num_workers",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "ray_kwargs.ray_init.num_cpus",
)
_SAMPLING = ("temperature", "top_k", "top_p")

BEGIN_DEFAULTS = "begin the recipe's defaults with ppo_trainer and tim, as recipes/cpu_grpo/cpu_grpo.yaml does"

# A threshold may be a number, a band or text: the check of the correction knows.
_CHECKED_ELSEWHERE = ("algorithm.rollout_correction", f"{_ACTOR}.policy_loss.rollout_correction")


def check_structure(config: DictConfig) -> Iterator[Finding]:
    """Groups that were removed or overwritten by a single value, so that nothing else can be looked at."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    if not any(isinstance(default, dict) and plain.get(name) for name, default in defaults_of(plain).items()):
        yield Finding("defaults", "bring none of verl's groups", BEGIN_DEFAULTS)
        return
    if "tim" not in plain:
        yield Finding("tim", "is not there", BEGIN_DEFAULTS)
    elif not isinstance(plain["tim"], dict):
        yield Finding("tim", "is not a group of keys", "leave the group, and set its keys: tim.run_dir=runs/NAME")
    mixed = list(_check_engine(plain))
    # of two engines' groups, those of one would all count as removed
    yield from mixed or _check_groups(plain, defaults_of(plain), "")


def check(config: DictConfig) -> Iterator[Finding]:
    """Wrong types, numbers out of range, unknown choices. Needs a config without interpolations."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    wrong = list(_check_types(plain, defaults_of(plain), ""))
    yield from wrong
    if not wrong:
        yield from _check_counts(config, defaults_of(plain))
        yield from _check_shares(config)
        yield from _check_sampling(config)
        yield from _check_choices(config)


def defaults_of(plain: Mapping[Any, Any]) -> dict[str, Any]:
    """verl's own values for the training engine that a config chooses."""
    return _defaults(_VERL_DEFAULTS_OF.get(str(_actor(plain).get("strategy")), _VERL_DEFAULTS))


def _actor(plain: Mapping[Any, Any]) -> Mapping[Any, Any]:
    node: Any = plain
    for name in _ACTOR.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


@cache
def _defaults(file: str) -> dict[str, Any]:
    text = resources.files("verl.trainer.config").joinpath(file).read_text(encoding="utf-8")
    # OmegaConf's loader, since YAML 1.1 reads 1e-6 as text
    plain = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _check_engine(plain: Mapping[Any, Any]) -> Iterator[Finding]:
    """The training engine is chosen by verl's group model_engine, which brings the engine's groups and its strategy."""
    actor = _actor(plain)
    strategy = actor.get("strategy")
    engine = str(strategy) if strategy in _VERL_DEFAULTS_OF else _FSDP
    there = [name for name in _VERL_DEFAULTS_OF if isinstance(actor.get(name), Mapping)]
    composed = str(plain.get("model_engine") or (there[0] if there else _FSDP))
    key = f"{_ACTOR}.strategy"
    if engine == composed or engine in there:
        return
    if engine == _FSDP:
        remedy = f"leave model_engine out, or, without a recipe, set {key}={composed}: the recipes are for FSDP2"
    else:
        remedy = f"leave this key out, or, without a recipe, choose model_engine={engine}: the recipes are for FSDP2"
    yield Finding(key, f"is {strategy}, and the config has the groups of model_engine={composed}", remedy)


def _check_groups(given: Mapping[Any, Any], reference: Mapping[Any, Any], prefix: str) -> Iterator[Finding]:
    for name, default in reference.items():
        if not isinstance(default, dict) or not default:
            continue
        key = f"{prefix}{name}"
        value = given.get(name)
        if isinstance(value, dict):
            yield from _check_groups(value, default, f"{key}.")
        elif name not in given:
            yield Finding(key, "was removed, and verl reads this group", f"drop ~{key}")
        # deeper groups may be null, as a rule to turn something off
        elif not isinstance(value, str) and (value is not None or key.count(".") < 2):
            yield Finding(key, f"is {value!r}, and verl reads a group of keys here", f"set the keys of {key} singly")


def _check_types(given: Mapping[Any, Any], reference: Mapping[Any, Any], prefix: str) -> Iterator[Finding]:
    for name, default in reference.items():
        key, value = f"{prefix}{name}", given.get(name)
        if value is None or value == "???" or (key in _CHECKED_ELSEWHERE and isinstance(value, dict)):
            continue
        if isinstance(default, dict):
            if isinstance(value, dict):
                yield from _check_types(value, default, f"{key}.")
            elif default:
                yield Finding(
                    key, f"is {value!r}, and verl reads a group of keys here", f"set the keys of {key} singly"
                )
        elif isinstance(default, bool):
            if not isinstance(value, bool):
                yield _no_boolean(key, value, default)
        elif isinstance(default, (int, float)) and (not _is_number(value) or math.isnan(value)):
            yield Finding(key, f"is {value!r}, which is not a number", f"give a number; verl's default is {default}")


def _no_boolean(key: str, value: Any, default: bool) -> Finding:
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("true", "false"):
        return Finding(
            key, f"is the text {value!r}, which Python takes for true", f"write it without quotes: {key}={word}"
        )
    return Finding(key, f"is {value!r}, which is neither true nor false", f"set {key}={str(default).lower()}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_counts(config: DictConfig, defaults: Mapping[str, Any]) -> Iterator[Finding]:
    verl = OmegaConf.create(dict(defaults))
    for key in _COUNTS:
        value = OmegaConf.select(config, key, throw_on_missing=False)
        if value is None and OmegaConf.select(verl, key) is None:
            continue
        if not (_is_number(value) and value == int(value) and value >= 1):
            yield Finding(key, f"is {'null' if value is None else repr(value)}", "give a whole number of at least 1")
    key = f"{_ACTOR}.optim.lr"
    rate = OmegaConf.select(config, key)
    if not (_is_number(rate) and 0 <= rate < math.inf):
        yield Finding(key, f"is {rate!r}", "give a learning rate of at least 0, such as 1e-6")


def _check_shares(config: DictConfig) -> Iterator[Finding]:
    key = f"{_ROLLOUT}.gpu_memory_utilization"
    value = OmegaConf.select(config, key)
    if value is not None and not (_is_number(value) and 0 < value <= 1):
        yield Finding(key, f"is {value!r}", "give a share of the GPU's memory in (0, 1], such as 0.5")


def _check_sampling(config: DictConfig) -> Iterator[Finding]:
    from verl_tim.engine import RequestError, SamplingParams

    for group in (_ROLLOUT, f"{_ROLLOUT}.val_kwargs"):
        for name in _SAMPLING:
            key = f"{group}.{name}"
            value = OmegaConf.select(config, key)
            if value is None:
                continue
            try:
                SamplingParams(**{name: value})
            except RequestError as error:
                problem, _, remedy = str(error).removeprefix(f"{name}=").partition(": ")
                yield Finding(key, f"is {problem}", remedy)
                continue
            if key == f"{_ROLLOUT}.temperature" and value == 0:
                yield Finding(
                    key,
                    "is 0: the trainer divides logits by it, and answers without chance are all alike",
                    f"give a temperature above 0; validation may be greedy: {_ROLLOUT}.val_kwargs.temperature=0",
                )


def _check_choices(config: DictConfig) -> Iterator[Finding]:
    for key, known in _choices().items():
        value = OmegaConf.select(config, key, throw_on_missing=False)
        values = list(value) if OmegaConf.is_list(value) else [value]
        options = known()
        for word in values:
            if word not in options:
                named = ", ".join(str(option) for option in options if option is not None)
                yield Finding(key, f"has no choice {word!r}", closest(str(word), named.split(", ")) + f"known: {named}")


def _choices() -> dict[str, Callable[[], list[Any]]]:
    def estimators() -> list[Any]:
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

        return sorted(str(getattr(name, "value", name)) for name in ADV_ESTIMATOR_REGISTRY)

    def loggers() -> list[Any]:
        from verl.utils.tracking import Tracking

        return sorted(Tracking.supported_backend)

    def rollouts() -> list[Any]:
        from verl.workers.rollout.replica import RolloutReplicaRegistry

        import verl_tim.plugin  # noqa: F401  our rollouts are registered by it

        return sorted(RolloutReplicaRegistry._registry)

    return {
        "trainer.resume_mode": lambda: ["auto", "disable", "resume_path"],
        "trainer.logger": loggers,
        "algorithm.adv_estimator": estimators,
        f"{_ROLLOUT}.name": rollouts,
    }
