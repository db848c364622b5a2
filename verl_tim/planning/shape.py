"""A model as a plan sees it: how many parameters stand where, what a token costs, what its keys and values take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tim.launch.errors import LaunchError
from verl_tim.models.config import ModelConfig, ModelError, config_from_hf, load_model_config
from verl_tim.tasks.errors import InputError


@dataclass(frozen=True)
class Shape:
    """One model.

    Attributes:
        name: for reports.
        config: its fields, as engine and trainer read them.
    """

    name: str
    config: ModelConfig

    # --- parameters -------------------------------------------------------------------------------------------------

    @property
    def _query(self) -> int:
        return self.config.num_heads * self.config.head_dim

    @property
    def _key(self) -> int:
        return self.config.num_kv_heads * self.config.head_dim

    @property
    def attention_parameters(self) -> int:
        """Of one layer: q, k, v and o, their biases and norms, and the two norms of the layer."""
        c = self.config
        size = c.hidden_size * (2 * self._query + 2 * self._key) + 2 * c.hidden_size
        size += 2 * c.head_dim if c.arch.qk_norm else 0
        return size + (self._query + 2 * self._key if c.arch.qkv_bias else 0)

    @property
    def expert_parameters(self) -> int:
        """Of one expert; 0 for a dense model."""
        return 3 * self.config.hidden_size * self.config.moe.intermediate_size if self.config.moe else 0

    def mlp_parameters(self, layer: int) -> int:
        c = self.config
        if not c.is_moe_layer(layer):
            return 3 * c.hidden_size * c.intermediate_size
        assert c.moe is not None
        return c.moe.num_experts * (self.expert_parameters + c.hidden_size)

    def layer_parameters(self, layer: int) -> int:
        return self.attention_parameters + self.mlp_parameters(layer)

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, which a tied model uses as its head, too."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def head_parameters(self) -> int:
        """Of a head of its own; 0 where it is the embedding."""
        return 0 if self.config.tie_word_embeddings else self.embedding_parameters

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        layers = sum(self.layer_parameters(index) for index in range(self.config.num_layers))
        return layers + self.embedding_parameters + self.head_parameters + self.config.hidden_size

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter as the trainer holds it: a layer's experts are two (transformers 5)."""
        moe = self.config.moe
        experts = moe.num_experts * 2 * moe.intermediate_size * self.config.hidden_size if moe else 0
        return max(self.embedding_parameters, experts, self.config.hidden_size * self.config.intermediate_size)

    @property
    def tensors(self) -> int:
        """Tensors of the checkpoint, an expert's counted one by one, as they travel to a rollout."""
        c = self.config
        each = 7 + (2 if c.arch.qk_norm else 0) + (3 if c.arch.qkv_bias else 0)
        total = 3 - bool(c.tie_word_embeddings)
        for index in range(c.num_layers):
            total += each - 1 + (3 * c.moe.num_experts + 1 if c.moe and c.is_moe_layer(index) else 3)
        return total

    # --- the cost of a token ----------------------------------------------------------------------------------------

    @property
    def active_layer_parameters(self) -> int:
        """Parameters of all layers that one token passes through."""
        c, total = self.config, 0
        for index in range(c.num_layers):
            total += self.attention_parameters
            if c.moe and c.is_moe_layer(index):
                total += c.moe.top_k * self.expert_parameters + c.hidden_size * c.moe.num_experts
            else:
                total += self.mlp_parameters(index)
        return total

    def linear_flops(self, *, head: bool = True) -> float:
        """FLOP of one token's linears in a forward, two per multiply-add; `head`: with its log-prob."""
        return 2.0 * (self.active_layer_parameters + (self.embedding_parameters if head else 0))

    @property
    def attention_flops_per_square(self) -> float:
        """FLOP of causal attention in a forward, per squared token of a sequence: q k^T and p v, half of it masked."""
        return 2.0 * self._query * self.config.num_layers

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers, bfloat16."""
        return 2 * 2 * self.config.num_layers * self._key

    def touched_parameters(self, sequences: float) -> float:
        """Parameters that a decode step reads: experts that nobody chose are not, were the choices even and
        independent (as in `bench.rollout.floor_tokens_per_second`); of the embedding only rows.
        """
        c = self.config
        total = float(self.embedding_parameters)
        for index in range(c.num_layers):
            total += self.attention_parameters
            if c.moe and c.is_moe_layer(index):
                touched = c.moe.num_experts * (1 - (1 - c.moe.top_k / c.moe.num_experts) ** sequences)
                total += c.hidden_size * c.moe.num_experts + touched * self.expert_parameters
            else:
                total += self.mlp_parameters(index)
        return total

    @property
    def sparse_layers(self) -> int:
        return len(self.config.moe.layers) if self.config.moe else 0

    # --- activations ------------------------------------------------------------------------------------------------

    @property
    def saved_elements(self) -> int:
        """Elements per token that a layer's forward saves for its backward, its input not counted (bf16 each).

        Of the contract's trainer (models/contract_layer.py, trainer_layer): the normed input; q, k, v before and q, k
        after rotation; attention's output; the residual sum and its norm; then gate, up and their product, or for
        experts nothing more, since their backward computes them again (numerics/moe.py).
        """
        c = self.config
        inner = 0 if self.sparse_layers == c.num_layers else 3 * c.intermediate_size
        return 3 * c.hidden_size + 3 * self._query + 3 * self._key + inner

    @property
    def backward_elements(self) -> int:
        """Elements per token that the backward of a layer's MLP takes beside what is saved (bf16 each).

        Dense: the gradients of gate and up, of the layer's output and of the residual. Experts, per chosen one: their
        input, gate and up with product and all their gradients (numerics/moe.py, backward).
        """
        c = self.config
        dense = 0 if self.sparse_layers == c.num_layers else 2 * c.intermediate_size
        moe = c.moe
        sparse = moe.top_k * (6 * moe.intermediate_size + 3 * c.hidden_size) if moe and self.sparse_layers else 0
        return max(dense, sparse) + 2 * c.hidden_size

    @property
    def inference_elements(self) -> int:
        """Most elements per token that a layer's forward without gradient holds at once (bf16 each): residual, branch
        and norm, and the widest of q, k, v and the MLP."""
        c = self.config
        attention = 2 * self._query + 2 * self._key
        dense = 0 if self.sparse_layers == c.num_layers else 3 * c.intermediate_size
        moe = c.moe
        sparse = moe.top_k * (3 * moe.intermediate_size + 2 * c.hidden_size) if moe and self.sparse_layers else 0
        return 3 * c.hidden_size + max(attention, dense, sparse)


def shape_of(name: str, *, layers: int | None = None) -> Shape:
    """A shape of `tasks.random_model.SHAPES`; `layers` cuts its depth. Raises LaunchError for an unknown one."""
    from verl_tim.tasks.random_model import hf_config

    try:
        config = config_from_hf(hf_config(name, layers=layers))
    except InputError as error:
        raise LaunchError.of("--shape", str(error), "or give a local model folder: --shape FOLDER") from None
    return Shape(name if layers is None else f"{name}, {layers} layers", config)


def find_shape(path: str | None, *, kind: str | None = None, given: str | None = None) -> Shape:
    """The shape of a run's model; nothing is downloaded.

    Args:
        path: `actor_rollout_ref.model.path`: a folder, or a hub name whose shape is known.
        kind: `tim.model.kind`, for a run whose model this package makes (path null).
        given: `--shape`, which goes before both: a known shape or a folder.

    Raises:
        LaunchError: no shape can be found; the message lists the known ones.
    """
    from verl_tim.tasks.random_model import SHAPES

    if given is not None:
        return _of_folder("--shape", given) if os.path.isdir(os.path.expanduser(given)) else shape_of(given)
    if path is None:
        if kind:
            return _made_here(kind)
        raise LaunchError.of(
            "actor_rollout_ref.model.path", "is not given", "set it, or name a shape: --shape " + "|".join(SHAPES)
        )
    if os.path.isdir(os.path.expanduser(path)):
        return _of_folder("actor_rollout_ref.model.path", path)
    name = path.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix("-base")
    if name in SHAPES:
        return shape_of(name)
    folder = Path(os.path.expanduser(path)).absolute()
    raise LaunchError.of(
        "actor_rollout_ref.model.path",
        f"there is no folder {folder}, and {path} is no hub name whose shape is known",
        "give a local folder with its config.json, or --shape " + "|".join(SHAPES),
    )


def _of_folder(key: str, path: str) -> Shape:
    folder = Path(os.path.expanduser(path))
    try:
        return Shape(folder.name, load_model_config(folder))
    except ModelError as error:
        raise LaunchError.of(key, str(error), "give the folder of a model that this package serves") from None


def _made_here(kind: str) -> Shape:
    from verl_tim.tasks import architectures

    try:
        fields: Mapping[str, Any] = architectures.resolve_shape(kind)
    except InputError as error:
        raise LaunchError.of("tim.model.kind", str(error), "take model=tiny_qwen3 or model=tiny_qwen3_moe") from None
    return Shape(f"tiny {kind}", config_from_hf(architectures.config_of(kind, fields)))
