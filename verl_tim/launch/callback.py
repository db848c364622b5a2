"""The Hydra callback of `configs/tim.yaml`: a plain `python -m verl.trainer.main_ppo` starts as `verl-tim train` does.

Hydra calls it in the driver with the composed config, before the job's copy of it is made, so changes in place reach
verl.
"""

from __future__ import annotations

import sys
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from verl_tim.launch.errors import LaunchError


class Launch(Callback):
    """Makes the composed config one that can run, or ends the process with every key and remedy.

    Hydra only warns when a callback raises an exception; an exit it lets through.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        from verl_tim.launch import underscores
        from verl_tim.launch.run_folder import begins_anew, claim
        from verl_tim.launch.start import make_ready

        # Hydra's own node has values that are missing until a job runs; everything else is the run's config
        run = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        try:
            written = list(underscores.find(config.hydra))
            if written:
                raise LaunchError(written)
            make_ready(run)
            anew = begins_anew(run)
            claim(run)
            if anew:
                print(f"verl_tim: {anew}", file=sys.stderr, flush=True)
            with read_write(config), open_dict(config):
                for key in run:
                    config[key] = run[key]
        except LaunchError as error:
            print(f"verl_tim: this run cannot start\n{error}", file=sys.stderr)
            sys.exit(2)
        except Exception as error:
            # anything else is a defect of ours; without an exit Hydra would warn and go on with a half-made config
            import traceback

            traceback.print_exc()
            sys.exit(f"verl_tim: preparing the run failed: {error}")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """`-m`: the runs one after another, each a process of its own; then this one ends (see `matrix`)."""
        from verl_tim.launch.changed import changed, in_words
        from verl_tim.launch.matrix import matrix_of, prepared, run_all
        from verl_tim.launch.recipes import Recipe
        from verl_tim.launch.start import composed_of, ready_of_several

        def say(line: str) -> None:
            print(f"verl_tim: {line}", file=sys.stderr, flush=True)

        try:
            name, path = str(config.hydra.job.config_name), _primary_path(config)
            matrix = matrix_of(Recipe(name, path, name), list(config.hydra.overrides.task))
            for line in in_words(matrix, changed(matrix, composed_of)):
                say(line)
            configs = prepared(matrix, ready_of_several())
            code = run_all(matrix, configs, _run, say)
        except LaunchError as error:
            print(f"verl_tim: these runs cannot start\n{error}", file=sys.stderr)
            sys.exit(2)
        except Exception as error:
            import traceback

            traceback.print_exc()
            sys.exit(f"verl_tim: preparing the runs failed: {error}")
        sys.exit(code)


def _primary_path(config: DictConfig) -> str:
    """Where the primary config is, as `--config-path` would take it."""
    (source,) = (one for one in config.hydra.runtime.config_sources if one.provider == "main")
    return f"pkg://{source.path}" if source.schema == "pkg" else str(source.path)


def _run(config: DictConfig, name: str) -> int:
    """One run in a child process, its steps on stderr."""
    from verl_tim.launch.process import run_verl
    from verl_tim.launch.restarts import again, run_with_restarts
    from verl_tim.launch.run_folder import claim

    def say(line: str) -> None:
        print(f"verl_tim: {name}: {line}", file=sys.stderr, flush=True)

    outcome = run_with_restarts(
        again(config),
        lambda attempt: run_verl(claim(attempt).path, on_step=lambda step: say(f"step {step.number}"), on_start=say),
        say,
    )
    for line in outcome.cause:
        print(f"  {line}", file=sys.stderr)
    return outcome.exit_code
