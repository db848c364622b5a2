"""What a test does to one rank of a split engine (`ParallelEngine.each_rank` takes it there by its import path)."""

from __future__ import annotations

import os
import random
import signal
import time

import torch

from tests.engine.own_time_device import OwnTimeDevice


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


def own_time_device() -> OwnTimeDevice:
    """At another pace on each rank."""
    return OwnTimeDevice(os.getpid())


def hesitate(engine) -> None:
    """Each rank takes its own time, before and after whatever it exchanges and in every forward."""
    dice = random.Random(os.getpid())

    def late(run):
        def wait_and_run(*arguments, **settings):
            time.sleep(dice.choice([0, 0, 0.002, 0.01]))
            result = run(*arguments, **settings)
            time.sleep(dice.choice([0, 0, 0.002]))
            return result

        return wait_and_run

    for name in ("send", "receive", "from_stage"):
        setattr(engine._ranks, name, late(getattr(type(engine._ranks), name).__get__(engine._ranks)))
    engine.model.forward = late(engine.model.forward)


def change_a_bit_on_the_way(engine) -> None:
    """What stage 1 receives of plan 5 has another bit than what was sent."""
    ranks = engine._ranks
    if ranks.place.stage == 1:
        received = [0]
        receive = type(ranks).receive.__get__(ranks)

        def broken(into):
            receive(into)
            if received[0] == 5:
                into.view(torch.int16).view(-1)[3] ^= 0x4000
            received[0] += 1

        ranks.receive = broken


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
