"""`tim.launch`: what `verl-tim launch` must know of a cluster beside its numbers of nodes and GPUs, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from verl_tim.launch.environment import is_secret
from verl_tim.launch.errors import Finding

KEY = "tim.launch"

# Groups whose keys are the user's own: no list of known ones exists.
FREE = (f"{KEY}.env", f"{KEY}.mounts", f"{KEY}.kubernetes.node_selector", f"{KEY}.kubernetes.resources")

_TIME = re.compile(r"(?:(\d+)-)?(\d{1,3}):(\d{2})(?::(\d{2}))?")
# What Slurm, DNS and image names are made of: it stands in a comment line or a name, where nothing can be quoted.
_PLAIN = re.compile(r"[A-Za-z0-9_.,:@%/+=\[\]&|*()-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
_DNS = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
# How a launcher mounts it: a folder of the node, a Kubernetes claim, a SkyPilot volume, a bucket.
_SOURCE = re.compile(r"/.*|(pvc|volume):[a-z0-9]([-a-z0-9.]*[a-z0-9])?|(s3|gs|r2|azure|https)://.+")


def _seconds(value: Any) -> Any:
    """Seconds of `HH:MM:SS`, `D-HH:MM:SS`; YAML reads 24:00:00 without quotes as that number of seconds already."""
    if isinstance(value, str):
        found = _TIME.fullmatch(value)
        if found is None:
            raise ValueError("write HH:MM:SS or D-HH:MM:SS")
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return value


def _matching(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"{value!r} is not {what}")
        return value

    return AfterValidator(check)


def _words(value: Any) -> Any:
    """Values of variables as text: YAML reads FLAG: 1 as a number."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: one if not isinstance(one, (int, float)) or isinstance(one, bool) else str(one)
        for name, one in value.items()
    }


def _no_secrets(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if is_secret(name, value):
            raise ValueError(
                f"{name} looks like a secret, and its value would be written into files; set it in your shell, and "
                f"name it in {KEY}.secrets"
            )
        if "${" in value:
            raise ValueError(f"{name} holds ${{, which the config would read as a reference to a key")
    return values


Plain = Annotated[str, _matching(_PLAIN, "a plain word (letters, digits and _.,:@%/+=-, no space)")]
Variable = Annotated[str, _matching(_VARIABLE, "the name of an environment variable")]
Pattern = Annotated[str, _matching(_PATTERN, "the name of a variable, or its beginning with * behind")]
Dns = Annotated[str, _matching(_DNS, "a Kubernetes name (lower-case letters, digits, - and .)")]
Source = Annotated[
    str, _matching(_SOURCE, "a mount: /FOLDER of the node, pvc:CLAIM, volume:NAME, or a bucket such as s3://NAME")
]
Folder = Annotated[str, _matching(re.compile(r"/[^\0\n,:]*"), "an absolute folder without comma and colon")]
Port = Annotated[int, Field(ge=1, le=65535)]
Text = Annotated[str, _matching(re.compile(r"[^\0]*"), "text without NUL")]


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Ports(_Group):
    """TCP ports of the head: Ray's own, and its dashboard's, which also takes jobs."""

    ray: Port = 6379
    dashboard: Port = 8265


class Slurm(_Group):
    """Options of sbatch. `options`: more of them, written as they are (`--constraint=h200`)."""

    partition: Plain | None = None
    account: Plain | None = None
    qos: Plain | None = None
    exclusive: bool = True
    options: list[Annotated[str, _matching(re.compile(r"--[^\0\n]+"), "an option of sbatch, --NAME=VALUE")]] = []


class Kubernetes(_Group):
    """What a pod needs. `secret`: the Secret that holds `tim.launch.secrets`, one key each."""

    namespace: Dns | None = None
    service_account: Dns | None = None
    image_pull_secret: Dns | None = None
    secret: Dns = "verl-tim"
    gpu_resource: Plain = "nvidia.com/gpu"
    resources: dict[str, int] = {}
    node_selector: dict[str, str] = {}
    tolerate_gpu_taint: bool = True
    host_network: bool = False
    queue: Dns | None = None
    ttl: Annotated[int, Field(ge=0)] = 600


class SkyPilot(_Group):
    """Where SkyPilot takes the machines from. `setup`: commands once on each machine, such as installations."""

    infra: Plain | None = None
    setup: list[Text] = []
    use_spot: bool = False
    disk_size: Annotated[int, Field(ge=1)] | None = None


class ClusterSettings(_Group):
    """The group `tim.launch` (see docs/launching.md for every key)."""

    image: Plain | None = None
    gpu: Plain | None = None
    cpus: Annotated[int, Field(ge=1)] | None = None
    memory: Annotated[int, Field(ge=1)] | None = None
    shm: Annotated[int, Field(ge=1)] | None = None
    time_limit: Annotated[int, Field(ge=60), BeforeValidator(_seconds)] | None = None
    stop_before: Annotated[int, Field(ge=30)] = 120
    restarts: Annotated[int, Field(ge=0)] = 0
    wait: Annotated[int, Field(ge=1)] = 600
    address: Plain | None = None
    mounts: dict[Folder, Source] = {}
    setup: list[Text] = []
    env: Annotated[dict[Variable, Text], BeforeValidator(_words), AfterValidator(_no_secrets)] = {}
    forward: list[Pattern] = []
    secrets: list[Variable] = []
    ports: Ports = Ports()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()
    skypilot: SkyPilot = SkyPilot()


def settings_of(config: DictConfig) -> ClusterSettings:
    """The checked group of a resolved config; the defaults where a config has none.

    Raises:
        pydantic.ValidationError: see `findings` for what it says to a user.
    """
    node = OmegaConf.select(config, KEY)
    return ClusterSettings() if node is None else ClusterSettings.model_validate(OmegaConf.to_container(node))


def findings(config: DictConfig) -> list[Finding]:
    """What is wrong with `tim.launch`, one finding per key."""
    try:
        settings_of(config)
    except ValidationError as error:
        return [_finding(one) for one in error.errors()]
    return []


def _finding(error: Any) -> Finding:
    # a key of a mapping that is itself wrong is located as (..., KEY, "[key]")
    place = [str(part) for part in error["loc"] if part != "[key]"]
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return Finding(".".join((KEY, *place)), "is not a key of verl_tim", "see docs/launching.md for the keys")
    given = "" if isinstance(error["input"], (dict, list)) else f"is {error['input']!r}: "
    return Finding(".".join((KEY, *place)), f"{given}{message}", "see docs/launching.md for what each key takes")
