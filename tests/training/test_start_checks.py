"""Start-up checks on verl's own composed config, one deviation at a time."""

from __future__ import annotations

import copy
import subprocess
import sys
import time

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from tests.training.tiny import parquet
from verl_tim.training.accelerator import host_has_accelerator
from verl_tim.training.config import ConfigError, joins_a_cluster
from verl_tim.training.start_checks import Cluster, check, findings, required_cpus, resource_findings

pytestmark = pytest.mark.skipif(host_has_accelerator(), reason="the overrides below are for a CPU")


@pytest.fixture(scope="module")
def base(folders, tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    parquet(data / "train.parquet", 8)
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/train.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=48",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={folders('qwen3')}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.external_lib=verl_tim.training.external",
        "actor_rollout_ref.model.use_fused_kernels=true",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=contract",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.name=vexact",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=1",
    ]


@pytest.fixture(scope="module")
def config_of(base):
    """The config with overrides; composed once, since that takes a second."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_trainer", overrides=base)

    def make(*overrides):
        config = copy.deepcopy(composed)
        for override in overrides:
            key, _, value = override.partition("=")
            OmegaConf.update(config, key.lstrip("+"), yaml.safe_load(value), merge=False, force_add=True)
        return config

    return make


def test_a_good_config_has_no_findings(config_of):
    assert findings(config_of()) == []
    check(config_of("+tim.run_dir=/tmp/somewhere", "+tim.trainer_numerics=contract"))


def test_vllm_has_routes_of_models_with_experts_only(config_of, folders):
    """findings by the key that the user set: ours, or vLLM's own."""
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_return_routed_experts"

    def keys(*overrides):
        found = findings(config_of("actor_rollout_ref.rollout.name=vllm", f"+{engine}=true", *overrides))
        return [finding.key for finding in found if "no experts" in finding.problem]

    assert keys() == [engine]
    assert keys("+tim.vllm_routes=true") == ["tim.vllm_routes"]
    assert keys(f"actor_rollout_ref.model.path={folders('qwen3_moe')}") == []
    assert keys("actor_rollout_ref.model.path=OWNER/NAME") == []
    assert keys("actor_rollout_ref.rollout.name=vexact") == []


def on_a_machine(monkeypatch, accelerator: bool) -> None:
    monkeypatch.setattr("verl_tim.training.accelerator.host_has_accelerator", lambda: accelerator)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ([], False),
        (["trainer.use_v1=false"], True),
        (["reward.reward_model.enable=true"], True),
    ],
)
def test_rewards_in_the_loop_need_v1_and_no_reward_model(config_of, overrides, refused):
    def about(*more):
        return [one.key for one in findings(config_of(*overrides, *more)) if one.key.startswith("tim.reward")]

    assert about("+tim.reward_in_loop=true") == ["tim.reward_in_loop"] * refused
    assert about("+tim.reward_in_loop=false") == []
    assert about() == []


@pytest.mark.parametrize("wanted", ["tim.vllm_routes", "its own key"])
def test_vllm_has_no_routes_on_a_cpu(config_of, folders, monkeypatch, wanted):
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_return_routed_experts"
    config = config_of(
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.model.path={folders('qwen3_moe')}",
        f"+{engine}=true",
        *(["+tim.vllm_routes=true"] if wanted == "tim.vllm_routes" else []),
    )
    on_a_machine(monkeypatch, False)
    (found,) = findings(config)
    assert found.key == (wanted if wanted == "tim.vllm_routes" else engine)
    assert "die at its start" in found.problem
    assert "Set it to false" in found.remedy
    on_a_machine(monkeypatch, True)
    assert not [finding for finding in findings(config) if "routes" in finding.problem]


INVARIANT = "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_BATCH_INVARIANT"


@pytest.mark.parametrize(
    ("rollout", "override", "refused"),
    [
        ("vllm", f"+{INVARIANT}='1'", True),
        ("vllm", "actor_rollout_ref.rollout.full_determinism=true", True),
        ("vllm", f"+{INVARIANT}='0'", False),
        ("vexact", f"+{INVARIANT}='1'", False),  # vLLM's variable, and no vLLM
    ],
)
def test_vllm_has_no_batch_invariant_kernels_on_a_cpu(config_of, monkeypatch, rollout, override, refused):
    """Its first request ends in "'function' object is not subscriptable"."""
    config = config_of(f"actor_rollout_ref.rollout.name={rollout}", override)

    def found():
        return [finding for finding in findings(config) if "batch-invariant kernels need a GPU" in finding.problem]

    on_a_machine(monkeypatch, False)
    assert [finding.key for finding in found()] == ([override.lstrip("+").partition("=")[0]] if refused else [])
    assert all("rollout=vexact" in finding.remedy for finding in found())
    on_a_machine(monkeypatch, True)
    assert found() == []


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("0", False), ("", False)])
@pytest.mark.parametrize("in_config", [False, True])
def test_batch_invariance_that_the_shell_exports_is_seen(config_of, monkeypatch, value, refused, in_config):
    """Workers inherit it, and what the config says wins."""
    on_a_machine(monkeypatch, False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    off = [f"+{INVARIANT}='0'"] if in_config else []
    found = [
        finding
        for finding in findings(config_of("actor_rollout_ref.rollout.name=vllm", *off))
        if "batch-invariant kernels need a GPU" in finding.problem
    ]
    assert [finding.key for finding in found] == (
        ["environment variable VLLM_BATCH_INVARIANT"] if refused and not in_config else []
    )
    assert all("unset it" in finding.remedy for finding in found)


def full(key: str) -> str:
    """A key of the table below, where `actor_rollout_ref.` is left out."""
    plus, key = ("+", key[1:]) if key.startswith("+") else ("", key)
    inside = key.startswith(("model.", "actor.", "rollout.", "ref.")) or key == "rollout"
    return f"{plus}actor_rollout_ref.{key}" if inside else f"{plus}{key}"


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["ray_kwargs.ray_init.num_cpus=2"], "ray_kwargs.ray_init.num_cpus", "need 5"),
        (["ray_kwargs.ray_init.num_cpus=16", "trainer.n_gpus_per_node=6"], "ray_kwargs.ray_init.num_cpus", "need 20"),
        (["trainer.n_gpus_per_node=2"], "ray_kwargs.ray_init.num_gpus", "2 here"),
        (["trainer.device=cuda"], "trainer.device", "without an accelerator"),
        (["model.external_lib=null"], "model.external_lib", "no training engine for CPUs"),
        (["model.override_config.attn_implementation=flash_attention_2"],
         "model.override_config.attn_implementation", "needs a GPU"),
        (["model.enable_activation_offload=true"], "model.enable_activation_offload", "there is no GPU"),
        (["actor.strategy=fsdp"], "actor.strategy", "FSDP2"),
        (["model.use_fused_kernels=false"], "model.use_fused_kernels", "past the contract"),
        (["+model.fused_kernel_options.attention=fa2"], "model.fused_kernel_options.attention", "names no contract"),
        (["+model.fused_kernel_options.attention=fa3"], "model.fused_kernel_options.attention", "needs a Hopper GPU"),
        (["+model.fused_kernel_options.attention=fa2", "model.use_fused_kernels=false",
          "model.fused_kernel_options.impl_backend=torch"],  # the rollout keeps one, whatever the trainer does
         "model.fused_kernel_options.attention", "names no contract"),
        (["model.fused_kernel_options.impl_backend=mine"],
         "model.fused_kernel_options.impl_backend", "mine"),
        (["+tim.trainer_numerics=stock"], "tim.trainer_numerics", "contract"),
        (["+tim.gates=1"], "tim", "tim.gates"),
        (["model.lora_rank=8"], "model.lora_rank", "LoRA"),
        (["model.lora_rank=8", "model.use_fused_kernels=false", "model.fused_kernel_options.impl_backend=torch"],
         "model.lora.merge", "would send adapters"),
        (["actor.ulysses_sequence_parallel_size=2"],
         "actor.ulysses_sequence_parallel_size", "sequence parallelism"),
        (["actor.fsdp_config.ulysses_sequence_parallel_size=2"],
         "actor.fsdp_config.ulysses_sequence_parallel_size", "sequence parallelism"),
        (["ref.ulysses_sequence_parallel_size=2"], "ref.ulysses_sequence_parallel_size", "sequence parallelism"),
        (["ref.fsdp_config.ulysses_sequence_parallel_size=2"],
         "ref.fsdp_config.ulysses_sequence_parallel_size", "sequence parallelism"),
        (["actor.fsdp_config.pad_to_length=true", "actor.fsdp_config.pad_to_length_bucket=130"],
         "actor.fsdp_config.pad_to_length_bucket", "actor.fsdp_config.pad_to_length=false"),
        (["ref.fsdp_config.pad_to_length=true"],
         "ref.fsdp_config.pad_to_length_bucket", "at most 128"),
        (["actor.pad_to_length=true"], "actor.fsdp_config.pad_to_length_bucket", "1023 tokens of padding"),
        (["rollout.dtype=float32"], "rollout.dtype", "bfloat16"),
        (["rollout.data_parallel_size=2"], "rollout.data_parallel_size=2", "cannot do this"),
        (["rollout.tensor_model_parallel_size=2"],
         "rollout.tensor_model_parallel_size", "takes 2 ranks of one node"),
        (["rollout.pipeline_model_parallel_size=4", "trainer.n_gpus_per_node=4"],
         "rollout.pipeline_model_parallel_size", "4 stages for 2 layers"),
        (["+rollout.engine_kwargs.vexact.pages=3"], "rollout", "engine_kwargs.vexact.pages"),
        (["data.max_response_length=500"], "rollout", "context of 128"),
        (["rollout.calculate_log_probs=false"], "rollout.calculate_log_probs", "compared"),
        (["+model.override_config.rope_theta=5"],
         "model.override_config.rope_theta", "not the rollout's"),
        (["trainer.v1.trainer_mode=async"], "trainer.v1.trainer_mode", "no trainer async"),
        (["trainer.v1.trainer_mode=separate_async"], "rollout.checkpoint_engine.backend", "elsewhere"),
        (["+tim.partial_rollout={max_version_lag: 1}"], "tim.partial_rollout.max_version_lag", "no effect"),
        (["+tim.reuse_rollout_log_probs={enabled: true}", "trainer.v1.trainer_mode=colocate_async"],
         "tim.reuse_rollout_log_probs.enabled", "older weights"),
        (["model.path=/nowhere"], "model.path", "does not exist"),
        (["data.train_files=/nowhere/a.parquet"], "data.train_files", "does not exist"),
        (["actor.policy_loss.loss_mode=bypass_mode"],
         "actor.policy_loss.loss_mode", "which they are not"),
        (["algorithm.rollout_correction.rollout_is=token",
          "actor.policy_loss.rollout_correction={rollout_is: sequence, loss_type: ppo_clip}"],
         "actor.policy_loss.rollout_correction.rollout_is", "sequence"),
    ],
)  # fmt: skip
def test_each_deviation_is_named(config_of, overrides, key, says):
    overrides, key = [full(override) for override in overrides], full(key)
    found = findings(config_of(*overrides))
    keys = [finding.key for finding in found]
    assert key in keys, [str(finding) for finding in found]
    finding = found[keys.index(key)]
    assert says in f"{finding.problem} {finding.remedy}"
    assert finding.remedy
    with pytest.raises(ConfigError, match="this run cannot work"):
        check(config_of(*overrides))


def test_padding_within_the_context_is_fine(config_of):
    pads, bucket = full("actor.pad_to_length=true"), full("actor.fsdp_config.pad_to_length_bucket=")
    assert findings(config_of(pads, f"{bucket}129")) == []
    assert findings(config_of(f"{bucket}4096")) == []
    stock = [full("model.use_fused_kernels=false"), full("model.fused_kernel_options.impl_backend=torch")]
    assert findings(config_of(pads, f"{bucket}4096", *stock)) == [], "verl's own forward takes any position"


def test_the_asynchronous_trainers_may_start(config_of):
    assert findings(config_of("trainer.v1.trainer_mode=colocate_async")) == []
    separate = [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=1",
        "rollout.checkpoint_engine.backend=gloo",
        "rollout.checkpoint_engine.custom_backend_module=verl_tim.rollout.gloo_checkpoint_engine",
    ]
    found = findings(config_of(*map(full, separate)))
    assert [finding.key for finding in found] == ["ray_kwargs.ray_init.num_gpus"], "one slot more for the server"
    assert "2 here" in found[0].problem
    assert findings(config_of(*map(full, separate), "ray_kwargs.ray_init.num_gpus=2")) == []


def test_fp32_on_both_sides_is_fine(config_of):
    fp32 = [
        "actor_rollout_ref.rollout.dtype=float32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32}",
    ]
    assert findings(config_of(*fp32)) == []


@pytest.mark.parametrize(
    ("variable", "address", "joins"),
    [
        ("", None, False),
        ("local", None, False),
        ("10.0.0.1:6379", None, True),
        ("", "auto", True),
        ("", "local", False),
    ],
)
def test_a_cluster_of_its_own_is_not_one_to_join(config_of, monkeypatch, variable, address, joins):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert joins_a_cluster(config_of(f"+ray_kwargs.ray_init.address={address or 'null'}")) is joins


def test_the_running_cluster_is_believed_over_the_config(config_of):
    assert findings(config_of(), cluster=Cluster(cpus=5, gpus=1)) == []
    found = findings(config_of(), cluster=Cluster(cpus=4, gpus=0))
    assert [finding.key for finding in found] == ["ray_kwargs.ray_init.num_cpus", "ray_kwargs.ray_init.num_gpus"]


def test_room_is_looked_for_node_by_node(config_of):
    two = config_of("trainer.nnodes=2")

    def on(*nodes):
        sums = [float(sum(column)) for column in zip(*nodes, strict=True)]
        return [found.key for found in resource_findings(two, Cluster(*sums, nodes=nodes))]

    assert on((8, 1), (8, 1)) == []
    assert on((8, 2), (8, 0)) == []  # two groups of one rank fit on one node
    assert on((12, 1), (2, 1)) == ["trainer.nnodes"]  # verl would wait for ever: 3 CPUs are never free there
    wide = config_of("trainer.nnodes=1", "trainer.n_gpus_per_node=2")
    (found,) = resource_findings(wide, Cluster(16, 2, nodes=((8, 1), (8, 1))))
    assert found.key == "trainer.nnodes"
    assert "8 CPUs and 1 GPUs, 8 CPUs and 1 GPUs" in found.problem


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["+tim.restarts.limit=0"], []),
        (["+tim.restarts.limit=2", "trainer.save_freq=5"], []),
        (["+tim.restarts.limit=2", "trainer.save_freq=-1"], ["trainer.save_freq"]),
        (
            ["+tim.restarts.limit=2", "trainer.save_freq=5", "trainer.max_actor_ckpt_to_keep=1"],
            ["trainer.max_actor_ckpt_to_keep"],
        ),
        (["+tim.restarts.limit=two"], ["tim"]),
        (["+tim.restarts={limit: 1, wait: -1}", "trainer.save_freq=5"], ["tim"]),
    ],
)
def test_restarts_need_checkpoints(config_of, overrides, keys):
    assert [finding.key for finding in findings(config_of(*overrides))] == keys


def test_cpus_needed(config_of):
    assert required_cpus(config_of()) == 5
    assert required_cpus(config_of("trainer.use_v1=false")) == 4
    assert required_cpus(config_of("trainer.n_gpus_per_node=2")) == 8
    apart = ("rollout.nnodes=1", "rollout.n_gpus_per_node=2")
    separate = config_of("trainer.v1.trainer_mode=separate_async", *map(full, apart))
    assert required_cpus(separate) == 9
    assert required_cpus(config_of("transfer_queue.backend.SimpleStorage.num_data_storage_units=8")) == 12


def test_a_data_file_without_verls_columns(config_of, tmp_path):
    import pandas as pd

    path = tmp_path / "plain.parquet"
    pd.DataFrame({"question": ["1+1"], "answer": ["2"]}).to_parquet(path)
    (finding,) = findings(config_of(f"data.train_files={path}"))
    assert finding.key == "data.train_files"
    assert "prompt, data_source, reward_model" in finding.problem
    assert "it has question, answer" in finding.problem


def test_a_folder_that_is_no_model(config_of, tmp_path):
    found = findings(config_of(f"actor_rollout_ref.model.path={tmp_path}"))
    assert any(f.key == "actor_rollout_ref.model.path" and "config.json" in f.problem for f in found)


def test_plain_verl_stops_before_ray_starts(base, tmp_path):
    """`python -m verl.trainer.main_ppo` with too few CPUs would wait for ever; it stops within seconds and says why."""
    began = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            *base,
            "ray_kwargs.ray_init.num_cpus=1",
            f"hydra.run.dir={tmp_path}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "ray_kwargs.ray_init.num_cpus" in done.stderr
    assert "need 5" in done.stderr
    assert "Started a local Ray instance" not in done.stderr + done.stdout
    assert time.monotonic() - began < 110


def test_a_run_without_verl_tim_is_left_alone(base, config_of, monkeypatch):
    from verl.utils.config import validate_config

    from verl_tim.training import start_checks

    monkeypatch.setattr(start_checks, "check", lambda *args, **kwargs: pytest.fail("checked"))
    config = config_of(
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch",
        "actor_rollout_ref.model.external_lib=null",
    )
    validate_config(config=config, use_reference_policy=False, use_critic=False)
