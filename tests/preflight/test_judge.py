"""Differences that are planted on one node are found, and told by node, name and both values."""

import dataclasses

import pytest

from verl_tim.preflight.facts import Gpu, NodeFacts
from verl_tim.preflight.judge import CHECKS, GIB, Node, Trial, Wanted, problems
from verl_tim.preflight.table import cell

H200 = Gpu("NVIDIA H200", 140 * GIB, 139 * GIB)
USED = dataclasses.replace(H200, free=GIB, users=("python (pid 7, 3 MiB)",))
FACTS = NodeFacts(
    host="host",
    versions={"python": "3.11.7", "torch": "2.11.0", "verl": "0.9.1", "vllm": "0.24.0"},
    source="abc",
    driver="570.1",
    gpus=(H200,) * 8,
    shm=(64 * GIB, 60 * GIB),
    disk={"tim.run_dir": 900 * GIB},
    files={"model": "3 files"},
    variables={"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "8"},
)
GOOD = Node(
    "n", 8, FACTS, clock=(0.01, 0.005), shared=Trial(True, "read"), collective=Trial(True, "300 GB/s"),
    contract=Trial(True, "chunk64/sm90"),
)  # fmt: skip
WANTED = Wanted(nodes=3, gpus=8, files={"model": "/shared/model"})


def nodes(**of_last):
    """Three nodes that are all alike, but for fields of the last one, or of its facts."""
    facts = {key: value for key, value in of_last.items() if key in NodeFacts.__dataclass_fields__}
    fields = {key: value for key, value in of_last.items() if key not in facts}
    last = dataclasses.replace(GOOD, name="n3", facts=dataclasses.replace(FACTS, **facts))
    return [
        dataclasses.replace(GOOD, name="n1"),
        dataclasses.replace(GOOD, name="n2"),
        dataclasses.replace(last, **fields),
    ]


def test_nodes_that_are_alike_have_no_problem():
    assert problems(nodes(), WANTED) == []


@pytest.mark.parametrize(
    ("planted", "check", "words"),
    [
        ({"versions": {**FACTS.versions, "torch": "2.10.0"}}, "versions", "torch is 2.10.0, elsewhere 2.11.0"),
        (
            {"versions": {name: one for name, one in FACTS.versions.items() if name != "vllm"}},
            "versions",
            "vllm is absent, elsewhere 0.24.0",
        ),
        ({"versions": {**FACTS.versions, "flash-attn": "2.8"}}, "versions", "flash-attn is 2.8, elsewhere absent"),
        ({"source": "xyz"}, "versions", "verl_tim's source is xyz, elsewhere abc"),
        ({"gpus": (H200,) * 7}, "gpus", "Ray counts 8 GPU(s), nvidia-smi 7"),
        (
            {"gpus": (Gpu("NVIDIA H100", 80 * GIB, 80 * GIB),) * 8},
            "gpus",
            "its GPUs are NVIDIA H100, elsewhere NVIDIA H200",
        ),
        ({"gpus": (H200,) * 7 + (USED,)}, "gpus", "GPU 7 has 1.0 of 140.0 GiB free, by python (pid 7, 3 MiB)"),
        ({"gpu_error": "no devices"}, "gpus", "nvidia-smi: no devices"),
        ({"shm": (GIB // 16, GIB // 16)}, "memory", "/dev/shm has 0.06 GiB free"),
        ({"shm": None}, "memory", "/dev/shm has 0.00 GiB free"),
        (
            {"variables": {**FACTS.variables, "NCCL_ALGO": "Tree"}},
            "variables",
            "NCCL_ALGO is Tree for its workers, elsewhere Ring",
        ),
        ({"disk": {"tim.run_dir": GIB}}, "disk", "tim.run_dir: 1.0 GiB free, less than 10"),
        ({"disk": {"tim.run_dir": "/x cannot be written to"}}, "disk", "/x cannot be written to"),
        ({"files": {"model": None}}, "files", "model: /shared/model is not there"),
        ({"files": {"model": "2 files"}}, "files", "model is 2 files, elsewhere 3 files"),
        ({"shared": Trial(False, "does not see it")}, "shared", "does not see it"),
        ({"collective": Trial(False, "no rank 3")}, "collective", "no rank 3"),
        ({"contract": Trial(False, "swiglu is not exact")}, "contract", "swiglu is not exact"),
        ({"contract": Trial(True, "chunk64/sm80")}, "contract", "it keeps chunk64/sm80, elsewhere chunk64/sm90"),
        ({"facts": None, "silence": "did not answer within 9 s"}, "nodes", "did not answer within 9 s"),
    ],
)
def test_one_planted_difference_is_one_error_of_that_node(planted, check, words):
    fields = {key: planted.pop(key) for key in ("facts",) if key in planted}
    made = nodes(**planted)
    made[2] = dataclasses.replace(made[2], **fields)
    (found,) = problems(made, WANTED)
    assert (found.check, found.node, found.error) == (check, "n3", True)
    assert words in found.problem
    assert found.remedy


@pytest.mark.parametrize(
    ("planted", "check"),
    [
        ({"driver": "560.0"}, "gpus"),
        ({"clock": (5.0, 0.1)}, "clock"),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "variables"),
    ],
)
def test_what_is_only_odd_is_a_warning(planted, check):
    (found,) = problems(nodes(**planted), WANTED)
    assert (found.check, found.error) == (check, False)


def test_a_clock_that_may_be_right_is_not_blamed():
    assert problems(nodes(clock=(5.0, 4.5)), WANTED) == []


def test_missing_nodes_are_counted_by_their_gpus():
    (found,) = problems(nodes()[:2], WANTED)
    assert "2 of 3 nodes with 8 GPU(s) have joined; nodes (GPUs): n1 (8), n2 (8)" in found.problem
    # a head without GPUs is no node of the run, and no error
    head = dataclasses.replace(GOOD, name="head", ray_gpus=0, facts=dataclasses.replace(FACTS, gpus=(), driver=None))
    assert problems([head, *nodes()], WANTED) == []
    assert [one.check for one in problems([head, *nodes()[:2]], WANTED)] == ["nodes"]


def test_of_two_halves_the_drivers_is_right():
    two = [nodes()[0], nodes(versions={**FACTS.versions, "torch": "9"})[2]]
    (found,) = problems(two, dataclasses.replace(WANTED, nodes=2))
    assert (found.node, found.problem) == ("n3", "torch is 9, elsewhere 2.11.0")


def test_a_run_on_cpus_needs_no_gpu_and_less_shared_memory():
    facts = dataclasses.replace(FACTS, gpus=(), driver=None, shm=(GIB, GIB))
    made = [dataclasses.replace(node, facts=facts) for node in nodes()]
    assert problems(made, dataclasses.replace(WANTED, cpu=True)) == []


def test_only_the_checks_that_were_asked_for_are_judged():
    made = nodes(source="xyz", files={"model": None})
    assert [one.check for one in problems(made, WANTED, ("files",))] == ["files"]


@pytest.mark.parametrize("check", [name for name in CHECKS if name != "nodes"])
def test_a_cell_shows_the_value_and_fails_where_a_problem_is(check):
    from verl_tim.preflight.judge import Problem

    good, bad = cell(GOOD, check, []), cell(GOOD, check, [Problem(check, "n", "x", "y")])
    assert good.style == "green"
    assert bad.plain.startswith("FAILS")
