"""From what a rollout returned of a sequence to routes that may be replayed, or an error that says why not.

A rollout runs over prompt + response - 1 positions: the last token is drawn and never fed. What comes out here covers
prompt + response positions, as verl's trainer indexes them, with `LIVE` where there is no route: at the last token of a
response, and after the last drawn token of a conversation. Their routes reach no log-prob that is trained on, since a
position's experts act on later tokens only; the trainer's router chooses there itself. verl 0.9.1 writes expert 0 there
(experimental/agent_loop/agent_loop.py:138, 797), which is a route like any other.

Engines differ in layers: this package's return the sparse ones, vLLM all of them, with zeros for dense ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_tim.replay.cursor import LIVE
from verl_tim.replay.errors import ReplayError
from verl_tim.replay.routers import RouterMap

_TELLING_LAYERS = 24  # routers of one expert each that all take expert 0: by chance no run ever sees it


def converted(
    raw: Any, routers: RouterMap, *, prompt: int, response: int, sample: str, routed: int | None = None,
    or_more: bool = False,
) -> np.ndarray:  # fmt: skip
    """int16 [prompt + response, sparse layers, k]: checked routes, `LIVE` from position `routed` on.

    Args:
        raw: integers [positions, layers, k], layers all of the model's or its sparse ones, expert ids best first.
        prompt, response: lengths, tokens.
        sample: name of the sequence, for messages.
        routed: positions that must have a route; None: prompt + response - 1.
        or_more: further positions behind them are cut off instead of refused (a conversation that was cut short).

    Raises:
        ReplayError: names sample, layer and position.
    """
    routed = prompt + response - 1 if routed is None else routed
    raw_TLK = _array(raw, sample)
    _check_form(raw_TLK, routers, sample)
    # the widest type, since vLLM's may be unsigned, and an id out of range must not be cut to one in it
    raw_TLK = raw_TLK.astype(np.int64)
    _check_length(len(raw_TLK), routed, prompt, sample, or_more)
    routes_TLK = _sparse(raw_TLK[:routed], routers, sample)
    _check_layers(routes_TLK, routers, sample)
    _check_positions(routes_TLK, routers, sample)
    whole_TLK = np.full((prompt + response, len(routers.layers), routers.top_k), LIVE, np.int16)
    whole_TLK[:routed] = routes_TLK
    return whole_TLK


def _array(raw: Any, sample: str) -> np.ndarray:
    if raw is None:
        raise ReplayError(
            f"sample {sample}, all layers, all positions: the rollout returned no routes; set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=true (routing_replay=r3 does), with a model that "
            "has experts"
        )
    try:
        array = np.asarray(raw)
    except (TypeError, ValueError, RuntimeError) as error:
        # rows of unequal length, a tensor of a type that NumPy lacks
        raise ReplayError(
            f"sample {sample}, all layers, all positions: routes are no array of integers [positions, layers, k]: "
            f"{error}"
        ) from error
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer):
        raise ReplayError(
            f"sample {sample}, all layers, all positions: routes are {array.dtype} {list(array.shape)}, expected "
            "integers [positions, layers, k]"
        )
    return array


def _check_form(raw_TLK: np.ndarray, routers: RouterMap, sample: str) -> None:
    _, layers, k = raw_TLK.shape
    most = np.iinfo(raw_TLK.dtype).max
    if most < routers.num_experts - 1:
        raise ReplayError(
            f"sample {sample}, all layers, all positions: routes are {raw_TLK.dtype}, which has no room for expert "
            f"{routers.num_experts - 1}: ids above {most} were cut to others"
        )
    if k != routers.top_k:
        raise ReplayError(
            f"sample {sample}, all layers, all positions: routes have {k} experts, the model chooses {routers.top_k}"
        )
    sparse = len(routers.layers)
    if layers not in (sparse, routers.num_layers):
        stage = ": those of a pipeline stage are missing" if layers < sparse else ""
        raise ReplayError(
            f"sample {sample}: routes have {layers} layers, and the model has {sparse} sparse ones among "
            f"{routers.num_layers}{stage}; layer {routers.layers[min(layers, sparse - 1)]}, position 0 is the first "
            "that cannot be told"
        )


def _check_length(rows: int, routed: int, prompt: int, sample: str, or_more: bool) -> None:
    if rows == routed or (or_more and rows > routed):
        return
    if rows == routed + 1:
        why = "one too many: off by one, for the last token is never fed"
    elif rows == routed - 1:
        why = "one too few: off by one"
    elif rows in (routed - prompt, routed - prompt + 1):
        why = "the prompt's are missing, so all would be shifted by its length"
    else:
        why = "positions were dropped" if rows < routed else "they are of another sequence"
    raise ReplayError(
        f"sample {sample}, all layers, position {min(rows, routed)}: routes have {rows} positions, and prompt + "
        f"response - 1 is {routed}: {why}"
    )


def _sparse(raw_TLK: np.ndarray, routers: RouterMap, sample: str) -> np.ndarray:
    """The sparse layers; of a model with dense ones, those must be blank."""
    layers = list(routers.layers)
    if raw_TLK.shape[1] == len(layers):
        return raw_TLK
    for dense in sorted(set(range(routers.num_layers)) - set(layers)):
        taken_T = ((raw_TLK[:, dense] != 0) & (raw_TLK[:, dense] != LIVE)).any(-1)
        if taken_T.any():
            raise ReplayError(
                f"sample {sample}, layer {dense}, position {int(taken_T.argmax())}: routes of a dense layer: the "
                "layers are shifted"
            )
    return raw_TLK[:, layers]


def _check_layers(routes_TLK: np.ndarray, routers: RouterMap, sample: str) -> None:
    """No layer may be blank throughout: nothing was recorded, or a stage of the pipeline sent nothing."""
    if not len(routes_TLK):
        return
    for blank, what in ((LIVE, "-1"), (0, "0")):
        blank_L = (routes_TLK == blank).all((0, 2))
        if blank == 0 and routers.top_k == 1 and len(routes_TLK) == 1:
            continue  # one position, one expert: the first one is a route
        if blank_L.any():
            places = np.flatnonzero(blank_L)
            layers = [routers.layers[int(place)] for place in places]
            whole_run = len(places) > 1 and int(places[-1] - places[0]) + 1 == len(places)
            stage = whole_run and len(places) < len(routers.layers)
            if len(layers) == 1:
                where = f"layer {layers[0]}"
            else:
                where = f"layers {layers[0]} to {layers[-1]}" if whole_run else f"layers {', '.join(map(str, layers))}"
            raise ReplayError(
                f"sample {sample}, {where}, position 0 on: all "
                f"{what}{', as if a pipeline stage were missing' if stage else ''}: padding, not routes"
            )


def _check_positions(routes_TLK: np.ndarray, routers: RouterMap, sample: str) -> None:
    def refuse_where(bad: Any, what: str) -> None:
        bad_TL = np.asarray(bad)
        if bad_TL.any():
            position, place = (int(i) for i in np.argwhere(bad_TL)[0])
            ids = routes_TLK[position, place].tolist()
            raise ReplayError(
                f"sample {sample}, layer {routers.layers[place]}, position {position}: {what} (experts {ids})"
            )

    refuse_where(
        (routes_TLK == LIVE).any(-1), "a hole: nothing recorded here, as after preemption or a hit in the prefix cache"
    )
    if routers.top_k > 1:
        refuse_where((routes_TLK == 0).all(-1), "all experts are 0: padding, not a route")
    elif len(routers.layers) >= _TELLING_LAYERS:
        blank_T1 = (routes_TLK == 0).all((1, 2))[:, None]
        refuse_where(blank_T1, f"expert 0 in all {len(routers.layers)} layers: padding, not a route")
    outside_TL = ((routes_TLK < 0) | (routes_TLK >= routers.num_experts)).any(-1)
    refuse_where(outside_TL, f"expert id outside [0, {routers.num_experts})")
    ordered_TLK = np.sort(routes_TLK, -1)
    refuse_where((ordered_TLK[..., 1:] == ordered_TLK[..., :-1]).any(-1), "an expert occurs twice")
