"""What the YAML says is what the worker computes: loss, gradient and metrics of verl's engine against the whole batch.

The worker's answer comes from `forward_backward_batch` of verl's FSDP2 engine, micro-batch by micro-batch and rank by
rank; the other from one forward of all rows and `verl_tim.correction.policy_loss`.
"""

from __future__ import annotations

import pytest

from tests.training import correction_ranks
from tests.training.correction_bench import Bench
from tests.training.correction_cases import (
    AGGREGATIONS,
    MODES,
    SETTINGS,
    corrections,
    differences,
    every,
    micro_batches_of,
    some,
)
from tests.training.tiny import model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One layer is enough to carry a gradient, and there are many of them."""
    return str(model_folder(tmp_path_factory.mktemp("one_layer"), layers=1))


@pytest.fixture(scope="module")
def bench(folder, process_group):
    return Bench(folder)


@pytest.fixture(scope="module")
def dense_bench(folder, process_group):
    return Bench(folder, layout="dense")


def failures(found: dict[str, list[str]]) -> str:
    return "\n".join(f"{name}: {difference}" for name, all_of in found.items() for difference in all_of)


def test_the_cases_cover_every_setting_and_mode():
    names = [name for name, _ in corrections()]
    assert len(names) == len(set(names))
    # without their mode and loss these presets are others again: none, none, bypass_reinforce
    settings = set(SETTINGS) - {"recompute", "bypass_ppo", "token_tis"}
    for setting in settings:
        assert any(name.startswith(f"{setting}, ") for name in names), setting
    # all but what the config itself refuses: ratio and kept baselines outside recomputation
    assert len(names) == 6 * len(SETTINGS) - 5 - 4 - 3 * 6
    assert len(every()) == 4 * len(names)
    chosen = [name for name, _, _ in some()]
    for part in (*settings, *MODES, "ppo_clip", "reinforce", *AGGREGATIONS):
        assert any(f"{part}, " in name for name in chosen), part


def test_every_setting_reaches_the_gradient(bench):
    found = {name: differences(bench, case, (micro_batch,)) for name, case, micro_batch in some()}
    assert not failures(found), failures(found)


def test_and_in_the_legacy_layout(dense_bench):
    found = {name: differences(dense_bench, case, (micro_batch,)) for name, case, micro_batch in some()[::4]}
    assert not failures(found), failures(found)


def test_and_on_two_ranks(folder):
    found = correction_ranks.run(folder, "some")
    assert len(found) == len(some()[::2])
    assert not failures(found), failures(found)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_whole_product_on_one_rank(bench):
    found = {name: differences(bench, case, micro_batches_of(1)) for name, case in every()}
    assert not failures(found), failures(found)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_whole_product_on_two_ranks(folder):
    found = correction_ranks.run(folder, "every")
    assert len(found) == len(every())
    assert not failures(found), failures(found)
