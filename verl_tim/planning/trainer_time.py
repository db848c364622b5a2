"""A trainer's passes: arithmetic at the measured rates, AdamW at the memory's, collectives beside them.

    forward        linear FLOP / linear rate + attention FLOP / attention rate
    backward step  linears: 2 more forwards, and with gradient checkpointing 1 more; the head's logits are computed
                   again in any case. Attention: backward is 2.5 forwards, and 1 more with checkpointing
    AdamW          28 bytes per parameter of the shard fused (p, g, m, v read; p, m, v written), 80 by torch's foreach
                   (its eight passes of torch/optim/adamw.py, _multi_tensor_adamw)

FSDP gathers bf16 parameters for every forward and again for every backward of a micro-batch, and reduces float32
gradients after it (verl 0.9.1 leaves `use_no_sync_for_gradient_accumulation` false). They run beside the arithmetic,
so a micro-batch takes the longer of the two; the first gather is not hidden and counts extra. Offloaded states cross
the host link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_tim.planning.lengths import Lengths
from verl_tim.planning.network import Network
from verl_tim.planning.rates import Speeds, rate
from verl_tim.planning.settings import Settings
from verl_tim.planning.shape import Shape

_ADAM_FUSED, _ADAM_FOREACH = 28, 80
_ATTENTION_BACKWARD = 2.5  # forwards


@dataclass(frozen=True)
class Work:
    """Tokens of one GPU's share of a pass, and the sum of squared sequence lengths that its attention sees."""

    tokens: float
    squares: float


@dataclass(frozen=True)
class PassTime:
    """One pass of a trainer rank: seconds, and of these what arithmetic, and what collectives alone would take."""

    seconds: float
    arithmetic: float
    network: float
    optimizer: float = 0.0
    host: float = 0.0
    micro_batches: int = 1


@dataclass(frozen=True)
class TrainerTime:
    """Passes of one run's trainer ranks."""

    shape: Shape
    settings: Settings
    speeds: Speeds

    def work(self, prompts: Lengths, answers: Lengths, sequences: float) -> Work:
        """Of `sequences` over all ranks, dealt evenly: verl balances them by tokens."""
        tokens = prompts.mean + answers.mean
        square = prompts.mean**2 + 2 * prompts.mean * answers.mean + answers.mean_square
        return Work(sequences * tokens / self.settings.gpus, sequences * square / self.settings.gpus)

    def arithmetic(self, work: Work, *, forwards: float, attention_forwards: float) -> float:
        """Seconds of that many forwards' worth of linears and of attention."""
        numerics = self.settings.numerics
        linear = self.shape.linear_flops() * work.tokens / self.speeds.linear(numerics, self.shape)
        attention = self.shape.attention_flops_per_square * work.squares / self.speeds.attention(numerics)
        return forwards * linear + attention_forwards * attention

    def forward(self, work: Work, micro_tokens: int) -> PassTime:
        """Log-probs of a batch."""
        micro = max(1, math.ceil(work.tokens / micro_tokens))
        arithmetic = self.arithmetic(work, forwards=1, attention_forwards=1)
        gather, first = self._gather()
        seconds = max(arithmetic, micro * gather) + first
        s = self.settings
        host = self._crossing(s.master_bytes) if s.param_offload and not s.offload_policy else 0.0
        if s.offload_policy:
            host = micro * self._crossing(s.master_bytes)
        return PassTime(seconds + host, arithmetic, micro * gather, host=host, micro_batches=micro)

    def reference(self, work: Work, micro_tokens: int) -> PassTime:
        """Log-probs of the reference model, whose weights come from the host in every micro-batch."""
        base = self.forward(work, micro_tokens)
        host = base.micro_batches * self._crossing(self.settings.master_bytes)
        return PassTime(base.seconds - base.host + host, base.arithmetic, base.network, host=host)

    def update(self, work: Work, micro_tokens: int) -> PassTime:
        """One optimiser step: forward, backward and AdamW over a mini-batch."""
        s = self.settings
        micro = max(1, math.ceil(work.tokens / micro_tokens))
        again = 1.0 if s.checkpointing else 0.0
        arithmetic = self.arithmetic(work, forwards=3 + again, attention_forwards=1 + _ATTENTION_BACKWARD + again)
        gather, first = self._gather()
        network = Network(self.speeds, s.gpus_per_node)
        reduce = network.ring_seconds(4.0 * self.shape.parameters, s.shards, calls=self._modules)
        if s.gpus > s.shards:  # shards are copied: gradients are summed over the copies, too
            reduce += 2 * network.ring_seconds(4.0 * self.shape.parameters / s.shards, s.gpus // s.shards)
        collectives = micro * ((2 if s.reshard else 1) * gather + reduce)
        optimizer, host = self._optimizer()
        if s.offload_policy:  # weights for forward and backward, gradients back
            host += micro * 3 * self._crossing(s.master_bytes)
        seconds = max(arithmetic, collectives) + first + optimizer + host
        return PassTime(seconds, arithmetic, collectives, optimizer, host, micro)

    @property
    def moving_states(self) -> float:
        """Seconds in which offloaded states come for an update and go back: once for all its optimiser steps (verl
        0.9.1, workers/engine_workers.py:281)."""
        s = self.settings
        if s.offload_policy:
            return 0.0
        states = (2 if s.optimizer_offload else 0) + (1 if s.param_offload else 0)
        return 2 * self._crossing(states * s.master_bytes)

    @property
    def _modules(self) -> int:
        return self.shape.config.num_layers + 3

    def _gather(self) -> tuple[float, float]:
        """(seconds to gather all parameters once in bf16, of which the first layer's)."""
        s = self.settings
        network = Network(self.speeds, s.gpus_per_node)
        everything = network.ring_seconds(2.0 * self.shape.parameters, s.shards, calls=self._modules)
        return everything, everything / self._modules

    def _crossing(self, bytes_per_parameter: float) -> float:
        """Seconds in which this rank's shards cross the host link once."""
        return bytes_per_parameter * self.shape.parameters / self.settings.shards / rate("host_link").value

    def _optimizer(self) -> tuple[float, float]:
        """(seconds of AdamW on the GPU, on the host)."""
        s = self.settings
        size = self.shape.parameters / s.shards * s.master_bytes / 4
        if s.offload_policy:
            return 0.0, _ADAM_FUSED * size / rate("host_adam").value
        return (_ADAM_FOREACH if s.foreach_adam else _ADAM_FUSED) * size / self.speeds.bandwidth, 0.0
