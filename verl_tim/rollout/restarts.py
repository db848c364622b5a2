"""How often Ray has started a rollout server again, for the message that ends a run."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from verl_tim.rollout import successor


@dataclass(frozen=True)
class Restarts:
    """Of one server.

    Attributes:
        done: so far.
        limit: `max_restarts`; key: of the config, where a user changes it.
        never: why it is not started again, whatever the config says; empty where the config decides.
    """

    done: int
    limit: int
    key: str
    never: str = ""

    @classmethod
    def of(cls, server: Any) -> Restarts | None:
        """Of the handle of a server, which may be dead; None where it is none of ours, or another process."""
        text = successor.left(successor.RESTARTS, server)
        return cls(**json.loads(text)) if text else None

    @classmethod
    def count(cls, limit: int, key: str, *, never: str, again: bool) -> None:
        """Runs in the server, when its process begins.

        Args:
            again: Ray has started it again.
        """
        before = successor.left(successor.RESTARTS) if again else ""
        done = json.loads(before)["done"] + 1 if before else int(again)
        successor.leave(successor.RESTARTS, json.dumps(dataclasses.asdict(cls(done, limit, key, never))))

    def __str__(self) -> str:
        """Of one that does not come back, why."""
        if self.limit == 0:
            return f"is not started again ({self.never or f'{self.key}=0'})"
        if self.done < self.limit:  # its node is gone
            if not self.done:
                return f"could not be started again; it had not been before ({self.key}={self.limit})"
            return f"could not be started again, and had been {self.done} of the {self.limit} times of {self.key}"
        times = "once" if self.done == 1 else f"{self.done} times"
        return f"had been started again {times}, as often as {self.key}={self.limit} allows"
