"""Every tracker is told what a run is, and tells it again: written and read by its own package, without network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from omegaconf import OmegaConf

from tests.diagnosis.fake_runs import describe
from verl_tim.diagnosis.manifest import Manifest
from verl_tim.launch import prepare
from verl_tim.launch.start import composed
from verl_tim.training import tracking
from verl_tim.training.config import ConfigError, TimConfig
from verl_tim.training.tracking import Labels, TrackerError

ALL = ("wandb", "tensorboard", "swanlab", "mlflow", "trackio")
HERE = tuple(name for name in ALL if find_spec(name) is not None)
TAGS = ["recipe:cpu_grpo", "task:chain_sum", "rollout:stock", "trainer:contract", "correction:token_tis", "seed:7"]
TAGS += ["data_seed:3", "mine"]


def manifest():
    return Manifest.from_processes(
        run={
            "name": "run",
            "rollout": "stock",
            "correction": "token_tis",
            "trainer_numerics": "contract",
            "recipe": "cpu_grpo",
            "task": "chain_sum",
            "seed": 7,
        },
        trainer={"actor 0": describe("fsdp2")},
        rollout={"server 0": describe("stock", numerics="stock")},
        old_log_probs="recompute",
    ).to_dict()


def config_of(folder, *overrides):
    """The config of a run, as verl gives it to its trackers."""
    config = composed([f"tim.run_dir={folder}", f"tim.cache_dir={folder}/cache", *overrides])
    prepare.resolve(config)
    plain = OmegaConf.to_container(config, resolve=True)
    plain["tim"]["manifest"] = manifest()
    return plain


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    words = ["rollout=stock", "correction=token_tis", "data.seed=3", "actor_rollout_ref.rollout.seed=7"]
    folder = tmp_path_factory.mktemp("runs") / "stock-seed7"
    folder.mkdir()
    return config_of(folder, *words, f"tracker=[{','.join(HERE)}]", "tim.tracking.tags=[mine]")


def test_what_a_run_is_filed_under(config):
    labels = Labels.of(config)
    assert (labels.project, labels.name, labels.group) == ("verl_tim", "stock-seed7", "cpu_grpo")
    assert labels.setting == "stock-contract-token_tis"
    assert list(labels.all_tags) == TAGS


def test_seeds_of_a_setting_share_it_and_a_group_can_be_named(config, tmp_path):
    other = config_of(tmp_path, "rollout=stock", "correction=token_tis", "data.seed=4", "tim.tracking.group=mine")
    assert Labels.of(other).setting == Labels.of(config).setting
    assert Labels.of(other).group == "mine"


def test_replay_makes_another_setting(config):
    def labels(mode, chosen):
        tim, choices = config["tim"], {**config["tim"]["choices"], "routing_replay": chosen}
        manifest = {**(tim.get("manifest") or {}), "routing_replay": mode}
        return Labels.of({**config, "tim": {**tim, "choices": choices, "manifest": manifest}})

    # by the group, or by verl's key alone, as a plain YAML sets it; the manifest knows what runs
    for chosen in ("r3", "off"):
        assert labels("r3", chosen).setting == "stock-contract-token_tis-r3"
        assert "replay:r3" in labels("r3", chosen).all_tags
    assert labels(None, "r2").setting == "stock-contract-token_tis"
    assert config["tim"]["choices"]["routing_replay"] == "off"
    assert not [tag for tag in Labels.of(config).all_tags if tag.startswith("replay")]


def test_a_config_without_choices_is_filed_by_what_runs():
    config = {
        "tim": {},
        "trainer": {"project_name": "p", "experiment_name": "e"},
        "actor_rollout_ref": {"rollout": {"name": "vllm"}},
    }
    labels = Labels.of(config)
    assert (labels.group, labels.setting) == ("run", "vllm-stock")


@pytest.mark.parametrize("tags", ["mine", [""], ["a,b"], ["x" * 65], [1]])
def test_tags_that_trackers_would_not_take(tags):
    with pytest.raises(ConfigError, match=r"tim\.tracking\.tags"):
        TimConfig.of({"tim": {"tracking": {"tags": tags}}})


LOG = """
import json, os, sys
from verl.utils.tracking import Tracking
config = json.load(open(sys.argv[1]))
variables = config["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
os.environ.update({name: str(value) for name, value in variables.items()})
trainer = config["trainer"]
tracker = Tracking(trainer["project_name"], trainer["experiment_name"], trainer["logger"], config)
for step in range(4):
    tracker.log({"critic/score/mean": step / 4, "tim/delta_abs_max": [0.0, 0.5, 0.25, 0.125][step]}, step)
tracker.finish()
assert not any(name.startswith(("WANDB_TAGS", "SWANLAB_TAGS")) for name in os.environ)
"""


@pytest.fixture(scope="module")
def logged(config, tmp_path_factory):
    """A run logged by verl's Tracking to every tracker that is installed here; its config. Any network would fail."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "config.json").write_text(json.dumps(config))
    dead = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "SWANLAB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **dead, **offline, "HOME": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    # the config said "online", as it was composed without these variables
    config["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"] |= {
        name: value for name, value in offline.items() if name.endswith("_MODE")
    }
    (folder / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", LOG, str(folder / "config.json")],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert not (folder / "wandb").exists(), "wandb wrote beside the run folder"
    return {**config, "home": folder}


def needs(package):
    return pytest.mark.skipif(package not in HERE, reason=f"{package} is not installed here")


@needs("wandb")
def test_wandb_says_it_again(logged):
    from wandb.proto import wandb_internal_pb2

    from verl_tim.diagnosis.trackers import wandb_file, wandb_messages

    messages, torn = wandb_messages(wandb_file(_folder(logged)))
    records = [wandb_internal_pb2.Record.FromString(content) for content in messages]
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert not torn
    assert (run.project, run.display_name) == ("verl_tim", "stock-seed7")
    assert (run.run_group, run.job_type) == ("cpu_grpo", "stock-contract-token_tis")
    assert sorted(run.tags) == sorted(TAGS)
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["tim"]["manifest"] == manifest()
    worst = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                worst[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    assert worst["tim/delta_abs_max"] == {"max": 0.5, "last": 0.125}


@needs("wandb")
def test_wandbs_folder_alone_compares_under_the_runs_name(logged):
    from verl_tim.diagnosis.compare import compare

    (folder,) = (_folder(logged) / "wandb").glob("offline-run-*")
    (run,) = compare([folder]).runs
    assert (run.name, run.rollout, run.correction, run.trainer_numerics) == (
        "stock-seed7",
        "stock",
        "token_tis",
        "contract",
    )
    assert run.manifest is not None
    assert run.manifest.to_dict() == manifest()
    assert run.log.series("critic/score/mean") == ([0, 1, 2, 3], [0, 0.25, 0.5, 0.75])


@needs("tensorboard")
def test_tensorboard_says_it_again(logged):
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    events = EventAccumulator(str(_folder(logged) / "tensorboard"), size_guidance={TENSORS: 0})
    events.Reload()
    (run,), (facts,) = (events.Tensors(f"{name}/text_summary") for name in ("run", "manifest"))
    text = run.tensor_proto.string_val[0].decode()
    assert "| setting | stock-contract-token_tis |" in text
    assert "| tags | mine |" in text
    assert json.loads(facts.tensor_proto.string_val[0]) == manifest()


@needs("mlflow")
def test_mlflow_says_it_again(logged):
    from mlflow.tracking import MlflowClient

    runs = _folder(logged).parent
    client = MlflowClient(f"sqlite:///{runs}/mlflow.db")
    experiment = client.get_experiment_by_name("verl_tim")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "stock-seed7"
    tags = run.data.tags
    assert (tags["group"], tags["setting"], tags["rollout"], tags["mine"]) == (
        "cpu_grpo",
        "stock-contract-token_tis",
        "stock",
        "",
    )
    assert run.data.params["tim/manifest/trainer/facts/backend"] == "fsdp2"
    assert json.loads((runs / "mlflow-artifacts" / run.info.run_id / "artifacts" / "manifest.json").read_text()) == (
        manifest()
    )


@needs("swanlab")
def test_swanlab_says_it_again(logged):
    import yaml

    (folder,) = (_folder(logged) / "swanlog").glob("run-*")
    config = yaml.safe_load((folder / "files" / "config.yaml").read_text())
    assert config["tim"]["value"]["manifest"]["rollout"]["facts"]["backend"] == "stock"
    (record,) = folder.glob("*.swanlab")
    content = record.read_bytes()
    for word in ("verl_tim", "stock-seed7", "cpu_grpo", "stock-contract-token_tis", "rollout:stock"):
        assert word.encode() in content, word


@needs("trackio")
def test_trackio_says_it_again(logged):
    import sqlite3

    (database,) = (logged["home"] / "trackio").glob("verl_tim*.db")
    with sqlite3.connect(database) as connection:
        ((name, text),) = connection.execute("select run_name, config from configs").fetchall()
    config = json.loads(text)
    assert name == "stock-seed7"
    assert config["_Group"] == "cpu_grpo"
    assert config["tim"]["manifest"]["rollout"]["facts"]["backend"] == "stock"


def test_a_tracker_that_does_not_start_ends_the_run(config, monkeypatch):
    """verl goes on without MLflow, with a warning."""

    class Verls:
        def __init__(self, *arguments):
            self.logger = {"console": object()}

        def finish(self, exit_code):
            ended.append(exit_code)

    ended: list[int] = []
    monkeypatch.setattr(tracking, "_place_mlflow_artifacts", lambda project: None)
    with pytest.raises(TrackerError, match=r"mlflow did not start"):
        tracking.labelled(Verls)("p", "e", ["console", "mlflow"], config)
    assert ended == [1], "the others were left open"


def test_variables_of_the_user_win(config, monkeypatch):
    seen = {}

    class Verls:
        def __init__(self, *arguments):
            seen.update(os.environ)
            self.logger = {"console": object()}

    monkeypatch.setenv("WANDB_RUN_GROUP", "theirs")
    monkeypatch.delenv("WANDB_TAGS", raising=False)
    tracking.labelled(Verls)("p", "e", ["console"], config)
    assert (seen["WANDB_RUN_GROUP"], seen["WANDB_JOB_TYPE"]) == ("theirs", "stock-contract-token_tis")
    assert "WANDB_TAGS" not in os.environ


def test_runs_that_use_nothing_of_verl_tim_are_left_alone():
    seen = []

    class Verls:
        def __init__(self, *arguments):
            seen.append((arguments, dict(os.environ)))

    tracking.labelled(Verls)("p", "e", "wandb", {"trainer": {}})
    ((arguments, environment),) = seen
    assert arguments == ("p", "e", "wandb", {"trainer": {}})
    assert "WANDB_JOB_TYPE" not in environment


def _folder(config):
    from pathlib import Path

    return Path(config["tim"]["run_dir"])


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 1)])
def test_trackers_are_closed_when_training_ends(config, fails, code):
    """verl's `finish` stands in `__del__`, and Ray ends a process without calling it."""

    class Recorded:
        def __init__(self, *settings):
            self.logger = dict.fromkeys(settings[2])

        def finish(self, exit_code=0):
            codes.append(exit_code)

    codes = []
    made = tracking.labelled(Recorded)("project", "run", ["console"], config)
    try:
        with tracking.closed_at_the_end():
            if fails:
                raise RuntimeError("a step failed")
    except RuntimeError:
        assert fails
    assert codes == [code]
    del made


@needs("wandb")
@pytest.mark.parametrize("used", [True, False])
def test_wandbs_process_has_ended_when_the_run_has(config, monkeypatch, used):
    """After the run is finished; ending it earlier would lose what it still writes."""
    import wandb

    told = []

    class Recorded:
        def __init__(self, project, name, backends, config):
            self.logger = dict.fromkeys(backends)

        def finish(self, exit_code):
            told.append(("finished", exit_code))

    monkeypatch.setattr(tracking, "_before", lambda *_: None)
    monkeypatch.setattr(tracking, "_after", lambda *_: None)
    monkeypatch.setattr(wandb, "teardown", lambda exit_code: told.append(("ended", exit_code)))
    made = tracking.labelled(Recorded)("project", "run", ["wandb" if used else "console"], config)
    with tracking.closed_at_the_end():
        pass
    assert told == [("finished", 0), ("ended", 0)][: 2 if used else 1]
    del made
