"""The `tim` group: defaults, strictness, and who counts as a user of verl_tim."""

from __future__ import annotations

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from verl_tim.training.config import BACKEND_KEY, ConfigError, TimConfig, uses_verl_tim


def of(tim=None, **config):
    return TimConfig.of(OmegaConf.create({**config, **({} if tim is None else {"tim": tim})}))


def test_defaults():
    tim = of()
    assert (tim.run_dir, tim.trainer_numerics, tim.gate.exact, tim.gate.on_mismatch) == (None, "stock", True, "stop")
    assert (tim.samples.per_step, tim.dump.every, tim.dump_dir) == (4, 0, None)


def test_trainer_numerics_follows_the_workers_key():
    config = OmegaConf.create({})
    OmegaConf.update(config, BACKEND_KEY, "contract", force_add=True)
    assert TimConfig.of(config).trainer_numerics == "contract"


def test_groups_and_interpolations():
    tim = of({"run_dir": "/runs/a", "dump": {"every": 2, "dir": "${tim.run_dir}/x"}, "gate": {"on_mismatch": "warn"}})
    assert tim.dump_dir == "/runs/a/x"
    assert tim.gate.exact
    assert of({"run_dir": "/runs/a", "dump": {"every": 1}}).dump_dir == "/runs/a/dumps"


@pytest.mark.parametrize(
    ("tim", "named"),
    [
        ({"rundir": "x"}, r"unknown key tim\.rundir: known are .*run_dir"),
        ({"gate": {"exakt": True}}, r"unknown key tim\.gate\.exakt"),
        ({"gate": {"on_mismatch": "ignore"}}, r"tim\.gate\.on_mismatch='ignore'"),
        ({"gate": 3}, r"tim\.gate must be a group"),
        ({"trainer_numerics": "exact"}, r"tim\.trainer_numerics='exact'"),
        ({"samples": {"per_step": -1}}, r"tim\.samples\.per_step=-1"),
        ({"dump": {"every": "often"}}, r"tim\.dump\.every='often'"),
        ({"dump": {"every": 1}}, r"tim\.dump\.every is set without a folder"),
        ({"poll_interval": 0}, r"tim\.poll_interval=0"),
        ({"poll_interval": "often"}, r"tim\.poll_interval='often'"),
        ({"poll_interval": float("nan")}, r"tim\.poll_interval=nan"),
        ({"gate": {"exact": "perhaps"}}, r"tim\.gate\.exact='perhaps'"),
    ],
)
def test_bad_values_are_named(tim, named):
    with pytest.raises(ConfigError, match=named):
        of(tim)


@pytest.mark.parametrize(
    ("config", "uses"),
    [
        ({}, False),
        ({"actor_rollout_ref": {"rollout": {"name": "vllm"}}}, False),
        ({"actor_rollout_ref": {"rollout": {"name": "???"}}}, False),
        ({"actor_rollout_ref": {"rollout": {"name": "stock"}}}, True),
        ({"tim": {}}, True),
        ({"actor_rollout_ref": {"model": {"fused_kernel_options": {"impl_backend": "contract"}}}}, True),
        ({"actor_rollout_ref": {"model": {"fused_kernel_options": {"impl_backend": "torch"}}}}, False),
    ],
)
def test_who_uses_verl_tim(config, uses):
    assert uses_verl_tim(OmegaConf.create(config)) is uses
    assert uses_verl_tim(config) is uses or "???" in str(config)


def test_a_config_is_read_without_torch():
    """Commands that only read one start in a tenth of a second, where torch takes seconds."""
    code = "import sys, verl_tim.training.config; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
