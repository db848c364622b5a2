"""The baseline gate: factors, messages, set-ups, and a trainer that stops only after a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.training.test_observer import batch, observer, records
from verl_tim.diagnosis.baseline import Baseline, Level, Setup
from verl_tim.diagnosis.manifest import Manifest
from verl_tim.training.baseline_gate import (
    FACTOR_METRIC,
    BaselineExceeded,
    BaselineGate,
    StopAfterCheckpoint,
    check_setup,
)
from verl_tim.training.config import ConfigError, GateConfig, TimConfig

SIDE = {"backend": "fsdp2", "backend_version": "1", "compute_dtype": "bfloat16", "device": "GPU"}


def manifest(**trainer):
    return Manifest.from_processes(
        run={"name": "r", "rollout": "stock", "correction": "none"},
        trainer={"actor 0": {**SIDE, "model": {"architecture": "A", "parameters": 5}, **trainer}},
        rollout={"server 0": {**SIDE, "backend": "vllm", "backend_version": "0.24.0"}},
        old_log_probs="recompute",
    )


def gate_config_of(levels, steps, folder):
    """The gate of a baseline with these levels."""
    path = Baseline(Setup.of(manifest()), levels, steps, ["r"]).write(folder / "baseline.json")
    return GateConfig(baseline=str(path))


@pytest.fixture
def gate_config(tmp_path):
    levels = {
        "tim/delta_abs_mean": Level(0.01, 0.02, 0.01),
        "tim/delta_abs_max": Level(0.5, 1.0, 1.0),
        "tim/top1_flip_rate": Level(0.0, 0.0, 0.0),
    }
    return gate_config_of(levels, 4, tmp_path)


def test_factors_warn_and_stop(gate_config, caplog):
    gate = BaselineGate.of(gate_config)
    assert gate.check(1, {"tim/delta_abs_mean": 0.015, "tim/delta_abs_max": 1.9}) == {FACTOR_METRIC: 1.9}
    assert (caplog.text, gate.stop_reason) == ("", None)
    assert gate.check(2, {"tim/delta_abs_mean": 0.03, "tim/delta_abs_max": 0.1})[FACTOR_METRIC] == pytest.approx(3)
    assert "step 2: tim/delta_abs_mean is 0.0300, 3 times the baseline's 0.0100" in caplog.text.replace("3.00", "3")
    gate.raise_if_stopped(None)
    gate.check(3, {"tim/delta_abs_mean": 0.2, "tim/delta_abs_max": 30.0})
    gate.check(4, {"tim/delta_abs_mean": 9.0})  # the first stop counts
    with pytest.raises(BaselineExceeded, match=r"step 3: tim/delta_abs_max is 30, 30 times .* checkpoint: /c"):
        gate.raise_if_stopped("/c")


def test_what_is_not_logged_or_has_no_level_is_not_watched(gate_config):
    gate = BaselineGate.of(gate_config)
    assert gate.check(1, {"tim/top1_flip_rate": 0.5, "actor/grad_norm": 3.0}) == {}
    assert gate.stop_reason is None


@pytest.fixture
def flips_gate(tmp_path):
    levels = {
        "tim/delta_abs_mean": Level(0.01, 0.02, 0.01),
        "tim/top1_flip_rate": Level(0.0035, 0.021, 0.0035),
        "tim/router_flip_rate": Level(0.01, 0.012, 0.01),
    }
    return BaselineGate.of(gate_config_of(levels, 6, tmp_path))


def test_a_flip_or_two_of_a_small_sample_stop_no_run(flips_gate, caplog):
    """Of 48 sampled tokens two flips are 12 times a level of 0.0035, and chance brings them every hundred steps."""
    for flips in (1, 2, 3):
        step = {"tim/delta_abs_mean": 0.01, "tim/top1_flip_rate": flips / 48, "tim/top1_tokens": 48.0}
        assert flips_gate.check(flips, step) == {FACTOR_METRIC: 1.0}
    assert (caplog.text, flips_gate.stop_reason) == ("", None)


def test_flips_beyond_chance_do(flips_gate):
    flips_gate.check(1, {"tim/top1_flip_rate": 24 / 48, "tim/top1_tokens": 48.0})
    # 24 flips, less 3 standard deviations of such a count: 9.3 of 48
    assert flips_gate.stop_reason.startswith("step 1: tim/top1_flip_rate is 0.500 (of 48: at least 0.194), 55.")


def test_a_large_sample_leaves_a_rate_as_it_is(flips_gate):
    factor = flips_gate.check(1, {"tim/router_flip_rate": 0.03, "tim/router_compared": 4e6})[FACTOR_METRIC]
    assert factor == pytest.approx(3.0, rel=0.01)


def test_no_baseline_is_no_gate():
    assert BaselineGate.of(GateConfig()) is None
    check_setup(GateConfig(), manifest())


def test_another_set_up_is_refused(gate_config):
    check_setup(gate_config, manifest())
    with pytest.raises(ConfigError, match=r"tim.gate.baseline=.*parameters is 6, there 5"):
        check_setup(gate_config, manifest(model={"architecture": "A", "parameters": 6}))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tim\.gate\.baseline: there is no file .*verl-tim baseline RUN"):
        BaselineGate.of(GateConfig(baseline=str(tmp_path / "none.json")))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"warn": 1}, r"tim\.gate\.warn=1: give a factor above 1"),
        ({"stop": float("inf")}, r"tim\.gate\.stop=inf"),
        ({"warn": "twice"}, r"tim\.gate\.warn='twice'"),
        ({"warn": 5, "stop": 3}, r"tim\.gate\.stop=3 is below tim\.gate\.warn=5"),
        ({"baseline": 3}, r"tim\.gate\.baseline=3"),
    ],
)
def test_bad_settings_are_named(values, named):
    with pytest.raises(ConfigError, match=named):
        TimConfig.of({"tim": {"gate": values}})


@pytest.mark.parametrize("bypass", [False, True])
def test_the_observer_asks_it_every_step(gate_config, bypass):
    made = observer(TimConfig(gate=gate_config), gated=False, bypass=bypass)
    step_batch = batch()
    step_batch.rollout_log_probs_BT += 0.25
    seen = records(step_batch)
    if bypass:
        step_batch.old_log_probs_BT = None
    metrics = made.after_update(7, step_batch, seen)
    assert metrics[FACTOR_METRIC] == pytest.approx(25, rel=1e-5)
    assert made.baseline.stop_step == 7
    assert "step 7: tim/delta_abs_mean" in made.baseline.stop_reason


class Verl:
    """verl's part of a trainer: the loop of one step after the other, and where it saves."""

    def __init__(self, save_freq):
        self.global_steps, self.save_freq, self.saved, self.logged = 0, save_freq, [], []
        self.config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir="/c"))

    def _save_checkpoint(self):
        self.saved.append(self.global_steps)


class Trainer(StopAfterCheckpoint, Verl):
    def fit(self, steps, factor_at):
        for self.global_steps in range(1, steps + 1):
            self._raise_if_stopped()
            self.observer.baseline.check(self.global_steps, {"tim/delta_abs_mean": factor_at(self.global_steps) * 0.01})
            if self.save_freq and self.global_steps % self.save_freq == 0:
                self._save_checkpoint()
            self._save_if_stopped()
            self.logged.append(self.global_steps)
        self._raise_if_stopped(at_end=True)


@pytest.mark.parametrize("save_freq", [0, 1, 3])
@pytest.mark.parametrize("at", [2, 3])
def test_a_run_stops_after_its_step_is_saved_and_logged(gate_config, save_freq, at):
    trainer = Trainer(save_freq)
    trainer.observer = SimpleNamespace(baseline=BaselineGate.of(gate_config))
    with pytest.raises(BaselineExceeded, match=rf"step {at}: .*checkpoint: /c/global_step_{at}"):
        trainer.fit(3, lambda step: 11 if step == at else 1)
    assert trainer.saved.count(at) == 1
    assert trainer.logged[-1] == at


def test_a_quiet_run_ends_as_it_would(gate_config):
    trainer = Trainer(0)
    trainer.observer = SimpleNamespace(baseline=BaselineGate.of(gate_config))
    trainer.fit(3, lambda step: 2)
    trainer.observer = None
    trainer._save_if_stopped()
    assert (trainer.saved, trainer.logged) == ([], [1, 2, 3])
