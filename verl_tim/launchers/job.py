"""A run as a launcher sees it: words for `verl-tim train`, nodes, GPUs, environment. Composed and checked here."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_tim.doctor.examine import examine
from verl_tim.doctor.view import View
from verl_tim.home import expanded
from verl_tim.launch import environment, prepare
from verl_tim.launch.checks import keys
from verl_tim.launch.checks.model import KEY as MODEL_KEY
from verl_tim.launch.checks.model import hub_is_out_of_reach
from verl_tim.launch.cluster import KEY, ClusterSettings, settings_of
from verl_tim.launch.compose import split_recipe
from verl_tim.launch.errors import Finding, LaunchError
from verl_tim.launch.process import hydra_quoted
from verl_tim.launch.start import composed
from verl_tim.preflight.wanted import cluster_size
from verl_tim.training.config import WORKER_ENVIRONMENT

TRAIN = ("verl-tim", "train")

# NAME=VALUE in a shell command.
_ASSIGNMENT = re.compile(r"\b([A-Za-z_]\w*)=(\S*)")

# A label of Kubernetes has 63 characters, and KubeRay adds its own to a RayJob's name.
_NAME_LENGTH = 40

# What Ray refuses when it joins a cluster: the size of that cluster is not the driver's to say.
_OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "_system_config")


# The run's own name and folders: the same at every start.
_FIXED = ("trainer.experiment_name", "tim.run_dir", "tim.cache_dir")
# Files and folders that may be given relative to the folder where the launcher is made.
_FILES = (
    *keys.MADE_FROM,
    "tim.gate.baseline",
    "reward.custom_reward_function.path",
    "trainer.resume_from_path",
)


@dataclass(frozen=True)
class Job:
    """One run on a cluster.

    Attributes:
        name: for schedulers: lower-case letters, digits and -, at most 40.
        words: of `verl-tim train` and `verl-tim preflight`; they say the run completely, folders included.
        nodes, gpus: nodes of the cluster, GPUs of each.
        cpu: the run has no GPU; `gpus` are then slots of Ray's.
        ray_cpus: CPU slots of each node's Ray, where the config says them; None: as many as the scheduler gives.
        run_dir: absolute.
        settings: `tim.launch`.
        environment: variables of every process, in the clear.
        secrets: variables that are handed on by reference.
        looks: preflight looks at every node before the run; otherwise it only counts them.
        unseen: files that are not on this machine, so nothing could be said about them.
    """

    name: str
    words: tuple[str, ...]
    nodes: int
    gpus: int
    cpu: bool
    ray_cpus: int | None
    run_dir: str
    settings: ClusterSettings
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    looks: bool = True
    unseen: tuple[str, ...] = ()

    @property
    def preflight(self) -> list[str]:
        """The command, without overrides, that waits until all nodes have joined, and looks at each of them."""
        command = ["verl-tim", "preflight", "--wait", str(self.settings.wait)]
        return [*command, *([] if self.looks else ["--checks", "nodes"])]


def job_of(
    overrides: Sequence[str],
    *,
    looks: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Job:
    """The job that `recipe=NAME KEY=VALUE ...` describes.

    Composed and checked as `verl-tim train` does before a start, but for what only the nodes can tell: their GPUs and
    packages, and files that are not on this machine. Makes no data and no folder.

    Args:
        environ: the shell that hands variables on; the process environment by default.

    Raises:
        LaunchError: with every finding.
    """
    environ = os.environ if environ is None else environ
    recipe, rest = split_recipe(overrides)
    name = recipe.name if recipe.config_path.startswith("pkg://") else f"{recipe.config_path}/{recipe.config_name}.yaml"
    first = composed(overrides)
    prepare.resolve(first)
    words = [f"recipe={name}", *rest, *_pinned(first, rest)]
    # once more, with what was added: what the file will say is what is checked
    config = composed(words)
    environment.add_to_workers(config, {})
    prepare.resolve(config)
    unseen = _check(config)
    settings = settings_of(config)
    _check_restarts(config, settings)
    _check_secrets(config, settings)
    nodes, gpus = _size(config)
    plain, secrets = environment.split(settings.forward, settings.secrets, environ)
    return Job(
        _scheduler_name(str(config.trainer.experiment_name)),
        tuple(words),
        nodes,
        gpus,
        config.trainer.device == "cpu",
        OmegaConf.select(first, "ray_kwargs.ray_init.num_cpus"),
        str(config.tim.run_dir),
        settings,
        {**plain, **settings.env},
        # those that nobody set here too: the nodes may have them
        tuple(sorted({*secrets, *settings.secrets})),
        looks,
        unseen,
    )


def _pinned(config: DictConfig, given: Sequence[str]) -> list[str]:
    """Words that fix what would differ where and when the run really starts, or starts again; the last word wins."""
    ray = OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    fixed = {key: str(OmegaConf.select(config, key)) for key in _FIXED}
    for key in _FILES:
        value = OmegaConf.select(config, key)
        if isinstance(value, str) and not value.startswith("/") and expanded(value).exists():
            fixed[key] = str(expanded(value).absolute())
    words = [
        *(f"{key}={_value(value)}" for key, value in fixed.items()),
        # the cluster that the launcher started; RAY_ADDRESS says which where there are several
        "++ray_kwargs.ray_init.address=auto",
        *(f"++ray_kwargs.ray_init.{key}=null" for key in _OF_A_NEW_CLUSTER if ray.get(key) is not None),
    ]
    named = {word.lstrip("+").partition("=")[0] for word in given}
    if OmegaConf.select(config, f"{KEY}.restarts") and "trainer.resume_mode" not in named:
        words.append("trainer.resume_mode=auto")
    return words


def _value(text: str) -> str:
    """A value as an override writes it, in quotes where Hydra's grammar would read more into it than a plain word."""
    plain = re.fullmatch(r"[A-Za-z_/][\w./-]*", text) and text.lower() not in ("null", "true", "false", "nan", "inf")
    return text if plain else hydra_quoted(text)


def _check(config: DictConfig) -> tuple[str, ...]:
    """Raises what would keep the run from starting; returns the files that are not here to be looked at."""
    looked_at = copy.deepcopy(config)
    unseen = []
    for key in keys.MADE_FROM:
        value = OmegaConf.select(config, key)
        paths = [str(one) for one in (value if OmegaConf.is_list(value) else [value])]
        absent = [path for path in paths if path.startswith("/") and not Path(path).exists()]
        trusted = config.actor_rollout_ref.model.trust_remote_code
        if key == MODEL_KEY and value is not None and hub_is_out_of_reach(paths[0], trusted):
            absent = paths
        if value is not None and absent:
            unseen += absent
            # read as "made at the start": whatever is said of the file, the nodes must say
            OmegaConf.update(looked_at, key, None)
    report = examine(View(looked_at, None))
    hidden = {key for key in keys.MADE_FROM if OmegaConf.select(config, key) is not None}
    hidden &= {key for key in keys.MADE_FROM if OmegaConf.select(looked_at, key) is None}
    found = [
        Finding(one.key, one.problem, one.remedy) for one in report.violations if one.blocks and one.key not in hidden
    ]
    if found:
        raise LaunchError(found)
    return tuple(unseen)


def _check_restarts(config: DictConfig, settings: ClusterSettings) -> None:
    if settings.restarts and int(config.trainer.save_freq) <= 0:
        raise LaunchError.of(
            f"{KEY}.restarts",
            f"is {settings.restarts}, and trainer.save_freq={config.trainer.save_freq} writes no checkpoint: each "
            "start would begin anew",
            f"set trainer.save_freq to a number of steps, or {KEY}.restarts=0",
        )


def _check_secrets(config: DictConfig, settings: ClusterSettings) -> None:
    """A launcher's file, and the run's config.yaml, would hold them in the clear."""
    given = OmegaConf.select(config, WORKER_ENVIRONMENT) or {}
    found = [f"{WORKER_ENVIRONMENT}.{name}" for name, value in given.items() if environment.is_secret(name, str(value))]
    for number, line in enumerate(settings.setup):
        # $NAME is a reference
        if any(
            environment.is_secret(*one) for one in _ASSIGNMENT.findall(line) if not one[1].lstrip("\"'").startswith("$")
        ):
            found.append(f"{KEY}.setup[{number}]")
    if found:
        remedy = f"set the variable in your shell, and name it in {KEY}.secrets (docs/launching.md)"
        raise LaunchError(
            [Finding(key, "looks like a secret, and would be written into a file", remedy) for key in found]
        )


def _size(config: DictConfig) -> tuple[int, int]:
    """Nodes, and GPUs of each. Nodes that are not alike are refused: a scheduler's file asks for one kind."""
    nodes, gpus = cluster_size(config)
    if gpus != int(config.trainer.n_gpus_per_node) or nodes > int(config.trainer.nnodes):
        rollout = int(config.actor_rollout_ref.rollout.n_gpus_per_node)
        if rollout != int(config.trainer.n_gpus_per_node):
            raise LaunchError.of(
                "actor_rollout_ref.rollout.n_gpus_per_node",
                f"is {rollout}, and trainer.n_gpus_per_node is {config.trainer.n_gpus_per_node}: a launcher asks for "
                "nodes that are all alike",
                "set both to the GPUs of a node, and the shares of trainer and rollout by their nnodes",
            )
    return nodes, gpus


def _scheduler_name(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    # the end tells runs of one recipe apart
    plain = plain[-_NAME_LENGTH:].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}"[:_NAME_LENGTH].strip("-")
