"""Where a run's model and tokenizer are to come from: a folder that is not there, a hub name that cannot be had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch.checks.model import KEY, TOKENIZER_KEY, hub_is_out_of_reach, is_remote, load_error, local_folder
from verl_tim.launch.errors import Finding

_KINDS = {KEY: "config", TOKENIZER_KEY: "tokenizer"}


def expand(config: DictConfig) -> None:
    """`~` in both keys, in place: verl hands it on as it is, and transformers takes it for the name of a repository."""
    for key in _KINDS:
        path = OmegaConf.select(config, key, throw_on_missing=False)
        if isinstance(path, str) and path.startswith("~"):
            OmegaConf.update(config, key, str(Path(path).expanduser()))


def in_words(config: DictConfig, findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings; of a model that is nowhere, where it was looked for, and the same of a tokenizer, which the checks
    pass over then."""
    found = {finding.key: finding for finding in findings}
    for key in _KINDS:
        if (key in found or key == TOKENIZER_KEY) and (missing := _missing(config, key)):
            found[key] = missing
    yield from found.values()


def _missing(config: DictConfig, key: str) -> Finding | None:
    value, trust_remote_code = OmegaConf.select(config, key), config.actor_rollout_ref.model.trust_remote_code
    path = str(value)
    if value is None or local_folder(path) is not None or is_remote(path):
        return None
    place = Path(path).expanduser().absolute()
    problem = f"{place} is no folder" if place.exists() else f"there is no folder {place}"
    other = ", or take model=tiny_qwen3" if key == KEY else ", or leave it null for the model's own"
    remedy = f"give a folder in Hugging Face format or OWNER/NAME of the hub{other}"
    if not _may_be_of_the_hub(path):
        return Finding(key, problem, remedy)
    error = load_error(path, _KINDS[key], trust_remote_code)
    if not error:
        return None
    if hub_is_out_of_reach(path, trust_remote_code):
        problem += f", and the hub cannot be asked for {path} ({error})"
        fetch = f"run `hf download {path}` where there is one"
        remedy = f"look at the network, or {fetch}; then give its folder, or its HF_HOME"
    else:
        problem += f", and the hub does not give {path} ({error})"
    return Finding(key, problem, remedy)


def _may_be_of_the_hub(path: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True
