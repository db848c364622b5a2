"""Manifests: filled from describe() dicts, strict about what they hold, and a diff that misses nothing."""

from __future__ import annotations

import json
import os

import pytest
import torch
from fake_runs import describe

from verl_tim.diagnosis.manifest import Manifest, ManifestError, ProcessFacts, RunFacts, diff
from verl_tim.diagnosis.process import DETERMINISM_VARIABLES, process_facts


def manifest(rollout="vexact", trainer_facts=None, rollout_facts=None, run=None, **fields):
    numerics = "contract" if rollout == "vexact" else "stock"
    return Manifest.from_processes(
        run={"name": rollout, "rollout": rollout, "correction": "none", **(run or {})},
        trainer={"actor 0": describe("fsdp2", **(trainer_facts or {}))},
        rollout={"server 0": describe(rollout, numerics=numerics, kv_dtype="bfloat16", **(rollout_facts or {}))},
        **{"old_log_probs": "recompute", **fields},
    )


def test_round_trip(tmp_path):
    written = manifest(correction={"rollout_is": "token", "rollout_is_threshold": 2.0}, routing_replay="R3")
    assert written.write(tmp_path) == tmp_path / "manifest.json"
    assert Manifest.read(tmp_path) == written
    assert Manifest.read(tmp_path / "manifest.json") == written
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


def test_facts_of_this_process_fill_a_manifest():
    facts = process_facts(environ={"NCCL_ALGO": "Tree", "OMP_NUM_THREADS": "2", "HOME": "/root"})
    known = ProcessFacts.from_describe(facts | {"backend": "fsdp2", "backend_version": "2.13.0"})
    assert known.device_type == "cpu"
    assert known.device
    assert known.threads == torch.get_num_threads()
    assert known.versions["torch"] == torch.__version__
    assert known.determinism == {"NCCL_ALGO": "Tree", "OMP_NUM_THREADS": "2"}
    assert known.nccl_algo == "Tree"
    assert known.extra == {}
    assert process_facts()["determinism"] == {k: v for k, v in os.environ.items() if k in DETERMINISM_VARIABLES}


def test_dtypes_and_unknown_facts_become_plain():
    facts = ProcessFacts.from_describe(
        {
            "backend": "vexact",
            "backend_version": "0.1.0",
            "param_dtype": torch.bfloat16,
            "graph_buckets": (1, 2, 4),
            "kv_cache_tokens": 4096,
            "weight_device": torch.device("cpu"),
            "extra": {"pages": {3, 1, 2}},
        }
    )
    assert facts.param_dtype == "bfloat16"
    assert facts.graph_buckets == [1, 2, 4]
    assert facts.extra == {"kv_cache_tokens": 4096, "weight_device": "cpu", "pages": [1, 2, 3]}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"backend": "vexact"}, "server 0: describe\\(\\) lacks backend_version"),
        ({"backend": "x", "backend_version": "1", "threads": True}, "threads must be"),
        ({"backend": "x", "backend_version": "1", "threads": "2"}, "threads must be"),
        ({"backend": "x", "backend_version": "1", "determinism": {"A": 1}}, "determinism must be"),
        ({"backend": "x", "backend_version": "1", "hook": object()}, "hook: object cannot be stored"),
        ({"backend": "x", "backend_version": "1", "extra": 3}, "extra must be a mapping"),
    ],
)
def test_facts_that_do_not_fit_are_named(facts, message):
    with pytest.raises(ManifestError, match=message):
        ProcessFacts.from_describe(facts, process="server 0")


def test_a_side_without_processes_is_refused():
    with pytest.raises(ManifestError, match="no rollout process was described"):
        Manifest.from_processes(
            run={"name": "x", "rollout": "x", "correction": "none"},
            trainer={"actor 0": describe("fsdp2")},
            rollout={},
            old_log_probs="recompute",
        )


def test_unknown_run_keys_and_modes_are_refused():
    with pytest.raises(ManifestError, match="run: unknown key 'model'"):
        manifest(run={"model": "x"})
    with pytest.raises(ManifestError, match="old_log_probs"):
        manifest(old_log_probs="skip")


def test_workers_that_disagree_stand_under_their_name():
    merged = Manifest.from_processes(
        run=RunFacts(name="x", rollout="vexact", correction="none"),
        trainer={
            "actor 0": describe("fsdp2"),
            "actor 1": describe("fsdp2"),
            "actor 2": describe("fsdp2", threads=8, determinism={}),
        },
        rollout={"server 0": describe("vexact")},
        old_log_probs="recompute",
    )
    assert merged.trainer.processes == ["actor 0", "actor 1", "actor 2"]
    assert merged.trainer.different == {"actor 2": {"determinism.OMP_NUM_THREADS": None, "threads": 8}}


def test_equal_runs_differ_in_nothing():
    assert diff({"a": manifest(), "b": manifest(run={"name": "other", "started": "2026-01-01T00:00:00+00:00"})}) == []


def test_what_another_rollout_does_not_report_is_no_difference():
    """vLLM's server tells neither its KV cache's dtype nor its device; a value that both report still counts."""
    told = {"compute_dtype": "bfloat16", "kv_dtype": "bfloat16", "device": "a CPU"}
    rollout = {
        "vexact": {"server 0": describe("vexact", **told)},
        "vllm": {"server 0": describe("vllm", compute_dtype="float32", device=None)},
        "later": {"server 0": describe("vexact", **told, expert_parallel=2)},
    }
    made = {
        name: Manifest.from_processes(
            run=RunFacts(name=name, rollout=name, correction="none"),
            trainer={"actor 0": describe("fsdp2")},
            rollout=servers,
            old_log_probs="recompute",
        )
        for name, servers in rollout.items()
    }
    assert [d.key for d in diff({name: made[name] for name in ("vexact", "vllm")})] == ["rollout.compute_dtype"]
    # the same rollout twice: what only one of the two says was set there
    assert [d.key for d in diff({name: made[name] for name in ("vexact", "later")})] == ["rollout.expert_parallel"]


def test_a_change_of_rollout_is_no_difference_but_can_be_asked_for():
    pair = {"vexact": manifest(), "stock": manifest("stock")}
    assert diff(pair) == []
    of_rollout = {d.key: d.values for d in diff(pair, include_rollout=True)}
    assert of_rollout["run.rollout"] == {"vexact": "vexact", "stock": "stock"}
    assert {"rollout.backend", "rollout.contract_id", "rollout.attention_backend"} <= of_rollout.keys()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"trainer_facts": {"param_dtype": "float32"}}, "trainer.param_dtype"),
        ({"trainer_facts": {"determinism": {"OMP_NUM_THREADS": "4"}}}, "trainer.determinism.OMP_NUM_THREADS"),
        ({"trainer_facts": {"determinism": {}}}, "trainer.determinism.OMP_NUM_THREADS"),
        ({"trainer_facts": {"attention_backend": "flash"}}, "trainer.attention_backend"),
        ({"trainer_facts": {"versions": {"torch": "2.11.0"}}}, "trainer.versions.torch"),
        ({"trainer_facts": {"a_new_fact": 1}}, "trainer.extra.a_new_fact"),
        # The rollout's number formats and layout are not its identity: a fair pair keeps them.
        ({"rollout_facts": {"param_dtype": "float16"}}, "rollout.param_dtype"),
        ({"rollout_facts": {"tensor_parallel": 2}}, "rollout.tensor_parallel"),
        ({"rollout_facts": {"device": "NVIDIA H200"}}, "rollout.device"),
        ({"run": {"seed": 7}}, "run.seed"),
        ({"run": {"correction": "token_tis"}}, "run.correction"),
        ({"correction": {"rollout_is_threshold": 3.0}}, "correction.rollout_is_threshold"),
        ({"old_log_probs": "bypass"}, "old_log_probs"),
        ({"routing_replay": "R3"}, "routing_replay"),
    ],
)
def test_every_other_difference_is_named(change, key):
    found = diff({"a": manifest(), "b": manifest("stock", **change)})
    assert key in [d.key for d in found]
    assert all(not d.of_rollout for d in found)


def test_another_number_of_workers_is_a_difference():
    two = Manifest.from_processes(
        run={"name": "vexact", "rollout": "vexact", "correction": "none"},
        trainer={"actor 0": describe("fsdp2"), "actor 1": describe("fsdp2")},
        rollout={"server 0": describe("vexact", kv_dtype="bfloat16")},
        old_log_probs="recompute",
    )
    assert [(d.key, d.values) for d in diff({"a": manifest(), "b": two})] == [("trainer.processes", {"a": 1, "b": 2})]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=99), "format 99 is not known"),
        (lambda m: m.pop("trainer"), "trainer must be an object"),
        (lambda m: m["trainer"].update(processes=[]), "trainer: key 'processes' is missing or empty"),
        (lambda m: m["rollout"]["facts"].pop("backend"), "rollout.facts: key 'backend' is missing"),
        (lambda m: m["rollout"]["facts"].update(threads="two"), "rollout.facts.threads"),
        (lambda m: m["run"].update(rollot="x"), "run: unknown key 'rollot'"),
        (lambda m: m.pop("old_log_probs"), "key 'old_log_probs' is missing"),
    ],
)
def test_a_broken_manifest_names_file_and_key(tmp_path, change, message):
    path = manifest().write(tmp_path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ManifestError, match=message) as caught:
        Manifest.read(tmp_path)
    assert str(path) in str(caught.value)


def test_not_json_and_absent(tmp_path):
    with pytest.raises(FileNotFoundError):
        Manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ManifestError, match="is not JSON"):
        Manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(ManifestError, match="expected an object"):
        Manifest.read(tmp_path)


def test_the_model_size_is_found():
    assert manifest().parameters == 612_480
    assert manifest(trainer_facts={"model": {}}, rollout_facts={"model": {}}).parameters is None
