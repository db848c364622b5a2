"""Samples are put together, each as it was, and every put returns when its own are there."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_tim.rollout.gathered_puts import GatheredPuts, gather, rows_as_they_are


class Queue:
    """What was put, in order; `fails` is raised instead."""

    def __init__(self, fails=None):
        self.puts, self.fails = [], fails

    async def async_kv_batch_put(self, *, keys, partition_id, fields, tags):
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        self.puts.append((list(keys), partition_id, fields, list(tags)))

    def kv_list(self):
        return "the queue's own"


def row(length, **more):
    return {
        "responses": torch.arange(length),
        "scores": torch.rand(length),
        "index": torch.tensor(length),
        "position_ids": torch.arange(3 * length).view(3, length),
        "extra_fields": {"min_global_steps": length},
        "raw_prompt": [{"role": "user", "content": str(length)}],
        **more,
    }


def gathered(queue, seconds=0.01):
    return GatheredPuts(queue, list_of_dict_to_tensordict, seconds=seconds)


async def put(puts, name, fields, partition="train"):
    await puts.async_kv_batch_put(keys=[name], partition_id=partition, fields=[fields], tags=[{"of": name}])


def rows_of(fields, count):
    def value(column, at):
        return column.unbind()[at] if isinstance(column, torch.Tensor) else column[at]

    return [{name: value(fields[name], at) for name in fields.keys()} for at in range(count)]  # noqa: SIM118


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


@pytest.mark.asyncio
async def test_samples_go_together_and_each_as_it_was():
    queue = Queue()
    puts = gathered(queue)
    rows = {f"p_{n}_0": row(4 + n % 3) for n in range(9)}
    await asyncio.gather(*(put(puts, name, fields) for name, fields in rows.items()))
    # of two dimensions only those of one shape can be stacked
    assert len(queue.puts) == 3
    found = {}
    for keys, partition, fields, tags in queue.puts:
        assert partition == "train"
        assert tags == [{"of": key} for key in keys]
        found.update(zip(keys, rows_of(fields, len(keys)), strict=True))
    assert set(found) == set(rows)
    for name, fields in rows.items():
        assert_same(found[name], fields)


@pytest.mark.asyncio
async def test_rows_of_another_kind_partition_or_dtype_go_apart():
    queue = Queue()
    puts = gathered(queue)
    await asyncio.gather(
        put(puts, "a", row(4)),
        put(puts, "b", row(4, routed_experts=torch.zeros(4, 2, 1, dtype=torch.int16))),
        put(puts, "c", row(4, scores=torch.rand(4, dtype=torch.float64))),
        put(puts, "d", row(4), partition="val"),
        put(puts, "e", row(4)),
    )
    assert sorted((tuple(keys), partition) for keys, partition, *_ in queue.puts) == [
        (("a", "e"), "train"), (("b",), "train"), (("c",), "train"), (("d",), "val"),
    ]  # fmt: skip


@pytest.mark.asyncio
async def test_a_tag_follows_its_samples_and_tags_go_together():
    queue = Queue()
    puts = gathered(queue)

    async def prompt(name):
        await puts.async_kv_put(key=name, partition_id="train", tag={"status": "running"})
        await put(puts, f"{name}_0_0", row(4))
        await puts.async_kv_put(key=name, partition_id="train", tag={"status": "finished"})

    await asyncio.gather(prompt("p"), prompt("q"))
    assert [(keys, fields is None, tags[0].get("status")) for keys, _, fields, tags in queue.puts] == [
        (["p", "q"], True, "running"), (["p_0_0", "q_0_0"], False, None), (["p", "q"], True, "finished"),
    ]  # fmt: skip


@pytest.mark.asyncio
async def test_one_key_is_not_put_twice_in_a_message():
    queue = Queue()
    puts = gathered(queue)
    await asyncio.gather(*(puts.async_kv_put(key="p", partition_id="train", tag={"n": n}) for n in range(2)))
    assert [tags for *_, tags in queue.puts] == [[{"n": 0}], [{"n": 1}]]


@pytest.mark.asyncio
async def test_an_error_reaches_everyone_it_concerns_and_the_next_put_is_a_new_one():
    queue = Queue(fails=RuntimeError("no room"))
    puts = gathered(queue)
    found = await asyncio.gather(*(put(puts, name, row(4)) for name in "ab"), return_exceptions=True)
    assert [str(error) for error in found] == ["no room"] * 2
    queue.fails = None
    await put(puts, "a", row(4))
    assert len(queue.puts) == 1


@pytest.mark.asyncio
async def test_a_caller_that_is_cancelled_takes_no_other_sample_with_it():
    queue = Queue()
    puts = gathered(queue)
    first, second = (asyncio.ensure_future(put(puts, name, row(4))) for name in "ab")
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert first.cancelled()
    ((keys, *_),) = queue.puts
    assert "b" in keys


def test_verls_module_gets_them_once_and_the_rest_of_the_queue():
    queue = Queue()
    module = SimpleNamespace(tq=queue, list_of_dict_to_tensordict=list_of_dict_to_tensordict)
    gather(module, poll_interval=0.3)
    gather(module, poll_interval=0.3)
    assert isinstance(module.tq, GatheredPuts)
    assert module.tq._queue is queue
    assert module.tq._seconds == pytest.approx(0.1), "of the time between two looks a third"
    assert module.tq.kv_list() == "the queue's own"
    assert module.list_of_dict_to_tensordict is rows_as_they_are


def test_verls_worker_puts_as_this_expects():
    """The names and arguments by which verl's worker puts; another verl may do it otherwise."""
    import ast
    import inspect

    from verl.trainer.ppo.v1 import agent_loop_tq

    calls = {}
    for node in ast.walk(ast.parse(inspect.getsource(agent_loop_tq))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr.startswith("async_kv")
        ):
            assert not node.args
            calls.setdefault(node.func.attr, set()).add(tuple(sorted(word.arg for word in node.keywords)))
    assert calls == {
        "async_kv_put": {("key", "partition_id", "tag")},
        "async_kv_batch_put": {("fields", "keys", "partition_id", "tags")},
    }


def test_a_shipped_worker_runs_the_functions_whose_module_is_patched():
    """Ray ships the worker's class; what it inherits by value has a copy of its module's names."""
    import inspect

    import ray.cloudpickle as pickle
    from verl.trainer.ppo.v1 import agent_loop_tq

    import verl_tim.rollout.agent_loop_v1 as ours

    shipped = pickle.loads(pickle.dumps(ours.ray.remote(ours.SeededWorkerV1).__ray_metadata__.modified_class))
    for name in ("_run_prompt", "_agent_loop_postprocess"):
        first = inspect.unwrap(getattr(shipped, name))
        assert first.__globals__ is not agent_loop_tq.__dict__
        assert first.__module__.startswith("verl_tim."), f"{name} is not ours, and calls a copy of verl's"
