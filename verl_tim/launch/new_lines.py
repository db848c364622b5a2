"""A file that somebody else appends to, read as it grows."""

from __future__ import annotations

from pathlib import Path


class NewLines:
    """Complete lines of a growing file, each handed out once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[bytes]:
        """Those completed since the last call; none where there is no file yet."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            block = stream.read()
        complete = block.rfind(b"\n") + 1
        self._offset += complete
        return block[:complete].splitlines()
