"""The chat template as verl will apply it: it must parse, and what it renders must hold the prompt."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

_PROBE = "What is 7 + 5?"
TEMPLATE_KEY = "actor_rollout_ref.model.custom_chat_template"


class TemplateError(ValueError):
    """A chat cannot be rendered; the message is the template's own reason."""


def options(config: DictConfig) -> dict[str, Any]:
    """The keyword arguments that verl hands to `apply_chat_template`."""
    given: Any = OmegaConf.to_container(config.data.apply_chat_template_kwargs)
    if config.actor_rollout_ref.model.custom_chat_template:
        given["chat_template"] = config.actor_rollout_ref.model.custom_chat_template
    return given


def render(tokenizer: Any, chat: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The text of a chat with the opening of the answer.

    Args:
        options: `options` of the config.

    Raises:
        TemplateError: the template does not parse, or refuses this chat.
    """
    try:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **options)
    # jinja2's errors, and whatever the template's expressions raise on this chat
    except Exception as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error


def problem(tokenizer: Any, config: DictConfig) -> str:
    """Why no prompt would come out of the template; empty when one does."""
    try:
        text = render(tokenizer, [{"role": "user", "content": _PROBE}], options(config))
    except TemplateError as error:
        return f"the chat template cannot be used ({error})"
    if _PROBE not in text:
        return f"the chat template leaves the prompt out: it renders {text[:80]!r} for a user's {_PROBE!r}"
    return ""
