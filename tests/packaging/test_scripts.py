"""The shell scripts, and what they ask an environment for."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted(ROOT.glob("scripts/*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_valid_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say():
    result = subprocess.run(["shellcheck", "-x", *map(str, SCRIPTS)], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh", "test_gpu.sh", "vllm_cpu.sh"])
def test_command_scripts_are_executable(name):
    assert os.access(ROOT / "scripts" / name, os.X_OK)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def check_env(*arguments, python=sys.executable, env=None):
    return subprocess.run(
        [python, "scripts/check_env.py", *arguments], capture_output=True, text=True, cwd=ROOT, env=env
    )


def test_this_environment_has_everything():
    result = check_env("dev")
    assert result.returncode == 0, result.stdout


def test_empty_environment_is_told_what_it_lacks(tmp_path):
    # -S -I: no site-packages, as in an environment just made
    result = subprocess.run(
        [sys.executable, "-S", "-I", str(ROOT / "scripts/check_env.py")], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 1
    assert "verl==0.9.1 (not installed)" in result.stdout


def test_wrong_version_is_named(monkeypatch):
    module = runpy.run_path(str(ROOT / "scripts/check_env.py"))
    (line,) = module["missing"](["pytest<1"])
    assert re.fullmatch(r"pytest<1 \(installed: [\d.]+\)", line)
    assert module["missing"](["pytest>=1"]) == []


def test_environment_of_another_checkout_is_recognised(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/check_env.py", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("configs", "recipes"):
        (tmp_path / name).mkdir()
    result = subprocess.run(
        [sys.executable, str(tmp_path / "scripts/check_env.py")], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 3, result.stdout


def test_script_names_the_python_it_wants(tmp_path):
    """With no Python that verl runs on, the first line says so."""
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "uname"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    clone = tmp_path / "clone"
    (clone / "scripts").mkdir(parents=True)
    for name in ("scripts/check_env.py", "scripts/env.sh", "scripts/quickstart.sh", "setup.py"):
        shutil.copy(ROOT / name, clone / name)
    result = subprocess.run(
        ["bash", "scripts/quickstart.sh"],
        capture_output=True,
        text=True,
        cwd=clone,
        env={"PATH": str(tmp_path / "bin")},
    )
    assert result.returncode == 1
    assert "No Python 3.10, 3.11 or 3.12 found" in result.stderr


def test_script_names_the_compiler_it_wants(tmp_path):
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "uname"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    # a Python without site-packages: nothing is installed in it
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!{shutil.which("bash")}\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    clone = tmp_path / "clone"
    (clone / "scripts").mkdir(parents=True)
    for name in ("scripts/check_env.py", "scripts/env.sh", "scripts/quickstart.sh", "setup.py"):
        shutil.copy(ROOT / name, clone / name)
    result = subprocess.run(
        ["bash", "scripts/quickstart.sh"],
        capture_output=True,
        text=True,
        cwd=clone,
        env={"PATH": str(tmp_path / "bin")},
    )
    assert result.returncode == 1
    assert "No C compiler found" in result.stderr
    assert "apt-get install build-essential" in result.stderr
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize(("limit", "last"), [("0", "2 skipped"), ("600", "2 passed")])
def test_what_a_time_limit_leaves_out_is_reported(limit, last):
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), f"--time-limit={limit}"]
    words += [f"{__file__}::{name}" for name in ("test_wrong_version_is_named", "test_this_environment_has_everything")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith(last)
    assert ("NOT RUN: --time-limit=0 seconds had passed" in done.stdout) == (limit == "0")


def test_a_limit_that_is_no_number_is_refused():
    done = subprocess.run(
        ["bash", "scripts/test.sh", "--minutes", "soon"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode != 0
    assert "--minutes needs a whole number of minutes, not 'soon'" in done.stderr
