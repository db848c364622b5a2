"""Where a run's model and tokenizer are to come from: a folder that is not there, a hub name that cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
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


def check(config: DictConfig) -> Iterator[Finding]:
    """What the keys name and is nowhere."""
    trust = config.actor_rollout_ref.model.trust_remote_code
    for key, kind in _KINDS.items():
        path = OmegaConf.select(config, key)
        if path is None or local_folder(str(path)) is not None or is_remote(str(path)):
            continue
        yield from _missing(key, str(path), kind, trust)


def _missing(key: str, path: str, kind: str, trust_remote_code: bool) -> Iterator[Finding]:
    place = Path(path).expanduser().absolute()
    problem = f"{place} is no folder" if place.exists() else f"there is no folder {place}"
    other = ", or take model=tiny_qwen3" if key == KEY else ", or leave it null for the model's own"
    remedy = f"give a folder in Hugging Face format or OWNER/NAME of the hub{other}"
    if not _may_be_of_the_hub(path):
        yield Finding(key, problem, remedy)
        return
    error = load_error(path, kind, trust_remote_code)
    if not error:
        return
    if hub_is_out_of_reach(path, trust_remote_code):
        problem += f", and the hub cannot be asked for {path} ({error})"
        fetch = f"run `hf download {path}` where there is one"
        remedy = f"look at the network, or {fetch}; then give its folder, or its HF_HOME"
    else:
        problem += f", and the hub does not give {path} ({error})"
    yield Finding(key, problem, remedy)


def _may_be_of_the_hub(path: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True
