"""Every schedule that this machine would use, against the contract's reference order (`verl-tim verify --ops`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_tim.numerics.probe import ProbeShapes

DEFAULT_SHAPES = ("qwen3-1.7b", "qwen3-30b-a3b")


class OpsError(ValueError):
    """A folder whose shapes cannot be probed: no model, or one that the contract does not cover."""


def probe_models(
    folders: list[str], attention: str, on_report: Callable[[dict[str, Any]], None] = lambda report: None
) -> list[dict[str, Any]]:
    """Probe the shapes of each model folder, bfloat16, on the GPU where there is one.

    Without a folder: those of published models, on a CPU of small ones.

    Args:
        on_report: called with each report when its model is done (progress).

    Returns one report per model: what was compared how often, schedules that were dropped, seconds, and the problem
    where the contract does not hold.

    Raises:
        OpsError: names the folder.
    """
    import torch

    from verl_tim.numerics.attention import resolve_attention
    from verl_tim.numerics.contract import ContractError
    from verl_tim.numerics.probe import probe

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reports = []
    for label, shapes in _shapes(folders, on_gpu=device.type == "cuda"):
        report: dict[str, Any] = {"subject": label, "device": str(device), "problem": None}
        try:
            contract = resolve_attention(attention, device, shapes.head_dim)
            found = probe(device, torch.bfloat16, shapes, attention=contract)
        except ContractError as error:
            report["problem"] = str(error)
        else:
            report |= {
                "contract": found.contract,
                "comparisons": found.comparisons,
                "dropped_schedules": found.forbidden,
                "row_blocks": found.row_blocks,
                "kernels": found.kernels,
                "compile_seconds": round(found.compile_seconds, 2),
                "check_seconds": {group: round(seconds, 2) for group, seconds in found.check_seconds.items()},
                "seconds": round(found.seconds, 2),
            }
        reports.append(report)
        on_report(report)
    return reports


def _shapes(folders: list[str], *, on_gpu: bool) -> list[tuple[str, ProbeShapes]]:
    from verl_tim.models import ModelError, config_from_hf, load_model_config

    if not folders and on_gpu:
        from verl_tim.tasks.random_model import hf_config

        return [(name, config_from_hf(hf_config(name)).probe_shapes) for name in DEFAULT_SHAPES]
    if not folders:
        # what makes models is imported where one is made: it takes longer than the probe of kernels in the cache
        from verl_tim.verification.random_models import KINDS, make_random_model

        with tempfile.TemporaryDirectory(prefix="verl-tim-ops-") as work:
            made = {kind: make_random_model(kind, Path(work) / kind) for kind in KINDS}
            return [(f"random {kind}", load_model_config(folder).probe_shapes) for kind, folder in made.items()]
    found = []
    for folder in folders:
        if not (Path(folder) / "config.json").is_file():
            raise OpsError(f"{folder} has no config.json")
        try:
            found.append((folder, load_model_config(folder).probe_shapes))
        except ModelError as error:
            raise OpsError(f"{folder}: {error}") from error
    return found
