"""A reward worker in the agent loop's own process: verl's own, made once, that cannot write into the loop's data."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.protocol import DataProto

from verl_tim.rollout.own_reward import OwnRewardWorker


class Worker:
    made = 0

    def __init__(self):
        type(self).made += 1
        self.loop = asyncio.get_running_loop()

    async def compute_score(self, data):
        assert self.loop is asyncio.get_running_loop()
        info = data.non_tensor_batch["extra_info"][0]
        # as verl's reward manager does (experimental/reward_loop/reward_manager/naive.py)
        info.update(num_turns=2)
        info["inner"].append(3)
        if info["fails"]:
            raise ZeroDivisionError("a rule of the user's")
        return {"reward_score": float(data.batch["responses"].sum()), "reward_extra_info": {}}


def data(fails=False):
    info = {"fails": fails, "inner": [1]}
    batch = TensorDict({"responses": torch.tensor([[1, 2]])}, batch_size=1)
    return info, DataProto(batch=batch, non_tensor_batch={"extra_info": np.array([info], dtype=object)})


@pytest.mark.asyncio
async def test_scores_come_from_one_worker_and_what_it_is_given_stays():
    Worker.made = 0
    handle = OwnRewardWorker(Worker)
    assert Worker.made == 0
    info, given = data()
    results = await asyncio.gather(*(handle.compute_score.remote(given) for _ in range(3)))
    assert [result["reward_score"] for result in results] == [3.0] * 3
    assert Worker.made == 1
    assert info == {"fails": False, "inner": [1]}


@pytest.mark.asyncio
async def test_an_error_of_a_rule_goes_to_its_response():
    handle = OwnRewardWorker(Worker)
    with pytest.raises(ZeroDivisionError, match="a rule of the user's"):
        await handle.compute_score.remote(data(fails=True)[1])
    assert (await handle.compute_score.remote(data()[1]))["reward_score"] == 3.0
