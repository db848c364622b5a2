"""A wheel holds everything: configs, recipes, entry points; and a recipe composes from it, in any folder."""

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from verl_tim.launch.recipes import group_options, recipe_names

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    # a copy: building leaves folders behind, and must not see what an earlier build left
    subprocess.run(["git", "-C", str(ROOT), "checkout-index", "-a", f"--prefix={source}/"], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)],
        check=True,
    )
    (path,) = out.glob("verl_tim-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)], check=True
    )
    return target


def run(installed, folder, *words):
    """A command that sees the installed wheel first; the editable install is behind it on the path."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder, env=env)


@pytest.mark.slow
def test_every_yaml_and_recipe_page_is_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for recipe in recipe_names():
        for file in ("__init__.py", f"{recipe}.yaml", "README.md"):
            assert f"verl_tim/recipes/{recipe}/{file}" in names
    for group, options in group_options().items():
        for option in options:
            assert f"verl_tim/configs/{group}/{option}.yaml" in names
    assert "verl_tim/configs/tim.yaml" in names
    assert "verl_tim/py.typed" in names
    for template in ("slurm", "ray_job", "skypilot_run"):
        assert f"verl_tim/launchers/templates/{template}.sh.j2" in names
    assert "verl_tim/launchers/kuberay_schema.json" in names
    assert not [name for name in names if name.startswith("tests/")]


@pytest.mark.slow
def test_entry_points_and_requirements(wheel):
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
    points = archive.read(info).decode()
    assert "[verl.plugins]" in points
    assert "verl_tim = verl_tim.plugin" in points
    assert "verl-tim = verl_tim.cli:main" in points
    metadata = Parser().parsestr(archive.read(info.replace("entry_points.txt", "METADATA")).decode())
    needs = metadata.get_all("Requires-Dist")
    assert "verl==0.9.1" in needs
    assert not [need for need in needs if need.startswith(("vllm", "wandb")) and "extra" not in need]
    assert metadata["License"] == "Apache-2.0" or metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipe_names())
def test_plain_verl_composes_it_in_a_fresh_folder(installed, tmp_path, recipe):
    result = run(
        installed,
        tmp_path,
        *("-m", "verl.trainer.main_ppo", "--config-path", f"pkg://verl_tim.recipes.{recipe}", "--config-name", recipe),
        *("rollout=stock", "trainer=stock", "trainer.total_training_steps=20", "--cfg", "job"),
    )
    assert result.returncode == 0, result.stderr
    assert "total_training_steps: 20" in result.stdout
    assert "impl_backend: torch" in result.stdout
    assert f"recipe: {recipe}" in result.stdout


@pytest.mark.slow
def test_verl_tim_composes_it_in_a_fresh_folder(installed, tmp_path):
    result = run(installed, tmp_path, "-m", "verl_tim.cli", "doctor", "--json", "recipe=cpu_grpo", "rollout=stock")
    assert result.returncode == 0, result.stdout + result.stderr
    where = run(installed, tmp_path, "-c", "import verl_tim.recipes.cpu_grpo as recipe; print(recipe.__file__)")
    assert where.stdout.startswith(str(installed))
