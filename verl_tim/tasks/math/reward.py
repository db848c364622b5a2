"""verl's reward function for mathematics: 1 if the answer equals the ground truth, 0 if not, nothing shaped.

    reward:
      custom_reward_function:
        path: pkg://verl_tim.tasks.math.reward
        name: compute_score
        reward_kwargs: {timeout: 5, workers: 2, memory_mb: 1024}

An answer is first compared as text and as an integer (`plain`), which decides nearly all of them; what is left goes
to math-verify in a worker process (`pool`, `worker`), where an answer that hangs or eats memory costs its own sample
and nothing else.

Sources: verl 0.9.1 trainer/ppo/reward.py:36 (how it is loaded; `reward_kwargs` become arguments),
experimental/reward_loop/reward_manager/naive.py:69 (how it is called: in a thread of a Ray actor, one response at a
time; the keys of a returned dict become `reward_extra_info`, which must be the same keys for every response).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verl_tim.tasks.errors import InputError
from verl_tim.tasks.math.answer import check_answer_format, extract_answer
from verl_tim.tasks.math.plain import MAX_ANSWER_CHARS, as_integer, as_words, base, clean, compact, for_math_verify
from verl_tim.tasks.math.pool import check_installed, shared_pool

_PREDICTION_CHARS = 256

# When verl, or the check before a start, loads this module: not when the first answer needs a worker.
check_installed()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    timeout: float = 5.0,
    workers: int = 2,
    memory_mb: int = 1024,
    answer_format: str | None = None,
    require_think_end: bool = False,
    wrong_score: float = 0.0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score of one response.

    Args:
        data_source: unused; any.
        solution_str: the response's text.
        ground_truth: the true answer, or a list of answers that are all true.
        extra_info: the row's `extra_info`; `answer_format` in it says where the answer is looked for
            (`answer.extract_answer`), `auto` if it says nothing.
        timeout: seconds for one comparison by math-verify.
        workers: worker processes of this process at most (verl has `reward.num_workers` of these).
        memory_mb: address space of a worker.
        answer_format: overrides the row's.
        require_think_end: a response without exactly one `</think>` scores as if it had no answer.
        wrong_score: score of every response that is not right; verl's scorer of DAPO gives -1.
        kwargs: what verl passes to every reward function; unused.

    Returns:
        `score`; `acc` (1.0 or 0.0, which verl's validation reports); `pred`, the answer, which verl votes by; and the
        reasons for no match, 1.0 or 0.0 each: `answer_missing`, `answer_unreadable` (math-verify cannot parse it, or
        it is longer than any answer), `truth_unreadable` (the data's fault: only an equal text could have matched),
        `timed_out`, `worker_lost` (it died or ran out of memory). Always these keys.

    Raises:
        InputError: no ground truth, an unknown answer format, settings that cannot be, math-verify not installed.
        RuntimeError: no worker can be started on this machine.
    """
    _check_settings(timeout=timeout, workers=workers, memory_mb=memory_mb)
    truths = _truths(ground_truth)
    wanted = answer_format or (extra_info or {}).get("answer_format") or "auto"
    check_answer_format(wanted, "reward.custom_reward_function.reward_kwargs.answer_format")
    answer = None
    if isinstance(solution_str, str):
        answer = extract_answer(solution_str, wanted, require_think_end=require_think_end)
    verdicts = ["missing"] if answer is None else []
    if answer is not None:
        for truth in truths:
            verdicts.append(_compare(truth, answer, timeout, workers, memory_mb))
            if verdicts[-1] == "equal":
                break
    right = "equal" in verdicts
    return {
        "score": 1.0 if right else float(wrong_score),
        "acc": float(right),
        "pred": (answer or "")[:_PREDICTION_CHARS],
        **{name: float(not right and any(v in of for v in verdicts)) for name, of in _REASONS.items()},
    }


_REASONS: Mapping[str, tuple[str, ...]] = {
    "answer_missing": ("missing",),
    # `failed`: math-verify raised at it
    "answer_unreadable": ("answer_unreadable", "failed"),
    "truth_unreadable": ("truth_unreadable",),
    "timed_out": ("timed_out",),
    "worker_lost": ("lost", "out_of_memory"),
}


def _compare(truth: str, answer: str, timeout: float, workers: int, memory_mb: int) -> str:
    if len(answer) > MAX_ANSWER_CHARS:
        return "answer_unreadable"
    truth, answer = clean(truth), clean(answer)
    if not answer:
        return "answer_unreadable"
    if compact(truth) == compact(answer):
        return "equal"
    integers = as_integer(truth), as_integer(answer)
    if None not in integers:
        return "equal" if integers[0] == integers[1] else "different"
    words = as_words(truth), as_words(answer)
    if words != (None, None):
        # words equal only words; `different` also where one side is mathematics
        return "equal" if words[0] == words[1] else "different"
    bases = base(truth), base(answer)
    if None not in bases and bases[0] != bases[1]:
        return "different"
    return shared_pool(workers, memory_mb * 2**20).ask(for_math_verify(truth), for_math_verify(answer), timeout)


def _truths(ground_truth: Any) -> list[str]:
    values = (
        ground_truth if isinstance(ground_truth, Iterable) and not isinstance(ground_truth, str) else [ground_truth]
    )
    truths = []
    for value in values:
        text = "" if value is None else str(value).strip()
        truths.append(extract_answer(text, "boxed") or text if "\\boxed" in text else text)
    if not truths or not all(truths):
        raise InputError(
            f"reward_model.ground_truth: is {ground_truth!r}; every row needs a true answer: prepare the data with "
            "`verl-tim data`, which refuses rows without one"
        )
    return truths


def _check_settings(*, timeout: float, workers: int, memory_mb: int) -> None:
    where = "reward.custom_reward_function.reward_kwargs"
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 3600:
        raise InputError(f"{where}.timeout: must be seconds above 0, got {timeout!r}")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise InputError(f"{where}.workers: must be an integer of at least 1, got {workers!r}")
    # importing sympy takes 60 MB of address space
    if isinstance(memory_mb, bool) or not isinstance(memory_mb, int) or memory_mb < 256:
        raise InputError(f"{where}.memory_mb: must be an integer of at least 256, got {memory_mb!r}")
