"""Values that cannot be meant are named before anything computes with them; what the recipes say is not."""

import pytest
from omegaconf import OmegaConf

from verl_tim.launch.checks import run_checks, values
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.recipes import group_options, recipe_names


def test_nothing_that_is_shipped_is_refused(resolved):
    choices = [
        f"{group}={option}"
        for group in ("rollout", "trainer", "correction", "cluster", "tracker")
        for option in group_options()[group]
    ]
    for words in [*([f"recipe={name}"] for name in recipe_names()), *([choice] for choice in choices)]:
        assert list(values.check(resolved(*words))) == [], words


@pytest.mark.parametrize(
    ("override", "key", "problem"),
    [
        ("trainer.use_v1=maybe", "trainer.use_v1", "neither true nor false"),
        (
            "actor_rollout_ref.rollout.enable_rollout_routing_replay='false'",
            "actor_rollout_ref.rollout.enable_rollout_routing_replay",
            "is the text 'false', which Python takes for true",
        ),
        ("actor_rollout_ref.actor.optim.lr=fast", "actor_rollout_ref.actor.optim.lr", "not a number"),
        ("actor_rollout_ref.actor.optim.lr=nan", "actor_rollout_ref.actor.optim.lr", "not a number"),
        ("actor_rollout_ref.actor.optim.lr=-1", "actor_rollout_ref.actor.optim.lr", "-1"),
        ("trainer.total_training_steps=x", "trainer.total_training_steps", "'x'"),
        ("trainer.total_training_steps=0", "trainer.total_training_steps", "0"),
        ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node", "0"),
        ("ray_kwargs.ray_init.num_cpus=many", "ray_kwargs.ray_init.num_cpus", "many"),
        ("data.train_batch_size=0", "data.train_batch_size", "0"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=null", "actor_rollout_ref.actor.ppo_mini_batch_size", "null"),
        ("actor_rollout_ref.rollout.n=1.5", "actor_rollout_ref.rollout.n", "1.5"),
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size=two",
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "not a number",
        ),
        *(
            (f"{share}={value}", share, str(value))
            for share in ("actor_rollout_ref.rollout.gpu_memory_utilization",)
            for value in (0, 1.8, -0.5)
        ),
        ("actor_rollout_ref.rollout.temperature=-1", "actor_rollout_ref.rollout.temperature", "-1"),
        ("actor_rollout_ref.rollout.temperature=0", "actor_rollout_ref.rollout.temperature", "divides"),
        ("actor_rollout_ref.rollout.top_p=0", "actor_rollout_ref.rollout.top_p", "0"),
        ("actor_rollout_ref.rollout.val_kwargs.top_k=-7", "actor_rollout_ref.rollout.val_kwargs.top_k", "-7"),
        ("actor_rollout_ref.rollout.name=foo", "actor_rollout_ref.rollout.name", "foo"),
        ("trainer.resume_mode=whatever", "trainer.resume_mode", "whatever"),
        ("trainer.logger=[console,foo]", "trainer.logger", "foo"),
        ("algorithm.adv_estimator=foo", "algorithm.adv_estimator", "foo"),
        ("actor_rollout_ref.rollout.engine_kwargs=5", "actor_rollout_ref.rollout.engine_kwargs", "group of keys"),
    ],
)
def test_named_alone_and_nothing_trips_over_it(resolved, override, key, problem):
    try:
        results = run_checks(resolved(override))
    except LaunchError as error:
        found = error.findings
    else:
        assert results[-1][0].name == "values"
        found = results[-1][1]
    (finding,) = found
    assert finding.key == key
    assert problem in finding.problem


@pytest.mark.parametrize(
    "override", ["tim=5", "~tim", "actor_rollout_ref=null", "~actor_rollout_ref.rollout", "trainer=5"]
)
def test_a_group_that_is_none(resolved, override):
    with pytest.raises(LaunchError) as error:
        resolved(override)
    assert override.strip("~").partition("=")[0] in str(error.value)


def test_greedy_validation_is_fine(resolved):
    assert list(values.check(resolved("actor_rollout_ref.rollout.val_kwargs.temperature=0"))) == []


@pytest.mark.parametrize("engine", ["megatron", "veomni", "torchtitan"])
def test_an_engine_without_its_groups_is_one_finding_that_names_the_choice(resolved, engine):
    key = "actor_rollout_ref.actor.strategy"
    with pytest.raises(LaunchError) as error:
        resolved(f"{key}={engine}")
    (finding,) = error.value.findings
    assert (finding.key, finding.problem) == (key, f"is {engine}, and the config has the groups of model_engine=dp")
    assert f"choose model_engine={engine}" in finding.remedy
    with pytest.raises(LaunchError) as error:
        resolved(f"model_engine={engine}")  # the recipe sets FSDP2
    (finding,) = error.value.findings
    assert finding.problem == f"is fsdp2, and the config has the groups of model_engine={engine}"
    assert "leave model_engine out" in finding.remedy


@pytest.mark.parametrize("engine", ["dp", "megatron", "veomni", "torchtitan"])
def test_what_verl_composes_for_an_engine_is_whole(engine):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"model_engine={engine}"])
    OmegaConf.set_struct(config, False)
    assert [finding.key for finding in values.check_structure(config)] == ["tim"]
    del config["model_engine"]  # as in a config written by hand
    assert [finding.key for finding in values.check_structure(config)] == ["tim"]
    if engine != "dp":
        config.actor_rollout_ref.actor.strategy = "fsdp"
        assert [finding.key for finding in values.check_structure(config)][1:] == ["actor_rollout_ref.actor.strategy"]
