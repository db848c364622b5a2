"""The head beside what others do: sampling beside softmax and an exponential race, log-probs beside log_softmax."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from verl_tim.bench.row import BenchRow
from verl_tim.numerics.gpu import head, sampling
from verl_tim.numerics.gpu.device_time import event_us, graph_us
from verl_tim.numerics.gpu.head_backward import head_backward

VOCAB = 151936


def _model(rows: int, inner: int) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(rows, inner, device="cuda").bfloat16(),
        torch.randn(VOCAB, inner, device="cuda").mul_(0.05).bfloat16(),
    )


def _stock_sample(hidden: Tensor, weight: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """As rollout engines do it: bfloat16 logits, float32 softmax, race of exponentials, log-prob of the winner."""
    logits = torch.mm(hidden, weight.t()).float() / temperature[:, None]
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    token = p.div(torch.empty_like(p).exponential_()).argmax(-1)
    return token, log_p.gather(1, token[:, None])


def _sampling(rows: int, inner: int) -> list[BenchRow]:
    hidden, weight = _model(rows, inner)
    temperature = torch.full((rows,), 0.7, device="cuda")
    seed = torch.arange(rows, device="cuda")
    floor = f"weights over 4.3 TB/s: {weight.nbytes / 4.3e6:.0f} us"
    ours = graph_us(lambda: head.sample(hidden, weight, temperature, seed, seed), calls=4)
    peer = graph_us(lambda: _stock_sample(hidden, weight, temperature), calls=4)
    shape = f"B={rows} D={inner}"
    table = [BenchRow("head.sample", shape, ours, "torch: mm, softmax, race", peer, floor)]
    off, top_p = torch.full_like(seed, -1), torch.full((rows,), 0.9, device="cuda")
    cuts = sampling.Cuts(off, top_p, 0 * top_p)
    ours = graph_us(lambda: sampling.sample_with_cuts(hidden, weight, temperature, cuts, seed, seed), calls=2)
    logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    peer = graph_us(lambda: logits.sort(-1, descending=True), calls=2)
    return [*table, BenchRow("sample_with_cuts", f"{shape} top-p 0.9", ours, "torch.sort of the logits alone", peer)]


def _training(rows: int, inner: int) -> list[BenchRow]:
    hidden, weight = _model(rows, inner)
    target = torch.randint(0, VOCAB, (rows,), device="cuda")
    temperature = torch.ones(rows, device="cuda")
    g = torch.randn(rows, device="cuda")
    out = head.token_log_probs(hidden, weight, target, temperature)
    leaves = [t.detach().requires_grad_() for t in (hidden, weight)]

    def plain() -> Tensor:
        log_p = torch.log_softmax((leaves[0] @ leaves[1].t()).float(), -1)
        return log_p.gather(1, target[:, None])[:, 0]

    def plain_step() -> None:
        leaves[0].grad = leaves[1].grad = None
        (plain() * g).sum().backward()

    def forward() -> None:
        head.token_log_probs(hidden, weight, target, temperature)

    def step() -> None:
        forward()
        head_backward(hidden, weight, target, temperature, out.max_T, out.log_sum_T, None, g, None)

    with torch.no_grad():
        peer_forward = event_us(plain)
    shape = f"T={rows} D={inner}"
    ours_forward, ours_step = event_us(forward), event_us(step)
    rate = f"{2 * rows * VOCAB * inner / ours_forward / 1e6:.0f} TFLOP/s"
    table = [
        BenchRow("head.token_log_probs", shape, ours_forward, "torch: mm, log_softmax", peer_forward, rate),
        BenchRow("head forward and backward", shape, ours_step, "torch: mm, log_softmax", event_us(plain_step)),
    ]
    if importlib.util.find_spec("verl") is None:
        return table
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def verl_step() -> None:
        leaves[0].grad = leaves[1].grad = None
        (linear_cross_entropy(*leaves, target, 1.0, "none", None)[0] * g).sum().backward()

    def verl_forward() -> object:
        return linear_cross_entropy(hidden, weight, target, 1.0, "none", None)

    return [
        *table,
        BenchRow("head.token_log_probs", shape, ours_forward, "verl linear_cross_entropy", event_us(verl_forward)),
        BenchRow("head forward and backward", shape, ours_step, "verl linear_cross_entropy", event_us(verl_step)),
    ]


def run(quick: bool) -> list[BenchRow]:
    """Sampling at 1 to 256 rows, log-probs and gradients at 8,192 tokens (`quick`: two row counts, 2,048 tokens)."""
    table: list[BenchRow] = []
    for inner in (2048,) if quick else (2048, 4096):
        for rows in (16, 256) if quick else (1, 16, 64, 128, 256):
            table += _sampling(rows, inner)
        table += _training(2048 if quick else 8192, inner)
    return table
