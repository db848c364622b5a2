"""One node's facts, with fake programs and folders where the machine has none."""

import os
import subprocess

import pytest

from verl_tim.preflight import facts

SMI = """
case $1 in
--query-gpu*) echo 'GPU-1, NVIDIA H200, 143771, 143000, 570.1'; echo 'GPU-2, NVIDIA H200, 143771, 1000, 570.1';;
*) echo 'GPU-2, 4711, "/usr/bin/python, -m x", 142000';;
esac
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    def make(text):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def test_this_machine(tmp_path):
    (tmp_path / "data").write_text("rows")
    said = facts.collect({"runs": str(tmp_path / "a" / "b")}, {"data": str(tmp_path / "data"), "gone": "/nowhere/x"})
    assert said.versions["verl"] == "0.9.1"
    assert "python" in said.versions
    assert len(said.source) == 12
    # a folder that is not there yet is measured where it will be made
    assert said.disk["runs"] > 0
    assert said.files["data"].startswith("4 bytes, ")
    assert said.files["gone"] is None


def test_gpus_their_memory_and_who_uses_it(smi):
    smi(SMI)
    gpus, driver, error = facts.gpus_here()
    assert (driver, error) == ("570.1", None)
    assert [gpu.name for gpu in gpus] == ["NVIDIA H200"] * 2
    assert gpus[0].free == 143000 << 20
    assert gpus[0].users == ()
    assert gpus[1].users == ("/usr/bin/python, -m x (pid 4711, 142000 MiB)",)


def test_a_driver_that_fails_is_said_and_no_gpu_is_made_up(smi):
    smi("echo driver/library version mismatch; exit 18")
    gpus, _, error = facts.gpus_here()
    assert gpus == ()
    assert "18" in error


def test_a_driver_that_hangs_is_left_after_its_time(smi, monkeypatch):
    smi("exec sleep 60")
    monkeypatch.setattr(facts, "_SMI_SECONDS", 0.2)
    assert "timed out" in facts.gpus_here()[2]


def test_stamps_tell_files_and_models_apart(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, text in ((one, "{}"), (other, '{"a": 1}')):
        folder.mkdir()
        (folder / "config.json").write_text(text)
        (folder / "model.safetensors").write_bytes(b"x" * 10)
    assert facts.stamp(one) != facts.stamp(other)
    (other / "config.json").write_text("{}")
    assert facts.stamp(one) == facts.stamp(other)
    (other / "model.safetensors").write_bytes(b"y" * 11)
    assert facts.stamp(one) != facts.stamp(other)


def test_the_ends_of_a_large_file_count(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"a" * (3 << 20))
    before = facts.stamp(path)
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"b")
    assert facts.stamp(path) != before


def test_a_place_that_is_a_file_has_no_room(tmp_path):
    (tmp_path / "file").write_text("")
    assert facts.free_disk(tmp_path / "file" / "runs") == f"{tmp_path}/file is a file"


def test_the_source_of_another_checkout_differs(tmp_path):
    import sys

    (tmp_path / "verl_tim").mkdir()
    (tmp_path / "verl_tim" / "__init__.py").write_text("")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import verl_tim; print(verl_tim.__file__)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path))
    here = facts.source_hash()
    import verl_tim

    original = verl_tim.__file__
    try:
        verl_tim.__file__ = str(tmp_path / "verl_tim" / "__init__.py")
        assert facts.source_hash() != here
    finally:
        verl_tim.__file__ = original
