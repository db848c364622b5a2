"""Strict, streaming weight loading: HF names to slots in the model's own buffers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl_tim.numerics.shards import Shards


class WeightError(ValueError):
    """A weight stream that does not fit the model; the message names the weight."""


@dataclass(frozen=True)
class WeightSlot:
    """Where one HF weight lives: a view into a buffer of the model. Values are rounded to `dtype` on the way in.

    With `repeated`, the buffer keeps the weight several times: `target` has a leading dimension that the weight lacks.
    With `part` and `total`, the buffer keeps the rows `part` of the weight's `total`, the others are other ranks'. A
    target on the meta device is a weight that this rank has no part of; its shape is checked all the same.
    """

    target: Tensor
    dtype: torch.dtype
    repeated: bool = False
    part: slice | None = None
    total: int = 0

    @property
    def shape(self) -> torch.Size:
        """Of the full weight."""
        if self.part is not None:
            return torch.Size((self.total, *self.target.shape[1:]))
        return self.target.shape[1:] if self.repeated else self.target.shape

    @property
    def is_held(self) -> bool:
        return not self.target.is_meta

    def _own(self, value: Tensor) -> Tensor:
        """What this rank keeps of a full weight, rounded."""
        value = value if self.part is None else value[self.part]
        return value.to(self.target.device, self.dtype)

    def write(self, value: Tensor) -> None:
        if self.is_held:
            self.target.copy_(self._own(value))

    def holds(self, value: Tensor) -> bool:
        """Whether what is kept equals a full weight's."""
        return not self.is_held or torch.equal(self.read(), self._own(value))

    def read(self) -> Tensor:
        """What this rank keeps of the weight, in the model dtype (a copy)."""
        target = self.target[0] if self.repeated else self.target
        return target.to(self.dtype, copy=True).contiguous()

    def read_full(self, shards: Shards) -> Tensor:
        """The weight in the model dtype, put together from all ranks of `shards`: a collective where it is split."""
        own = self.read()
        if self.part is None:
            return own
        sizes = shards.all(torch.tensor([own.shape[0]], device=own.device))[:, 0].tolist()
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: own.shape[0]] = own
        return torch.cat([part[:size] for part, size in zip(shards.all(padded), sizes, strict=True)])


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
        if twin in seen and not slot.holds(value):
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


def weight_digests(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, str]:
    """HF name -> sha256 over (name, shape, bytes rounded to `dtype`)."""
    digests = {}
    for name, value in per_expert(weights):
        rounded = value.detach().to("cpu", dtype).contiguous()
        content = rounded.view(-1).view(torch.uint8).numpy()
        digests[name] = hashlib.sha256(f"{name}{tuple(value.shape)}".encode() + content.tobytes()).hexdigest()
    return digests


def checksum_of(digests: Mapping[str, str]) -> str:
    """`weight_checksum` from the digests of all weights."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def weight_checksum(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str:
    """sha256 over (HF name, shape, bytes rounded to `dtype`), sorted by name: equal on trainer and engine exactly when
    both hold the same weights in that dtype. A tied head must be left out on both sides."""
    return checksum_of(weight_digests(weights, dtype))
