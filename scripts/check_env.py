"""Does this Python have what setup.py asks for? Standard library only: it runs before anything is installed.

    python scripts/check_env.py [EXTRA ...]

Exit code 0: all there, and verl_tim is this checkout's. 3: the dependencies are there, verl_tim is not installed from
here. 1: something is missing (listed). 2: this is no Python that verl runs on.
"""

from __future__ import annotations

import re
import runpy
import sys
import types
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements(extras: list[str]) -> list[str]:
    """What setup.py lists, read by running it with a stand-in for setuptools (a new environment need not have that)."""
    said: dict = {}
    stand_in = types.ModuleType("setuptools")
    stand_in.setup = said.update  # type: ignore[attr-defined]
    stand_in.find_packages = lambda **_: []  # type: ignore[attr-defined]
    before = sys.modules.get("setuptools")
    sys.modules["setuptools"] = stand_in
    try:
        runpy.run_path(str(ROOT / "setup.py"))
    finally:
        if before is None:
            del sys.modules["setuptools"]
        else:
            sys.modules["setuptools"] = before
    return said["install_requires"] + [need for extra in extras for need in said["extras_require"][extra]]


def missing(needs: list[str]) -> list[str]:
    """Those that are not installed in a version that fits."""
    lacking = []
    for need in needs:
        name = re.split(r"[\[<>=!~; ]", need, maxsplit=1)[0]
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{need} (not installed)")
            continue
        try:
            from packaging.requirements import Requirement
        except ImportError:
            lacking.append("packaging (not installed)")
            break
        if not Requirement(need).specifier.contains(installed, prereleases=True):
            lacking.append(f"{need} (installed: {installed})")
    return lacking


def installed_from_here() -> bool:
    """Is verl_tim, with its entry points, this checkout's?"""
    try:
        metadata.version("verl_tim")
    except metadata.PackageNotFoundError:
        return False
    # the script's own folder, not the checkout, is on sys.path: what is found here is what is installed
    spec = find_spec("verl_tim")
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent.parent == ROOT


def main() -> int:
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        print(f"Python {sys.version.split()[0]} ({sys.executable}): verl needs 3.10, 3.11 or 3.12")
        return 2
    lacking = missing(requirements(sys.argv[1:]))
    if lacking:
        print("\n".join(lacking))
        return 1
    return 0 if installed_from_here() else 3


if __name__ == "__main__":
    sys.exit(main())
