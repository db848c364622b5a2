"""A real run of verl's trainer in processes of its own, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from verl_tim.launch.process import end_tree

CONTRACT = (
    "actor_rollout_ref.model.use_fused_kernels=true",
    "actor_rollout_ref.model.fused_kernel_options.impl_backend=contract",
)
FP32 = (
    "actor_rollout_ref.rollout.dtype=float32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
    "+actor_rollout_ref.ref.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
)

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    text = solution_str or ""
    return sum(character.isdigit() for character in text) / max(1, len(text))
"""


# verl takes a free port for its process group and opens it later; another process may have it by then.
LOST_PORT = "Gloo connectFullMesh failed"


def selected(request: pytest.FixtureRequest, argument: str) -> set[str]:
    """A parametrized argument's values in the chosen tests of this module: what a shared fixture must make."""
    calls = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    return {call.params[argument] for call in calls if call is not None and argument in call.params}


# Another test's, or anybody's, `ray start` on this machine would be joined otherwise.
OWN_CLUSTER = {"RAY_ADDRESS": "local"}


@dataclass
class Run:
    """What a run left behind; `metrics` is what verl's file logger wrote."""

    folder: Path
    returncode: int
    output: str
    seconds: float
    metrics: Path

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by step; step 0 is validation before training."""
        path = self.metrics
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return {line["step"]: line["data"] for line in map(json.loads, lines)}

    def series(self, name: str) -> list[float]:
        return [data[name] for step, data in sorted(self.steps.items()) if step and name in data]

    def manifest(self) -> dict:
        return json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))


def overrides_of(
    folder: Path, model: str, data: Path, *, rollout: str = "vexact", ranks: int = 1, steps: int = 3
) -> list[str]:
    """Hydra overrides of a small run; `folder` becomes its run folder and gets the reward function.

    Args:
        data: folder with train.parquet and val.parquet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=48",
        "data.max_response_length=24",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.model.external_lib=verl_tim.training.external",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
        "actor_rollout_ref.ref.use_torch_compile=false",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile=false",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        f"actor_rollout_ref.rollout.name={rollout}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_tim.rollout.agent_loop.SeededAgentLoopManager",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.nnodes=1",
        "trainer.device=cpu",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.total_epochs=100",
        f"trainer.total_training_steps={steps}",
        "trainer.resume_mode=disable",
        "ray_kwargs.ray_init.num_cpus=16",
        f"+ray_kwargs.ray_init.num_gpus={ranks}",
        "+ray_kwargs.ray_init.include_dashboard=false",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
        f"+tim.run_dir={folder}",
    ]


def ray_environment(**environment: str) -> list[str]:
    """Overrides that hand environment variables to every process of a run."""
    variables = {"OMP_NUM_THREADS": "1", "TQ_NUM_THREADS": "2", **environment}
    if sys.platform == "linux":  # else Gloo takes the address of the host's name, whatever that leads to
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in variables.items()]


def run_verl(
    folder: Path,
    model: str,
    data: Path,
    *overrides: str,
    rollout: str = "vexact",
    ranks: int = 1,
    steps: int = 3,
    modules: dict[str, str] | None = None,
    timeout: float = 480,
) -> Run:
    """`python -m verl.trainer.main_ppo` in `folder`.

    Args:
        overrides: Hydra overrides, after the common ones.
        modules: name -> source of modules that every verl process imports (faults to plant).
        timeout: seconds; a run takes one to two minutes on two cores.
    """
    common = overrides_of(folder, model, data, rollout=rollout, ranks=ranks, steps=steps)
    process_environment = {**OWN_CLUSTER, **os.environ, "HYDRA_FULL_ERROR": "1", "OMP_NUM_THREADS": "1"}
    process_environment |= _planted(folder, modules)
    metrics = folder / "metrics.jsonl"
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        *common,
        *ray_environment(VERL_FILE_LOGGER_PATH=str(metrics)),
        f"hydra.run.dir={folder}",
        *overrides,
    ]
    began = time.monotonic()
    returncode, output = to_its_end(command, folder, process_environment, timeout)
    if LOST_PORT in output:
        metrics.unlink(missing_ok=True)
        returncode, output = to_its_end(command, folder, process_environment, timeout)
    return Run(folder, returncode, output, time.monotonic() - began, metrics)


def to_its_end(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float, cwd: Path | None = None
) -> tuple[int, str]:
    """(exit code, everything printed) of a command, which is kept in `folder`/log.txt too.

    A run that hangs fails its test with what it said last, and nothing of it is left to slow down the next one.
    """
    log = folder / "log.txt"
    with log.open("wb") as sink:
        child = subprocess.Popen(command, cwd=cwd or folder, env=environment, stdout=sink, stderr=subprocess.STDOUT)
        try:
            returncode = child.wait(timeout)
        except BaseException as error:
            end_tree(child)
            if isinstance(error, subprocess.TimeoutExpired):
                said = log.read_text(encoding="utf-8", errors="replace")
                pytest.fail(f"not at its end after {timeout:.0f} s; it said last:\n{said[-6000:]}", pytrace=False)
            raise
    return returncode, log.read_text(encoding="utf-8", errors="replace")


def _planted(folder: Path, modules: dict[str, str] | None) -> dict[str, str]:
    """Write modules into a folder; the environment under which verl imports them in each of its processes."""
    for name, source in (modules or {}).items():
        (folder / f"{name}.py").write_text(source)
    return {"PYTHONPATH": str(folder), "VERL_USE_EXTERNAL_MODULES": ",".join(modules)} if modules else {}


def run_together(folder: Path, runs: dict[str, list[str]], *, modules: dict[str, str] | None = None) -> dict[str, Run]:
    """Several runs of verl one after another in one process and one Ray cluster, which spares each its start.

    Args:
        runs: name -> all Hydra overrides of a run (`overrides_of` and others); its run folder is `folder`/name.
        modules: name -> source of modules that every verl process imports (faults to plant).
    """
    folder.mkdir(parents=True, exist_ok=True)
    process_environment = {**OWN_CLUSTER, **os.environ, "HYDRA_FULL_ERROR": "1", "OMP_NUM_THREADS": "1"}
    process_environment |= _planted(folder, modules)
    environment = ray_environment(VERL_FILE_LOGGER_ROOT=str(folder / "metrics"))
    named = {
        name: [*overrides, *environment, "trainer.project_name=together", f"trainer.experiment_name={name}"]
        for name, overrides in runs.items()
    }
    (folder / "runs.json").write_text(json.dumps(named))
    _, output = to_its_end(
        [sys.executable, "-m", "tests.training.verl_together", str(folder)],
        folder,
        process_environment,
        timeout=240 + 180 * len(runs),
        cwd=Path(__file__).resolve().parents[2],
    )
    results = json.loads((folder / "results.json").read_text()) if (folder / "results.json").exists() else {}
    made = {}
    for name in runs:
        error, seconds = results.get(name, [output[-4000:], 0.0])
        metrics = folder / "metrics" / "together" / f"{name}.jsonl"
        made[name] = Run(folder / name, 1 if error else 0, error, seconds, metrics)
    return made
