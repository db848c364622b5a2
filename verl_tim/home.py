"""`~` at the beginning of a path, as people and configs write it."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home that its ~ stands for; as it is where nobody has that home.

    `Path.expanduser` raises a RuntimeError there, which names no key; what is read is then a file that is not there.
    """
    return Path(os.path.expanduser(path))


def of_nobody(path: str | os.PathLike[str]) -> bool:
    """Whether it begins with the home of a user who does not exist: not to be made as a folder of that name."""
    text = os.fspath(path)
    return text.startswith("~") and os.path.expanduser(text) == text


NOBODY = "nobody here has that home"
REMEDY = "write the folder out: /FOLDER"
