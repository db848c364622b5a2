"""Errands: one after the other in a thread of their own, with their results, errors and times."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from verl_tim.training.errands import Errands


def test_an_errand_is_done_in_another_thread_and_gives_its_result():
    errands = Errands()
    first = errands.send(lambda number: (number, threading.get_ident()), 3)
    number, thread = first.result()
    assert number == 3
    assert thread != threading.get_ident()
    assert errands.send(threading.get_ident).result() == thread, "one thread does them all"
    assert first.result() == (3, thread), "a result can be asked for again"


def test_they_are_done_in_the_order_in_which_they_were_sent():
    errands, done, go = Errands(), [], threading.Event()
    errands.send(go.wait, 30)
    sent = [errands.send(done.append, number) for number in range(5)]
    assert done == []
    go.set()
    sent[-1].result()
    assert done == [0, 1, 2, 3, 4]


def test_an_error_comes_with_the_result_and_the_next_errand_is_done():
    errands = Errands()
    broken = errands.send(lambda: [][1])
    assert errands.send(lambda: 7).result() == 7
    with pytest.raises(IndexError):
        broken.result()


def test_a_delay_ends_where_the_result_is_wanted():
    errands, begun = Errands(), threading.Event()
    errand = errands.send(begun.set, delay=600)
    assert not begun.wait(0.05)
    errand.result()
    assert begun.is_set()


def test_a_delay_ends_by_itself():
    begun = threading.Event()
    Errands().send(begun.set, delay=0.01)
    assert begun.wait(30)


class Clock:
    """Goes on by what is added to it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("verl_tim.training.errands.time", SimpleNamespace(perf_counter=lambda: self.now))

    def add(self, seconds):
        self.now += seconds


def done_so_far(errands):
    """Waits for all that were sent, without asking for a result."""
    done = threading.Event()
    errands.send(done.set)
    assert done.wait(30)


def test_their_time_is_told_once(monkeypatch):
    clock, errands = Clock(monkeypatch), Errands()

    def broken():
        clock.add(2)
        raise ValueError

    errands.send(clock.add, 3)
    errands.send(broken)
    done_so_far(errands)
    assert errands.seconds() == 5
    assert errands.seconds() == 0


def test_time_in_which_somebody_waited_is_none_of_theirs(monkeypatch):
    clock, errands = Clock(monkeypatch), Errands()
    errands.send(clock.add, 3)
    done_so_far(errands)
    late = errands.send(clock.add, 4, delay=600)
    clock.add(7)  # it has not begun
    late.result()
    assert errands.seconds() == 3
