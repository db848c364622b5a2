"""The settings of a probe: options of the command line and keys of its YAML files alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_tim import broken_yaml

ROLLOUTS = ("vexact", "stock", "vllm")
TRAINERS = ("contract", "stock")
DTYPES = ("bfloat16", "float32")


class SettingsError(ValueError):
    """A setting that cannot be used; `key` names it, `remedy` says what to give."""

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        super().__init__(f"{key}: {problem}; {remedy}")
        self.key, self.problem, self.remedy = key, problem, remedy


@dataclass(frozen=True)
class ProbeSettings:
    """Everything that decides what a probe measures.

    Attributes:
        model: folder of a Hugging Face model.
        data: parquet files in verl's schema.
        rollout: vexact, stock (our engine on stock kernels) or vllm.
        trainer: contract, or stock for verl's own forward.
        dtype: compute dtype of both sides.
        prompts: rows taken from each file; responses: per prompt, at different seeds.
        temperature: 0 is greedy, scored at 1.
        max_tokens: of a response. batch_size: responses drawn together.
    """

    model: str
    data: tuple[str, ...]
    rollout: str = "vexact"
    trainer: str = "contract"
    dtype: str = "bfloat16"
    prompts: int = 32
    responses: int = 1
    temperature: float = 0.0
    max_tokens: int = 256
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for key, known in (("rollout", ROLLOUTS), ("trainer", TRAINERS), ("dtype", DTYPES)):
            if getattr(self, key) not in known:
                raise SettingsError(key, f"{getattr(self, key)!r} is unknown", f"choose from {', '.join(known)}")
        for key in ("prompts", "responses", "max_tokens", "batch_size"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(key, f"is {value!r}", "give a whole number of at least 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise SettingsError("seed", f"is {self.seed!r}", "give a whole number of at least 0")
        number = isinstance(self.temperature, (int, float)) and not isinstance(self.temperature, bool)
        if not (number and math.isfinite(self.temperature) and self.temperature >= 0):
            raise SettingsError("temperature", f"is {self.temperature!r}", "give 0 for greedy, or a number above it")
        if self.responses > 1 and self.temperature == 0:
            raise SettingsError("responses", f"{self.responses} greedy responses are one and the same", "give 1")
        if not (isinstance(self.model, str) and Path(self.model, "config.json").is_file()):
            raise SettingsError(
                "MODEL", f"{self.model} is no model folder (no config.json)", "give the folder of a Hugging Face model"
            )
        if not self.data:
            raise SettingsError("data", "is empty", "give parquet files in verl's schema (verl-tim data makes some)")

    @classmethod
    def of(cls, file: str | Path | None, given: Mapping[str, Any]) -> ProbeSettings:
        """From a YAML file, if any, and what was given beside it, which wins; None is not given.

        Raises:
            SettingsError: no such file, an unknown key, a missing or unusable value.
        """
        values: dict[str, Any] = {}
        if file is not None:
            values = _read(Path(file))
        values |= {key: value for key, value in given.items() if value not in (None, [], ())}
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise SettingsError(
                unknown[0], f"is no setting of a probe (in {file})", f"known: {', '.join(sorted(known))}"
            )
        for key, name, wanted in (
            ("model", "MODEL", "the folder of a Hugging Face model (verl-tim model makes small ones)"),
            ("data", "--data", "a parquet file with a column `prompt` of chat messages (verl-tim data makes some)"),
        ):
            if not values.get(key):
                raise SettingsError(name, "is missing", f"give {wanted}, on the command line or in the settings file")
        data = values["data"]
        values["data"] = (data,) if isinstance(data, str) else tuple(str(entry) for entry in data)
        values["model"] = str(values["model"])
        return cls(**values)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise SettingsError(
            "--settings", f"there is no file {file}", "give a YAML file, such as one of recipes/probe_8b"
        )
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem, remedy = broken_yaml.explain(error, file)
        raise SettingsError("--settings", f"{file} is not YAML: {problem}", remedy) from error
    if not isinstance(content, dict):
        raise SettingsError("--settings", f"{file} must hold keys and values", "see recipes/probe_8b")
    return {key: value for key, value in content.items() if value is not None}
