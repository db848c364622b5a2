"""A cuBLASLt that computes on a CPU, with algorithms that a test plants: what `cublaslt.py` asks of the library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Order = Callable[[Tensor], Tensor]  # float32 terms [T, N, K] -> their sum [T, N]


def ascending(terms_TNK: Tensor) -> Tensor:
    """The contract's order."""
    total = torch.zeros(terms_TNK.shape[:2])
    for k in range(terms_TNK.shape[2]):
        total = total + terms_TNK[..., k]
    return total


def halves(terms_TNK: Tensor) -> Tensor:
    """Two parts of K, added at the end."""
    half = terms_TNK.shape[2] // 2
    return ascending(terms_TNK[..., :half]) + ascending(terms_TNK[..., half:])


@dataclass(frozen=True)
class Algorithm:
    """split: what it says of itself; workspace: bytes that it wants, as offered and when asked for a trial."""

    order: Order
    split: int = 1
    workspace: int = 0
    workspace_of_trials: int = 0


_DTYPES = {0: (torch.float32, ctypes.c_float), 14: (torch.bfloat16, ctypes.c_int16)}


@dataclass
class FakeCublasLt:
    """offered: algorithms by name, in the order of the heuristic's favour.

    objects: what was made and not yet destroyed, by address; ran: (algorithm, rows, outputs, inputs) of every product.
    """

    offered: dict[str, Algorithm]
    objects: dict[int, list] = field(default_factory=dict)
    ran: list[tuple[str, int, int, int]] = field(default_factory=list)
    asked: int = 0
    _next: int = 1000

    def _make(self, made, *content) -> int:
        self._next += 1
        self.objects[self._next] = [c.value for c in content]
        made._obj.value = self._next
        return 0

    cublasLtMatmulDescCreate = cublasLtMatrixLayoutCreate = cublasLtMatmulPreferenceCreate = _make

    def _destroy(self, address) -> int:
        del self.objects[address.value]
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = _destroy

    def cublasLtMatmulDescSetAttribute(self, target, attribute, value, size) -> int:
        self.objects[target.value].append((attribute.value, value._obj.value))
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, target, attribute, value, size) -> int:
        assert target.value in self.objects
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, desc, a, b, c, d, preference, count, results, found) -> int:
        assert all(x.value in self.objects for x in (desc, a, b, c, d, preference))
        self.asked += 1
        for result, index in zip(results, range(len(self.offered)), strict=False):
            result.algo[0], result.state, result.workspace = index + 1, 0, self._named(index + 1)[1].workspace
        found._obj.value = min(len(self.offered), count.value)
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algo, attribute, value, size, written) -> int:
        value._obj.value = self._named(algo[0])[1].split
        return 0

    def cublasLtMatmulAlgoCheck(self, handle, desc, a, b, c, d, algo, result) -> int:
        result._obj.workspace = self._named(algo[0])[1].workspace_of_trials
        return 0

    def _named(self, number: int) -> tuple[str, Algorithm]:
        return list(self.offered.items())[number - 1]

    def _matrix(self, layout: int, address: int) -> Tensor:
        """[columns, rows] of the library's column-major words, which is how torch sees the tensor."""
        kind, rows, columns, stride = self.objects[layout]
        dtype, word = _DTYPES[kind]
        flat = torch.frombuffer((word * ((columns - 1) * stride + rows)).from_address(address), dtype=dtype)
        return flat.as_strided((columns, rows), (stride, 1))

    def cublasLtMatmul(self, handle, desc, one, w_at, a, x_at, b, zero, c_at, c, d_at, d, algo_at, *_) -> int:
        name, algorithm = self._named(ctypes.c_uint64.from_address(algo_at).value)
        weight, x, out = self._matrix(a, w_at), self._matrix(b, x_at), self._matrix(d, d_at)
        self.ran.append((name, len(x), len(weight), x.shape[1]))
        y = algorithm.order(x.float()[:, None] * weight.float()[None])
        settings = dict(pair for pair in self.objects[desc] if isinstance(pair, tuple))
        if 8 in settings:  # the bias, of the dtype of out
            word = ctypes.c_int16 if out.dtype == torch.bfloat16 else ctypes.c_float
            y = y + torch.frombuffer((word * len(weight)).from_address(settings[8]), dtype=out.dtype).float()
        out.copy_(y.to(out.dtype))
        return 0
