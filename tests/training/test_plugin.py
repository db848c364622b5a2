"""The door into verl: light, idempotent, and loud when something does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

import verl_tim.plugin as plugin

STEPS = {
    "check_verl_version",
    "register_cpu_platform",
    "patch_process_group_backend",
    "register_rollouts",
    "register_tool_parser",
    "patch_v1_trainers",
    "patch_aliased_cpu_copies",
    "patch_legacy_trainer",
    "patch_native_correction",
    "patch_prompt_uids",
    "patch_master_port",
    "patch_reward_kl",
    "patch_start_checks",
    "patch_tracking",
    "patch_vllm_cpu_draws",
    "patch_vllm_cpu_name",
    "patch_vllm_cpu_weights",
    "patch_vllm_death",
    "patch_vllm_recorded",
    "patch_vllm_sockets",
}


def in_a_fresh_process(code: str) -> dict:
    """Run code that prints one JSON object, as another process of a run would see things."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_verl_finds_the_plugin_by_its_entry_point():
    found = {point.name: point.value for point in entry_points(group="verl.plugins")}
    assert found["verl_tim"] == "verl_tim.plugin"


def test_importing_verl_registers_everything_and_stays_light():
    seen = in_a_fresh_process(
        "import json, sys, time\n"
        "import verl\n"
        "module = sys.modules['verl_tim.plugin']\n"
        "names = ('verl.workers.rollout', 'verl.trainer.ppo', 'verl_tim.engine', 'verl_tim.models')\n"
        "heavy = [name for name in names if name in sys.modules]\n"
        "for name in [m for m in sys.modules if m.startswith('verl_tim')]: del sys.modules[name]\n"
        "began = time.process_time()\n"
        "import verl_tim.plugin\n"
        "print(json.dumps({'done': module.registered(), 'failed': list(module._failed), 'heavy': heavy,\n"
        "                  'seconds': time.process_time() - began}))"
    )
    assert set(seen["done"]) == STEPS
    assert seen["failed"] == []
    assert seen["heavy"] == []
    assert seen["seconds"] < 0.3


slow = pytest.mark.slow
IN_ANY_ORDER = [
    pytest.param(("verl_tim.training.trainer_v1", "verl_tim.training.engine", "verl_tim.training.external"), id="ours"),
    pytest.param(
        ("verl.trainer.ppo.v1", "verl_tim.training.external", "verl.workers.engine_workers"), id="verl", marks=slow
    ),
    pytest.param(
        ("verl_tim.training.external", "verl_tim.training.engine", "verl.trainer.main_ppo_v0"),
        id="external",
        marks=slow,
    ),
    pytest.param(("verl_tim.training.trainer_legacy", "verl_tim.training.external"), id="legacy", marks=slow),
]


@pytest.mark.parametrize("order", IN_ANY_ORDER)
def test_the_order_of_imports_does_not_matter(order):
    seen = in_a_fresh_process(
        f"import importlib, json\nfor name in {order!r}: importlib.import_module(name)\n"
        "import verl_tim.plugin as plugin, verl.workers.engine.fsdp.transformer_impl\n"
        "import verl.trainer.main_ppo_v0 as legacy\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "plugin.ensure_registered()\n"
        "table = EngineRegistry._engines['language_model']['fsdp2']\n"
        "print(json.dumps([get_trainer_cls('sync').__name__, legacy.RayPPOTrainer.__name__, table['cpu'].__name__,\n"
        "                  table[('cuda', 'nvidia')].__name__, table['cuda'].__name__]))"
    )
    ours = "ContractFSDPEngineWithLMHead"
    assert seen == ["TimTrainerSync", "TimRayPPOTrainer", ours, ours, "FSDPEngineWithLMHead"]


def test_importing_verl_tim_alone_changes_nothing():
    seen = in_a_fresh_process(
        "import json, sys, verl_tim\n"
        "print(json.dumps({'verl': 'verl' in sys.modules, 'plugin': 'verl_tim.plugin' in sys.modules}))"
    )
    assert seen == {"verl": False, "plugin": False}


def test_registering_twice_changes_nothing():
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.utils import config as verl_config

    before = (TRAINER_REGISTRY["sync"], verl_config.validate_config, plugin.registered())
    plugin.register()
    assert (TRAINER_REGISTRY["sync"], verl_config.validate_config, plugin.registered()) == before


def test_verls_own_names_are_still_verls():
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    assert issubclass(get_trainer_cls("sync"), PPOTrainerSync)
    assert {"vllm", "sglang", "trtllm", "vexact", "stock"} <= set(RolloutReplicaRegistry._registry)


def test_the_legacy_runner_gets_our_trainer():
    import verl.trainer.main_ppo_v0 as legacy
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    assert legacy.RayPPOTrainer is not RayPPOTrainer
    assert issubclass(legacy.RayPPOTrainer, RayPPOTrainer)


def test_a_failed_step_is_loud_where_it_is_needed(monkeypatch, caplog):
    def register_nonsense() -> None:
        raise AttributeError("module 'verl' has no attribute 'nonsense'")

    monkeypatch.setattr(plugin, "_failed", {})
    plugin._run_once(register_nonsense)
    assert "register_nonsense failed" in caplog.text
    with pytest.raises(plugin.RegistrationError, match=r"register_nonsense failed .*no attribute 'nonsense'") as error:
        plugin.ensure_registered()
    assert isinstance(error.value.__cause__, AttributeError)


def test_another_verl_is_refused(monkeypatch):
    import verl

    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(plugin.RegistrationError, match=r"needs verl==0\.9\.1, this environment has 0\.10\.0"):
        plugin.check_verl_version()


def _use_trainer():
    from omegaconf import OmegaConf

    from verl_tim.training.trainer_v1 import TimTrainerSync

    TimTrainerSync(OmegaConf.create({"tim": {}}))


def _use_replica():
    from verl_tim.rollout.replica import VexactReplica

    VexactReplica(0, {}, None)


def _use_adapter():
    from verl_tim.rollout.adapter import ServerAdapter

    ServerAdapter({}, {}, None)


@pytest.mark.parametrize("use", [_use_trainer, _use_replica, _use_adapter, plugin.register_training])
def test_every_part_of_verl_tim_asks_first(monkeypatch, use):
    monkeypatch.setattr(plugin, "_failed", {"register_rollouts": ImportError("no module named nothing")})
    with pytest.raises(plugin.RegistrationError, match="no module named nothing"):
        use()


def test_the_cpu_is_a_platform_where_there_is_no_accelerator():
    from verl.plugin.platform import get_platform
    from verl.utils.device import get_device_id, get_device_name, get_nccl_backend, get_torch_device

    from verl_tim.training.accelerator import host_has_accelerator
    from verl_tim.training.platform import CpuPlatform

    if host_has_accelerator():
        pytest.skip("this machine has an accelerator")
    assert isinstance(get_platform(), CpuPlatform)
    assert get_device_name() == "cpu"
    assert torch.ones(1).to(get_device_id()).device.type == "cpu"
    assert get_nccl_backend() == "gloo"
    device = get_torch_device()
    for name in (
        "empty_cache",
        "synchronize",
        "max_memory_allocated",
        "mem_get_info",
        "get_rng_state",
        "get_device_name",
    ):
        assert callable(getattr(device, name)), name


def test_the_cpu_stands_back_on_a_host_with_an_accelerator(monkeypatch):
    from verl_tim.training import accelerator, platform

    monkeypatch.setattr(accelerator.os.path, "exists", lambda path: path == "/dev/nvidiactl")
    assert not platform.CpuPlatform().is_platform_available(use_smi_check=True)
