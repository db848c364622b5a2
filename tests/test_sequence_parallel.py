"""One rule of which of verl's two keys of sequence parallelism counts, and it is verl's."""

import ast
from pathlib import Path

import pytest
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

import verl_tim
from verl_tim.sequence_parallel import SEQUENCE_PARALLEL_KEYS, sequence_parallel, sequence_parallel_key

DEPRECATED, CURRENT = SEQUENCE_PARALLEL_KEYS


@pytest.mark.parametrize("deprecated", [0, 1, 2, 4])
@pytest.mark.parametrize("current", [1, 2, 8])
def test_the_rule_is_verls(deprecated, current):
    actor = FSDPActorConfig(
        rollout_n=1,
        use_dynamic_bsz=True,
        ulysses_sequence_parallel_size=deprecated,
        fsdp_config=FSDPEngineConfig(ulysses_sequence_parallel_size=current),
    )
    values = {DEPRECATED: deprecated, CURRENT: current}
    key, size = sequence_parallel(values.get)
    assert size == actor.fsdp_config.ulysses_sequence_parallel_size
    assert values[key] == size


def test_a_key_that_was_not_given_is_one():
    assert sequence_parallel({}.get) == (CURRENT, 1)
    assert sequence_parallel({CURRENT: 2}.get) == (CURRENT, 2)


def test_what_is_no_number_is_the_key_to_look_at():
    assert sequence_parallel_key({DEPRECATED: "two", CURRENT: 2}.get) == DEPRECATED


def test_nobody_else_keeps_a_rule():
    """The keys are named in that file alone; the contract's limits name those of every side, and choose none."""
    naming = {
        file.name
        for file in Path(verl_tim.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and str(node.value).endswith("ulysses_sequence_parallel_size")
    }
    assert naming == {"sequence_parallel.py", "contract_limits.py"}
