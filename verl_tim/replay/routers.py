"""A model's routers, found by their structure: which modules choose experts, and in which layers.

A sparse block of a Hugging Face model holds `experts` and, beside them, a `gate` or `router`. In transformers 5 the
latter chooses by itself (`Qwen3MoeTopKRouter`, `MixtralTopKRouter`, ...); before, and in some families still, it gives
logits, and the block chooses. Either way the choice is one `torch.topk` over all experts in the forward of the
module named here (`interception` holds it to that).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from verl_tim.replay.errors import ReplayError

_GATES = ("gate", "router")
_TOP_K = ("top_k", "num_experts_per_tok", "moe_topk", "top_k_experts")
_CHOICE_OF_BLOCK = "route_tokens_to_experts"  # transformers' name for a block's own choice; its gate may know k as well
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Router:
    """One router.

    Attributes:
        layer: the model's layer number.
        name: of the module whose forward chooses.
        module: that module.
        top_k, num_experts: it chooses so many of so many.
    """

    layer: int
    name: str
    module: nn.Module
    top_k: int
    num_experts: int


@dataclass(frozen=True)
class RouterMap:
    """The sparse layers of a model, as plain numbers.

    Attributes:
        layers: the model's layer number of each router, ascending: routes[:, i] are those of layer layers[i].
        num_layers: all decoder layers, dense ones included.
    """

    layers: tuple[int, ...]
    num_layers: int
    num_experts: int
    top_k: int

    @classmethod
    def of(cls, model: nn.Module) -> RouterMap:
        """Raises `ReplayError` as `find_routers` does."""
        routers = find_routers(model)
        first = routers[0]
        return cls(tuple(r.layer for r in routers), num_layers(model.config), first.num_experts, first.top_k)

    @classmethod
    def of_folder(cls, path: str, *, trust_remote_code: bool = False) -> RouterMap:
        """Of a model folder or hub name: the model's modules are made, without memory for weights.

        Raises:
            ReplayError: no routers, or some that cannot be told apart.
            OSError: no model there.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return cls.of(model)


def find_routers(model: nn.Module) -> list[Router]:
    """Every router of a causal LM, in layer order.

    Raises:
        ReplayError: there is none; a sparse layer (by its experts, or by the model's config) has none or two; routers
            choose differently many.
    """
    routers = sorted(_routers(model), key=lambda router: router.layer)
    if not routers:
        raise ReplayError(
            f"{type(model).__name__} has no router (a module with experts beside a gate or router): there is nothing "
            "to replay; set routing_replay=off"
        )
    for one, next_one in itertools.pairwise(routers):
        if one.layer == next_one.layer:
            raise ReplayError(f"layer {one.layer} has two routers, {one.name} and {next_one.name}")
    shapes = {(router.top_k, router.num_experts) for router in routers}
    if len(shapes) > 1:
        raise ReplayError(f"routers choose differently: (k, experts) {sorted(shapes)}")
    found = {router.layer for router in routers}
    expected = sparse_layers(model.config)
    if expected is not None and found != expected:
        missing, extra = sorted(expected - found), sorted(found - expected)
        what = f"layers {missing} are sparse and have no router with a handle" if missing else ""
        if extra:
            what = f"{what}; " * bool(what) + f"layers {extra} have a router and are dense"
        raise ReplayError(f"by the model's config, {what}: each would silently choose live, so nothing is replayed")
    return routers


def _routers(model: nn.Module) -> Iterator[Router]:
    for name, block in model.named_modules():
        children = dict(block.named_children())
        if "experts" not in children:
            continue
        gate = next((gate for gate in _GATES if gate in children), None)
        layer = _layer_of(name)
        if gate is None:
            raise ReplayError(
                f"layer {layer}: {name} has experts and neither {' nor '.join(_GATES)}, so its router cannot be found; "
                "it would silently choose live"
            )
        router = children[gate]
        itself = (
            not isinstance(router, nn.Linear)
            and not hasattr(block, _CHOICE_OF_BLOCK)
            and any(hasattr(router, attribute) for attribute in _TOP_K)
        )
        chooser, chooser_name = (router, f"{name}.{gate}") if itself else (block, name)
        config = _text_config(model.config)
        top_k = _number((chooser, block, config), _TOP_K)
        weight = getattr(router, "weight", None)
        num_experts = (
            int(weight.shape[0])
            if weight is not None and weight.dim() == 2
            else _number((router, block, config), NUM_EXPERTS)
        )
        if top_k is None or num_experts is None:
            raise ReplayError(f"layer {layer}: {name} does not say how many experts it chooses, or of how many")
        yield Router(layer, chooser_name, chooser, top_k, num_experts)


def _layer_of(name: str) -> int:
    found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)", name)
    if found is None:
        raise ReplayError(f"{name} has experts and stands in no numbered layer")
    return int(found[1])


def _number(owners: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def num_layers(config: Any) -> int:
    return int(_text_config(config).num_hidden_layers)


def sparse_layers(config: Any) -> set[int] | None:
    """Layers that a model's config calls sparse; None where it does not say."""
    config = _text_config(config)
    layers = range(int(config.num_hidden_layers))
    if getattr(config, "mlp_layer_types", None):
        return {layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "sparse"}
    if hasattr(config, "decoder_sparse_step"):
        dense = set(getattr(config, "mlp_only_layers", None) or ())
        step = int(config.decoder_sparse_step)
        return {layer for layer in layers if layer not in dense and (layer + 1) % step == 0}
    if getattr(config, "first_k_dense_replace", None) is not None:
        step = getattr(config, "moe_layer_freq", 1)
        step = step if isinstance(step, int) else 1
        return {layer for layer in layers if layer >= config.first_k_dense_replace and layer % step == 0}
    if getattr(config, "model_type", None) in ("mixtral", "olmoe", "gpt_oss", "minimax", "phimoe"):
        return set(layers)
    return None
