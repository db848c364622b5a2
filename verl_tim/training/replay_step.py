"""Routing replay in the worker: which routes a micro-batch gets, what is recorded, and what it changed.

r3: the micro-batch brings the rollout's routes in verl's field `routed_experts`, by absolute position, as the agent
loop has checked them (`rollout.routes`); forwards of old log-probs and policy take them alike. r2: the forward of the
old log-probs records, by row of the step's batch, and every policy forward of that batch takes what it recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verl_tim.numerics.contract import ROW_FLOOR, ceil_to
from verl_tim.replay import Agreement, RecordedRoutes, ReplayError, RoutingReplay, agreement
from verl_tim.replay.agreement import refuse_misplaced
from verl_tim.replay.cursor import LIVE
from verl_tim.training.records import ROW_FIELD
from verl_tim.training.replay_config import ROUTES_KEY, Mode
from verl_tim.training.replay_report import Gap, Phase, ReplayReport

ROUTES_FIELD = "routed_experts"

_SHIFT_ROWS = 2  # sequences of each micro-batch, its longest, whose routes are laid beside the live choice


class ReplayStep:
    """Of one worker's engine.

    Args:
        mode: r2 or r3.
        replay: the handles of its model's routers.
        contract: the model's forward is the contract's, whose routers see packed rows, padded to `ROW_FLOOR`.
    """

    def __init__(self, mode: Mode, replay: RoutingReplay, *, contract: bool) -> None:
        self.mode, self.replay, self.contract = mode, replay, contract
        self._recorded = RecordedRoutes()
        self._phase: Phase | None = None  # of the batch under way
        self._free = False
        self._replayed = False  # since the last record
        self._sums: dict[Phase, list[Tensor]] = {}
        self._host_bytes = 0
        self._live, self._with_routes = Gap(), Gap()

    @property
    def host_bytes(self) -> int:
        """Memory of the recorded routes on the host, bytes."""
        return self._recorded.nbytes

    @property
    def probes(self) -> bool:
        """Whether the forward under way is to be followed by one of live routers (r3: the rollout has log-probs for
        its routes)."""
        return self.mode == "r3" and self._phase == "old" and not self._free

    @contextmanager
    def batch(self, phase: Phase) -> Iterator[None]:
        """Around verl's `forward_backward_batch`. An error inside clears everything."""
        before, self._phase = self._phase, phase
        if self.mode == "r2" and phase == "old" and self._replayed and not self._free:
            # the record of the batch before is of no use any more
            self._recorded.clear()
            self._replayed = False
        try:
            yield
        except BaseException:
            self.clear()
            raise
        finally:
            self._phase = before

    @contextmanager
    def free(self) -> Iterator[None]:
        """Around a forward that is not the policy's: its routers choose for themselves."""
        before, self._free = self._free, True
        try:
            with self.replay.free():
                yield
        finally:
            self._free = before

    def clear(self) -> None:
        """The step is over, or has failed; of one that updated nothing (verl's critic warm-up) no report was taken."""
        self.replay.clear()
        self._recorded.clear()
        self._replayed = False
        self._forget_counts()

    def begin(self, micro_batch: Any, input_ids: Tensor, *, packed: bool) -> None:
        """Before the forward of a micro-batch, whose model inputs are `input_ids`, (1, T) packed or (B, S) padded."""
        if self._free:
            return
        offsets = micro_batch["input_ids"].offsets()
        lengths = offsets.diff().tolist()
        given_TLK = self._given(micro_batch, lengths, input_ids.device)
        rows = input_ids.numel()
        if self.contract:
            rows = ceil_to(rows if packed else sum(lengths), ROW_FLOOR)
        if given_TLK is not None:
            if packed or self.contract:
                given_TLK = _extended(given_TLK, rows)
            else:
                given_TLK = _padded(given_TLK, lengths, input_ids.shape[1])
        self.replay.begin(rows, given_TLK)

    def end(self, micro_batch: Any, input_ids: Tensor) -> None:
        """After the forward, before its output is used."""
        if self._free:
            return
        assert self._phase is not None
        ended, live_TLK, used_TLK = self.replay.end()
        lengths = micro_batch["input_ids"].offsets().diff().tolist()
        if ended.given_TLK is None:
            self._recorded.keep(_rows(micro_batch), lengths, _sequences(used_TLK, lengths, input_ids, self.contract))
            self._host_bytes = max(self._host_bytes, self._recorded.nbytes)
            return
        self._replayed = self._replayed or self._phase == "update"
        given_TLK = ended.given_TLK
        sums = torch.cat([agreement(given_TLK, live_TLK), agreement(given_TLK, used_TLK)])
        self._sums.setdefault(self._phase, []).append(sums)
        if self.mode == "r3":
            parts = [_sequences(one, lengths, input_ids, self.contract) for one in (given_TLK, live_TLK)]
            self._check_place(parts[0], parts[1], micro_batch, lengths)

    def probed(self, live: Gap, replayed: Gap) -> None:
        """Sequences of the old log-probs' forward were run once more with live routers; how far each is off."""
        self._live, self._with_routes = self._live + live, self._with_routes + replayed

    def take(self) -> list[ReplayReport]:
        """What was counted since the last call."""
        reports = []
        for phase, sums in self._sums.items():
            before, after = torch.stack(sums).sum(0).view(2, -1).tolist()
            gaps = (self._live, self._with_routes) if phase == "old" else (Gap(), Gap())
            reports.append(ReplayReport(phase, Agreement(*before), Agreement(*after), self._host_bytes, *gaps))
        self._forget_counts()
        return reports

    def _forget_counts(self) -> None:
        self._sums, self._host_bytes, self._live, self._with_routes = {}, 0, Gap(), Gap()

    # ------------------------------------------------------------------------------------------------------ the routes

    def _given(self, micro_batch: Any, lengths: Sequence[int], device: torch.device) -> Tensor | None:
        """int16 [T, layers, k] of the micro-batch's tokens; None: this forward records."""
        if self.mode == "r2":
            if self._phase == "old":
                return None
            return self._recorded.of(_rows(micro_batch), lengths, device)
        return self._returned(micro_batch, lengths).to(device)

    def _returned(self, micro_batch: Any, lengths: Sequence[int]) -> Tensor:
        if ROUTES_FIELD not in micro_batch.keys():  # noqa: SIM118 (a TensorDict is no dict)
            raise ReplayError(
                f"all samples, all layers, all positions: the batch has no {ROUTES_FIELD}: the rollout returned no "
                f"routes ({ROUTES_KEY}), or the trainer did not hand them on"
            )
        routes = micro_batch[ROUTES_FIELD]
        given_TLK = routes.values() if routes.is_nested else routes
        found = routes.offsets().diff().tolist() if routes.is_nested else [len(given_TLK)]
        names = _names(micro_batch, len(lengths))
        for name, length, expected in zip(names, found, lengths, strict=True):
            if length != expected:
                raise ReplayError(
                    f"sample {name}, all layers, position {min(length, expected)}: {length} positions have routes, and "
                    f"the sequence has {expected}"
                )
        shape = (sum(lengths), len(self.replay.routers), self.replay.top_k)
        if tuple(given_TLK.shape) != shape:
            raise ReplayError(
                f"sample {names[0]}, layer {self.replay.layers[min(given_TLK.shape[1], shape[1]) - 1]}, position 0: "
                f"routes are {list(given_TLK.shape)}, and {shape[1]} routers choose {shape[2]}: expected {list(shape)}"
            )
        # checked as they came: int16 would cut an id out of range to one in it
        return self._checked(given_TLK, micro_batch, lengths, names).to(torch.int16)

    def _checked(self, given_TLK: Tensor, micro_batch: Any, lengths: Sequence[int], names: Sequence[str]) -> Tensor:
        """Every position that a log-prob of the loss depends on has a route, or the router would choose in silence."""
        device = given_TLK.device
        length_B = torch.tensor(lengths, device=device)
        row_T = torch.arange(len(lengths), device=device).repeat_interleave(length_B)
        first_B = length_B.cumsum(0) - length_B
        position_T = torch.arange(len(given_TLK), device=device) - first_B[row_T]
        needed_B = _needed(micro_batch, length_B)
        # a row that adds nothing to the loss (verl fills up batches with such) brings no routes, and needs none
        given_TLK = torch.where((needed_B[row_T] > 0)[:, None, None], given_TLK, LIVE)
        absent_TLK = given_TLK == LIVE
        ordered_TLK = given_TLK.sort(-1).values
        twice_TL = (ordered_TLK[..., 1:] == ordered_TLK[..., :-1]).any(-1) & ~absent_TLK.all(-1)
        faults = {
            "no route, and the router must not choose for itself here": absent_TLK.any(-1)
            & (position_T < needed_B[row_T])[:, None],
            "a route in part": absent_TLK.any(-1) & ~absent_TLK.all((1, 2))[:, None],
            f"expert id outside [0, {self.replay.num_experts})": (
                (given_TLK < LIVE) | (given_TLK >= self.replay.num_experts)
            ).any(-1),
            "an expert occurs twice": twice_TL,
        }
        if bool(torch.stack(list(faults.values())).any()):
            for what, bad_TL in faults.items():
                if bool(bad_TL.any()):
                    at, place = (int(i) for i in bad_TL.nonzero()[0])
                    raise ReplayError(
                        f"sample {names[int(row_T[at])]}, layer {self.replay.layers[place]}, position "
                        f"{int(position_T[at])}: {what} (experts {given_TLK[at, place].tolist()})"
                    )
        return given_TLK

    def _check_place(self, given_TLK: Tensor, live_TLK: Tensor, micro_batch: Any, lengths: Sequence[int]) -> None:
        names, responses = _names(micro_batch, len(lengths)), _response_lengths(micro_batch)
        ends = list(itertools.accumulate(lengths))
        for place in sorted(range(len(lengths)), key=lengths.__getitem__)[-_SHIFT_ROWS:]:
            part = slice(ends[place] - lengths[place], ends[place])
            prompt = lengths[place] - int(responses[place])
            refuse_misplaced(given_TLK[part], live_TLK[part], prompt=prompt, sample=names[place])


def _extended(given_TLK: Tensor, rows: int) -> Tensor:
    """With rows behind the sequences that are padding, without routes."""
    more = rows - len(given_TLK)
    if not more:
        return given_TLK
    return torch.cat([given_TLK, given_TLK.new_full((more, *given_TLK.shape[1:]), LIVE)])


def _padded(given_TLK: Tensor, lengths: Sequence[int], width: int) -> Tensor:
    """Sequences one below the other, each from column 0 on, as rows of a flat [B * S]."""
    whole = given_TLK.new_full((len(lengths), width, *given_TLK.shape[1:]), LIVE)
    for row, part in enumerate(given_TLK.split(list(lengths))):
        whole[row, : len(part)] = part
    return whole.flatten(0, 1)


def _sequences(rows_TLK: Tensor, lengths: Sequence[int], input_ids: Tensor, contract: bool) -> Tensor:
    """The rows of the sequences, without padding."""
    if contract or input_ids.shape[0] == 1:
        return rows_TLK[: sum(lengths)]
    width = input_ids.shape[1]
    return torch.cat([rows_TLK[row * width : row * width + length] for row, length in enumerate(lengths)])


def _rows(micro_batch: Any) -> list[int]:
    """Row numbers in the step's batch."""
    if ROW_FIELD not in micro_batch.keys():  # noqa: SIM118 (a TensorDict is no dict)
        raise ReplayError(
            "all samples: the rows of the batch are not numbered, so that what r2 recorded cannot find them again: use "
            "verl's V1 trainers or its legacy one"
        )
    rows = micro_batch[ROW_FIELD]
    return [int(row) for row in (rows.values() if rows.is_nested else rows).reshape(-1).tolist()]


def _names(micro_batch: Any, count: int) -> list[str]:
    """Of samples, for messages: the row in the step's batch."""
    if ROW_FIELD in micro_batch.keys():  # noqa: SIM118
        return [f"{row} of the batch" for row in _rows(micro_batch)]
    return [f"{place} of the micro-batch" for place in range(count)]


def _response_lengths(micro_batch: Any) -> Tensor:
    responses = micro_batch["responses"]
    if responses.is_nested:
        return responses.offsets().diff()
    return micro_batch["attention_mask"][:, micro_batch["prompts"].shape[1] :].sum(1)


def _needed(micro_batch: Any, length_B: Tensor) -> Tensor:
    """int64 [B]: positions of each row up to the one that draws its last token of the loss; 0 without such a token."""
    mask = micro_batch["response_mask"]
    mask_BT = (mask.to_padded_tensor(0) if mask.is_nested else mask).to(length_B.device) != 0
    # from 0, so that a micro-batch of empty responses has a largest place, too
    place_T = torch.arange(mask_BT.shape[1] + 1, device=mask_BT.device)
    last_B = (torch.nn.functional.pad(mask_BT, (1, 0)) * place_T).amax(1)
    prompt_B = length_B - _response_lengths(micro_batch).to(length_B.device)
    # the position before token `last` of the response
    return torch.where(last_B > 0, prompt_B + last_B - 1, 0)
