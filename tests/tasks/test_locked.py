"""Of several who want the same file, one has it at a time, also where that one removes or renames it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_tim.tasks.locked import locked


def test_one_at_a_time_though_each_removes_it(tmp_path):
    path, inside, most = tmp_path / "lock", [], []

    def hold(number):
        with locked(path):
            inside.append(number)
            most.append(len(inside))
            threading.Event().wait(0.001)
            inside.remove(number)
            path.unlink()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hold, range(200)))
    assert most == [1] * 200
    assert not path.exists()


def test_a_file_that_goes_between_lock_and_look_is_opened_anew(tmp_path, monkeypatch):
    """As seen under load: another holder removed the file after it had been locked and before it was looked at."""
    path, stat, gone = tmp_path / "lock", Path.stat, []

    def stat_of_a_removed_file(self, **settings):
        if self == path and not gone:
            gone.append(True)
            path.unlink()
        return stat(self, **settings)

    monkeypatch.setattr(Path, "stat", stat_of_a_removed_file)
    with locked(path) as stream:
        stream.write(b"mine")
    assert gone
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("leave", ["unlink", "rename"])
def test_who_waited_has_the_file_that_is_there_then(tmp_path, leave):
    path, held, go = tmp_path / "part", threading.Event(), threading.Event()

    def first():
        with locked(path) as stream:
            stream.write(b"first")
            held.set()
            assert go.wait(10)
            path.unlink() if leave == "unlink" else path.rename(tmp_path / "whole")

    def second():
        assert held.wait(10)
        with locked(path) as stream:
            stream.write(b"second")

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(first), pool.submit(second)]
        threading.Event().wait(0.1)
        go.set()
        for run in runs:
            run.result(10)
    assert path.read_bytes() == b"second"
