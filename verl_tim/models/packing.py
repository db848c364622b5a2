"""The trainer's inputs as one list of packed sequences, whatever layout they come in, and the way back.

verl's layouts (0.9.1, workers/engine/fsdp/transformer_impl.py:1172-1312): packed is (1, T) without a mask, where a
sequence starts at each position id 0; padded is (B, S) with an attention_mask, padded left or right. Padding never
reaches an op, so both give the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_tim.numerics.attention import PackedSequences
from verl_tim.numerics.contract import ROW_FLOOR, ContractError, pad_dim0
from verl_tim.numerics.head import as_temperature


@dataclass
class PackedRows:
    """Input rows as one packed sequence list, padded to `ROW_FLOOR`, and the way back to [B, S]."""

    token_T: Tensor
    position_T: Tensor
    target_T: Tensor
    temperature_T: Tensor
    sequences: PackedSequences
    max_length: int
    source: Tensor | None  # flat [B * S] index of each real row; None when the rows already are in order
    shape: tuple[int, int]

    def unpack(self, value_T: Tensor) -> Tensor:
        """[T, ...] -> [B, S, ...], zeros where the input was padding.

        A copy, since FSDP2's hook would be lost on a view.
        """
        real = value_T[: self.sequences.num_rows]
        if self.source is not None:
            real = real.new_zeros(self.shape[0] * self.shape[1], *real.shape[1:]).index_copy(0, self.source, real)
        return real.view(*self.shape, *real.shape[1:]).clone()


def _packed_lengths(position_T: Tensor) -> Tensor:
    """cu_seqlens of packed rows: a sequence starts where the position is 0 and counts up by one."""
    starts = (position_T == 0).nonzero()[:, 0]
    if starts.numel() == 0 or int(starts[0]) != 0:
        raise ContractError("packed input: position_ids must start at 0")
    expected = torch.arange(position_T.shape[0], device=position_T.device)
    expected = expected - starts.repeat_interleave(torch.diff(starts, append=starts.new_tensor([position_T.shape[0]])))
    if not torch.equal(position_T, expected):
        raise ContractError("packed input: position_ids must count up by one from each 0; attention would be wrong")
    return torch.cat([starts, starts.new_tensor([position_T.shape[0]])])


def _mask_lengths(mask_BS: Tensor, position_BS: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(cu_seqlens, flat index of real rows, their positions) of padded input; each row's real part is contiguous."""
    mask = mask_BS.to(torch.bool)
    if not torch.equal(mask.to(mask_BS.dtype), mask_BS):
        raise ContractError("padded input: attention_mask must hold 1 at real tokens and 0 at padding, nothing else")
    lengths = mask.sum(1)
    if bool((lengths == 0).any()):
        raise ContractError(f"padded input: row {int((lengths == 0).nonzero()[0])} of attention_mask is all padding")
    position = mask.cumsum(1) - 1
    first, last = mask.int().argmax(1), mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    if bool((last - first + 1 != lengths).any()):
        raise ContractError("padded input: attention_mask has a hole; only left and right padding are supported")
    if position_BS is not None and not torch.equal(position_BS.expand_as(mask)[mask], position[mask]):
        raise ContractError("padded input: position_ids must count up from 0 over each row's real tokens")
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return cu, mask.view(-1).nonzero()[:, 0], position[mask]


def pack(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    temperature: float | Tensor,
    shift_labels: Tensor | None,
) -> PackedRows:
    """Pack the arguments of the trainer's forward (see `apply_contract`).

    `temperature` is a float, or a tensor with one value, one per row, or one per position. Raises `ContractError` for
    masks with holes or of other values than 0 and 1, position ids that do not count up by one from 0, input without
    tokens, and shapes that do not fit.
    """
    if input_ids.dim() != 2:
        raise ContractError(f"input_ids must be [batch, sequence], got {tuple(input_ids.shape)}")
    batch, length = input_ids.shape
    if input_ids.numel() == 0:
        raise ContractError(f"input_ids {tuple(input_ids.shape)} holds no token; leave such a micro-batch out")
    if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
        raise ContractError(
            f"position_ids must be [batch, sequence] or [1, sequence] of input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(position_ids.shape)}"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ContractError(
            f"attention_mask {tuple(attention_mask.shape)} must have the shape of input_ids {tuple(input_ids.shape)}"
        )
    labels = torch.roll(input_ids, -1, 1) if shift_labels is None else shift_labels
    if labels.shape != input_ids.shape:
        raise ContractError(
            f"shift_labels {tuple(labels.shape)} must have the shape of input_ids {tuple(input_ids.shape)}"
        )
    device = input_ids.device
    if isinstance(temperature, Tensor) and temperature.numel() == batch and batch > 1:
        temperature = temperature.reshape(batch, 1).expand(batch, length)
    temperature_T = as_temperature(temperature, batch * length, device)
    if temperature_T.numel() != batch * length:
        raise ContractError(f"temperature: {temperature_T.numel()} values for input [{batch}, {length}]")
    source = None
    if attention_mask is not None:
        cu, source, position = _mask_lengths(attention_mask, position_ids)
        token, target = input_ids.reshape(-1)[source], labels.reshape(-1)[source]
        temperature_T = temperature_T[source]
    else:
        if position_ids is None or batch > 1:
            cu = torch.arange(0, batch * length + 1, length, device=device)
            position = torch.arange(length, device=device).repeat(batch)
            if position_ids is not None and not torch.equal(position_ids.expand(batch, length).reshape(-1), position):
                raise ContractError("input without attention_mask: position_ids must count up from 0 in every row")
        else:
            position = position_ids.reshape(-1)
            cu = _packed_lengths(position)
        token, target = input_ids.reshape(-1), labels.reshape(-1)
    return PackedRows(
        token_T=pad_dim0(token, ROW_FLOOR),
        position_T=pad_dim0(position, ROW_FLOOR),
        target_T=pad_dim0(target, ROW_FLOOR),
        temperature_T=torch.cat([temperature_T, temperature_T.new_ones(-temperature_T.shape[0] % ROW_FLOOR)]),
        sequences=PackedSequences(cu),
        max_length=int(cu.diff().max()),
        source=source,
        shape=(batch, length),
    )
