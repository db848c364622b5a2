"""Of several who want the same folder at the same time, one makes it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_tim.tasks.artifact import make_once
from verl_tim.tasks.errors import InputError

SPEC = {"kind": "x", "seed": 1}


def test_several_at_once_make_it_once(tmp_path):
    made, ready = [], threading.Barrier(6)

    def build(work):
        made.append(work)
        (work / "weights").write_text("w")
        threading.Event().wait(0.3)
        return {}

    def want(_):
        ready.wait()
        return make_once(tmp_path / "model", "card.json", SPEC, build)

    with ThreadPoolExecutor(6) as pool:
        folders = list(pool.map(want, range(6)))
    assert len(made) == 1
    assert set(folders) == {tmp_path / "model"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "neither lock nor half a folder is left"


def test_one_that_fails_leaves_the_next_to_make_it(tmp_path):
    started, let_fail = threading.Event(), threading.Event()

    def fail(work):
        (work / "half").write_text("h")
        started.set()
        let_fail.wait(10)
        raise RuntimeError("broken off")

    def build(work):
        (work / "weights").write_text("w")
        return {}

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make_once, tmp_path / "model", "card.json", SPEC, fail)
        assert started.wait(10)
        second = pool.submit(make_once, tmp_path / "model", "card.json", SPEC, build)
        threading.Event().wait(0.1)
        assert not second.done(), "it waits"
        let_fail.set()
        with pytest.raises(RuntimeError, match="broken off"):
            first.result(10)
        assert second.result(10) == tmp_path / "model"
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["card.json", "weights"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("content", ["", '{"key": "a', "[1]", "{}", b"\xff\xfe"])
def test_a_damaged_card_is_named_with_what_to_do(tmp_path, content):
    def build(work):
        (work / "weights").write_text("w")
        return {}

    card = make_once(tmp_path / "model", "card.json", SPEC, build) / "card.json"
    card.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=r"card\.json: .*; remove that folder, and it is made anew"):
        make_once(tmp_path / "model", "card.json", SPEC, build)
