"""Keys of the `tim` group that nobody reads, and keys that are left to the user and have no value."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch import cluster
from verl_tim.launch.errors import Finding
from verl_tim.launch.recipes import CONFIGS_PACKAGE, closest

# Arguments of the task's generator and of the model's maker, which know them, and say so when they are made. And what
# only the user's cluster knows.
_FREE = ("tim.task.difficulty", *(f"tim.model.{name}" for name in ("difficulty", "shape", "warmup")), *cluster.FREE)

# verl's own YAML leaves this one unset and never reads it while reward.reward_model.enable is false.
_UNSET_BY_VERL = ("reward.reward_model.rollout.name",)

# Null in these is filled at the start by what this package makes, if the key beside it says what to make.
MADE_FROM = {
    "data.train_files": "tim.task.name",
    "data.val_files": "tim.task.name",
    "actor_rollout_ref.model.path": "tim.model.kind",
}
_HOW_TO_SET = {
    "data.train_files": "set it to a parquet file (prompt, data_source, reward_model), or take a task that has them",
    "data.val_files": "set it to a parquet file, or take a task that has them",
    "actor_rollout_ref.model.path": "set it to a Hugging Face folder or a name on the hub, or take model=tiny_qwen3",
}


def check(config: DictConfig) -> Iterator[Finding]:
    """Unknown keys under `tim`, mandatory values (`???`) that are missing, data or model that nobody gives or makes."""
    known = sorted(known_tim_keys())
    given = OmegaConf.to_container(config.tim, resolve=False) if config.get("tim") is not None else {}
    for key in sorted(_walk(given, "tim")):
        if key not in known and not key.startswith(tuple(f"{free}." for free in _FREE)):
            yield Finding(
                key, "is not a key of verl_tim", closest(key, known) + "known: " + ", ".join(_siblings(key, known))
            )
    for key in sorted(OmegaConf.missing_keys(config)):
        if key not in _UNSET_BY_VERL:
            yield Finding(key, "has no value", f"set {key}=VALUE")
    for key, made_from in MADE_FROM.items():
        if OmegaConf.select(config, key, throw_on_missing=False) is None and not OmegaConf.select(config, made_from):
            yield Finding(key, f"is not given, and {made_from} names nothing to make", _HOW_TO_SET[key])


# Arguments of a library's function, which may have more than verl's YAML names, and what the correction checks itself.
_NOT_VERLS = ("ray_kwargs", "algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss.rollout_correction")

# The nodes that verl turns into its config classes inside its workers: an unknown name there ends the run.
CLASSES = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout")

# How alike two long names must be for one to be the other misspelt, where it is more than one slip.
_MISSPELT = 0.85
# And where the name is wrong for certain, and only the one that was meant is guessed.
_GUESSED = 0.6


def check_spelling(config: DictConfig) -> Iterator[Finding]:
    """Keys outside `tim:` that verl does not have and that look like one it has, or that a config class of verl's
    refuses.

    On a command line Hydra refuses them; in a YAML, or behind a +, verl passes most of them over in silence. Outside
    those classes names that look like nothing known are left alone: verl and its libraries read some that no default
    config declares.
    """
    from verl_tim.launch.checks.values import defaults_of

    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    yield from _misspelt({name: plain[name] for name in plain if name != "tim"}, defaults_of(plain), "")


def _misspelt(given: Mapping[Any, Any], known: Mapping[Any, Any], prefix: str) -> Iterator[Finding]:
    target = known.get("_target_")
    fields = _fields(target)
    refuses = (
        bool(fields) and prefix.startswith(tuple(f"{key}." for key in CLASSES)) and given.get("_target_") == target
    )
    for name, value in given.items():
        key = f"{prefix}{name}"
        default = known.get(name)
        if key in _NOT_VERLS:
            continue
        if isinstance(value, dict) and isinstance(default, dict) and default:
            yield from _misspelt(value, default, f"{key}.")
        elif name not in known and name not in fields:
            near = _meant(str(name), sorted({*map(str, known), *fields}), _GUESSED if refuses else _MISSPELT)
            if near:
                yield Finding(key, "is not a key of verl", f"did you mean {prefix}{near}?")
            elif refuses:
                kind = str(target).rpartition(".")[2]
                yield Finding(key, f"is not a key of verl, whose {kind} refuses it", "take it out")


def _meant(name: str, known: Sequence[str], cutoff: float) -> str:
    """The known name that `name` is, misspelt; empty where there is none.

    One slip is enough in a name of any length: what is alike by difflib's measure is a long name with a few letters
    wrong, and to it the two letters of `nmae` are half of `name`.
    """
    slips = [one for one in known if _is_one_slip(name, one)]
    near = slips or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return near[0] if near else ""


def _is_one_slip(name: str, other: str) -> bool:
    """Whether two names differ by two neighbours in each other's place, one letter too many, or another letter.

    Names of one letter (`n`) are all alike; of two, only those with the same letters.
    """
    shorter, longer = sorted((name, other), key=len)
    if len(longer) == len(shorter):
        differing = [place for place in range(len(name)) if name[place] != other[place]]
        if len(differing) == 1:
            return len(name) > 2
        first, last = differing[0], differing[-1]
        return len(differing) == 2 and last == first + 1 and name[first : last + 1] == other[last] + other[first]
    one_more = len(longer) == len(shorter) + 1 and len(shorter) > 2
    return one_more and any(longer[:place] + longer[place + 1 :] == shorter for place in range(len(longer)))


def _fields(target: Any) -> frozenset[str]:
    """Names that the config class behind a node has beside those of its YAML."""
    import dataclasses

    from hydra.utils import get_class

    kind = get_class(target) if isinstance(target, str) else None
    return (
        frozenset(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else frozenset()
    )


@cache
def known_tim_keys() -> frozenset[str]:
    """Every dotted key under `tim` that a file of configs/ declares."""
    keys: set[str] = set()
    root = resources.files(CONFIGS_PACKAGE)
    folders = [root, *(entry for entry in root.iterdir() if entry.is_dir() and entry.name != "__pycache__")]
    for folder in folders:
        for entry in folder.iterdir():
            if entry.name.endswith(".yaml"):
                group = OmegaConf.to_container(OmegaConf.create(entry.read_text(encoding="utf-8")), resolve=False)
                assert isinstance(group, dict)
                keys.update(_walk(group.get("tim", {}), "tim"))
    return frozenset(keys)


def _walk(node: Any, prefix: str) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield f"{prefix}.{name}"
            yield from _walk(value, f"{prefix}.{name}")


def _siblings(key: str, known: list[str]) -> list[str]:
    parent = key.rpartition(".")[0]
    return [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
