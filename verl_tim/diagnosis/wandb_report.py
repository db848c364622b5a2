"""The comparison as a run of wandb: page and numbers in its workspace, and as an artifact beside the runs compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_tim.diagnosis.compare import Comparison
from verl_tim.diagnosis.run import Run

JOB_TYPE, ARTIFACT_TYPE = "compare", "report"


class WandbReportError(ValueError):
    """The comparison cannot be given to wandb as asked; the message says what to change."""


def send(comparison: Comparison, files: Sequence[Path], folder: Path, project: str | None = None) -> str:
    """Log a comparison to wandb, in the project and the group of its runs; offline where WANDB_MODE says so.

    Args:
        files: what `Comparison.write` wrote: JSON, page and perhaps a picture.
        folder: gets wandb's own folder `wandb`.
        project: of wandb; None takes the runs' own.

    Returns:
        The run's address; offline its folder.

    Raises:
        WandbReportError: no project is known or several are, or the package wandb is missing.
        wandb.errors.Error: wandb cannot start a run (no login, no such project).
    """
    project = project or project_of(comparison.runs)
    group = group_of(comparison.runs)
    try:
        import wandb
    except ImportError as error:
        raise WandbReportError("wandb is not installed: pip install 'verl_tim[wandb]'") from error
    names = [run.name for run in comparison.runs]
    run = wandb.init(
        project=project,
        group=group,
        job_type=JOB_TYPE,
        name="compare " + ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
        config={"runs": names, "baseline": comparison.baseline.name if comparison.baseline else None},
        dir=str(folder),
    )
    with run:
        _, page, *_ = files
        run.log(
            {"compare": wandb.Html(page.read_text(encoding="utf-8"), inject=False), "signals": _signals(comparison)}
        )
        run.summary["verdict"] = comparison.verdict.lead
        artifact = wandb.Artifact(artifact_name(group), type=ARTIFACT_TYPE, metadata={"runs": names})
        for file in files:
            # the files stay where they are, so an offline run needs no copy of them to be sent later
            artifact.add_file(str(file), policy="immutable")
        run.log_artifact(artifact)
        return run.url or run.dir.removesuffix("/files")


def project_of(runs: Sequence[Run]) -> str:
    """The project that all runs were logged to."""
    found = sorted({str(name) for run in runs if (name := _select(run, "trainer", "project_name"))})
    if len(found) == 1:
        return found[0]
    what = f"the runs are of several projects ({', '.join(found)})" if found else "no run here names its project"
    raise WandbReportError(f"{what}: give --wandb-project")


def group_of(runs: Sequence[Run]) -> str | None:
    """The group that all runs were filed under; None where they differ or do not say."""
    groups = {_select(run, "tim", "tracking", "group") or _select(run, "tim", "choices", "recipe") for run in runs}
    (only,) = groups if len(groups) == 1 else (None,)
    return None if only is None else str(only)


def artifact_name(group: str | None) -> str:
    """`compare-GROUP` in the letters that wandb allows."""
    return "compare" if group is None else "compare-" + re.sub(r"[^\w.-]+", "_", group)


def _select(run: Run, *keys: str) -> Any:
    node: Any = run.config
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _signals(comparison: Comparison) -> Any:
    """When each signal leaves the baseline's band, by run."""
    import wandb

    rows = [[d.run, d.signal, d.step, d.state] for d in comparison.warnings]
    return wandb.Table(columns=["run", "signal", "first step outside", "state"], data=rows)
