"""Shell text that holds arbitrary words: templates whose values are quoted, and what several launchers run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from verl_tim.launchers.job import TRAIN, Job


def words(command: Sequence[str]) -> str:
    """A command line that a POSIX shell splits into exactly these words."""
    return shlex.join(command)


def exports(variables: Mapping[str, str]) -> str:
    """One `export` per variable, in the order of their names."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items()))


def prelude(job: Job, *, variables: bool = True) -> str:
    """What a node's shell runs before anything of ours: set-up commands, then variables. A failing command ends it.

    Args:
        variables: False where the scheduler itself sets them.
    """
    return "\n".join(["set -e", *job.settings.setup, exports(job.environment) if variables else ""]).rstrip()


def driver(job: Job, *, stop_after: int | None = None) -> str:
    """Bash, on the node where the run is driven, with RAY_ADDRESS set or Ray running there: preflight, then the run.

    Args:
        stop_after: seconds after which the run is asked to stop, for schedulers that would just end it.
    """
    given = '"${overrides[@]}"'
    return "\n".join(
        [
            array("overrides", job.words),
            f"{words(job.preflight)} {given}",
            f"exec {words([*time_limit(stop_after), *TRAIN])} {given}",
        ]
    )


def time_limit(seconds: int | None) -> list[str]:
    """The words in front of a command that is asked to stop after so long; its exit code is then 124."""
    return [] if seconds is None else ["timeout", "--signal=TERM", "--kill-after=60", str(seconds)]


def array(name: str, values: Iterable[str]) -> str:
    """A bash array, one word per line."""
    return "\n".join([f"{name}=(", *(f"    {shlex.quote(value)}" for value in values), ")"])


def time_for_the_run(job: Job) -> int | None:
    """Seconds from the start of the run until it is asked to stop."""
    limit = job.settings.time_limit
    return None if limit is None else max(limit - job.settings.stop_before, 30)


def render(template: str, **values: Any) -> str:
    """A file of `templates/`; `| q` quotes a word, `| words` a list of them."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    # no HTML here; quoting is the templates' own, by filter
    made = Environment(
        loader=PackageLoader("verl_tim.launchers"),
        autoescape=False,
        undefined=StrictUndefined,
        # bash counts with ${#...}
        comment_start_string="{##",
        comment_end_string="##}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(q=shlex.quote, words=words)
    made.globals.update(array=array, TRAIN=TRAIN)
    return made
