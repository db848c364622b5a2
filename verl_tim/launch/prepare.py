"""Between a composed config and one that can run: absolute paths, model and data made, interpolations resolved."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_tim.home import NOBODY, REMEDY, expanded, of_nobody
from verl_tim.launch import environment
from verl_tim.launch.checks import keys, made
from verl_tim.launch.checks.keys import MADE_FROM
from verl_tim.launch.checks.model import KEY, TOKENIZER_KEY
from verl_tim.launch.errors import Finding, LaunchError
from verl_tim.launch.recipes import CONFIGS_PACKAGE
from verl_tim.training.determinism import make_deterministic


def absolute_paths(config: DictConfig) -> None:
    """Fix `tim.run_dir`, `tim.cache_dir` and `tim.gate.baseline` (relative or with ~), the folders of model and
    tokenizer (with ~) and the tools' files (`pkg://PACKAGE/FILE`) to absolute paths, in place; name the run by its
    folder and its trackers by what they are."""
    for name in ("run_dir", "cache_dir"):
        value = config.tim[name]
        if not value or not isinstance(value, str):
            raise LaunchError.of(f"tim.{name}", f"is {value!r}", f"give a folder: tim.{name}=FOLDER")
        if of_nobody(value):  # a folder of that name is what nobody means
            raise LaunchError.of(f"tim.{name}", f"{value}: {NOBODY}", REMEDY)
        config.tim[name] = str(expanded(value).absolute())
    _expand_homes(config)
    _name_by_folder(config)
    _name_trackers(config)
    for key in _PACKAGE_FILES:
        value = OmegaConf.select(config, key)
        if isinstance(value, str) and value.startswith(_PACKAGE_FILE):
            OmegaConf.update(config, key, _file_of_package(key, value))
    baseline = OmegaConf.select(config, "tim.gate.baseline")
    if isinstance(baseline, str):  # what else it may be, the start-up checks say
        config.tim.gate.baseline = str(expanded(baseline).absolute())


def complete(config: DictConfig, environ: Mapping[str, str] | None = None) -> None:
    """What a start adds to a config, in place: variables of the workers, and all that `tim.deterministic` sets.

    Args:
        environ: for a machine that is not this one; the process environment otherwise.

    Raises:
        LaunchError: a variable that no config can hold.
    """
    environment.add_to_workers(config, environ)
    make_deterministic(config)


def _expand_homes(config: DictConfig) -> None:
    """`~` in the folders of model and tokenizer, in place: verl hands it on as it is, and transformers takes it for the
    name of a repository."""
    for key in (KEY, TOKENIZER_KEY):
        path = OmegaConf.select(config, key, throw_on_missing=False)
        if isinstance(path, str) and path.startswith("~"):
            OmegaConf.update(config, key, os.path.expanduser(path))


def _name_by_folder(config: DictConfig) -> None:
    """A run whose name nobody chose has its folder's, so that `compare` and the trackers call it alike."""
    node = config.trainer._get_node("experiment_name")
    if node is not None and node._value() in _default_names():
        config.trainer.experiment_name = Path(config.tim.run_dir).name


def _default_names() -> set[str]:
    """What tim.yaml, and an option of routing_replay in its place, call a run; not resolved."""
    folder = resources.files(CONFIGS_PACKAGE)
    files = [folder.joinpath("tim.yaml"), *folder.joinpath("routing_replay").iterdir()]
    found = [OmegaConf.create(file.read_text(encoding="utf-8")) for file in files if file.name.endswith(".yaml")]
    return {one.trainer._get_node("experiment_name")._value() for one in found if "trainer" in one}


def _name_trackers(config: DictConfig) -> None:
    """Of several chosen trackers each option's file has written its own name over the others'; a recipe without the
    group `tracker` logs to the file."""
    if config.tim.choices.tracker is None:
        OmegaConf.update(config, "tim.trackers.file", True, force_add=True)
        return
    chosen = [str(name) for name in config.tim.trackers if name not in ("console", "file")]
    config.tim.choices.tracker = ",".join(chosen) or ("file" if "file" in config.tim.trackers else "console")


# Files that verl opens by their path, and that may stand in a package: pkg://PACKAGE/FILE.
_PACKAGE_FILES = tuple(
    f"actor_rollout_ref.rollout.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path")
)
_PACKAGE_FILE = "pkg://"


def _file_of_package(key: str, value: str) -> str:
    package, _, name = value.removeprefix(_PACKAGE_FILE).partition("/")
    try:
        file = resources.files(package).joinpath(name)
    except ModuleNotFoundError as error:
        raise LaunchError.of(key, f"{value}: {error}", "write pkg://PACKAGE/FILE, or the path of a file") from error
    if not name or not file.is_file():
        raise LaunchError.of(key, f"{value}: there is no such file", "write pkg://PACKAGE/FILE, or the path of a file")
    return str(file)


def to_make(config: DictConfig) -> str:
    """What `make_missing` would do for this config, as text: equal texts, equal files. Empty: nothing is to be made.

    Args:
        config: with absolute paths; interpolations may be left in it.
    """
    paths = {key: OmegaConf.select(config, key, throw_on_missing=False) for key in MADE_FROM}
    if all(paths.values()):
        return ""
    made_from = {key: _group(config, key) for key in ("tim.task", "tim.model")}
    given = {
        key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for key, value in paths.items()
    }
    return json.dumps([config.tim.cache_dir, made_from, given], sort_keys=True)


def made_paths(config: DictConfig) -> dict[str, Any]:
    """Key -> path of everything that `make_missing` fills."""
    return {key: OmegaConf.select(config, key) for key in MADE_FROM}


def make_missing(config: DictConfig, *, progress: bool = True) -> None:
    """Build the data sets and the base model that the config leaves to this package (null paths), or find them again.

    Fills `data.train_files`, `data.val_files` and `actor_rollout_ref.model.path` in place. Raises LaunchError when a
    setting of `tim.task` or `tim.model` cannot be used.
    """
    if config.data.train_files is None or config.data.val_files is None:
        make_data(config, progress=progress)
    if config.actor_rollout_ref.model.path is None:
        make_model(config, progress=progress)


def find_made(config: DictConfig) -> list[Finding]:
    """Fill the null paths of `make_missing` whose files are in the cache already, in place, and make nothing.

    Returns what a start would refuse: a folder of the cache that is not as it was made, or cannot be read.
    """
    from verl_tim.tasks.artifact import NotMade, only_found

    if any(keys.check(config)) or any(made.check_settings(config)):
        return []  # of such settings nothing was made, and the checks say it
    wanted = []
    if config.data.train_files is None or config.data.val_files is None:
        wanted.append(make_data)
    if config.actor_rollout_ref.model.path is None:
        wanted.append(make_model)
    found: list[Finding] = []
    for make in wanted:
        try:
            with only_found(), suppress(NotMade):
                make(config, progress=False)
        except LaunchError as error:
            if isinstance(error.__cause__, OSError):  # nothing is written here
                found.append(Finding("tim.cache_dir", f"cannot be read: {error.__cause__}", "give one that can be"))
            else:
                found += error.findings
    return found


def make_data(config: DictConfig, *, progress: bool = True) -> None:
    """The null ones of `data.train_files` and `data.val_files`, from `tim.task`, which names a task (checks.keys)."""
    task = _group(config, "tim.task")
    from verl_tim.tasks.errors import InputError
    from verl_tim.tasks.task_data import task_files

    name = task.pop("name")
    try:
        files = task_files(name, **task, cache_dir=config.tim.cache_dir, progress=progress)
    except (InputError, TypeError) as error:
        raise LaunchError.of("tim.task", str(error), "see configs/task/ for the settings of each task") from error
    except OSError as error:
        raise _not_written(error) from error
    if config.data.train_files is None:
        config.data.train_files = str(files.train)
    if config.data.val_files is None:
        validation = [str(path) for path in files.validation]
        config.data.val_files = validation[0] if len(validation) == 1 else validation


def make_model(config: DictConfig, *, progress: bool = True) -> None:
    """`actor_rollout_ref.model.path` from `tim.model` (which must name a kind: checks.keys)."""
    model = _group(config, "tim.model")
    if not model.get("task"):
        raise LaunchError.of(
            "tim.model.task",
            "is null: a project-made model is warmed up on a task",
            "set tim.model.task=chain_sum, or model=hf and its path",
        )
    from verl_tim.tasks.base_model import build_base_model
    from verl_tim.tasks.errors import InputError

    kind = model.pop("kind")
    try:
        path = build_base_model(kind, **model, cache_dir=config.tim.cache_dir, progress=progress)
    except (InputError, TypeError) as error:
        raise LaunchError.of("tim.model", str(error), "see configs/model/ for the settings of each model") from error
    except OSError as error:
        raise _not_written(error) from error
    # the warm-up did not bring the model where RL can begin
    except RuntimeError as error:
        raise LaunchError.of(
            "tim.model.difficulty", str(error), "make the task easier, or take model=hf and a model that can do it"
        ) from error
    config.actor_rollout_ref.model.path = str(path)


def _not_written(error: OSError) -> LaunchError:
    return LaunchError.of("tim.cache_dir", str(error), "give a folder with room that can be written to")


def resolve(config: DictConfig) -> None:
    """Replace every interpolation by its value, in place; Hydra's own node stays as it is.

    The trainer runs in another process, where Hydra's resolvers (`now`) do not exist, and verl hands Ray's runtime
    environment on without resolving it.
    """
    for key in config:
        if key == "hydra" or OmegaConf.is_missing(config, key):
            continue
        node = config[key]
        if not OmegaConf.is_config(node):
            continue
        try:
            OmegaConf.resolve(node)
        except OmegaConfBaseException as error:
            raise _unresolved(error, key) from error


def _group(config: DictConfig, key: str) -> dict:
    node = OmegaConf.select(config, key)
    if node is None:
        return {}
    try:
        container = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise _unresolved(error, key) from error
    assert isinstance(container, dict)
    return container


def _unresolved(error: OmegaConfBaseException, key: Any) -> LaunchError:
    return LaunchError.of(str(error.full_key or key), str(error).splitlines()[0], "give it a value")
