"""What is decided without algebra: the plain form, integers, words, bases."""

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tim.tasks.math.plain import as_integer, as_words, base, clean, compact, for_math_verify

with (Path(__file__).parent / "math_answer_pairs.tsv").open(encoding="utf-8", newline="") as stream:
    ANSWERS = sorted({row[key] for row in csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
                      for key in ("truth", "answer")})  # fmt: skip


def test_cleaning_twice_is_cleaning_once():
    assert [answer for answer in ANSWERS if clean(clean(answer)) != clean(answer)] == []


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("$5$.", "5"),
        (r"\(\dfrac{1}{2}\).", r"\frac{1}{2}"),
        ("**5**", "5"),
        ("$5$ and $6$", "$5$ and $6$"),
        (r"\left( 1,\, 2 \right)", "( 1, 2 )"),
        ("\\begin{pmatrix}1\\\\ 2\\end{pmatrix}", "\\begin{pmatrix}1\\\\ 2\\end{pmatrix}"),
        (r"\leftarrow", r"\leftarrow"),
        ("x² ≤ ½", r"x^{2} \le \frac{1}{2}"),
        ("√2", r"\sqrt{2}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("１２", "12"),
        ("0.", "0"),
        ("...", ""),
        ("", ""),
    ],
)
def test_cleaning(text, cleaned):
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("42", 42),
        ("042", 42),
        ("-7", -7),
        ("+7", 7),
        ("1,000", 1000),
        ("1 000", 1000),
        ("1{,}000", 1000),
        (r"\$1,000", 1000),
        ("12.00", 12),
        ("1,00", None),
        ("1 2", None),
        ("12.5", None),
        ("1e3", None),
        ("x", None),
        ("", None),
        ("٣", None),
        ("²", None),
        ("9" * 65, None),
    ],
)
def test_integers(text, integer):
    assert as_integer(text) == integer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (r"\text{Monday}", "monday"),
        ("Monday", "monday"),
        (r"\text{No solution}", "no solution"),
        (r"\text{ab}", "ab"),
        ("even", "even"),
        ("no", "no"),
        ("ab", None),
        ("xyz", None),
        ("B", None),
        (r"\text{B}", None),
        ("sin x", None),
        ("5 apples", None),
        (r"\text{row }2", None),
        (r"\frac{a}{b}", None),
        ("", None),
    ],
)
def test_words(text, words):
    assert as_words(text) == words


def test_equal_texts_are_equal_answers():
    assert compact(r"x + 1") == compact("x+1")
    assert compact(r"50\%") == compact("50 %")
    assert compact("1 2") != compact("12")
    assert compact("(1, 2)") == compact("(1,2)")


def test_bases():
    assert (base("12_8"), base("1A_{16}"), base("12"), base("x_1")) == (8, 16, None, None)


def test_what_math_verify_gets():
    assert for_math_verify("1.5e-3") == r"1.5\times 10^{-3}"
    assert for_math_verify("3 1/2") == r"3\frac{1}{2}"
    assert for_math_verify("5 dollars") == "5"
    assert for_math_verify("5 sin") == "5 sin"
    assert for_math_verify("1e9999999") == "1e9999999", "no exponent of a million digits"


@given(st.text(max_size=40) | st.text(alphabet="0123456789.,eE+- $%\\{}()textfracsqrt√²", max_size=40))
@settings(max_examples=300)
def test_any_text_has_a_plain_form(text):
    cleaned = clean(text)
    compact(cleaned)
    as_words(cleaned)
    for_math_verify(cleaned)
    integer = as_integer(cleaned)
    assert integer is None or as_integer(str(integer)) == integer
