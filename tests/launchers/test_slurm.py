"""The batch script, run in truth with fake Slurm and Ray programs that start local processes."""

import os
import signal
import socket
import subprocess
import time

import pytest

from verl_tim.launch.errors import LaunchError
from verl_tim.launchers import slurm
from verl_tim.launchers.lint import shell


def options(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


# Both Rays are there, as preflight waits for them.
JOINED = 'until [[ $(grep -c "^ray --" "$LOG") == 2 ]]; do sleep 0.05; done'


class Cluster:
    """A batch script on a cluster of fakes. Every program writes what happens to it into one log, line by line."""

    def __init__(self, folder, program, listener):
        self.folder, self.log, self.listener = folder, folder / "log", listener
        self.log.write_text("")
        program("scontrol", 'case $1 in show) echo node1; echo node2;; *) echo "scontrol $*" >>"$LOG";; esac')
        program("srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
        program("python", "echo banner of a module; echo 127.0.0.1")
        program(
            "ray",
            'trap \'echo "ray ended" >>"$LOG"; exit 0\' TERM; echo "ray $2" >>"$LOG"; while :; do sleep 0.1; done',
        )
        self.bin = program("verl-tim", f'{JOINED}; echo "verl-tim $1" >>"$LOG"')

    def start(self, text, **environ):
        script = self.folder / "job.sh"
        script.write_text(text)
        given = {
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_CPUS_ON_NODE": "4",
            "SLURM_JOB_ID": "7",
            "LOG": str(self.log),
        }
        return subprocess.Popen(
            ["bash", str(script)],
            env={"PATH": f"{self.bin}:{os.environ['PATH']}", **given, **environ},
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, line, seconds=20):
        deadline = time.monotonic() + seconds
        while line not in self.lines():
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.02)

    def lines(self):
        return self.log.read_text().splitlines()


@pytest.fixture
def cluster(tmp_path, program):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Cluster(tmp_path, program, listener)


@pytest.fixture
def script_of(job_with, cluster):
    def make(**settings):
        return slurm.script(job_with({"ports": {"ray": cluster.listener.getsockname()[1]}, **settings}))

    return make


RUNS_UNTIL_STOPPED = (
    f"{JOINED}; "
    'echo "verl-tim $1" >>"$LOG"; [[ $1 == train ]] || exit 0; '
    'trap \'echo "train stopped" >>"$LOG"; exit 130\' TERM; while :; do sleep 0.1; done'
)


def test_one_cluster_config_becomes_options_of_sbatch(job_with):
    settings = {"cpus": 96, "memory": 900, "time_limit": 86400 + 3600, "restarts": 2}
    settings["slurm"] = {"partition": "gpu", "account": "lab", "options": ["--constraint=h200"]}
    text = slurm.script(job_with(settings))
    assert options(text) == [
        "--job-name=dense-grpo-1", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=96",
        "--mem=900G", "--time=1-01:00:00", "--partition=gpu", "--account=lab", "--exclusive",
        "--output=dense-grpo-1-%j.out", "--open-mode=append", "--export=ALL", "--signal=B:USR1@120", "--requeue",
        "--constraint=h200",
    ]  # fmt: skip
    assert "--num-gpus=8" in text


def test_a_run_on_cpus_asks_for_no_gpu_and_gives_ray_its_slots(job_with):
    text = slurm.script(job_with(cpu=True, gpus=2, ray_cpus=16))
    assert not [option for option in options(text) if "gpu" in option]
    assert text.count("--num-cpus=16 --num-gpus=2") == 2


@pytest.mark.parametrize("settings", [{}, {"restarts": 3, "setup": ["source .venv/bin/activate", "module load cuda"]}])
@pytest.mark.parametrize("fields", [{}, {"nodes": 1}, {"secrets": ()}, {"environment": {}}])
def test_bash_and_shellcheck_take_it(job_with, settings, fields):
    assert "bash -n" in shell([slurm.script(job_with(settings, **fields))], severity="info")


def test_a_container_shares_the_folder_of_rays_session_and_the_mounts(job_with):
    text = slurm.script(job_with({"mounts": {"/data": "/lustre/my data"}}))
    assert "--container-image=nvcr.io/verl:1 '--container-mounts=/tmp:/tmp,/lustre/my data:/data'" in text


def test_a_claim_of_kubernetes_is_refused_with_its_key(job_with):
    with pytest.raises(LaunchError, match=r"tim\.launch\.mounts\./data: is pvc:x, which Slurm cannot mount"):
        slurm.script(job_with({"mounts": {"/data": "pvc:x"}}))


def test_preflight_then_the_run_then_a_clean_end_of_ray(cluster, script_of):
    process = cluster.start(script_of())
    assert process.wait(timeout=60) == 0, process.stderr.read()
    lines = cluster.lines()
    assert lines.index("verl-tim preflight") < lines.index("verl-tim train")
    port = cluster.listener.getsockname()[1]
    assert {"ray --head", f"ray --address=127.0.0.1:{port}"} < set(lines)
    assert lines[-2:] == ["ray ended", "ray ended"]


def test_a_failing_preflight_keeps_the_run_from_starting(cluster, script_of, program):
    program("verl-tim", f'{JOINED}; echo "verl-tim $1" >>"$LOG"; [[ $1 != preflight ]]')
    process = cluster.start(script_of())
    assert process.wait(timeout=60) == 1
    assert "preflight ended with 1: the run was not started" in process.stderr.read()
    assert "verl-tim train" not in cluster.lines()
    assert cluster.lines().count("ray ended") == 2


def test_the_runs_exit_code_is_the_jobs(cluster, script_of, program):
    program("verl-tim", "[[ $1 == preflight ]] || exit 3")
    assert cluster.start(script_of()).wait(timeout=60) == 3


@pytest.mark.parametrize(("restarts", "count", "requeued"), [(2, 1, True), (2, 2, False), (0, 0, False)])
def test_when_time_is_nearly_up_the_run_is_stopped_and_may_be_requeued(
    cluster, script_of, program, restarts, count, requeued
):
    program("verl-tim", RUNS_UNTIL_STOPPED)
    process = cluster.start(script_of(restarts=restarts), SLURM_RESTART_COUNT=str(count))
    cluster.wait_for("verl-tim train")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 130, process.stderr.read()
    lines = cluster.lines()
    assert "train stopped" in lines
    assert ("scontrol requeue 7" in lines) is requeued
    assert lines.count("ray ended") == 2


def test_a_cancelled_job_stops_the_run_and_is_not_requeued(cluster, script_of, program):
    program("verl-tim", RUNS_UNTIL_STOPPED)
    process = cluster.start(script_of(restarts=2))
    cluster.wait_for("verl-tim train")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert "train stopped" in cluster.lines()
    assert "scontrol requeue 7" not in cluster.lines()


def test_a_ray_that_ends_at_once_is_said_and_not_waited_for(cluster, script_of, program):
    program("ray", "echo no such option >&2; exit 1")
    text = script_of().replace(f"port={cluster.listener.getsockname()[1]}", "port=1")
    process = cluster.start(text)
    assert process.wait(timeout=60) == 1
    assert "Ray ended on the head node1" in process.stderr.read()


def test_a_ray_that_never_listens_ends_the_job_in_time(cluster, script_of):
    text = script_of(wait=2).replace(f"port={cluster.listener.getsockname()[1]}", "port=1")
    process = cluster.start(text)
    assert process.wait(timeout=60) == 1
    assert "Ray did not listen on 127.0.0.1:1 within 2 s" in process.stderr.read()


def test_a_failing_set_up_command_ends_the_job(cluster, script_of):
    process = cluster.start(script_of(setup=["source /nowhere/activate"]))
    assert process.wait(timeout=60) != 0
    assert "/nowhere/activate" in process.stderr.read()
    assert "verl-tim train" not in cluster.lines()
