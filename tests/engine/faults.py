"""What a test does to one rank of a split engine (`ParallelEngine.each_rank` takes it there by its import path)."""

from __future__ import annotations

import os
import signal

import torch


def rank(engine) -> int:
    return engine._ranks.rank


def under_way(engine) -> int:
    """Plans on their way through the stages."""
    runner = engine._stage_runner or engine._graph_runner
    return sum(prepared is not None for prepared in runner._under_way)


def weight_bytes(engine) -> int:
    return engine.model.nbytes


def pages(engine) -> int:
    return engine._pool.num_pages


def requests(engine) -> list[str]:
    return engine.request_ids()


def audit(engine) -> None:
    engine.audit()


def raise_in_next_step(engine) -> None:
    if rank(engine) == 1:

        def forward(*_arguments, **_settings):
            raise FloatingPointError("planted")

        engine.model.forward = forward


def die_in_next_step(engine) -> None:
    if rank(engine) == 1:

        def forward(*_arguments, **_settings):
            os.kill(os.getpid(), signal.SIGKILL)

        engine.model.forward = forward


def refuse_next_load(engine) -> None:
    """Rank 1 takes no weights, which the others take."""
    if rank(engine) == 1:

        def load_weights(_weights):
            raise MemoryError("planted")

        engine.model.load_weights = load_weights


class OwnTensors:
    """A `Reader`: the payload is a seed, from which each rank makes the tensors by itself."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self.shapes = shapes

    def read(self, payload, device):
        names = payload["names"]
        for name in names:
            yield name, own_tensor(name, self.shapes[name], payload["seed"]).to(device)

    def done(self) -> None:
        pass

    def close(self) -> None:
        pass


def own_tensor(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(name.encode()))
    return 0.2 * torch.randn(*shape, generator=generator)
