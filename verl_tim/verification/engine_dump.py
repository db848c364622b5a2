"""What another engine drew and computed, as a file: token ids and log-probs, and hidden states if it has them.

`.npz` and `.safetensors` hold arrays, sequences one after another:

    prompt_ids         int (all prompt tokens,)
    prompt_lengths     int (sequences,)
    response_ids       int (all response tokens,)
    response_lengths   int (sequences,)
    log_probs          float32 (all response tokens,), nats, of the full vocabulary at `temperature`
    temperature        float (sequences,), optional, 1.0 else; 0 (greedy) means that the log-probs are those at 1
    top_ids            int (all response tokens, k), optional: likeliest tokens, likeliest first
    top_log_probs      float32 (all response tokens, k), with top_ids
    hidden/<name>      float (rows, features), optional: a result of the forward under its tap name (`models.taps`:
                       model.embed_tokens, model.layers.0.input_layernorm, ...), rows of all tokens of all sequences,
                       prompt and response of each; `lm_head` has rows for response tokens only

`.parquet` has one row per sequence, without hidden states: `prompt_ids`, `response_ids`, `log_probs` (lists),
`temperature`, `top_ids`, `top_log_probs` (lists of lists) optional.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_tim.diagnosis.own_file import mark
from verl_tim.training.in_process import ScoredSequence
from verl_tim.verification.answers import Answer
from verl_tim.verification.forward import LOG_PROB
from verl_tim.verification.hf_taps import LOGITS

SUFFIXES = (".npz", ".safetensors", ".parquet")
HIDDEN = "hidden/"
_MARK = mark("probe --dump")
_REQUIRED = ("prompt_ids", "response_ids", "log_probs")


class DumpError(ValueError):
    """A file that cannot be used; the message names file, key and what is expected."""


@dataclass(frozen=True)
class DumpedSequence:
    """One sequence of a dump.

    Attributes:
        tokens: prompt and response, at least one token each.
        log_prob_R: float32.
        temperature: what the log-probs are at (never 0).
        top_ids_RK, top_log_probs_RK: None where the dump has none.
        hidden: {tap name: (rows, features)}.
    """

    tokens: ScoredSequence
    log_prob_R: Tensor
    temperature: float = 1.0
    top_ids_RK: np.ndarray | None = None
    top_log_probs_RK: np.ndarray | None = None
    hidden: dict[str, Tensor] = field(default_factory=dict)

    @property
    def taps(self) -> dict[str, Tensor]:
        """As `forward.Forward.taps`."""
        return {**self.hidden, LOG_PROB: self.log_prob_R[:, None]}


def dumped_answer(answer: Answer, hidden: dict[str, Tensor]) -> DumpedSequence:
    """A response as a dump keeps it."""
    return DumpedSequence(
        answer.tokens,
        answer.log_prob_R,
        answer.temperature,
        top_ids_RK=answer.top.id_R2.numpy(),
        top_log_probs_RK=answer.top.log_prob_R2.numpy(),
        hidden=hidden,
    )


def read_dump(path: str | Path, *, vocab_size: int | None = None) -> list[DumpedSequence]:
    """The sequences of a file in the layout above.

    Args:
        vocab_size: the model's; token ids beyond it mean another model.

    Raises:
        DumpError: no such file, an unknown suffix, a missing key, lengths that do not add up, no sequence or an empty
            one, a log-prob that is not finite or is positive, or token ids of another model.
    """
    path = Path(path)
    if not path.is_file():
        raise DumpError(f"there is no file {path}: give a dump ({', '.join(SUFFIXES)})")
    if path.suffix not in SUFFIXES:
        raise DumpError(f"{path}: {path.suffix or 'no suffix'} is unknown; write one of {', '.join(SUFFIXES)}")
    sequences = _from_parquet(path) if path.suffix == ".parquet" else _from_arrays(path, _arrays(path))
    if not sequences:
        raise DumpError(f"{path} holds no sequence: there is nothing to compare")
    for number, sequence in enumerate(sequences):
        _check(path, number, sequence, vocab_size)
    return sequences


def write_dump(path: str | Path, sequences: Sequence[DumpedSequence]) -> Path:
    """Write sequences in the layout above; the suffix decides the format.

    Raises:
        DumpError: an unknown suffix, no sequences, or hidden states for a parquet file.
    """
    path = Path(path)
    if not sequences:
        raise DumpError(f"{path}: no sequences to write")
    if path.suffix == ".parquet":
        _to_parquet(path, sequences)
    elif path.suffix in SUFFIXES:
        _to_arrays(path, sequences)
    else:
        raise DumpError(f"{path}: {path.suffix or 'no suffix'} is unknown; write one of {', '.join(SUFFIXES)}")
    return path


# --------------------------------------------------------------------------------------------------------------- read


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise DumpError(f"{path} is not a safetensors file: {error}") from error
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except (ValueError, OSError) as error:
        raise DumpError(f"{path} is not an npz file of plain arrays: {error}") from error


def _from_arrays(path: Path, arrays: Mapping[str, Tensor]) -> list[DumpedSequence]:
    missing = [name for name in (*_REQUIRED, "prompt_lengths", "response_lengths") if name not in arrays]
    if missing:
        raise DumpError(f"{path} lacks {', '.join(missing)}; the layout is described in {__name__}")
    prompt_S, response_S = (arrays[f"{side}_lengths"].long().tolist() for side in ("prompt", "response"))
    if len(prompt_S) != len(response_S):
        raise DumpError(f"{path}: {len(prompt_S)} prompt_lengths but {len(response_S)} response_lengths")
    lengths = {
        "prompt_ids": prompt_S,
        **dict.fromkeys(("response_ids", "log_probs", "top_ids", "top_log_probs"), response_S),
        **{
            name: response_S if name == HIDDEN + LOGITS else [p + r for p, r in zip(prompt_S, response_S, strict=True)]
            for name in arrays
            if name.startswith(HIDDEN)
        },
    }
    parts: dict[str, tuple[Tensor, ...]] = {}
    for name, sizes in lengths.items():
        if name not in arrays:
            continue
        if len(arrays[name]) != sum(sizes):
            raise DumpError(f"{path}: {name} has {len(arrays[name])} rows, the lengths add up to {sum(sizes)}")
        parts[name] = arrays[name].split(sizes)
    if ("top_ids" in parts) != ("top_log_probs" in parts):
        raise DumpError(f"{path}: top_ids and top_log_probs belong together")
    temperatures = arrays["temperature"].tolist() if "temperature" in arrays else [1.0] * len(prompt_S)
    if len(temperatures) != len(prompt_S):
        raise DumpError(f"{path}: temperature has {len(temperatures)} entries for {len(prompt_S)} sequences")

    def part(name: str, at: int) -> np.ndarray | None:
        return parts[name][at].numpy() if name in parts else None

    sequences = []
    for at, temperature in enumerate(temperatures):
        ids = (parts[name][at].numpy().astype(np.int64) for name in ("prompt_ids", "response_ids"))
        sequences.append(
            DumpedSequence(
                tokens=ScoredSequence(*ids),
                log_prob_R=parts["log_probs"][at].float().clone(),
                temperature=float(temperature) or 1.0,
                top_ids_RK=part("top_ids", at),
                top_log_probs_RK=part("top_log_probs", at),
                hidden={n.removeprefix(HIDDEN): p[at].clone() for n, p in parts.items() if n.startswith(HIDDEN)},
            )
        )
    return sequences


def _from_parquet(path: Path) -> list[DumpedSequence]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise DumpError(f"{path} is not a parquet file: {error}") from error
    sequences = []
    for number, row in enumerate(rows):
        missing = [name for name in _REQUIRED if row.get(name) is None]
        if missing:
            raise DumpError(f"{path}: row {number} lacks {', '.join(missing)}; the layout is described in {__name__}")
        if len(row["response_ids"]) != len(row["log_probs"]):
            raise DumpError(
                f"{path}: row {number} has {len(row['response_ids'])} response_ids, "
                f"but {len(row['log_probs'])} log_probs"
            )
        tokens = ScoredSequence(*(np.asarray(row[name], dtype=np.int64) for name in ("prompt_ids", "response_ids")))
        top = [None if row.get(name) is None else np.asarray(row[name]) for name in ("top_ids", "top_log_probs")]
        log_prob_R = torch.tensor([float("nan") if x is None else x for x in row["log_probs"]], dtype=torch.float32)
        temperature = float(row.get("temperature") or 1.0)
        sequences.append(DumpedSequence(tokens, log_prob_R, temperature, top_ids_RK=top[0], top_log_probs_RK=top[1]))
    return sequences


def _check(path: Path, number: int, sequence: DumpedSequence, vocab_size: int | None) -> None:
    where = f"{path}: sequence {number}"
    for name, ids in (("prompt_ids", sequence.tokens.prompt_P), ("response_ids", sequence.tokens.response_R)):
        if len(ids) == 0:
            raise DumpError(f"{where} has no {name}: nothing can be scored")
        if int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size):
            raise DumpError(
                f"{where}: {name} holds token {int(ids.min() if ids.min() < 0 else ids.max())}, the model's vocabulary "
                f"has {vocab_size}: the file is of another model"
            )
    bad_R = ~torch.isfinite(sequence.log_prob_R) | (sequence.log_prob_R > 0)
    if bool(bad_R.any()):
        at = int(bad_R.nonzero()[0])
        raise DumpError(f"{where}, response token {at}: log_probs is {float(sequence.log_prob_R[at])}, not one")
    if not (np.isfinite(sequence.temperature) and sequence.temperature > 0):
        raise DumpError(f"{where}: temperature is {sequence.temperature}")


# -------------------------------------------------------------------------------------------------------------- write


def _to_arrays(path: Path, sequences: Sequence[DumpedSequence]) -> None:
    first = sequences[0]
    arrays: dict[str, Tensor] = {
        "prompt_ids": torch.from_numpy(np.concatenate([s.tokens.prompt_P for s in sequences])),
        "prompt_lengths": torch.tensor([len(s.tokens.prompt_P) for s in sequences]),
        "response_ids": torch.from_numpy(np.concatenate([s.tokens.response_R for s in sequences])),
        "response_lengths": torch.tensor([len(s.tokens.response_R) for s in sequences]),
        "log_probs": torch.cat([s.log_prob_R for s in sequences]),
        "temperature": torch.tensor([s.temperature for s in sequences], dtype=torch.float64),
    }
    if first.top_ids_RK is not None:
        for name in ("top_ids", "top_log_probs"):
            arrays[name] = torch.from_numpy(np.concatenate([getattr(s, f"{name}_RK") for s in sequences]))
    for name in first.hidden:
        arrays[HIDDEN + name] = torch.cat([s.hidden[name] for s in sequences]).contiguous()
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(arrays, path, metadata=_MARK)
        return
    # NumPy has no bfloat16; float32 holds its values exactly
    plain: dict[str, Any] = {
        name: (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy() for name, x in arrays.items()
    }
    np.savez(path, **plain)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = "".join(_MARK.values()).encode()


def _to_parquet(path: Path, sequences: Sequence[DumpedSequence]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if any(s.hidden for s in sequences):
        raise DumpError(f"{path}: parquet holds no hidden states; write .safetensors or .npz")
    columns: dict[str, list[Any]] = {
        "prompt_ids": [s.tokens.prompt_P.tolist() for s in sequences],
        "response_ids": [s.tokens.response_R.tolist() for s in sequences],
        "log_probs": [s.log_prob_R.tolist() for s in sequences],
        "temperature": [s.temperature for s in sequences],
    }
    if sequences[0].top_ids_RK is not None:
        for name in ("top_ids", "top_log_probs"):
            columns[name] = [getattr(s, f"{name}_RK").tolist() for s in sequences]
    pq.write_table(pa.table(columns).replace_schema_metadata(_MARK), path)
