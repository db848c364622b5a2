"""Between a composed config and one that can run: absolute paths, model and data made, interpolations resolved."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_tim.launch.errors import LaunchError


def absolute_paths(config: DictConfig) -> None:
    """Fix `tim.run_dir`, `tim.cache_dir` and `tim.gate.baseline` (relative or with ~) to absolute paths, in place."""
    for name in ("run_dir", "cache_dir"):
        value = config.tim[name]
        if not value or not isinstance(value, str):
            raise LaunchError.of(f"tim.{name}", f"is {value!r}", f"give a folder: tim.{name}=FOLDER")
        config.tim[name] = str(Path(value).expanduser().absolute())
    baseline = OmegaConf.select(config, "tim.gate.baseline")
    if isinstance(baseline, str):  # what else it may be, the start-up checks say
        config.tim.gate.baseline = str(Path(baseline).expanduser().absolute())


def make_missing(config: DictConfig, *, progress: bool = True) -> None:
    """Build the data sets and the base model that the config leaves to this package (null paths), or find them again.

    Fills `data.train_files`, `data.val_files` and `actor_rollout_ref.model.path` in place. Raises LaunchError when a
    setting of `tim.task` or `tim.model` cannot be used.
    """
    if config.data.train_files is None or config.data.val_files is None:
        make_data(config, progress=progress)
    if config.actor_rollout_ref.model.path is None:
        make_model(config, progress=progress)


def make_data(config: DictConfig, *, progress: bool = True) -> None:
    """The null ones of `data.train_files` and `data.val_files`, from `tim.task`, which names a task (checks.keys)."""
    task = _group(config, "tim.task")
    from verl_tim.tasks.dataset import build_dataset
    from verl_tim.tasks.errors import InputError

    name = task.pop("name")
    try:
        paths = build_dataset(name, **task, cache_dir=config.tim.cache_dir, progress=progress)
    except (InputError, TypeError) as error:
        raise LaunchError.of("tim.task", str(error), "see configs/task/ for the settings of each task") from error
    except OSError as error:
        raise _not_written(error) from error
    if config.data.train_files is None:
        config.data.train_files = str(paths.train)
    if config.data.val_files is None:
        config.data.val_files = str(paths.validation)


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
            raise LaunchError.of(str(error.full_key or key), str(error).splitlines()[0], "give it a value") from error


def _group(config: DictConfig, key: str) -> dict:
    node = OmegaConf.select(config, key)
    if node is None:
        return {}
    container = OmegaConf.to_container(node, resolve=True)
    assert isinstance(container, dict)
    return container
