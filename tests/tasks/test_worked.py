"""Worked solutions end in the problem's answer, whatever the difficulty; each line follows from the one before."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tim.tasks.catalog import get_task, resolve_difficulty
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.problems import Problem, stream_pool
from verl_tim.tasks.verifier import extract_answer, verify
from verl_tim.tasks.worked import check_has_worked_solutions, worked_solution

CHAIN_SUM = get_task("chain_sum")


@given(
    seed=st.integers(0, 10**6),
    least=st.integers(1, 3),
    more=st.integers(0, 3),
    digits=st.integers(1, 4),
    negation=st.booleans(),
)
@settings(max_examples=30)
def test_running_totals_end_in_the_answer(seed, least, more, digits, negation):
    difficulty = {"min_terms": least, "max_terms": least + more, "max_digits": digits, "allow_negation": negation}
    for problem in islice(stream_pool(CHAIN_SUM, resolve_difficulty(CHAIN_SUM, difficulty), seed, "train"), 20):
        lines = worked_solution(CHAIN_SUM, problem)
        assert len(lines) == max(1, problem.metadata["num_terms"] - 1)
        entry = {"answer": problem.answer, "metadata": problem.metadata}
        assert verify(CHAIN_SUM, extract_answer("\n".join(lines)), entry) == 1.0


def test_running_totals_by_hand():
    problem = Problem("q", "2", '{"expression": "6 - 9 + 4 + 1", "num_terms": 4}')
    assert worked_solution(CHAIN_SUM, problem) == ["-3", "1", "2"]


def test_a_solution_that_misses_the_answer_is_a_fault():
    with pytest.raises(RuntimeError, match="does not end in '7'"):
        worked_solution(CHAIN_SUM, Problem("q", "7", '{"expression": "6 - 9", "num_terms": 2}'))


def test_tasks_without_worked_solutions_are_refused():
    with pytest.raises(
        InputError, match=r"warmed up on chain_sum, not on gsm_symbolic; .*actor_rollout_ref\.model\.path"
    ):
        check_has_worked_solutions(get_task("gsm_symbolic"))
