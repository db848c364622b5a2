"""math-verify's verdict on a ground truth and an answer. Runs in a worker: it may hang, and it may eat memory."""

from __future__ import annotations

import logging
from typing import Any, Literal

from math_verify import LatexExtractionConfig, parse, verify

Verdict = Literal["equal", "different", "truth_unreadable", "answer_unreadable"]

# math-verify warns once per process that its timeouts are off; the worker has its own.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Only LaTeX in a box: math-verify's search for numbers in running text would take an answer from whatever it finds.
_AS_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)


def judge(truth: str, answer: str) -> Verdict:
    """Whether two answers in the form of `plain.for_math_verify` are equal as mathematics.

    Numbers with a decimal point are compared to six places, everything else symbolically; sets without order, tuples
    with. A percentage equals its fraction and its number (`50%`, `0.5`, `50`); units are ignored. What math-verify
    0.9.0 gets wrong is in tests/tasks/math/known_limits.py.

    No timeout of math-verify's own is used: they are `signal.alarm`, which fails outside a main thread, and count
    whole seconds.
    """
    parsed_truth = _parse(truth)
    if not parsed_truth:
        return "truth_unreadable"
    parsed_answer = _parse(answer)
    if not parsed_answer:
        return "answer_unreadable"
    # the order matters to math-verify: ground truth first
    if verify(parsed_truth, parsed_answer, timeout_seconds=None):
        return "equal"
    bare_truth, bare_answer = (_without_percent(text) for text in (truth, answer))
    if (bare_truth is None) != (bare_answer is None):
        # math-verify takes 50% for 50, but not 12.5% for 12.5
        numbers = _parse(bare_truth or truth), _parse(bare_answer or answer)
        if all(numbers) and verify(*numbers, timeout_seconds=None):
            return "equal"
    return "different"


def _parse(text: str) -> list[Any]:
    bare = _without_percent(text)
    # math-verify sees a percent sign behind the formula only
    wrapped = f"\\boxed{{{text}}}" if bare is None else f"${bare}$%"
    return parse(wrapped, extraction_config=_AS_LATEX, fallback_mode="no_fallback", parsing_timeout=None)


def _without_percent(text: str) -> str | None:
    """The number of a percentage; None for anything else."""
    for sign in ("\\%", "%", "percent"):
        if text.endswith(sign):
            return text.removesuffix(sign).strip()
    return None
