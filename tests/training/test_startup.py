"""What a trainer does at its start, with stand-ins for Ray's actors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import verl_tim.training.startup as startup
from verl_tim.training.config import BACKEND_KEY, TimConfig


def config(rollout="vexact", backend="contract", **tim):
    made = OmegaConf.create(
        {
            "tim": tim,
            "algorithm": {"rollout_correction": {"bypass_mode": False}},
            "actor_rollout_ref": {
                "actor": {"clip_ratio": 0.2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3},
                "rollout": {"name": rollout},
                "model": {"path": "folder"},
            },
        }
    )
    OmegaConf.update(made, BACKEND_KEY, backend, force_add=True)
    return made


def observer_of(made):
    return startup.make_observer(TimConfig.of(made), made, SimpleNamespace(decode=lambda ids, **_: str(ids)))


@pytest.mark.parametrize(
    ("settings", "gated"),
    [
        ({}, True),
        ({"rollout": "stock"}, False),
        ({"rollout": "vllm"}, False),
        ({"backend": "torch"}, False),
        ({"gate": {"exact": False}}, False),
        ({"gate": {"on_mismatch": "warn"}}, True),
    ],
)
def test_the_gate_acts_only_where_exactness_is_promised(settings, gated):
    assert observer_of(config(**settings)).gated is gated


def test_clip_ratios_and_bypass_are_the_actors():
    made = config()
    made.algorithm.rollout_correction.bypass_mode = True
    observer = observer_of(made)
    assert (observer.clip_ratio_low, observer.clip_ratio_high, observer.bypass) == (0.1, 0.3, True)


class Server:
    def __init__(self, *reports):
        self.reports = list(reports)
        self.report = SimpleNamespace(remote=lambda: self.reports.pop(0))


def manager(*servers):
    return SimpleNamespace(get_replicas=lambda: [SimpleNamespace(servers=[server]) for server in servers])


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    monkeypatch.setattr(startup.ray, "get", lambda refs: refs)


def report(steps=1, *failures):
    return {"counters": {"steps": steps, "preemptions": 2}, "failures": list(failures)}


def test_counters_are_summed_over_the_servers():
    watch = startup.RolloutWatch(config(), [manager(Server(report(3))), manager(Server(report(4)))])
    assert watch.check() == {"tim/rollout_steps": 7.0, "tim/rollout_preemptions": 4.0}


def test_a_failed_request_stops_the_run_with_its_cause():
    watch = startup.RolloutWatch(config(), [manager(Server(report(3)), Server(report(4, "RequestError: too long")))])
    with pytest.raises(
        startup.RolloutError, match="1 requests to the rollout failed; the first: RequestError: too long"
    ):
        watch.check()


def test_other_rollouts_are_not_asked():
    watch = startup.RolloutWatch(config("vllm"), [SimpleNamespace(get_replicas=lambda: pytest.fail("asked"))])
    assert watch.check() == {}
