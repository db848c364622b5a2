"""The row table: what goes in comes out, columns grow, and the audit sees every way of breaking it."""

from __future__ import annotations

import numpy as np
import pytest

from verl_tim.engine import Request, SamplingParams
from verl_tim.engine.core import Drawn, RequestState
from verl_tim.engine.rows import RowTable


def request(arrival: int = 0, prompt_len: int = 3, drawn: int = 0, **changes) -> Request:
    record = Drawn(
        np.arange(10, 10 + drawn, dtype=np.int32),
        -np.arange(drawn, dtype=np.float32) / 3,
        np.linspace(0.1, 1, drawn, dtype=np.float32),
        np.arange(20, 20 + drawn, dtype=np.int32),
        np.arange(drawn, dtype=np.int64) + 2**40,
    )
    values = {
        "request_id": f"r{arrival}",
        "prompt_P": np.arange(1, 1 + prompt_len),
        "params": SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1),
        "seed": 2**62 + 1,
        "max_total": 1000,
        "stop_ids": (1, 2, 3, 4, 5, 6),
        "arrival": arrival,
        "drawn": record,
        "state": RequestState.RUNNING,
    }
    return Request(**{**values, **changes})


def table(max_num_seqs: int = 3) -> RowTable:
    return RowTable(max_num_seqs, 1000, 4)


def test_a_request_leaves_with_what_it_brought():
    rows = table()
    before = request(drawn=5).drawn
    subject = request(drawn=5)
    slot = rows.load(subject, np.array([3, 9]), 4)
    assert len(subject.drawn) == 0
    rows.audit()
    assert [token for token in range(9) if rows.stops(np.array([slot]), np.array([token])).any()] == [1, 2, 3, 4, 5, 6]
    assert (rows.top_k_S[slot], rows.seed_S[slot]) == (7, 2**62 + 1)
    ((out, pages),) = rows.unload(np.array([slot]))
    assert out is subject
    assert pages.tolist() == [3, 9]
    for name, column in vars(before).items():
        assert getattr(out.drawn, name).tobytes() == column.tobytes(), name
    rows.audit()
    assert len(rows) == 0


def test_the_next_owner_of_a_slot_sees_nothing_of_the_last():
    rows = table(max_num_seqs=1)
    slot = rows.load(request(drawn=9), np.array([3, 9, 5]), 4)
    rows.unload(np.array([slot]))
    rows.load(request(1, prompt_len=1, stop_ids=(8,)), np.array([7]), 0)
    rows.audit()
    assert [token for token in range(9) if rows.stops(np.array([0]), np.array([token])).any()] == [8]
    ((out, pages),) = rows.unload(np.array([0]))
    assert (len(out.drawn), pages.tolist()) == (0, [7])


def test_many_stop_tokens_are_nobody_elses_cost():
    """A request may name the whole vocabulary; the table that every step looks through stays narrow."""
    rows = table()
    columns = rows.stop_SK.shape[1]
    wide = rows.load(request(stop_ids=tuple(range(1000))), np.array([3]), 0)
    narrow = rows.load(request(1, stop_ids=(1500,)), np.array([4]), 0)
    slots = np.array([narrow, wide])
    assert rows.stop_SK.shape[1] == columns
    assert all(rows.stops(slots, np.array([token, token])).tolist() == [False, True] for token in range(1000))
    assert rows.stops(slots, np.array([1500, 1500])).tolist() == [True, False]
    rows.unload(np.array([wide]))
    again = rows.load(request(2, stop_ids=(5,)), np.array([3]), 0)
    assert again == wide
    assert not rows.stops(np.array([again]), np.array([999])).any(), "of the sequence before"


def test_columns_grow_with_the_longest_sequence():
    rows = table()
    slot = rows.load(request(prompt_len=250), np.arange(1, 64), 0)
    for index in range(300):
        one = np.ones(1, np.float32)
        rows.append(np.array([slot]), np.array([index]), -one * index, one, np.array([index]), index)
    assert 550 <= rows.token_SL.shape[1] <= 1000
    ((out, _),) = rows.unload(np.array([slot]))
    assert out.drawn.token_N.tolist() == list(range(300))
    assert out.drawn.log_prob_N.tolist() == [-index for index in range(300)]
    assert out.drawn.version_N.tolist() == list(range(300))


def test_pages_are_appended_in_order():
    rows = table()
    slots = np.array([rows.load(request(i), np.array([10 + i]), 0) for i in range(3)])
    rows.add_pages(slots, np.array([2, 0, 1]), np.array([21, 22, 23]))
    assert [pages.tolist() for pages in rows.block_tables()] == [[10, 21, 22], [11], [12, 23]]
    rows.audit()


def test_a_sequence_cannot_draw_more_than_it_may():
    rows = table()
    slot = rows.load(request(drawn=2, max_total=5), np.array([1, 2]), 0)
    one = np.ones(1, np.float32)
    with pytest.raises(AssertionError, match="drew more than it may"):
        rows.append(np.array([slot]), np.array([1]), one, one, np.array([1]), 0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda rows: rows.order.__setitem__(0, rows.order[1]), "a slot is used twice"),
        (lambda rows: rows._free_slots.append(int(rows.order[0])), "a slot in use counts as free"),
        (lambda rows: rows._free_slots.clear(), "a slot is lost"),
        (lambda rows: rows.order.__setitem__(slice(None), rows.order[::-1].copy()), "not in arrival order"),
        (lambda rows: rows.num_computed_S.__setitem__(rows.order[0], 3), "nothing left to compute"),
        (lambda rows: rows.max_total_S.__setitem__(rows.order[0], 3), "at its length limit"),
        (lambda rows: rows.num_pages_S.__setitem__(rows.order[0], 0), "computed tokens without a page"),
        (lambda rows: rows.page_SM.__setitem__((rows.order[0], 5), 1), "not zero behind its end"),
    ],
)
def test_the_audit_sees_faults(fault, message):
    rows = table()
    for arrival in range(2):
        rows.load(request(arrival), np.array([1 + arrival]), 1)
    rows.audit()
    fault(rows)
    with pytest.raises(AssertionError, match=message):
        rows.audit()
