"""Where the answer stands in a response."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tim.tasks.errors import InputError
from verl_tim.tasks.math.answer import ORDER, extract_answer, last_box


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"first \boxed{5}, then \boxed{6}.", "6"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed{x=\boxed{5}}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed 5 and more", "5"),
        (r"$\boxed5$", "5"),
        (r"\fbox{7}", "7"),
        (r"\boxedsep{7}", None),
        (r"\boxed{5", None),
        (r"\boxed{5} so \boxed{6", None),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed", None),
        ("5", None),
        ("", None),
        (r"<think>\boxed{4}</think>\boxed{5}", "5"),
        (r"<think>\boxed{4}</think>so it is five", None),
        (r"\boxed{5}<|im_end|>\boxed{6}", "5"),
        ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("\\boxed{1\n}", "1"),
    ],
)
def test_boxed(response, answer):
    assert extract_answer(response, "boxed") == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("work\nAnswer: 34", "34"),
        ("Answer: 33\nno\nAnswer: 34", "34"),
        ("answer : 34\n", "34"),
        ("**Answer:** 34", "34"),
        ("**Answer: 34**", "34"),
        ("Answer:\n34", "34"),
        ("Answer: $34$ and then\nmore", "$34$ and then"),
        (r"Answer: \boxed{34}.", "34"),
        (r"The box: \boxed{34}", "34"),
        ("The answer is 34", None),
        ("Answer:", None),
        ("Answer: 34<|im_end|>", "34"),
    ],
)
def test_answer_line(response, answer):
    assert extract_answer(response, "answer_line") == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("3+4=7\n#### 7", "7"),
        ("#### 6\n#### 7\n", "7"),
        ("####7", "7"),
        ("#### $1,234.50 dollars", "$1,234.50 dollars"),
        ("####\n7", "7"),
        (r"\boxed{7}", "7"),
        ("### 7", None),
        ("####", None),
    ],
)
def test_hash(response, answer):
    assert extract_answer(response, "hash") == answer


def test_auto_prefers_the_box_and_unknown_formats_are_an_error():
    assert extract_answer("#### 1\nAnswer: 2\n\\boxed{3}") == "3"
    assert extract_answer("#### 1\nAnswer: 2") == "2"
    assert extract_answer("#### 1") == "1"
    with pytest.raises(InputError, match="unknown format 'xml'; known formats: auto, boxed, answer_line, hash"):
        extract_answer("1", "xml")


def test_one_think_end_may_be_asked_for():
    assert extract_answer(r"<think></think>\boxed{5}", require_think_end=True) == "5"
    assert extract_answer(r"\boxed{5}", require_think_end=True) is None
    assert extract_answer(r"</think></think>\boxed{5}", require_think_end=True) is None


@pytest.mark.parametrize(
    "part", ["\\boxed{", "\\boxed{}", "{", "}", "\\", "Answer:", "Answer ", "answer   ", "####", "</think>", "$", "\n"]
)
def test_linear_in_the_length(part):
    response = part * (2_000_000 // len(part))
    start = time.perf_counter()
    for answer_format in ORDER:
        extract_answer(response, answer_format)
    assert time.perf_counter() - start < 10.0


@given(st.text(alphabet="\\boxed{}Answer: #5$\n", max_size=60))
@settings(max_examples=300)
def test_any_text_has_an_answer_or_none(text):
    for answer_format in ORDER:
        answer = extract_answer(text, answer_format)
        assert answer is None or answer == answer.strip() != ""
    box = last_box(text)
    assert box is None or box in text
