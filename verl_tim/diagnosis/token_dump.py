"""Token dumps: whole sequences of a training step as a parquet file, `<run_dir>/tokens/step_000123.parquet`.

One row per response token that the model produced (mask 1). Written by the step observer within
`tim.dump.tokens_per_step`, read by report, calibrate, same and evidence; compare reads metrics and samples alone. The
columns are `SCHEMA`; what they mean is in docs/running.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_tim.diagnosis.errors import DiagnosisError

FORMAT = "1"
FOLDER = "tokens"
_NAME = re.compile(r"step_(\d{6,})\.parquet", re.ASCII)

_FIELDS = (
    ("step", pa.int32()),
    ("row", pa.int32()),
    ("uid", pa.string()),
    ("group", pa.int32()),
    ("position", pa.int32()),
    ("length", pa.int32()),
    ("token_id", pa.int32()),
    ("text", pa.string()),
    ("old_log_prob", pa.float32()),
    ("rollout_log_prob", pa.float32()),
    ("log_prob", pa.float32()),
    ("advantage", pa.float32()),
    ("kept", pa.bool_()),
    ("weight_version", pa.int32()),
    ("top1_rollout", pa.int32()),
    ("top1_train", pa.int32()),
    ("turn", pa.int32()),
    ("routes_rollout", pa.list_(pa.int16())),
    ("routes_train", pa.list_(pa.int16())),
)
SCHEMA = pa.schema([pa.field(name, kind) for name, kind in _FIELDS])
# Log-probs hardly repeat: a dictionary of them takes more room than they do, and most of the time of writing.
_DICTIONARIES = [
    f"{name}.list.element" if pa.types.is_list(kind) else name
    for name, kind in _FIELDS
    if not name.endswith("log_prob")
]


_NAMED = 12  # steps that a message lists


class TokenDumpError(DiagnosisError):
    """A dump that cannot be written or read; the message names the file and the remedy."""


@dataclass(frozen=True)
class DumpedSequence:
    """One sequence, N produced tokens; arrays are (N,), None where nothing was recorded.

    Attributes:
        row: number in the step's batch; uid: of its prompt; group: number of the prompt in the batch.
        position_N: place in the response; token_id_N, text_N: the tokens.
        old_log_prob_N, rollout_log_prob_N, log_prob_N: float32, nats; a NaN becomes null.
        advantage_N float32; kept_N bool; turn_N: 1-based turn of the conversation.
        weight_version_N: of the weights that drew each token; a negative one becomes null.
        top1_rollout_N, top1_train_N: ids, a negative one becomes null.
        routes_rollout_NJ, routes_train_NJ: int16 (N, layers * k); may hold fewer tokens than N (the first ones).
    """

    row: int
    uid: str
    group: int
    position_N: np.ndarray
    token_id_N: np.ndarray
    text_N: Sequence[str]
    advantage_N: np.ndarray
    kept_N: np.ndarray
    turn_N: np.ndarray
    old_log_prob_N: np.ndarray | None = None
    rollout_log_prob_N: np.ndarray | None = None
    log_prob_N: np.ndarray | None = None
    weight_version_N: np.ndarray | None = None
    top1_rollout_N: np.ndarray | None = None
    top1_train_N: np.ndarray | None = None
    routes_rollout_NJ: np.ndarray | None = None
    routes_train_NJ: np.ndarray | None = None

    def columns(self, step: int) -> dict[str, Any]:
        """Column name -> values of this sequence."""
        count = len(self.position_N)
        same: dict[str, Any] = {
            "step": step,
            "row": self.row,
            "uid": self.uid,
            "group": self.group,
            "length": count,
        }
        each: dict[str, Any] = {
            "position": self.position_N,
            "token_id": self.token_id_N,
            "text": self.text_N,
            "old_log_prob": _log_probs(self.old_log_prob_N, count),
            "rollout_log_prob": _log_probs(self.rollout_log_prob_N, count),
            "log_prob": _log_probs(self.log_prob_N, count),
            "advantage": self.advantage_N,
            "kept": self.kept_N,
            "top1_rollout": _ids(self.top1_rollout_N, count),
            "top1_train": _ids(self.top1_train_N, count),
            "turn": self.turn_N,
            "weight_version": _ids(self.weight_version_N, count),
            "routes_rollout": _lists(self.routes_rollout_NJ, count),
            "routes_train": _lists(self.routes_train_NJ, count),
        }
        return {
            name: pa.repeat(pa.scalar(value, SCHEMA.field(name).type), count) for name, value in same.items()
        } | each


def _log_probs(values_N: np.ndarray | None, count: int) -> Any:
    if values_N is None:
        return pa.nulls(count, pa.float32())
    return pa.array(values_N, pa.float32(), mask=np.isnan(values_N))


def _ids(values_N: np.ndarray | None, count: int) -> Any:
    if values_N is None:
        return pa.nulls(count, pa.int32())
    return pa.array(values_N, pa.int32(), mask=np.asarray(values_N) < 0)


def _lists(values_NJ: np.ndarray | None, count: int) -> Any:
    if values_NJ is None or values_NJ.shape[1] == 0:
        return pa.nulls(count, pa.list_(pa.int16()))
    flat = pa.array(values_NJ.reshape(-1), pa.int16())
    lists = pa.ListArray.from_arrays(np.arange(len(values_NJ) + 1, dtype=np.int32) * values_NJ.shape[1], flat)
    return pa.concat_arrays([lists, pa.nulls(count - len(values_NJ), lists.type)])


def choose_sequences(lengths: Sequence[int], budget: int, *, seed: int, first: Iterable[int] = ()) -> list[int]:
    """Sequences to dump: whole ones, at most `budget` tokens together.

    Args:
        lengths: produced tokens of each sequence; one without any is not taken.
        seed: of the order in which they are tried; one that no longer fits is passed over.
        first: those to try before the others.

    Returns:
        Their numbers, ascending.
    """
    front = list(first)
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    chosen, left = [], budget
    for number in dict.fromkeys([*front, *order]):
        if 0 < lengths[number] <= left:
            chosen.append(number)
            left -= lengths[number]
    return sorted(chosen)


def write_step(
    run_dir: str | Path,
    step: int,
    sequences: Sequence[DumpedSequence],
    *,
    layers: Sequence[int] = (),
    top_k: int = 0,
    correction: Mapping[str, Any] | None = None,
    model_path: str = "",
) -> Path:
    """Write one step's sequences; a file of the same step is replaced.

    Args:
        layers, top_k: what the route columns hold: `top_k` expert ids of each of these layers, layer by layer.
        correction: the run's correction settings, plain values.

    Returns:
        The file.

    Raises:
        TokenDumpError: arrays of a sequence differ in length.
    """
    path = Path(run_dir) / FOLDER / f"step_{step:06d}.parquet"
    tables = []
    for sequence in sequences:
        columns = sequence.columns(step)
        lengths = {len(values) for values in columns.values()}
        if len(lengths) != 1:
            raise TokenDumpError(f"{path.name}: the columns of row {sequence.row} have lengths {sorted(lengths)}")
        values = ((columns[name], kind) for name, kind in _FIELDS)
        arrays = [value if isinstance(value, pa.Array) else pa.array(value, kind) for value, kind in values]
        tables.append(pa.Table.from_arrays(arrays, schema=SCHEMA))
    table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    metadata = {
        "format": FORMAT,
        "layers": json.dumps(list(layers)),
        "top_k": str(top_k),
        "correction": json.dumps(dict(correction or {})),
        "model_path": model_path,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".writing")
    # Arrow's zstd frames have no checksum, so that without those of the pages a flipped bit is read as another number.
    pq.write_table(
        table.replace_schema_metadata(metadata),
        written,
        compression="zstd",
        use_dictionary=_DICTIONARIES,
        write_page_checksum=True,
    )
    written.replace(path)  # a reader never meets half a file
    return path


def dumped_steps(run_dir: str | Path) -> list[int]:
    """Steps with a dump, ascending. Files of other names (copies, say) are none."""
    matches = (_NAME.fullmatch(path.name) for path in (Path(run_dir) / FOLDER).glob("step_*.parquet"))
    return sorted(int(match[1]) for match in matches if match)


def read_dumps(run_dir: str | Path, steps: Iterable[int] | None = None) -> pa.Table:
    """The dumps of a run as one table in the order of the steps, with the metadata of `write_step`.

    Args:
        steps: those wanted; None: all there are.

    Raises:
        TokenDumpError: no dumps, a step that was not dumped, a file that is damaged or of another format, or files that
            do not belong to one run.
    """
    found = dumped_steps(run_dir)
    folder = Path(run_dir) / FOLDER
    if not found:
        raise TokenDumpError(
            f"{folder} holds no token dumps",
            "the run needs tim.dump.tokens_per_step above 0 (default 20000) and at least one finished step",
        )
    wanted = found if steps is None else sorted(set(steps))
    missing = [step for step in wanted if step not in found]
    if missing or not wanted:
        asked = f"no dump of step {missing[0]}" if missing else "no step was asked for"
        some = ", ".join(map(str, found[:_NAMED])) + ", ..." * (len(found) > _NAMED)
        raise TokenDumpError(
            f"{folder}: {asked}; there are {len(found)}, of steps {found[0]} to {found[-1]}",
            f"leave it out, or name dumped steps: {some}",
            key="--step",
        )
    tables = [_read(folder / f"step_{step:06d}.parquet") for step in wanted]
    metadata = [table.schema.metadata for table in tables]
    # a step may have recorded no routes
    routed = [entry for entry in metadata if entry[b"layers"] != b"[]"] or metadata
    for entry in routed:
        for key in (b"layers", b"top_k"):
            if entry[key] != routed[0][key]:
                raise TokenDumpError(f"{folder}: files differ in {key.decode()}: they do not belong to one run")
    return pa.concat_tables([table.replace_schema_metadata(None) for table in tables]).replace_schema_metadata(
        routed[0]
    )


def _read(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        # numbers are checked by their pages' sums; a text of an older dump may hold anything
        table.validate(full=True)
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise TokenDumpError(f"{path} cannot be read ({error})", "delete it, or name the steps to read") from error
    version = metadata.get("format", "none")
    if version != FORMAT:
        raise TokenDumpError(f"{path} has format {version}, this version of verl_tim reads format {FORMAT}")
    if not table.schema.equals(SCHEMA):
        raise TokenDumpError(f"{path} has other columns than format {FORMAT}: {', '.join(table.column_names)}")
    try:
        json.loads(metadata["layers"]), int(metadata["top_k"]), json.loads(metadata["correction"])
    except (KeyError, ValueError) as error:
        raise TokenDumpError(
            f"{path}: its description is damaged ({error!r})", "delete it, or name the steps to read"
        ) from error
    return table
