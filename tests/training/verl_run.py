"""A real run of verl's trainer in processes of its own, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

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
    timeout: float = 900,
) -> Run:
    """`python -m verl.trainer.main_ppo` in `folder`.

    Args:
        overrides: Hydra overrides, after the common ones.
        modules: name -> source of modules that every verl process imports (faults to plant).
    """
    common = overrides_of(folder, model, data, rollout=rollout, ranks=ranks, steps=steps)
    process_environment = {**os.environ, "HYDRA_FULL_ERROR": "1", "OMP_NUM_THREADS": "1"}
    if modules:
        for name, source in modules.items():
            (folder / f"{name}.py").write_text(source)
        process_environment["PYTHONPATH"] = str(folder)
        process_environment["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
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
    done = subprocess.run(
        command, cwd=folder, env=process_environment, capture_output=True, text=True, timeout=timeout, errors="replace"
    )
    output = done.stdout + done.stderr
    (folder / "log.txt").write_text(output)
    return Run(folder, done.returncode, output, time.monotonic() - began, metrics)


def run_together(folder: Path, runs: dict[str, list[str]], timeout: float = 1500) -> dict[str, Run]:
    """Several runs of verl one after another in one process and one Ray cluster, which spares each its start.

    Args:
        runs: name -> all Hydra overrides of a run (`overrides_of` and others); its run folder is `folder`/name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = ray_environment(VERL_FILE_LOGGER_ROOT=str(folder / "metrics"))
    named = {
        name: [*overrides, *environment, "trainer.project_name=together", f"trainer.experiment_name={name}"]
        for name, overrides in runs.items()
    }
    (folder / "runs.json").write_text(json.dumps(named))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.verl_together", str(folder)],
        cwd=root,
        env={**os.environ, "HYDRA_FULL_ERROR": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        errors="replace",
    )
    output = done.stdout + done.stderr
    (folder / "log.txt").write_text(output)
    results = json.loads((folder / "results.json").read_text()) if (folder / "results.json").exists() else {}
    made = {}
    for name in runs:
        error, seconds = results.get(name, [output[-4000:], 0.0])
        metrics = folder / "metrics" / "together" / f"{name}.jsonl"
        made[name] = Run(folder / name, 1 if error else 0, error, seconds, metrics)
    return made
