"""A config and a machine as the rules see them: values by key, and what several rules derive from them."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tim.correction import ConfigError, RolloutCorrectionConfig, UnderscoreNumber
from verl_tim.doctor.machine import Gpu, Machine
from verl_tim.doctor.rule import ACTOR, MODEL, ROLLOUT
from verl_tim.launch.prepare import complete
from verl_tim.replay.routers import NUM_EXPERTS
from verl_tim.sequence_parallel import sequence_parallel
from verl_tim.training import start_checks
from verl_tim.training.config import uses_verl_tim
from verl_tim.training.correction_config import LOSS_MODE_KEY, of_run
from verl_tim.training.dtypes import canonical
from verl_tim.training.remedy import has_groups

PARAM_DTYPE_KEY = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"
# What the FSDP engine takes without `mixed_precision` (verl 0.9.1, workers/engine/fsdp/transformer_impl.py:397).
_DEFAULT_PARAM_DTYPE = "bf16"


class View(start_checks.View):
    """What rules read.

    A key that holds what nobody can mean (text where verl wants a number) reads as its default in `number`: the rule
    about values speaks of it, and the others go on.

    Attributes:
        given: resolved; what the file leaves out has verl's defaults.
        config: the same, with what a start adds.
        machine: None when the run will be elsewhere; rules about the machine are silent then.
        underscore_numbers: thresholds that YAML read as numbers, found in the text before it was parsed.
    """

    def __init__(
        self,
        config: DictConfig,
        machine: Machine | None = None,
        underscore_numbers: Sequence[UnderscoreNumber] = (),
    ) -> None:
        self.given = config
        # the rules speak of what would run
        config = copy.deepcopy(config)
        complete(config, {} if machine is None else machine.environment)
        super().__init__(config)
        self.machine = machine
        self.underscore_numbers = tuple(underscore_numbers)

    def changed(self, overrides: Sequence[str]) -> View:
        """The same machine and model under a config with `KEY=VALUE` overrides, in verl's own keys."""
        config = copy.deepcopy(self.given)
        with open_dict(config):
            config.merge_with(OmegaConf.from_dotlist(list(overrides)))
        other = View(config, self.machine, self.underscore_numbers)
        for name in ("model_config", "tokenizer", "parameters"):
            if name in self.__dict__:  # read once
                other.__dict__[name] = self.__dict__[name]
        return other

    # --- values -----------------------------------------------------------------------------------------------------

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
        return value if good else default

    def engine_option(self, name: str) -> tuple[str, Any]:
        """An option of the rollout engine's own, `engine_kwargs.<engine>.<name>`: its key and value, or None.

        vLLM's options may be written with dashes too.
        """
        where = f"{ROLLOUT}.engine_kwargs.{self.rollout}"
        options = self.get(where, {})
        if not isinstance(options, (Mapping, DictConfig)):
            return f"{where}.{name}", None
        for spelling in (name, name.replace("_", "-")):
            if options.get(spelling) is not None:
                return f"{where}.{spelling}", options[spelling]
        return f"{where}.{name}", None

    @property
    def environment(self) -> Mapping[str, str]:
        return {} if self.machine is None else self.machine.environment

    def is_on(self, name: str) -> bool:
        """Whether an environment variable is set to something other than off."""
        return (self.variable(name)[1] or "0").strip().lower() not in ("", "0", "false", "off", "no")

    def whole(self, key: str, default: int) -> int:
        return int(self.number(key, default))

    @property
    def sequence_parallel(self) -> int:
        """Over how many ranks the actor splits a sequence."""
        return sequence_parallel(self.whole)[1]

    def group(self, key: str) -> dict[str, Any]:
        """A group as a plain dict; empty where there is none."""
        node = OmegaConf.select(self.config, key, throw_on_missing=False)
        plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        return dict(plain) if isinstance(plain, Mapping) else {}

    @property
    def ranks(self) -> int:
        return self.whole("trainer.n_gpus_per_node", 1) * self.whole("trainer.nnodes", 1)

    @property
    def cpu_only(self) -> bool:
        return self.machine is not None and not self.machine.gpus and super().cpu_only

    # --- the two sides ----------------------------------------------------------------------------------------------

    @property
    def uses_verl_tim(self) -> bool:
        return uses_verl_tim(self.config)

    @property
    def has_tim_group(self) -> bool:
        return self.get("tim") is not None

    @property
    def launched(self) -> bool:
        """Whether the config has all that this package's launcher reads."""
        return has_groups(self.config)

    @property
    def rollout(self) -> str:
        return str(self.get(f"{ROLLOUT}.name", ""))

    @property
    def on_vllm(self) -> bool:
        return self.rollout == "vllm"

    @property
    def zero_mismatch(self) -> bool:
        """Whether the config asks for a rollout and a trainer that agree bit for bit."""
        return self.rollout == "vexact" and self.contract

    @property
    def strategy(self) -> str:
        return str(self.get(f"{ACTOR}.strategy", "fsdp"))

    @property
    def on_fsdp(self) -> bool:
        return self.strategy in ("fsdp", "fsdp2")

    @property
    def on_cpu(self) -> bool:
        return self.get("trainer.device", "cuda") == "cpu"

    @property
    def trainer_dtype(self) -> str:
        """The dtype of the trainer's products, under torch's name."""
        return canonical(str(self.get(PARAM_DTYPE_KEY, _DEFAULT_PARAM_DTYPE)))

    @property
    def rollout_dtype(self) -> str:
        return canonical(str(self.get(f"{ROLLOUT}.dtype", "bfloat16")))

    @property
    def temperature(self) -> float:
        return self.number(f"{ROLLOUT}.temperature", 1.0)

    @property
    def attention(self) -> str:
        """The stock trainer's attention (verl 0.9.1, workers/config/model.py:185)."""
        return str(self.get(f"{MODEL}.override_config.attn_implementation", "flash_attention_2"))

    @property
    def synchronous(self) -> bool:
        return not self.get("trainer.use_v1", True) or self.get("trainer.v1.trainer_mode", "sync") == "sync"

    @property
    def batch_invariant(self) -> bool:
        """Whether vLLM will run its batch-invariant kernels (verl sets the variable under full_determinism)."""
        return self.is_on("VLLM_BATCH_INVARIANT") or bool(self.get(f"{ROLLOUT}.full_determinism", False))

    # --- correction -------------------------------------------------------------------------------------------------

    @cached_property
    def correction(self) -> RolloutCorrectionConfig | None:
        """The correction the config asks for; None if it cannot be read, which the start-up check speaks of."""
        try:
            return of_run(self.config)
        except (ConfigError, ValueError, TypeError):
            return None

    @property
    def native(self) -> bool:
        """Whether verl's own correction runs, and not this package's."""
        return not self.uses_verl_tim

    @property
    def loss_mode(self) -> str:
        return str(self.get(LOSS_MODE_KEY, "vanilla"))

    # --- the model --------------------------------------------------------------------------------------------------

    @property
    def model_path(self) -> str | None:
        path = self.get(f"{MODEL}.path")
        return None if path is None else str(path)

    @cached_property
    def model_config(self) -> Any:
        """transformers' config of the model; None where it cannot be had, which the start-up check speaks of."""
        return self._load(self.model_path, "config")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; None where it cannot be had."""
        return self._load(self.get(f"{MODEL}.tokenizer_path") or self.model_path, "tokenizer")

    def _load(self, path: Any, what: str) -> Any:
        from verl_tim.launch.checks import model

        trust = bool(self.get(f"{MODEL}.trust_remote_code", False))
        if path is None or model.is_remote(str(path)) or model.load_error(str(path), what, trust):
            return None
        return model.load(str(path), what, trust)

    @property
    def experts(self) -> int:
        """Experts of a mixture-of-experts model; 0 for a dense one, or where the config is not to be had."""
        # where a model reads more than text, the part that does has the experts
        configs = (self.model_config, getattr(self.model_config, "text_config", None))
        return max(int(getattr(config, name, 0) or 0) for config in configs for name in NUM_EXPERTS)

    @property
    def unused_logits(self) -> tuple[int, int] | None:
        """(tokens of the tokenizer, rows of the head) where the head has more; None otherwise."""
        rows = getattr(self.model_config, "vocab_size", None)
        if rows is None or self.tokenizer is None or len(self.tokenizer) >= rows:
            return None
        return len(self.tokenizer), int(rows)

    @cached_property
    def parameters(self) -> int | None:
        """Number of parameters, from the weight files' headers; None without a local folder of safetensors."""
        from safetensors import SafetensorError, safe_open

        folder = Path(os.path.expanduser(self.model_path or ""))
        files = sorted(folder.glob("*.safetensors")) if self.model_path and folder.is_dir() else []
        total = 0
        try:
            for file in files:
                with safe_open(file, framework="pt") as weights:
                    for name in weights.keys():  # noqa: SIM118  not a dict
                        total += math.prod(weights.get_slice(name).get_shape())
        except (SafetensorError, OSError):
            return None  # torn: the check of the model says so
        return total or None

    # --- the machine ------------------------------------------------------------------------------------------------

    @property
    def gpu(self) -> Gpu | None:
        """The smallest GPU of this machine, if the run will use this machine's GPUs."""
        from verl_tim.launch.checks.machine import joins_a_cluster

        if self.machine is None or self.on_cpu or joins_a_cluster(self.config):
            return None
        return min(self.machine.gpus, key=lambda gpu: gpu.memory, default=None)
