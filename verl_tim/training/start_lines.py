"""What the trainer says of its start in train.log, for `verl-tim train` to follow it by (`launch.stages`)."""

from __future__ import annotations

SERVERS_ANSWER = "verl_tim: workers and rollout servers are up"
ALL_ANSWER = "verl_tim: every process of the run answers"


def say(line: str) -> None:
    """On stdout at once: Ray carries it to the driver."""
    print(line, flush=True)
