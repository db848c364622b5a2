"""What comes home is what the figures read, in archives no larger than asked for."""

import io
import json
import subprocess
import tarfile

import pytest
import yaml
from typer.testing import CliRunner

from tests.diagnosis.fake_dumps import none, write_dumps
from tests.diagnosis.fake_runs import write_run
from tests.evidence.conftest import write_matrix
from verl_tim.cli import app
from verl_tim.diagnosis.metric_log import RunFolderError
from verl_tim.diagnosis.run import Run
from verl_tim.diagnosis.token_dump import dumped_steps
from verl_tim.evidence.archive import MIB, pack, unpack
from verl_tim.evidence.names import RunName
from verl_tim.evidence.runs import Evidence, EvidenceError, found_in
from verl_tim.evidence.tables import TABLES
from verl_tim.evidence.used import is_used, thinned
from verl_tim.launch.errors import LaunchError


def test_there_and_back(runs, tmp_path):
    packed = pack(runs, tmp_path / "out")
    assert len(packed.runs) == 10
    assert all(path.stat().st_size < 15 * MIB for path in packed.files)
    assert set(unpack(packed.files, tmp_path / "back").written) == {path.name for path in runs.iterdir()}
    for name, folder in found_in(runs).items():
        back = tmp_path / "back" / folder.name
        for file in ("metrics.jsonl", "manifest.json", "attempts.jsonl"):
            assert (back / file).read_bytes() == (folder / file).read_bytes(), name
        assert dumped_steps(back) == dumped_steps(folder)
        assert not (back / "samples.jsonl").exists(), "texts stay behind"
        assert str(runs) not in (back / "config.yaml").read_text(), "and so do the machine's folders"
        assert Run.read(back).correction == Run.read(folder).correction


def test_the_metrics_that_figures_read_are_enough_for_them(runs, tmp_path):
    packed = pack(runs, tmp_path / "out", used_only=True, files=1)
    unpack(packed.files, tmp_path / "back")
    whole, thin = Evidence.read(runs), Evidence.read(tmp_path / "back")
    for name, make in TABLES.items():
        assert make(thin).markdown() == make(whole).markdown(), name
    (folder, *_) = (tmp_path / "back").iterdir()
    kept = set(Run.read(folder).log.names())
    assert kept < set(Run.read(runs / folder.name).log.names())
    assert all(map(is_used, kept))
    assert "actor/lr" not in kept
    assert "training/rollout_probs_diff_mean" not in kept


def test_dumps_are_thinned_until_all_of_it_fits(runs, tmp_path):
    whole = pack(runs, tmp_path / "a", used_only=True, files=1)
    size = whole.files[0].stat().st_size / MIB
    small = pack(runs, tmp_path / "b", used_only=True, files=1, mib=0.7 * size)
    assert small.files[0].stat().st_size <= 0.7 * size * MIB
    assert len(small.runs) == 10
    assert set(small.dump_steps.values()) <= {0, 1}
    with pytest.raises(EvidenceError, match=r"without token dumps.*--used"):
        pack(runs, tmp_path / "c", mib=0.001)


def test_of_dumps_that_figures_read_one_run_stands_for_its_seeds(runs, tmp_path):
    packed = pack(runs, tmp_path / "a", used_only=True, files=1)
    assert len(packed.runs) == 10
    assert len(packed.dump_steps) == 5
    assert {name.split("=")[1] for name in packed.dump_steps} == {"1"}, "the lowest seed of each variant"
    unpack(packed.files, tmp_path / "back")
    assert not dumped_steps(tmp_path / "back" / RUN.replace("seed=1", "seed=2"))
    assert len(pack(runs, tmp_path / "b", files=1).dump_steps) == 10


def test_what_does_not_fit_goes_one_step_at_a_time(tmp_path):
    root = write_matrix(tmp_path / "runs", variants=["vexact"], seeds=[1])
    write_dumps(root / RUN, none, seed=1, steps=4)
    sizes = [pack(root, tmp_path / "out", files=1, dump_steps=steps).files[0].stat().st_size for steps in range(5)]
    between = (sizes[3] + sizes[4]) / 2 / MIB
    assert pack(root, tmp_path / "out", files=1, mib=between).dump_steps == {RUN: 3}


def test_several_archives_hold_each_run_once(runs, tmp_path):
    one = pack(runs, tmp_path / "a", dump_steps=1, files=1)
    mib = one.files[0].stat().st_size / MIB / 3
    packed = pack(runs, tmp_path / "b", dump_steps=1, mib=mib, files=6)
    assert 3 <= len(packed.files) <= 6
    members = []
    for path in packed.files:
        with tarfile.open(path, "r:xz") as tar:
            members.append({name.split("/")[0] for name in tar.getnames() if "/" in name})
    assert sum(map(len, members)) == 10 == len(set.union(*members))
    again = pack(runs, tmp_path / "b", dump_steps=1, files=1)
    assert sorted((tmp_path / "b").iterdir()) == list(again.files), "those of an earlier call are gone"


def test_packing_some_of_them(runs, tmp_path):
    wanted = RunName("dense", "grpo", "vexact", 2)
    packed = pack(runs, tmp_path / "out", names=[wanted])
    assert packed.runs == (str(wanted),)
    with pytest.raises(EvidenceError, match="none of its runs"):
        pack(runs, tmp_path / "out", names=[RunName("moe", "grpo", "vexact", 1)])


def test_the_longer_run_stays(tmp_path):
    short = write_matrix(tmp_path / "short", variants=["vexact"], seeds=[1], steps=5)
    long = write_matrix(tmp_path / "long", variants=["vexact"], seeds=[1], steps=9)
    early, late = pack(short, tmp_path / "early"), pack(long, tmp_path / "late")
    (name,) = early.runs
    assert unpack(early.files, tmp_path / "home").written == (name,)
    assert unpack(late.files, tmp_path / "home").written == (name,)
    assert unpack(early.files, tmp_path / "home").kept == (name,)
    both = unpack([*late.files, *early.files], tmp_path / "other")
    assert (both.written, both.kept) == ((name,), ()), "whatever their order"
    assert Run.read(tmp_path / "other" / name).steps == 9
    assert Run.read(tmp_path / "home" / name).steps == 9


def test_a_resumed_run_comes_home_with_all_its_parts(tmp_path):
    root = write_matrix(tmp_path / "runs", variants=["vexact"], seeds=[1], steps=9)
    (folder,) = root.iterdir()
    half = write_matrix(tmp_path / "half", variants=["vexact"], seeds=[1], steps=9)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.1.jsonl").write_text("".join(lines[:6]))
    (folder / "metrics.jsonl").unlink()
    early = pack(root, tmp_path / "early")  # cut off, and the next attempt has logged nothing yet
    (folder / "metrics.jsonl").write_text("".join(lines[6:]))
    late = pack(root, tmp_path / "late")
    home = tmp_path / "home"
    for archives, steps in ((early, 5), (late, 9), (early, 9)):
        unpack(archives.files, home)
        assert Run.read(home / folder.name).steps == steps
    whole = Run.read(half / folder.name).log
    assert Run.read(home / folder.name).log.steps == whole.steps


def test_a_torn_last_line_does_not_stop_it(tmp_path):
    root = write_matrix(tmp_path / "runs", variants=["vexact"], seeds=[1], steps=5)
    (folder,) = root.iterdir()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "data": {"a"')
    unpack(pack(root, tmp_path / "out", used_only=True).files, tmp_path / "back")
    lines = (tmp_path / "back" / folder.name / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4, 5]


def archive_of(path, **members):
    """An archive with such members: bytes, or a TarInfo of another kind."""
    with tarfile.open(path, "w:xz") as tar:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            info.size = 0 if isinstance(content, tarfile.TarInfo) else len(content)
            tar.addfile(info, io.BytesIO(b"" if isinstance(content, tarfile.TarInfo) else content))
    return path


def link(kind, target):
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


RUN = "dense-grpo-vexact-data.seed=1"


@pytest.mark.parametrize(
    "members",
    [
        {"../x/metrics.jsonl": b"{}"},
        {f"/{RUN}/metrics.jsonl": b"{}"},
        {f"{RUN}/../metrics.jsonl": b"{}"},
        {f"{RUN}/tokens/../../../metrics.jsonl": b"{}"},
        {f"{RUN}/metrics.jsonl": link(tarfile.SYMTYPE, "/etc/passwd")},
        {f"{RUN}/metrics.jsonl": link(tarfile.LNKTYPE, "/etc/passwd")},
        {RUN: link(tarfile.SYMTYPE, "/tmp"), f"{RUN}/metrics.jsonl": b"{}"},
        {RUN: link(tarfile.DIRTYPE, "")},
        {f"{RUN}/tokens/step_000001.parquet": link(tarfile.FIFOTYPE, "")},
        {f"{RUN}/train.log": b"log"},
        {f"{RUN}/sitecustomize.py": b"import os"},
        {"other/metrics.jsonl": b"{}"},
        {"matrix.json/x": b"{}"},
    ],
)
def test_what_is_no_file_of_a_run_is_refused_and_nothing_written(tmp_path, members):
    root = write_matrix(tmp_path / "runs", variants=["vexact"], seeds=[2], steps=5)
    good = pack(root, tmp_path / "good").files
    bad = archive_of(tmp_path / "bad.tar.xz", **members, **{"matrix.json": b"{}"})
    with pytest.raises(EvidenceError, match="no file of a run"):
        unpack([*good, bad], tmp_path / "home")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("damage", ["noise", "flip", "half", "between two runs", "empty", "record"])
def test_a_damaged_archive_names_itself_and_nothing_is_written(tmp_path, damage):
    root = write_matrix(tmp_path / "runs", variants=["vexact", "vllm_tis"], seeds=[1], steps=5)
    whole = pack(root, tmp_path / "out", dump_steps=0).files[0]
    content = bytearray(whole.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
    found = {
        "noise": b"no xz",
        "flip": bytes(content),
        "half": bytes(content[: len(content) // 2]),
        # of several streams one behind the other the first ones are whole
        "between two runs": bytes(content[: content.index(b"YZ\xfd7zXZ") + 2]),
        "empty": b"",
        "record": archive_of(tmp_path / "x", **{"matrix.json": b"{"}).read_bytes(),
    }[damage]
    broken = tmp_path / "broken.tar.xz"
    broken.write_bytes(found)
    with pytest.raises(EvidenceError, match=r"broken\.tar\.xz (cannot be read|was cut off).*bring it over again"):
        unpack([whole, broken], tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_what_ended_well_comes_along(tmp_path):
    from verl_tim.launch.record import read_record, write_record

    root = write_matrix(tmp_path / "runs", variants=["vexact", "vllm_tis"], seeds=[1, 2], steps=5)
    words = ["recipe=evidence_grpo", "data.seed=1", f"tim.run_dir='{root}/{RUN}'"]
    write_record(root, {RUN: words, "another": ["x"]})
    home = tmp_path / "home"
    home.mkdir()
    write_record(home, {"of an earlier lease": ["y"]})
    unpack(pack(root, tmp_path / "out").files, home)
    assert read_record(home) == {"of an earlier lease": ["y"], RUN: words[:2]}
    unpack(pack(root, tmp_path / "less", names=[RunName.parse(RUN.replace("=1", "=2"))]).files, tmp_path / "new")
    assert read_record(tmp_path / "new") == {}
    (root / "matrix.json").write_text("{")
    with pytest.raises(LaunchError, match=r"matrix\.json"):
        pack(root, tmp_path / "out")


def test_a_run_with_other_settings_takes_no_ones_place(tmp_path):
    one = write_matrix(tmp_path / "one", variants=["vexact"], seeds=[1], steps=5)
    other = tmp_path / "other" / RUN
    write_run(other, rollout="vexact", steps=9, config={"actor_rollout_ref.actor.optim.lr": 1e-2})
    home = tmp_path / "home"
    unpack(pack(one, tmp_path / "a").files, home)
    with pytest.raises(EvidenceError, match=r"other settings.*optim\.lr is 0\.01, there it is 0\.001"):
        unpack(pack(tmp_path / "other", tmp_path / "b").files, home)
    assert Run.read(home / RUN).steps == 5


def test_a_longer_attempt_leaves_nothing_of_the_shorter_one(tmp_path):
    first = write_matrix(tmp_path / "first", variants=["vexact"], seeds=[1], steps=9)
    second = write_matrix(tmp_path / "second", variants=["vexact"], seeds=[1], steps=9)
    path = first / RUN / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    (second / RUN / "tokens" / "step_000001.parquet").unlink()
    home = tmp_path / "home"
    unpack(pack(first, tmp_path / "a").files, home)
    (home / RUN / "notes.md").write_text("mine")
    unpack(pack(second, tmp_path / "b").files, home)
    assert dumped_steps(home / RUN) == [2]
    assert (home / RUN / "notes.md").read_text() == "mine"


def test_paths_of_a_machine_are_taken_out_where_they_are_paths(tmp_path, monkeypatch):
    root = write_matrix(tmp_path / "runs", variants=["vexact"], seeds=[1], steps=3)
    home = tmp_path / "me"
    path = root / RUN / "config.yaml"
    settings = {
        **yaml.safe_load(path.read_text()),
        "cache": f"{home}/.cache/x", "alone": str(home), "longer": f"{home}less/x", "inside": f"/mnt{home}/x",
    }  # fmt: skip
    path.write_text(yaml.safe_dump(settings))

    def packed(named):
        monkeypatch.setenv("HOME", str(named))
        unpack(pack(root, tmp_path / "out").files, tmp_path / named.name)
        return yaml.safe_load((tmp_path / named.name / RUN / "config.yaml").read_text())

    found = packed(home)
    assert found["cache"] == "~/.cache/x"
    assert {key: found[key] for key in ("alone", "longer", "inside")} == {
        key: settings[key] for key in ("alone", "longer", "inside")
    }
    assert found["tim"]["run_dir"] == f"runs/evidence/{RUN}"
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/")
    unpack(pack(root, tmp_path / "out").files, tmp_path / "root")
    found = yaml.safe_load((tmp_path / "root" / RUN / "config.yaml").read_text())
    assert found["cache"] == settings["cache"], "/ is the beginning of every path"


def test_thinning_keeps_whole_numbers_gaps_and_says_what_is_damaged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    data = {"tim/valid_tokens": 123456789, "tim/k3": 1.23456789e-7, "critic/score/mean": None, "actor/lr": 1.0}
    path.write_text(json.dumps({"step": 1, "data": data}) + '\n{"step": 2, "da')
    (line,) = thinned(path).decode().splitlines()
    assert json.loads(line) == {
        "step": 1, "data": {"tim/valid_tokens": 123456789, "tim/k3": 1.23457e-7, "critic/score/mean": None},
    }  # fmt: skip
    path.write_text('{"step": 1, "da\n{"step": 2, "data": {}}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl:1"):
        thinned(path)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_archives_of_before(runs, tmp_path, small_disk):
    first = pack(runs, small_disk, dump_steps=0, used_only=True, names=[RunName.parse(RUN)])
    before = first.files[0].read_bytes()
    with pytest.raises(OSError, match="No space left"):
        pack(runs, small_disk, dump_steps=2)
    assert [path.name for path in small_disk.iterdir()] == ["evidence-1.tar.xz"]
    assert first.files[0].read_bytes() == before
    result = CliRunner().invoke(app, ["evidence", "pack", str(runs), "--out", str(small_disk)])
    assert result.exit_code == 2, result.output
    assert "No space left" in result.output


def test_a_folder_without_runs_says_what_to_give(tmp_path):
    with pytest.raises(EvidenceError, match="is no folder"):
        found_in(tmp_path / "missing")
    with pytest.raises(EvidenceError, match="holds no run of"):
        found_in(tmp_path)
    (tmp_path / RUN).write_text("a file with a run's name")
    (tmp_path / RUN.replace("=1", "=2")).mkdir()
    (tmp_path / "notes").mkdir()
    with pytest.raises(EvidenceError, match="holds no run of"):
        found_in(tmp_path)
