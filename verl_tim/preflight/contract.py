"""The contract's probe on one node, as `verl-tim verify --ops` runs it, at the shapes of the run's model."""

from __future__ import annotations

from pathlib import Path

from verl_tim.preflight.judge import Trial


def probe_node(model: str | None, attention: str) -> Trial:
    """Try every schedule that this process's device would use.

    Args:
        model: folder of the run's model; None, or one that is not here: the shapes that `verify --ops` takes.
        attention: attention contract of the run, or auto.
    """
    from verl_tim.verification.ops import probe_models

    folders = [model] if model is not None and (Path(model) / "config.json").is_file() else []
    reports = probe_models(folders, attention)
    wrong = [f"{report['subject']}: {report['problem']}" for report in reports if report["problem"] is not None]
    if wrong:
        return Trial(False, "; ".join(wrong))
    return Trial(True, ", ".join(dict.fromkeys(str(report["contract"]) for report in reports)))
