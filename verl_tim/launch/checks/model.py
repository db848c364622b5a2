"""The model folder and its tokenizer: what would otherwise fail minutes later, inside a Ray worker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch.checks import chat, weights
from verl_tim.launch.errors import Finding

KEY = "actor_rollout_ref.model.path"
TOKENIZER_KEY = "actor_rollout_ref.model.tokenizer_path"

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Without one of these transformers makes an empty tokenizer up, and does not complain.
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
)


# Of httpx and huggingface_hub.
_NO_NETWORK = (
    "ConnectError",
    "ConnectTimeout",
    "ReadTimeout",
    "ProxyError",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
)


def check_model(config: DictConfig) -> Iterator[Finding]:
    """A folder that is none, no config, not one architecture, no weights; a hub name that the hub does not give."""
    if config.actor_rollout_ref.model.path is None:
        return  # made at the start; where it will not be, the check of the keys says so
    path = str(config.actor_rollout_ref.model.path)
    folder = local_folder(path)
    if folder is None:
        if missing := _missing(config, KEY):
            yield missing
        return
    if not (folder / "config.json").is_file():
        yield Finding(KEY, f"{folder} has no config.json, so it is not a model in Hugging Face format", _remedy())
        return
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        yield Finding(KEY, f"{folder}/config.json cannot be read: {error}", _remedy())
        return
    if not isinstance(content, dict):
        yield Finding(KEY, f"{folder}/config.json holds no keys, so it is not a model's config", _remedy())
        return
    architectures = content.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        yield Finding(
            KEY, f"{folder}/config.json names {architectures!r} as architectures, verl needs exactly one", _remedy()
        )
        return
    if not any(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        yield Finding(KEY, f"{folder} holds no weights (no *.safetensors)", _remedy())
        return
    incomplete = list(_check_shards(folder))
    yield from incomplete
    if not incomplete:
        yield from _check_weights(folder, config.actor_rollout_ref.model.trust_remote_code)


def _check_weights(folder: Path, trust_remote_code: bool) -> Iterator[Finding]:
    torn = list(weights.torn(folder))
    if torn:
        yield Finding(KEY, f"{folder} holds torn weight files: {', '.join(torn)}", "repeat the download or export")
        return
    misfit = weights.misfit(folder, trust_remote_code=trust_remote_code)
    if misfit:
        yield Finding(
            KEY,
            f"the weights in {folder} are not of the model in its config.json: {misfit}",
            "take config.json and weights from one model",
        )


def _check_shards(folder: Path) -> Iterator[Finding]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
        yield Finding(KEY, f"{index} is not an index of safetensors shards: {error!r}", _remedy())
        return
    missing = sorted(name for name in shards if not (folder / name).is_file())
    if missing:
        yield Finding(
            KEY,
            f"{folder} lacks {', '.join(missing)} of its {len(shards)} weight files",
            "complete the download or export",
        )


def _missing(config: DictConfig, key: str) -> Finding | None:
    """What the key names, and is nowhere."""
    value, trust_remote_code = OmegaConf.select(config, key), config.actor_rollout_ref.model.trust_remote_code
    path = str(value)
    if value is None or local_folder(path) is not None or is_remote(path):
        return None
    place = Path(os.path.expanduser(path)).absolute()
    problem = f"{place} is no folder" if place.exists() else f"there is no folder {place}"
    other = ", or take model=tiny_qwen3" if key == KEY else ", or leave it null for the model's own"
    remedy = f"give a folder in Hugging Face format or OWNER/NAME of the hub{other}"
    if not _may_be_of_the_hub(path):
        return Finding(key, problem, remedy)
    error = load_error(path, "config" if key == KEY else "tokenizer", trust_remote_code)
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


def check_tokenizer(config: DictConfig) -> Iterator[Finding]:
    """A tokenizer that is absent, cannot end an answer, has no chat template, or does not fit the model."""
    settings = config.actor_rollout_ref.model
    if settings.path is None:
        return
    key = TOKENIZER_KEY if settings.tokenizer_path else KEY
    path = str(settings.tokenizer_path or settings.path)
    if is_remote(path):
        return  # not here to look at
    if missing := _missing(config, key):
        if key == TOKENIZER_KEY:  # else check_model says it
            yield missing
        return
    error = load_error(path, "tokenizer", settings.trust_remote_code)
    folder = local_folder(path)
    if folder is not None and not any(file for pattern in _VOCABULARIES for file in folder.glob(pattern)):
        error = "it holds no vocabulary, such as tokenizer.json"
    if error:
        yield Finding(
            key, f"{path} has no tokenizer that transformers can load ({error})", f"set {TOKENIZER_KEY}=FOLDER with one"
        )
        return
    tokenizer = load(path, "tokenizer", settings.trust_remote_code)
    if tokenizer.eos_token_id is None:
        yield Finding(
            key,
            f"the tokenizer in {path} has no eos_token, so no answer could end",
            'set "eos_token" in its tokenizer_config.json',
        )
    if not tokenizer.chat_template and not settings.custom_chat_template:
        yield Finding(
            key,
            f"the tokenizer in {path} has no chat template, and verl puts every prompt through one",
            f"set {chat.TEMPLATE_KEY}, or take the instruct model's tokenizer",
        )
    elif problem := chat.problem(tokenizer, config):
        if settings.custom_chat_template:
            yield Finding(chat.TEMPLATE_KEY, problem, "correct the template, or leave the key null")
        else:
            remedy = f"correct it in {path}, or set {chat.TEMPLATE_KEY}"
            yield Finding(key, f"in {path} {problem}", remedy)
    model_config = (
        load(str(settings.path), "config", settings.trust_remote_code)
        if not load_error(str(settings.path), "config", settings.trust_remote_code)
        else None
    )
    vocab_size = getattr(model_config, "vocab_size", None)
    if vocab_size is not None and len(tokenizer) > vocab_size:
        yield Finding(
            key,
            f"the tokenizer in {path} has {len(tokenizer)} tokens, the model only {vocab_size} rows",
            "take the model's own tokenizer",
        )
    yield from _check_qwen_turn(key, path, tokenizer, getattr(model_config, "model_type", ""))


def _check_qwen_turn(key: str, path: str, tokenizer: Any, model_type: str) -> Iterator[Finding]:
    # verl 0.9.1, utils/tokenizer/continuous_token.py:556: asserted by every agent-loop worker for Qwen's model types
    if not model_type.startswith(("qwen2", "qwen3")):
        return
    if tokenizer.convert_tokens_to_ids("<|im_end|>") in (None, tokenizer.unk_token_id):
        yield Finding(
            key,
            f"the tokenizer in {path} has no token <|im_end|>, which verl needs for {model_type}",
            "take a Qwen tokenizer",
        )
    if len(tokenizer.encode("\n", add_special_tokens=False)) != 1:
        yield Finding(
            key,
            f"the tokenizer in {path} cuts a line break into several tokens; verl needs one for {model_type}",
            "take a Qwen tokenizer",
        )


def local_folder(path: str) -> Path | None:
    """The folder that `path` names on this machine, or None."""
    folder = Path(os.path.expanduser(path))
    return folder if folder.is_dir() else None


def is_remote(path: str) -> bool:
    """True for a storage address that verl copies from itself (hdfs://...)."""
    return "://" in path


def hub_is_out_of_reach(path: str, trust_remote_code: bool) -> bool:
    """Whether a hub name could not be looked up from this machine, which says nothing about the name."""
    if local_folder(path) is not None or is_remote(path):
        return False
    return load_error(path, "config", trust_remote_code).partition(":")[0] in _NO_NETWORK


def load_error(path: str, what: str, trust_remote_code: bool) -> str:
    """Why `load` fails, in one line; empty when it does not."""
    return _load(path, what, trust_remote_code)[1]


def load(path: str, what: str, trust_remote_code: bool) -> Any:
    """The transformers config or tokenizer at `path` (small files only), once `load_error` is empty for it."""
    return _load(path, what, trust_remote_code)[0]


@lru_cache(maxsize=16)
def _load(path: str, what: str, trust_remote_code: bool) -> tuple[Any, str]:
    from transformers import AutoConfig, AutoTokenizer

    kind: Any = {"config": AutoConfig, "tokenizer": AutoTokenizer}[what]
    folder = local_folder(path)
    try:
        if folder is not None:
            return kind.from_pretrained(str(folder), trust_remote_code=trust_remote_code), ""
        return _from_hub(kind, path, trust_remote_code), ""
    # transformers raises whatever the reader of a file raises; all of it means that the file cannot be used
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return None, f"{type(error).__name__}: {lines[0] if lines else ''}"


def _from_hub(kind: Any, name: str, trust_remote_code: bool) -> Any:
    try:
        return kind.from_pretrained(name, trust_remote_code=trust_remote_code, local_files_only=True)
    except OSError:
        # not in the cache. One question with a limit: transformers asks again and again, for most of a minute
        from huggingface_hub import HfApi

        HfApi().model_info(name, timeout=10)
        return kind.from_pretrained(name, trust_remote_code=trust_remote_code)


def _remedy() -> str:
    return f"set {KEY} to a folder in Hugging Face format or OWNER/NAME of the hub, or take model=tiny_qwen3"
