"""Exit codes that say neither a command's result nor its failure.

This file imports nothing of weight: who is being interrupted reads it, perhaps in the middle of torch's import.
"""

from __future__ import annotations

INTERRUPTED = 130
"""Of what was ended on request: by Ctrl-C, SIGTERM or SIGHUP, or because its time was up."""

RESULT_LOST = 74
"""Of a command whose result stdout would not take: a full disk, a pipe whose reader has gone."""

TIME_IS_UP = 75
"""Of several runs, where nothing failed and some are left: EX_TEMPFAIL of sysexits.h, come again."""
