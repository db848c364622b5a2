"""The tasks: one row of `TASKS` each, all of them procedural sets of reasoning-gym with its generators and verifiers.

A row only says which generator, at which difficulty by default. Any other set of reasoning-gym is a task, too, under
its own name, at the difficulty of its own defaults; a row is for what is worth listing and teaching the tokenizer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from verl_tim.tasks.errors import InputError
from verl_tim.tasks.published.sources import PUBLISHED

DATA_SOURCE_PREFIX = "reasoning_gym/"


@dataclass(frozen=True)
class Task:
    """One procedural task.

    Attributes:
        name: reasoning-gym's name of the set.
        summary: one line for listings.
        difficulty: generator settings that differ from reasoning-gym's own defaults.
    """

    name: str
    summary: str
    difficulty: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data_source(self) -> str:
        """What the `data_source` column of a row says; the reward function finds the verifier by it."""
        return DATA_SOURCE_PREFIX + self.name


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task(
                "chain_sum",
                "chains of additions and subtractions",
                {"min_terms": 4, "max_terms": 4, "min_digits": 1, "max_digits": 1},
            ),
            Task("gsm_symbolic", "grade-school word problems from symbolic templates"),
            Task(
                "basic_arithmetic",
                "arithmetic with + - * / and parentheses",
                {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            ),
            Task(
                "products",
                "products of integers",
                {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
            ),
            Task(
                "simple_equations",
                "linear equations in one unknown",
                {"min_terms": 2, "max_terms": 3, "max_value": 20},
            ),
        )
    }
)


def get_task(name: str) -> Task:
    """The row called `name`, or reasoning-gym's set of that name. Raises InputError that lists the known tasks."""
    if name in TASKS:
        return TASKS[name]
    if name not in PUBLISHED and name in (sets := _generators()):
        return Task(name, (sets[name][0].__doc__ or "").strip().partition("\n")[0])
    near = difflib.get_close_matches(str(name), [*TASKS, *PUBLISHED, *_generators()], n=3)
    raise InputError(
        f"task: unknown task {name!r}; known tasks: {', '.join(sorted(TASKS))}, and every other set of reasoning-gym; "
        f"published data sets: {', '.join(sorted(PUBLISHED))}" + (f"; did you mean {', '.join(near)}?" if near else "")
    )


def task_of_data_source(data_source: str) -> Task:
    """The task whose rows carry this `data_source`. Raises InputError for any other string."""
    name = data_source.removeprefix(DATA_SOURCE_PREFIX) if isinstance(data_source, str) else None
    if name is None or name == data_source or (name not in TASKS and name not in _generators()):
        known = ", ".join(task.data_source for task in TASKS.values())
        raise InputError(
            f"data_source: {data_source!r} has no verifier here (known: {known}); rows of other data sets need their "
            "own reward function: set reward.custom_reward_function.path and .name (for mathematics "
            "pkg://verl_tim.tasks.math.reward)"
        )
    return get_task(name)


def resolve_difficulty(task: Task, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Every setting of the task's generator, defaults filled in: reasoning-gym's, then the row's, then `overrides`.

    Raises InputError for a setting the generator does not have (it lists those it has) and for values it refuses.
    """
    config_class = _generator_classes(task)[1]
    known = {item.name for item in fields(config_class)} - {"seed", "size"}
    given = {name: _plain(value) for name, value in (overrides or {}).items()}
    unknown = sorted(set(given) - known)
    if unknown:
        raise InputError(
            f"difficulty: task {task.name} has no setting {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(sorted(known))}"
        )
    try:
        config = config_class(**{**task.difficulty, **given})
        config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"difficulty: task {task.name} refuses {given}: {error}") from error
    return {name: _plain(getattr(config, name)) for name in sorted(known)}


def make_generator(task: Task, difficulty: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """reasoning-gym's procedural set: entry i is {"question", "answer", "metadata"}, a function of (seed, i) only."""
    dataset_class, config_class = _generator_classes(task)
    return dataset_class(config_class(**difficulty, seed=seed, size=size))


def generator_version() -> str:
    """The installed reasoning-gym: problems and verifiers are a function of it."""
    return version("reasoning-gym")


def _generator_classes(task: Task) -> tuple[type, type]:
    return _generators()[task.name]


def _generators() -> Mapping[str, tuple[type, type]]:
    # reasoning-gym imports every one of its sets (seconds); only who needs problems or verifiers pays for that
    import reasoning_gym  # noqa: F401  (registers the sets)
    from reasoning_gym.factory import DATASETS

    return DATASETS


def _plain(value: Any) -> Any:
    # tuples, and OmegaConf's lists where the settings come from Hydra
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
