"""tim.deterministic in the config: what is filled in, what of the user's is refused."""

from __future__ import annotations

import copy
import json

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from verl_tim.launch.start import composed
from verl_tim.training.config import DETERMINISTIC_LIB, ConfigError, TimConfig
from verl_tim.training.determinism import (
    AGENT_LOOP,
    ENVIRONMENT,
    VARIABLES,
    determinism_findings,
    is_deterministic,
    make_deterministic,
    variables_of,
)

ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{name}" for name in ("rollout", "actor", "model"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return composed(["recipe=cpu_grpo", f"tim.run_dir={folder}/run", f"tim.cache_dir={folder}/cache"])


@pytest.fixture(scope="module")
def plain():
    """verl's own YAML, as a user of the plugin has it: no group of ours but the switch."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=["+tim.deterministic=true", f"{ROLLOUT}.name=vexact"])


@pytest.fixture
def config(recipe):
    def make(on=True, **changes):
        made = copy.deepcopy(recipe)
        made.tim.deterministic = on
        for key, value in changes.items():
            OmegaConf.update(made, key, value, force_add=True)
        return made

    return make


def keys(config):
    return [finding.key for finding in determinism_findings(config)]


def test_off_it_touches_and_refuses_nothing(config):
    made = config(on=False, **{f"{ENVIRONMENT}.NCCL_ALGO": "Tree", "trainer.v1.trainer_mode": "separate_async"})
    before = copy.deepcopy(made)
    assert make_deterministic(made) == {}
    assert made == before
    assert keys(made) == []
    assert not is_deterministic(made)


def test_on_every_process_gets_the_variables_and_the_run_its_seeds(config):
    made = config()
    done = make_deterministic(made)
    environment = OmegaConf.select(made, ENVIRONMENT)
    assert {name: environment[name] for name in VARIABLES} == {n: v.value for n, v in VARIABLES.items()}
    assert environment.NCCL_ALGO == "Ring"
    assert environment.NVTE_ALLOW_NONDETERMINISTIC_ALGO == "0"
    assert made.actor_rollout_ref.model.external_lib == DETERMINISTIC_LIB
    assert made.data.seed == 1, "the recipe's own"
    assert "data.seed" not in done
    assert keys(made) == []
    # what stood there before is still there
    assert environment.VERL_FILE_LOGGER_PATH.endswith("metrics.jsonl")
    # a run that goes on from its config.yaml
    assert make_deterministic(made) == {}


def test_a_plain_yaml_of_verl_gets_all_of_it(plain):
    made = copy.deepcopy(plain)
    assert OmegaConf.select(made, "data.seed") is None
    done = make_deterministic(made)
    assert made.data.seed == made.actor_rollout_ref.rollout.seed == 42
    assert done[f"{ROLLOUT}.agent.agent_loop_manager_class"] == AGENT_LOOP
    assert made.actor_rollout_ref.rollout.agent.agent_loop_manager_class == AGENT_LOOP
    assert made.actor_rollout_ref.model.external_lib == DETERMINISTIC_LIB
    assert OmegaConf.select(made, ENVIRONMENT).PYTHONHASHSEED == "0"
    assert keys(made) == []


def test_what_serves_as_well_is_left_as_the_user_set_it(config):
    made = config(**{f"{ENVIRONMENT}.CUBLAS_WORKSPACE_CONFIG": ":4096:8", f"{ENVIRONMENT}.PYTHONHASHSEED": 7})
    make_deterministic(made)
    assert keys(made) == []
    assert variables_of(made)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert variables_of(made)["PYTHONHASHSEED"] == "7"


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (f"{ENVIRONMENT}.NCCL_ALGO", "Tree", None),
        (f"{ENVIRONMENT}.NCCL_NVLS_ENABLE", "1", None),
        (f"{ENVIRONMENT}.PYTHONHASHSEED", "random", None),
        (f"{ENVIRONMENT}.CUBLAS_WORKSPACE_CONFIG", ":0:0", None),
        (f"{ENVIRONMENT}.NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", None),
        (f"{ENVIRONMENT}.FLASH_ATTENTION_DETERMINISTIC", "0", None),
        ("trainer.v1.trainer_mode", "colocate_async", None),
        ("trainer.v1.trainer_mode", "separate_async", None),
        ("algorithm.filter_groups.enable", True, None),
        ("trainer.v1.sampler.sync_refill_failed_groups", True, None),
        (f"{ROLLOUT}.agent.agent_loop_manager_class", "my.Manager", None),
        (f"{MODEL}.external_lib", "my_models", None),
        (f"{ROLLOUT}.full_determinism", True, None),
        (f"{ACTOR}.fsdp_config.full_determinism", True, None),
        (f"{ROLLOUT}.name", "stock", f"{ROLLOUT}.max_num_seqs"),
        (f"{ROLLOUT}.name", "vllm", f"{ENVIRONMENT}.VLLM_BATCH_INVARIANT"),
        (f"{ROLLOUT}.name", "sglang", None),
        ("distillation.enabled", True, None),
        (f"{MODEL}.override_config.attention_dropout", 0.1, None),
    ],
)
def test_what_does_not_repeat_is_refused_with_key_and_remedy(config, key, value, named):
    made = config(**{key: value})
    make_deterministic(made)
    (found,) = determinism_findings(made)
    assert found.key == (named or key)
    assert "tim.deterministic=false" in found.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ROLLOUT}.name": "vllm", f"{ENVIRONMENT}.VLLM_BATCH_INVARIANT": "1"},
        {f"{ROLLOUT}.name": "stock", f"{ROLLOUT}.max_num_seqs": 1},
        # the legacy trainer reads none of them
        {"trainer.use_v1": False, "trainer.v1.trainer_mode": "separate_async", "algorithm.filter_groups.enable": True},
    ],
)
def test_what_repeats_is_not(config, changes):
    made = config(**changes)
    make_deterministic(made)
    assert keys(made) == []


def test_stock_that_reuses_prefixes_depends_on_who_came_first(config):
    cached = {f"{ROLLOUT}.engine_kwargs.stock.enable_prefix_cache": True, f"{ROLLOUT}.max_num_seqs": 1}
    made = config(**{f"{ROLLOUT}.name": "stock", **cached})
    make_deterministic(made)
    assert keys(made) == [f"{ROLLOUT}.engine_kwargs.stock.enable_prefix_cache"]


def test_the_reward_models_engine_is_held_to_the_same(config):
    made = config(**{"reward.reward_model.enable": True, "reward.reward_model.rollout.name": "sglang"})
    make_deterministic(made)
    assert keys(made) == ["reward.reward_model.rollout.name"]


def test_dropout_of_the_models_own_config_is_refused_unless_overridden(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"attention_dropout": 0.1, "hidden_size": 8}))
    made = config(**{f"{MODEL}.path": str(tmp_path)})
    make_deterministic(made)
    assert keys(made) == [f"{MODEL}.override_config.attention_dropout"]
    OmegaConf.update(made, f"{MODEL}.override_config.attention_dropout", 0.0, force_add=True)
    assert keys(made) == []


def test_the_switch_is_true_or_false():
    assert TimConfig.of({"tim": {"deterministic": True}}).deterministic is True
    with pytest.raises(ConfigError, match=r"tim\.deterministic='yes': choose true or false"):
        TimConfig.of({"tim": {"deterministic": "yes"}})
