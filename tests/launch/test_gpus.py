"""GPUs by name, how many a run needs, and which it is given."""

import pytest
import torch
from omegaconf import OmegaConf

from verl_tim.launch.gpus import Gpus, gpus_asked, visible_gpus


@pytest.mark.parametrize(
    ("listed", "count", "names"),
    [
        (None, 0, ()),
        (None, 2, ("0", "1")),
        ("", 0, ()),
        ("3, GPU-5f", 2, ("3", "GPU-5f")),
        ("1,-1,0", 1, ("1",)),
        ("-1", 0, ()),
    ],
)
def test_gpus_have_the_names_that_the_environment_gives_them(monkeypatch, listed, count, names):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert visible_gpus() == names


def config(device="cuda", told=None, own=0):
    return OmegaConf.create(
        {
            "trainer": {"device": device, "n_gpus_per_node": 2},
            "ray_kwargs": {"ray_init": {"num_gpus": told}},
            "actor_rollout_ref": {"rollout": {"nnodes": own, "n_gpus_per_node": 3}},
        }
    )


@pytest.mark.parametrize(
    ("given", "count"),
    [({"device": "cpu", "told": 1}, 0), ({}, 2), ({"told": 1}, 1), ({"own": 1}, 5)],
)
def test_a_run_needs_what_its_cluster_has_or_what_its_parts_ask_for(given, count):
    assert gpus_asked(config(**given)) == count


def test_the_emptiest_are_taken_and_come_back():
    gpus = Gpus(["a", "b", "c"])
    assert gpus.take(2) == ("a", "b")
    assert gpus.take(1) == ("c",)
    assert gpus.take(1) == ("a",)
    gpus.give_back(("c",))
    assert gpus.take(2) == ("b", "c")
    assert gpus.take(0) == ()
    assert gpus.take(7) == ("a", "b", "c")
    assert Gpus([]).take(1) == ()
