"""What a start says can be typed behind the config that it refuses."""

import pytest

from verl_tim.launch.errors import LaunchError
from verl_tim.launch.start import composed, make_ready

HEAD = 'hydra: {searchpath: ["pkg://verl.trainer.config", "pkg://verl_tim.configs"]}\n'


@pytest.fixture
def refused(tmp_path):
    """Findings of a recipe, by their keys."""

    def start(text, *overrides):
        (tmp_path / "mine.yaml").write_text(HEAD + text)
        with pytest.raises(LaunchError) as caught:
            make_ready(composed([f"recipe={tmp_path}/mine.yaml", *overrides]), progress=False)
        return {one.key: one for one in caught.value.findings}

    return start


def test_a_recipe_without_the_groups_is_told_to_add_them(refused, tmp_path):
    text = (
        f"tim: {{run_dir: {tmp_path}/run, cache_dir: {tmp_path}/cache}}\ndefaults: [ppo_trainer, tim, _self_]\n"
        "actor_rollout_ref: {rollout: {name: vexact}, model: {path: /none}}\n"
    )
    found = refused(text, "trainer.device=cpu", "ray_kwargs.ray_init.num_cpus=2")
    assert "or take +model=tiny_qwen3" in found["actor_rollout_ref.model.path"].remedy
    assert "+trainer=contract or +trainer=stock" in found["tim.trainer_numerics"].remedy
    # what the start itself adds is no key of the recipe's
    assert "Set ray_kwargs.ray_init.num_cpus=" in found["ray_kwargs.ray_init.num_cpus"].remedy


def test_one_that_has_the_groups_is_told_to_choose(resolved):
    config = resolved("actor_rollout_ref.model.path=/none", "model=hf")
    with pytest.raises(LaunchError, match=r"or take model=tiny_qwen3"):
        make_ready(config, progress=False)


@pytest.mark.parametrize(
    ("tim", "problem"),
    [("", "is not there"), ("tim: {run_dir: r, cache_dir: c}\n", "is written by hand: it lacks")],
)
def test_a_plain_config_of_verls_is_told_what_makes_it_a_recipe(refused, tim, problem):
    found = refused(f"{tim}defaults: [ppo_trainer, _self_]\n")
    assert found["tim"].problem.startswith(problem)
    assert found["tim"].remedy.startswith("begin the recipe's defaults with ppo_trainer and tim")
