"""The recipes of the paper's runs hold its table, each value with its source beside it."""

import re
from importlib import resources

import pytest
from omegaconf import OmegaConf

from tests.configs.paper import PAPER
from verl_tim.launch import prepare
from verl_tim.launch.compose import compose_config, hydra_for
from verl_tim.launch.recipes import RECIPES_PACKAGE, find_recipe

SOURCE = re.compile(r"\b(paper|script|verl|inferred)\b")
# Names of options, places of files and Hydra's own: nothing of the algorithm.
UNSOURCED = {"hydra", "defaults", "tim"}


def composed(recipe, *overrides):
    with hydra_for(find_recipe(recipe)):
        config = compose_config(find_recipe(recipe), list(overrides))
    prepare.absolute_paths(config)
    prepare.resolve(config)
    return config


@pytest.mark.parametrize("recipe", PAPER)
def test_every_value_of_the_papers_table(recipe):
    config = composed(recipe)
    values = {key: OmegaConf.select(config, key) for key in PAPER[recipe]}
    plain = {key: list(value) if OmegaConf.is_list(value) else value for key, value in values.items()}
    assert plain == PAPER[recipe]


@pytest.mark.parametrize("recipe", PAPER)
def test_every_value_says_where_it_is_from(recipe):
    """Above each leaf of the YAML, or above a leaf next before it, stands paper, script, verl or inferred."""
    lines = resources.files(RECIPES_PACKAGE).joinpath(recipe, f"{recipe}.yaml").read_text().splitlines()
    group, comment, leaves = "", "", 0
    for before, line in zip(["", *lines], lines, strict=False):
        if line.strip().startswith("#"):
            comment = line if not before.strip().startswith("#") else comment + line
            continue
        if re.match(r"^\w+:", line):
            group, comment = line.split(":")[0], ""
        leaf = re.match(r"^ +(\w+): \S", line)
        if leaf and group not in UNSOURCED:
            leaves += 1
            assert SOURCE.search(comment), f"{line!r} has no source"
    assert leaves > 25


def test_a_rollout_brings_its_own_split():
    """The published scripts run pipeline stages, which verl refuses for vLLM."""
    from verl.utils.config import omega_conf_to_dataclass

    for rollout, split in {"vexact": (1, 4), "vllm": (4, 1), "vllm_invariant": (4, 1), "stock": (1, 1)}.items():
        config = composed("moe_reinforce", f"rollout={rollout}")
        made = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        assert (made.tensor_model_parallel_size, made.pipeline_model_parallel_size) == split, rollout
    config = composed("moe_reinforce", "actor_rollout_ref.rollout.pipeline_model_parallel_size=2")
    assert config.actor_rollout_ref.rollout.pipeline_model_parallel_size == 2


@pytest.mark.parametrize("recipe", PAPER)
def test_model_and_task_are_free(recipe):
    config = composed(recipe, "model=tiny_qwen3", "task=chain_sum")
    assert config.actor_rollout_ref.model.path is None
    assert (config.tim.model.kind, config.tim.task.name) == ("qwen3", "chain_sum")
    assert (config.data.max_prompt_length, config.actor_rollout_ref.rollout.response_length) == (64, 32)
