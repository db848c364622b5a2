import copy

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from verl_tim.launch import prepare
from verl_tim.launch.compose import compose_config, hydra_for, split_recipe
from verl_tim.launch.start import composed

ROW = {
    "data_source": "reasoning_gym/chain_sum",
    "prompt": [{"role": "user", "content": "1 + 2 ="}],
    "reward_model": {"style": "rule", "ground_truth": "3"},
}


@pytest.fixture
def parquet(tmp_path):
    def write(name="train", rows=64, **changes):
        path = tmp_path / f"{name}.parquet"
        row = {key: value for key, value in {**ROW, **changes}.items() if value is not None}
        pq.write_table(pa.Table.from_pylist([row] * rows), path)
        return path

    return write


@pytest.fixture
def resolved(tmp_path):
    """Composes and resolves a run with overrides, its folders in the test's own."""

    def make(*overrides):
        config = composed([f"tim.run_dir={tmp_path}/run", f"tim.cache_dir={tmp_path}/cache", *overrides])
        prepare.resolve(config)
        return config

    return make


@pytest.fixture(scope="module")
def composer():
    """Composes cpu_grpo with overrides; Hydra is initialised once, and free again for the next module."""
    recipe, _ = split_recipe([])
    with hydra_for(recipe):
        yield lambda *overrides: compose_config(recipe, overrides)


@pytest.fixture(scope="module")
def base(composer):
    return composer()


@pytest.fixture
def config_of(base, composer, model_folder, parquet, tmp_path):
    """A config that can run, with overrides. Composing takes a third of a second: only a group's choice is composed."""

    def make(*overrides):
        groups = [word for word in overrides if "." not in word.split("=")[0]]
        config = composer(*groups) if groups else copy.deepcopy(base)
        files = str(parquet("good"))
        for key, value in (
            ("actor_rollout_ref.model.path", str(model_folder)),
            ("data.train_files", files),
            ("data.val_files", files),
            ("tim.run_dir", f"{tmp_path}/run"),
            ("tim.cache_dir", f"{tmp_path}/cache"),
            *(word.split("=", 1) for word in overrides if word not in groups),
        ):
            known = OmegaConf.select(config, key.lstrip("+").rpartition(".")[0]) is not None
            assert known or key.startswith("+"), key
            value = OmegaConf.create(f"value: {value}").value if isinstance(value, str) else value
            OmegaConf.update(config, key.lstrip("+"), value, force_add=key.startswith("+"))
        prepare.absolute_paths(config)
        prepare.resolve(config)
        return config

    return make
