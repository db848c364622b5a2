"""Counts of a shape against the model itself."""

import pytest

from verl_tim.bench.rollout import Load, floor_tokens_per_second
from verl_tim.launch.errors import LaunchError
from verl_tim.planning.decode import Decode
from verl_tim.planning.rates import Speeds, measured_gpu
from verl_tim.planning.shape import find_shape, shape_of
from verl_tim.tasks import architectures


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_parameters_are_those_of_the_model_that_is_made(kind):
    model = architectures.init_model(kind, architectures.resolve_shape(kind), eos_token_id=1, pad_token_id=0, seed=0)
    shape = find_shape(None, kind=kind)
    assert shape.parameters == model.num_parameters()
    assert shape.tensors >= len(list(model.parameters()))  # experts travel one by one
    largest = max(parameter.numel() for parameter in model.parameters())
    assert shape.largest_tensor == largest


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen3-1.7b", 1_720_574_976), ("qwen3-8b", 8_190_735_360), ("qwen3-30b-a3b", 30_532_122_624)],
)
def test_published_sizes(name, parameters):
    assert shape_of(name).parameters == parameters


def test_kv_and_flops_of_the_design():
    shape = shape_of("qwen3-1.7b")
    assert shape.kv_bytes == 114_688
    assert shape_of("qwen3-30b-a3b").kv_bytes == 98_304
    assert shape.linear_flops() - shape.linear_flops(head=False) == 2 * 151_936 * 2048


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("load", [Load(16, 128, 512), Load(256, 128, 512)])
def test_the_floor_is_the_benchs(name, load, dense):
    shape = shape_of(name)
    settings = dense.memory.settings
    decode = Decode(shape, settings, Speeds(measured_gpu()))
    context = load.requests * (load.prompt + load.output / 2)
    ours = load.requests / decode.floor_seconds(load.requests, context)
    assert ours == pytest.approx(floor_tokens_per_second(shape.config, load, 4.3e12), rel=1e-3)


def test_hub_names_and_folders(model_folder):
    assert find_shape("Qwen/Qwen3-30B-A3B-Base").parameters == shape_of("qwen3-30b-a3b").parameters
    assert find_shape(str(model_folder)).config.hidden_size == 64
    assert find_shape("Qwen/Nothing", given="qwen3-8b").name == "qwen3-8b"
    with pytest.raises(LaunchError, match="no hub name whose shape is known"):
        find_shape("Qwen/Nothing")
    with pytest.raises(LaunchError, match="qwen3-8b"):
        find_shape(None, given="qwen3-1b")
    with pytest.raises(LaunchError, match="is not given"):
        find_shape(None)
