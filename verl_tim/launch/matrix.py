"""Several runs of one recipe: a `matrix=` option, Hydra's sweeps (`data.seed=1,2`), or both multiplied.

Every run is a process and a Ray cluster of its own: what a run hands to Ray's workers (the path of its metrics among
it) is fixed when Ray starts. So neither `verl-tim train` nor the callback for a plain `main_ppo -m` lets Hydra's
sweeper run them in one process; both come here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.home import NOBODY, REMEDY, expanded, of_nobody
from verl_tim.launch.compose import RECIPE_KEY, compose_config, hydra_for
from verl_tim.launch.errors import Finding, LaunchError
from verl_tim.launch.exit_code import INTERRUPTED
from verl_tim.launch.recipes import Recipe, closest, find_recipe
from verl_tim.launch.record import deciding, held, key_of, read_record, write_record
from verl_tim.launch.run_folder import KEY, State, has_checkpoint, state_of

_GROUP = re.compile(r"\+{0,2}matrix=")
_GROUP_OF_TRACKERS = "tim.tracking.group="


@dataclass(frozen=True)
class Cell:
    """One run of a matrix: its name, and the overrides that make it of the recipe.

    Attributes:
        recipe: that the cell names (`recipe=NAME` among its words); None: the matrix's.
    """

    name: str
    overrides: tuple[str, ...]
    recipe: Recipe | None = None

    @property
    def words(self) -> list[str]:
        """All that makes this run, as the record keeps it."""
        return [*([f"recipe={self.recipe.name}"] if self.recipe else []), *self.overrides]

    def is_in(self, record: Mapping[str, Sequence[str]]) -> bool:
        """Whether a record (`read_record`) says that this very run, wherever its folder lay, ended well."""
        return self.name in record and set(record[self.name]) == set(deciding(self.words))


@dataclass(frozen=True)
class Matrix:
    """The runs of a recipe, and the folder that theirs are made in."""

    recipe: Recipe
    folder: Path
    cells: tuple[Cell, ...]


def asks_for_several(overrides: Sequence[str]) -> bool:
    """Whether overrides choose a matrix."""
    return any(_GROUP.match(word) for word in overrides)


def sweeps_in(overrides: Sequence[str]) -> list[str]:
    """The overrides that name several values, as Hydra reads them."""
    return [word for word, parsed in zip(overrides, _parsed(overrides), strict=True) if parsed.is_sweep_override()]


def matrix_of(recipe: Recipe, overrides: Sequence[str]) -> Matrix:
    """The runs that overrides ask for: every cell of the matrix with every combination of the swept values.

    Args:
        overrides: of a command line, without `recipe=` and Hydra's flags.

    Raises:
        LaunchError: words, keys and options that do not exist; `tim.only` that picks nothing.
    """
    swept = sweeps_in(overrides)
    common = [word for word in overrides if word not in swept]
    with hydra_for(recipe):
        config = compose_config(recipe, common)
    swept, common = _with_own_sweep(config, swept, common)
    if of_nobody(str(config.tim.run_dir)):
        raise LaunchError.of("tim.run_dir", f"{config.tim.run_dir}: {NOBODY}", REMEDY)
    folder = expanded(str(config.tim.run_dir)).absolute()
    kept = [
        word
        for word in common
        if not _GROUP.match(word)
        and not word.lstrip("+").startswith(("tim.run_dir=", "tim.only=", "tim.matrix.", "tim.sweep"))
    ]
    # trackers then show together what `compare` is given together
    group = [word for word in kept if word.lstrip("+").startswith(_GROUP_OF_TRACKERS)]
    kept = [word for word in kept if word not in group]
    filed = group[-1] if group else f"{_GROUP_OF_TRACKERS}'{folder.name}'"
    cells = []
    chosen = _chosen(config)
    _refuse_without_effect(kept, chosen)
    # swept values go outside: what is cut off has then compared all names with the first values, the first seed say
    for values in product(*(_values(word) for word in swept)):
        for name, given in chosen.items():
            named = [word for word in given if word.startswith(RECIPE_KEY)]
            own = find_recipe(named[-1].removeprefix(RECIPE_KEY)) if named else None
            words = [word for word in given if word not in named]
            parts = [part for part in (name, *(_as_name(value) for value in values)) if part]
            cell = "-".join(parts) or "run"
            place = (filed, f"trainer.experiment_name='{cell}'", f"tim.run_dir='{folder / cell}'")
            cells.append(Cell(cell, (*kept, *words, *values, *place), own))
    return Matrix(recipe, folder, tuple(cells))


def _with_own_sweep(config: DictConfig, swept: Sequence[str], common: Sequence[str]) -> tuple[list[str], list[str]]:
    """The matrix's own sweep, `tim.sweep: {KEY: [VALUE, ...]}`, beside the command line's; what that says of a key goes
    first, one value too, and stands in the runs' names as the others would."""
    own: Any = OmegaConf.to_container(OmegaConf.select(config, "tim.sweep") or OmegaConf.create({}), resolve=True)
    added, left = [], list(common)
    for key, values in own.items():
        if any(key_of(word) == key for word in swept):
            continue
        said = [word for word in left if key_of(word) == key]
        left = [word for word in left if word not in said]
        added.append(said[-1] if said else f"{key}={','.join(map(str, values))}")
    return [*swept, *added], left


def prepared(matrix: Matrix, ready: Callable[[Recipe, Sequence[str]], DictConfig]) -> dict[str, DictConfig]:
    """The config of every run that is still to be done, checked; nothing is started while one of them cannot be.

    Args:
        ready: `start.ready_of_several()`.

    Raises:
        LaunchError: what any of the runs cannot start for, each finding once, with the names of its runs.
    """
    done = finished(matrix)
    configs: dict[str, DictConfig] = {}
    problems: dict[Finding, list[str]] = {}
    left = unfinished(matrix)
    for cell in left:
        try:
            config = ready(cell.recipe or matrix.recipe, cell.overrides)
            if cell.name in done:
                _check_not_lost(cell, config, done[cell.name])
            configs[cell.name] = config
        except LaunchError as error:
            for finding in error.findings:
                problems.setdefault(finding, []).append(cell.name)
    if problems:
        raise LaunchError(
            [
                Finding(
                    finding.key,
                    f"{finding.problem} (in {_some(names)})",
                    # the others could be done meanwhile
                    finding.remedy + ("; or leave those runs out, by tim.only" if len(names) < len(left) else ""),
                )
                for finding, names in problems.items()
            ]
        )
    return configs


def _check_not_lost(cell: Cell, config: DictConfig, then: Sequence[str]) -> None:
    """A run that ended well with other overrides goes on from its checkpoint; without one it would be begun anew, and
    what it did removed.

    Raises:
        LaunchError: naming the overrides that differ.
    """
    state, _ = state_of(config, resumable=True)
    if state is State.FREE or has_checkpoint(config):
        return
    now = deciding(cell.words)
    changed = [
        *(f"{word} then" for word in then if word not in now),
        *(f"{word} now" for word in now if word not in then),
    ]
    raise LaunchError.of(
        KEY,
        f"{config.tim.run_dir} holds a run that ended well with other overrides ({', '.join(changed)})",
        f"give those, or another {KEY}, or remove that folder",
    )


def run_all(
    matrix: Matrix,
    configs: dict[str, DictConfig],
    run: Callable[[DictConfig, str], int],
    say: Callable[[str], None],
    show: Callable[[str], None] = lambda name: None,
) -> int:
    """The prepared runs one after another. One that fails, or cannot be started, keeps none of the others from running.

    Args:
        run: a config and its cell's name -> exit code.
        say: a line for who watches.
        show: the result of the run of that name, once that it ended well is written down: who cannot show it any more
            has not lost the run.

    Returns:
        0, or the exit code of the first run that failed (1 of one that could not be started); 130 at once if one was
        interrupted.

    Raises:
        LaunchError: another command does runs of the matrix's folder.
    """
    failed = 0
    with held(matrix.folder):
        for number, (name, config) in enumerate(configs.items(), start=1):
            say(f"run {number} of {len(configs)}: {name}")
            try:
                code = run(config, name)
            except LaunchError as error:
                # its folder was taken meanwhile, or cannot be written to
                say(f"{name} could not be started: {error}")
                failed = failed or 1
                continue
            if code == INTERRUPTED:
                return code
            if code:
                say(f"{name} ended with exit code {code}; its log is in {config.tim.run_dir}")
                failed = failed or code
            else:
                try:
                    record(matrix, name)
                except OSError as error:
                    # the others may still have room, and go on
                    say(f"{name}: {error}: that it ended well is not written down")
            show(name)
    return failed


def unfinished(matrix: Matrix) -> list[Cell]:
    """The runs that are still to be done."""
    done = finished(matrix)
    return [cell for cell in matrix.cells if not cell.is_in(done)]


def finished(matrix: Matrix) -> dict[str, list[str]]:
    """Runs of the matrix's folder that ended well, with the overrides they had."""
    return read_record(matrix.folder)


def record(matrix: Matrix, name: str) -> None:
    """Remember that a run ended well."""
    (words,) = (cell.words for cell in matrix.cells if cell.name == name)
    write_record(matrix.folder, {**finished(matrix), name: words})


def _chosen(config: DictConfig) -> dict[str, list[str]]:
    """The cells that `tim.only` picks of `tim.matrix`, in its order; one without a name where there is none."""
    node = OmegaConf.select(config, "tim.matrix")
    if node is None:
        return {"": []}
    given: Any = OmegaConf.to_container(node, resolve=True)
    cells = {}
    for name, words in given.items():
        cells[name] = list(_flat(words))
        if not isinstance(words, list) or not all(isinstance(word, str) for word in cells[name]):
            raise LaunchError.of(f"tim.matrix.{name}", f"is {words!r}", "give a list of overrides: [rollout=vllm, ...]")
    only = OmegaConf.select(config, "tim.only") or "*"
    patterns = [only] if isinstance(only, str) else [str(pattern) for pattern in only]
    for pattern in patterns:
        if not fnmatch.filter(cells, pattern):
            raise LaunchError.of(
                "tim.only", f"{pattern!r} picks no run", closest(pattern, list(cells)) + f"known: {', '.join(cells)}"
            )
    return {name: words for name, words in cells.items() if any(fnmatch.fnmatchcase(name, one) for one in patterns)}


def _refuse_without_effect(common: Sequence[str], cells: Mapping[str, Sequence[str]]) -> None:
    """Of one key the last word counts, and a run's own come after the command line's.

    Raises:
        LaunchError: words of the command line that a run would not have, with what it has instead.
    """
    found = []
    for word in common:
        others = {
            name: own for name, words in cells.items() if (own := _of_key(key_of(word), words)) not in (None, word)
        }
        if others:
            name, own = next(iter(others.items()))
            more = f", and {len(others) - 1} more runs" if len(others) > 1 else ""
            found.append(
                Finding(
                    key_of(word),
                    f"{word} would have no effect on {name}, which is made by {own}{more}",
                    "leave it out; pick runs by tim.only, or set keys that the runs do not: for another model "
                    "actor_rollout_ref.model.path=FOLDER",
                )
            )
    if found:
        raise LaunchError(found)


def _of_key(key: str, words: Sequence[str]) -> str | None:
    return next((word for word in reversed(words) if key_of(word) == key), None)


def _flat(words: Any) -> Iterator[Any]:
    """Lists in a list, so that a matrix can name what several runs share once, by a YAML anchor."""
    for word in words if isinstance(words, list) else [words]:
        yield from _flat(word) if isinstance(word, list) else [word]


def _parsed(overrides: Sequence[str]) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise LaunchError.of(
            error.override, str(error).splitlines()[0], "write KEY=VALUE; quote values with special characters"
        ) from error


def _values(word: str) -> list[str]:
    """`data.seed=1,2` as `data.seed=1` and `data.seed=2`, the way Hydra's own sweeper splits it."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    (batch,) = BasicSweeper.split_arguments(_parsed([word]), max_batch_size=None)
    return [one for (one,) in batch]


def _as_name(override: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", override.lstrip("+"))


def _some(names: Sequence[str], shown: int = 4) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
