"""How far the start of a run is, by what train.log has so far: the minute before the first step has no metrics."""

from __future__ import annotations

import re
from pathlib import Path

from verl_tim.launch.new_lines import NewLines
from verl_tim.training.start_lines import ALL_ANSWER, SERVERS_ANSWER

FIRST = "loading verl"

# Begins with a line like the pattern -> what is under way then, in the order of a start. The lines are verl's (0.9.1,
# both trainers), Ray's and our own; a stage whose line a version or an engine does not print is passed over.
_STAGES = (
    (rb"^ray init kwargs", "starting Ray"),  # main_ppo.py:73
    (rb"Started a local Ray instance|Connected to Ray cluster", "Ray is up; the trainer's process loads verl and data"),
    (rb"colocated worker base class", "placing the workers; each loads verl"),  # single_controller/ray/base.py
    (rb"\(WorkerDict pid=", "workers are up; loading the model"),
    (rb"Total steps: -?\d+, num_warmup_steps", "the model is loaded; starting the rollout's engine"),  # fsdp engine
    (SERVERS_ANSWER.encode(), "the rollout's engine is ready; starting the agent loops"),
    (ALL_ANSWER.encode(), "all is up; first weights to the rollout, and validation"),
    (rb"Training Progress:", "first step"),
)


class Stages:
    """Follows a log.

    Attributes:
        now: what is under way.
    """

    def __init__(self, log: Path) -> None:
        self.now = FIRST
        self._left = [(re.compile(pattern), stage) for pattern, stage in _STAGES]
        self._lines = NewLines(log)

    @property
    def over(self) -> bool:
        """Whether the first step has begun."""
        return not self._left

    def look(self) -> str:
        """`now`, after what the log has had since the last call."""
        for line in self._lines.read() if self._left else ():
            for place, (pattern, stage) in enumerate(self._left):
                if pattern.search(line):
                    self.now, self._left = stage, self._left[place + 1 :]
                    break
        return self.now
