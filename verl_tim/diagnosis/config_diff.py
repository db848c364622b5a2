"""Differences between resolved configs, apart from what the choice of rollout itself sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl_tim.diagnosis.manifest import Difference, differing_keys, flatten
from verl_tim.diagnosis.trackers import TRACKER_KEYS

ROLLOUT = "actor_rollout_ref.rollout"

# What choosing a rollout means in a verl config: the engine's name, its own options, and how it uses memory and
# batches. Sampling (temperature, n, lengths, ...), dtype and everything of the trainer is not here.
ROLLOUT_KEYS = re.compile(
    rf"""
    tim\.choices\.rollout
    | {ROLLOUT}\.(
        name | mode | engine_kwargs\..* | gpu_memory_utilization | enforce_eager | cudagraph_capture_sizes |
        free_cache_engine | enable_sleep_mode | load_format | max_num_batched_tokens | max_num_seqs | max_model_len |
        enable_chunked_prefill | enable_prefix_caching | logprobs_mode | disable_log_stats | scheduling_policy |
        full_determinism | layered_summon | expert_parallel_size | (tensor|pipeline)_model_parallel_size
    )
    | ray_kwargs\.ray_init\.runtime_env\.env_vars\.VLLM_.*
    # verl interpolates the rollout's name into its distillation teachers
    | distillation\.teacher_models\.[^.]+\.inference\.name
    """,
    re.VERBOSE,
)
# Names, places and reporting.
INCIDENTAL_KEYS = re.compile(
    r"""
    tim\.run_dir | tim\.launch\..* | tim\.restarts\..* | tim\.dump\..* | tim\.samples\..* | tim\.cache_dir
    | trainer\.(experiment_name | project_name | default_local_dir | save_freq | rollout_data_dir | val_before_train |
        validation_data_dir | log_val_generations | max_(actor|critic)_ckpt_to_keep | resume_mode | resume_from_path)
    | .*\.trace\.(experiment_name | project_name) | hydra\..*
    | ray_kwargs\.ray_init\.(_temp_dir | address | dashboard_.*)
    """,
    re.VERBOSE,
)
# What verl fills in before it gives a config to its trackers (0.9.1: main_ppo.py and the trainers' set-up), from other
# keys of it: the config of a run folder has what was given there.
FILLED_KEYS = re.compile(
    r"""
    (actor_rollout_ref\.actor | critic)\.optim\.total_training_steps
    | reward\.reward_model\.(n_gpus_per_node | nnodes)
    | transfer_queue\.enable
    """,
    re.VERBOSE,
)


def diff_configs(configs: Mapping[str, Mapping[str, Any]], *, include_rollout: bool = False) -> list[Difference]:
    """Keys that differ between configs besides the rollout, sorted.

    A value that holds the run's own folder (`tim.run_dir`) is compared with the folder taken out, so paths into the
    run folder are no difference.

    Args:
        configs: run name -> resolved config.
        include_rollout: add the keys that the change of rollout consists of, marked `of_rollout`.
    """
    flats = {name: _without_run_dir(flatten(config)) for name, config in configs.items()}
    found = []
    for difference in differing_keys(flats):
        if INCIDENTAL_KEYS.fullmatch(difference.key) or TRACKER_KEYS.fullmatch(difference.key):
            continue
        of_rollout = ROLLOUT_KEYS.fullmatch(difference.key) is not None
        if include_rollout or not of_rollout:
            found.append(Difference(difference.key, difference.values, of_rollout))
    return found


def _without_run_dir(flat: dict[str, Any]) -> dict[str, Any]:
    run_dir = flat.get("tim.run_dir")
    if not isinstance(run_dir, str) or not run_dir.strip("/."):
        return flat

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(run_dir, "${tim.run_dir}")
        return [mark(entry) for entry in value] if isinstance(value, list) else value

    return {key: mark(value) for key, value in flat.items()}


def correction_name(config: Mapping[str, Any]) -> str | None:
    """The name of the correction a config asks for, or None if it does not tell.

    `tim.choices.correction` if the run was composed from this package's groups; otherwise from
    `algorithm.rollout_correction`: its preset, or a few words from verl's own keys.
    """
    choice = ((config.get("tim") or {}).get("choices") or {}).get("correction")
    if choice:
        return str(choice)
    algorithm = config.get("algorithm")
    if not isinstance(algorithm, Mapping) or "rollout_correction" not in algorithm:
        return None
    keys = algorithm["rollout_correction"] or {}
    if keys.get("preset"):
        return str(keys["preset"])
    parts = []
    if keys.get("bypass_mode"):
        parts.append("bypass_reinforce" if keys.get("loss_type") == "reinforce" else "bypass_ppo")
    if keys.get("rollout_is"):
        parts.append(f"{keys['rollout_is']}_is")
    if keys.get("rollout_rs"):
        rules = keys["rollout_rs"]
        parts.append(f"rs_{rules if isinstance(rules, str) else '+'.join(map(str, rules))}")
    return "+".join(parts) or "none"
