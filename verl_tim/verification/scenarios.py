"""The gate's scenarios: ways in which a rollout differs from a trainer's forward without being allowed to show it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from verl_tim.diagnosis.gate import Rung, ScenarioResult
from verl_tim.engine.core import RequestOutput
from verl_tim.engine.engine import Engine
from verl_tim.verification.cause import name_cause
from verl_tim.verification.subject import Prompt, Subject, compare, padded

Drawn = list[tuple[Prompt, RequestOutput]]

TEMPERATURES = (0.0, 0.6, 1.0, 1.3)
TRUNCATIONS: tuple[dict[str, Any], ...] = ({"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.9})


def ladder(subject: Subject) -> list[Rung]:
    """All scenarios in order, grouped into rungs; later rungs are not reached once one has failed."""

    def rung(name: str, *scenarios: Callable[[Subject], ScenarioResult]) -> Rung:
        def bind(scenario: Callable[[Subject], ScenarioResult]) -> Callable[[], ScenarioResult]:
            def run() -> ScenarioResult:
                began = time.perf_counter()
                result = scenario(subject)
                return dataclasses.replace(result, seconds=time.perf_counter() - began)

            return run

        return Rung(name, [((s.__doc__ or s.__name__).split(".")[0].split(":")[0], bind(s)) for s in scenarios])

    return [
        rung("batch", alone_and_in_company, trainer_layouts),
        rung("schedule", chunked_prefill, preempted, prefix_hits),
        rung("sampling", mixed_temperatures, truncated_sampling),
        rung("weights", after_weight_updates, update_in_flight),
    ]


def alone_and_in_company(subject: Subject) -> ScenarioResult:
    """Alone and in company: a request by itself draws the same tokens and bits as in a full batch."""
    prompts = subject.draw_prompts(subject.requests, tag="company")
    engine = subject.engine()
    together = subject.generate(engine, prompts)
    single = subject.engine(max_num_seqs=1)
    alone = subject.generate(single, prompts[: max(4, len(prompts) // 4)])
    counts = {"requests in company": len(together), "requests alone": len(alone), **_facts(engine)}
    result = _judge(subject, engine, "alone and in company", together, counts=counts, required=tuple(counts)[:2])
    return result if result.failures or not subject.exact else _same_draws(result, alone, together)


def trainer_layouts(subject: Subject) -> ScenarioResult:
    """Trainer layouts: packed and padded rows, micro-batches of one, three and all."""
    engine = subject.engine()
    drawn = subject.generate(engine, subject.draw_prompts(max(6, subject.requests // 2), tag="layouts"))
    layouts = [(packed, size) for packed in (True, False) for size in (1, 3, None)]
    rows: list[Tensor] = []
    for packed, size in layouts:
        rows += subject.score(drawn, packed=packed, micro_batch_size=size)
    counts = {"layouts": len(layouts)}
    return _judge(
        subject, engine, "trainer layouts", drawn * len(layouts), scored=rows, counts=counts, required=("layouts",)
    )


def chunked_prefill(subject: Subject) -> ScenarioResult:
    """Chunked prefill: a token budget of 11 cuts prompts at odd places, beside running decodes."""
    engine = subject.engine(max_num_batched_tokens=11, max_num_seqs=7)
    drawn = subject.generate(engine, subject.draw_prompts(subject.requests, tag="chunks"))
    counts = {"chunk cuts": engine.stats().chunk_cuts}
    return _judge(subject, engine, "chunked prefill", drawn, counts=counts, required=("chunk cuts",))


def preempted(subject: Subject) -> ScenarioResult:
    """Preemption: a KV pool that holds a fraction of the batch; evicted requests are recomputed."""
    # Short prompts are all admitted; their responses then outgrow a pool that holds two and a half of them.
    prompts = [
        dataclasses.replace(prompt, token_P=prompt.token_P[:6])
        for prompt in subject.draw_prompts(
            subject.requests, tag="preempted", params={"max_tokens": subject.response_tokens}
        )
    ]
    page_size = 4
    longest = 6 + subject.response_tokens
    engine = subject.engine(
        page_size=page_size, kv_cache_tokens=page_size * -(-longest * 5 // (2 * page_size)), watermark=0.0
    )
    drawn = subject.generate(engine, prompts)
    counts = {"preemptions": engine.stats().preemptions}
    return _judge(subject, engine, "preempted", drawn, counts=counts, required=("preemptions",))


def prefix_hits(subject: Subject) -> ScenarioResult:
    """Prefix cache: samples of one prompt reuse its pages, hit and miss with the same bits."""
    engine = subject.engine(enable_prefix_cache=True, page_size=4)
    base = subject.draw_prompts(max(2, subject.requests // 4), tag="prefix")
    prompts = [
        dataclasses.replace(prompt, request_id=f"{prompt.request_id}-{sample}")
        for sample in range(4)
        for prompt in base
    ]
    half = len(prompts) // 2  # the second half arrives when the first has filled the cache
    drawn = subject.generate(engine, prompts[:half]) + subject.generate(engine, prompts[half:])
    counts = {"prefix hit tokens": engine.stats().prefix_hit_tokens}
    return _judge(subject, engine, "prefix cache", drawn, counts=counts, required=("prefix hit tokens",))


def mixed_temperatures(subject: Subject) -> ScenarioResult:
    """Temperatures: greedy, 0.6, 1.0 and 1.3 mixed in one batch."""
    prompts: list[Prompt] = []
    for temperature in TEMPERATURES:
        prompts += subject.draw_prompts(
            max(4, subject.requests // 3), tag=f"t{temperature:g}", params={"temperature": temperature}
        )
    order = np.random.default_rng(subject.seed).permutation(len(prompts))
    engine = subject.engine()
    drawn = subject.generate(engine, [prompts[i] for i in order])
    counts = {
        f"tokens at T={t:g}": sum(len(o.token_ids) for p, o in drawn if p.params.temperature == t) for t in TEMPERATURES
    }
    return _judge(subject, engine, "temperatures", drawn, counts=counts, required=tuple(counts))


def truncated_sampling(subject: Subject) -> ScenarioResult:
    """Top-k, top-p, min-p: the log-prob is that of the full vocabulary, the kept mass stands beside it."""
    prompts: list[Prompt] = []
    for index, params in enumerate(TRUNCATIONS):
        prompts += subject.draw_prompts(
            max(4, subject.requests // 3), tag=f"cut{index}", params={**params, "temperature": 0.8}
        )
    engine = subject.engine()
    drawn = subject.generate(engine, prompts)
    counts = {"tokens with kept mass below 1": sum(mass < 1.0 for _, o in drawn for mass in o.kept_mass)}
    return _judge(subject, engine, "truncated sampling", drawn, counts=counts, required=tuple(counts))


def after_weight_updates(subject: Subject) -> ScenarioResult:
    """After weight updates: two optimiser steps, each streamed into a running engine."""
    engine = subject.engine()
    drawn = subject.generate(engine, subject.draw_prompts(subject.requests, tag="update0"))
    moved = 0
    for step in (1, 2):
        before = subject.score(drawn)
        engine.update_weights(subject.update(drawn), subject.weight_version)
        moved += sum(int((a != b).sum()) for a, b in zip(before, subject.score(drawn), strict=True))
        drawn = subject.generate(engine, subject.draw_prompts(subject.requests, tag=f"update{step}"))
    counts = {"weight updates": engine.stats().weight_updates, "log-probs the updates moved": moved}
    return _judge(subject, engine, "after weight updates", drawn, counts=counts, required=tuple(counts))


def update_in_flight(subject: Subject) -> ScenarioResult:
    """Update in flight: responses half drawn when new weights arrive; each token against the weights that drew it."""
    prompts = subject.draw_prompts(subject.requests, tag="flight", params={"max_tokens": subject.response_tokens})
    # Draws depend on nothing but seed and position, so a twin that is stopped half way shows what the engine has drawn
    # by then.
    engine, twin = subject.engine(), subject.engine()
    for prompt in prompts:
        for each in (engine, twin):
            each.add(prompt.request_id, prompt.token_P, prompt.params)
    for _ in range(max(2, subject.response_tokens // 2)):
        engine.step()
        twin.step()
    old_version = engine.weight_version
    halves = {output.request_id: output for output in twin.abort()}
    so_far = [(prompt, halves[prompt.request_id]) for prompt in prompts]
    old_rows = subject.score(so_far)
    engine.update_weights(subject.update(so_far), subject.weight_version)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id] = output
    drawn = [(prompt, outputs[prompt.request_id]) for prompt in prompts]
    new_rows = subject.score(drawn)
    merged = []
    for (_, output), old, new in zip(drawn, old_rows, new_rows, strict=True):
        row = new.clone()
        row[: len(old)] = old
        if output.weight_versions != [old_version] * len(old) + [subject.weight_version] * (len(new) - len(old)):
            return ScenarioResult(
                "update in flight",
                error=f"{output.request_id}: weight_versions {output.weight_versions} "
                "do not change where the update came",
            )
        merged.append(row)
    counts = {
        f"tokens at version {version}": sum(o.weight_versions.count(version) for _, o in drawn)
        for version in (old_version, subject.weight_version)
    }
    return _judge(subject, engine, "update in flight", drawn, scored=merged, counts=counts, required=tuple(counts))


def _facts(engine: Engine) -> dict[str, int]:
    stats = engine.stats()
    return {"steps": stats.steps}


def _judge(
    subject: Subject,
    engine: Engine,
    name: str,
    drawn: Sequence[tuple[Prompt, RequestOutput]],
    *,
    counts: dict[str, int],
    required: tuple[str, ...],
    scored: Sequence[Tensor] | None = None,
) -> ScenarioResult:
    report = compare(drawn, subject.score(drawn) if scored is None else scored)
    parted = None
    if subject.exact and report.first is not None:
        prompt, output = drawn[report.first.row]
        parted = name_cause(subject, engine, prompt, output, report.first.token)
    return ScenarioResult(name, report=report, counts=counts, required=required, exact=subject.exact, parted_at=parted)


def _same_draws(result: ScenarioResult, alone: Drawn, together: Drawn) -> ScenarioResult:
    """Company must change neither the tokens nor the bits of a request."""
    by_id = {output.request_id: output for _, output in together}
    for prompt, output in alone:
        other = by_id[prompt.request_id]
        if output.token_ids != other.token_ids:
            return dataclasses.replace(result, error=f"{prompt.request_id} drew other tokens alone than in company")
        a, _ = padded([output.log_probs])
        b, _ = padded([other.log_probs])
        if not bool((a == b).all()):
            return dataclasses.replace(result, error=f"{prompt.request_id} recorded other bits alone than in company")
    return result
