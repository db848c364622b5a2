"""What the chosen trackers need before a run starts: their package, and a login where they send metrics away.

verl starts its trackers after the workers, so what is missing would be found minutes later.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from verl_tim.home import expanded
from verl_tim.launch.errors import Finding
from verl_tim.training.config import WORKER_ENVIRONMENT, joins_a_cluster

KEY = "trainer.logger"

# Logger name in trainer.logger -> the package it imports, and how to get it.
PACKAGES = {
    "wandb": ("wandb", "pip install 'verl_tim[wandb]'"),
    "tensorboard": ("tensorboard", "pip install 'verl_tim[tensorboard]'"),
    "swanlab": ("swanlab", "pip install 'verl_tim[swanlab]'"),
    "mlflow": ("mlflow", "pip install 'verl_tim[mlflow]'"),
    "trackio": ("trackio", "pip install 'verl_tim[trackio]'"),
    "clearml": ("clearml", "pip install clearml"),
}
WANDB_HOST = "https://api.wandb.ai"


def check(config: DictConfig) -> Iterator[Finding]:
    """Packages of `trainer.logger` that are not installed; wandb or SwanLab set to send, and nobody logged in."""
    loggers = config.trainer.logger
    for name in [loggers] if isinstance(loggers, str) else loggers:
        package, remedy = PACKAGES.get(name, (None, ""))
        if package is not None and find_spec(package) is None:
            yield Finding(KEY, f"{name} is not installed", f"{remedy}, or take tracker=file")
        elif name == "wandb":
            yield from _wandb_login(config)
        elif name == "swanlab":
            yield from _swanlab(config)


def _wandb_login(config: DictConfig) -> Iterator[Finding]:
    if joins_a_cluster(config) or _variable(config, "WANDB_MODE") not in (None, "", "online", "run"):
        return
    if _variable(config, "WANDB_API_KEY") or _variable(config, "WANDB_IDENTITY_TOKEN_FILE"):
        return
    base = _variable(config, "WANDB_BASE_URL")
    if base is None and (expanded("~/.config/wandb/settings").exists() or Path("wandb/settings").exists()):
        return  # a server may be named there
    host = urlsplit(base or WANDB_HOST).hostname or ""
    if not any(_in_netrc(expanded(file), host) for file in _netrc_files()):
        yield Finding(
            KEY,
            f"wandb sends to {host}, and there is no login for it (WANDB_API_KEY, or an entry in ~/.netrc)",
            "wandb login, or set WANDB_MODE=offline and send later with wandb sync",
        )


def _netrc_files() -> list[str]:
    return [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]


def _in_netrc(file: Path, host: str) -> bool:
    try:
        return file.is_file() and netrc.netrc(file).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return True  # wandb, which reads it its own way, will say what is wrong


def _swanlab(config: DictConfig) -> Iterator[Finding]:
    mode = _variable(config, "SWANLAB_MODE") or "cloud"
    if mode == "local" and find_spec("swanboard") is None:
        # SwanLab logs the missing package as an error and keeps nothing to look at
        yield Finding(KEY, "swanlab in mode local needs the package swanboard", "pip install 'swanlab[dashboard]'")
    if mode not in ("cloud", "online") or joins_a_cluster(config) or _variable(config, "SWANLAB_API_KEY"):
        return
    folder = expanded(_variable(config, "SWANLAB_SAVE_DIR") or "~/.swanlab")
    if not (folder / ".netrc").is_file():
        yield Finding(
            KEY,
            f"swanlab sends to its cloud, and there is no login (SWANLAB_API_KEY, or {folder / '.netrc'})",
            "swanlab login, or set SWANLAB_MODE=offline and send later with swanlab sync",
        )


def _variable(config: DictConfig, name: str) -> Any:
    """A variable as the run's processes will see it."""
    given = OmegaConf.select(config, f"{WORKER_ENVIRONMENT}.{name}")
    return os.environ.get(name) if given is None else given
