"""A Ray cluster of two nodes on this machine, for runs that join one.

Each node is a `ray start` of its own. With network namespaces the second has an address and an interface of its own, as
another machine has; without, which needs no rights, both share this machine's address.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

INTERFACE = "timveth"
NAMESPACE = "timnode"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_STARTED = "Ray runtime started"
_START_SECONDS = 90


@dataclass
class Nodes:
    """A running cluster.

    Attributes:
        address: of its head, `RAY_ADDRESS` of a run that shall join.
        environment: what a driver needs to join it.
        ips: of each node.
        processes: `ray start` of each node.
    """

    address: str
    environment: dict[str, str]
    ips: tuple[str, str]
    processes: list[subprocess.Popen]


def can_make_namespaces() -> bool:
    """Whether this process may make network namespaces (root, and iproute2)."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", f"{NAMESPACE}probe"], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", f"{NAMESPACE}probe"], check=True)
    return made.returncode == 0


@contextlib.contextmanager
def two_nodes(log_folder: Path, *, namespaces: bool = False) -> Iterator[Nodes]:
    """The cluster, until the block ends.

    Args:
        namespaces: the second node in a network namespace; needs `can_make_namespaces()`.
    """
    with contextlib.ExitStack() as stack:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
        joining = {"RAY_AUTH_MODE": "disabled"}
        ips, enter = ("127.0.0.1", "127.0.0.1"), []
        if namespaces:
            stack.enter_context(_network())
            # as on a real cluster: which interface leads to the other nodes
            environment["GLOO_SOCKET_IFNAME"] = joining["GLOO_SOCKET_IFNAME"] = INTERFACE
            ips, enter = _ADDRESSES, ["ip", "netns", "exec", NAMESPACE]
        # short, for Ray's sockets are in it
        temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        address = f"{ips[0]}:{_free_port(ips[0])}"
        head = ["--head", "--port", address.rpartition(":")[2], "--temp-dir", temporary, "--include-dashboard=false"]
        processes: list[subprocess.Popen] = []
        stack.callback(_end, processes)
        for number, (prefix, role) in enumerate(zip(([], enter), (head, ["--address", address]), strict=True)):
            log = log_folder / f"node{number}.log"
            command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", *role]
            command += ["--node-ip-address", ips[number], "--num-cpus", "8", "--num-gpus", "1"]
            command += ["--object-store-memory", "200000000", "--disable-usage-stats", "--block"]
            with log.open("wb") as sink:
                processes.append(
                    subprocess.Popen(
                        command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                    )
                )
            _wait_for_start(processes[-1], log)
        yield Nodes(address, {"RAY_ADDRESS": address, **joining}, ips, processes)


def _wait_for_start(process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if _STARTED in log.read_text(errors="replace"):
            return
        if process.poll() is not None:
            break
        time.sleep(0.25)
    raise RuntimeError(f"a Ray node did not start:\n{log.read_text(errors='replace')}")


def _end(processes: list[subprocess.Popen]) -> None:
    """The nodes and all that runs on them; `ray stop` would end every cluster of this machine."""
    for process in reversed(processes):
        try:
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(tree, timeout=15)
        for left in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()


@contextlib.contextmanager
def _network() -> Iterator[None]:
    """A namespace, joined with this one by a pair of interfaces of the same name."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    inside = ("-n", NAMESPACE)
    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", INTERFACE, "type", "veth", "peer", "name", f"{INTERFACE}0", "netns", NAMESPACE)
        ip(*inside, "link", "set", f"{INTERFACE}0", "name", INTERFACE)
        ip("addr", "add", f"{_ADDRESSES[0]}/24", "dev", INTERFACE)
        ip(*inside, "addr", "add", f"{_ADDRESSES[1]}/24", "dev", INTERFACE)
        ip("link", "set", INTERFACE, "up")
        ip(*inside, "link", "set", INTERFACE, "up")
        ip(*inside, "link", "set", "lo", "up")
        yield
    finally:
        ip("netns", "del", NAMESPACE)  # with it goes the pair of interfaces


def _free_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return probe.getsockname()[1]
