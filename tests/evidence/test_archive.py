"""What comes home is what the figures read, in archives no larger than asked for."""

import json
import tarfile

import pytest

from tests.evidence.conftest import write_matrix
from verl_tim.diagnosis.run import Run
from verl_tim.diagnosis.token_dump import dumped_steps
from verl_tim.evidence.archive import MIB, is_used, pack, unpack
from verl_tim.evidence.names import RunName
from verl_tim.evidence.runs import Evidence, EvidenceError, found_in
from verl_tim.evidence.tables import TABLES


def test_there_and_back(runs, tmp_path):
    packed = pack(runs, tmp_path / "out")
    assert len(packed.runs) == 10
    assert all(path.stat().st_size < 15 * MIB for path in packed.files)
    assert set(unpack(packed.files, tmp_path / "back")) == {path.name for path in runs.iterdir()}
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


def test_several_archives_hold_each_run_once(runs, tmp_path):
    one = pack(runs, tmp_path / "a", dump_steps=1, files=1)
    mib = one.files[0].stat().st_size / MIB / 3
    packed = pack(runs, tmp_path / "b", dump_steps=1, mib=mib, files=6)
    assert 3 <= len(packed.files) <= 6
    members = []
    for path in packed.files:
        with tarfile.open(path, "r:xz") as tar:
            members.append({name.split("/")[0] for name in tar.getnames()})
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
    assert unpack(early.files, tmp_path / "home")
    assert unpack(late.files, tmp_path / "home")
    assert unpack(early.files, tmp_path / "home") == []
    (name,) = early.runs
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


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "noise.tar.xz").write_bytes(b"no xz")
    with pytest.raises(EvidenceError, match="cannot be read"):
        unpack([tmp_path / "noise.tar.xz"], tmp_path)
    (tmp_path / "x").write_text("x")
    for inner, message in (("../x/y", "no file of a run folder"), ("other/metrics.jsonl", "holds no run")):
        with tarfile.open(tmp_path / "bad.tar.xz", "w:xz") as tar:
            tar.add(tmp_path / "x", inner)
        with pytest.raises(EvidenceError, match=message):
            unpack([tmp_path / "bad.tar.xz"], tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_a_folder_without_runs_says_what_to_give(tmp_path):
    with pytest.raises(EvidenceError, match="is no folder"):
        found_in(tmp_path / "missing")
    with pytest.raises(EvidenceError, match="holds no run of"):
        found_in(tmp_path)
