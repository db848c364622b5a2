"""Answers in plain form: which spellings of one answer are taken for the same before any algebra.

Most answers in training are integers or equal the ground truth to the letter. Those are decided here, in
microseconds and in the caller's own process; only the rest goes to math-verify. The plain form also repairs
notations that math-verify misreads (unicode signs, `1e3`, `5 apples`) and keeps words from being read as products of
letters, for which `even` equals `veen`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from types import MappingProxyType

# Longer texts are no answers; see `reward`. The longest of MATH's has 159 characters (verl 0.9.1
# utils/reward_score/math_dapo.py, `compute_score`).
MAX_ANSWER_CHARS = 1024

# Digits beyond which an integer is left to the worker: int() and str() are quadratic.
_MAX_DIGITS = 64

_SIGNS: Mapping[str, str] = MappingProxyType(
    {
        "−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-",
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "∗": "*",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ",
        "∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ",
        "∅": r"\emptyset ", "∈": r"\in ", "ℝ": r"\mathbb{R}",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}",
        "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
        "“": '"', "”": '"', "‘": "'", "’": "'", "′": "'",
    }
)  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_SQRT = re.compile(r"√\s*(\((?P<group>[^()]*)\)|(?P<word>\w+))")

# (?<!\\): a double backslash ends a row of a matrix
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:! ]|q?quad(?![A-Za-z])|hspace\{[^{}]*\})|~|\s+")
_STYLE = re.compile(r"\\(?:displaystyle|textstyle|left|right|big|Big|bigg|Bigg|limits)(?![A-Za-z])")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_WRAPPED = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))

_SPACE_OUTSIDE_DIGITS = re.compile(r"(?<!\d) | (?!\d)")

_INTEGER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:[, ]\d{3})+)(?:\.0+)?")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,6})")
_WITH_UNIT_WORDS = re.compile(r"(\\?\$?[+-]?\d[\d,]*(?:\.\d+)?)\s+([A-Za-z]{3,}(?:[ -][A-Za-z]+)*)")
_MIXED = re.compile(r"([+-]?\d+) (\d+)/(\d+)")
_BASE = re.compile(r"[0-9A-Fa-f.]+_\{?(\d+)\}?")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '\-][^\W\d_]+)*")
_SHORT_WORDS = frozenset({"no", "yes", "odd", "all", "one", "two", "six", "ten", "mon", "tue", "wed"})
# Words that are mathematics, not text.
_MATHEMATICS = re.compile(
    "alpha|beta|gamma|delta|theta|lambda|infty|infinity|sqrt|frac|log|exp|max|min|gcd|lcm|mod"
    "|(?:arc)?(?:sin|cos|tan)|sinh|cosh|tanh|cot|sec|csc"
)


def clean(text: str) -> str:
    """One answer without its dressing, still LaTeX: no math delimiters or emphasis around it, no full stop behind
    it, no spacing or sizing commands; `\\dfrac` is `\\frac`; unicode signs are commands."""
    text = _SPACES.sub(" ", _unicode_to_latex(text))
    before = None
    while before != text:
        before = text
        text = text.strip().rstrip(".,;:").strip()
        for left, right in _WRAPPED:
            inside = text[len(left) : -len(right)]
            if (
                text.startswith(left)
                and text.endswith(right)
                and len(text) > len(left) + len(right)
                and left not in inside
                and not inside.endswith("\\")
            ):
                text = inside
    text = text.replace(r"\varnothing", r"\emptyset")
    return " ".join(_FRACTION.sub(r"\\frac", _STYLE.sub("", text)).split())


def compact(text: str) -> str:
    """Of a cleaned answer, without any space and without text commands around words: equal strings, equal answers. A
    space between digits stays: `1 2` is not `12`."""
    text = _TEXT.sub(lambda found: found.group(1), text)
    return _SPACE_OUTSIDE_DIGITS.sub("", text).replace("\\%", "%").replace("\\$", "")


def as_integer(text: str) -> int | None:
    """The integer that a cleaned answer is (`042`, `1,000`, `1 000`, `+7`, `12.00`); None for anything else."""
    text = text.replace(r"{,}", ",").replace(r"\$", "").replace("$", "").strip()
    if not _INTEGER.fullmatch(text) or len(text) > _MAX_DIGITS or not text.isascii():
        return None
    return int(text.partition(".")[0].replace(",", "").replace(" ", ""))


def as_words(text: str) -> str | None:
    """The words a cleaned answer is, in small letters; None where it is mathematics, a single letter included.

    Words are what stands in a text command, or letters alone, four or more (`even`, `Tuesday`, `no solution`), or one
    of a few short ones. Shorter ones may be products of variables.
    """
    inside = _TEXT.fullmatch(text)
    plain = _TEXT.sub(lambda found: f" {found.group(1)} ", text) if inside or "\\" in text else text
    plain = " ".join(plain.split()).strip(" .")
    if not _WORDS.fullmatch(plain):
        return None
    words = plain.casefold()
    first = words.split(" ")[0]
    if _MATHEMATICS.fullmatch(first) or len(words) == 1:
        return None
    if inside or len(words) > 3 or words in _SHORT_WORDS:
        return words
    return None


def base(text: str) -> int | None:
    """The base that a cleaned answer names (`12_8`, `1A_{16}`); math-verify reads past it."""
    found = _BASE.fullmatch(text)
    return int(found.group(1)) if found and len(found.group(1)) <= 2 else None


def for_math_verify(text: str) -> str:
    """A cleaned answer as math-verify reads it best: `1e3` as a product, `1 1/2` as a mixed number, no unit words
    behind a number."""
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific:
        return rf"{scientific.group(1)}\times 10^{{{int(scientific.group(2))}}}"
    mixed = _MIXED.fullmatch(text)
    if mixed:
        return rf"{mixed.group(1)}\frac{{{mixed.group(2)}}}{{{mixed.group(3)}}}"
    with_unit = _WITH_UNIT_WORDS.fullmatch(text)
    if with_unit and not _MATHEMATICS.fullmatch(with_unit.group(2).split(" ")[0].casefold()):
        text = with_unit.group(1)
    return text


def _unicode_to_latex(text: str) -> str:
    if text.isascii():
        return text
    text = _SUPERSCRIPT_RUN.sub(lambda run: f"^{{{run.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _SQRT.sub(lambda found: rf"\sqrt{{{found.group('group') or found.group('word')}}}", text)
    text = "".join(_SIGNS.get(character, character) for character in text)
    # full-width digits and letters, non-breaking spaces
    return unicodedata.normalize("NFKC", text)
