"""Pairs of ground truth and answer in every notation. The tables are beside this file.

`math_answer_pairs.tsv` is what must hold; `math_known_limits.tsv` is what math-verify gets wrong, with the reason:
a row there that comes out right belongs into the first table.
"""

import csv
from collections import Counter
from pathlib import Path

import pytest

from verl_tim.tasks.math.reward import compute_score

HERE = Path(__file__).parent


def table(name):
    with (HERE / name).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))


PAIRS = table("math_answer_pairs.tsv")
LIMITS = table("math_known_limits.tsv")
KINDS = sorted({row["kind"] for row in PAIRS})


def accuracy(row, template="\\boxed{%s}"):
    result = compute_score("any", template % row["answer"], row["truth"], timeout=30.0)
    assert not result["timed_out"]
    assert not result["worker_lost"]
    return result["acc"]


@pytest.mark.parametrize("kind", KINDS)
def test_pairs(kind):
    rows = [row for row in PAIRS if row["kind"] == kind]
    wrong = [row for row in rows if accuracy(row) != {"yes": 1.0, "no": 0.0}[row["equal"]]]
    assert not wrong


def test_the_table_is_what_it_says():
    assert len(PAIRS) > 450
    assert Counter(row["equal"] for row in PAIRS)["no"] > 150
    # pairs that occur twice would hide that others are missing
    assert not [pair for pair, count in Counter((r["truth"], r["answer"]) for r in PAIRS).items() if count > 1]
    assert all(row["reason"] and row["equal"] in ("yes", "no") for row in LIMITS)


@pytest.mark.parametrize("row", LIMITS, ids=lambda row: f"{row['truth']} {row['answer']}")
def test_known_limits_are_still_wrong(row):
    assert accuracy(row) == {"yes": 0.0, "no": 1.0}[row["equal"]]


def test_every_truth_equals_itself():
    truths = sorted({row["truth"] for row in PAIRS + LIMITS})
    assert [truth for truth in truths if accuracy({"truth": truth, "answer": truth}) != 1.0] == []


@pytest.mark.parametrize("template", ["work\n#### %s", "work\nAnswer: %s", "**Answer:** $%s$", "Answer: \\boxed{%s}."])
def test_the_format_makes_no_difference(template):
    rows = [row for row in PAIRS if row["kind"] in ("integer", "fraction", "tuple") and "$" not in row["answer"]]
    for row in rows:
        assert accuracy(row, template) == {"yes": 1.0, "no": 0.0}[row["equal"]], row
