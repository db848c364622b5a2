"""Versions by token: from the engine's stamps to what a trainer reads."""

from __future__ import annotations

import pytest

from verl_tim.rollout.versions import (
    UNKNOWN,
    VERSIONS_FIELD,
    joined,
    runs_of,
    segment_runs,
    token_versions,
    version_fields,
)


def test_runs_and_back():
    versions = [3, 3, 4, 4, 4, 6]
    fields = version_fields(runs_of(versions))
    assert fields == {
        "global_steps": 6, "min_global_steps": 3, "max_global_steps": 6, VERSIONS_FIELD: [[3, 2], [4, 3], [6, 1]],
    }  # fmt: skip
    assert token_versions(fields, 6).tolist() == versions
    assert segment_runs(fields, 6) == [(3, 2), (4, 3), (6, 1)]


def test_one_version_needs_no_runs():
    fields = version_fields(runs_of([5, 5]))
    assert fields == {"global_steps": 5, "min_global_steps": 5, "max_global_steps": 5}
    assert token_versions(fields, 3).tolist() == [5, 5, 5], "whatever an agent added has no other"


def test_parts_join():
    assert joined([[(1, 2)], [], [(1, 3), (2, 1)], [(2, 2)]]) == [(1, 5), (2, 3)]


def test_what_was_cut_off_is_left_out():
    assert token_versions(version_fields([(1, 4), (2, 4)]), 6).tolist() == [1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"min_global_steps": 1, "max_global_steps": 2},
        # of a conversation: the runs are of its first turn
        {"min_global_steps": 1, "max_global_steps": 3, VERSIONS_FIELD: [[1, 2], [2, 1]]},
        {"min_global_steps": None, "max_global_steps": None},
        {},
    ],
)
def test_what_nobody_recorded_is_unknown(fields):
    assert token_versions(fields, 5).tolist() == [UNKNOWN] * 5


def test_a_part_must_say_under_which_weights_its_tokens_were_drawn():
    assert segment_runs({}, 0) == []
    with pytest.raises(ValueError, match="names versions 1 to 2"):
        segment_runs({"min_global_steps": 1, "max_global_steps": 2}, 4)
    with pytest.raises(ValueError, match="is not of 4 tokens"):
        segment_runs({VERSIONS_FIELD: [[1, 2], [2, 1]]}, 4)
