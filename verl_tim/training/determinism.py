"""`tim.deterministic=true`: two runs of a config are equal bit for bit. What the switch sets, and what it refuses.

`make_deterministic` writes it into the config before Ray starts (launcher and plain verl alike), so that config.yaml
tells it; `determinism_findings` names what the user set otherwise. What the processes really do, they are asked when
they stand (`determinism_watch`). docs/determinism.md says of each flag what it gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from verl_tim.numerics.determinism import DROPOUT_SUFFIXES
from verl_tim.training.config import DETERMINISTIC_LIB, EXTERNAL_LIB, ROLLOUTS, WORKER_ENVIRONMENT, reader
from verl_tim.training.finding import Finding
from verl_tim.training.model_file import model_file
from verl_tim.training.vllm_checks import INVARIANT_KEY, is_batch_invariant

SWITCH = "tim.deterministic"
ENVIRONMENT = WORKER_ENVIRONMENT
AGENT_LOOP_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
AGENT_LOOP = "verl_tim.rollout.agent_loop.SeededAgentLoopManager"
_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
_LIB_KEY = f"{_MODEL}.external_lib"
_OFF = f"or set {SWITCH}=false"


@dataclass(frozen=True)
class Variable:
    """An environment variable that every process of the run gets.

    Attributes:
        value: what the switch sets where the user set nothing.
        allowed: pattern of the values of the user's that serve as well.
    """

    value: str
    allowed: str

    def allows(self, value: str) -> bool:
        return re.fullmatch(self.allowed, value) is not None


VARIABLES: dict[str, Variable] = {
    # Python's sets of text are walked in the order of their hashes; 0 also shows in sys.flags
    "PYTHONHASHSEED": Variable("0", r"\d{1,10}"),
    # without it torch refuses cuBLAS in deterministic mode; :16:8 leaves no room to split K, :4096:8 does
    "CUBLAS_WORKSPACE_CONFIG": Variable(":16:8", r":16:8|:4096:8"),
    # one order of addition, whatever the tuner would have measured; a switch (NVLS) adds in the order of arrival
    "NCCL_ALGO": Variable("Ring", r"(?i:ring)"),
    "NCCL_PROTO": Variable("Simple", r"(?i:simple|ll|ll128)"),
    "NCCL_NVLS_ENABLE": Variable("0", "0"),
    "NCCL_COLLNET_ENABLE": Variable("0", "0"),
    # Transformer Engine (Megatron), and the backward of FlashAttention in transformers
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": Variable("0", "0"),
    "FLASH_ATTENTION_DETERMINISTIC": Variable("1", "1"),
    # verl: PyTorch's log-softmax in place of FlashAttention's cross entropy, which reduces in any order
    "VERL_DISABLE_FLASH_ATTN_CE": Variable("1", "1"),
    "TORCHINDUCTOR_DETERMINISTIC": Variable("1", "1"),
}

# Config keys that the switch fills where they are null, and with what.
_FROM_SEED = ("data.seed", f"{_ACTOR}.data_loader_seed", "critic.data_loader_seed")


def is_deterministic(config: DictConfig | Mapping[str, Any]) -> bool:
    """Whether a run config has the switch on."""
    return _getter(config)(SWITCH, False) is True


def make_deterministic(config: DictConfig) -> dict[str, Any]:
    """Fill in what the mode needs and the user left open, in place; nothing where the switch is off. Idempotent.

    Returns:
        Key -> value of everything that was set.
    """
    if not is_deterministic(config):
        return {}
    get = _getter(config)
    wanted: dict[str, Any] = {f"{ENVIRONMENT}.{name}": variable.value for name, variable in VARIABLES.items()}
    seed = int(get(f"{_ROLLOUT}.seed", 42))
    wanted |= dict.fromkeys((key for key in _FROM_SEED if _parent_exists(config, key)), seed)
    wanted |= {f"{_ROLLOUT}.seed": seed, AGENT_LOOP_KEY: AGENT_LOOP}
    if get(_LIB_KEY) in (None, EXTERNAL_LIB):
        wanted[_LIB_KEY] = DETERMINISTIC_LIB
    done = {key: value for key, value in wanted.items() if get(key) is None or key == _LIB_KEY}
    done = {key: value for key, value in done.items() if get(key) != value}
    with read_write(config), open_dict(config):
        for key, value in done.items():
            OmegaConf.update(config, key, value, force_add=True)
    return done


def determinism_findings(config: DictConfig) -> Iterator[Finding]:
    """Every setting under which two runs could differ; nothing where the switch is off."""
    if not is_deterministic(config):
        return
    get = _getter(config)
    yield from _variables(get)
    yield from _schedule(get)
    yield from _seeds(get)
    yield from _engines(get)
    yield from _dropout(get)


def variables_of(config: DictConfig | Mapping[str, Any]) -> dict[str, str]:
    """Value of each of `VARIABLES` that the processes get."""
    get = _getter(config)
    return {name: str(get(f"{ENVIRONMENT}.{name}", variable.value)) for name, variable in VARIABLES.items()}


def _variables(get: Callable[..., Any]) -> Iterator[Finding]:
    for name, variable in VARIABLES.items():
        value = get(f"{ENVIRONMENT}.{name}")
        if value is not None and not variable.allows(str(value)):
            yield Finding(
                f"{ENVIRONMENT}.{name}",
                f"it is {value}, which does not repeat from run to run ({SWITCH})",
                f"Leave it out (the mode sets {variable.value}), {_OFF}",
            )


def _schedule(get: Callable[..., Any]) -> Iterator[Finding]:
    """What the clock decides: which weights draw a token, which groups make a batch."""
    v1 = get("trainer.use_v1", True)
    mode = get("trainer.v1.trainer_mode", "sync")
    if v1 and mode != "sync":
        yield Finding(
            "trainer.v1.trainer_mode",
            f"with {mode} the clock decides which weights draw a token",
            f"Set it to sync, {_OFF}",
        )
    if v1 and get("algorithm.filter_groups.enable", False):
        yield Finding(
            "algorithm.filter_groups.enable",
            "verl takes the groups that are finished first, so the clock decides what makes a batch",
            f"Set it to false, {_OFF}",
        )
    if v1 and get("trainer.v1.sampler.sync_refill_failed_groups", False):
        yield Finding(
            "trainer.v1.sampler.sync_refill_failed_groups",
            "what takes the place of a failed group depends on when it failed",
            f"Set it to false, {_OFF}",
        )


def _seeds(get: Callable[..., Any]) -> Iterator[Finding]:
    manager = get(AGENT_LOOP_KEY)
    if manager not in (None, AGENT_LOOP):
        yield Finding(
            AGENT_LOOP_KEY,
            f"{manager} need not give each sample a seed of its own that repeats",
            f"Set it to {AGENT_LOOP} (or null: the mode sets it), {_OFF}",
        )
    library = get(_LIB_KEY)
    if library not in (None, EXTERNAL_LIB, DETERMINISTIC_LIB):
        yield Finding(
            _LIB_KEY,
            f"it is {library}, and through this key the mode reaches each worker before its model is made",
            f"Leave it null (the mode sets {DETERMINISTIC_LIB}) and name your module in the environment variable "
            f"VERL_USE_EXTERNAL_MODULES, {_OFF}",
        )
    for key in (
        f"{_ROLLOUT}.full_determinism",
        f"{_ACTOR}.fsdp_config.full_determinism",
        "reward.reward_model.rollout.full_determinism",
    ):
        if get(key, False):
            yield Finding(
                key,
                "verl's own switch gives all samples of a prompt one seed, only warns where torch has no deterministic "
                f"kernel, and sets NCCL's variables after NCCL may have read them; {SWITCH} takes its place",
                f"Set it to false, {_OFF}",
            )


def _engines(get: Callable[..., Any]) -> Iterator[Finding]:
    """A request's numbers must not depend on what else is in the batch, since requests arrive when they arrive."""
    yield from _engine(get, _ROLLOUT)
    if get("reward.reward_model.enable", False):
        yield from _engine(get, "reward.reward_model.rollout")
    if get("distillation.enabled", False):
        yield Finding(
            "distillation.enabled",
            f"the teachers' engines are not covered by {SWITCH}",
            f"Set it to false, {_OFF}",
        )


def _engine(get: Callable[..., Any], where: str) -> Iterator[Finding]:
    name = get(f"{where}.name")
    why = "its numbers depend on what else is in the batch, and requests arrive in another order in each run"
    if name in (None, "vexact"):
        return
    if name == "stock":
        together = int(get(f"{where}.max_num_seqs", 1024)) > 1
        cached = bool(get(f"{where}.engine_kwargs.stock.enable_prefix_cache", False))
        if together or cached:
            yield Finding(
                f"{where}.max_num_seqs" if together else f"{where}.engine_kwargs.stock.enable_prefix_cache",
                f"rollout stock is not batch-invariant: {why}",
                f"Choose rollout=vexact, or {where}.max_num_seqs=1 and {where}.engine_kwargs.stock."
                f"enable_prefix_cache=false (one request at a time), {_OFF}",
            )
        return
    if name == "vllm":
        if not is_batch_invariant(get):
            yield Finding(
                INVARIANT_KEY,
                f"vLLM is not batch-invariant without it: {why} ({where}.name=vllm)",
                f"Choose rollout=vexact, or on a GPU rollout=vllm_invariant, {_OFF}",
            )
        return
    yield Finding(
        f"{where}.name",
        f"{name}: {SWITCH} covers {', '.join(ROLLOUTS)} and vllm",
        f"Choose rollout=vexact, or on a GPU rollout=vllm_invariant, {_OFF}",
    )


def _dropout(get: Callable[..., Any]) -> Iterator[Finding]:
    """Dropout in the model's config; verl's own keys have the last word."""
    folder = get(f"{_MODEL}.path", "")
    overrides = get(f"{_MODEL}.override_config", {})
    # of a model that is not here to look at, the workers look at the model itself
    values = model_file(folder) | {str(key): value for key, value in dict(overrides).items()}
    for name, value in values.items():
        if name.endswith(DROPOUT_SUFFIXES) and isinstance(value, (int, float)) and value > 0:
            yield Finding(
                f"{_MODEL}.override_config.{name}",
                f"the model drops out: {name} is {value}, drawn anew in each forward",
                f"Set it to 0 there or in {folder}/config.json, {_OFF}",
            )


def _getter(config: DictConfig | Mapping[str, Any]) -> Callable[..., Any]:
    return reader(config if isinstance(config, DictConfig) else OmegaConf.create(dict(config)))


def _parent_exists(config: DictConfig, key: str) -> bool:
    return OmegaConf.select(config, key.rpartition(".")[0], throw_on_missing=False) is not None
