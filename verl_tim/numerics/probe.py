"""Does this device, in this process, keep the contract? A few hundred comparisons of fp32 bit patterns at start-up.

Vendor libraries promise nothing about rounding, and what holds on one chip, instruction set or thread count may not
hold on the next. So every schedule in use is compared with its own row-alone run, at the model's shapes, odd row
counts and this process's thread count against one thread, and products also with those of `ROW_FLOOR` rows at one
thread; so two processes of one machine that pass agree, whatever their thread counts, and whether or not
`linear.use_row_blocks` is on in them. The first differing bit raises `ContractError` with the operation, its shape, the
rows and the schedule.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_tim.numerics.activation import swiglu_inference
from verl_tim.numerics.attention import (
    ATTENTION_CONTRACTS,
    attention_reference,
    paged_attention,
    varlen_attention,
)
from verl_tim.numerics.contract import (
    COLUMN_FLOOR,
    KEY_BLOCK,
    ROW_FLOOR,
    VOCAB_TILE,
    ContractError,
    ceil_to,
    check_process,
    contract_id,
    exact_region,
    kernels,
    operand,
    pad_dim0,
)
from verl_tim.numerics.grouped_linear import Dispatch, dispatch, grouped_matmul
from verl_tim.numerics.head import head_logits, log_probs_of, tile_parts, token_log_probs
from verl_tim.numerics.linear import matmul_rows, row_blocks, use_row_blocks
from verl_tim.numerics.moe import moe_inference, route_logits
from verl_tim.numerics.norm import rms_norm_inference
from verl_tim.numerics.paging import PagedBatch
from verl_tim.numerics.rope import RopeTable, apply_rope
from verl_tim.numerics.sampling import SamplingTensors, gumbel_noise, sample
from verl_tim.numerics.shards import Shards, VocabularyPart

logger = logging.getLogger(__name__)

_dropped: list[str] = []

_ROWS = 136
_ROW_COUNTS = (1, 2, 3, 5, 8, 9, 24, 40, 67, 130)
_FEW_ROWS = f"against products of {ROW_FLOOR} rows at one thread"
_LARGE_WEIGHT = 1 << 22  # elements; larger weights are probed at fewer row counts, to keep start-up short


@dataclass(frozen=True)
class ProbeShapes:
    """What a model uses. linears: (fused output sizes, inputs) of each distinct linear; moe: (experts, top_k, inner
    size) or None; widths: last dimensions that RMSNorm reduces over; ranks: that share the outputs of every linear;
    biased: those of the linears that carry a bias (on a GPU, where that is part of a schedule); page_size: tokens per
    KV page (on a GPU)."""

    linears: tuple[tuple[tuple[int, ...], int], ...]
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    widths: tuple[int, ...]
    intermediate_size: int
    moe: tuple[int, int, int] | None = None
    ranks: int = 1
    biased: tuple[tuple[tuple[int, ...], int], ...] = ()
    page_size: int = 64


@dataclass
class ProbeReport:
    """contract: the contract id that held; threads: thread counts tried; comparisons: op -> how many; seconds: run
    time; row_blocks: whether the machine needs `linear.use_row_blocks`, which is then on; forbidden: schedules of a GPU
    that were found not to hold and are not used in this process; kernels, compile_seconds: how many a GPU's schedules
    need, and how long they took to compile or to read from Triton's cache, part of `seconds`; check_seconds: of a GPU,
    what the comparisons took by group, part of them, too."""

    contract: str
    threads: tuple[int, ...]
    comparisons: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    row_blocks: bool = False
    forbidden: list[str] = field(default_factory=list)
    kernels: int = 0
    compile_seconds: float = 0.0
    check_seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Probe:
    def __init__(self, device: torch.device, dtype: torch.dtype, shapes: ProbeShapes, report: ProbeReport) -> None:
        self.device, self.dtype, self.shapes, self.report = device, dtype, shapes, report
        self.generator = torch.Generator(device="cpu").manual_seed(0)

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(self.device, self.dtype)

    def expect(self, op: str, got: Tensor, want: Tensor, where: str) -> None:
        self.report.comparisons[op] = self.report.comparisons.get(op, 0) + 1
        if not torch.isfinite(want).all() and not op.startswith("head"):
            raise ContractError(f"probe: {op} gives non-finite values ({where}) on {self.device}")
        differ = bits_of(got) != bits_of(want)
        if bool(differ.any()):
            schedule = f"products of {ROW_FLOOR} rows each" if row_blocks() else "one product for all rows"
            raise ContractError(
                f"probe: {op} is not exact on this {self.device.type}: {int(differ.sum())} of {differ.numel()} values "
                f"differ ({where}; {schedule}, {torch.get_num_threads()} threads). Zero mismatch is impossible with "
                "this build of torch on this machine; use rollout=stock trainer=stock, another torch build, or report "
                "the machine"
            )

    def rowwise(self, op: str, run: Callable[[Tensor], Tensor], x: Tensor, counts: tuple[int, ...]) -> None:
        """`run` on all rows, on the first n, and on rows from an odd offset must give the same bits."""
        with _threads(1):
            want = run(x)
        for threads in self.report.threads:
            with _threads(threads):
                self.expect(op, run(x), want, f"{x.shape[0]} rows")
                for n in counts if threads == 1 else (counts[0], counts[-1]):
                    offset = (n * 7) % (x.shape[0] - n) if n < x.shape[0] else 0
                    part = slice(offset, offset + n)
                    self.expect(op, run(x[part]), want[part], f"rows {offset}..{offset + n - 1} alone")

    def linears(self) -> None:
        for parts, inputs in self.shapes.linears:
            outputs = sum(parts)
            weight = torch.zeros(ceil_to(outputs, COLUMN_FLOOR), inputs, device=self.device)
            weight[:outputs] = self.random(outputs, inputs).to(torch.float32)
            large = weight.numel() > _LARGE_WEIGHT
            counts = (1, 9) if large else _ROW_COUNTS
            x = self.random(24 if large else _ROWS, inputs).to(torch.float32)
            name = f"linear({outputs}, {inputs})"
            self.rowwise(name, functools.partial(matmul_rows, weight_PK=weight), x, counts)
            want, start = matmul_rows(x, weight), 0
            self.expect(name, want, products_of_few_rows(x, weight), _FEW_ROWS)
            for part in parts if len(parts) > 1 else ():
                alone = torch.zeros(ceil_to(part, COLUMN_FLOOR), inputs, device=self.device)
                alone[:part] = weight[start : start + part]
                self.expect(name, matmul_rows(x, alone)[:, :part], want[:, start : start + part], "fused against alone")
                start += part
            self.shards_of_linear(name, parts, x, weight, want)

    def shards_of_linear(self, name: str, parts: tuple[int, ...], x: Tensor, weight: Tensor, want: Tensor) -> None:
        """A rank's rows of every part, fused as it holds them, against the same columns of the whole."""
        for rank in self.split_ranks:
            start, rows = 0, []
            for part in parts:
                share = part // self.shapes.ranks
                rows.append(torch.arange(start + rank * share, start + (rank + 1) * share, device=self.device))
                start += part
            columns = torch.cat(rows)
            own = torch.zeros(ceil_to(len(columns), COLUMN_FLOOR), weight.shape[1], device=self.device)
            own[: len(columns)] = weight[columns]
            for threads in self.report.threads:
                with _threads(threads):
                    for count in (x.shape[0], 9, 1):
                        got = matmul_rows(x[:count], own)[:, : len(columns)]
                        where = f"rank {rank} of {self.shapes.ranks}, {count} rows"
                        self.expect(name, got, want[:count, columns], where)

    @property
    def split_ranks(self) -> tuple[int, ...]:
        """Whose shares are compared: the first and the last, which may be the odd ones."""
        return () if self.shapes.ranks == 1 else (0, self.shapes.ranks - 1)

    @property
    def heads(self) -> str:
        s = self.shapes
        return f"{s.num_heads}/{s.num_kv_heads} heads of {s.head_dim}"

    def elementwise(self) -> None:
        for width in self.shapes.widths:
            weight = self.random(width)
            run = functools.partial(rms_norm_inference, weight_D=weight, eps=1e-6)
            self.rowwise(f"rms_norm({width})", run, self.random(_ROWS, width), (1, 3))
        for width in {self.shapes.intermediate_size, 37}:
            both = self.random(_ROWS, 2 * width)
            self.rowwise(f"swiglu({width})", swiglu_of_halves, both, (1, 2, 3, 9))
        half = self.shapes.head_dim // 2
        table = RopeTable([10000.0 ** (-i / half) for i in range(half)], 1.0, 4096, self.device)
        q = self.random(_ROWS, self.shapes.num_heads, self.shapes.head_dim)
        position = torch.arange(_ROWS, device=self.device) * 17
        want = apply_rope(q, *table.at(position, 4096))
        for row in (0, 1, 2, 77, _ROWS - 1):
            cos, sin = table.at(position[row : row + 1], 4096)
            self.expect(
                f"rope({self.heads})", apply_rope(q[row : row + 1], cos, sin), want[row : row + 1], f"row {row} alone"
            )

    def attention(self) -> None:
        s, op = self.shapes, f"attention({ATTENTION_CONTRACTS[0]}, {self.heads})"
        lengths = [1, 7, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 3 * KEY_BLOCK + 5]
        cu = torch.tensor([0, *lengths], device=self.device).cumsum(0)
        rows, last = int(cu[-1]), cu[1:] - 1
        q, k, v = (self.random(rows, h, s.head_dim) for h in (s.num_heads, s.num_kv_heads, s.num_kv_heads))
        with _threads(1):
            want = varlen_attention(q, k, v, cu)
        for row in (0, 7, rows - 1):
            start = int(cu[torch.searchsorted(cu, row, right=True) - 1])
            keys = slice(start, row + 1)
            self.expect(op, attention_reference(q[row], k[keys], v[keys]), want[row], "against the reference")
        for threads in self.report.threads:
            with _threads(threads):
                self.expect(op, varlen_attention(q, k, v, cu), want, "packed")
                for page_size in (1, 16):
                    out = paged_attention(q[last], *_pages(k, v, lengths, page_size))
                    self.expect(op, out, want[last], f"decode, pages of {page_size}")
                for rank in self.split_ranks:
                    heads, kv_heads = s.num_heads // s.ranks, s.num_kv_heads // s.ranks
                    own, own_kv = (slice(rank * n, (rank + 1) * n) for n in (heads, kv_heads))
                    pages = _pages(k[:, own_kv], v[:, own_kv], lengths, 16)
                    out = paged_attention(q[last][:, own].contiguous(), *pages)
                    self.expect(op, out, want[last][:, own], f"heads of rank {rank} of {s.ranks}")

    @property
    def head_op(self) -> str:
        return f"head({self.shapes.vocab_size}, {self.shapes.hidden_size})"

    def head(self) -> None:
        s = self.shapes
        op, sampling = self.head_op, f"sampling({s.vocab_size})"
        rows = 24 if s.vocab_size * s.hidden_size > _LARGE_WEIGHT else 72
        hidden, weight = self.random(rows, s.hidden_size), self.random(s.vocab_size, s.hidden_size)
        token = torch.randint(0, s.vocab_size, (rows,), generator=self.generator).to(self.device)
        temperature = torch.full((rows,), 0.7, device=self.device)
        with _threads(1):
            logits = head_logits(hidden, weight)
            want, _ = log_probs_of(logits, token, temperature)
        few = products_of_few_rows(operand(hidden), operand(pad_dim0(weight, COLUMN_FLOOR)))
        self.expect(op, logits[:, : s.vocab_size], few[:, : s.vocab_size], _FEW_ROWS)
        for threads in self.report.threads:
            with _threads(threads):
                got, _ = token_log_probs(hidden, weight, token, 0.7)
                self.expect(op, got, want, "trainer against sampler")
                logits = head_logits(hidden[5:6], weight)
                got, _ = log_probs_of(logits, token[5:6], temperature[5:6])
                self.expect(op, got, want[5:6], "one row alone")
        self.shards_of_head(hidden, weight)
        logits = head_logits(hidden, weight)
        drawn = sample(logits, _sampling(rows, 0, self.device))
        one = sample(logits[5:6], _sampling(1, 5, self.device))
        self.expect(sampling, one.token_B, drawn.token_B[5:6], "one row alone")
        seed = torch.arange(3, device=self.device)
        noise = gumbel_noise(seed, seed, s.vocab_size)
        for columns in {s.vocab_size, min(s.vocab_size, 37)}:
            got = gumbel_noise(seed[1:2], seed[1:2], columns)
            self.expect(sampling, got, noise[1:2, :columns], f"noise of one row, {columns} columns")

    def shards_of_head(self, hidden: Tensor, weight: Tensor) -> None:
        """The tiles of a rank's part of the vocabulary against the same tiles of the whole."""
        vocab = weight.shape[0]
        want = torch.stack(tile_parts(head_logits(hidden, weight)), -1)
        for rank in self.split_ranks:
            part = VocabularyPart(Shards(rank, self.shapes.ranks), vocab, VOCAB_TILE)
            if not part.width:
                continue
            first = part.first // VOCAB_TILE
            for threads in self.report.threads:
                with _threads(threads):
                    got = torch.stack(tile_parts(head_logits(hidden, weight[part.rows])), -1)
                    where = f"tiles of rank {rank} of {self.shapes.ranks}"
                    self.expect(self.head_op, got, want[:, first : first + got.shape[1]], where)

    def shards_of_moe(self, gate_up: Tensor, down: Tensor, rows: Tensor, plan: Dispatch) -> None:
        """A rank's rows of every expert against the same columns of the whole."""
        assert self.shapes.moe is not None
        inner, hidden = self.shapes.moe[2], self.shapes.hidden_size
        h = self.random(plan.num_rows, inner).to(torch.float32)
        for rank in self.split_ranks:
            n, d = inner // self.shapes.ranks, hidden // self.shapes.ranks
            gate = torch.arange(rank * n, (rank + 1) * n, device=self.device)
            for op, x, weight, columns in (
                ("gate and up", rows, gate_up, torch.cat([gate, gate + inner])),
                ("down", h, down, torch.arange(rank * d, (rank + 1) * d, device=self.device)),
            ):
                own = torch.zeros(
                    weight.shape[0], ceil_to(len(columns), COLUMN_FLOOR), weight.shape[2], device=self.device
                )
                own[:, : len(columns)] = weight[:, columns]
                want = grouped_matmul(x, weight, plan)[:, columns]
                for threads in self.report.threads:
                    with _threads(threads):
                        got = grouped_matmul(x, own, plan)[:, : len(columns)]
                        self.expect(
                            f"grouped_linear({self.experts})", got, want, f"{op} of rank {rank} of {self.shapes.ranks}"
                        )

    @property
    def experts(self) -> str:
        assert self.shapes.moe is not None
        experts, top_k, inner = self.shapes.moe
        return f"{experts} of {inner} x {self.shapes.hidden_size}, top {top_k}"

    def moe(self) -> None:
        if self.shapes.moe is None:
            return
        experts, top_k, inner = self.shapes.moe
        hidden = self.shapes.hidden_size
        large = experts * hidden * inner > 4 * _LARGE_WEIGHT
        router = torch.zeros(ceil_to(experts, COLUMN_FLOOR), hidden, device=self.device)
        router[:experts] = self.random(experts, hidden).to(torch.float32)
        gate_up = torch.zeros(experts, ceil_to(2 * inner, COLUMN_FLOOR), hidden, device=self.device)
        gate_up[:, : 2 * inner] = self.random(experts, 2 * inner, hidden).to(torch.float32)
        down = torch.zeros(experts, ceil_to(hidden, COLUMN_FLOOR), inner, device=self.device)
        down[:, :hidden] = self.random(experts, hidden, inner).to(torch.float32)
        x = self.random(40 if large else _ROWS, hidden)

        def run(rows: Tensor) -> Tensor:
            return moe_inference(rows, router, experts, gate_up, down, inner, top_k, True)

        self.rowwise(f"moe({self.experts})", run, x, (1,) if large else (1, 3, 9, 40))
        logits = matmul_rows(x.to(torch.float32), router)
        self.expect(f"moe({self.experts})", logits, products_of_few_rows(x.to(torch.float32), router), _FEW_ROWS)
        plan = dispatch(route_logits(logits[:, :experts], top_k, True).expert_TK, experts)
        equal = ceil_to(max(b - a for a, b in zip(plan.starts, plan.starts[1:], strict=False)), 8)
        batched = Dispatch(plan.row_TK, [equal * e for e in range(experts + 1)], equal, equal * experts)
        single = Dispatch(plan.row_TK, batched.starts, None, batched.num_rows)
        rows = self.random(batched.num_rows, hidden).to(torch.float32)
        for threads in self.report.threads:
            with _threads(threads):
                got, want = grouped_matmul(rows, gate_up, batched), grouped_matmul(rows, gate_up, single)
                self.expect(f"grouped_linear({self.experts})", got, want, "batched against one expert at a time")
        inputs = self.random(batched.num_rows, inner).to(torch.float32)
        for part, weight in ((rows, gate_up), (inputs, down)):
            few = torch.cat(
                [products_of_few_rows(*of_expert) for of_expert in zip(part.split(equal), weight, strict=True)]
            )
            self.expect(f"grouped_linear({self.experts})", grouped_matmul(part, weight, batched), few, _FEW_ROWS)
        if self.shapes.ranks > 1:
            for kind in (batched, single):
                self.shards_of_moe(gate_up, down, rows, kind)


def products_of_few_rows(x_TK: Tensor, weight_PK: Tensor) -> Tensor:
    """float32 x W^T [T, P], each `ROW_FLOOR` rows in a product of their own, at one thread. T and P already padded.

    What a row's bits are in a process of either schedule (`linear.use_row_blocks`).
    """
    with _threads(1):
        return torch.cat([torch.mm(rows_8K, weight_PK.t()) for rows_8K in x_TK.split(ROW_FLOOR)])


def swiglu_of_halves(x: Tensor) -> Tensor:
    """SwiGLU of a [T, 2 I] tensor: gate in the first half, up in the second."""
    gate, up = x.chunk(2, dim=-1)
    return swiglu_inference(gate, up)


def bits_of(x: Tensor) -> Tensor:
    """The bit patterns, as integers of the same size."""
    x = x.contiguous()
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _sampling(rows: int, first_seed: int, device: torch.device) -> SamplingTensors:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    seeds = torch.arange(first_seed, first_seed + rows, device=device)
    return SamplingTensors(
        full(0.9, torch.float32), full(-1, torch.int64), full(1.0, torch.float32), full(0.0, torch.float32), seeds,
        full(11, torch.int64),
    )  # fmt: skip


def _pages(k: Tensor, v: Tensor, lengths: list[int], page_size: int) -> tuple[Tensor, Tensor, PagedBatch]:
    """Packed keys and values laid out in pages, and the decode batch of every sequence's last row."""
    device = k.device
    table = torch.zeros(len(lengths), -(-max(lengths) // page_size), dtype=torch.int64)
    slots, used = [], 1
    for index, length in enumerate(lengths):
        count = -(-length // page_size)
        table[index, :count] = torch.arange(used, used + count).flip(0)
        used += count
        position = torch.arange(length)
        slots.append(table[index, position // page_size] * page_size + position % page_size)
    slot = torch.cat(slots).to(device)
    pages = []
    for rows in (k, v):
        page = torch.zeros(used, page_size, *rows.shape[1:], dtype=rows.dtype, device=device)
        page.view(-1, *rows.shape[1:])[slot] = rows
        pages.append(page)
    length_S = torch.tensor(lengths, device=device)
    batch = PagedBatch(
        torch.arange(len(lengths) + 1, device=device), length_S, table.to(device), slot[: len(lengths)], length_S - 1
    )
    return pages[0], pages[1], batch


@torch.no_grad()
def probe(
    device: torch.device | str,
    dtype: torch.dtype,
    shapes: ProbeShapes,
    *,
    threads: tuple[int, ...] | None = None,
    attention: str = ATTENTION_CONTRACTS[0],
) -> ProbeReport:
    """Check every contract schedule on this device in this process, at the model's shapes.

    `threads`: thread counts to try beside one; by default that of this process. `attention`: the attention contract in
    use (`resolve_attention`). Returns a `ProbeReport`. Raises
    `ContractError` naming the operation, its shape, the rows, the schedule and the thread count of the first
    difference. Where one GEMM over all rows is not exact, it switches this process to `linear.use_row_blocks`, with a
    warning, and checks that; where that fails, too, it switches back and raises the second difference from the first.
    Nothing else changes: the thread count is restored and no global random state is touched.
    `dropped_schedules` says what this process does without since.
    """
    begin = time.perf_counter()
    device = torch.device(device)
    check_process(device)
    if device.type == "cuda":
        return _probe_gpu(device, dtype, shapes, attention)
    try:
        report = _run(device, dtype, shapes, threads)
    except ContractError as first:
        if device.type != "cpu" or row_blocks():
            raise
        # This machine's GEMM depends on the number of rows: take the schedule in which that number never changes.
        use_row_blocks(True)
        try:
            report = _run(device, dtype, shapes, threads)
        except ContractError as second:
            use_row_blocks(False)
            raise second from first  # the second is what no schedule mends
        logger.warning("%s: products of %d rows each take the place of one for all rows", first, ROW_FLOOR)
        _dropped.append("linear: one product for all rows")
    report.seconds = time.perf_counter() - begin
    return report


@functools.cache
def _probe_gpu(device: torch.device, dtype: torch.dtype, shapes: ProbeShapes, attention: str) -> ProbeReport:
    """Once per process: nothing that decides a GPU's schedules changes while it runs."""
    begin = time.perf_counter()
    report = ProbeReport(contract_id(device, dtype, attention), ())
    with exact_region(device.type):
        kernels("probe").run(device, shapes, attention, report)
    torch.cuda.synchronize(device)
    report.seconds = time.perf_counter() - begin
    _dropped.extend(report.forbidden)
    return report


def dropped_schedules() -> list[str]:
    """What this process's probes found not to hold and other schedules replace, as "operation(shape): schedule"."""
    return list(_dropped)


def _run(device: torch.device, dtype: torch.dtype, shapes: ProbeShapes, threads: tuple[int, ...] | None) -> ProbeReport:
    counts = (torch.get_num_threads(),) if threads is None else threads
    report = ProbeReport(contract_id(device, dtype), tuple(sorted({1, *counts})), row_blocks=row_blocks())
    checks = _Probe(device, dtype, shapes, report)
    with exact_region(device.type):
        checks.linears()
        checks.elementwise()
        checks.attention()
        checks.moe()
        checks.head()
    return report
