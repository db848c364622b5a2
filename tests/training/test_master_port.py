"""Where trainer workers meet: a port that nothing else on the machine gets meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl_tim.training import master_port


@pytest.fixture
def ephemeral(tmp_path, monkeypatch):
    def of(text: str | None) -> None:
        file = tmp_path / "ip_local_port_range"
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(master_port, "_EPHEMERAL", file)

    return of


@pytest.mark.parametrize("text", ["32768\t60999\n", "25000\t60999\n"])
def test_ports_are_neither_rays_nor_those_of_outgoing_connections(ephemeral, text):
    ephemeral(text)
    ranges = [master_port.port_range() for _ in range(50)]
    assert all(20000 <= first < end <= 30000 for first, end in ranges)
    assert all(end <= int(text.split()[0]) for _, end in ranges)
    assert len({first for first, _ in ranges}) > 40, "runs that start together draw different ones"


def test_a_seed_does_not_make_them_equal(ephemeral):
    import random

    ephemeral("32768\t60999\n")
    drawn = []
    for _ in range(4):
        random.seed(0)
        drawn.append(master_port.port_range()[0])
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("text", ["1024\t65000\n", "20100\t60999\n", None])
def test_where_there_is_no_room_the_choice_stays_verls(ephemeral, text):
    ephemeral(text)
    assert master_port.port_range() is None


@pytest.mark.parametrize("text", ["", "\n", "on\n", "32768,60999\n", "\u0663\u0662 1\n", None])
def test_a_system_that_does_not_say_keeps_no_run_from_its_start(ephemeral, text, caplog):
    ephemeral(text)
    assert master_port.port_range() is None
    assert "names no ports" in caplog.text


def test_nor_does_one_that_lets_nobody_read_it(tmp_path, monkeypatch):
    monkeypatch.setattr(master_port, "_EPHEMERAL", tmp_path)  # a folder: reading fails, for root, too
    assert master_port.port_range() is None


def test_verls_worker_group_is_given_the_range():
    asked = []

    class RayWorkerGroup:
        def _get_master_addr_port(self, pg, bundle_index=0, master_port_range=None):
            asked.append((pg, bundle_index, master_port_range))

    module = SimpleNamespace(RayWorkerGroup=RayWorkerGroup)
    master_port.keep_ports_apart(module)
    group = RayWorkerGroup()
    group._get_master_addr_port("pg", bundle_index=2, master_port_range=[7, 9])
    group._get_master_addr_port("pg")
    assert asked[0] == ("pg", 2, [7, 9])
    assert asked[1][:2] == ("pg", 0)
    assert asked[1][2] is None or asked[1][2][0] >= 20000


@pytest.fixture
def bound(ephemeral):
    """verl's own search, in a process that Ray would have on the first rank's node; given the socket it tries with."""
    from verl.single_controller.ray import base

    ephemeral("32768\t60999\n")

    class RayWorkerGroup:
        def _get_master_addr_port(self, pg, bundle_index=0, master_port_range=None):
            base.get_master_addr_port._function(master_port_range)

    module = SimpleNamespace(RayWorkerGroup=RayWorkerGroup)
    master_port.keep_ports_apart(module)
    return RayWorkerGroup()


class NoSocket:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def bind(self, address):
        raise PermissionError(13, "Permission denied")


def test_a_node_that_lets_none_of_them_be_bound_is_told_of(bound, monkeypatch):
    from verl.single_controller.ray import base

    bound._get_master_addr_port("pg")  # here one can
    monkeypatch.setattr(base, "socket", SimpleNamespace(socket=NoSocket))
    with pytest.raises(RuntimeError, match=r"first rank's node, and none of 2\d{4} to 2\d{4} can be bound there: free"):
        bound._get_master_addr_port("pg")
    with pytest.raises(RuntimeError, match=r"^Could not find a free port in range \[7, 9\]"):
        bound._get_master_addr_port("pg", master_port_range=[7, 9])


def test_it_is_patched_in_verl():
    from verl.single_controller.ray.base import RayWorkerGroup

    import verl_tim.plugin  # noqa: F401

    assert RayWorkerGroup._get_master_addr_port.__module__ == "verl.single_controller.ray.base"  # wraps keeps the name
    assert hasattr(RayWorkerGroup._get_master_addr_port, "__wrapped__")
