"""Silence for libraries that print and warn while a model loads; none of it belongs into a report."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """verl's and transformers' output is dropped inside the block; errors still raise."""
    from transformers.utils import logging as transformers_logging

    logging.getLogger("verl_tim.engine").setLevel(logging.WARNING)
    # torch's tracer warns once of a name that a library asks by
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings(), contextlib.redirect_stdout(_Discard()):
        warnings.simplefilter("ignore")
        yield


class _Discard:
    """A stdout for libraries that print."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None
