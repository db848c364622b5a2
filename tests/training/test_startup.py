"""What a trainer does at its start, with stand-ins for Ray's actors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import verl_tim.training.startup as startup
from verl_tim.training.config import BACKEND_KEY, DumpConfig, TimConfig


def config(rollout="vexact", backend="contract", **tim):
    made = OmegaConf.create(
        {
            "tim": tim,
            "data": {"max_response_length": 16},
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
    return {
        "counters": {"steps": steps, "preemptions": 2},
        "marks": {"max_running": 10 + steps, "tokens_per_second": 100.0},
        "num_failures": 3 * len(failures),
        "failures": list(failures),
    }


def test_counters_and_rates_are_summed_over_the_servers_and_of_marks_the_highest_counts():
    watch = startup.RolloutWatch(config(), [manager(Server(report(3))), manager(Server(report(4)))])
    assert watch.check() == {
        "tim/rollout_steps": 7.0,
        "tim/rollout_preemptions": 4.0,
        "tim/rollout_max_running": 14.0,
        "tim/rollout_tokens_per_second": 200.0,
    }


def test_a_failed_request_stops_the_run_with_its_cause():
    watch = startup.RolloutWatch(config(), [manager(Server(report(3)), Server(report(4, "RequestError: too long")))])
    with pytest.raises(
        startup.RolloutError, match="3 requests to the rollout failed; the first: RequestError: too long"
    ):
        watch.check()


def test_other_rollouts_are_not_asked():
    watch = startup.RolloutWatch(config("vllm"), [SimpleNamespace(get_replicas=lambda: pytest.fail("asked"))])
    assert watch.check() == {}


class Loop:
    def __init__(self, *failures):
        self.take_failures = SimpleNamespace(remote=lambda: list(failures))


@pytest.mark.parametrize("rollout", ["vexact", "vllm"])
def test_a_failed_agent_loop_stops_the_run_with_its_cause(rollout):
    """A reward function that raises, whatever the rollout: verl would train on without the response."""
    watch = startup.RolloutWatch(config(rollout), [manager(Server(report(3), report(4)))])
    watch.watch_loops([Loop(), Loop()])
    watch.check()
    watch.watch_loops([Loop(), Loop("ValueError: no number", "KeyError: 'answer'")])
    with pytest.raises(
        startup.RolloutError, match=r"2 responses failed in the agent loop .* first: ValueError: no num"
    ):
        watch.check()


@pytest.fixture
def ray_with(monkeypatch):
    """Ray whose nodes and free GPUs are what each look finds, the last for ever; the clock runs by the naps."""
    clock = SimpleNamespace(now=0.0)

    def use(*looks):
        left = list(looks)

        def look():
            return left[0]

        def nap(seconds):
            clock.now += seconds
            if len(left) > 1:
                left.pop(0)

        monkeypatch.setattr(startup.time, "monotonic", lambda: clock.now)
        monkeypatch.setattr(startup.time, "sleep", nap)
        monkeypatch.setattr(
            startup.ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in look()["nodes"]]
        )
        monkeypatch.setattr(startup.ray, "available_resources", lambda: {"GPU": look()["free"]})
        return clock

    return use


NODE = {"CPU": 8.0, "GPU": 1.0}


def over_two_nodes(limit, wait=100):
    made = config(restarts={"limit": limit, "wait": wait})
    return OmegaConf.merge(made, {"trainer": {"nnodes": 2, "n_gpus_per_node": 1, "use_v1": False}})


@pytest.fixture
def checked(monkeypatch):
    clusters = []
    monkeypatch.setattr(startup, "check", lambda config, cluster: clusters.append(cluster))
    return clusters


def test_a_run_that_starts_again_waits_for_its_node_and_for_what_was_held(ray_with, checked):
    clock = ray_with(
        {"nodes": [NODE], "free": 0.0}, {"nodes": [NODE, NODE], "free": 1.0}, {"nodes": [NODE, NODE], "free": 2.0}
    )
    startup.check_cluster(over_two_nodes(limit=1))
    assert clock.now == 2 * startup._LOOK_SECONDS
    assert checked[0].nodes == ((8.0, 1.0), (8.0, 1.0))


def test_it_does_not_wait_for_ever(ray_with, checked):
    clock = ray_with({"nodes": [NODE], "free": 1.0})
    startup.check_cluster(over_two_nodes(limit=1, wait=100))
    assert 100 <= clock.now < 110
    assert len(checked[0].nodes) == 1  # which the check refuses


def test_without_restarts_it_does_not_wait(ray_with, checked):
    clock = ray_with({"nodes": [NODE], "free": 1.0})
    startup.check_cluster(over_two_nodes(limit=0))
    assert clock.now == 0
    assert len(checked) == 1


def test_dumps_of_steps_after_the_checkpoint_are_forgotten(tmp_path):
    names = [
        "tokens/step_000002.parquet",
        "tokens/step_000003.parquet",
        "dumps/step_000003.pt",
        "dumps/update_000003_part1.pt",
    ]
    for name in (*names, "dumps/update_000002.pt", "dumps/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    startup.forget_later_steps(TimConfig(run_dir=str(tmp_path), dump=DumpConfig(every=1)), 2)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert left == ["dumps/notes.txt", "dumps/update_000002.pt", "tokens/step_000002.parquet"]
