"""A file that several processes want at the same time: one of them has it, the others wait."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """`path`, open for appending (made if need be), once nobody else holds it.

    Whoever holds it may remove or rename it: those who wait see that what they waited for has gone, and take the file
    that is there by then.

    Raises:
        OSError: it cannot be opened or locked.
    """
    while True:
        with path.open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if _is_at(path, stream):
                yield stream
                return


def _is_at(path: Path, stream: BinaryIO) -> bool:
    # one call, not a look and then another: between two the file may go
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(stream.fileno()))
