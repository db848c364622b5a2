"""What every kernel of this room asks of its operands: bfloat16, the last dimension contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_tim.numerics.contract import ContractError


def require_rows(op: str, **tensors: Tensor | None) -> None:
    """Raise `ContractError` unless each given tensor is bfloat16 with a contiguous last dimension. None is skipped."""
    for name, x in tensors.items():
        if x is None:
            continue
        if x.dtype != torch.bfloat16:
            raise ContractError(f"{op}: {name} is {x.dtype}; the GPU contract covers torch.bfloat16 operands only")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ContractError(
                f"{op}: {name} has stride {x.stride(-1)} in its last dimension; pass a tensor contiguous there"
            )


def require_shape(op: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `ContractError` unless `x` has this shape."""
    if tuple(x.shape) != shape:
        raise ContractError(f"{op}: {name} is {tuple(x.shape)}; it must be {shape}")


def whole_rows(grad: Tensor) -> Tensor:
    """A gradient with its last dimension contiguous: autograd brings any layout, a sum's has strides of 0."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()
