"""A reward function of the user's own: verl loads it inside its reward workers, after Ray and the models are up."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch.errors import Finding

# verl 0.9.1 lets the old group win where anything is set in it (experimental/reward_loop/reward_loop.py:59).
_OLD, _NEW = "custom_reward_function", "reward.custom_reward_function"


def check(config: DictConfig) -> Iterator[Finding]:
    """A file that is absent or does not load, a name it does not define, a name that is missing or no function."""
    old = OmegaConf.select(config, _OLD) or {}
    group = _OLD if any(value is not None for value in old.values()) else _NEW
    path, name = (OmegaConf.select(config, f"{group}.{key}") for key in ("path", "name"))
    if not path:
        if group == _OLD:
            yield Finding(f"{group}.path", f"is not given, and {group}.name is {name}", f"set {group}.path=FILE.py")
        return
    if not name:
        yield Finding(f"{group}.name", f"is not given for {path}", f"set {group}.name=FUNCTION")
        return
    from verl.utils.import_utils import load_module

    try:
        module = load_module(str(path))
    # the user's code runs here, as it will in verl; a script of theirs may end with an exit
    except (Exception, SystemExit) as error:
        cause = error.__cause__ or error
        problem = f"{path} cannot be loaded: {type(cause).__name__}: {cause}"
        yield Finding(f"{group}.path", problem, "give a Python file, or pkg://PACKAGE.MODULE, that can be imported")
        return
    if not hasattr(module, str(name)):
        yield Finding(f"{group}.name", f"{path} defines no {name}", f"set {group}.name to a function in it")
    elif not callable(getattr(module, str(name))):
        yield Finding(f"{group}.name", f"{name} in {path} is no function", f"set {group}.name to a function in it")
