"""The exit code of what was ended on request, which is neither a result nor a failure.

This file imports nothing of weight: who is being interrupted reads it, perhaps in the middle of torch's import.
"""

from __future__ import annotations

INTERRUPTED = 130
"""Of what was ended on request: by Ctrl-C, SIGTERM or SIGHUP, or because its time was up."""
