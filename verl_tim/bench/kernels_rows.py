"""Row operations against Hugging Face's modules: norm, qk-norm with RoPE, SwiGLU, embedding gradient. Memory bound.

Peers are the modules' formulas run eagerly and under torch.compile. Each figure is device time (CUDA graph; events for
gradients by autograd); the note holds the bytes that must move over the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl_tim.bench.row import BenchRow
from verl_tim.numerics.gpu import activation, embedding, norm, rope
from verl_tim.numerics.gpu.device_time import event_us, graph_us

_EPS = 1e-6
_COPIES = 3  # of the inputs, so that few rows only are found in the cache


def _randn(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def _hf_norm(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.to(torch.float32)
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def _hf_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _hf_norm(total, weight), total


def _hf_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    def turned(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-x2, x1), dim=-1) * sin

    return turned(_hf_norm(q, q_weight)), turned(_hf_norm(k, k_weight))


def _hf_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _backward_of(function: Callable[..., Any], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Callable:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    return lambda: torch.autograd.grad(out, leaves, grads, retain_graph=True)


class _Table:
    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.rows: list[BenchRow] = []

    def add(
        self, op: str, shape: str, moved: int, ours: list, peers: dict[str, Any], *, autograd: bool = False
    ) -> None:
        """One row per peer: the formula, its compiled form where given; `autograd`: peers are gradients of it."""
        mine = graph_us(ours)
        note = f"{moved / mine / 1e6:.2f} TB/s"
        for name, runs in peers.items():
            # Autograd runs on the stream of the forward, which no graph captures.
            theirs = event_us(runs[0]) if autograd else graph_us(runs, calls=5)
            self.rows.append(BenchRow(op, shape, mine, name, theirs, note))

    def forward(self, op: str, shape: str, moved: int, ours: list, function: Callable, inputs: list) -> None:
        peers = {"eager": [lambda i=i: function(*i) for i in inputs]}
        if not self.quick:
            torch._dynamo.reset()  # it gives up on a function after eight shapes
            compiled = torch.compile(function, dynamic=False)
            peers["torch.compile"] = [lambda i=i: compiled(*i) for i in inputs]
        self.add(op, shape, moved, ours, peers)


def _norms(table: _Table, rows: int, size: int) -> None:
    shape, unit = f"{rows} x {size}", rows * size * 2
    weight = 1 + 0.1 * _randn(size)
    inputs = [(_randn(rows, size), _randn(rows, size), weight) for _ in range(_COPIES)]
    table.forward(
        "rms_norm", shape, 2 * unit, [lambda i=i: norm.rms_norm(i[0], weight, _EPS) for i in inputs], _hf_norm,
        [(x, weight) for x, _, _ in inputs],
    )  # fmt: skip
    table.forward(
        "residual + rms_norm", shape, 4 * unit, [lambda i=i: norm.rms_norm(i[0], weight, _EPS, i[1]) for i in inputs],
        _hf_add_norm, inputs,
    )  # fmt: skip
    if rows >= 4096:
        grad = _randn(rows, size)
        ours = [lambda i=i: norm.rms_norm_backward(grad, i[0], weight, _EPS) for i in inputs]
        peer = [_backward_of(_hf_norm, (x, weight), (grad,)) for x, _, _ in inputs]
        table.add("rms_norm backward", shape, 3 * unit, ours, {"eager": peer}, autograd=True)


def _heads(table: _Table, rows: int, q_heads: int, kv_heads: int, dim: int) -> None:
    shape, unit = f"{rows} x {q_heads}/{kv_heads} x {dim}", rows * dim * 2
    both = (q_heads + kv_heads) * unit
    fused = [_randn(rows, q_heads + 2 * kv_heads, dim) for _ in range(_COPIES)]
    q_weight, k_weight = 1 + 0.1 * _randn(dim), 1 + 0.1 * _randn(dim)
    angle = torch.rand(rows, dim // 2, device="cuda") * 100
    cos, sin = angle.cos(), angle.sin()
    hf_table = [torch.cat([t, t], dim=-1)[:, None].to(torch.bfloat16) for t in (cos, sin)]
    views = [f.split([q_heads, kv_heads, kv_heads], dim=1) for f in fused]
    inputs = [(q, k, q_weight, k_weight, *hf_table) for q, k, _ in views]
    table.forward(
        "qk-norm + rope", shape, 2 * both,
        [lambda i=i: rope.qk_norm_rope(i[0], i[1], q_weight, k_weight, _EPS, cos, sin) for i in inputs],
        _hf_qk_norm_rope, inputs,
    )  # fmt: skip
    pages = torch.zeros(2, rows // 16 + 1, 16, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    slot = torch.arange(rows, device="cuda")
    write = (pages[0], pages[1], slot)

    def hf_write(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = _hf_qk_norm_rope(q, k, q_weight, k_weight, *hf_table)
        pages[0].flatten(0, 1).index_copy_(0, slot, k)
        pages[1].flatten(0, 1).index_copy_(0, slot, v)
        return q

    ours = [
        lambda i=i: rope.qk_norm_rope(
            i[0], i[1], q_weight, k_weight, _EPS, cos, sin, v_THD=i[2], kv_write=write, keep_k=False
        )
        for i in views
    ]
    peer = [lambda i=i: hf_write(*i) for i in views]
    table.add("qk-norm + rope + kv write", shape, 2 * both + 2 * kv_heads * unit, ours, {"eager": peer})
    if rows >= 4096:
        grads = _randn(rows, q_heads, dim), _randn(rows, kv_heads, dim)
        back = [
            lambda i=i: rope.qk_norm_rope_backward(*grads, i[0], i[1], q_weight, k_weight, _EPS, cos, sin)
            for i in inputs
        ]

        def function(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
            return _hf_qk_norm_rope(q, k, q_weight, k_weight, *hf_table)

        peer = [_backward_of(function, (q, k, q_weight, k_weight), grads) for q, k, _ in views]
        table.add("qk-norm + rope backward", shape, 3 * both, back, {"eager": peer}, autograd=True)


def _swiglu(table: _Table, rows: int, inner: int) -> None:
    shape, unit = f"{rows} x {inner}", rows * inner * 2
    halves = [_randn(rows, 2 * inner).chunk(2, dim=1) for _ in range(_COPIES)]
    table.forward(
        "swiglu", shape, 3 * unit, [lambda i=i: activation.swiglu(*i) for i in halves], _hf_swiglu, list(halves)
    )
    if rows >= 4096:
        grad = _randn(rows, inner)
        ours = [lambda i=i: activation.swiglu_backward(grad, *i) for i in halves]
        peer = [_backward_of(_hf_swiglu, i, (grad,)) for i in halves]
        table.add("swiglu backward", shape, 5 * unit, ours, {"eager": peer}, autograd=True)


def _embedding(table: _Table, rows: int, vocab: int, size: int) -> None:
    token, grad = torch.randint(0, vocab, (rows,), device="cuda"), _randn(rows, size)
    token[::4] = 7
    ours = [lambda: embedding.embedding_backward(grad, token, vocab)]
    peer = [lambda: torch.ops.aten.embedding_dense_backward(grad, token, vocab, -1, False)]
    table.add("embedding backward", f"{rows} of {vocab} x {size}", vocab * size * 2, ours, {"torch": peer})


def run(quick: bool) -> list[BenchRow]:
    """All rows; `quick` leaves out torch.compile and most sizes. Needs an NVIDIA GPU."""
    table = _Table(quick)
    for rows in (16, 16_384) if quick else (16, 256, 16_384):
        for size in (2048,) if quick else (1024, 2048, 4096, 5120):
            _norms(table, rows, size)
        for heads in ((16, 8, 128),) if quick else ((16, 8, 128), (32, 4, 128), (14, 2, 64)):
            _heads(table, rows, *heads)
        for inner in (6144,) if quick else (6144, 12_288):
            _swiglu(table, rows, inner)
    _embedding(table, 16_384, 151_936, 2048)
    return table.rows
