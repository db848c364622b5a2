"""What differs between runs, from their manifests and configs, and the words for it.

Of runs with different rollouts the rollout is what is compared, and everything else that differs is told apart from it.
Of runs with one rollout its settings are settings like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_tim.diagnosis.config_diff import FILLED_KEYS, diff_configs
from verl_tim.diagnosis.groups import SEED_KEY
from verl_tim.diagnosis.manifest import Difference, diff
from verl_tim.diagnosis.run import UNKNOWN, Run


@dataclass(frozen=True)
class WhatDiffers:
    """What differs between runs.

    Attributes:
        settings: besides the rollout and, where seeds are grouped, the seed.
        rollout: what the change of rollout consists of; with one rollout, its settings that differ.
        unknown: what could not be compared, one sentence each.
        one_rollout: all runs are known to have the same rollout.
        seeds: runs that differ in the seed are grouped.
    """

    settings: list[Difference]
    rollout: list[Difference]
    unknown: list[str]
    one_rollout: bool
    seeds: bool

    @classmethod
    def of(cls, runs: Sequence[Run], *, seeds: bool) -> WhatDiffers:
        """Read it from runs; `seeds`: those of one setting are grouped, so that their keys are no difference."""
        found, unknown = all_differences(runs)
        if seeds:
            found = [d for d in found if not SEED_KEY.fullmatch(d.key)]
        return cls(
            settings=[d for d in found if not d.of_rollout],
            rollout=[d for d in found if d.of_rollout],
            unknown=unknown,
            one_rollout=len({run.rollout for run in runs}) == 1 and runs[0].rollout != UNKNOWN,
            seeds=seeds,
        )

    @property
    def rows(self) -> list[Difference]:
        """What a curve that parts from another may come from, the change of rollout left out."""
        return self.settings + (self.rollout if self.one_rollout else [])

    @property
    def title(self) -> str:
        """Of the table of `rows`."""
        return "What differs" if self.one_rollout else "What differs besides the rollout"

    def nothing(self) -> str | None:
        """What to say where there are no `rows`; None where there are, or where something could not be compared."""
        if self.rows or self.unknown:
            return None
        same = "all other settings, versions and devices that were recorded are the same"
        if not self.one_rollout:
            but = "the rollout and the seed differ" if self.seeds else "the rollout differs"
            return f"Nothing but {but} between the runs: {same}."
        if self.seeds:
            return f"Nothing but the seed differs between the runs: the rollout and {same}."
        return (
            "Nothing differs between the runs: the rollout and all settings, versions and devices that were recorded "
            "are the same (names, folders and reporting are not compared), so these runs repeat one another."
        )

    def note(self) -> str | None:
        """What `rows` mean for a difference of the curves; None where there are none."""
        count = len(self.rows)
        if not count:
            return None
        if not self.one_rollout:
            settings = "1 other setting" if count == 1 else f"{count} other settings"
            return f"The runs differ in {settings} besides the rollout, so a difference is not the rollout's alone."
        settings, where = ("1 setting", "it") if count == 1 else (f"{count} settings", "any of them")
        return f"The runs have the same rollout and differ in {settings}: a difference may come from {where}."


def all_differences(runs: Sequence[Run]) -> tuple[list[Difference], list[str]]:
    """Differences from manifests and configs, those of the rollout too, and what could not be compared."""
    unknown: list[str] = []
    if len(runs) < 2:
        return [], unknown
    found: list[Difference] = []
    manifests = {run.name: run.manifest for run in runs if run.manifest is not None}
    if len(manifests) == len(runs):
        found += diff(manifests, include_rollout=True)
    else:
        lacking = [run.name for run in runs if run.manifest is None]
        unknown.append(f"No manifest in {', '.join(lacking)}: what ran there is known from its config at best.")
    configs = {run.name: run.config for run in runs if run.config is not None}
    if len(configs) == len(runs):
        from_config = diff_configs(configs, include_rollout=True)
        if len({run.tracked for run in runs}) > 1:
            from_config = [d for d in from_config if not FILLED_KEYS.fullmatch(d.key)]
        # The manifest says the same of these, from the processes themselves.
        told = {d.key for d in found}
        own = [
            d for d in from_config if _SAME_IN_MANIFEST.get(d.key) not in told and _correction_key(d.key) not in told
        ]
        values = {d.key: d.values for d in own}
        found += [d for d in own if values.get(_mirrored(d.key) or "") != d.values]
    else:
        lacking = [run.name for run in runs if run.config is None]
        unknown.append(f"No config.yaml in {', '.join(lacking)}: settings cannot be compared.")
    return found, unknown


# Key of a config -> fact of the manifest.
_SAME_IN_MANIFEST = {
    "tim.trainer_numerics": "run.trainer_numerics",
    "tim.choices.correction": "run.correction",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "correction.loss_mode",
    **{f"tim.choices.{name}": f"run.{name}" for name in ("task", "recipe", "rollout")},
}
# The trainer's correction, and the copy of it that its workers read.
_CORRECTION, _WORKERS_CORRECTION = (
    "algorithm.rollout_correction.",
    "actor_rollout_ref.actor.policy_loss.rollout_correction.",
)


def _correction_key(key: str) -> str | None:
    """The manifest's name of a key of the correction, for any other None."""
    for prefix in (_CORRECTION, _WORKERS_CORRECTION):
        if key.startswith(prefix):
            return f"correction.{key.removeprefix(prefix)}"
    return None


def _mirrored(key: str) -> str | None:
    """What a key of the workers' copy of the correction is the copy of, for any other None."""
    return _CORRECTION + key.removeprefix(_WORKERS_CORRECTION) if key.startswith(_WORKERS_CORRECTION) else None
