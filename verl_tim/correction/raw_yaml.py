"""Find bands that YAML reads as numbers: ``0.5_5`` unquoted is the float 0.55, not the band from 0.5 to 5.

After parsing, nothing shows what was written; so these functions look at the text of a file or of a command-line
override, before it is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import yaml

from .errors import ConfigError
from .thresholds import THRESHOLD_KEYS

_UNSIGNED = r"(?:\d[\d_]*\.?[\d_]*|\.[\d_]+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(rf"[-+]?{_UNSIGNED}")
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.])[-+]?{_UNSIGNED}(?![\w.])")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_KEY_IN_TEXT = re.compile(rf"\b({'|'.join(THRESHOLD_KEYS)})\b")


class UnderscoreNumber(NamedTuple):
    """A threshold written as an unquoted number with an underscore in it."""

    key: str
    text: str
    where: str  # "file:line" or the override itself

    def error(self) -> ConfigError:
        lo, _, hi = self.text.partition("_")
        return ConfigError(
            self.key,
            self.text,
            f"{self.where}: YAML reads the unquoted {self.text} as the number {self.text.replace('_', '')}",
            f'For a band write [{lo}, {hi}] or "{self.text}" in quotes; for a number leave the underscore out',
        )


def find_in_yaml(text: str, source: str = "<yaml>") -> list[UnderscoreNumber]:
    """Underscore numbers under the threshold keys of a YAML document, at any depth.

    Raises:
        yaml.YAMLError: the text is not YAML.
    """
    found: list[UnderscoreNumber] = []
    for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
        for key, scalar in _threshold_scalars(document, None):
            if scalar.style is None and "_" in scalar.value and _NUMBER.fullmatch(scalar.value):
                found.append(UnderscoreNumber(key, scalar.value, f"{source}:{scalar.start_mark.line + 1}"))
    return found


def _threshold_scalars(node: yaml.Node | None, key: str | None) -> Iterator[tuple[str, yaml.ScalarNode]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            name = key_node.value.rpartition(".")[2] if isinstance(key_node, yaml.ScalarNode) else None
            yield from _threshold_scalars(value_node, name if name in THRESHOLD_KEYS else key)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _threshold_scalars(item, key)
    elif isinstance(node, yaml.ScalarNode) and key is not None:
        yield key, node


def find_in_overrides(overrides: Iterable[str]) -> list[UnderscoreNumber]:
    """Underscore numbers in command-line overrides such as ``algorithm.rollout_correction.rollout_is_threshold=0.5_5``.

    The shell has taken its own quotes already: only quotes that are still in the text protect a band. Hydra reads
    ``0.5_5`` as 0.55 and ``0.5_5.0`` as text, as YAML does.
    """
    found: list[UnderscoreNumber] = []
    for override in overrides:
        bare = _QUOTED.sub(" ", override)
        keys = list(_KEY_IN_TEXT.finditer(bare))
        for match in _NUMBER_IN_TEXT.finditer(bare):
            before = [key.group(1) for key in keys if key.end() <= match.start()]
            if before and "_" in match.group():
                found.append(UnderscoreNumber(before[-1], match.group(), f"override {override!r}"))
    return found


def refuse_underscore_numbers(found: Iterable[UnderscoreNumber]) -> None:
    """Raise on the first finding.

    Raises:
        ConfigError: naming the key, the file and line or the override, and how to write the band.
    """
    for item in found:
        raise item.error()
