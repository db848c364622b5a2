"""Trainer and rollout refuse to pair where something that decides bits differs."""

from __future__ import annotations

import asyncio
import copy

import pytest

from verl_tim.training.config import ConfigError
from verl_tim.training.pairing import IdentifiedWeights, card_of, card_with, check_pairing, check_update

ID = "chunk64/cuda-2-sm90/bfloat16/1"
FACTS = {"contract_id": ID, "versions": {"torch": "2.11.0", "triton": "3.6.0", "verl-tim": "0.1.0", "cuda": "13.0"}}


def sides(**changes):
    server = copy.deepcopy(FACTS)
    server["versions"] |= changes.pop("versions", {})
    return {"actor 0": copy.deepcopy(FACTS), "actor 1": copy.deepcopy(FACTS)}, {"server 0": server | changes}


def test_equal_sides_pair():
    check_pairing(*sides())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contract_id": "fa3/cuda-2-sm90/bfloat16/1"}, ["server 0", "fa3", "fused_kernel_options.attention"]),
        ({"contract_id": "chunk64/cpu-e/bfloat16/1"}, ["cpu-e", "device type"]),
        ({"contract_id": None}, ["contract None"]),
        ({"versions": {"triton": "3.5.1"}}, ["server 0 has triton 3.5.1", "actor 0 has 3.6.0", "install"]),
        ({"versions": {"torch": "2.12.0"}}, ["torch 2.12.0"]),
    ],
)
def test_what_differs_is_named(changes, words):
    with pytest.raises(ConfigError) as error:
        check_pairing(*sides(**changes))
    for word in words:
        assert word in str(error.value)


def test_two_workers_of_one_side_must_agree_too():
    trainer, rollout = sides()
    trainer["actor 1"]["versions"]["torch"] = "2.10.0"
    with pytest.raises(ConfigError, match=r"actor 1 has torch 2\.10\.0"):
        check_pairing(trainer, rollout)


def test_vllm_counts_only_where_its_attention_is_in_use():
    trainer, rollout = sides(versions={"vllm": "0.25.0"})
    check_pairing(trainer, rollout)
    for facts in (*trainer.values(), *rollout.values()):
        facts["contract_id"] = "fa3/cuda-2-sm90/bfloat16/1"
    with pytest.raises(ConfigError, match=r"vllm 0\.25\.0"):
        check_pairing(trainer, rollout)


def test_an_update_is_refused_with_both_sides_named():
    trainer, server = ({**copy.deepcopy(FACTS), "process": name} for name in ("actor 3", "rollout server 0"))
    check_update(trainer, server)
    server["versions"]["triton"] = "3.7.0"
    with pytest.raises(ConfigError, match=r"rollout server 0 has triton 3\.7\.0, actor 3 has 3\.6\.0.*resume_mode"):
        check_update(trainer, server)
    server["contract_id"] = "chunk64/cuda-2-sm90/bfloat16/2"
    with pytest.raises(ConfigError, match=r"rollout server 0 keeps the contract .*/2, actor 3 keeps .*/1"):
        check_update(trainer, server)


def test_a_card_has_what_is_compared():
    card = card_of("actor 0", ID, "cpu")
    assert (card["process"], card["contract_id"]) == ("actor 0", ID)
    assert {"torch", "verl-tim"} <= set(card["versions"])
    assert "cuda" not in card["versions"]
    assert "cuda" in card_of("actor 0", ID, "cuda")["versions"]


def test_a_stream_of_weights_brings_its_card():
    weights = IdentifiedWeights((item for item in (("a", 1), ("b", 2))), {"process": "actor 0"})
    assert asyncio.run(card_with(weights)) == {"process": "actor 0"}
    assert next(weights) == ("a", 1)
    assert list(weights) == [("b", 2)]
    assert asyncio.run(card_with(iter(()))) is None
