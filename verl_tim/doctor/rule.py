"""What a rule is: a function over the view that yields findings, with what the page says about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_tim.training.config import WORKER_ENVIRONMENT
from verl_tim.training.finding import Finding

if TYPE_CHECKING:
    from verl_tim.doctor.view import View

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ENVIRONMENT = WORKER_ENVIRONMENT


class Severity(Enum):
    """What a violation does to the run. The value is how it is printed."""

    EXACTNESS = "breaks exactness"
    CORRECTION = "silently disables a correction"
    STOPS = "will hang or die"
    WASTE = "wastes"
    NOTE = "note"


class Level(Enum):
    """How much a violation weighs; any error makes the exit code 1."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


Examine = Callable[["View"], Iterable[Finding]]


@dataclass(frozen=True)
class Rule:
    """One row of docs/doctor.md.

    Attributes:
        id: group and name, such as `exact.liger`; stable, for scripts.
        severity: what a violation does.
        keys: the config keys it looks at (or other sources, in words).
        why: the mechanism, in one or two sentences.
        remedy: what to do; a finding with a remedy of its own takes that.
        examine: yields the findings; a finding says what is there, the rule says why that is a problem.
        reports: public reports of this fault, and the numbers of verl 0.9.1's defects.
        at_start: True if the finding also keeps a run of verl_tim from starting.
        needs_machine: True if it says nothing when the machine is left out.
    """

    id: str
    severity: Severity
    keys: tuple[str, ...]
    why: str
    remedy: str
    examine: Examine
    reports: tuple[str, ...] = ()
    at_start: bool = False
    needs_machine: bool = False

    def looks_at(self, view: View) -> bool:
        """Whether it has something to look at: what needs a machine is silent where that is left out."""
        return view.machine is not None or not self.needs_machine


class Violation(NamedTuple):
    """One mistake: what a rule found, complete, and what other rules found in the same setting.

    Attributes:
        blocks: it also keeps a run from starting.
        also: of other rules, about the same key; they have none themselves.
        of_machine: it was found by looking at this machine.
    """

    rule: str
    severity: Severity
    level: Level
    key: str
    problem: str
    why: str
    remedy: str
    blocks: bool = False
    also: tuple[Violation, ...] = ()
    of_machine: bool = False

    def to_mapping(self) -> dict[str, Any]:
        """For JSON."""
        also = [one.to_mapping() for one in self.also]
        return {**self._asdict(), "severity": self.severity.value, "level": self.level.value, "also": also}


class Rules(list[Rule]):
    """The rules of one file, in the order in which they are written there."""

    def rule(
        self,
        id: str,
        severity: Severity,
        *keys: str,
        remedy: str,
        reports: tuple[str, ...] = (),
        at_start: bool = False,
        needs_machine: bool = False,
    ) -> Callable[[Examine], Examine]:
        """Decorator: register a function as a rule; its docstring is the rule's `why`."""

        def register(examine: Examine) -> Examine:
            why = " ".join((inspect.getdoc(examine) or "").split())
            self.append(Rule(id, severity, keys, why, remedy, examine, reports, at_start, needs_machine))
            return examine

        return register


def key_of(finding: Finding) -> str:
    """The key alone: some findings of the engine's options name the value behind it."""
    return finding.key.partition("=")[0]


def found(key: str, problem: str, remedy: str = "") -> Finding:
    """A finding; without a remedy it takes the rule's."""
    return Finding(key, problem, remedy)
