"""The ladder of `verl-tim verify --ladder`: six claims of rising reach, of which none implies another.

1. reproducible: one engine, batch 1, fixed seed: the same tokens, logits, loss and gradient twice.
2. batch-invariant: alone, in company, chunked and preempted draw the same tokens and bits.
3. aligned, dense: the trainer's log-probs against the rollout's.
4. MoE, training: routes and gradient of a forward against those with gradient checkpointing's recomputation.
5. MoE, rollout: routes and log-probs of the rollout against the trainer's.
6. asynchronous: every token against a fresh engine that holds the weights of the version it names.

Every rung but the second runs one sequence at a time, so that a fault of batching fails there and nowhere else; the
sixth compares engine with engine, so that a trainer that disagrees fails at 3 or 5.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from verl_tim.diagnosis.gate import Rung, ScenarioResult, compare_bits
from verl_tim.engine.core import RequestOutput
from verl_tim.engine.engine import Engine
from verl_tim.models.taps import record, record_calls
from verl_tim.verification.cause import name_cause
from verl_tim.verification.engine_dump import DumpedSequence
from verl_tim.verification.replay import response_hidden, response_log_probs, response_logits
from verl_tim.verification.scenarios import bound, crowded
from verl_tim.verification.subject import Prompt, Subject, compare, padded, trainer_temperature

Drawn = Sequence[tuple[Prompt, RequestOutput]]

RUNGS = (
    "1 reproducible",
    "2 batch-invariant",
    "3 aligned, dense",
    "4 MoE, training",
    "5 MoE, rollout",
    "6 asynchronous",
)
TWICE = ("first", "again")
FEW = 4  # requests where each costs a forward of its own


def six_rungs(primary: Subject, dense: Subject, moe: Subject) -> list[Rung]:
    """The ladder.

    Args:
        primary: what rungs 1, 2 and 6 run on.
        dense, moe: what rung 3, and rungs 4 and 5, run on; one of them is usually `primary`.
    """
    plan: list[tuple[Subject, list[Callable[[Subject], ScenarioResult]]]] = [
        (primary, [tokens_twice, logits_twice, loss_twice]),
        (primary, [in_company, in_chunks, preempted]),
        (dense, [trainer_against_rollout]),
        (moe, [recomputed_routes, recomputed_gradient]),
        (moe, [rollout_routes, trainer_against_rollout]),
        (primary, [each_version]),
    ]
    return [
        Rung(name, [bound(s, subject) for s in scenarios])
        for name, (subject, scenarios) in zip(RUNGS, plan, strict=True)
    ]


def dumped_rung(subject: Subject, dumped: Sequence[DumpedSequence], *, moe: bool) -> Rung:
    """What a file of another engine's log-probs can tell: its alignment with the trainer, as sizes."""

    def run() -> ScenarioResult:
        began = time.perf_counter()
        scored = []
        for sequence in dumped:
            scored += subject.trainer.log_probs([sequence.tokens], temperature=sequence.temperature)
        (train_BT, mask_BT), (rollout_BT, _) = padded(scored), padded([s.log_prob_R for s in dumped])
        return ScenarioResult(
            "trainer against file",
            report=compare_bits(train_BT, rollout_BT, mask_BT),
            counts={"sequences": len(dumped)},
            exact=False,
            seconds=time.perf_counter() - began,
            sides=("trainer", "file"),
        )

    return Rung(RUNGS[4] if moe else RUNGS[2], [("trainer against file", run)])


# ---------------------------------------------------------------------------------------------------- 1 reproducible


def tokens_twice(subject: Subject) -> ScenarioResult:
    """Tokens and log-probs twice: one engine, one request at a time, each request again with its seed."""
    engine = subject.engine(max_num_seqs=1)
    prompts = _mixed(subject, "twice")
    first, again = (subject.generate(engine, prompts) for _ in range(2))
    return _same(subject, "tokens and log-probs twice", first, again, TWICE)


def logits_twice(subject: Subject) -> ScenarioResult:
    """Logits twice: one forward over the same tokens, repeated."""
    engine = subject.engine(max_num_seqs=1)
    drawn = subject.generate(engine, _mixed(subject, "logits")[:FEW])
    rows = [
        [
            response_logits(engine.model, prompt.token_P, prompt.answered(output).response_R)[:, : subject.vocab_size]
            for prompt, output in drawn
        ]
        for _ in range(2)
    ]
    return ScenarioResult(
        "logits twice",
        report=compare_bits(*(torch.cat(side) for side in rows)),
        counts={"forwards": 2 * len(drawn)},
        exact=subject.exact,
        what="logits",
        sides=TWICE,
    )


def loss_twice(subject: Subject) -> ScenarioResult:
    """Loss and gradient twice: one forward and backward of the trainer over the same batch, repeated."""
    drawn, advantages = _batch(subject, "loss")
    sequences = [prompt.answered(output) for prompt, output in drawn]
    first, again = (_flat(*subject.trainer.gradient(sequences, advantages)) for _ in range(2))
    return ScenarioResult(
        "loss and gradient twice",
        report=compare_bits(first, again),
        counts={"non-zero gradients": int((first[1:] != 0).sum())},
        required=("non-zero gradients",),
        exact=subject.exact,
        what="values (loss, gradients)",
        sides=TWICE,
    )


# -------------------------------------------------------------------------------------------------- 2 batch-invariant


def in_company(subject: Subject) -> ScenarioResult:
    """In company: the same requests alone and all at once."""
    prompts = _mixed(subject, "company")
    engine = subject.engine()
    result = _same(
        subject, "in company", _alone(subject, prompts), subject.generate(engine, prompts), ("alone", "in company")
    )
    return _with_counts(result, {"steps": engine.stats().steps}, ())


def in_chunks(subject: Subject) -> ScenarioResult:
    """In chunks: prompts cut at a budget of 11 tokens beside running decodes."""
    prompts = _mixed(subject, "chunks")
    engine = subject.engine(max_num_batched_tokens=11, max_num_seqs=7)
    result = _same(
        subject, "in chunks", _alone(subject, prompts), subject.generate(engine, prompts), ("alone", "in chunks")
    )
    return _with_counts(result, {"chunk cuts": engine.stats().chunk_cuts}, ("chunk cuts",))


def preempted(subject: Subject) -> ScenarioResult:
    """Preempted: a KV pool for two and a half of the requests."""
    engine, prompts = crowded(subject, _mixed(subject, "preempted"))
    result = _same(
        subject, "preempted", _alone(subject, prompts), subject.generate(engine, prompts), ("alone", "preempted")
    )
    return _with_counts(result, {"preemptions": engine.stats().preemptions}, ("preemptions",))


# ----------------------------------------------------------------------------------------------------- 3, 5 alignment


def trainer_against_rollout(subject: Subject) -> ScenarioResult:
    """Trainer against rollout: log-probs of tokens drawn one request at a time, one sequence per forward."""
    engine = subject.engine(max_num_seqs=1)
    drawn = subject.generate(engine, _mixed(subject, "aligned"))
    report = compare(drawn, subject.score(drawn, micro_batch_size=1))
    parted = None
    if subject.exact and report.first is not None:
        prompt, output = drawn[report.first.row]
        parted = name_cause(subject, engine, prompt, output, report.first.token)
    return ScenarioResult(
        "trainer against rollout",
        report=report,
        counts={"sequences": len(drawn)},
        exact=subject.exact,
        parted_at=parted,
    )


# ----------------------------------------------------------------------------------------------------------- 4, 5 MoE


def recomputed_routes(subject: Subject) -> ScenarioResult:
    """Routes recomputed: the router's choices in the forward and in the recomputation of its backward."""
    drawn, advantages = _batch(subject, "routes")
    sequences = [prompt.answered(output) for prompt, output in drawn]
    with subject.trainer.gradient_checkpointing(True), record_calls(_is_route) as calls:
        subject.trainer.gradient(sequences, advantages)
    forward: dict[str, Tensor] = {}
    recomputed: dict[str, Tensor] = {}
    for name, value in calls:
        (recomputed if name in forward else forward).setdefault(name, value)
    if not forward or forward.keys() != recomputed.keys():
        missing = sorted(forward.keys() - recomputed.keys()) or ["every layer"]
        return ScenarioResult(
            "routes recomputed", error=f"nothing was recomputed in {missing[0]}: gradient checkpointing did not act"
        )
    return _routes_result(subject, "routes recomputed", [(forward, recomputed)], ("forward", "recomputation"))


def recomputed_gradient(subject: Subject) -> ScenarioResult:
    """Gradient recomputed: every parameter's gradient with gradient checkpointing and without."""
    drawn, advantages = _batch(subject, "gradient")
    sequences = [prompt.answered(output) for prompt, output in drawn]
    sides = []
    for on in (False, True):
        with subject.trainer.gradient_checkpointing(on):
            sides.append(subject.trainer.gradient(sequences, advantages))
    plain, recomputed = (_flat(*side) for side in sides)
    parted = next((n for n, g in sides[0][1].items() if not torch.equal(g, sides[1][1][n])), None)
    return ScenarioResult(
        "gradient recomputed",
        report=compare_bits(plain, recomputed),
        counts={"parameters": len(sides[0][1]), "non-zero gradients": int((plain[1:] != 0).sum())},
        required=("non-zero gradients",),
        exact=subject.exact,
        parted_at=parted,
        what="values (loss, gradients)",
        sides=("without recomputation", "with it"),
    )


def rollout_routes(subject: Subject) -> ScenarioResult:
    """Rollout's routes: expert ids, their order and their weights against the trainer's, on the same tokens."""
    engine = subject.engine(max_num_seqs=1)
    drawn = subject.generate(engine, _mixed(subject, "moe")[:FEW])
    pairs = []
    for prompt, output in drawn:
        sequence = prompt.answered(output)
        length = len(sequence.prompt_P) + len(sequence.response_R)
        with record(_is_route) as rollout:
            response_logits(engine.model, sequence.prompt_P, sequence.response_R)
        with record(_is_route) as trainer:
            subject.trainer.log_probs([sequence])
        pairs.append(({n: x[:length] for n, x in rollout.items()}, {n: x[:length] for n, x in trainer.items()}))
    return _routes_result(subject, "rollout's routes", pairs, ("rollout", "trainer"))


def _routes_result(
    subject: Subject, name: str, pairs: Sequence[tuple[dict[str, Tensor], dict[str, Tensor]]], sides: tuple[str, str]
) -> ScenarioResult:
    """Compare recorded routes sequence by sequence: expert ids by set and order, router weights by bits."""
    ids = [key for key in pairs[0][0] if key.endswith(".routes")]
    if not ids or any(a.keys() != b.keys() for a, b in pairs):
        return ScenarioResult(name, error=f"{sides[0]} and {sides[1]} did not record the same routers")
    flips = reordered = compared = 0
    first: str | None = None
    weights: list[tuple[Tensor, Tensor]] = []
    for row, (a, b) in enumerate(pairs):
        for key in ids:
            a_TK, b_TK = a[key].long().cpu(), b[key].long().cpu()
            other_set_T = (a_TK.sort(-1).values != b_TK.sort(-1).values).any(-1)
            other_T = (a_TK != b_TK).any(-1)
            compared += len(a_TK)
            flips += int(other_set_T.sum())
            reordered += int((other_T & ~other_set_T).sum())
            if first is None and bool(other_T.any()):
                at = int(other_T.nonzero()[0])
                first = (
                    f"{key.removesuffix('.routes')}: sequence {row}, position {at}: {sides[0]} {a_TK[at].tolist()}, "
                    f"{sides[1]} {b_TK[at].tolist()}"
                )
            router = key.removesuffix("routes") + "router"
            weights.append((a[router].float().cpu().flatten(), b[router].float().cpu().flatten()))
    counts = {"routes": compared, "other experts": flips, "other order": reordered}
    error = None
    if first is not None and subject.exact:
        error = f"{flips:,} of {compared:,} routes name other experts, {reordered:,} another order; first at {first}"
    report = compare_bits(*(torch.cat(side) for side in zip(*weights, strict=True)))
    return ScenarioResult(
        name,
        report=report,
        counts=counts,
        required=("routes",),
        exact=subject.exact,
        parted_at=first,
        error=error,
        what="router weights",
        sides=sides,
    )


# ---------------------------------------------------------------------------------------------------- 6 asynchronous


def each_version(subject: Subject) -> ScenarioResult:
    """Each version: responses half drawn when new weights arrive, each token against its version's weights."""
    engine = subject.engine(max_num_seqs=1)
    judge = subject.engine()  # holds one version's weights at a time and no keys and values of another
    prompts = subject.draw_prompts(FEW, tag="versions", params={"max_tokens": max(4, subject.response_tokens)})
    drawn: list[tuple[Prompt, RequestOutput]] = []
    expected: list[Tensor] = []
    updates = 0
    for prompt in prompts:
        engine.add(prompt.request_id, prompt.token_P, prompt.params)
        for _ in range(max(2, subject.response_tokens // 2)):
            engine.step()
        old = engine.weight_version
        before = {name: tensor.clone() for name, tensor in subject.trainer.weights()}
        basis = subject.generate(subject.engine(max_num_seqs=1), [dataclasses.replace(prompt, request_id="basis")])
        new = subject.update(basis)
        engine.update_weights(new, subject.weight_version)
        updates += 1
        (output,) = _finish(engine)
        drawn.append((prompt, output))
        by_version = {}
        for version, weights in ((old, before.items()), (subject.weight_version, new)):
            judge.model.load_weights(weights)
            by_version[version] = _replayed(judge, prompt, output)
        unknown = set(output.weight_versions) - by_version.keys()
        if unknown:
            return ScenarioResult(
                "each version",
                error=f"{output.request_id} names version {min(unknown)}, known are {sorted(by_version)}",
            )
        expected.append(torch.stack([by_version[version][at] for at, version in enumerate(output.weight_versions)]))
        moved = sum(int((a != b).sum()) for a, b in [tuple(by_version.values())])
        if not moved:
            return ScenarioResult("each version", error=f"update {updates} moved no log-prob, so nothing is shown")
    first = sum(o.weight_versions.count(min(o.weight_versions)) for _, o in drawn)
    later = sum(len(o.weight_versions) for _, o in drawn) - first
    counts = {"weight updates": updates, "tokens before an update": first, "tokens after it": later}
    return ScenarioResult(
        "each version",
        report=compare(drawn, expected),
        counts=counts,
        required=tuple(counts),
        exact=subject.exact,
        sides=("fresh engine", "rollout"),
    )


def _finish(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def _replayed(engine: Engine, prompt: Prompt, output: RequestOutput) -> Tensor:
    """fp32 (R,): log-probs of a response by one prefill under the weights that the engine's model holds."""
    response_R = prompt.answered(output).response_R
    hidden_RD = response_hidden(engine.model, prompt.token_P, response_R)
    return response_log_probs(engine.model, hidden_RD, response_R, trainer_temperature(prompt))


# ------------------------------------------------------------------------------------------------------------- helpers


def _mixed(subject: Subject, tag: str) -> list[Prompt]:
    """Half greedy, half sampled at temperature 1; each request's seed follows from its id."""
    prompts = subject.draw_prompts(max(FEW, subject.requests), tag=tag)
    return [
        dataclasses.replace(prompt, params=dataclasses.replace(prompt.params, temperature=float(at % 2)))
        for at, prompt in enumerate(prompts)
    ]


def _batch(subject: Subject, tag: str) -> tuple[list[tuple[Prompt, RequestOutput]], list[float]]:
    drawn = subject.generate(subject.engine(max_num_seqs=1), _mixed(subject, tag)[:FEW])
    return drawn, np.random.default_rng(subject.seed).standard_normal(len(drawn)).tolist()


def _alone(subject: Subject, prompts: Sequence[Prompt]) -> Drawn:
    return subject.generate(subject.engine(max_num_seqs=1), prompts)


def _flat(loss: Tensor, gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([loss, *(gradient.flatten() for gradient in gradients.values())])


def _is_route(name: str) -> bool:
    return name.endswith((".mlp.router", ".mlp.routes"))


def _same(subject: Subject, name: str, reference: Drawn, drawn: Drawn, sides: tuple[str, str]) -> ScenarioResult:
    """The same requests drawn in other circumstances: tokens, and log-probs up to the first other token."""
    lefts, rights = [], []
    parted, error = 0, None
    for (prompt, a), (_, b) in zip(reference, drawn, strict=True):
        same = _common(a.token_ids, b.token_ids)
        lefts.append(a.log_probs[:same])
        rights.append(b.log_probs[:same])
        if same < max(len(a.token_ids), len(b.token_ids)):
            parted += 1
            error = error or f"{prompt.request_id} drew other tokens from token {same} on"
    (left_BT, mask_BT), (right_BT, _) = padded(lefts), padded(rights)
    return ScenarioResult(
        name,
        report=compare_bits(left_BT, right_BT, mask_BT),
        counts={"requests": len(reference), "drew other tokens": parted},
        required=("requests",),
        exact=subject.exact,
        error=error if subject.exact else None,
        sides=sides,
    )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _with_counts(result: ScenarioResult, counts: dict[str, int], required: tuple[str, ...]) -> ScenarioResult:
    return dataclasses.replace(result, counts={**result.counts, **counts}, required=(*result.required, *required))
