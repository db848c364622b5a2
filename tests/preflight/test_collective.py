"""The all-reduce between real processes, and what it says when a rank does not come."""

import multiprocessing
import socket
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from verl_tim.preflight import collective
from verl_tim.preflight.contract import probe_node


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return f"tcp://127.0.0.1:{one.getsockname()[1]}"


def rank_of(rank, ranks, address, answers):
    answers.put((rank, collective.all_reduce(rank, ranks, address, gpu=False, limit=60, size=1024)))


def alone_of_two(address):
    began = time.monotonic()
    try:
        return collective.all_reduce(0, 2, address, gpu=False, limit=2, size=16)
    finally:
        assert time.monotonic() - began < 30


def wrong_sum(address):
    import torch.distributed as dist

    dist.all_reduce = lambda values: values.__setitem__(3, 7.0)
    return collective.all_reduce(0, 1, address, gpu=False, limit=20, size=16)


def in_a_process(function, address):
    """As preflight does: the tests' own process may be in a process group already."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, address).result()


def test_all_ranks_get_the_right_sum():
    context = multiprocessing.get_context("spawn")
    answers, address = context.Queue(), free_address()
    processes = [context.Process(target=rank_of, args=(rank, 2, address, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    outcomes = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
    assert sorted(outcomes) == [0, 1]
    assert all(outcome.correct and outcome.gigabytes_per_second > 0 for outcome in outcomes.values())


def test_a_rank_that_does_not_come_ends_the_others_in_time():
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        in_a_process(alone_of_two, free_address())
    assert time.monotonic() - began < 120


def test_a_wrong_sum_is_noticed():
    assert not in_a_process(wrong_sum, free_address()).correct


def test_the_probe_tells_the_contract_or_the_operation_that_breaks_it(tmp_path, monkeypatch):
    from verl_tim.numerics import probe
    from verl_tim.verification.random_models import make_random_model

    model = str(make_random_model("qwen3", tmp_path / "model"))
    trial = probe_node(model, "auto")
    assert trial.good
    assert trial.text.startswith("chunk64/")
    exact = probe.swiglu_inference
    monkeypatch.setattr(probe, "swiglu_inference", lambda gate, up: exact(gate, up) * (1 + 0.5 * (len(gate) < 3)))
    trial = probe_node(model, "auto")
    assert not trial.good
    assert "swiglu(" in trial.text
    assert ") is not exact" in trial.text
