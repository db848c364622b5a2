"""A download that goes on where it stopped, whatever stopped it.

huggingface_hub resumes within one call only: since it gave every process a partial file of its own (its pull request
4228), what a killed process had fetched is lost. Here the partial file stays, is locked while it grows, and gets its
final name when its size and, where known, its checksum are right.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from verl_tim.tasks.artifact import file_sha256
from verl_tim.tasks.locked import locked

_BLOCK = 1 << 20
_TIMEOUT_SECONDS = 30.0
# Connections in a row that bring nothing before this gives up.
_ATTEMPTS = 4


class DamagedDownload(Exception):
    """What arrived is not what was promised. The partial file is gone, so that the next try begins anew."""


def download(url: str, target: Path, *, size: int | None, sha256: str | None, progress: bool) -> None:
    """Fetch `url` into `target`, through `target` + `.part` beside it.

    Args:
        url: on the hub (its redirects are followed, its login is sent).
        size, sha256: what the whole file must have, where known.
        progress: show a progress bar.

    Two processes at once: the second waits for the first, and finds its file.

    Raises:
        DamagedDownload: the file has another size or checksum.
        httpx.HTTPError, huggingface_hub.errors.HfHubHTTPError, OSError: it cannot be fetched; what has arrived is kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    # not truncated; the position is at the end
    with locked(part) as stream:
        if target.exists():
            part.unlink(missing_ok=True)
            return
        _fill(url, stream, size, progress=progress)
        stream.flush()
        os.fsync(stream.fileno())
        arrived = stream.tell()
        problem = f"has {arrived} bytes, not {size}" if size is not None and arrived != size else ""
        if not problem and sha256 is not None and (digest := file_sha256(part)) != sha256:
            problem = f"has SHA-256 {digest}, not {sha256}"
        if problem:
            part.unlink()
            raise DamagedDownload(problem)
        part.rename(target)


def _fill(url: str, stream: BinaryIO, size: int | None, *, progress: bool) -> None:
    import httpx

    barren = 0
    with tqdm(
        total=size, initial=stream.tell(), desc=url.rpartition("/")[2], unit="B", unit_scale=True, disable=not progress
    ) as bar:
        while size is None or stream.tell() < size:
            before = stream.tell()
            try:
                _append(url, stream, bar)
                return
            # broken connections and timeouts; an answer that says no is an HfHubHTTPError
            except httpx.TransportError:
                barren = barren + 1 if stream.tell() == before else 0
                if barren == _ATTEMPTS:
                    raise
                time.sleep(min(2.0**barren, 10.0))


def _append(url: str, stream: BinaryIO, bar: tqdm) -> None:
    """One connection's worth: what lies behind the stream's end."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    have = stream.tell()
    # identity: a range of a compressed answer would be one of other bytes
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_SECONDS) as response:
        hf_raise_for_status(response)
        if have and response.status_code != 206:  # the server sends all of it again
            stream.truncate(0)
            stream.seek(0)
            bar.reset()
        for block in response.iter_bytes(_BLOCK):
            stream.write(block)
            bar.update(len(block))
