"""Names of prompts that repeat from run to run, in place of verl's random ones.

verl draws `uuid.uuid4()` for each prompt, and keeps names in sets and dicts: what walks over them walks in another
order in each run, whatever Python's hash seed. These names count prompts within a step, so that their order as text is
the order of the data, and a resumed run gives a step the names it had.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable


class PromptUids:
    """Stands for the module `uuid` where verl's trainers name prompts. Random, until `count_by` is called."""

    def __init__(self) -> None:
        self._step_of: Callable[[], int] | None = None
        self._step = -1
        self._given = 0

    def count_by(self, step_of: Callable[[], int] | None) -> None:
        """From now on by the trainer's step, which the function tells; None: random again."""
        self._step_of, self._step, self._given = step_of, -1, 0

    def uuid4(self) -> uuid.UUID:
        """The next name."""
        if self._step_of is None:
            return uuid.uuid4()
        step = int(self._step_of())
        if step != self._step:
            self._step, self._given = step, 0
        self._given += 1
        return uuid.UUID(int=(step << 64) | self._given)


PROMPT_UIDS = PromptUids()


def prompt_order(key: str) -> tuple[str, int, int]:
    """Sorts the keys of rows ("{uid}_{session}_{index}") by prompt, session and output."""
    uid, session, index = key.rsplit("_", 2)
    return uid, int(session), int(index)
