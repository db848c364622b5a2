"""Two runs of one machine, each with a Ray cluster of its own, never share a socket for weights; the ends of one do."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from verl_tim.rollout import vllm_sockets
from verl_tim.rollout.vllm_sockets import JOB_VARIABLE, mark_adapter, mark_server

JOB = "01000000"  # the first job of every cluster


class Context:
    def __init__(self, address):
        self.gcs_address = address

    def get_job_id(self):
        return JOB


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv(JOB_VARIABLE, "")
    return lambda address: monkeypatch.setattr(vllm_sockets.ray, "get_runtime_context", lambda: Context(address))


def ends(job_in_handle=JOB):
    """verl's two ends, as far as they name the socket."""

    class VLLMHttpServer:
        def __init__(self, replica):
            os.environ[JOB_VARIABLE] = JOB
            self.replica = replica

    class ServerAdapter:
        def __init__(self, replica):
            self.zmq_handle = f"ipc:///tmp/rl-colocate-zmq-{job_in_handle}-replica-{replica}-rank-0.sock"

    server, adapter = SimpleNamespace(vLLMHttpServer=VLLMHttpServer), SimpleNamespace(ServerAdapter=ServerAdapter)
    mark_server(server)
    mark_adapter(adapter)
    return server.vLLMHttpServer, adapter.ServerAdapter


def worker_handle(replica):
    """verl 0.9.1, workers/rollout/vllm_rollout/utils.py:431, in a process that inherited the server's environment."""
    return f"ipc:///tmp/rl-colocate-zmq-{os.environ[JOB_VARIABLE]}-replica-{replica}-rank-0.sock"


def test_both_ends_of_a_run_meet_and_two_runs_do_not(cluster):
    server, adapter = ends()
    handles = []
    for address in ("10.0.0.1:6379", "10.0.0.1:50123", "[::1]:6379"):
        cluster(address)
        assert server(replica=1).replica == 1
        assert adapter(replica=1).zmq_handle == worker_handle(1)
        handles.append(worker_handle(1))
    assert len(set(handles)) == 3
    for handle in handles:
        path = handle.removeprefix("ipc://")
        assert len(path) < 108, "the longest path of a Unix socket"
        assert path.count("/") == 2


def test_an_end_of_another_form_is_refused(cluster):
    cluster("10.0.0.1:6379")
    _, adapter = ends(job_in_handle="other")
    with pytest.raises(RuntimeError, match="does not name the Ray job"):
        adapter(replica=0)


def test_verl_names_the_socket_as_this_expects():
    """Both ends, in the source of the installed verl."""
    import verl

    folder = os.path.join(os.path.dirname(verl.__file__), "workers", "rollout", "vllm_rollout")

    def source(name):
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return file.read()

    assert 'f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-{self.replica_rank}' in source("vllm_rollout.py")
    assert f'job_id = os.environ.get("{JOB_VARIABLE}", "0")' in source("utils.py")
    assert f'os.environ["{JOB_VARIABLE}"] = ray.get_runtime_context().get_job_id()' in source("vllm_async_server.py")
