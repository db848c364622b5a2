"""Routers are found by structure, one handle each, or none is replayed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.replay import tiny
from verl_tim.replay import ReplayError, RouterMap, RoutingReplay, find_routers


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
def test_families(kind):
    routers = find_routers(tiny.model(kind))
    block_chooses = kind in ("deepseek_v3", "glm4_moe")  # their gates give logits, GLM's although it knows k
    assert [router.layer for router in routers] == ([1, 2] if block_chooses else [0, 1, 2])
    assert {(router.top_k, router.num_experts) for router in routers} == {(tiny.TOP_K, tiny.EXPERTS)}
    assert routers[0].name.endswith("mlp" if block_chooses else ".gate")


def test_dense_layers_shift_no_index():
    model = tiny.model(num_hidden_layers=4, mlp_only_layers=[0, 2])
    assert RouterMap.of(model) == RouterMap((1, 3), 4, tiny.EXPERTS, tiny.TOP_K)
    model = tiny.model(num_hidden_layers=4, decoder_sparse_step=2)
    assert RouterMap.of(model).layers == (1, 3)


def test_of_a_folder_without_weights(tmp_path):
    tiny.config(mlp_only_layers=[1]).save_pretrained(tmp_path)
    assert RouterMap.of_folder(str(tmp_path)) == RouterMap((0, 2), 3, tiny.EXPERTS, tiny.TOP_K)


def test_a_router_without_a_handle():
    model = tiny.model()
    block = model.model.layers[1].mlp
    block.chooser = block.gate
    del block.gate
    with pytest.raises(ReplayError, match=r"layer 1: model\.layers\.1\.mlp has experts and neither gate nor router"):
        find_routers(model)
    model = tiny.model()
    model.model.layers[1].mlp = nn.Identity()
    with pytest.raises(ReplayError, match=r"layers \[1\] are sparse and have no router with a handle"):
        RoutingReplay(model)
    model = tiny.model()
    model.config.mlp_only_layers = [2]
    with pytest.raises(ReplayError, match=r"layers \[2\] have a router and are dense"):
        find_routers(model)


def test_a_dense_model_has_nothing_to_replay():
    with pytest.raises(ReplayError, match="has no router"):
        find_routers(tiny.model(mlp_only_layers=[0, 1, 2]))


def test_a_router_that_chooses_in_another_way_is_refused():
    model = tiny.model()

    def forward(hidden):
        gate = model.model.layers[2].mlp.gate
        logits = torch.nn.functional.linear(hidden, gate.weight)
        value, index = logits.softmax(-1).sort(-1, descending=True)
        return logits, value[:, : gate.top_k], index[:, : gate.top_k]

    model.model.layers[2].mlp.gate.forward = forward
    replay = RoutingReplay(model)
    replay.begin(6, None)
    with pytest.raises(ReplayError, match=r"layer 2: model.layers.2.mlp.gate .* chose 0 times in one forward"):
        model(tiny.tokens(6))
