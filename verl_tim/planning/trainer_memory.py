"""What a trainer rank holds, moment by moment, under FSDP2.

States. verl keeps the master weights in `fsdp_config.model_dtype` (fp32), sharded over `fsdp_size` ranks (all, where
it is -1): 4 P / S bytes; gradients in the same dtype and shards, 4 P / S; AdamW's two moments, 8 P / S. A working copy
in bf16 exists only of wrapped modules that run: verl 0.9.1 wraps every decoder layer, and embedding and head where they
are not tied (utils/fsdp_utils.py:549-600); tied, they are the root's, which stays gathered from the forward to the end
of the backward, for FSDP2 does not reshard the root.

A module that runs costs, in bytes per parameter of it: 2 gathered, and while the next one is fetched ahead 2 of the
gather's buffer and 2 of its own (torch, distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather_copy_out
fills the parameters from the buffer); in backward 2 of its gradient, 4 of the float32 input of the reduction, the
module before's or its own, since that is freed only when the next one is made (foreach_reduce), and 4 / S of its
output.

Activations. With gradient checkpointing one input per layer and token (2 D bytes), and one layer's own
(`Shape.saved_elements`, `Shape.backward_elements`), computed again; without, every layer's own. verl's activation
offload (utils/activation_offload.py) keeps those of two layers. The head: logits exist in slabs only under the contract
(numerics/gpu/head.py: 2^25 float32 in a forward; numerics/gpu/head_backward.py: 2^26 float32 and as many bf16 in the
backward); verl's stock path without fused kernels makes them whole, in bf16 with their gradient, and float32 where the
entropy is asked for.

Moments of an update, of which the fullest counts: the head's backward (all layers' inputs, no gradient of this
micro-batch), every layer's backward (one input less and one gradient more each time), the embedding's at the end, and
the optimizer (no activations; torch's foreach AdamW makes one float32 temporary per parameter, the fused one none).
From the second micro-batch on all gradients are there from the start.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_tim.planning.item import Item
from verl_tim.planning.settings import Settings
from verl_tim.planning.shape import Shape
from verl_tim.units import count

_BF16, _FP32 = 2, 4
_FORWARD_SLAB = 1 << 25  # logits (numerics/gpu/head.py, _LARGE_SLAB_ELEMENTS)
_BACKWARD_SLAB = 1 << 26  # logits (numerics/gpu/head_backward.py, _SLAB_ELEMENTS)
_LAYERS_KEPT = 2  # by verl's activation offload


@dataclass(frozen=True)
class Moment:
    """What is held beside the states at one moment: named parts in bytes."""

    name: str
    gradients: float = 0.0
    working: float = 0.0  # gathered bf16 copies and gather buffers
    reducing: float = 0.0  # gradients on their way into the shards
    activations: float = 0.0
    head: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.working + self.reducing + self.activations + self.head + self.optimizer


@dataclass(frozen=True)
class TrainerMemory:
    """A trainer rank of one run.

    Attributes:
        accumulates: an optimiser step has several micro-batches.
        root_holds_all: embedding and head are the root's even where they are not tied, as in `bench.trainer_step`.
    """

    shape: Shape
    settings: Settings
    accumulates: bool
    root_holds_all: bool = False

    # --- states -----------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> float:
        """Bytes of this rank's master weights."""
        return self.shape.parameters * self.settings.master_bytes / self.settings.shards

    @property
    def moments(self) -> float:
        """Bytes of this rank's AdamW moments."""
        return 2 * self.parameters

    def resident(self, *, update: bool, forward: bool) -> tuple[Item, ...]:
        """The states on the GPU, `update`: in an update, `forward`: in a pass of the trainer.

        verl 0.9.1: `offload_policy` leaves all on the host (fsdp/transformer_impl.py:458-463); `param_offload` brings
        the parameters for a pass, `optimizer_offload` the moments for an update, gradients go with the parameters
        (engine/base.py:314-328), and both go back afterwards.
        """
        s = self.settings
        of = f"{count(self.shape.parameters)} parameters x {s.master_bytes} B / {s.shards} shards"
        here = not s.offload_policy
        parameters = self.parameters if here and (forward or update or not s.param_offload) else 0.0
        moments = self.moments if here and (update or not s.optimizer_offload) else 0.0
        return (
            Item("master weights", parameters, of if parameters else "on the host"),
            Item("AdamW moments", moments, f"2 x {of}" if moments else "on the host"),
        )

    # --- an update --------------------------------------------------------------------------------------------------

    def update_moments(self, tokens: int) -> list[Moment]:
        """Every moment of an update over a micro-batch of `tokens` that may be the fullest."""
        shape, s, c = self.shape, self.settings, self.shape.config
        per_parameter = s.master_bytes / s.shards
        host = s.offload_policy
        full = 0.0 if host else shape.parameters * per_parameter
        layers = [shape.layer_parameters(index) for index in range(c.num_layers)]
        root = self._root_parameters
        outer = shape.embedding_parameters + shape.head_parameters - root
        wide = tokens * c.hidden_size
        done = 0.0 if root or host else shape.head_parameters * per_parameter
        moments = [
            Moment(
                "the head's backward",
                gradients=full if self.accumulates else 0.0,
                working=_BF16 * max(root, shape.head_parameters) + _BF16 * 2 * layers[-1],
                reducing=_BF16 * max(root and shape.embedding_parameters, shape.head_parameters)
                + (0 if root else (_FP32 + _FP32 / s.shards) * shape.head_parameters),
                activations=self._kept(tokens, c.num_layers) + _BF16 * wide,
                head=self._head_backward(tokens),
            )
        ]
        unsharded = _BF16 * (root if s.reshard else shape.parameters)
        for index in reversed(range(c.num_layers)):
            size, ahead = layers[index], layers[index - 1] if index else (outer and shape.embedding_parameters)
            before = layers[index + 1] if index + 1 < c.num_layers else (0 if root else shape.head_parameters)
            moments.append(
                Moment(
                    f"the backward of layer {index}",
                    gradients=full if self.accumulates else done,
                    working=unsharded + (_BF16 * (size + 2 * ahead) if s.reshard else 0),
                    reducing=_BF16 * (size + (root and shape.embedding_parameters))
                    + _FP32 * max(before, size)
                    + _FP32 * size / s.shards,
                    activations=self._kept(tokens, index + 1) + self._one_layer(tokens),
                )
            )
            done += 0.0 if host else size * per_parameter
        moments.append(
            Moment(
                "the embedding's backward",
                gradients=full if self.accumulates else done,
                working=_BF16 * (root or shape.embedding_parameters),
                reducing=(_BF16 + _FP32 + _FP32 / s.shards) * (root or shape.embedding_parameters)
                + _BF16 * shape.embedding_parameters,
                activations=2 * _BF16 * wide,
            )
        )
        if not host:
            # one temporary per parameter: sqrt of the second moment (torch/optim/adamw.py, _multi_tensor_adamw)
            temporary = shape.parameters * per_parameter if s.foreach_adam else 0.0
            moments.append(Moment("the optimizer", gradients=full, optimizer=temporary))
        return moments

    @property
    def _root_parameters(self) -> int:
        """Parameters of modules that FSDP2 wraps with the root."""
        shape = self.shape
        if shape.config.tie_word_embeddings:
            return shape.embedding_parameters
        return shape.embedding_parameters + shape.head_parameters if self.root_holds_all else 0

    def _kept(self, tokens: int, layers: int) -> float:
        """Bytes that `layers` layers keep for their backward, the one that runs aside."""
        s = self.settings
        kept = min(layers, _LAYERS_KEPT) if s.activation_offload else layers
        each = self.shape.config.hidden_size
        if not s.checkpointing:
            each += self.shape.saved_elements
        return float(_BF16 * tokens * each * kept)

    def _one_layer(self, tokens: int) -> float:
        """Bytes of the layer whose backward runs; what it saved is in `_kept` where nothing is computed again."""
        saved = self.shape.saved_elements if self.settings.checkpointing else 0
        return float(_BF16 * tokens * (saved + self.shape.backward_elements))

    def _head_backward(self, tokens: int) -> float:
        """Bytes of logits and of the hidden states' gradients."""
        shape, s = self.shape, self.settings
        hidden = (_FP32 + _BF16) * tokens * shape.config.hidden_size
        logits = tokens * shape.config.vocab_size
        if s.numerics == "contract":
            return float(hidden + (_FP32 + _BF16) * min(logits, _BACKWARD_SLAB))
        return float(hidden + (2 * _BF16 + (_FP32 if s.entropy else 0)) * logits)

    # --- a pass without gradients -----------------------------------------------------------------------------------

    def pass_moment(self, tokens: int) -> Moment:
        """The fullest moment of a pass that computes log-probs of a micro-batch of `tokens`."""
        shape, s, c = self.shape, self.settings, self.shape.config
        root = self._root_parameters
        largest = max(shape.layer_parameters(index) for index in range(c.num_layers))
        logits = tokens * c.vocab_size
        if s.numerics == "contract":
            head = float(_FP32 * min(logits, _FORWARD_SLAB))
        else:  # verl asks for the entropy here in any case (trainer/ppo/v1/trainer_base.py:1653)
            head = float((_BF16 + _FP32) * logits)
        layer = _BF16 * tokens * shape.inference_elements
        wide = _BF16 * tokens * c.hidden_size
        in_layer = layer + _BF16 * (root + 3 * largest)
        in_head = head + 2 * wide + _BF16 * max(root, shape.head_parameters)
        if in_layer > in_head:
            return Moment("a layer", working=float(_BF16 * (root + 3 * largest)), activations=float(layer))
        return Moment(
            "the head", working=float(_BF16 * max(root, shape.head_parameters)), activations=float(2 * wide), head=head
        )


def items_of(moment: Moment, tokens: int) -> tuple[Item, ...]:
    """A moment's parts as items."""
    return (
        Item("gradients", moment.gradients, "sharded, as the master weights"),
        Item("bf16 working copies", moment.working, "wrapped modules that run or are fetched ahead"),
        Item("gradients being reduced", moment.reducing, "bf16 and float32, unsharded, of one module"),
        Item("activations", moment.activations, f"micro-batch of {tokens:,} tokens"),
        Item("head", moment.head, "slabs of logits, gradients of the hidden states"),
        Item("AdamW's temporary", moment.optimizer, "foreach: one value per parameter"),
    )
