"""How far two choices of experts agree: as sets, and in their order."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verl_tim.replay.cursor import LIVE
from verl_tim.replay.errors import ReplayError

_SHIFT_TOKENS = 64  # fewer tell nothing, and half as many that lie over each other after a shift
_SHIFT_MARGIN = 0.1
_LEAST_OWN = 0.5  # far below what mismatch and staleness leave, and above what unrelated tokens of many experts share


@dataclass(frozen=True)
class Agreement:
    """Sums over (token, layer) pairs that have a route.

    Attributes:
        pairs: how many there are.
        flips: pairs whose sets of experts differ.
        order: pairs of equal sets in another order.
        missing: sum over pairs of the share of experts that the other choice lacks.
        live: pairs without a route, where the router chose itself.
    """

    pairs: float = 0.0
    flips: float = 0.0
    order: float = 0.0
    missing: float = 0.0
    live: float = 0.0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def agreement(given_TLK: Tensor, other_TLK: Tensor) -> Tensor:
    """float64 [5], the fields of `Agreement`, on the tensors' device.

    Args:
        given_TLK: the routes, `LIVE` where there are none.
        other_TLK: as many experts of each token and layer, distinct.
    """
    has_TL = (given_TLK != LIVE).all(-1)
    missing_TL = 1.0 - _overlap(given_TLK, other_TLK)
    same_TL = missing_TL == 0  # distinct on both sides and equally many
    ordered_TL = (given_TLK == other_TLK).all(-1)
    return torch.stack(
        [
            has_TL.sum().double(),
            (has_TL & ~same_TL).sum().double(),
            (has_TL & same_TL & ~ordered_TL).sum().double(),
            (missing_TL * has_TL).sum(dtype=torch.float64),
            (~has_TL).sum().double(),
        ]
    )


def _overlap(a_TLK: Tensor, b_TLK: Tensor) -> Tensor:
    """float32 [T, L]: share of a's experts that b has."""
    found = torch.zeros_like(a_TLK, dtype=torch.bool)
    for place in range(b_TLK.shape[-1]):
        found |= a_TLK == b_TLK[..., place : place + 1]
    return found.float().mean(-1)


def refuse_misplaced(given_TLK: Tensor, live_TLK: Tensor, *, prompt: int, sample: str) -> None:
    """Raise where a sequence's routes look like those of other positions (by one, by its prompt's length), or of
    another sequence, all of them or those of the response.

    Routes of the right shape may still stand in the wrong place. At the right one they agree with what the router would
    choose, up to the mismatch that replay is there for; at a wrong one about as well as any two tokens do. Where most
    experts are others than the router's own, that is no mismatch to be replayed.

    Args:
        given_TLK, live_TLK: of one sequence; the routes and the live choice.
        prompt: its length, tokens.

    Raises:
        ReplayError: names sample, layer and position.
    """
    has_T = (given_TLK != LIVE).all((1, 2))
    count = int(has_T.sum())
    given_TLK, live_TLK = given_TLK[:count], live_TLK[:count]
    if count < _SHIFT_TOKENS or not bool(has_T[:count].all()):
        return
    # answers to one prompt share its routes, and the prompt may be most of them
    answer = prompt if count - prompt >= _SHIFT_TOKENS else 0
    shifts = [shift for shift in (1, -1, prompt, -prompt) if count - abs(shift) >= _SHIFT_TOKENS // 2]
    own_T = _overlap(given_TLK, live_TLK).mean(-1)
    scores = [own_T.mean(), own_T[answer:].mean()]
    for shift in shifts:
        a, b = (given_TLK[shift:], live_TLK[:-shift]) if shift > 0 else (given_TLK[:shift], live_TLK[-shift:])
        scores.append(_overlap(a, b).mean())
    here, answered, *others = torch.stack(scores).tolist()
    best = max(range(len(others)), key=others.__getitem__, default=None)
    if best is not None and others[best] > here + _SHIFT_MARGIN:
        shift = shifts[best]
        raise ReplayError(
            f"sample {sample}, all layers, position 0 on: the routes are shifted by {shift} position(s) against the "
            f"tokens: {others[best]:.0%} of their experts are the router's own choice there, and {here:.0%} where they "
            "stand"
        )
    for start, own in ((0, here), (answer, answered)):
        if own < _LEAST_OWN:
            raise ReplayError(
                f"sample {sample}, all layers, position {start} on: the routes are of another sequence, or of other "
                f"weights: only {own:.0%} of their experts are the router's own choice"
            )
