"""YAML documents with any text in them: written by a YAML library, scripts as readable blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Blocks for text of several lines, and no anchors, which kubectl reads and people do not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# What YAML 1.1 reads as the end of a line, too; only in double quotes does the library write them as escapes.
_OTHER_LINE_ENDS = frozenset("\r\x85\u2028\u2029")


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = '"' if _OTHER_LINE_ENDS & set(value) else "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(documents: Sequence[Any]) -> str:
    """The documents, keys in their order; reading them gives the same values."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
