"""Environment variables of a run's workers: which are handed on, and which are secrets that no file may hold.

Workers on other machines inherit the environment of their node's Ray, not that of the shell which starts the run, and
verl hands on five names only (verl 0.9.1, trainer/constants_ppo.py:141). What else it hands on is
`ray_kwargs.ray_init.runtime_env.env_vars`, so that is where this module puts the others.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Mapping

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tim.launch.errors import Finding, LaunchError
from verl_tim.training.config import WORKER_ENVIRONMENT, joins_a_cluster

FORWARD_KEY = "tim.launch.forward"
ENV_KEY = "tim.launch.env"
SECRETS_KEY = "tim.launch.secrets"

# Ray, Slurm or the container set these for each node or process; one value for all would be wrong on most.
PER_PROCESS = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_LOG_DIRECTORY",
        "NCCL_HOSTID",
        "VLLM_HOST_IP",
        "VLLM_PORT",
        "VLLM_DP_RANK",
        "VLLM_DP_RANK_LOCAL",
    }
)

_SECRET_WORDS = frozenset({"KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASS", "CREDENTIAL", "CREDENTIALS"})
# https://user:password@host
_LOGIN = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable's name or value looks like what must not be written down."""
    return bool(_SECRET_WORDS & set(name.upper().split("_"))) or bool(_LOGIN.search(value))


def matching(patterns: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables whose name is, or begins as, one of the patterns (`NCCL_*`), without those of `PER_PROCESS`."""
    patterns = list(patterns)
    return {
        name: value
        for name, value in sorted(environ.items())
        if name not in PER_PROCESS and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def split(
    patterns: Iterable[str], named_secrets: Iterable[str], environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Of what is set in `environ`: variables whose value may be written down, and names of secrets."""
    named = set(named_secrets)
    found = matching(patterns, environ)
    plain = {name: value for name, value in found.items() if name not in named and not is_secret(name, value)}
    return plain, sorted({*(found.keys() - plain.keys()), *(named & set(environ))})


def add_to_workers(config: DictConfig, environ: Mapping[str, str] | None = None) -> None:
    """Put `tim.launch.env`, and in a Ray cluster that runs already what `tim.launch.forward` names and is set here,
    into the runtime environment of a run's workers, in place. A variable that stands there keeps its value.

    A Ray that the run starts itself inherits this process's environment. Secrets are never put there, since the config
    is written into the run folder: each node must have them (see docs/launching.md).

    Args:
        environ: for tests; the process environment otherwise.

    Raises:
        LaunchError: a value that the config would read as a reference (`${...}`).
    """
    environ = os.environ if environ is None else environ
    added = dict(OmegaConf.select(config, ENV_KEY) or {})
    if joins_a_cluster(config):
        patterns = OmegaConf.select(config, FORWARD_KEY) or []
        plain, _ = split(patterns, OmegaConf.select(config, SECRETS_KEY) or [], environ)
        added = {**plain, **added}
    if not added:
        return
    with open_dict(config):
        given = OmegaConf.select(config, WORKER_ENVIRONMENT)
        if given is None:
            OmegaConf.update(config, WORKER_ENVIRONMENT, {}, force_add=True)
            given = OmegaConf.select(config, WORKER_ENVIRONMENT)
        for name, value in added.items():
            if name in given:
                continue
            if "${" in str(value):
                raise LaunchError.of(
                    f"environment variable {name}",
                    f"its value {value!r} would be read as a reference to a key of the config",
                    f"unset it, or take it out of {FORWARD_KEY}",
                )
            given[name] = str(value)


def conflicts(config: DictConfig) -> list[Finding]:
    """Variables that `tim.launch.env` and the runtime environment set to different values."""
    given = OmegaConf.select(config, WORKER_ENVIRONMENT) or {}
    wanted = OmegaConf.select(config, ENV_KEY) or {}
    return [
        Finding(
            f"{ENV_KEY}.{name}",
            f"is {wanted[name]!r}, and {WORKER_ENVIRONMENT}.{name} is {given[name]!r}",
            "set one of the two, or both alike",
        )
        for name in wanted
        if name in given and str(given[name]) != str(wanted[name])
    ]
