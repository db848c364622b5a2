"""Routes of a rollout are taken as they are, or refused by sample, layer and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.replay import tiny
from verl_tim.replay import ReplayError, RouterMap, converted

PROMPT, RESPONSE = 5, 7
POSITIONS = PROMPT + RESPONSE - 1
# layer 0 is dense, as are 3 and 5
SPARSE = RouterMap(layers=(1, 2, 4), num_layers=6, num_experts=8, top_k=2)
ALL = RouterMap(layers=(0, 1, 2, 3), num_layers=4, num_experts=8, top_k=2)


def convert(raw, routers=SPARSE, **more):
    return converted(raw, routers, **{"prompt": PROMPT, "response": RESPONSE, "sample": "u7_0_0", **more})


def good(layers=3, positions=POSITIONS):
    return tiny.routes(positions, layers)


@pytest.mark.parametrize("kind", [np.int16, np.uint8, np.int64])
def test_good_routes_come_through_in_order(kind):
    found = convert(good().astype(kind))
    assert (found.shape, found.dtype) == ((PROMPT + RESPONSE, 3, 2), np.int16)
    assert (found[:-1] == good()).all()
    assert (found[-1] == -1).all(), "the last token is never fed: no route, and above all not expert 0"
    assert (convert(torch.from_numpy(good()))[:-1] == good()).all()


@pytest.mark.parametrize("blank", [0, -1])
def test_dense_layers_are_left_out_by_the_map(blank):
    raw = np.full((POSITIONS, 6, 2), blank, np.int16)
    raw[:, [1, 2, 4]] = good()
    assert (convert(raw)[:-1] == good()).all()


def test_a_conversation_cut_short_keeps_what_was_drawn():
    # ten tokens of response of which the last four are a tool's, which nobody predicts
    found = convert(good(positions=POSITIONS - 4), routed=POSITIONS - 4)
    assert (found[: POSITIONS - 4] >= 0).all()
    assert (found[POSITIONS - 4 :] == -1).all()
    assert (convert(good(positions=POSITIONS + 1), or_more=True)[:-1] == good(positions=POSITIONS + 1)[:-1]).all()


def edited(at, value, layers=3, kind=np.int16):
    raw = good(layers).astype(kind)
    raw[at] = value
    return raw


REFUSED = {
    "no routes": (None, SPARSE, "returned no routes"),
    "wrong shape": (good()[:, :, 0], SPARSE, r"routes are int16 \[11, 3\], expected integers \[positions, layers, k\]"),
    "floats": (good().astype(np.float32), SPARSE, "expected integers"),
    "bfloat16": (torch.from_numpy(good()).bfloat16(), SPARSE, "routes are no array of integers"),
    "rows of unequal length": ([[[1, 2]] * 3, [[1, 2]] * 2], SPARSE, "routes are no array of integers"),
    "an id that int32 would cut": (
        edited((3, 1), [2**32 + 1, 2**32 + 2], kind=np.int64), SPARSE, "layer 2, position 3: expert id outside",
    ),
    "a type that cuts ids": (
        good().astype(np.int8), RouterMap((1, 2, 4), 6, 160, 2), "all positions: routes are int8, which has no room",
    ),
    "wrong k": (good()[..., :1], SPARSE, "routes have 1 experts, the model chooses 2"),
    "a stage is not there": (good(2), ALL, "those of a pipeline stage are missing; layer 2, position 0"),
    "too many layers": (good(5), ALL, "routes have 5 layers, and the model has 4 sparse ones among 4"),
    "a stage sent nothing": (
        edited(np.s_[:, 2:], 0, 4), ALL, "layers 2 to 3, position 0 on: all 0, as if a pipeline stage were missing",
    ),
    "a stage sent -1": (
        edited(np.s_[:, :2], -1, 4), ALL, "layers 0 to 1, position 0 on: all -1, as if a pipeline stage were missing",
    ),
    "layers apart all zero": (edited(np.s_[:, [0, 3]], 0, 4), ALL, "layers 0, 3, position 0 on: all 0: padding"),
    "a layer all zero": (edited(np.s_[:, 1], 0), SPARSE, "layer 2, position 0 on: all 0: padding"),
    "a layer all -1": (edited(np.s_[:, 2], -1), SPARSE, "layer 4, position 0 on: all -1: padding"),
    "everything zero": (edited(np.s_[:], 0), SPARSE, "layers 1 to 4, position 0 on: all 0: padding"),
    "duplicate": (edited((3, 1), [5, 5]), SPARSE, r"layer 2, position 3: an expert occurs twice \(experts \[5, 5\]\)"),
    "out of range": (edited((3, 1), [5, 8]), SPARSE, r"layer 2, position 3: expert id outside \[0, 8\)"),
    "below": (edited((3, 1), [5, -2]), SPARSE, "layer 2, position 3: expert id outside"),
    "off by one, long": (good(positions=POSITIONS + 1), SPARSE, "routes have 12 .* one too many: off by one"),
    "off by one, short": (good(positions=POSITIONS - 1), SPARSE, "routes have 10 .* one too few: off by one"),
    "shifted by the prompt": (good(positions=RESPONSE - 1), SPARSE, "the prompt's are missing, so all would"),
    "the response only": (good(positions=RESPONSE), SPARSE, "the prompt's are missing, so all would"),
    "dropped": (good(positions=3), SPARSE, "routes have 3 positions, and prompt .* is 11: positions were dropped"),
    "of another": (good(positions=20), SPARSE, "routes have 20 positions, .* of another sequence"),
    "hole after preemption": (edited(np.s_[4:6], -1), SPARSE, "layer 1, position 4: a hole: nothing recorded here"),
    "hole in one layer": (edited((6, 2), -1), SPARSE, "layer 4, position 6: a hole"),
    "hole read as expert 0": (edited((0, 0), 0), SPARSE, "layer 1, position 0: all experts are 0: padding"),
    "dense layer routed": (tiny.routes(POSITIONS, 6), SPARSE, "layer 0, position 0: routes of a dense"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_replayed_is_refused(fault):
    raw, routers, message = REFUSED[fault]
    with pytest.raises(ReplayError, match=message) as refused:
        convert(raw, routers)
    for word in ("sample u7_0_0", "layer", "position"):
        assert word in str(refused.value)


def test_one_expert_per_token():
    """With k = 1 expert 0 is a route; a layer of nothing else is padding all the same."""
    one = RouterMap(layers=(0,), num_layers=1, num_experts=4, top_k=1)
    raw = np.zeros((POSITIONS, 1, 1), np.int16)
    with pytest.raises(ReplayError, match="layer 0, position 0 on: all 0"):
        convert(raw, one)
    raw[3] = 2
    assert (convert(raw, one)[:-1] == raw).all()
    assert converted(raw[:1], one, prompt=1, response=1, sample="s").tolist() == [[[0]], [[-1]]]


def test_one_expert_per_token_of_many_layers():
    """That expert 0 is chosen in all of them at once is no route: a hole that was read as 0."""
    deep = RouterMap(layers=tuple(range(24)), num_layers=24, num_experts=16, top_k=1)
    raw = tiny.routes(POSITIONS, 24, experts=16, top_k=1)
    raw[5, 1:] = 0
    raw[5, 0] = 3
    assert (convert(raw, deep)[:-1] == raw).all()
    raw[5] = 0
    with pytest.raises(ReplayError, match="sample u7_0_0, layer 0, position 5: expert 0 in all 24 layers: padding"):
        convert(raw, deep)
