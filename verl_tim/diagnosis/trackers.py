"""Metrics from other trackers' folders: TensorBoard event files and wandb's offline files.

verl writes the same names and values to every tracker (verl 0.9.1, utils/tracking.py), so that a run logged to one of
these alone compares as any other.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tim.diagnosis.metric_log import MetricLog, Record, RunFolderError

# Keys of a config that say where a run is shown, and nothing of what it computes.
TRACKER_KEYS = re.compile(
    r"""
    tim\.choices\.tracker | tim\.trackers\..* | tim\.tracking\..* | trainer\.logger
    | ray_kwargs\.ray_init\.runtime_env\.env_vars\.(WANDB|SWANLAB|MLFLOW|TRACKIO|TENSORBOARD)_.*
    """,
    re.VERBOSE,
)

EVENTS = "events.out.tfevents.*"
# wandb's transaction log: a file header, then 32 KiB blocks of chunks (crc32, length, type), as in LevelDB's log.
# The package's own reader (wandb.sdk.internal.datastore) was removed from later versions, 0.31 among them, so the
# framing is read here and the messages with wandb's protobufs.
WANDB_MAGIC, WANDB_HEADER = b":W&B", 7
BLOCK, CHUNK_HEADER = 32768, struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def tensorboard_folder(folder: Path) -> Path | None:
    """The folder with TensorBoard event files: this one, or the only one below it; None if there is none.

    Raises:
        RunFolderError: several folders below have some.
    """
    if any(folder.glob(EVENTS)):
        return folder
    return _only_one(sorted({path.parent for path in folder.rglob(EVENTS)}), folder, "TensorBoard event folders")


def wandb_file(folder: Path) -> Path | None:
    """The `.wandb` file of an offline run in or below the folder, or None.

    Raises:
        RunFolderError: there are several.
    """
    # wandb keeps a link `latest-run` beside the run's folder
    return _only_one(sorted({path.resolve() for path in folder.rglob("*.wandb")}), folder, "wandb runs")


def _only_one(found: list[Path], folder: Path, what: str) -> Path | None:
    if len(found) > 1:
        raise RunFolderError(f"{folder} holds {len(found)} {what}", f"give one of them, for example {found[0]}")
    return found[0] if found else None


def read_tensorboard_metrics(folder: Path) -> MetricLog | None:
    """The log from TensorBoard event files; None where the folder has none.

    Raises:
        RunFolderError: several event folders, a corrupt file, or the package tensorboard is missing.
    """
    events = tensorboard_folder(folder)
    if events is None:
        return None
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise RunFolderError(f"{events} holds TensorBoard events", "pip install tensorboard to read them") from error
    torn = [_check_events(path) for path in sorted(events.glob(EVENTS))]
    accumulator = EventAccumulator(str(events), size_guidance={SCALARS: 0, TENSORS: 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    points = [(e.step, name, e.value) for name in tags[SCALARS] for e in accumulator.Scalars(name)]
    for name in tags[TENSORS]:  # newer writers store scalars as tensors
        for event in accumulator.Tensors(name):
            value = make_ndarray(event.tensor_proto)
            if value.size == 1 and value.dtype.kind in "fiu":
                points.append((event.step, name, float(value.reshape(()))))
    return MetricLog.merged((_record(step, {name: value}) for step, name, value in points), any(torn))


def _check_events(path: Path) -> bool:
    """Whether an event file ends within a record (a run that was killed or is still going).

    TensorBoard's reader stops at a record whose checksum does not hold and says nothing of those behind it. So what it
    reads is counted against what the file's framing holds: length (8 bytes), its checksum (4), data, checksum (4).

    Raises:
        RunFolderError: the reader stops before the end.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    content = path.read_bytes()
    at = whole = 0
    while at + 8 <= len(content):
        end = at + 16 + int.from_bytes(content[at : at + 8], "little")
        if end > len(content):
            break
        at, whole = end, whole + 1
    read = sum(1 for _ in RawEventFileLoader(str(path)).Load()) if whole else 0
    if read < whole:
        raise RunFolderError(f"{path} is corrupt: record {read + 1} of {whole} cannot be read")
    return at < len(content)


def read_wandb_metrics(folder: Path) -> MetricLog | None:
    """The log from the `.wandb` file of an offline run; None where the folder has none.

    Raises:
        RunFolderError: several runs, a corrupt file, or the package wandb is missing.
    """
    path = wandb_file(folder)
    if path is None:
        return None
    records: list[Record] = []
    messages, torn = _wandb_records(path)
    for message in messages:
        if message.WhichOneof("record_type") != "history":
            continue
        # a table, a page, ... comes as a group of keys with its type among them, and is no metric
        media = {tuple(item.nested_key[:-1]) for item in message.history.item if item.nested_key[-1:] == ["_type"]}
        values = {
            item.key or "/".join(item.nested_key): item.value_json
            for item in message.history.item
            if tuple(item.nested_key[:-1]) not in media
        }
        step = int(json.loads(values.get("_step", "null")) or message.history.step.num)
        data = {name: json.loads(text) for name, text in values.items() if not name.startswith("_")}
        records.append(_record(step, data))
    return MetricLog.merged(records, torn)


@dataclass(frozen=True)
class WandbRun:
    """What a `.wandb` file says of its run beside the metrics.

    Attributes:
        name: as wandb shows it.
        config: as it was given to `wandb.init`, later changes applied.
    """

    name: str
    config: dict[str, Any]


def read_wandb_run(folder: Path) -> WandbRun | None:
    """Name and config of the offline run in or below the folder; None where there is none.

    Raises:
        RunFolderError: as of `read_wandb_metrics`.
    """
    path = wandb_file(folder)
    if path is None:
        return None
    name, config = "", dict[str, Any]()
    for message in _wandb_records(path)[0]:
        kind = message.WhichOneof("record_type")
        if kind == "run":
            name = message.run.display_name or message.run.run_id
        if kind in ("run", "config"):
            items = message.run.config.update if kind == "run" else message.config.update
            config |= {item.key: json.loads(item.value_json) for item in items if item.key and item.key[0] != "_"}
    return WandbRun(name or folder.name, config)


def _wandb_records(path: Path) -> tuple[list[Any], bool]:
    """The messages of a `.wandb` file, parsed, and whether it is torn."""
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError as error:
        raise RunFolderError(
            f"{path} is an offline run of wandb", "pip install 'verl_tim[wandb]' to read it"
        ) from error
    messages, torn = wandb_messages(path)
    return [wandb_internal_pb2.Record.FromString(content) for content in messages], torn  # type: ignore[attr-defined]


def wandb_messages(path: Path) -> tuple[list[bytes], bool]:
    """Every message of a `.wandb` file, and whether the file ends within one (a run that was killed).

    Raises:
        RunFolderError: no such file format, or a chunk whose checksum does not hold.
    """
    content = path.read_bytes()
    if not content.startswith(WANDB_MAGIC):
        raise RunFolderError(f"{path} is no file of wandb: it does not begin with {WANDB_MAGIC.decode()}")
    messages: list[bytes] = []
    pending = b""
    torn = False
    for kind, data in _chunks(content, path):
        if kind is None:
            torn = True
        elif kind in (FULL, LAST):
            messages.append(pending + data)
            pending = b""
        else:
            pending = data if kind == FIRST else pending + data
    return messages, torn or bool(pending)


def _chunks(content: bytes, path: Path) -> Iterator[tuple[int | None, bytes]]:
    """(type, data) of every chunk; (None, b"") for one that the end of the file cuts off."""
    at = WANDB_HEADER
    while at < len(content):
        room = BLOCK - at % BLOCK
        if room < CHUNK_HEADER.size:  # padding: no header begins in the last bytes of a block
            at += room
            continue
        if at + CHUNK_HEADER.size > len(content):
            yield None, b""
            return
        checksum, length, kind = CHUNK_HEADER.unpack_from(content, at)
        data = content[at + CHUNK_HEADER.size : at + CHUNK_HEADER.size + length]
        if len(data) < length:
            yield None, b""
            return
        if kind not in (FULL, FIRST, MIDDLE, LAST) or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            raise RunFolderError(f"{path} is corrupt at byte {at}: the checksum of a chunk does not hold")
        yield kind, data
        at += CHUNK_HEADER.size + length


def _record(step: int, data: dict[str, Any]) -> Record:
    """A record of the numbers in `data`; wandb writes NaN and infinities as text."""
    words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    read = {name: words.get(value, value) if isinstance(value, str) else value for name, value in data.items()}
    numbers = {
        name: float(value)
        for name, value in read.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return Record(step, finite, tuple(name for name in numbers if name not in finite))
