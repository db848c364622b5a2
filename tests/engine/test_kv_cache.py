"""The pool's accounting: exact after every verb, and the audit sees every way of breaking it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from verl_tim.engine.kv_cache import PagePool


def test_pages_come_and_go():
    pool = PagePool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted([*first, *second]) == [1, 2, 3, 4, 5]
    assert (pool.num_available, pool.num_owned) == (0, 5)
    pool.audit([first, second])
    pool.release(first)
    pool.audit([second])
    assert set(pool.allocate(2)) == set(first)
    with pytest.raises(AssertionError, match="1 pages asked, 0 available"):
        pool.allocate(1)


def test_a_page_released_twice_is_noticed():
    pool = PagePool(3)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="more often than owned"):
        pool.release(pages)


def test_the_audit_sees_faults():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.audit([pages])
    for tables, message in (
        ([], "reference counts differ"),
        ([np.array([pages[0]])], "reference counts differ"),
        ([np.array([0])], "null page"),
        ([np.array([pages[0], pages[0]])], "owns a page twice"),
    ):
        with pytest.raises(AssertionError, match=message):
            pool.audit(tables)
    pool.share([int(pages[0])])
    with pytest.raises(AssertionError, match="disagree on its position"):
        pool.audit([pages[::-1].copy(), pages[:1]])


def test_cached_pages_return_on_a_hit_and_are_evicted_tail_first():
    pool = PagePool(4)
    pages = pool.allocate(3)
    keys = [b"0", b"1", b"2"]
    for page, key in zip(pages.tolist(), keys, strict=True):
        pool.register(page, key)
    pool.release(pages)
    pool.audit([])
    assert (pool.num_available, pool.num_cached) == (4, 3)
    assert pool.lookup(keys) == pages.tolist()
    assert pool.lookup([b"x", b"1"]) == []
    taken = pool.allocate(2)  # one free page, and the tail of the cached prefix
    assert pages[2] in taken
    assert pool.num_evicted == 1
    assert pool.lookup(keys) == pages[:2].tolist()
    hits = pool.lookup(keys)
    assert pool.num_unowned(hits) == 2
    pool.share(hits)
    assert pool.num_available == 0
    pool.share(hits[:1])
    pool.audit([taken, np.array(hits), np.array(hits[:1])])
    pool.release(np.array(hits))
    assert (pool.num_cached, pool.num_available) == (1, 1)  # the first is still owned once
    pool.release(np.array(hits[:1]))
    pool.release(taken)
    pool.forget()
    pool.audit([])
    assert (pool.num_cached, pool.num_available) == (0, 4)
    assert pool.lookup(keys) == []


def test_forgetting_leaves_owned_pages_alone():
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.register(int(pages[0]), b"0")
    pool.share([int(pages[0])])
    pool.forget()
    pool.audit([pages, pages[:1]])
    pool.release(pages)
    pool.release(pages[:1])
    pool.audit([])
    assert pool.num_cached == 0


def test_a_second_page_with_the_same_content_stays_unknown():
    pool = PagePool(3)
    pages = pool.allocate(2).tolist()
    pool.register(pages[0], b"0")
    pool.register(pages[1], b"0")
    assert pool.lookup([b"0"]) == [pages[0]]
    pool.release(np.array([pages[0]]))
    pool.release(np.array([pages[1]]))
    pool.audit([])
    assert pool.num_cached == 1


def test_the_cost_of_a_page_does_not_grow_with_the_pool():
    def seconds(num_pages: int) -> float:
        pool = PagePool(num_pages)
        best = float("inf")
        for _ in range(9):
            began = time.thread_time()
            for _ in range(300):
                pool.release(pool.allocate(4))
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(1_000_000) < 3 * seconds(1_000)


class PoolMachine(RuleBasedStateMachine):
    """Sequences take, extend, share and give back pages in any order."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages):
        self.pool = PagePool(num_pages)
        self.tables: list[np.ndarray] = []
        self.keys: list[list[bytes]] = []

    @rule(data=st.data(), content=st.integers(0, 2))
    def begin(self, data, content):
        keys = [bytes([content, i]) for i in range(4)]
        hits = self.pool.lookup(keys)
        room = self.pool.num_available - self.pool.num_unowned(hits)
        fresh = data.draw(st.integers(0, min(room, 4 - len(hits))))
        self.pool.share(hits)
        self.tables.append(np.array([*hits, *self.pool.allocate(fresh)], np.int64))
        self.keys.append(keys)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def register(self, data):
        index = data.draw(st.integers(0, len(self.tables) - 1))
        for page, key in zip(self.tables[index].tolist(), self.keys[index], strict=False):
            self.pool.register(page, key)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data):
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))
        self.keys.pop(index)

    @rule()
    def forget(self):
        self.pool.forget()

    @invariant()
    def audited(self):
        if hasattr(self, "pool"):
            self.pool.audit(self.tables)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)
