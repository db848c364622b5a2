"""The port at which a run's trainer workers meet.

See `verl_tim.plugin.patch_master_port`.
"""

from __future__ import annotations

import functools
import logging
import secrets
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20000
"""Ray's workers listen on 10002 to 19999."""
_END = 30000
"""From here on Kubernetes hands out ports of its nodes to services."""
_TRIED = 64
"""Ports that verl tries, one after the other, where the first are taken."""
_NONE_FREE = "Could not find a free port in range"
"""verl 0.9.1, single_controller/ray/base.py:109."""


def port_range() -> list[int] | None:
    """Half-open range of ports, drawn anew in each call, that no outgoing connection of this machine gets.

    None, and then verl chooses as it would, where the system leaves no room below the ports that it hands out, or does
    not say which those are.
    """
    try:
        first_ephemeral = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError) as error:  # no Linux, or a sandbox's own /proc
        logger.warning(
            "%s names no ports (%r): the trainer workers' port may be taken by a connection", _EPHEMERAL, error
        )
        return None
    room = min(first_ephemeral, _END) - _LOWEST - _TRIED
    if room < _TRIED:
        return None
    # not of Python's generators, which a seed makes equal in runs that start together
    start = _LOWEST + secrets.randbelow(room)
    return [start, start + _TRIED]


def keep_ports_apart(module: ModuleType) -> None:
    """Patch verl's `RayWorkerGroup`; a range that its caller gives is kept.

    The range is drawn on the driver's machine, and the port is looked for on the first rank's node, where others may be
    taken, or kept from being bound: verl then ends with its range, and what that is for is said here.
    """
    original = module.RayWorkerGroup._get_master_addr_port

    @functools.wraps(original)
    def get_master_addr_port(
        self: Any, pg: Any, bundle_index: int = 0, master_port_range: list[int] | None = None
    ) -> None:
        ports = master_port_range or port_range()
        try:
            original(self, pg, bundle_index=bundle_index, master_port_range=ports)
        except RuntimeError as error:  # from another process, as a class of Ray's that is one, too
            if master_port_range or ports is None or _NONE_FREE not in str(error):
                raise
            raise RuntimeError(
                f"the trainer's ranks meet at a port of the first rank's node, and none of {ports[0]} to "
                f"{ports[1] - 1} can be bound there: free them, or let the node's policies allow "
                f"{_LOWEST} to {_END - 1}, of which each start draws {_TRIED}"
            ) from error

    module.RayWorkerGroup._get_master_addr_port = get_master_addr_port
