"""Runs that were logged to TensorBoard or wandb alone, or to a metrics file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import yaml
from fake_runs import metric_lines, write_run

from verl_tim.diagnosis.baseline import baseline_of
from verl_tim.diagnosis.compare import compare
from verl_tim.diagnosis.metric_log import RunFolderError
from verl_tim.diagnosis.run import Run
from verl_tim.diagnosis.run_folder import RunFolder
from verl_tim.diagnosis.trackers import BLOCK, wandb_messages

LINES = metric_lines(steps=6, seed=1, delta=2e-3)
VALUES = {line["step"]: {k: float(v) for k, v in line["data"].items()} for line in LINES}


def read(path):
    return {record.step: record.data for record in Run.read(path).log.records}


@pytest.fixture
def events(tmp_path):
    """What verl's tensorboard logger writes (verl 0.9.1, utils/tracking.py, _TensorboardAdapter)."""
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / "tb" / "tensorboard"
    with SummaryWriter(str(folder)) as writer:
        for line in LINES:
            for name, value in line["data"].items():
                writer.add_scalar(name, value, line["step"])
        writer.add_scalar("actor/bad", math.nan, 3)
    return folder


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A wandb offline run, written by wandb itself in a process of its own, with a message longer than a block."""
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("wandb")
    code = (
        "import json, sys, wandb\n"
        "wandb.init(project='p', name='n', config={'long': 'x' * 100_000}, dir=sys.argv[1])\n"
        "for line in json.loads(sys.stdin.read()):\n"
        "    table = wandb.Table(columns=['step'], data=[[1]])\n"
        "    others = {'note': 'text', 'actor/bad': float('nan'), 'val/generations': table}\n"
        "    wandb.log({**line['data'], **others}, step=line['step'])\n"
        "wandb.finish()\n"
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], input=json.dumps(LINES), text=True, env=environment, check=True
    )
    return folder


def test_tensorboard_gives_what_was_logged(events):
    for folder in (events, events.parent):
        found = read(folder)
        assert found.keys() == VALUES.keys()
        for step, values in VALUES.items():
            assert found[step] == pytest.approx(values, rel=1e-6)
    assert Run.read(events).log.nonfinite() == {"actor/bad": [3]}


def test_wandb_gives_what_was_logged(offline):
    for folder in (offline, next(offline.glob("wandb/offline-run-*"))):
        assert read(folder) == VALUES
    assert Run.read(offline).log.nonfinite() == {"actor/bad": list(VALUES)}


def test_wandb_files_that_are_cut_or_corrupt(offline, tmp_path):
    content = next(offline.rglob("*.wandb")).read_bytes()
    assert len(content) > BLOCK
    path = tmp_path / "run-x.wandb"
    path.write_bytes(content[:-40])
    messages, torn = wandb_messages(path)
    assert torn
    assert messages
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(RunFolderError, match="checksum"):
        wandb_messages(path)
    path.write_bytes(b"something else")
    with pytest.raises(RunFolderError, match="no file of wandb"):
        wandb_messages(path)


def test_a_missing_package_is_named(offline, events, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb.proto", None)
    with pytest.raises(RunFolderError, match=r"pip install 'verl_tim\[wandb\]'"):
        read(offline)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(RunFolderError, match="pip install tensorboard"):
        read(events)


def test_several_runs_in_one_folder_are_refused(events):
    other = events.parent / "other"
    other.mkdir()
    next(events.iterdir()).rename(other / "events.out.tfevents.1")
    (events / "events.out.tfevents.2").touch()
    with pytest.raises(RunFolderError, match="holds 2 TensorBoard event folders: give one of them"):
        RunFolder(events.parent)


def test_a_metrics_file_alone_is_a_run(tmp_path):
    path = write_run(tmp_path / "run", steps=4) / "metrics.jsonl"
    moved = path.rename(tmp_path / "alone.jsonl")
    run = Run.read(moved)
    assert (run.name, run.steps, run.rollout) == ("alone", 4, "unknown")


def test_a_folder_with_a_metrics_file_of_another_name_names_it(tmp_path):
    """verl's file logger writes PROJECT/EXPERIMENT.jsonl."""
    path = write_run(tmp_path / "run", steps=4) / "metrics.jsonl"
    (tmp_path / "logs" / "project").mkdir(parents=True)
    path.rename(tmp_path / "logs" / "project" / "experiment.jsonl")
    with pytest.raises(RunFolderError, match=r"give the file itself, .*: project/experiment\.jsonl"):
        Run.read(tmp_path / "logs")


def test_runs_of_all_kinds_compare(events, offline, tmp_path):
    exact = write_run(tmp_path / "vexact", steps=6)
    comparison = compare([exact, events, offline], names=["vexact", "tb", "wb"])
    assert comparison.baseline.name == "vexact"
    by_run = {run: [(d.signal, d.step) for d in comparison.warnings if d.run == run] for run in ("tb", "wb")}
    assert by_run["tb"] == by_run["wb"]
    assert any(step == 1 for _, step in by_run["tb"])


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(run folder, what wandb was given of the same run): config with the manifest, after verl has filled in a few."""
    pytest.importorskip("wandb")
    root = tmp_path_factory.mktemp("told")
    filled = {"actor_rollout_ref.actor.optim.total_training_steps": -1, "transfer_queue.enable": False}
    run = write_run(root / "run", rollout="stock", steps=6, config=filled)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["tim"]["manifest"] = json.loads((run / "manifest.json").read_text())
    config["actor_rollout_ref"]["actor"]["optim"]["total_training_steps"] = 6
    config["transfer_queue"]["enable"] = True
    code = (
        "import json, sys, wandb\n"
        "given = json.loads(sys.stdin.read())\n"
        "wandb.init(project='p', name='run', config=given['config'], dir=sys.argv[1])\n"
        "for line in given['lines']:\n"
        "    wandb.log(line['data'], step=line['step'])\n"
        "wandb.finish()\n"
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (root / "wandb").mkdir()
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    given = json.dumps({"config": config, "lines": lines})
    command = [sys.executable, "-c", code, str(root / "wandb")]
    subprocess.run(command, input=given, text=True, env=environment, check=True)
    return run, root / "wandb"


def test_what_verl_fills_in_before_it_tells_a_tracker_is_no_difference(told):
    """The folder of a run and its wandb run are one run; a user's own change there still counts."""
    assert compare(told, names=["folder", "wandb"]).what.settings == []
    run, wandb = told
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("temperature: 1.0", "temperature: 0.7"))
    (found,) = compare([run, wandb], names=["folder", "wandb"]).what.settings
    assert found.key == "actor_rollout_ref.rollout.temperature"


def test_between_run_folders_every_key_counts(tmp_path):
    key = "actor_rollout_ref.actor.optim.total_training_steps"
    runs = [write_run(tmp_path / str(steps), steps=6, config={key: steps}) for steps in (6, 600)]
    assert [d.key for d in compare(runs).what.settings] == [key]


def test_a_baseline_is_made_from_what_a_tracker_was_told(told):
    of_run, of_wandb = (baseline_of([one]) for one in told)
    assert of_wandb.setup == of_run.setup
    assert of_wandb.metrics.keys() == of_run.metrics.keys()
    assert of_wandb.metrics["tim/delta_abs_mean"].mean == pytest.approx(of_run.metrics["tim/delta_abs_mean"].mean)


def test_the_run_folders_own_metrics_come_first(tmp_path, events):
    run = write_run(tmp_path / "run", steps=2)
    events.rename(run / "tensorboard")
    assert Run.read(run).steps == 2


def test_event_files_that_are_cut_or_corrupt(events):
    assert not Run.read(events).log.torn
    (file,) = events.glob("events.out.tfevents.*")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert Run.read(events).log.torn
    damaged = bytearray(whole)
    damaged[whole.index(b"tim/")] ^= 4
    file.write_bytes(damaged)
    with pytest.raises(RunFolderError, match=r"is corrupt: record \d+ of \d+"):
        Run.read(events)
