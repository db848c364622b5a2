"""Files of a folder that belong together, exchanged as one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def replace_files(out: Path, contents: Iterable[tuple[str, bytes]], stale: str) -> tuple[Path, ...]:
    """Write files; those of an earlier call go when all of these are written.

    Args:
        out: folder, made if need be.
        contents: (name, bytes) of each, asked for one by one.
        stale: pattern of an earlier call's names.

    Raises:
        OSError: no room on the disk; the files of the earlier call are still there, and none of these.
    """
    out.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
    try:
        for name, content in contents:
            written[name] = out / f".{name}.part"
            written[name].write_bytes(content)
    except OSError:
        for path in written.values():
            path.unlink(missing_ok=True)
        raise
    for old in out.glob(stale):
        old.unlink()
    return tuple(path.replace(out / name) for name, path in written.items())
