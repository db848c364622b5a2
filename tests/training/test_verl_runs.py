"""Real GRPO runs of verl's two trainers on this machine's CPU, Ray processes and all.

Each takes a minute or more; `scripts/test.sh --all` makes those that are not marked slow. What must hold in every exact
run: all log-prob bits agree at every step (so after weight updates, too), verl's own difference metric is 0.0, the
trainer did recompute, and the manifest says what ran.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import yaml

from tests.training.verl_run import CONTRACT, FP32, OWN_CLUSTER, run_verl
from verl_tim.training.accelerator import host_has_accelerator

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(host_has_accelerator(), reason="these runs are for a CPU"),
]


def assert_exact(run, steps=3):
    assert run.returncode == 0, run.output[-4000:]
    assert run.series("tim/exact_fraction") == [1.0] * steps
    assert run.series("tim/delta_abs_max") == [0.0] * steps
    assert all(tokens > 100 for tokens in run.series("tim/valid_tokens"))
    assert run.series("tim/missing_tokens") == [0.0] * steps
    assert all(norm > 0 for norm in run.series("actor/grad_norm")), "the weights did not move"


slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive


@dataclass
class Case:
    kind: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    replicas: int = 0  # where not one per rank
    split: tuple[int, int] = (1, 1)  # tensor and pipeline parallel ranks of a replica
    always: bool = False  # in scripts/test.sh, too


EXACT = {
    "V1, dense, bf16, packed, T 1.0, preemption": Case(
        "qwen3",
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vexact={page_size: 8, kv_cache_tokens: 176}",
            "actor_rollout_ref.rollout.prometheus.enable=true",
            "actor_rollout_ref.rollout.disable_log_stats=false",
            "actor_rollout_ref.rollout.prometheus.file=FOLDER/prometheus/prometheus.yml",
        ),
        always=True,
    ),
    "V1, MoE, bf16, packed, T 0.6, two ranks and replicas": Case(
        "qwen3_moe", ("actor_rollout_ref.rollout.temperature=0.6",), ranks=2, always=True
    ),
    "V1, MoE, bf16, packed, T 1.0, two ranks and one replica of two": Case(
        "qwen3_moe", ("actor_rollout_ref.rollout.tensor_model_parallel_size=2",), ranks=2, replicas=1, split=(2, 1)
    ),
    "legacy, dense, bf16, packed, T 1.0, one replica of two stages": Case(
        "qwen3",
        ("trainer.use_v1=false", "actor_rollout_ref.rollout.pipeline_model_parallel_size=2"),
        ranks=2,
        replicas=1,
        split=(1, 2),
        always=True,
    ),
    "legacy, dense, bf16, padded, T 1.0": Case(
        "qwen3", ("trainer.use_v1=false", "actor_rollout_ref.model.use_remove_padding=false")
    ),
    "legacy, MoE, fp32, packed, T 1.3, KL to a reference model": Case(
        "qwen3_moe",
        (
            "trainer.use_v1=false",
            "actor_rollout_ref.rollout.temperature=1.3",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.ref.strategy=fsdp2",
            *FP32,
        ),
    ),
}


@pytest.fixture(scope="module")
def exact_run(folders, data, tmp_path_factory):
    """case -> its run, made once."""
    made = {}

    def run(name):
        if name not in made:
            case = EXACT[name]
            folder = tmp_path_factory.mktemp("run")
            overrides = [override.replace("FOLDER", str(folder)) for override in case.overrides]
            made[name] = run_verl(folder, folders(case.kind), data, *CONTRACT, *overrides, ranks=case.ranks)
        return made[name]

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow if case.always else exhaustive) for name, case in EXACT.items()]
)
def test_every_bit_agrees(exact_run, name):
    run, case = exact_run(name), EXACT[name]
    assert_exact(run)
    assert run.series("training/rollout_probs_diff_max") == [0.0] * 3
    assert run.series("tim/trainer_self_delta_max") == [0.0] * 3
    assert max(abs(k1) for k1 in run.series("tim/ppo_k1")) > 0, "the second mini-batch saw moved weights"
    pairs = zip(run.series("timing_s/tim"), run.series("timing_s/step"), strict=True)
    assert all(0 < tim < step for tim, step in pairs)
    replicas = case.replicas or case.ranks
    assert all(updates == replicas for updates in run.series("tim/rollout_weight_updates"))
    if "preemption" in name:
        assert all(preemptions > 0 for preemptions in run.series("tim/rollout_preemptions"))
        assert all(0.5 < use <= 1 for use in run.series("tim/rollout_max_kv_use"))
        scraped = yaml.safe_load((run.folder / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][1]
        (target,) = scraped["static_configs"][0]["targets"]
        assert re.fullmatch(r"[\d.]+:\d+", target)
    manifest = run.manifest()
    trainer, rollout = manifest["trainer"], manifest["rollout"]
    assert trainer["facts"]["numerics"] == rollout["facts"]["numerics"] == "contract"
    assert trainer["facts"]["compute_dtype"] == rollout["facts"]["compute_dtype"]
    assert trainer["facts"]["contract_id"] == rollout["facts"]["contract_id"]
    assert (len(rollout["processes"]), len(trainer["processes"])) == (replicas, case.ranks)
    assert (rollout["facts"]["tensor_parallel"], rollout["facts"]["pipeline_parallel"]) == case.split
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {1, 2, 3}
    assert all(sample["uid"] is not None and sample["ground_truth"] for sample in samples)


@exhaustive
def test_a_rerun_draws_the_same_tokens_whatever_the_batching(exact_run, folders, data, tmp_path):
    """Same seeds, so: preempted or not, the same run; and both trainers start alike."""
    preempted = exact_run("V1, dense, bf16, packed, T 1.0, preemption")
    # with as few Ray CPUs as the start-up check asks for: one less, and verl would wait for ever
    again = run_verl(tmp_path, folders("qwen3"), data, *CONTRACT, "ray_kwargs.ray_init.num_cpus=5")
    assert_exact(again)
    assert again.series("tim/rollout_preemptions") == [0.0] * 3
    for name in ("tim/valid_tokens", "critic/score/mean", "tim/ppo_k1"):
        assert again.series(name) == preempted.series(name)
    legacy = exact_run("legacy, dense, bf16, padded, T 1.0")
    # from step 2 on the trainers differ in how they deal rows to mini-batches
    assert again.series("tim/valid_tokens")[0] == legacy.series("tim/valid_tokens")[0]
    assert again.series("critic/score/mean")[0] == pytest.approx(legacy.series("critic/score/mean")[0])


@exhaustive
def test_a_stock_rollout_mismatches_and_validation_is_greedy(folders, data, tmp_path):
    run = run_verl(
        tmp_path, folders("qwen3"), data, *CONTRACT, "trainer.val_before_train=true", rollout="stock", steps=2
    )
    assert run.returncode == 0, run.output[-4000:]
    assert all(delta > 1e-4 for delta in run.series("tim/delta_abs_max"))
    assert all(difference > 0 for difference in run.series("training/rollout_probs_diff_max"))
    assert any(name.startswith("val-core/") for name in run.steps[0])
    assert run.manifest()["rollout"]["facts"]["numerics"] == "stock"


ONE_ULP = """
import numpy as np
import verl_tim.rollout.server as server

original = server.EngineServer.generate

async def generate(self, *args, **kwargs):
    output = await original(self, *args, **kwargs)
    if self.global_steps == 1 and len(output.log_probs) > 2:
        output.log_probs[2] = float(np.nextafter(np.float32(output.log_probs[2]), np.float32(-100)))
    return output

server.EngineServer.generate = generate
"""


@slow
def test_one_ulp_stops_the_run(folders, data, tmp_path):
    run = run_verl(tmp_path, folders("qwen3"), data, *CONTRACT, modules={"one_ulp": ONE_ULP})
    assert run.returncode != 0
    assert "MismatchError: step 2: rollout and trainer differ" in run.output
    assert "token 2" in run.output
    assert "1 ulp apart" in run.output
    assert list(run.steps) == [1]
    assert run.series("tim/exact_fraction") == [1.0]


BROKEN_RECEIVER = """
import verl_tim.rollout.server as server

async def receive_weights(self, bucket, rank):
    raise ValueError("planted: the receiver broke")

original = server.EngineServer.receive_weights

async def after_the_first(self, bucket, rank):
    if self.engine.weight_version >= 0 and self._update.version >= 1 and self.replica_rank == 1:
        await receive_weights(self, bucket, rank)
    await original(self, bucket, rank)

server.EngineServer.receive_weights = after_the_first
"""


@exhaustive
def test_a_broken_receiver_ends_a_run_of_two_ranks(folders, data, tmp_path):
    """The other rank gathers on, and the trainer hears of it instead of waiting for ever."""
    run = run_verl(tmp_path, folders("qwen3"), data, *CONTRACT, ranks=2, modules={"broken_receiver": BROKEN_RECEIVER})
    assert run.returncode != 0
    assert "planted: the receiver broke" in run.output


@exhaustive
def test_a_reward_function_that_raises_now_and_then_ends_the_run(folders, data, tmp_path):
    """verl's V1 trainer would log it, drop the answer and train on."""
    (tmp_path / "raising.py").write_text(
        "calls = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls % 7 == 0:\n"
        "        raise ValueError('planted: no score')\n"
        "    return 0.0\n"
    )
    path = f"reward.custom_reward_function.path={tmp_path}/raising.py"
    run = run_verl(tmp_path / "run", folders("qwen3"), data, *CONTRACT, path)
    assert run.returncode != 0
    assert "responses failed in the agent loop" in run.output
    assert "planted: no score" in run.output
    assert not run.steps


@slow
def test_standalone_replicas_load_the_checkpoint_and_serve(folders, data, tmp_path):
    """verl's other placement: servers of their own, without a trainer beside them."""
    script = tmp_path / "standalone.py"
    script.write_text(
        """
import asyncio, sys
import ray
from hydra import compose, initialize_config_module

if __name__ == "__main__":
    ray.init(num_cpus=8, num_gpus=2, include_dashboard=False, object_store_memory=100_000_000)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[
            "actor_rollout_ref.rollout.name=vexact", f"actor_rollout_ref.model.path={sys.argv[1]}",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=2", "data.max_prompt_length=16", "data.max_response_length=8"])
    from verl.workers.rollout.llm_server import LLMServerManager
    manager = LLMServerManager.create(config=config)
    client = manager.get_client()
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 5}
    async def ask():
        asked = [client.generate(f"r{i}", prompt_ids=[5, 6, 7], sampling_params=dict(params)) for i in range(6)]
        return await asyncio.gather(*asked)
    outputs = asyncio.run(ask())
    assert len({tuple(o.token_ids) for o in outputs}) == 1, "replicas disagree"
    assert len({tuple(o.log_probs) for o in outputs}) == 1
    print("SERVED", len(manager.get_replicas()), outputs[0].extra_fields["global_steps"])
"""
    )
    done = subprocess.run(
        [sys.executable, str(script), folders("qwen3")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**OWN_CLUSTER, **os.environ},
    )
    assert "SERVED 2 0" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
