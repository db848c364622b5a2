"""CUDA as the runner's device, against a stand-in for torch.cuda that keeps a diary: what is called, in which order."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch

from verl_tim.engine.device import CudaDevice


class Diary:
    """Attributes of torch.cuda that CudaDevice uses."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.broken = False
        diary, lines = self, self.lines

        class Stream:
            def __init__(self, device=None, name="side") -> None:
                self.name = name

            def wait_stream(self, other) -> None:
                lines.append(f"{self.name} waits for {other.name}")

        class Graph:
            def capture_begin(self, pool, capture_error_mode) -> None:
                lines.append(f"begin in {pool}, {capture_error_mode}")

            def capture_end(self) -> None:
                lines.append("end")
                if diary.broken:
                    raise RuntimeError("the capture is invalid")

            def replay(self) -> None:
                lines.append("replay")

        class Event:
            def record(self, stream) -> None:
                lines.append(f"record on {stream.name}")

            def synchronize(self) -> None:
                lines.append("synchronize")

        @contextlib.contextmanager
        def stream(which):
            lines.append(f"enter {which.name}")
            yield
            lines.append(f"leave {which.name}")

        self.main = Stream(name="main")
        self.Stream, self.CUDAGraph, self.Event, self.stream = Stream, Graph, Event, stream
        self.pools = 0

    def graph_pool_handle(self) -> str:
        self.pools += 1
        return f"pool {self.pools}"

    def current_stream(self, device):
        return self.main

    def device(self, device):
        return contextlib.nullcontext()

    def synchronize(self, device) -> None:
        self.lines.append("device synchronised")

    def empty_cache(self) -> None:
        self.lines.append("cache emptied")


@pytest.fixture
def diary(monkeypatch):
    made = Diary()
    for name in ("Stream", "CUDAGraph", "Event", "stream", "graph_pool_handle", "current_stream", "device",
                 "synchronize", "empty_cache"):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def test_a_capture_runs_aside_and_both_streams_keep_their_order(diary):
    device = CudaDevice(torch.device("cuda"))
    assert device.device == torch.device("cuda", 0)
    replay = device.capture(lambda: diary.lines.append("work"))
    device.submit(replay)
    assert diary.lines == [
        "side waits for main",
        "enter side",
        "begin in pool 1, thread_local",
        "work",
        "end",
        "leave side",
        "main waits for side",
        "replay",
    ]


def test_captures_share_a_pool_until_they_are_forgotten(diary):
    device = CudaDevice(torch.device("cuda", 0))
    for _ in range(2):
        device.capture(lambda: None)
    device.forget_captures()
    device.capture(lambda: None)
    begins = [line for line in diary.lines if line.startswith("begin")]
    assert [line.split(",")[0] for line in begins] == ["begin in pool 1", "begin in pool 1", "begin in pool 2"]
    assert diary.lines.index("device synchronised") < diary.lines.index("cache emptied")


def test_a_broken_capture_tells_its_cause(diary):
    diary.broken = True

    def work() -> None:
        raise ValueError("a value was read back")

    with pytest.raises(ValueError, match="a value was read back"):
        CudaDevice(torch.device("cuda", 0)).capture(work)
    assert diary.lines[-2:] == ["begin in pool 1, thread_local", "end"]


class Stray:
    """What an engine that is gone leaves behind: it lies in a cycle, and its end is written down."""

    def __init__(self, diary: Diary) -> None:
        self.lines, self.itself = diary.lines, self

    def __del__(self) -> None:
        self.lines.append("a stray graph ends")


@pytest.fixture
def eager_collector():
    """Collects whenever something is allocated."""
    before, was_on = gc.get_threshold(), gc.isenabled()
    gc.enable()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)
    gc.enable() if was_on else gc.disable()


def allocate() -> list:
    return [[number] for number in range(1000)]


def test_no_garbage_is_collected_during_a_capture(diary, eager_collector):
    """The end of another graph, which is forbidden there, broke captures whenever the collector came by."""

    def work() -> None:
        Stray(diary)
        allocate()
        diary.lines.append("work")

    CudaDevice(torch.device("cuda", 0)).capture(work)
    allocate()
    assert "a stray graph ends" in diary.lines, "the collector is on again"
    assert diary.lines.index("end") < diary.lines.index("a stray graph ends")


def test_a_broken_capture_leaves_the_collector_as_it_was(diary, eager_collector):
    def work() -> None:
        raise ValueError("planted")

    for was_on in (True, False):
        gc.enable() if was_on else gc.disable()
        with pytest.raises(ValueError, match="planted"):
            CudaDevice(torch.device("cuda", 0)).capture(work)
        assert gc.isenabled() == was_on


def test_the_collector_keeps_still_until_the_last_of_several_captures_has_ended(diary):
    first_is_in, first_may_end = threading.Event(), threading.Event()
    device = CudaDevice(torch.device("cuda", 0))

    def long_work() -> None:
        first_is_in.set()
        assert first_may_end.wait(60)

    thread = threading.Thread(target=device.capture, args=(long_work,))
    thread.start()
    assert first_is_in.wait(60)
    CudaDevice(torch.device("cuda", 0)).capture(lambda: None)
    assert not gc.isenabled()
    first_may_end.set()
    thread.join()
    assert gc.isenabled()


def test_a_mark_is_an_event_on_the_callers_stream(diary):
    device = CudaDevice(torch.device("cuda", 0))
    device.mark().wait()
    assert diary.lines == ["record on main", "synchronize"]
