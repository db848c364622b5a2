"""Every recipe with every rollout, correction and cluster: verl's config classes take it and the start-up checks let
it pass, or refuse it for the reasons that are known here.

The fast test draws from the product; the slow one walks all corrections of a share of it, and the exhaustive one (tens
of minutes) everything. There Hydra composes every recipe, rollout and cluster, and the corrections are laid on top, as
Hydra does: their group stands last. Each is also composed once per recipe, and must be the same. verl's classes see
what was composed, and every correction that exchanges the loss.
"""

import functools
import itertools
import multiprocessing
import os
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from tests.configs.test_composition import GROUPS, RECIPES, assert_verl_takes
from tests.configs.test_correction import GIVEN, THRESHOLD
from verl_tim.launch import prepare
from verl_tim.launch.checks import correction as check_correction
from verl_tim.launch.checks import keys, values
from verl_tim.launch.compose import compose_config, hydra_for
from verl_tim.launch.recipes import CONFIGS_PACKAGE, find_recipe
from verl_tim.tasks.random_model import hf_config
from verl_tim.training import accelerator
from verl_tim.training.start_checks import Cluster, findings
from verl_tim.training.vllm_checks import INVARIANT_KEY

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CLUSTERS = {
    **{"cpu": (1, 1), "cpu2x1": (2, 1), "gpu1": (1, 1), "gpu1_shared": (1, 1)},
    **{"gpu8": (1, 8), "gpu2x8": (2, 8), "gpu8x8": (8, 8)},
}
# Prompts per optimiser step and answers to each.
STEP = {
    **{"cpu_grpo": (8, 8), "cpu_moe_grpo": (8, 8), "cpu_tool_grpo": (8, 8), "cpu_reinforce": (128, 1)},
    **{"dense_grpo": (16, 8), "dense_grpo_1gpu": (16, 8), "dense_reinforce": (64, 8), "dense_reinforce_1gpu": (64, 8)},
    **{"moe_grpo": (8, 4), "moe_grpo_1gpu": (16, 4), "moe_reinforce": (512, 16)},
    **{"evidence_grpo": (8, 8), "evidence_reinforce": (32, 8)},
}
REINFORCE = ("cpu_reinforce", "dense_reinforce", "dense_reinforce_1gpu", "evidence_reinforce", "moe_reinforce")
SPLIT = ("moe_grpo", "moe_reinforce")


def refusal(recipe, rollout, correction, cluster):
    """The keys of the findings that a combination must have."""
    nodes, per_node = CLUSTERS[cluster]
    prompts, answers = STEP[recipe]
    found = set()
    if prompts * answers % (nodes * per_node):
        found.add(f"{ACTOR}.ppo_mini_batch_size")
    if recipe in SPLIT and per_node % 4:
        found |= {f"{ROLLOUT}.pipeline_model_parallel_size"} if rollout == "vexact" else set()
        found |= {f"{ROLLOUT}.tensor_model_parallel_size"} if rollout.startswith("vllm") else set()
    if rollout == "vllm_invariant" and cluster.startswith("cpu"):
        found.add(INVARIANT_KEY)  # its kernels need a GPU
    if recipe in REINFORCE and correction == "bypass_ppo":
        found.add("algorithm.rollout_correction.loss_type")
    if recipe in REINFORCE and correction == "token_tis_ratio":
        found.add("algorithm.rollout_correction.rollout_is_in")  # a loss without a ratio has no place for weights in it
    return found


@functools.cache
def shapes():
    """Folders with the config.json of the recipes' models, without weights."""
    root = Path(tempfile.mkdtemp())
    for name in ("qwen3-1.7b", "qwen3-30b-a3b"):
        hf_config(name).save_pretrained(root / name)
    return root


def base_overrides(recipe, rollout, cluster):
    shape = "qwen3-30b-a3b" if "moe" in recipe else "qwen3-1.7b"
    return [
        f"rollout={rollout}",
        f"cluster={cluster}",
        f"actor_rollout_ref.model.path={shapes()}/{shape}",
        "trainer.experiment_name=run",
    ]


def given(correction):
    return [f"{THRESHOLD}={GIVEN[correction]}"] if correction in GIVEN else []


def finished(config):
    prepare.absolute_paths(config)
    prepare.resolve(config)
    return config


@functools.cache
def option(correction):
    text = resources.files(CONFIGS_PACKAGE).joinpath("correction", f"{correction}.yaml").read_text()
    return OmegaConf.merge(OmegaConf.create(text), OmegaConf.from_dotlist(given(correction)))


@contextmanager
def laid_on(resolved, correction):
    """A resolved config with another option of the correction group, which comes last, and the worker's copy of it; as
    it was afterwards, since a copy of a whole config costs more than its checks."""
    policy_loss = resolved.actor_rollout_ref.actor.policy_loss
    before = (resolved.algorithm.rollout_correction, resolved.tim.choices.correction, policy_loss.loss_mode)
    with open_dict(resolved):
        resolved.merge_with(option(correction))
        policy_loss.rollout_correction = resolved.algorithm.rollout_correction
    yield resolved
    with open_dict(resolved):
        resolved.algorithm.rollout_correction, resolved.tim.choices.correction, policy_loss.loss_mode = before


def assert_it_can_start(config, recipe, rollout, correction, cluster):
    """Every check of a start that the correction bears on: those of the correction and of the trainer's preflight."""
    expected = refusal(recipe, rollout, correction, cluster)
    of_correction = {finding.key for finding in check_correction.check(config)}
    assert of_correction == {key for key in expected if key.endswith("rollout_is_in")}
    found = findings(config, cluster=Cluster(cpus=1024, gpus=64))
    said = {finding.key for finding in found}
    assert said == expected, (recipe, rollout, correction, cluster, [str(finding) for finding in found])
    assert all(finding.problem and finding.remedy for finding in found)


def assert_values(config):
    """The checks that look at every value and key, and verl's own."""
    assert [*values.check(config), *keys.check_spelling(config)] == []
    assert_verl_takes(config)


@pytest.fixture
def machine(monkeypatch):
    """A machine with or without GPUs, whatever this one is."""
    return lambda cluster: monkeypatch.setattr(accelerator, "host_has_accelerator", lambda: "gpu" in cluster)


def test_the_tables_cover_what_there_is():
    assert set(CLUSTERS) == set(GROUPS["cluster"])
    assert set(STEP) == set(RECIPES)
    for recipe in RECIPES:
        with hydra_for(find_recipe(recipe)):
            config = finished(compose_config(find_recipe(recipe), ["actor_rollout_ref.model.path=M"]))
        actor = config.actor_rollout_ref.actor
        assert STEP[recipe] == (actor.ppo_mini_batch_size, config.actor_rollout_ref.rollout.n)
        assert config.tim.on_policy is (recipe in REINFORCE)
        assert (config.tim.split.vexact.pipeline == 4) is (recipe in SPLIT)


PRODUCT = (RECIPES, GROUPS["rollout"], GROUPS["correction"], GROUPS["cluster"])


@pytest.mark.parametrize("choice", random.Random(2605).sample(list(itertools.product(*PRODUCT)), 24), ids=" ".join)
def test_a_sample_of_the_product(choice, machine):
    recipe, rollout, correction, cluster = choice
    machine(cluster)
    with hydra_for(find_recipe(recipe)):
        overrides = [*base_overrides(recipe, rollout, cluster), f"correction={correction}", *given(correction)]
        config = finished(compose_config(find_recipe(recipe), overrides))
    assert config.tim.choices.correction == correction
    assert_it_can_start(config, recipe, rollout, correction, cluster)
    assert_values(config)


PAIRS = tuple(itertools.product(GROUPS["rollout"], GROUPS["cluster"]))


def walk(recipe, pairs):
    """All corrections of a recipe with (rollout, cluster) pairs, in a process of its own; how many there were."""
    os.environ["OMP_NUM_THREADS"] = "1"
    turns = itertools.cycle(GROUPS["correction"])
    count = 0
    with hydra_for(find_recipe(recipe)):
        for rollout, cluster in pairs:
            accelerator.host_has_accelerator = lambda cluster=cluster: "gpu" in cluster
            overrides = base_overrides(recipe, rollout, cluster)
            resolved = finished(compose_config(find_recipe(recipe), overrides))
            by_hydra = next(turns)
            for correction in GROUPS["correction"]:
                with laid_on(resolved, correction) as config:
                    if correction == by_hydra:
                        words = [*overrides, f"correction={correction}", *given(correction)]
                        assert finished(compose_config(find_recipe(recipe), words)) == config
                    if correction == by_hydra or correction == "none" or correction.startswith("bypass"):
                        assert_values(config)
                    assert_it_can_start(config, recipe, rollout, correction, cluster)
                count += 1
    return count


def walk_all(pairs_of_recipe):
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        counts = list(pool.map(walk, RECIPES, pairs_of_recipe))
    assert counts == [len(pairs) * len(GROUPS["correction"]) for pairs in pairs_of_recipe]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_share_of_the_product():
    walk_all([random.Random(recipe).sample(PAIRS, 3) for recipe in RECIPES])


@pytest.mark.exhaustive
@pytest.mark.timeout(5400)
def test_the_whole_product():
    walk_all([PAIRS] * len(RECIPES))
