"""Runs of verl one after another in this process, for `verl_run.run_together`."""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path

import ray
from hydra import compose, initialize_config_module
from verl.trainer.main_ppo import main as run_verl

from tests.training.verl_run import LOST_PORT


def free_the_cluster(seconds: float = 60) -> None:
    """Take back what the last run held: verl names its placement groups, and the next run uses the same names.

    Raises:
        TimeoutError: the resources did not come back.
    """
    if not ray.is_initialized():
        return
    for group in ray.util.placement_group_table().values():
        if group["state"] != "REMOVED":
            ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        free, whole = ray.available_resources(), ray.cluster_resources()
        if all(free.get(name, 0) >= whole[name] for name in ("CPU", "GPU")):
            return
        time.sleep(0.5)
    raise TimeoutError(f"the last run still holds resources after {seconds} s: {free} of {whole}")


def run_once(overrides: list[str]) -> str:
    """The traceback of a run, empty if it went through."""
    free_the_cluster()
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=overrides)
        run_verl(config)
    except Exception:
        return traceback.format_exc()
    return ""


def main(folder: Path) -> None:
    results: dict[str, list] = {}
    for name, overrides in json.loads((folder / "runs.json").read_text()).items():
        began = time.monotonic()
        error = run_once(overrides)
        if LOST_PORT in error:
            error = run_once(overrides)
        results[name] = [error, time.monotonic() - began]
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
