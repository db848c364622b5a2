"""`verl-tim compare --wandb`: page and files as an artifact and a panel, in the project and the group of the runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_runs import write_run

from verl_tim.diagnosis.run import Run
from verl_tim.diagnosis.trackers import wandb_file, wandb_messages
from verl_tim.diagnosis.wandb_report import WandbReportError, artifact_name, group_of, project_of

pytest.importorskip("wandb")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [write_run(root / "vexact", steps=6), write_run(root / "stock", rollout="stock", steps=6)]


@pytest.fixture(scope="module")
def sent(runs, tmp_path_factory):
    """(folder, records) of the comparison, sent offline; any network would fail."""
    from wandb.proto import wandb_internal_pb2

    folder = tmp_path_factory.mktemp("out")
    dead = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **dead, "WANDB_MODE": "offline", "HOME": str(folder / "home")}
    words = ["compare", *map(str, runs), "--out", str(folder), "--wandb", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "verl_tim.cli", *words], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["early_warning"]["baseline"] == "vexact"
    messages, torn = wandb_messages(wandb_file(folder / "wandb"))
    assert not torn
    return folder, [wandb_internal_pb2.Record.FromString(content) for content in messages]


def test_the_run_lies_beside_those_that_it_compares(sent):
    (run,) = (record.run for record in sent[1] if record.WhichOneof("record_type") == "run")
    assert (run.project, run.run_group, run.job_type) == ("verl_tim", "cpu_grpo", "compare")
    assert run.display_name == "compare vexact, stock"
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["runs"], config["baseline"]) == (["vexact", "stock"], "vexact")


def test_page_and_numbers_are_an_artifact(sent):
    folder, records = sent
    logged = [
        r.request.log_artifact.artifact for r in records if r.request.WhichOneof("request_type") == "log_artifact"
    ]
    logged += [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    (report,) = (artifact for artifact in logged if artifact.type == "report")
    assert report.name == "compare-cpu_grpo"
    files = {entry.path: entry.local_path for entry in report.manifest.contents}
    # what will be sent is the very file that the command wrote
    assert files == {name: str(folder / name) for name in ("compare.json", "compare.html")}


def test_the_page_is_a_panel(sent):
    folder, records = sent
    values = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            values |= {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
    assert values["compare/_type"] == "html-file"
    (panel,) = (folder / "wandb").glob(f"offline-run-*/files/{values['compare/path']}")
    assert panel.read_text() == (folder / "compare.html").read_text()
    (table,) = (folder / "wandb").glob(f"offline-run-*/files/{values['signals/path']}")
    assert ["stock", "|d| max", 1, "left"] in json.loads(table.read_text())["data"]


def test_projects_and_groups(runs):
    one, other = (Run.read(path) for path in runs)
    elsewhere = replace(other, config={"trainer": {"project_name": "p"}, "tim": {"tracking": {"group": "g"}}})
    assert (project_of([one, other]), group_of([one, other])) == ("verl_tim", "cpu_grpo")
    assert group_of([one, elsewhere]) is None
    assert group_of([elsewhere]) == "g"
    with pytest.raises(WandbReportError, match=r"several projects \(p, verl_tim\).*--wandb-project"):
        project_of([one, elsewhere])
    with pytest.raises(WandbReportError, match=r"names its project.*--wandb-project"):
        project_of([replace(one, config=None)])


def test_names_that_wandb_allows():
    assert artifact_name("a b/c") == "compare-a_b_c"
    assert artifact_name(None) == "compare"
