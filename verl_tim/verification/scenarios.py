"""The gate's scenarios: ways in which a rollout differs from a trainer's forward without being allowed to show it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_tim.diagnosis.gate import Rung, ScenarioResult
from verl_tim.engine.core import RequestOutput
from verl_tim.engine.engine import Engine
from verl_tim.engine.errors import EngineStateError
from verl_tim.engine.graphs import bucket_sizes
from verl_tim.verification.cause import name_cause
from verl_tim.verification.subject import Prompt, Subject, UpdateError, compare, padded, run_out

Drawn = list[tuple[Prompt, RequestOutput]]

UNCERTAIN = "log-probs other than 0"
TEMPERATURES = (0.0, 0.6, 1.0, 1.3)
TRUNCATIONS: tuple[dict[str, Any], ...] = ({"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.9})


def ladder(subject: Subject) -> list[Rung]:
    """All scenarios in order, grouped into rungs; later rungs are not reached once one has failed."""

    def rung(name: str, *scenarios: Callable[[Subject], ScenarioResult]) -> Rung:
        return Rung(name, [bound(scenario, subject) for scenario in scenarios])

    return [
        rung("batch", alone_and_in_company, trainer_layouts),
        rung("schedule", staggered_arrivals, every_step_size, chunked_prefill, preempted, prefix_hits),
        rung("sampling", mixed_temperatures, truncated_sampling),
        rung("weights", after_weight_updates, asleep_and_awake, update_in_flight, partial_rollouts),
    ]


def bound(scenario: Callable[[Subject], ScenarioResult], subject: Subject) -> tuple[str, Callable[[], ScenarioResult]]:
    """A scenario as a rung takes it: its title (its docstring up to the first colon or stop), and a call that times it.

    A trainer that cannot update fails the scenario, and so does an engine that lacks weights or KV where it should have
    them. Its engines end with it.
    """
    title = (scenario.__doc__ or scenario.__name__).split(".")[0].split(":")[0]
    title = title[:1].lower() + title[1:]  # as its result is called

    def run() -> ScenarioResult:
        began = time.perf_counter()
        try:
            result = scenario(subject)
        except (UpdateError, EngineStateError) as error:
            result = ScenarioResult(title, error=str(error))
        finally:
            subject.close_engines()
        return dataclasses.replace(result, seconds=time.perf_counter() - began)

    return title, run


def crowded(subject: Subject, prompts: Sequence[Prompt]) -> tuple[Engine, list[Prompt]]:
    """An engine whose KV pool is too small for the prompts, and the prompts, cut so that it must preempt some of them.

    They are shorter than a page, all of one length and with answers of `response_tokens`, which outgrow a pool that
    holds two and a half of them. A page stays free for each that runs, so an odd number n of pages admits (n + 1) / 2
    prompts, and there is one page too few when each needs its second.
    """
    page_size, tokens = 4, subject.response_tokens
    length = max(1, min(page_size - 1, subject.max_model_len - tokens))
    pages = -(-(length + tokens) * 5 // (2 * page_size)) | 1
    engine = subject.engine(page_size=page_size, kv_cache_tokens=page_size * pages, watermark=0.0)
    return engine, [
        dataclasses.replace(
            prompt,
            token_P=np.resize(prompt.token_P, length),
            params=dataclasses.replace(prompt.params, max_tokens=tokens),
        )
        for prompt in prompts
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


def staggered_arrivals(subject: Subject) -> ScenarioResult:
    """Staggered arrivals: requests come one by one and in bursts while others run, or when all have ended."""
    engine = subject.engine()
    waiting = subject.draw_prompts(subject.requests, tag="staggered")
    prompts, beside = list(waiting), 0
    outputs: dict[str, RequestOutput] = {}
    while waiting or engine.has_work():
        # none, one, or a burst; and the next one where nothing is left to do
        for _ in range(int(subject.rng.choice((0, 0, 0, 1, 1, 4))) or int(not engine.has_work())):
            if waiting:
                beside += engine.has_work()
                prompt = waiting.pop(0)
                engine.add(prompt.request_id, prompt.token_P, prompt.params)
        outputs |= {output.request_id: output for output in engine.step()}
    engine.audit()
    drawn = [(prompt, outputs[prompt.request_id]) for prompt in prompts]
    counts = {"requests that came while others ran": beside, **_facts(engine)}
    return _judge(subject, engine, "staggered arrivals", drawn, counts=counts, required=tuple(counts)[:1])


def every_step_size(subject: Subject) -> ScenarioResult:
    """Every step size: decode steps of each number of rows that a graph is recorded for, down from the largest."""
    on_gpu = torch.cuda.is_available()
    engine = subject.engine(**({} if on_gpu else {"max_num_seqs": min(32, 2 * subject.requests)}))
    sizes = bucket_sizes(engine.config.max_num_seqs, 1)
    # The request with number n (from 0) is there as long as steps have more than n rows.
    prompts = [
        dataclasses.replace(
            prompt,
            token_P=prompt.token_P[:4],
            params=dataclasses.replace(prompt.params, max_tokens=1 + sum(size > number for size in sizes)),
        )
        for number, prompt in enumerate(subject.draw_prompts(sizes[-1], tag="sizes"))
    ]
    for prompt in prompts:
        engine.add(prompt.request_id, prompt.token_P, prompt.params)
    outputs: dict[str, RequestOutput] = {}
    running = set()
    while engine.has_work():
        outputs |= {output.request_id: output for output in engine.step()}
        running.add(engine.stats().num_running)
    engine.audit()
    for below, size in zip([0, *sizes], sizes, strict=False):
        if not any(below < rows <= size for rows in running):
            error = f"no step had {below + 1} to {size} rows; they had {', '.join(map(str, sorted(running)))}"
            return ScenarioResult("every step size", error=error)
    drawn = [(prompt, outputs[prompt.request_id]) for prompt in prompts]
    counts = {"step sizes": len(sizes), "rows of the largest": sizes[-1], **_facts(engine)}
    return _judge(subject, engine, "every step size", drawn, counts=counts, required=("step sizes",))


def chunked_prefill(subject: Subject) -> ScenarioResult:
    """Chunked prefill: a token budget of 11 cuts prompts at odd places, beside running decodes."""
    engine = subject.engine(max_num_batched_tokens=11, max_num_seqs=7)
    drawn = subject.generate(engine, subject.draw_prompts(subject.requests, tag="chunks"))
    counts = {"chunk cuts": engine.stats().chunk_cuts}
    return _judge(subject, engine, "chunked prefill", drawn, counts=counts, required=("chunk cuts",))


def preempted(subject: Subject) -> ScenarioResult:
    """Preemption: a KV pool that holds a fraction of the batch; evicted requests are recomputed."""
    engine, prompts = crowded(subject, subject.draw_prompts(subject.requests, tag="preempted"))
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


def asleep_and_awake(subject: Subject) -> ScenarioResult:
    """Asleep and awake: weights, KV and graphs given up while responses are half drawn, and back again."""
    engine = subject.engine()
    prompts = subject.draw_prompts(subject.requests, tag="sleep", params={"max_tokens": subject.response_tokens})
    for prompt in prompts:
        engine.add(prompt.request_id, prompt.token_P, prompt.params)
    for _ in range(max(2, subject.response_tokens // 2)):
        engine.step()
    before = engine.stats().drawn_tokens
    engine.release_kv_cache()
    engine.release_weights()
    engine.update_weights(subject.trainer.weights(), subject.weight_version)
    engine.resume_kv_cache()
    outputs = {output.request_id: output for output in engine.drain()} | run_out(engine)
    drawn = [(prompt, outputs[prompt.request_id]) for prompt in prompts]
    counts = {"tokens before": before, "tokens after": engine.stats().drawn_tokens - before}
    return _judge(subject, engine, "asleep and awake", drawn, counts=counts, required=tuple(counts))


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
    outputs = run_out(engine)
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


UPDATES = 3


def partial_rollouts(subject: Subject) -> ScenarioResult:
    """Partial rollouts: three updates while responses are drawn, kept or aborted and sent again; tokens by version."""
    name = "partial rollouts"
    length = max(4 * (UPDATES + 1), subject.response_tokens)
    prompts = [
        dataclasses.replace(prompt, token_P=prompt.token_P[:12])
        for prompt in subject.draw_prompts(max(8, subject.requests // 2), tag="partial", params={"max_tokens": length})
    ]
    basis = subject.generate(subject.engine(), prompts[:2])  # what the optimiser steps are taken on
    # rows and pages for a part of them, so that an update meets responses half drawn, preempted and not begun
    page_size, rows = 4, max(2, len(prompts) // 2)
    pool = page_size * -(-(12 + length) * max(2, rows - 1) // page_size)
    engine = subject.engine(
        page_size=page_size, kv_cache_tokens=pool, max_num_seqs=rows, watermark=0.0, enable_prefix_cache=True
    )
    versions = {engine.weight_version: subject.trainer.snapshot()}
    responses = {prompt.request_id: _Response(prompt, seed=index) for index, prompt in enumerate(prompts)}
    for response in responses.values():
        response.send(engine)
    counts = {"responses kept in flight": 0, "responses aborted and sent again": 0}
    for update in range(UPDATES):
        for _ in range(length * len(prompts) // (rows * (UPDATES + 1))):
            _take(responses, engine.step())
        # every other one is kept: drawing goes on where it stands
        in_flight = engine.request_ids()
        # one that ended in the step under way is whole, and comes with the next step's outputs
        aborted = engine.abort(in_flight[update % 2 :: 2])
        _take(responses, aborted)
        engine.update_weights(subject.update(basis), subject.weight_version)
        versions[subject.weight_version] = subject.trainer.snapshot()
        for output in aborted:
            responses[_original(output.request_id)].send(engine)
        counts["responses kept in flight"] += len(in_flight) - len(aborted)
        counts["responses aborted and sent again"] += len(aborted)
    while engine.has_work():
        _take(responses, engine.step())
    engine.audit()
    drawn = [(response.prompt, response.whole()) for response in responses.values()]
    scored: dict[int, list[Tensor]] = {}
    for version, weights in versions.items():
        with subject.trainer.at(weights):
            scored[version] = subject.score(drawn)
    unknown = {version for _, output in drawn for version in output.weight_versions} - versions.keys()
    if unknown:
        return ScenarioResult(name, error=f"tokens name version {min(unknown)}, known are {sorted(versions)}")
    expected = [
        torch.stack([scored[version][row][at] for at, version in enumerate(output.weight_versions)])
        for row, (_, output) in enumerate(drawn)
    ]
    for version in versions:
        counts[f"tokens at version {version}"] = sum(output.weight_versions.count(version) for _, output in drawn)
    counts["responses of several versions"] = sum(len(set(output.weight_versions)) > 1 for _, output in drawn)
    counts["preemptions"] = engine.stats().preemptions
    newest = max(versions)
    counts["log-probs that other weights move"] = sum(
        int((scored[version][row][at] != scored[newest][row][at]).item())
        for row, (_, output) in enumerate(drawn)
        for at, version in enumerate(output.weight_versions)
        if version != newest
    )
    # a pool may be roomy enough for what a model with short answers leaves unfinished
    required = tuple(key for key in counts if key != "preemptions")
    return _judge(subject, engine, name, drawn, scored=expected, counts=counts, required=required)


class _Response:
    """One response that may be drawn in several requests, as verl's client for partial rollouts draws it."""

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.prompt = dataclasses.replace(prompt, params=dataclasses.replace(prompt.params, seed=seed))
        self._parts: list[RequestOutput] = []

    def send(self, engine: Engine) -> None:
        """Ask for the rest: prompt and tokens so far, the same seed, the tokens that are left."""
        drawn = [token for part in self._parts for token in part.token_ids]
        params, limit = self.prompt.params, self.prompt.params.max_tokens
        assert limit is not None
        engine.add(
            f"{self.prompt.request_id}/{len(self._parts)}",
            np.concatenate([self.prompt.token_P, np.asarray(drawn, np.int64)]),
            dataclasses.replace(params, max_tokens=limit - len(drawn)),
        )

    def take(self, output: RequestOutput) -> None:
        self._parts.append(output)

    def whole(self) -> RequestOutput:
        """The parts as one output under the response's own id."""

        lists = ("token_ids", "log_probs", "kept_mass", "top1_ids", "weight_versions")
        joined: dict[str, Any] = {name: [x for part in self._parts for x in getattr(part, name)] for name in lists}
        return dataclasses.replace(self._parts[-1], request_id=self.prompt.request_id, **joined)


def _original(request_id: str) -> str:
    return request_id.rpartition("/")[0]


def _take(responses: dict[str, _Response], outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        responses[_original(output.request_id)].take(output)


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
    # bits of a model that is certain of every token are equal whatever the kernels do
    counts = {**counts, UNCERTAIN: sum(value != 0.0 for _, output in drawn for value in output.log_probs)}
    required = (*required, UNCERTAIN)
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
