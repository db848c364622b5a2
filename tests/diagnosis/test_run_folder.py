"""Run folders: claimed once, read tolerantly where a writer stopped, loudly where a file is corrupt."""

from __future__ import annotations

import json

import pytest
from fake_runs import write_run

from verl_tim.diagnosis.manifest import ManifestError
from verl_tim.diagnosis.run_folder import RunFolder, RunFolderError, Sample, attempt_number

CONFIG = {"tim": {"run_dir": "x"}, "trainer": {"total_training_steps": 5, "lr": 1e-3}}


def metrics_file(folder, *lines, end="\n"):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + end, encoding="utf-8")


def line(step, **data):
    return {"step": step, "data": data}


@pytest.fixture
def folder(tmp_path):
    RunFolder.create(tmp_path / "run", CONFIG)
    return tmp_path / "run"


def test_create_writes_the_config_and_keeps_other_files(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "main.log").write_text("hydra")
    created = RunFolder.create(tmp_path / "run", CONFIG)
    assert created.config() == CONFIG
    assert created.manifest() is None
    assert created.samples() == []
    assert (tmp_path / "run" / "main.log").read_text() == "hydra"


@pytest.mark.parametrize("file", ["config.yaml", "manifest.json", "metrics.jsonl", "samples.jsonl"])
def test_a_folder_that_holds_a_run_is_refused_with_the_remedy(tmp_path, file):
    (tmp_path / file).write_text('{"step": 3, "data": {}}\n' if file == "metrics.jsonl" else "{}")
    with pytest.raises(RunFolderError) as caught:
        RunFolder.create(tmp_path, CONFIG)
    message = str(caught.value)
    assert f"tim.run_dir={tmp_path}" in message
    assert "choose another tim.run_dir" in message
    assert file in message
    assert (tmp_path / file).exists()
    if file == "metrics.jsonl":
        assert "last step 3" in message


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path / "run", CONFIG)


def test_the_same_run_may_resume_and_keeps_its_earlier_metrics(folder):
    metrics_file(folder, line(1, a=1.0), line(2, a=2.0), line(3, a=3.0))
    (folder / "manifest.json").write_text("{}")
    longer = {**CONFIG, "trainer": {**CONFIG["trainer"], "total_training_steps": 9}}
    resumed = RunFolder.create(folder, longer, resume=True)
    assert resumed.config() == longer
    # verl's file logger truncates its file when the resumed run starts; it redoes step 3.
    metrics_file(folder, line(3, a=30.0), line(4, a=40.0))
    assert resumed.metrics().series("a") == ([1, 2, 3, 4], [1.0, 2.0, 30.0, 40.0])
    assert (folder / "manifest.1.json").exists()
    RunFolder.create(folder, longer, resume=True)
    metrics_file(folder, line(5, a=50.0))
    assert resumed.metrics().series("a") == ([1, 2, 3, 4, 5], [1.0, 2.0, 30.0, 40.0, 50.0])
    assert sorted(p.name for p in folder.glob("metrics*")) == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]


def test_what_a_killed_attempt_did_after_its_checkpoint_is_left_out(folder):
    """It died in step 4 and goes on from the checkpoint of step 1; the second attempt dies in step 3."""
    metrics_file(folder, line(1, a=1.0), line(2, a=2.0, only_then=1.0), line(3, a=3.0))
    run = RunFolder(folder)
    run.add_samples(Sample(step=step, prompt=f"p{step}", response="first") for step in (1, 1, 2, 3, 4))
    (folder / "train.log").write_text("first")
    RunFolder.create(folder, CONFIG, resume=True)
    # until the new attempt has logged, the old one is what there is
    assert run.metrics().series("a") == ([1, 2, 3], [1.0, 2.0, 3.0])
    assert [sample.step for sample in run.samples()] == [1, 1, 2, 3, 4]
    metrics_file(folder, line(1, val=0.5), line(2, a=20.0))
    run.add_samples([Sample(step=2, prompt="p2", response="second")])
    assert run.metrics().series("a") == ([1, 2], [1.0, 20.0])
    assert run.metrics().series("val") == ([1], [0.5])
    assert [(sample.step, sample.response) for sample in run.samples()] == [(1, "first"), (1, "first"), (2, "second")]
    assert (folder / "train.1.log").read_text() == "first"
    assert attempt_number(folder) == 2


def test_another_run_may_not_resume(folder):
    other = {**CONFIG, "trainer": {**CONFIG["trainer"], "lr": 1e-4}}
    with pytest.raises(RunFolderError, match=r"trainer\.lr: 0\.001 then, 0\.0001 now"):
        RunFolder.create(folder, other, resume=True)
    assert RunFolder(folder).config() == CONFIG
    (folder / "config.yaml").unlink()
    (folder / "samples.jsonl").write_text("")
    with pytest.raises(RunFolderError, match=r"without config\.yaml"):
        RunFolder.create(folder, CONFIG, resume=True)


def test_resume_of_nothing_is_a_new_run(tmp_path):
    assert RunFolder.create(tmp_path / "new", CONFIG, resume=True).config() == CONFIG


def test_reading_what_is_not_there(tmp_path):
    with pytest.raises(RunFolderError, match="does not exist"):
        RunFolder(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match="holds no run"):
        RunFolder(tmp_path)
    RunFolder.create(tmp_path, CONFIG)
    with pytest.raises(RunFolderError, match=r"trainer\.logger must list 'file'"):
        RunFolder(tmp_path).metrics()


def test_metrics_are_ordered_by_step_and_merged(folder):
    metrics_file(folder, line(0, val=0.1), line(2, a=2.0), line(1, a=1), line(2, b=5.0, a=2.5))
    log = RunFolder(folder).metrics()
    assert log.steps == [0, 1, 2]
    assert log.names() == ["a", "b", "val"]
    assert log.series("a") == ([1, 2], [1.0, 2.5])
    assert log.series("nothing") == ([], [])


def test_what_is_not_finite_is_left_out_and_told(folder):
    metrics_file(
        folder, '{"step": 1, "data": {"a": null, "b": NaN, "c": 1.5, "d": "text", "e": [1], "f": true}}', line(2, a=3)
    )
    log = RunFolder(folder).metrics()
    assert log.names() == ["a", "c", "f"]
    assert log.nonfinite() == {"a": [1], "b": [1]}
    # A later value for the same step replaces it.
    metrics_file(folder, line(1, a=None), line(1, a=2.0))
    assert RunFolder(folder).metrics().nonfinite() == {}


@pytest.mark.parametrize("cut", [1, 12, 20])
def test_a_torn_last_line_is_left_out(folder, cut):
    metrics_file(folder, line(1, a=1.0), json.dumps(line(2, a=2.0))[:-cut], end="")
    log = RunFolder(folder).metrics()
    assert log.torn
    assert log.series("a") == ([1], [1.0])


def test_a_complete_last_line_without_newline_counts(folder):
    metrics_file(folder, line(1, a=1.0), line(2, a=2.0), end="")
    log = RunFolder(folder).metrics()
    assert not log.torn
    assert log.steps == [1, 2]


def test_an_empty_file_is_a_run_that_logged_nothing_yet(folder):
    (folder / "metrics.jsonl").write_text("")
    assert RunFolder(folder).metrics().records == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"step": 2, "da', "metrics.jsonl:2 is not JSON"),
        ("[1, 2]", "metrics.jsonl:2 must be a JSON object"),
        ('{"data": {}}', "metrics.jsonl:2 is not a metrics line"),
        ('{"step": "2", "data": {}}', "metrics.jsonl:2 is not a metrics line"),
        ('{"step": 2, "data": [1]}', "metrics.jsonl:2 is not a metrics line"),
    ],
)
def test_a_corrupt_line_is_loud(folder, bad, message):
    metrics_file(folder, line(1, a=1.0), bad, line(3, a=3.0))
    with pytest.raises(RunFolderError, match=message):
        RunFolder(folder).metrics()
    # Corrupt with its newline is not torn, even as the last line.
    metrics_file(folder, line(1, a=1.0), bad)
    with pytest.raises(RunFolderError, match=message):
        RunFolder(folder).metrics()


def test_samples_round_trip(folder):
    run = RunFolder(folder)
    samples = [
        Sample(step=1, prompt="1+1=", response="2\n</s>", reward=1.0, uid="7", ground_truth="2"),
        Sample(step=1, prompt="é?", response="", reward=None, split="validation", extra={"length": 3}),
    ]
    run.add_samples(samples[:1])
    run.add_samples(samples[1:])
    assert run.samples() == samples
    with open(folder / "samples.jsonl", "a") as file:
        file.write('{"step": 2, "prompt": "a", "response": "b", "finish_reason": "stop"}\n{"step": 3, "pro')
    assert run.samples()[2] == Sample(step=2, prompt="a", response="b", extra={"finish_reason": "stop"})
    assert len(run.samples()) == 3
    with open(folder / "samples.jsonl", "a") as file:
        file.write("\n")
    with pytest.raises(RunFolderError, match=r"samples\.jsonl:4 is not JSON"):
        run.samples()


def test_a_sample_line_without_its_keys_is_loud(folder):
    (folder / "samples.jsonl").write_text('{"step": 1, "prompt": "x"}\n')
    with pytest.raises(RunFolderError, match=r"samples\.jsonl:1 lacks response"):
        RunFolder(folder).samples()


def test_a_broken_config_is_loud(folder):
    (folder / "config.yaml").write_text("- 1\n")
    with pytest.raises(RunFolderError, match="must hold a mapping"):
        RunFolder(folder).config()
    (folder / "config.yaml").write_text("a: [1\n")
    with pytest.raises(RunFolderError, match="is not YAML"):
        RunFolder(folder).config()


def test_verls_file_logger_writes_what_is_read(folder, monkeypatch):
    """The line format is verl's own; verl_tim.diagnosis does not import verl, its tests may."""
    tracking = pytest.importorskip("verl.utils.tracking")
    numpy = pytest.importorskip("numpy")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
    logger = tracking.FileLogger("project", "experiment")
    logger.log({"critic/score/mean": numpy.float64(0.5), "nan": float("nan"), "n": numpy.int32(3)}, step=1)
    logger.finish()
    log = RunFolder(folder).metrics()
    assert log.records[0].data == {"critic/score/mean": 0.5, "n": 3.0}
    assert log.nonfinite() == {"nan": [1]}


def test_fake_runs_are_whole(tmp_path):
    run = RunFolder(write_run(tmp_path / "vexact", steps=4))
    assert run.metrics().steps == [0, 1, 2, 3, 4]
    assert run.manifest().run.rollout == "vexact"
    assert len(run.samples()) == 12


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"step": "1"}, "step must be of type int"), ({"response": None}, "response"), ({"extra": "x"}, "extra")],
)
def test_a_sample_of_other_types_is_refused(folder, changed, named):
    entry = {"step": 1, "prompt": "p", "response": "r", **changed}
    (folder / "samples.jsonl").write_text(json.dumps(entry) + "\n")
    with pytest.raises(RunFolderError, match=f"samples.jsonl:1.*{named}"):
        RunFolder(folder).samples()


def test_files_that_are_not_utf8_are_named(folder):
    (folder / "config.yaml").write_bytes(b"a: \xff\n")
    (folder / "manifest.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(RunFolderError, match=r"config\.yaml is not YAML"):
        RunFolder(folder).config()
    with pytest.raises(ManifestError, match=r"manifest\.json is not JSON"):
        RunFolder(folder).manifest()


@pytest.mark.parametrize("text", ['{"step": 1, "data": {"a": 1%s}}' % ("0" * 400), '{"step": 9999999999, "data": {}}'])
def test_numbers_beyond_their_types_are_refused_with_their_line(folder, text):
    metrics_file(folder, line(0, a=1.0), text)
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl:2"):
        RunFolder(folder).metrics()
