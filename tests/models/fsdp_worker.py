"""Runs in each rank of test_fsdp2: the contract trainer wrapped as verl wraps it, against the engine."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verl_tim.models import apply_contract, build_model, config_from_hf
from verl_tim.numerics import log_probs_of

from .tiny import VOCAB, PagedRunner, Sequence, tiny_model

LENGTHS = (67, 3, 20, 1, 33)


@dataclass
class Case:
    kind: str
    param_dtype: torch.dtype
    tied: bool = False
    apply_after_wrap: bool = False


CASES = [
    Case("qwen3", torch.bfloat16),
    Case("qwen3", torch.bfloat16, tied=True, apply_after_wrap=True),
    Case("qwen3_moe", torch.bfloat16),
    Case("qwen3_moe", torch.float32, tied=True),
    Case("qwen2", torch.bfloat16),
]


def wrap_as_verl(model: nn.Module, param_dtype: torch.dtype) -> None:
    """The wrap targets and policy of verl 0.9.1 (utils/fsdp_utils.py:549-570, fsdp/transformer_impl.py:456)."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
    tied = model.config.tie_word_embeddings
    for name, module in list(model.named_modules()):
        leaf = name.rsplit(".", 1)[-1]
        if type(module).__name__ in model._no_split_modules or (not tied and leaf in ("embed_tokens", "lm_head")):
            fully_shard(module, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mp_policy=policy, reshard_after_forward=True)


def engine_log_probs(model: nn.Module, sequences: list[list[int]], temperature: float, dtype: torch.dtype):
    """Token by token, all sequences together, with the weights gathered from the shards."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    engine = build_model(config_from_hf(model.config), dtype=dtype, device="cpu")
    engine.load_weights(state.items())
    runner = PagedRunner(engine, page_size=7, num_pages=60)
    work = [Sequence(list(tokens), len(tokens), 0, temperature) for tokens in sequences]
    result: list[list[float]] = [[] for _ in work]
    while alive := [(i, s) for i, s in enumerate(work) if s.cached < len(s.tokens) - 1]:
        hidden = runner.step([(s, 1) for _, s in alive])
        target = torch.tensor([s.tokens[s.cached] for _, s in alive])
        got, _ = log_probs_of(engine.logits(hidden), target, torch.full((len(alive),), temperature))
        for (i, _), value in zip(alive, got, strict=True):
            result[i].append(value)
    return torch.stack(list(itertools.chain.from_iterable(result)))


def trainer_log_probs(
    model: nn.Module, sequences: list[list[int]], temperature: float, layout: str, dtype: torch.dtype
):
    """As verl calls it: autocast on when the parameters are half precision, use_cache=False, return_dict=True."""
    tokens = [torch.tensor(s) for s in sequences]
    keep = torch.cat([torch.arange(len(s)) < len(s) - 1 for s in sequences])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        if layout == "packed":
            flat = torch.cat(tokens)[None]
            position = torch.cat([torch.arange(len(s)) for s in sequences])[None]
            out = model(
                input_ids=flat,
                attention_mask=None,
                position_ids=position,
                temperature=temperature,
                shift_labels=torch.roll(flat, -1, 1),
                return_dict=True,
                use_cache=False,
            )
            return out.log_probs[0][keep], out.entropy[0][keep]
        width = max(map(len, sequences))
        ids = torch.full((len(sequences), width), 7)
        mask = torch.zeros_like(ids)
        for row, t in enumerate(tokens):
            part = slice(0, len(t)) if layout == "right" else slice(width - len(t), width)
            ids[row, part], mask[row, part] = t, 1
        position = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            temperature=temperature,
            return_dict=True,
            use_cache=False,
        )
        real = mask.bool()
        return out.log_probs[real][keep], out.entropy[real][keep]


def run_case(case: Case, rank: int) -> int:
    """Returns how many log-probs were compared; raises AssertionError on the first differing bit."""
    model = tiny_model(case.kind, tie_word_embeddings=case.tied).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not case.apply_after_wrap:
        handle = apply_contract(model)
    wrap_as_verl(model, case.param_dtype)
    if case.apply_after_wrap:
        handle = apply_contract(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    sequences = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    compared = 0
    for step, layout in enumerate(("packed", "left", "right")):
        temperature = (0.6, 1.0, 1.3)[step]
        want = engine_log_probs(model, sequences, temperature, case.param_dtype)
        calls = handle.forward_calls
        got, entropy = trainer_log_probs(model, sequences, temperature, layout, case.param_dtype)
        assert handle.forward_calls == calls + 1, "the contract's forward did not run"
        assert torch.isfinite(got).all()
        assert got.dtype == torch.float32
        differ = int((got.view(torch.int32) != want.view(torch.int32)).sum())
        assert differ == 0, f"{case} {layout} T={temperature}: {differ} of {got.numel()} log-probs differ"
        compared += got.numel()
        (-got.mean() - 0.01 * entropy.mean()).backward()
        before = [p.to_local().clone() for p in model.parameters()]
        assert all(p.grad is not None and torch.isfinite(p.grad.to_local()).all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        moved = sum(not torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
        assert moved > 0.8 * len(before), "the optimiser step moved too little to test a weight update"
    return compared


def main(rank: int, world: int, port: int, cases: list[Case], results) -> None:
    """Entry of one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        results.put((rank, sum(run_case(case, rank) for case in cases)))
        dist.barrier()
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
