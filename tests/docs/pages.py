"""What a page of docs/ tells its reader to write and to type."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"

_FILE = re.compile(r"^`([^`\n]+)`\n\n```\w*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```.*?^```$", flags=re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^ {4}(\S.*(?:\\\n.*)*)$", flags=re.MULTILINE)


def files_of(page: str) -> dict[str, str]:
    """path -> content of the files that a page shows: a line with the path in backticks, then a fenced block."""
    return dict(_FILE.findall((DOCS / page).read_text(encoding="utf-8")))


def commands_of(page: str) -> list[str]:
    """The commands of a page: indented lines outside of fenced blocks, without their comments."""
    text = _FENCED.sub("", (DOCS / page).read_text(encoding="utf-8"))
    return [re.sub(r"\s+# .*$", "", line).strip() for line in _COMMAND.findall(text)]


def write_files(page: str, folder: Path) -> None:
    """Every file of a page, below a folder."""
    for name, content in files_of(page).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
