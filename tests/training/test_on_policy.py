"""`tim.on_policy`: whatever would give a REINFORCE run a second step, a clip or a KL loss is refused by key."""

import copy

import pytest
from omegaconf import OmegaConf

from verl_tim.launch import prepare
from verl_tim.launch.compose import compose_config, hydra_for
from verl_tim.launch.recipes import find_recipe
from verl_tim.training.config import ConfigError, TimConfig
from verl_tim.training.on_policy import on_policy
from verl_tim.training.start_checks import RULES, View

ACTOR = "actor_rollout_ref.actor"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
LOSS_TYPE = "algorithm.rollout_correction.loss_type"
MINI = f"{ACTOR}.ppo_mini_batch_size"


@pytest.fixture(scope="module")
def composed():
    recipe = find_recipe("cpu_reinforce")
    with hydra_for(recipe):
        made = {}

        def make(correction="none"):
            if correction not in made:
                made[correction] = compose_config(
                    recipe, [f"correction={correction}", "actor_rollout_ref.model.path=M"]
                )
            return made[correction]

        yield make


@pytest.fixture
def found(composed):
    def make(correction="none", **changes):
        config = copy.deepcopy(composed(correction))
        for key, value in changes.items():
            OmegaConf.update(config, key, value, force_add=True)
        prepare.resolve(config)
        return list(on_policy(View(config), None))

    return make


def test_it_is_one_of_the_start_up_checks():
    assert on_policy in RULES


@pytest.mark.parametrize("correction", ["none", "token_tis", "paper_tis_seq_k3", "bypass_reinforce"])
def test_the_recipe_keeps_its_promise(found, correction):
    assert found(correction) == []
    # the mini-batch follows the batch
    assert found(correction, **{"data.train_batch_size": 32}) == []


@pytest.mark.parametrize(
    ("changes", "key", "problem", "remedy"),
    [
        ({MINI: 64}, MINI, "one optimiser step", "Set it to 128"),
        ({f"{ACTOR}.ppo_epochs": 2}, f"{ACTOR}.ppo_epochs", "one optimiser step", "Set it to 1"),
        ({f"{ACTOR}.use_kl_loss": True}, f"{ACTOR}.use_kl_loss", "reference model", "Set it to false"),
        ({LOSS_MODE: "vanilla"}, LOSS_MODE, "vanilla", "gpg"),
        ({LOSS_MODE: "gspo"}, LOSS_MODE, "gspo", "gpg"),
        ({f"{ACTOR}.clip_ratio_high": 0.28}, f"{ACTOR}.clip_ratio_high", "nothing to clip", "Leave it out"),
        ({f"{ACTOR}.clip_ratio": 0.1}, f"{ACTOR}.clip_ratio", "nothing to clip", "vanilla"),
        ({f"{ACTOR}.clip_ratio_c": 5.0}, f"{ACTOR}.clip_ratio_c", "nothing to clip", "Leave it out"),
    ],
)
def test_what_breaks_it_is_named(found, changes, key, problem, remedy):
    (finding,) = found(**changes)
    assert finding.key == key
    assert problem in finding.problem
    assert remedy in finding.remedy
    assert "tim.on_policy" in finding.problem + finding.remedy
    assert found(**changes, **{"tim.on_policy": False}) == []


def test_a_correction_that_clips(found):
    (finding,) = found("bypass_ppo")
    assert finding.key == LOSS_TYPE
    assert "correction=bypass_reinforce" in finding.remedy


def test_a_promise_that_is_neither_given_nor_withheld():
    with pytest.raises(ConfigError, match=r"tim\.on_policy='yes'"):
        TimConfig.of({"tim": {"on_policy": "yes"}})
