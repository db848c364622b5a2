"""Arbitrary words reach `verl-tim` as they were given, through every launcher: the rendered text is really run."""

import json
import os
import shlex
import socket
import subprocess

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from verl_tim.launchers import kuberay, ray_job, skypilot, slurm

# What a word of a command line can hold: anything but NUL (and lone surrogates, which no encoding has).
WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
ODD = [
    "a b",
    "it's",
    'say "no"',
    "$HOME `id` $(id)",
    "new\nline",
    "back\\slash",
    "-n",
    "",
    "*",
    "!x",
    "é ☃",
    "#",
    "a=[1,'2']",
]
quick = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


def run(script, folder, **environ):
    """Run bash with fake programs in front; what `verl-tim` and others were called with."""
    log = folder.parent / "log"
    log.write_bytes(b"")
    done = subprocess.run(
        ["bash"],
        input=script.encode(),
        env={"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), **environ},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    words, calls = [word.decode() for word in log.read_bytes().split(b"\0")[:-1]], []
    while words:
        count = int(words[0])
        calls.append(words[1 : count + 1])
        words = words[count + 1 :]
    return calls


def logs(*variables):
    """A program's text: how many words its call has, and the words, each ended by NUL; values of variables behind."""
    values = " ".join(f'"${name}"' for name in variables)
    return rf'''printf '%s\0' "$(($# + {1 + len(variables)}))" "$(basename "$0")" "$@" {values} >>"$LOG"'''


@pytest.fixture
def fakes(program):
    return program("verl-tim", logs())


@quick
@given(st.lists(WORD, min_size=1, max_size=4))
@example(ODD)
def test_what_kubernetes_runs(job_with, fakes, words):
    job = job_with(words=tuple(words))
    scripts, _ = yaml.safe_load_all(kuberay.manifest(job))
    look, train = run(scripts["data"]["run.sh"], fakes)
    assert look == ["verl-tim", "preflight", "--wait", "600", *words]
    assert train == ["verl-tim", "train", *words]


@quick
@given(st.dictionaries(st.sampled_from(["A", "B_1", "NCCL_X"]), WORD, min_size=1), WORD)
@example({"A": "a b", "B_1": "new\nline'\"$HOME"}, "$(id)")
def test_words_and_variables_on_a_node_of_slurm(job_with, fakes, program, values, word):
    program("scontrol", "echo node1; echo node2")
    # the step's own words begin behind its options; the node's Ray is the fake one, which listens at once
    program("srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    program("ray", "exit 0")
    program("python", "echo 127.0.0.1")
    program("verl-tim", logs(*values))
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        text = slurm.script(job_with({"ports": {"ray": port}}, environment=values, words=(word,)))
        look, train = run(text, fakes, SLURM_JOB_NODELIST="node[1-2]", SLURM_CPUS_ON_NODE="4", SLURM_JOB_ID="7")
    assert look == ["verl-tim", "preflight", "--wait", "600", word, *values.values()]
    assert train == ["verl-tim", "train", word, *values.values()]


@quick
@given(st.lists(WORD, min_size=1, max_size=4))
@example(ODD)
@example(["plain=1", "b=a c", "x='y'"])
@pytest.mark.parametrize("join", [shlex.join, subprocess.list2cmdline], ids=["ray-now", "ray-before"])
def test_a_ray_job_through_both_ways_in_which_ray_has_quoted(job_with, fakes, program, join, words):
    job = job_with(words=tuple(words))
    program("ray", logs())
    (call,) = run(ray_job.script(job), fakes)
    assert call[:3] == ["ray", "job", "submit"]
    entrypoint = call[call.index("--") + 1 :]
    # the head's shell gets one string (dashboard/modules/job/cli.py), and runs it
    look, train = run(join(entrypoint), fakes)
    assert look == ["verl-tim", "preflight", "--wait", "600", *words]
    assert train == ["verl-tim", "train", *words]


@quick
@given(st.lists(WORD, min_size=1, max_size=3), WORD)
@example(ODD, ODD[2])
@example(["a\x85b\nc", "\u2028", "\u2029\r"], "\x85")
def test_yaml_gives_back_what_was_put_in(job_with, words, value):
    job = job_with(words=tuple(words), environment={"A": value})
    task = yaml.safe_load(skypilot.task(job))
    assert task["envs"] == {"A": value}
    assert task["run"] == skypilot.task_of(job)["run"]
    _, manifest = yaml.safe_load_all(kuberay.manifest(job))
    assert manifest == kuberay.ray_job(job)
    environment = json.loads(shlex.split(ray_job.script(job).split("runtime_env=")[1].splitlines()[0])[0])
    assert environment["env_vars"]["A"] == value
