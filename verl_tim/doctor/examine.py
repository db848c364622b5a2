"""All rules at once over one config and one machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from verl_tim.doctor.pair import PAIR, mended_by_pair
from verl_tim.doctor.rule import Level, Rule, Severity, Violation, key_of
from verl_tim.doctor.rules import OWN, start
from verl_tim.doctor.view import View
from verl_tim.launch.checks import CHECKS, Check, keys, made, one_per_key, run_checks, verl_config
from verl_tim.launch.run_folder import check_free
from verl_tim.training.finding import Finding
from verl_tim.training.remedy import typeable

# Checks of things that are made at the start, where a config leaves them to this package and names no path.
_MADE = {"model": "actor_rollout_ref.model.path", "tokenizer": "actor_rollout_ref.model.path"}
_VALUES = start.CHECK_RULES["values"].id
_MADE_DATA = ("data.train_files", "data.val_files")


@dataclass(frozen=True)
class CheckState:
    """A start-up check, and how it went: ok, fails, made at start, or not looked at.

    Attributes:
        until: of one that was not looked at: the check that has to pass before it can be.
    """

    check: Check
    state: str
    findings: tuple[Finding, ...] = ()
    until: str | None = None


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        violations: errors first, of those what keeps a run from starting first, then what ends it later; one per
            setting, and otherwise in the order of the rules.
        checks: the start-up checks that apply to this config.
        together: those of the violations that one remedy mends, and that remedy; empty where the config has it.
    """

    violations: tuple[Violation, ...]
    checks: tuple[CheckState, ...]
    together: tuple[Violation, ...] = ()
    together_remedy: str = ""

    @property
    def errors(self) -> tuple[Violation, ...]:
        return tuple(violation for violation in self.violations if violation.level is Level.ERROR)

    @property
    def counts(self) -> dict[str, int]:
        counted = Counter(violation.level for violation in self.violations)
        return {level.value: counted[level] for level in Level}


def examine(view: View, *, exact: bool = False, folder_is_free: bool = True, damaged: Sequence[Finding] = ()) -> Report:
    """Every violation of every rule.

    Args:
        exact: hold the config to zero mismatch: what breaks it is an error, whatever the rollout.
        folder_is_free: False for the config of a run, whose folder holds that run.
        damaged: what is wrong with what was made before (`launch.prepare.find_made`).
    """
    held_to_exactness = exact or view.zero_mismatch or not view.has_tim_group
    checks, at_start = _start(view, folder_is_free, damaged)
    found = [(rule, finding) for rule in OWN if rule.looks_at(view) for finding in rule.examine(view)]
    # one condition may be a rule of the doctor's and a reason to refuse a start: said once, as an error
    refused = {(key_of(finding), finding.problem) for _, finding in at_start}
    said = {(key_of(finding), finding.problem) for _, finding in found}
    found += [(rule, finding) for rule, finding in at_start if (key_of(finding), finding.problem) not in said]
    violations = []
    for rule, finding in found:
        blocks = rule.at_start or (key_of(finding), finding.problem) in refused
        level = Level.ERROR if blocks else _level(rule.severity, held_to_exactness)
        remedy = typeable(finding.remedy or rule.remedy, view.given)
        violations.append(
            Violation(
                rule.id,
                rule.severity,
                level,
                key_of(finding),
                finding.problem,
                rule.why,
                remedy,
                blocks,
                of_machine=rule.needs_machine,
            )
        )
    told = tuple(_one_per_setting(view, sorted(dict.fromkeys(violations), key=_weight)))
    return Report(told, checks, mended_by_pair(view, told), typeable(PAIR, view.given))


def _weight(violation: Violation) -> tuple[int, int]:
    """What is to be mended first, first."""
    stops = violation.severity is Severity.STOPS
    return list(Level).index(violation.level), 0 if violation.blocks else 1 if stops else 2


def _one_per_setting(view: View, violations: Iterable[Violation]) -> list[Violation]:
    """A setting has one value, so what several rules find in it is one mistake: the first leads, with the others in it.

    What is found in a group as a whole stays apart: it may be about different keys of the group. Of a value that
    nobody can mean, rules have only what they read in its place to speak of.
    """
    by_key: dict[str, list[Violation]] = {}
    apart: list[list[Violation]] = []
    for one in violations:
        if one.key not in by_key or OmegaConf.is_dict(OmegaConf.select(view.config, one.key, throw_on_missing=False)):
            by_key[one.key] = []
            apart.append(by_key[one.key])
        by_key[one.key].append(one)
    return [
        first._replace(also=tuple(one for one in others if one.blocks or first.rule != _VALUES))
        for first, *others in apart
    ]


def _level(severity: Severity, held_to_exactness: bool) -> Level:
    if severity is Severity.EXACTNESS:
        return Level.ERROR if held_to_exactness else Level.WARNING
    return {Severity.WASTE: Level.WARNING, Severity.NOTE: Level.NOTE}.get(severity, Level.ERROR)


def _start(
    view: View, folder_is_free: bool, damaged: Sequence[Finding]
) -> tuple[tuple[CheckState, ...], list[tuple[Rule, Finding]]]:
    """The start-up checks that apply, and what they found, one finding per key.

    A value that cannot be meant keeps the later checks from computing: they are not looked at then.
    """
    looks = [
        check
        for check in CHECKS
        if (view.launched or not check.of_tim)
        and (view.machine is not None or not check.of_machine)
        and (folder_is_free or check.run is not check_free)
    ]
    others = [check for check in looks if check.run is not verl_config.check_verl_tim]
    ran = dict(run_checks(view.config, others))
    cut_short = len(ran) < len(others)
    last = list(ran)[-1].name
    by_key: dict[str, tuple[Rule, Finding]] = {}
    states = []
    for check in looks:
        if check.run is verl_config.check_verl_tim:
            pairs = [] if cut_short else list(_start_checks(view))
            looked = not cut_short
        else:
            pairs = [(start.CHECK_RULES[check.name], finding) for finding in ran.get(check, [])]
            if check.run is made.check_settings:
                pairs += [(start.CHECK_RULES[check.name], finding) for finding in damaged]
            looked = check in ran
        for rule, finding in pairs:
            by_key.setdefault(key_of(finding), (rule, finding))
        findings = [
            replace(one, remedy=typeable(one.remedy, view.given)) for one in one_per_key(one for _, one in pairs)
        ]
        state = _state(check, findings, looked, view)
        states.append(CheckState(check, state, tuple(findings), last if state == "not looked at" else None))
    return tuple(states), list(by_key.values())


def _start_checks(view: View) -> Iterable[tuple[Rule, Finding]]:
    left_to_us = {key for key in keys.MADE_FROM if OmegaConf.select(view.config, key, throw_on_missing=False) is None}
    for rule in start.START_RULES:
        if rule.looks_at(view) and start.applies(rule, view):
            yield from ((rule, finding) for finding in rule.examine(view) if finding.key not in left_to_us)


def _state(check: Check, findings: Any, looked: bool, view: View) -> str:
    if findings:
        return "fails"
    if not looked:
        return "not looked at"
    at_start = (check.name in _MADE and view.get(_MADE[check.name]) is None) or (
        check.name == "data" and any(view.get(key) is None for key in _MADE_DATA)
    )
    return "made at start" if at_start and view.launched else "ok"
