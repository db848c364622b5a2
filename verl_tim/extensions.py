"""Packages that add architectures or rejection rules to this one, found by their entry points.

    [project.entry-points."verl_tim.extensions"]
    my_package = "my_package.extension"

Importing that module registers what it adds (`verl_tim.models.architecture.register`,
`verl_tim.correction.rules.register_rule`). It is imported when an architecture or a rule is first looked up, in every
process that does, on every machine where the package is installed: driver, trainer, workers, servers. What verl itself
has a registry for (rollouts, policy losses, advantage estimators) is registered through verl's own group
`verl.plugins`. docs/extending.md shows each.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "verl_tim.extensions"

_loaded: dict[str, Exception | None] = {}


class ExtensionError(RuntimeError):
    """An installed extension cannot be imported. A run without what it adds would be another run, so it stops."""


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """Read once: an architecture is looked up in loops, and every look reads the metadata of all packages."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


def load() -> tuple[str, ...]:
    """Import every installed extension, once per process; their names.

    Raises:
        ExtensionError: names entry point, module and cause.
    """
    for entry in _installed():
        if entry.name not in _loaded:
            _loaded[entry.name] = None  # before the import: what it looks up on its way must not load it again
            try:
                entry.load()
            except Exception as error:
                _loaded[entry.name] = error
        cause = _loaded[entry.name]
        if cause is not None:
            raise ExtensionError(
                f"extension {entry.name} ({entry.value}, entry point of {GROUP}) cannot be imported: "
                f"{type(cause).__name__}: {cause}; correct or uninstall that package"
            ) from cause
    return tuple(_loaded)
