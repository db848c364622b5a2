"""The sixty runs behind docs/evidence.md: each composes into what its name says, and a pair differs in nothing else."""

import functools
import random

import pytest
from omegaconf import OmegaConf

from tests.configs.test_composition import assert_verl_takes
from tests.configs.test_every_run import finished
from verl_tim.diagnosis.config_diff import diff_configs
from verl_tim.evidence.names import PLANNED, RunName
from verl_tim.launch.checks import correction as check_correction
from verl_tim.launch.checks import keys, values
from verl_tim.launch.compose import compose_config, hydra_for
from verl_tim.launch.matrix import matrix_of
from verl_tim.launch.recipes import find_recipe
from verl_tim.models import config_from_hf
from verl_tim.tasks.architectures import config_of, resolve_shape
from verl_tim.tasks.base_model import base_model_spec
from verl_tim.training import accelerator
from verl_tim.training.start_checks import Cluster, findings

CORRECTIONS = {
    "vexact": "none",
    "vllm_recompute": "recompute",
    "vllm_tis": "paper_tis_seq_k3",
    "vllm_invariant": "recompute",
}
MODELS = {"dense": "evidence_qwen3", "moe": "evidence_qwen3_moe"}


@functools.cache
def cells():
    matrix = matrix_of(find_recipe("evidence_grpo"), ["+matrix=evidence", "tim.run_dir=runs/e"])
    return {cell.name: cell for cell in matrix.cells}


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(accelerator, "host_has_accelerator", lambda: True)


@functools.cache
def composed(name):
    cell = cells()[name]
    with hydra_for(cell.recipe):
        return finished(compose_config(cell.recipe, list(cell.overrides)))


def assert_run(name):
    run, config = RunName.parse(name), composed(name)
    chosen, actor, rollout = config.tim.choices, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert chosen.recipe == f"evidence_{run.algorithm}"
    assert chosen.model == MODELS[run.model]
    assert chosen.rollout == (run.variant if run.variant in ("vexact", "vllm_invariant") else "vllm")
    bypass = "bypass_ppo" if run.algorithm == "grpo" else "bypass_reinforce"
    assert chosen.correction == CORRECTIONS.get(run.variant, bypass)
    assert (chosen.trainer, chosen.cluster) == ("contract", "gpu1_shared")
    assert (config.data.seed, rollout.seed) == (run.seed, run.seed)
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size
    assert updates == (4 if run.algorithm == "grpo" else 1)
    assert config.tim.on_policy is (run.algorithm == "reinforce")
    assert (actor.policy_loss.loss_mode == "bypass_mode") is (run.variant == "vllm_bypass")
    for check in (check_correction.check, values.check, keys.check, keys.check_spelling):
        assert list(check(config)) == [], name
    found = findings(config, cluster=Cluster(cpus=64, gpus=1))
    assert {finding.key for finding in found} <= {"actor_rollout_ref.model.path"}, name  # made at the start
    assert base_model_spec(**{**OmegaConf.to_container(config.tim.model), "device": "cpu"})


def test_there_are_sixty():
    assert sorted(cells()) == sorted(map(str, PLANNED))
    assert len(PLANNED) == 60


@pytest.mark.parametrize("name", random.Random(7).sample([str(name) for name in PLANNED], 6))
def test_a_sample_of_them(name, on_a_gpu):
    assert_run(name)


def test_a_pair_differs_in_rollout_correction_and_seed_alone(on_a_gpu):
    names = [f"moe-reinforce-{variant}-data.seed={seed}" for variant, seed in (("vexact", 1), ("vllm_bypass", 3))]
    differing = diff_configs({name: OmegaConf.to_container(composed(name), throw_on_missing=False) for name in names})
    keys_of_it = {difference.key for difference in differing}
    assert {"data.seed", "actor_rollout_ref.rollout.seed"} <= keys_of_it
    rest = {key for key in keys_of_it if not key.endswith("seed")}
    assert rest
    assert all("correction" in key or key.endswith("policy_loss.loss_mode") for key in rest), rest


@pytest.mark.parametrize("model", MODELS)
def test_the_models_are_of_the_size_the_page_says_and_the_engine_takes_them(model):
    spec = OmegaConf.to_container(composed(f"{model}-grpo-vexact-data.seed=1").tim.model)
    shape = resolve_shape(spec["kind"], spec["shape"])
    config = config_of(spec["kind"], shape, eos_token_id=2, pad_token_id=0)
    assert config_from_hf(config).head_dim == 128
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    assert round(parameters / 1e6, 1) == {"dense": 25.4, "moe": 42.8}[model]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_all_of_them_through_verls_own_config(on_a_gpu):
    for name in cells():
        assert_run(name)
        assert_verl_takes(composed(name))
