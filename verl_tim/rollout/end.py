"""How a server's process ends with its engine, ours and vLLM's."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

EXIT_CODE = 70
"""Of a server that ends with its engine."""


def end_process() -> NoReturn:
    """Ends this process at once, whatever other threads do; what was printed is written out first."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(EXIT_CODE)
