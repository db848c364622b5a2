"""Arrows point one way: the commands know verification, and it knows neither them nor what starts a run."""

from __future__ import annotations

import ast
from pathlib import Path

import verl_tim

ROOT = Path(verl_tim.__file__).parent
ABOVE = ("verl_tim.commands", "verl_tim.launch", "verl_tim.launchers", "verl_tim.cli", "verl_tim.doctor")


def imported(file: Path) -> set[str]:
    """Modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_verification_imports_nothing_of_what_calls_it():
    files = sorted((ROOT / "verification").glob("*.py"))
    assert len(files) > 10
    wrong = {
        file.name: name
        for file in files
        for name in imported(file)
        if any(name == one or name.startswith(f"{one}.") for one in ABOVE)
    }
    assert wrong == {}


def test_benchmark_commands_import_no_privates_of_each_other():
    wrong = {
        file.name: name
        for file in sorted((ROOT / "commands" / "bench").glob("*.py"))
        for name in imported(file)
        if name.startswith("verl_tim.commands.bench.") and name.rpartition(".")[2].startswith("_")
    }
    assert wrong == {}
