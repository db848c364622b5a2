"""Overlapping launches: who asks for them, and that no kernel reads before it has waited."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch

from verl_tim.numerics import contract

overlap = pytest.importorskip("verl_tim.numerics.gpu.overlap")

SOURCES = sorted(Path(overlap.__file__).parent.glob("*.py"))
PLAIN, TOGETHER = {"OVERLAP": False}, {"OVERLAP": True, "launch_pdl": True}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    overlap._can.cache_clear()
    yield torch.device("cuda", 0)
    overlap._can.cache_clear()


def test_launches_overlap_within_and_not_around(hopper):
    assert overlap.launch() == PLAIN
    with overlap.overlapping(hopper):
        assert overlap.launch() == TOGETHER
        with overlap.overlapping(torch.device("cpu")):
            assert overlap.launch() == PLAIN
        assert overlap.launch() == TOGETHER
    assert overlap.launch() == PLAIN


def test_an_error_within_switches_it_off(hopper):
    with pytest.raises(ZeroDivisionError), overlap.overlapping(hopper):
        raise ZeroDivisionError
    assert overlap.launch() == PLAIN


def test_other_threads_are_not_asked(hopper):
    seen = []
    with overlap.overlapping(hopper):
        thread = threading.Thread(target=lambda: seen.append(overlap.launch()))
        thread.start()
        thread.join()
    assert seen == [PLAIN]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_older_gpus_launch_one_after_another(hopper, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with overlap.overlapping(hopper):
        assert overlap.launch() == PLAIN


def test_the_contract_asks_for_it_on_a_gpu_alone(hopper):
    with contract.overlapped_launches(hopper):
        assert overlap.launch() == TOGETHER
    with contract.overlapped_launches(torch.device("cpu")):
        assert overlap.launch() == PLAIN


def _functions():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield path, node


KERNELS = {
    f"{path.stem}.{node.name}": node
    for path, node in _functions()
    if node.name != "begin" and any(argument.arg == "OVERLAP" for argument in node.args.args)
}


WEIGHTS = {"weight", "q_weight", "k_weight"}
"""Parameters that no kernel of a step writes."""
LOADS = {"tl.load", "_load_halves"}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_can_overlap_waits_first(name):
    """Statements before `begin` may compute and read weights, and do nothing else to memory."""
    for statement in KERNELS[name].body:
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            function = ast.unparse(call.func)
            if function == "begin":
                return
            if function in LOADS:
                address = call.args[0]
                while isinstance(address, ast.BinOp):  # pointer + offset + offset
                    address = address.left
                assert ast.unparse(address) in WEIGHTS, ast.unparse(statement)
            elif not function.endswith(".to"):
                assert function.startswith("tl."), ast.unparse(statement)
                assert not function.startswith(("tl.store", "tl.atomic")), ast.unparse(statement)
    pytest.fail("begin(OVERLAP) is missing")


def test_every_launch_with_the_option_is_of_such_a_kernel():
    """`**launch()` on a kernel without OVERLAP would not compile, and a kernel with it needs the option."""
    launched = set()
    for path, node in _functions():
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                optioned = any(k.arg is None and ast.unparse(k.value) == "launch()" for k in call.keywords)
                name = f"{path.stem}.{ast.unparse(call.func.value)}"
                assert optioned == (name in KERNELS), name
                if optioned:
                    launched.add(name)
    assert launched == set(KERNELS)
