"""`verl-tim preflight` on a real Ray cluster of two nodes on this machine, one of which has another transformers."""

import json
import os
import signal
import subprocess
import sys

import pytest
from ray._common.utils import reset_ray_address
from ray.cluster_utils import Cluster

from verl_tim.launch.start import composed

pytestmark = pytest.mark.slow

RUN = "from verl_tim.cli import main; main()"


@pytest.fixture(scope="module")
def odd_node(tmp_path_factory):
    """A folder that makes importlib.metadata report another version, as another installation would."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "transformers-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    return folder


@pytest.fixture(scope="module")
def cluster(odd_node):
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 1, "include_dashboard": False})
    reset_ray_address()  # it stands in a file of this machine, and every other Ray that starts here would join
    made.second = made.add_node(num_cpus=4, num_gpus=1, env_vars={"PYTHONPATH": str(odd_node)})
    yield made
    made.shutdown()


def preflight(cluster, *words):
    return subprocess.run(
        [sys.executable, "-c", RUN, "preflight", "--address", cluster.address, *words],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_every_node_is_looked_at_and_the_wrong_version_on_one_is_told(cluster, tmp_path):
    done = preflight(
        cluster, "recipe=cpu_grpo", "trainer.nnodes=2", f"tim.run_dir={tmp_path}/run", "--min-disk", "0.001", "--json"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    nodes = report["nodes"]
    assert len(nodes) == 2
    versions = [node["facts"]["versions"]["transformers"] for node in nodes]
    assert versions[1] == "9.9.9" != versions[0]
    (found,) = [one for one in report["findings"] if one["error"]]
    assert found["node"] == nodes[1]["name"]
    assert found["problem"] == f"transformers is 9.9.9, elsewhere {versions[0]}"
    # an all-reduce over both, one folder seen from both, one contract
    assert all(node[trial]["good"] for node in nodes for trial in ("collective", "shared", "contract"))
    assert len({node["contract"]["text"] for node in nodes}) == 1
    # the environment of the run's workers is that of preflight's
    threads = composed(["recipe=cpu_grpo"]).ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS
    assert {node["facts"]["variables"]["OMP_NUM_THREADS"] for node in nodes} == {threads}
    assert list(tmp_path.iterdir()) == []


def test_too_few_nodes_and_a_node_that_hangs_end_in_time_with_one_table(cluster):
    raylet = cluster.second.all_processes["raylet"][0].process
    raylet.send_signal(signal.SIGSTOP)
    try:
        done = preflight(
            cluster, "recipe=cpu_grpo", "trainer.nnodes=3", "--wait", "1", "--timeout", "15",
            "--checks", "nodes,versions,memory",
        )  # fmt: skip
    finally:
        raylet.send_signal(signal.SIGCONT)
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stderr.split())
    assert "2 of 3 nodes with 1 GPU(s) have joined" in said
    assert "did not answer within 15 s" in said
    assert "Preflight: 2 node(s)" in done.stdout
    assert "the run must not start" in done.stdout


def test_without_a_cluster_nothing_can_be_looked_at():
    done = subprocess.run(
        [sys.executable, "-c", RUN, "preflight", "--address", "127.0.0.1:1"],
        env={**os.environ, "RAY_gcs_rpc_server_connect_timeout_s": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ray_kwargs.ray_init.address: 127.0.0.1:1" in " ".join(done.stderr.split())
