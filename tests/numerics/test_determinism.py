"""What a process says of its determinism: flags as torch has them, probes that notice what does not repeat."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from verl_tim.numerics import determinism

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_before():
    """The flags are of the whole process."""
    from torch._inductor import config as inductor

    mode, fill = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    compiled = inductor.deterministic
    yield
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    inductor.deterministic = compiled


def test_flags_are_on_after_turning_on_and_were_not_before():
    assert determinism.flags() != determinism.FLAGS_WHEN_ON
    determinism.turn_on()
    assert determinism.flags() == determinism.FLAGS_WHEN_ON
    # no kernel per allocation that repeats nothing
    assert torch.utils.deterministic.fill_uninitialized_memory is False


def test_a_mode_that_only_warns_is_not_the_mode():
    determinism.turn_on()
    torch.use_deterministic_algorithms(True, warn_only=True)
    flags = determinism.flags()
    assert (flags["deterministic_algorithms"], flags["warn_only"]) == (False, True)


def test_the_generators_repeat_after_seeding():
    import random

    import numpy as np

    def draws():
        determinism.seed_all(7)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draws() == draws()
    determinism.seed_all(8)
    assert random.random() != draws()[0]


def test_an_observation_is_plain_and_repeats():
    determinism.turn_on()
    first, second = (determinism.observe("cpu", variables=("PATH", "NOT_THERE")) for _ in range(2))
    assert first == second
    assert first["unstable"] == {}
    assert set(first["digests"]) == {
        "gemm", "attention", "gemm_gradient", "index_add", "embedding_gradient", "attention_gradient"
    }  # fmt: skip
    assert list(first["variables"]) == ["PATH"]
    assert first["hash"] == hash(determinism.HASHED)
    # generation has no gradients
    assert set(determinism.observe("cpu", backward=False)["digests"]) == {"gemm", "attention"}


def test_a_sum_in_another_order_each_time_is_noticed(monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def in_any_order(self, dim, index, source):
        order = torch.randperm(len(index), generator=generator)
        return self.clone().index_add_(dim, index[order], source[order])

    monkeypatch.setattr(torch.Tensor, "index_add", in_any_order)
    _, unstable = determinism.repeated(CPU, backward=True)
    assert list(unstable) == ["index_add"]
    assert "results in 3 runs" in unstable["index_add"]


def test_an_operation_that_torch_refuses_is_named_with_its_reason(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("index_add does not have a deterministic implementation\nand more")

    monkeypatch.setattr(torch.Tensor, "index_add", refuse)
    digests, unstable = determinism.repeated(CPU, backward=True)
    assert unstable == {"index_add": "raised index_add does not have a deterministic implementation"}
    assert "index_add" not in digests


def test_a_digest_is_of_bits():
    x = torch.tensor([1.0, 0.0])
    assert determinism.digest(x) == determinism.digest(x.clone())
    assert determinism.digest(x) != determinism.digest(torch.tensor([1.0, -0.0]))
    assert determinism.digest(x) != determinism.digest(x.bfloat16())


def test_dropouts_of_modules_and_of_numbers_in_attention_are_found():
    class Attention(torch.nn.Module):
        def __init__(self, p):
            super().__init__()
            self.attention_dropout = p

        def forward(self, x):
            return F.dropout(x, self.attention_dropout, self.training)

    def model(p):
        return torch.nn.ModuleDict({"mlp": torch.nn.Sequential(torch.nn.Dropout(p)), "attention": Attention(p)})

    assert determinism.dropouts(model(0.0)) == {}
    assert determinism.dropouts(model(0.1)) == {"mlp.0": 0.1, "attention.attention_dropout": 0.1}


def test_the_models_own_attention_dropout_is_found():
    import transformers

    def model(p):
        config = transformers.Qwen3Config(
            vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, attention_dropout=p,
        )  # fmt: skip
        return transformers.Qwen3ForCausalLM(config)

    assert determinism.dropouts(model(0.0)) == {}
    assert 0.25 in determinism.dropouts(model(0.25)).values()


def _rank(rank, store, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    answers.put((rank, determinism.collective("cpu")))
    dist.destroy_process_group()


def test_collectives_of_two_ranks_repeat_and_agree(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, tmp_path / "store", answers)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0] == {"backend": "gloo", "ranks": 2, "digest": found[0]["digest"], "unstable": []}


def test_without_a_group_there_is_no_collective_to_probe():
    assert determinism.collective("cpu") == {}


def _said(code: str, workspace: str) -> str:
    """What a process of its own prints: cuBLAS reads its setting once, and the mode is a process's."""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": workspace}
    code = f"import torch; from verl_tim.numerics import determinism\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.gpu
@pytest.mark.parametrize(("setting", "size"), [(":16:8", 131072), (":4096:8", 33554432)])
def test_the_workspace_that_cublas_really_has_is_measured(setting, size):
    assert int(_said("print(determinism.blas_workspace(torch.device('cuda', 0)))", setting)) == size


@pytest.mark.gpu
def test_probes_repeat_on_a_gpu_with_the_mode_on():
    code = "determinism.turn_on(); print(determinism.observe('cuda')['unstable'])"
    assert _said(code, ":4096:8").strip() == "{}"
