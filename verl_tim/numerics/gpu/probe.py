"""Does this GPU keep the contract at a model's shapes? Every schedule in use against the reference order.

Rows are run in company, alone and in other row counts, so that every schedule takes part that `gemm`, `grouped_gemm`,
attention and the head choose. Each operation with several schedules has a reference among them, the plainest:
linears and experts one Triton kernel with one pass over K (`gemm.REFERENCE`), attention in chunk64 the Triton prefill
of packed rows (`attention.REFERENCE`), the head products in slabs (`head.SLABS`). A schedule that differs is dropped
for this process (`forbid`), as the report and a log line say, and what takes its place is compared, too. What has no
other schedule raises.

A message names the operation with its shape, and the schedule and the rows in brackets.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_tim.numerics.activation import swiglu_inference
from verl_tim.numerics.attention import ATTENTION_CONTRACTS, PackedSequences, paged_attention, varlen_attention
from verl_tim.numerics.contract import CHUNK_KEYS, KEY_BLOCK, ContractError, kernels
from verl_tim.numerics.gpu.cancelling import cancelling
from verl_tim.numerics.gpu.rehearsal import META, rehearse
from verl_tim.numerics.head import token_log_probs
from verl_tim.numerics.moe import moe_inference
from verl_tim.numerics.norm import add_rms_norm_inference, rms_norm_inference
from verl_tim.numerics.paging import PagedBatch
from verl_tim.numerics.probe import bits_of, swiglu_of_halves
from verl_tim.numerics.rope import RopeTable, qk_norm_rope, qk_norm_rope_write
from verl_tim.numerics.sampling import Sampled, SamplingTensors, draw
from verl_tim.numerics.shards import Shards
from verl_tim.numerics.split_head import split_draw, vocabulary_part

if TYPE_CHECKING:
    from verl_tim.numerics.probe import ProbeReport, ProbeShapes

logger = logging.getLogger(__name__)

ROW_COUNTS = (1, 7, 8, 9, 16, 33, 64, 65, 128, 129, 255, 256, 257, 512, 1024)
EXPERT_ROW_COUNTS = (1, 8, 33, 64, 128, 256, 512)
_ROWS = 1032
_EPS = 1e-6


class GpuProbe:
    """The checks of one device at one model's shapes; each adds to the report or raises `ContractError`."""

    def __init__(self, device: torch.device, shapes: ProbeShapes, attention: str, report: ProbeReport) -> None:
        self.device, self.shapes, self.attention_contract, self.report = device, shapes, attention, report

    @functools.cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)

    def run(self) -> None:
        for check in (self.linears, self.row_ops, self.attention, self.experts, self.head, self.cuts):
            began = time.perf_counter()
            check()  # the device is done when it returns: every comparison is read
            self.report.check_seconds[check.__name__] = time.perf_counter() - began

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator, device=self.device, dtype=torch.float32).bfloat16()

    def expect(self, op: str, got: Tensor, want: Tensor, where: str) -> None:
        self.report.comparisons[op] = self.report.comparisons.get(op, 0) + 1
        if not bool(torch.isfinite(want).all()):
            raise ContractError(f"probe: {op} gives non-finite values ({where}) on {self.device}")
        count = _differing(got, want)
        if count:
            name = torch.cuda.get_device_name(self.device)
            another = "" if self.is_chunk64 else "attention=chunk64 on both sides (verl-tim verify --ops tries it), "
            raise ContractError(
                f"probe: {op} is not exact on this {name}: {count} of {want.numel()} values differ ({where}). Zero "
                "mismatch is impossible with this build on this device, and no other schedule is left for these rows; "
                f"use {another}rollout=stock trainer=stock, or report the device"
            )

    def keep_or_forbid(
        self, op: str, schedule: str, got: Tensor, want: Tensor, where: str, forbid: Callable[[str], None]
    ) -> None:
        """As `expect`, for a schedule that others can stand in for: one that differs is dropped for this process."""
        if count := _differing(got, want):
            logger.warning(
                "probe: schedule %s of %s differs (%s) in %d of %d values: dropped, another takes its place",
                schedule, op, where, count, want.numel(),
            )  # fmt: skip
            forbid(schedule)
            self.report.forbidden.append(f"{op}: {schedule}")
        else:
            self.expect(op, got, want, where)

    def until_nothing_is_dropped(self, check: Callable[[], None]) -> None:
        """Repeat a check that dropped a schedule: what stands in for it is compared, too."""
        dropped = -1
        while dropped != len(self.report.forbidden):
            dropped = len(self.report.forbidden)
            check()

    # -- linear ----------------------------------------------------------------------------------------------------

    def linears(self) -> None:
        self.until_nothing_is_dropped(self.linears_once)

    def linears_once(self) -> None:
        gemm = kernels("gemm")
        for parts, inputs, out_dtype in _linears(self.shapes):
            outputs = sum(parts)
            x, weight = cancelling(_ROWS, outputs, inputs, self.device)
            op = f"linear({outputs}, {inputs})"
            want = torch.empty(_ROWS, outputs, dtype=out_dtype, device=self.device)
            gemm.REFERENCE.run(x, weight, None, want)
            self.schedules_of_linear(op, x, weight, None, want)
            if (parts, inputs) in self.shapes.biased:
                self.bias_of_linear(op, outputs, inputs)
            if len(parts) == 2 and parts[0] == parts[1]:
                self.gate_up(x, weight, want)
            start = 0
            for part in parts if len(parts) > 1 else ():
                rows = slice(start, start + part)
                self.schedules_of_linear(op, x, weight[rows], None, want[:, rows], f", {part} of the outputs alone")
                start += part
            if self.shapes.ranks > 1:
                self.shards_of_linear(op, parts, x, weight, want)

    def schedules_of_linear(
        self, op: str, x: Tensor, weight: Tensor, bias: Tensor | None, want: Tensor, what: str = ""
    ) -> None:
        """What each number of rows takes against `want`, the reference's rows. `what`: said of them."""
        gemm, (outputs, inputs) = kernels("gemm"), weight.shape
        for rows in ROW_COUNTS:
            for schedule in gemm.in_use(rows, outputs, inputs, self.device):
                got = torch.full((rows, outputs), torch.nan, dtype=want.dtype, device=self.device)
                if not schedule.serves(x[:rows], weight, bias, got):
                    continue
                schedule.run(x[:rows], weight, bias, got)
                where = f"{schedule.name}, {rows} rows{what}"
                if schedule is gemm.REFERENCE:
                    self.expect(op, got, want[:rows], where)
                else:
                    self.keep_or_forbid(op, schedule.name, got, want[:rows], where, gemm.forbid)

    def bias_of_linear(self, op: str, outputs: int, inputs: int) -> None:
        """Where the bias is added: sums of its size, or a rounding before it would not show."""
        x, weight = self.random(_ROWS, inputs), self.random(outputs, inputs)
        bias = self.random(outputs) * inputs**0.5
        want = torch.empty(_ROWS, outputs, dtype=x.dtype, device=self.device)
        kernels("gemm").REFERENCE.run(x, weight, bias, want)
        self.schedules_of_linear(op, x, weight, bias, want, ", with a bias")

    def shards_of_linear(self, op: str, parts: tuple[int, ...], x: Tensor, weight: Tensor, want: Tensor) -> None:
        """What the shape of a rank's share takes, the last one's, against the same columns of the whole."""
        ranks, start, rows = self.shapes.ranks, 0, []
        for part in parts:
            share = -(-part // ranks)  # of the head, whose parts are whole tiles, nearly
            rows.append(torch.arange(start + part - share, start + part, device=self.device))
            start += part
        columns = torch.cat(rows)
        self.schedules_of_linear(op, x, weight[columns].contiguous(), None, want[:, columns], f", a share of {ranks}")

    def gate_up(self, x: Tensor, weight: Tensor, product: Tensor) -> None:
        few_rows = kernels("few_rows")
        op, want = f"gate_up({weight.shape[0]}, {weight.shape[1]})", swiglu_of_halves(product)
        for rows in (1, 7, few_rows.SWIGLU_ROWS):
            got = few_rows.swiglu(x[:rows], weight)
            if got is not None:
                where = f"{few_rows.SWIGLU}, {rows} rows"
                self.keep_or_forbid(op, few_rows.SWIGLU, got, want[:rows], where, few_rows.forbid)

    # -- row operations --------------------------------------------------------------------------------------------

    def rowwise(
        self,
        op: str,
        run: Callable[[Tensor], Tensor],
        x: Tensor,
        counts: tuple[int, ...],
        schedule: Callable[[int], str] = lambda rows: "triton",
    ) -> None:
        """`run` on all rows of `x` against `run` on some alone; `schedule` names what takes so many rows."""
        want = run(x)
        for rows in counts:
            offset = (rows * 7) % (x.shape[0] - rows + 1)
            part = slice(offset, offset + rows)
            where = f"{schedule(rows)}, rows {offset}..{offset + rows - 1} alone"
            self.expect(op, run(x[part]), want[part], where)

    def row_ops(self) -> None:
        s = self.shapes
        weight = self.random(s.hidden_size)
        x, residual = self.random(2, 256, s.hidden_size)
        norm, add_norm = f"rms_norm({s.hidden_size})", f"add_rms_norm({s.hidden_size})"
        self.rowwise(norm, lambda rows: rms_norm_inference(rows, weight, _EPS), x, (1, 3, 64))
        normed, total = add_rms_norm_inference(x, residual, weight, _EPS)
        self.expect(add_norm, total, x + residual, "triton, sum, 256 rows")
        want = rms_norm_inference(total, weight, _EPS)
        self.expect(add_norm, normed, want, "triton, against the norm of the sum, 256 rows")
        both, op = self.random(128, 2 * s.intermediate_size), f"swiglu({s.intermediate_size})"
        self.rowwise(op, swiglu_of_halves, both, (1, 3, 64))
        gate, up = both.chunk(2, dim=-1)
        got = swiglu_inference(gate.contiguous(), up.contiguous())
        self.expect(op, got, swiglu_of_halves(both), "triton, two tensors against one, 128 rows")
        self.rope()

    @property
    def heads(self) -> str:
        s = self.shapes
        return f"{s.num_heads}/{s.num_kv_heads} heads of {s.head_dim}"

    def rope(self) -> None:
        s = self.shapes
        rows, half, op = kernels("rope").MANY_TOKENS + 5, s.head_dim // 2, f"qk_norm_rope({self.heads})"
        qkv = self.random(rows, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        norms = self.random(2, s.head_dim)
        table = RopeTable([10000.0 ** (-i / half) for i in range(half)], 1.0, 4096, self.device)
        cos, sin = table.at(torch.arange(rows, device=self.device), 4096)
        q, k, v = (part.contiguous() for part in qkv.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1))
        want_q, want_k = qk_norm_rope(q, k, (norms[0], norms[1]), _EPS, cos, sin)
        repeated = torch.cat([norms[:1].expand(s.num_heads, -1), norms[1:].expand(s.num_kv_heads, -1)])
        for count in (1, 8, 77, rows):
            part = slice(rows - count, rows)
            if count < rows:
                got_q, got_k = qk_norm_rope(q[part], k[part], (norms[0], norms[1]), _EPS, cos[part], sin[part])
                where = f"triton, the last {count} of {rows} rows"
                self.expect(op, got_q, want_q[part], where)
                self.expect(op, got_k, want_k[part], where + ", keys")
            pages = torch.zeros(2, rows + 1, 1, s.num_kv_heads, s.head_dim, dtype=qkv.dtype, device=self.device)
            slots = (_permutation(rows)[:count] + 1).to(self.device)
            got_q = qk_norm_rope_write(
                qkv[part], s.num_heads, repeated, _EPS, cos[part], sin[part], pages[0], pages[1], slots
            )
            where = f"triton, fused against three tensors, {count} rows"
            self.expect(op, got_q, want_q[part], where)
            self.expect(op, pages[0, slots, 0], want_k[part], where + ", keys in pages")
            self.expect(op, pages[1, slots, 0], v[part], where + ", values in pages")

    # -- attention -------------------------------------------------------------------------------------------------

    def packed(self, lengths: list[int]) -> PackedSequences:
        bounds = [0, *accumulate(lengths)]
        return PackedSequences(torch.tensor(bounds, device=self.device), bounds)

    def attention(self) -> None:
        self.until_nothing_is_dropped(self.attention_once)

    @property
    def is_chunk64(self) -> bool:
        return self.attention_contract == ATTENTION_CONTRACTS[0]

    def attention_rows(self, got: Tensor, want: Tensor, q: Tensor, k: Tensor, v: Tensor, kind: str, where: str) -> None:
        """Rows that one schedule took; kind: packed rows, chunks or decodes, the latter two with keys in pages."""
        op, attention = f"attention({self.attention_contract}, {self.heads})", kernels("attention")
        if not self.is_chunk64:
            self.expect(op, got, want, f"{self.attention_contract}, {where}")
            return
        if kind == "decodes":
            schedule = attention.decode_schedule(q, k, v)
        else:
            schedule = attention.prefill_schedule(q, k, v, paged=kind == "chunks")
        if schedule == attention.REFERENCE:
            self.expect(op, got, want, f"{schedule}, {where}")
        else:
            self.keep_or_forbid(op, schedule, got, want, f"{schedule}, {where}", attention.forbid)

    def attention_once(self) -> None:
        s = self.shapes
        borders = (KEY_BLOCK, 128, CHUNK_KEYS, 2 * CHUNK_KEYS)
        lengths = [1, 7, *(border + d for border in borders for d in (-1, 0, 1)), 3 * CHUNK_KEYS + 77]
        packed = self.packed(lengths)
        rows = packed.num_rows
        q, k, v = (self.random(rows, heads, s.head_dim) for heads in (s.num_heads, s.num_kv_heads, s.num_kv_heads))
        want = varlen_attention(q, k, v, packed, self.attention_contract)
        if self.is_chunk64:
            attention = kernels("attention")
            got, cu_seqlens = want, packed.cu_seqlens_int32
            want, _ = attention.varlen_forward(q, k, v, cu_seqlens, plan=packed.gpu_plan, schedule=attention.REFERENCE)
            self.attention_rows(got, want, q, k, v, "packed rows", "packed")
        alone = self.packed(lengths[-1:])
        tail = slice(rows - lengths[-1], rows)
        got = varlen_attention(q[tail], k[tail], v[tail], alone, self.attention_contract)
        self.attention_rows(got, want[tail], q, k, v, "packed rows", "packed alone")
        cache = _Pages(k, v, lengths, s.page_size)
        for queries, what in (([5], "5"), ([130], "130"), ([1], "1"), ([33, 1], "33 and 1 in turn")):
            counts = [min(queries[index % len(queries)], length) for index, length in enumerate(lengths)]
            self.attention_over_pages(q, want, cache, counts, f"last {what} rows, pages of {s.page_size}")
        if self.is_chunk64:
            self.shapes_of_work(q, want, cache)
        if s.ranks > 1:
            self.shards_of_attention(q, k, v, lengths, want)

    def attention_over_pages(self, q: Tensor, want: Tensor, cache: _Pages, counts: list[int], where: str) -> None:
        """The last rows of each sequence, so many; where there is one, it is a decode."""
        rows = [(s, length, n) for s, (length, n) in enumerate(zip(cache.lengths, counts, strict=True))]
        self.rows_over_pages(q, want, cache, rows, where)

    def shapes_of_work(self, q: Tensor, want: Tensor, cache: _Pages) -> None:
        """Decodes in each of the shapes that `DecodePlan` gives a step's work, which are compiled one by one."""
        plans, lengths = kernels("attention_plan"), cache.lengths
        by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        few = max(1, (plans.MANY_PAIRS - 1) // self.shapes.num_kv_heads)
        many = -(-plans.MANY_PAIRS // self.shapes.num_kv_heads)
        short = [i for i in by_length if lengths[i] <= plans.SHORT_CONTEXT]
        # beyond the sequences there are, earlier rows of the same ones
        again = [(by_length[n % len(lengths)], n // len(lengths) * 61) for n in range(many)]
        for name, decodes in (
            ("few and long", [(i, lengths[i], 1) for i in by_length[:few]]),
            ("few and short", [(i, lengths[i], 1) for i in short[:few]]),
            ("many", [(i, lengths[i] - back % lengths[i], 1) for i, back in again]),
        ):
            where = f"{len(decodes)} decodes, {name}, pages of {self.shapes.page_size}"
            self.rows_over_pages(q, want, cache, decodes, where)

    def rows_over_pages(
        self, q: Tensor, want: Tensor, cache: _Pages, rows: list[tuple[int, int, int]], where: str
    ) -> None:
        """(sequence, keys that its last row sees, rows) each; where there is one row, it is a decode."""
        batch, chosen = cache.batch(rows)
        q_rows = q[chosen].contiguous()
        got, want_rows = paged_attention(q_rows, cache.k, cache.v, batch, self.attention_contract), want[chosen]
        count_S = torch.tensor([count for _, _, count in rows])
        count_T = count_S.repeat_interleave(count_S)
        for kind, mask in (("chunks", count_T > 1), ("decodes", count_T == 1)):
            if bool(mask.any()):
                at = mask.nonzero()[:, 0].to(self.device)
                self.attention_rows(got[at], want_rows[at], q_rows, cache.k, cache.v, kind, f"{kind}, {where}")

    def shards_of_attention(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], want: Tensor) -> None:
        """The heads of the last rank alone, in prefill chunks and decodes, against the same heads among all."""
        s = self.shapes
        own, own_kv = (slice(n - n // s.ranks, n) for n in (s.num_heads, s.num_kv_heads))
        cache = _Pages(k[:, own_kv].contiguous(), v[:, own_kv].contiguous(), lengths, s.page_size)
        for queries in (1, 130):
            where = f"last {queries} rows, heads of one of {s.ranks} ranks"
            counts = [min(queries, length) for length in lengths]
            self.attention_over_pages(q[:, own], want[:, own], cache, counts, where)

    # -- experts and head --------------------------------------------------------------------------------------------

    def shards_of_experts(
        self, x: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up: Tensor, down: Tensor, want: Tensor
    ) -> None:
        """Every schedule on a rank's rows of each expert, the first one's, against the same columns of the whole.

        The other ranks' columns of the inner rows come from a run of theirs, as a gather would bring them.
        """
        moe, grouped_gemm, ranks = kernels("moe"), kernels("grouped_gemm"), self.shapes.ranks
        inner, hidden = down.shape[2], down.shape[1]
        share = inner // ranks

        def own(rank: int) -> Tensor:
            gate = torch.arange(rank * share, (rank + 1) * share, device=self.device)
            return gate_up[:, torch.cat([gate, gate + inner])].contiguous()

        own_down = down[:, : hidden // ranks].contiguous()
        for name in grouped_gemm.schedules():
            kept: list[Tensor] = []

            def note(h: Tensor, kept: list[Tensor] = kept) -> Tensor:
                kept.append(h)
                return torch.stack([h] * ranks)

            for rank in range(ranks):
                shards = Shards(rank, ranks, note)
                moe.experts(x, expert_TK, weight_TK, own(rank), own_down, schedule=name, shards=shards)
            every = torch.stack(kept)

            def all_of(h: Tensor, every: Tensor = every) -> Tensor:
                return every

            shards = Shards(0, ranks, all_of)
            got = moe.experts(x, expert_TK, weight_TK, own(0), own_down, schedule=name, shards=shards)
            where = f"{name}, a share of {ranks}"
            self.keep_or_forbid(self.experts_op, name, got, want[:, : hidden // ranks], where, grouped_gemm.forbid)

    @property
    def experts_op(self) -> str:
        assert self.shapes.moe is not None
        experts, top_k, inner = self.shapes.moe
        return f"experts({experts} of {inner} x {self.shapes.hidden_size}, top {top_k})"

    def experts(self) -> None:
        if self.shapes.moe is None:
            return
        experts, top_k, inner = self.shapes.moe
        hidden = self.shapes.hidden_size
        router, x = self.random(experts, hidden), self.random(_ROWS, hidden)
        gate_up, down = self.random(experts, 2 * inner, hidden), self.random(experts, hidden, inner)
        moe, grouped_gemm = kernels("moe"), kernels("grouped_gemm")
        expert_TK, weight_TK = moe.router(x, router, top_k, True)
        want = _experts_one_by_one(x, expert_TK, weight_TK, gate_up, down)
        for name in grouped_gemm.schedules():
            got = moe.experts(x, expert_TK, weight_TK, gate_up, down, schedule=name)
            self.keep_or_forbid(self.experts_op, name, got, want, f"{name}, {_ROWS} rows", grouped_gemm.forbid)
        if self.shapes.ranks > 1:
            self.shards_of_experts(x, expert_TK, weight_TK, gate_up, down, want)

        def run(rows: Tensor) -> Tensor:
            return moe_inference(rows, router, experts, gate_up, down, inner, top_k, True)

        def schedule(rows: int) -> str:
            return grouped_gemm.choose(rows * top_k, experts)

        where = f"{schedule(_ROWS)}, router and experts against one linear per expert, {_ROWS} rows"
        self.expect(self.experts_op, run(x), want, where)
        self.rowwise(self.experts_op, run, x, EXPERT_ROW_COUNTS, schedule)

    @property
    def head_op(self) -> str:
        return f"head({self.shapes.vocab_size}, {self.shapes.hidden_size})"

    def head(self) -> None:
        self.until_nothing_is_dropped(self.head_once)

    def head_once(self) -> None:
        s, head = self.shapes, kernels("head")
        rows = 300  # more than any schedule but the reference takes
        hidden, weight = self.random(rows, s.hidden_size), self.random(s.vocab_size, s.hidden_size)
        position = torch.arange(rows, device=self.device)
        every = _sampling(position)
        want = draw(hidden, weight, s.vocab_size, every, _no_rows(self.device))
        for count in (1, 8, 33, 64, 130, rows):
            params = _sampling(position[:count])
            drawn = draw(hidden[:count], weight, s.vocab_size, params, _no_rows(self.device))
            schedule = head.schedule_of(count)
            for what, got, whole in (
                ("log-probs", drawn.log_prob_B, want.log_prob_B),
                ("draws", drawn.token_B, want.token_B),
            ):
                where = f"{schedule}, {what} of {count} rows among {rows}"
                if schedule == head.SLABS:
                    self.expect(self.head_op, got, whole[:count], where)
                else:
                    self.keep_or_forbid(self.head_op, schedule, got, whole[:count], where, head.forbid)
            if s.ranks > 1:
                self.shards_of_head(self.head_op, hidden[:count], weight, params, _no_rows(self.device), want)
            scored, _ = token_log_probs(hidden[:count], weight, want.token_B[:count], params.temperature_B)
            where = f"{head.schedule_of(count)}, sampler against trainer, {count} rows"
            self.expect(self.head_op, scored, want.log_prob_B[:count], where)

    def cuts(self) -> None:
        """Draws of rows that cut the vocabulary, in each way and in all at once."""
        s, op = self.shapes, f"cuts({self.shapes.vocab_size}, {self.shapes.hidden_size})"
        chunk = kernels("sampling").CHUNK_ROWS
        rows = chunk + 2
        # logits of a spread of two: a cut then leaves many ids, or few
        hidden = self.random(rows, s.hidden_size) * (2 * s.hidden_size**-0.5)
        weight = self.random(s.vocab_size, s.hidden_size)
        row = torch.arange(rows, device=self.device)
        every = dataclasses.replace(
            _sampling(row),
            top_k_B=torch.where(row % 4 % 3 == 0, 20, -1),
            top_p_B=torch.where((row % 4 == 1) | (row % 4 == 3), 0.9, 1.0),
            min_p_B=torch.where(row % 4 >= 2, 0.02, 0.0),
        )
        want = draw(hidden, weight, s.vocab_size, every, row)
        for count in (1, chunk, rows):
            for what, cut in (("all of them", row[:count]), ("every other one", row[:count:2])):
                params = every.rows(row[:count])
                drawn = draw(hidden[:count], weight, s.vocab_size, params, cut)
                for name in ("token_B", "log_prob_B", "kept_mass_B"):
                    where = f"triton, {name[:-2]} of {count} rows, of which {what} cut"
                    self.expect(op, getattr(drawn, name)[cut], getattr(want, name)[cut], where)
            if s.ranks > 1:
                self.shards_of_head(op, hidden[:count], weight, params, row[:count], want)
        scored, _ = token_log_probs(hidden, weight, want.token_B, every.temperature_B)
        self.expect(op, scored, want.log_prob_B, f"triton, sampler against trainer, {rows} rows")

    def shards_of_head(
        self, op: str, hidden: Tensor, weight: Tensor, params: SamplingTensors, cut: Tensor, want: Sampled
    ) -> None:
        """A draw over a split vocabulary, all of whose ranks run here one after another, against the whole one."""
        ranks, given = self.shapes.ranks, list[list[Tensor]]()  # by rank, what it gathers

        def note(x: Tensor) -> Tensor:
            given[-1].append(x)
            return x.new_zeros(ranks, *x.shape)  # what comes of these is not looked at, and x may end in padding

        def drawn(rank: int, gather: Callable[[Tensor], Tensor]) -> Sampled:
            part = vocabulary_part(Shards(rank, ranks, gather), self.shapes.vocab_size, self.device)
            return split_draw(hidden, weight[part.rows], part, params, cut)

        for rank in range(ranks):
            given.append([])
            drawn(rank, note)
        gathered = map(torch.stack, zip(*given, strict=True))
        got = drawn(ranks - 1, lambda _: next(gathered))
        rows = hidden.shape[0]
        where = f"{kernels('head').schedule_of(rows)}, {rows} rows, {ranks} parts of the vocabulary"
        self.expect(op, got.log_prob_B, want.log_prob_B[:rows], where)
        self.expect(op, got.token_B, want.token_B[:rows], where)


def _permutation(count: int) -> Tensor:
    """int64 [count], on the host; the same in every process."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))


class Rehearsal(GpuProbe):
    """The same checks on the meta device: everything is launched as they launch it, and nothing compared."""

    def run(self) -> None:
        for check in (self.attention, self.head, self.cuts, self.experts, self.linears, self.row_ops):  # longest first
            check()

    def random(self, *size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device=self.device)

    def expect(self, op: str, got: Tensor, want: Tensor, where: str) -> None:
        pass

    def keep_or_forbid(
        self, op: str, schedule: str, got: Tensor, want: Tensor, where: str, forbid: Callable[[str], None]
    ) -> None:
        pass

    def imports(self) -> None:
        """What the checks import when they first need it."""
        ops = ["gemm", "few_rows", "norm", "activation", "rope", "head", "sampling"]
        ops += ["attention", "chunk64"] if self.is_chunk64 else []
        ops += ["moe", "grouped_gemm", "dispatch", "combine"] if self.shapes.moe else []
        for op in ops:
            kernels(op)

    def attention(self) -> None:
        if self.is_chunk64:  # the other one's kernels are compiled, a library's
            super().attention()


def run(device: torch.device, shapes: ProbeShapes, attention: str, report: ProbeReport) -> None:
    """Compile all kernels that the checks need, side by side, while the device is set up, then check; adds to `report`.

    A rehearsal that fails costs time, which the log says, and nothing else: the checks compile what they launch, and
    raise what is wrong with it.

    Raises:
        ContractError: a difference that no other schedule can replace.
    """
    begin = time.perf_counter()
    if device.type == "cuda" and device.index is None:  # which one is current is a thread's own affair
        device = torch.device("cuda", torch.cuda.current_device())
    rehearsal = Rehearsal(META, shapes, attention, report)
    with ThreadPoolExecutor(1, thread_name_prefix="device") as pool:
        set_up = pool.submit(_set_up, device, shapes)
        try:
            report.kernels = rehearse(device, rehearsal.run, first=rehearsal.imports)
        except Exception:
            logger.warning(
                "probe: kernels could not be compiled side by side, and are one after another", exc_info=True
            )
        set_up.result()
    report.compile_seconds = time.perf_counter() - begin
    logger.info("probe: %d kernels ready after %.1f s", report.kernels, report.compile_seconds)
    GpuProbe(device, shapes, attention, report).run()


def _set_up(device: torch.device, shapes: ProbeShapes) -> None:
    """What the checks would wait for at their first use of a device: its context, PyTorch's own kernels, and those that
    a library brings for the linears."""
    x, weight = cancelling(8, 8, 64, device)
    if device.type == "cuda":
        for parts, inputs, out_dtype in _linears(shapes):
            kernels("gemm").get_ready(ROW_COUNTS, sum(parts), inputs, out_dtype, device)
    _differing(x, weight)
    torch.isfinite(x).all().item()


def _linears(shapes: ProbeShapes) -> list[tuple[tuple[int, ...], int, torch.dtype]]:
    """(outputs of each part, inputs, dtype of the result), the head last."""
    of_layers = [(parts, inputs, torch.bfloat16) for parts, inputs in shapes.linears]
    return [*of_layers, ((shapes.vocab_size,), shapes.hidden_size, torch.float32)]


def _differing(got: Tensor, want: Tensor) -> int:
    return int((bits_of(got) != bits_of(want)).sum())


def _experts_one_by_one(
    x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor
) -> Tensor:
    """[T, D]: each expert by the reference schedule of a linear on its own rows."""
    reference = kernels("gemm").REFERENCE
    plan = kernels("dispatch").dispatch(expert_TK, gate_up_EJD.shape[0])
    # In a rehearsal the ends are not known, nor needed: the kernel is the same for any number of rows.
    ends = [x_TD.shape[0]] if x_TD.is_meta else plan.end_E.tolist()

    def product(x_RK: Tensor, weight_ENK: Tensor) -> Tensor:
        y_RN = x_RK.new_empty(x_RK.shape[0], weight_ENK.shape[1])
        for start, end, weight_NK in zip([0, *ends], ends, weight_ENK, strict=False):
            if end > start:
                reference.run(x_RK[start:end], weight_NK, None, y_RN[start:end])
        return y_RN

    h_RI = swiglu_of_halves(product(plan.gather(x_TD), gate_up_EJD))
    return kernels("combine").combine(product(h_RI, down_EDI), plan.row_TK, weight_TK, expert_TK.shape[1])


def _no_rows(device: torch.device) -> Tensor:
    """The rows that cut: none here."""
    return torch.empty(0, dtype=torch.int64, device=device)


def _sampling(position_B: Tensor) -> SamplingTensors:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(position_B.shape, value, dtype=dtype, device=position_B.device)

    return SamplingTensors(
        full(0.9, torch.float32), full(-1, torch.int64), full(1.0, torch.float32), full(0.0, torch.float32),
        position_B * 7919, position_B,
    )  # fmt: skip


class _Pages:
    """Packed keys and values laid out in randomly placed pages."""

    def __init__(self, k_THD: Tensor, v_THD: Tensor, lengths: list[int], page_size: int) -> None:
        self.lengths, self.page_size, device = lengths, page_size, k_THD.device
        counts = [-(-length // page_size) for length in lengths]
        order = _permutation(sum(counts)) + 1
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
        for index, pages in enumerate(order.split(counts)):
            self.table[index, : counts[index]] = pages
        position = torch.cat([torch.arange(length) for length in lengths])
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        self.slot = self.table[sequence, position // page_size] * page_size + position % page_size
        shape = (sum(counts) + 1, page_size, *k_THD.shape[1:])
        self.k, self.v = (torch.zeros(shape, dtype=k_THD.dtype, device=device) for _ in range(2))
        for pages, rows in ((self.k, k_THD), (self.v, v_THD)):
            pages.flatten(0, 1)[self.slot.to(device)] = rows

    def batch(self, rows: list[tuple[int, int, int]]) -> tuple[PagedBatch, Tensor]:
        """A batch of (sequence, keys that its last row sees, rows) each, and their places among the packed rows. A
        sequence may come several times: all read its pages."""
        start = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        chosen = torch.cat([torch.arange(start[s] + keys - n, start[s] + keys) for s, keys, n in rows])
        sequences, contexts, counts = (list(column) for column in zip(*rows, strict=True))
        batch = PagedBatch(
            query_start_S1=torch.tensor([0, *counts]).cumsum(0),
            context_len_S=torch.tensor(contexts),
            block_table_SM=self.table[sequences],
            slot_T=self.slot[chosen],
            position_T=torch.cat([torch.arange(keys - n, keys) for _, keys, n in rows]),
            device=self.k.device,
        )
        return batch, chosen.to(self.k.device)
