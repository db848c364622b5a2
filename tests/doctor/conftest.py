"""Two configs to start from, resolved once: plain verl on vLLM, and this package's vexact under the contract."""

import copy
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from omegaconf import OmegaConf, open_dict

from verl_tim.doctor.machine import Gpu, Machine
from verl_tim.doctor.source import read
from verl_tim.doctor.view import View

H200 = Gpu("H200", 140 * 2**30, (9, 0))
VERSIONS = {"verl": "0.9.1", "torch": "2.11.0", "vllm": "0.24.0", "transformers": "5.9.0", "numpy": "2.1.0"}
GPU_MACHINE = Machine((H200,), {}, VERSIONS, frozenset({"flash_attn", "vllm"}), disk=2**50)


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    row = {
        "data_source": "reasoning_gym/chain_sum",
        "prompt": [{"role": "user", "content": "1 + 2 ="}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
    }
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    pq.write_table(pa.Table.from_pylist([row] * 64), path)
    return path


@pytest.fixture(scope="session")
def plain(model_folder, data_file):
    """What a careful user of plain verl writes: nothing of this package in it."""
    return {
        "data": {
            "train_files": str(data_file),
            "val_files": str(data_file),
            "train_batch_size": 16,
            "max_prompt_length": 256,
            "max_response_length": 256,
        },
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {
            "model": {"path": str(model_folder)},
            "actor": {
                "strategy": "fsdp2",
                "ppo_mini_batch_size": 16,
                "ppo_micro_batch_size_per_gpu": 4,
                "fsdp_config": {"use_torch_compile": False},
            },
            "rollout": {
                "name": "vllm",
                "n": 8,
                "tensor_model_parallel_size": 1,
                "log_prob_micro_batch_size_per_gpu": 4,
            },
        },
        "trainer": {"n_gpus_per_node": 1, "logger": ["console"], "total_training_steps": 10},
        "ray_kwargs": {"ray_init": {"num_cpus": 64}},
    }


@pytest.fixture(scope="session")
def plain_file(plain, tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "plain.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


@pytest.fixture(scope="session")
def configs(plain_file, model_folder, data_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = [
        f"actor_rollout_ref.model.path={model_folder}",
        f"data.train_files={data_file}",
        f"data.val_files={data_file}",
        f"tim.run_dir={folder}/run",
        f"tim.cache_dir={folder}/cache",
    ]
    return {"verl": read([str(plain_file)]).config, "vexact": read(words).config}


@pytest.fixture
def view_of(configs):
    """A view of one of the two configs with keys changed (dotted name -> value), on a machine of one H200.

    `model`, `tokens`, `parameters` stand for a model that is not here: attributes of its config, size of its
    tokenizer, number of parameters.
    """

    def make(base="verl", changes=None, machine=GPU_MACHINE, model=None, tokens=None, parameters=None, numbers=()):
        config = copy.deepcopy(configs[base])
        with open_dict(config):
            for key, value in (changes or {}).items():
                OmegaConf.update(config, key, value, force_add=True)
        view = View(config, machine, numbers)
        if model is not None:
            view.__dict__["model_config"] = SimpleNamespace(**model)
        if tokens is not None:
            view.__dict__["tokenizer"] = range(tokens)
        if parameters is not None:
            view.__dict__["parameters"] = parameters
        return view

    return make
