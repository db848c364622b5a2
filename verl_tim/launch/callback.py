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
        from verl_tim.launch.run_folder import claim
        from verl_tim.launch.start import make_ready

        # Hydra's own node has values that are missing until a job runs; everything else is the run's config
        run = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        try:
            written = list(underscores.find(config.hydra))
            if written:
                raise LaunchError(written)
            make_ready(run)
            claim(run)
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
        sys.exit("verl_tim: --multirun is not supported: start one process per run, each with its own tim.run_dir")
