"""The start-up checks, one row each: the name, and the function that lists what is wrong.

A check takes the resolved config and yields findings; it starts nothing, downloads nothing large, and is done within
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_tim.launch.checks import (
    cluster,
    correction,
    data,
    keys,
    machine,
    made,
    model,
    prometheus,
    reward,
    values,
    verl_config,
)
from verl_tim.launch.errors import Finding
from verl_tim.launch.run_folder import check_free


@dataclass(frozen=True)
class Check:
    """A start-up check.

    Attributes:
        name: for people.
        run: takes the config, yields the findings.
        of_tim: it reads the `tim:` group, which a plain verl config does not have.
        of_machine: it looks at this machine, and not only at the config.
        of_null: it speaks of keys that are null because they are still to be made.
        ends_the_list: the other checks compute with what it looks at, so after a finding of its there are none.
        names_misspelt: its findings are the keys that are misspelt.
        takes_misspelt: `run` takes these too, as `misspelt`; None where nobody has looked for them.
    """

    name: str
    run: Callable[..., Iterable[Finding]]
    of_tim: bool = False
    of_machine: bool = False
    of_null: bool = False
    ends_the_list: bool = False
    names_misspelt: bool = False
    takes_misspelt: bool = False


CHECKS: tuple[Check, ...] = (
    Check("keys", keys.check, of_null=True),
    Check("spelling", keys.check_spelling, names_misspelt=True),
    Check("values", values.check, ends_the_list=True),
    Check(
        "correction",
        correction.check,
        ends_the_list=True,
    ),
    Check("cluster", cluster.check, of_tim=True),
    Check("run folder", check_free, of_tim=True),
    Check("folders", made.check_places, of_tim=True, of_machine=True),
    Check("prometheus", prometheus.check, of_machine=True),
    Check("to be made", made.check_settings, of_tim=True),
    Check("machine", machine.check, of_machine=True),
    Check("packages", machine.check_packages, of_machine=True),
    Check("model", model.check_model),
    Check("tokenizer", model.check_tokenizer),
    Check("data", data.check_files),
    Check("reward", reward.check),
    Check("lengths", data.check_lengths),
    Check(
        "rollout and trainer",
        verl_config.check_verl_tim,
    ),
    Check("verl", verl_config.check_verl, takes_misspelt=True),
)


def run_checks(
    config: DictConfig, checks: Sequence[Check] = CHECKS, *, spelt: bool = False
) -> list[tuple[Check, list[Finding]]]:
    """Every check and what it found.

    Where data or model are still to be made (null), only the check of the keys speaks about them. Values that cannot be
    meant end the list: nothing else can be said before they are right.

    Args:
        spelt: every key is known to be spelt as verl spells it, and the check of that is left out.
    """
    null = {key for key in keys.MADE_FROM if OmegaConf.select(config, key, throw_on_missing=False) is None}
    results: list[tuple[Check, list[Finding]]] = []
    misspelt: list[str] | None = [] if spelt else None
    for check in checks:
        if spelt and check.names_misspelt:
            continue
        told = check.run(config, misspelt=misspelt) if check.takes_misspelt else check.run(config)
        found = [finding for finding in told if check.of_null or finding.key not in null]
        results.append((check, found))
        if check.names_misspelt:
            misspelt = [finding.key for finding in found]
        if check.ends_the_list and found:
            break
    return results


def all_findings(config: DictConfig, *, spelt: bool = False) -> list[Finding]:
    """What all checks found, one finding per key: the first check to name a key knows it best.

    Args:
        spelt: as of `run_checks`: an earlier round has looked.
    """
    return one_per_key(finding for _, findings in run_checks(config, spelt=spelt) for finding in findings)


def one_per_key(findings: Iterable[Finding]) -> list[Finding]:
    """The first finding of every key."""
    by_key: dict[str, Finding] = {}
    for finding in findings:
        by_key.setdefault(finding.key, finding)
    return list(by_key.values())
