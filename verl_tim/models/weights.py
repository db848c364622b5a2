"""Strict, streaming weight loading: HF names to slots in the model's own buffers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class WeightError(ValueError):
    """A weight stream that does not fit the model; the message names the weight."""


@dataclass(frozen=True)
class WeightSlot:
    """Where one HF weight lives: a view into a buffer of the model. Values are rounded to `dtype` on the way in.

    With `repeated`, the buffer keeps the weight several times: `target` has a leading dimension that the weight lacks.
    """

    target: Tensor
    dtype: torch.dtype
    repeated: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.target.shape[1:] if self.repeated else self.target.shape

    def write(self, value: Tensor) -> None:
        self.target.copy_(value.to(self.target.device, self.dtype))

    def read(self) -> Tensor:
        """The weight in the model dtype (a copy)."""
        target = self.target[0] if self.repeated else self.target
        return target.to(self.dtype, copy=True).contiguous()


def per_expert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Split transformers 5's packed expert tensors into the per-expert names of checkpoints; others pass unchanged."""
    for name, tensor in weights:
        if name.endswith(".mlp.experts.gate_up_proj") and tensor.dim() == 3:
            base = name.removesuffix(".gate_up_proj")
            for expert, gate_up in enumerate(tensor):
                gate, up = gate_up.chunk(2)
                yield f"{base}.{expert}.gate_proj.weight", gate
                yield f"{base}.{expert}.up_proj.weight", up
        elif name.endswith(".mlp.experts.down_proj") and tensor.dim() == 3:
            base = name.removesuffix(".down_proj")
            for expert, down in enumerate(tensor):
                yield f"{base}.{expert}.down_proj.weight", down
        else:
            yield name, tensor


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def load_into(
    slots: dict[str, WeightSlot], weights: Iterable[tuple[str, Tensor]], *, tied_head: tuple[str, str] | None
) -> None:
    """Stream `weights` into `slots`.

    Args:
        slots: every weight the model has, by HF name.
        weights: (HF name, full tensor) pairs, consumed once.
        tied_head: (head name, embedding name) of a model with tied embeddings, whose stream may or may not repeat the
            head; a repeated head must equal the embedding.

    Raises:
        WeightError: naming an unknown, duplicate, misshapen, non-float, differing tied, or missing weight.
    """
    head, embedding = tied_head or ("", "")
    seen: set[str] = set()
    for name, value in per_expert(weights):
        if name in seen:
            raise WeightError(f"weight {name!r} came twice")
        slot = slots[embedding] if name == head else slots.get(name)
        if slot is None:
            raise WeightError(f"weight {name!r} is unknown to this model, which has e.g. {_some(slots)}")
        if value.shape != slot.shape:
            raise WeightError(f"weight {name!r} is {tuple(value.shape)}, the model needs {tuple(slot.shape)}")
        if not value.is_floating_point():
            raise WeightError(f"weight {name!r} is {value.dtype}; only floating-point weights are served")
        twin = {head: embedding, embedding: head}.get(name)
        if twin in seen and not torch.equal(slot.read(), value.to(slot.target.device, slot.dtype)):
            raise WeightError(f"weight {name!r} differs from {twin!r}, but the config ties them")
        slot.write(value)
        seen.add(name)
    if head in seen:
        seen.add(embedding)
    missing = slots.keys() - seen
    if missing:
        raise WeightError(f"{len(missing)} of {len(slots)} weights are missing: {_some(missing)}")


def _checkpoint_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise WeightError(f"{str(folder)!r} lacks {_some(missing)}, which {index.name} lists")
        return [folder / name for name in names]
    return sorted(folder.glob("*.safetensors"))


def checkpoint_weights(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a folder's safetensors files (those of its index, where there is one).

    Raises `WeightError` when there are none, or one is missing or unreadable.
    """
    files = _checkpoint_files(Path(folder))
    if not files:
        raise WeightError(f"{str(folder)!r} has no *.safetensors file; save the model with save_pretrained")
    for file in files:
        try:
            handle = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise WeightError(f"{file} is not a readable safetensors file ({error})") from error
        with handle:
            for name in handle.keys():  # noqa: SIM118 (safe_open is not a dict)
                yield name, handle.get_tensor(name)


def weight_checksum(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str:
    """sha256 over (HF name, shape, bytes rounded to `dtype`), sorted by name: equal on trainer and engine exactly when
    both hold the same weights in that dtype. A tied head must be left out on both sides."""
    digests = []
    for name, value in per_expert(weights):
        rounded = value.detach().to("cpu", dtype).contiguous()
        content = rounded.view(-1).view(torch.uint8).numpy()
        digests.append((name, hashlib.sha256(f"{name}{tuple(value.shape)}".encode() + content.tobytes()).hexdigest()))
    return hashlib.sha256(repr(sorted(digests)).encode()).hexdigest()
