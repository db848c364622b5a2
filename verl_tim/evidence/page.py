"""docs/evidence.md, from run folders alone."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from omegaconf import DictConfig, OmegaConf

from verl_tim.evidence.equal import equal_runs
from verl_tim.evidence.figures import PICTURES
from verl_tim.evidence.names import PLANNED, VARIANTS
from verl_tim.evidence.parts import write_part
from verl_tim.evidence.runs import Evidence
from verl_tim.evidence.tables import TABLES
from verl_tim.evidence.used import is_used
from verl_tim.launch.recipes import RECIPES_PACKAGE

NAME = "evidence.md"
PICTURE_FOLDER = "evidence"
RECIPES = ("evidence_grpo", "evidence_reinforce")
# What the page says of every run in words.
_DESCRIBED = ("data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.ppo_mini_batch_size")
_TASK = "evidence_chain_sum"
PARAMETERS = {"dense": 25.4e6, "moe": 42.8e6}
# What choosing a correction sets.
_OF_CORRECTION = re.compile(r"correction|policy_loss\.loss_mode|^old_log_probs$")


def write_page(evidence: Evidence, out: Path) -> list[Path]:
    """Write `out/evidence.md` and its pictures in `out/evidence/`.

    Of runs that were not done the page says so.
    """
    pictures = [path for name in PICTURES for path in write_part(name, evidence, out / PICTURE_FOLDER)]
    out.mkdir(parents=True, exist_ok=True)
    page = out / NAME
    page.write_text(render(evidence), encoding="utf-8")
    return [page, *pictures]


def render(evidence: Evidence) -> str:
    """The page's text."""
    environment = Environment(
        loader=PackageLoader("verl_tim.evidence"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown of our own numbers
    )
    finished = evidence.finished
    return environment.get_template("evidence.md.j2").render(
        pairs=[pair.name for pair in evidence.pairs],
        planned=len(PLANNED),
        steps=_steps(evidence),
        finished=len(finished),
        missing=sorted({name.pair for name in PLANNED} - {name.pair for name in finished}),
        early=_ended_early(evidence),
        not_finite=_not_finite(evidence),
        not_compared=[f"{pair.name}: {line}" for pair in evidence.pairs for line in pair.comparison.what.unknown],
        otherwise=_otherwise(evidence),
        seeds={pair.name: {g.name: len(g.logs) for g in pair.comparison.groups} for pair in evidence.pairs},
        absent={pair.name: [v for v in VARIANTS if pair.group(v) is None] for pair in evidence.pairs},
        machines=_machines(evidence),
        differences=_differences(evidence),
        equal=list(equal_runs(evidence)),
        tables={name: _table(name, evidence) for name in TABLES},
        folder=PICTURE_FOLDER,
    )


def _table(name: str, evidence: Evidence) -> str:
    evidence.on_part(f"table {name}")
    return TABLES[name](evidence).markdown()


def _recipe(name: str) -> DictConfig:
    """A recipe's own file."""
    config = OmegaConf.create(
        resources.files(RECIPES_PACKAGE).joinpath(name, f"{name}.yaml").read_text(encoding="utf-8")
    )
    assert isinstance(config, DictConfig)
    return config


def _otherwise(evidence: Evidence) -> list[str]:
    """Where runs are not those that the page describes: a rehearsal's must not be read as the experiment's."""
    found: dict[str, None] = {}
    for pair in evidence.pairs:
        model, algorithm = pair.name.split("-")
        name = f"evidence_{algorithm}"
        recipe = _recipe(name) if name in RECIPES else OmegaConf.create({})
        for run in pair.comparison.runs:
            config = OmegaConf.create(run.config or {})
            for key in _DESCRIBED:
                said, ran = OmegaConf.select(recipe, key), OmegaConf.select(config, key)
                if None not in (said, ran) and ran != said:
                    found[f"{pair.name} with `{key}` {ran}, not {said}"] = None
            task = OmegaConf.select(config, "tim.choices.task")
            if task not in (None, _TASK):
                found[f"{pair.name} with `task={task}`"] = None
            parameters = run.manifest.parameters if run.manifest is not None else None
            if parameters is not None and model in PARAMETERS and abs(parameters / PARAMETERS[model] - 1) > 0.01:
                found[f"{pair.name} with a model of {parameters:,} parameters"] = None
    return list(found)


def _steps(evidence: Evidence) -> str:
    """Steps of the runs that are drawn, as they were asked for; `?` where no config tells."""
    asked = {progress.total for progress in evidence.progress.values() if progress.total is not None}
    return " or ".join(map(str, sorted(asked))) or "?"


def _ended_early(evidence: Evidence) -> list[str]:
    """Runs that are drawn and did not come to their last step: what their curves lack is not what others have."""
    return [
        f"`{name}` at step {progress.steps} of {progress.total or '?'}" + (f" ({progress.why})" if progress.why else "")
        for name, progress in evidence.progress.items()
        if not progress.finished
    ]


def _not_finite(evidence: Evidence) -> list[str]:
    """Values that were NaN or infinite, which no mean and no curve has."""
    found = []
    for pair in evidence.pairs:
        for run in pair.comparison.runs:
            steps = {name: at for name, at in run.log.nonfinite().items() if is_used(name)}
            found += [
                f"`{run.name}` `{name}` at {len(at)} steps, first at {at[0]}" for name, at in sorted(steps.items())
            ]
    return found


def _machines(evidence: Evidence) -> list[str]:
    """Device, driver-independent: what the trainers' processes said they ran on."""
    found: dict[str, None] = {}
    for pair in evidence.pairs:
        for run in pair.comparison.runs:
            if run.manifest is not None and run.manifest.trainer.facts.device:
                found[str(run.manifest.trainer.facts.device)] = None
    return list(found)


def _differences(evidence: Evidence) -> list[str]:
    """Settings that differ within a pair besides rollout, seed and correction: a fair comparison has none."""
    found: dict[str, None] = {}
    for pair in evidence.pairs:
        for difference in pair.comparison.what.settings:
            if not _OF_CORRECTION.search(difference.key):
                found[f"{pair.name}: `{difference.key}`"] = None
    return list(found)
