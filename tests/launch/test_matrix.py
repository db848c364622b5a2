"""A matrix is expanded as it says, checked as a whole, and run one process after another."""

import itertools
import json
import subprocess
import sys
from importlib import resources

import pytest
from omegaconf import OmegaConf

from verl_tim.launch import prepare, start
from verl_tim.launch.checks import correction as check_correction
from verl_tim.launch.compose import compose_config, hydra_for
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.matrix import Cell, Matrix, finished, matrix_of, prepared, record, run_all, unfinished
from verl_tim.launch.recipes import RECIPES_PACKAGE, find_recipe
from verl_tim.launch.record import RECORD

NODE = "algorithm.rollout_correction"
CAPS, BOUNDS = ("1.5", "2", "5"), ("0.0001", "0.001", "0.01")


@pytest.fixture(scope="module")
def paper():
    return matrix_of(find_recipe("dense_grpo"), ["+matrix=paper", "tim.run_dir=runs/p", "data.seed=7"])


@pytest.fixture(scope="module")
def composed(paper):
    """name -> the resolved config of every run of the paper's matrix."""
    with hydra_for(paper.recipe):
        configs = {cell.name: compose_config(paper.recipe, cell.overrides) for cell in paper.cells}
    for config in configs.values():
        prepare.absolute_paths(config)
        prepare.resolve(config)
    return configs


def test_the_papers_matrix_has_every_run_of_it(composed):
    of_engines = {"vexact", "vllm_recompute", "vllm_bypass", "vllm_invariant"}
    parts = itertools.product(("corr", "ppo"), ("k1", "k3"), ("mean", "sum"))
    rejections = {f"reject_{signal}_{kind}_{reading}" for signal, kind, reading in parts}
    both = {f"tis_{reading}_tok{cap}_seq{x}" for reading in ("mean", "sum") for cap in CAPS for x in BOUNDS}
    assert set(composed) == of_engines | rejections | both | {"tis_product_tok2_seq0.001"}


def test_every_run_of_it_composes_with_what_its_name_says(composed):
    for name, config in composed.items():
        correction, chosen = config.algorithm.rollout_correction, config.tim.choices
        assert list(check_correction.check(config)) == [], name
        assert config.data.seed == 7
        assert (config.trainer.experiment_name, config.tim.run_dir.rpartition("/")[2]) == (name, name)
        rollout = {"vexact": "vexact", "vllm_invariant": "vllm_invariant"}.get(name, "vllm")
        assert chosen.rollout == rollout
        if name.startswith("reject"):
            _, signal, kind, reading = name.split("_")
            assert correction.rollout_rs_signal == f"r_{signal}"
            assert (correction.rollout_is, correction.rollout_rs) == (None, f"seq_{reading}_{kind}")
            bound = correction.rollout_rs_threshold
            low, high = bound if kind == "k1" else (None, bound)
            assert high == pytest.approx(1.0010005001667084 if kind == "k1" else 0.001, rel=1e-15)
            assert kind == "k3" or low * high == pytest.approx(1, rel=1e-15)
        elif name.startswith("tis"):
            _, reading, cap, bound = name.split("_")
            assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", float(cap.removeprefix("tok")))
            expected = float(bound.removeprefix("seq"))
            if reading == "product":
                assert (correction.rollout_rs, list(correction.rollout_rs_threshold)) == (
                    "seq_sum_k1",
                    [expected, None],
                )
            else:
                assert (correction.rollout_rs, correction.rollout_rs_threshold) == (f"seq_{reading}_k3", expected)
        else:
            assert (correction.rollout_is, correction.rollout_rs) == (None, None)
            assert correction.bypass_mode is (name == "vllm_bypass")


def test_no_two_runs_are_the_same(composed):
    def without_names(config):
        plain = OmegaConf.to_container(config, throw_on_missing=False)
        plain["tim"].pop("run_dir")
        plain["tim"]["choices"].pop("correction")
        text = json.dumps(plain, sort_keys=True)
        text = text.replace(config.tim.run_dir, "")
        return text.replace(f'"experiment_name": "{config.trainer.experiment_name}"', "")

    assert len({without_names(config) for config in composed.values()}) == len(composed)


def names(*overrides, recipe="cpu_grpo"):
    return [cell.name for cell in matrix_of(find_recipe(recipe), list(overrides)).cells]


def test_patterns_pick_runs_and_swept_values_multiply_them():
    only = "tim.only=[vexact,tis_sum_tok5_*]"
    picked = ["vexact", *(f"tis_sum_tok5_seq{bound}" for bound in BOUNDS)]
    assert names("+matrix=paper", only) == picked
    assert names("+matrix=paper", only, "data.seed=1,2") == [f"{n}-data.seed={s}" for s in (1, 2) for n in picked]
    assert names("rollout=vexact,stock", "data.seed=range(3)") == [
        f"rollout={rollout}-data.seed={seed}" for rollout in ("vexact", "stock") for seed in range(3)
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["+matrix=papr"], "matrix", "'paper'"),
        (["+matrix=paper", "tim.only=vexat"], "tim.only", "'vexact'"),
        (["+matrix=paper", "data.sed=1"], "data.sed", "data.seed"),
        (["+matrix=paper", "++tim.matrix.vexact=rollout"], "tim.matrix.vexact", "list of overrides"),
        (["data.seed=[1,"], "data.seed=[1,", "KEY=VALUE"),
    ],
)
def test_what_is_not_there_is_named(overrides, key, words):
    with pytest.raises(LaunchError) as caught:
        matrix_of(find_recipe("cpu_grpo"), overrides)
    (finding,) = caught.value.findings
    assert finding.key == key
    assert words in finding.remedy


@pytest.mark.parametrize("word", ["model=tiny_qwen3", "rollout=stock"])
def test_words_that_the_runs_themselves_overrule_are_refused(word):
    with pytest.raises(LaunchError) as caught:
        matrix_of(find_recipe("evidence_grpo"), ["+matrix=evidence", "tim.only=dense-*", word])
    (finding,) = caught.value.findings
    assert finding.key == word.partition("=")[0]
    assert f"{word} would have no effect on dense-grpo-vexact" in finding.problem
    # what a run says itself may be said again
    same = ["+matrix=evidence", "tim.only=dense-*", "model=evidence_qwen3", "task=chain_sum"]
    assert len(matrix_of(find_recipe("evidence_grpo"), same).cells) == 30


def test_what_several_runs_begin_with_is_looked_for_once(tmp_path, monkeypatch):
    """Of sixty runs each would read a hundred megabytes, and do every check twice."""
    done = []

    def make_missing(config, *, progress=True):
        done.append(config.tim.model.kind)
        config.data.train_files, config.data.val_files = "a.parquet", "b.parquet"
        config.actor_rollout_ref.model.path = config.tim.model.kind

    monkeypatch.setattr(prepare, "make_missing", make_missing)
    monkeypatch.setattr(start, "all_findings", lambda config, **_: done.append("checked") or [])
    words = ["+matrix=evidence", "cluster=cpu", "tim.only=[dense-*-vexact,moe-grpo-vexact]", f"tim.run_dir={tmp_path}"]
    configs = prepared(matrix_of(find_recipe("evidence_grpo"), words), start.ready_of_several())
    assert len(configs) == 9
    assert sorted(set(done)) == ["checked", "qwen3", "qwen3_moe"]
    assert (done.count("qwen3"), done.count("qwen3_moe"), done.count("checked")) == (1, 1, 9 + 2)
    for name, config in configs.items():
        kind = "qwen3_moe" if name.startswith("moe") else "qwen3"
        assert config.actor_rollout_ref.model.path == kind
        assert config.data.train_files == "a.parquet"


def test_other_settings_or_another_cache_are_made_apart(tmp_path):
    def wanted(*words):
        (cell,) = matrix_of(find_recipe("cpu_grpo"), list(words)).cells
        return prepare.to_make(start.composed_of(find_recipe("cpu_grpo"), cell.overrides))

    plain = wanted("data.seed=1")
    assert plain == wanted("data.seed=2", "rollout=stock")
    others = [wanted(f"tim.cache_dir={tmp_path}"), wanted("tim.model.seed=1"), wanted("data.train_files=a.parquet")]
    assert len({plain, *others}) == 4
    assert wanted("data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m") == ""


def test_a_matrix_of_ones_own_stands_beside_the_recipe(tmp_path):
    source = resources.files(RECIPES_PACKAGE).joinpath("cpu_grpo", "cpu_grpo.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(source)
    (tmp_path / "matrix").mkdir()
    (tmp_path / "matrix" / "pair.yaml").write_text(
        "# @package _global_\ntim: {matrix: {exact: [rollout=vexact], stock: [rollout=stock, data.seed=3]}}\n"
    )
    matrix = matrix_of(find_recipe(str(tmp_path / "mine.yaml")), ["+matrix=pair", f"tim.run_dir={tmp_path}/runs"])
    assert [(cell.name, cell.overrides[:-3]) for cell in matrix.cells] == [
        ("exact", ("rollout=vexact",)),
        ("stock", ("rollout=stock", "data.seed=3")),
    ]
    with hydra_for(matrix.recipe):
        config = compose_config(matrix.recipe, matrix.cells[1].overrides)
    assert (config.tim.run_dir, config.data.seed) == (f"{tmp_path}/runs/stock", 3)


def test_cells_may_share_lists_and_name_their_recipe(tmp_path):
    source = resources.files(RECIPES_PACKAGE).joinpath("cpu_grpo", "cpu_grpo.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(source)
    (tmp_path / "matrix").mkdir()
    (tmp_path / "matrix" / "shared.yaml").write_text(
        "# @package _global_\ntim:\n  matrix:\n"
        "    a: [&both [&one [data.seed=3], trainer.test_freq=5], rollout=vexact]\n"
        "    b: [*both, recipe=cpu_reinforce, rollout=stock]\n"
    )
    words = ["+matrix=shared", f"tim.run_dir={tmp_path}/runs"]
    a, b = matrix_of(find_recipe(str(tmp_path / "mine.yaml")), words).cells
    assert a.overrides[:-3] == ("data.seed=3", "trainer.test_freq=5", "rollout=vexact")
    assert a.recipe is None
    assert b.recipe == find_recipe("cpu_reinforce")
    assert b.words[:4] == ["recipe=cpu_reinforce", "data.seed=3", "trainer.test_freq=5", "rollout=stock"]
    seen = {}
    matrix = Matrix(find_recipe("cpu_grpo"), tmp_path, (a, b))
    prepared(matrix, lambda recipe, overrides: seen.setdefault(recipe.name, OmegaConf.create({})))
    assert set(seen) == {"cpu_grpo", "cpu_reinforce"}


def test_a_matrix_has_a_sweep_of_its_own_that_the_command_line_may_narrow():
    only = "tim.only=moe-grpo-vexact"

    def seeds(*more):
        matrix = matrix_of(find_recipe("evidence_grpo"), ["+matrix=evidence", only, *more])
        return {cell.name.removeprefix("moe-grpo-vexact"): cell.overrides for cell in matrix.cells}

    assert list(seeds()) == [f"-data.seed={n}" for n in (1, 2, 3)]
    assert list(seeds("data.seed=2")) == ["-data.seed=2"], "the same name as in the whole"
    assert seeds("data.seed=2")["-data.seed=2"] == seeds()["-data.seed=2"]
    assert list(seeds("data.seed=5,6")) == ["-data.seed=5", "-data.seed=6"]
    assert list(seeds("data.seed=4", "trainer.test_freq=5,6")) == [
        f"-trainer.test_freq={n}-data.seed=4" for n in (5, 6)
    ]


@pytest.fixture
def matrix(tmp_path):
    return Matrix(find_recipe("cpu_grpo"), tmp_path, tuple(Cell(name, (f"data.seed={name}",)) for name in "123"))


def test_nothing_starts_while_one_run_cannot(matrix):
    def ready(recipe, overrides):
        if overrides != ("data.seed=2",):
            raise LaunchError.of("data.seed", "is odd", "take an even one")
        return OmegaConf.create({})

    with pytest.raises(LaunchError) as caught:
        prepared(matrix, ready)
    (finding,) = caught.value.findings
    assert finding.problem == "is odd (in 1, 3)"
    assert finding.remedy == "take an even one; or leave those runs out, by tim.only", "the others could be done"

    def none_ready(recipe, overrides):
        raise LaunchError.of("data.seed", "is odd", "take an even one")

    with pytest.raises(LaunchError) as caught:
        prepared(matrix, none_ready)
    assert caught.value.findings[0].remedy == "take an even one"


def test_a_failure_keeps_none_from_running_and_a_second_start_does_what_is_left(matrix):
    def run_of(codes):
        def run(config, name):
            ran.append(name)
            return codes[name]

        return run

    def ready(recipe, overrides):
        return OmegaConf.create({"tim": {"run_dir": "r"}})

    ran, said = [], []
    assert run_all(matrix, prepared(matrix, ready), run_of({"1": 0, "2": 7, "3": 0}), said.append) == 7
    assert ran == ["1", "2", "3"]
    assert any("2 ended with exit code 7" in line for line in said)
    assert set(finished(matrix)) == {"1", "3"} == set(json.loads((matrix.folder / RECORD).read_text()))
    ran.clear()
    assert run_all(matrix, prepared(matrix, ready), run_of({"2": 0}), said.append) == 0
    assert ran == ["2"]
    assert prepared(matrix, ready) == {}
    # another value is another run
    other = Matrix(matrix.recipe, matrix.folder, (Cell("1", ("data.seed=4",)),))
    assert list(prepared(other, ready)) == ["1"]


def test_a_result_is_shown_once_the_run_is_written_down(matrix):
    configs = {cell.name: OmegaConf.create({"tim": {"run_dir": "r"}}) for cell in matrix.cells}

    def show(name):
        shown.append((name, name in finished(matrix)))
        if name == "2":
            raise SystemExit(74)

    shown = []
    with pytest.raises(SystemExit):
        run_all(matrix, configs, lambda config, name: 5 if name == "1" else 0, lambda line: None, show)
    assert shown == [("1", False), ("2", True)]
    assert set(finished(matrix)) == {"2"}


def test_a_record_that_cannot_be_written_keeps_no_run_from_running(matrix, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl_tim.launch.matrix.write_record", refuse)
    configs = {cell.name: OmegaConf.create({"tim": {"run_dir": "r"}}) for cell in matrix.cells}
    ran, said = [], []
    assert run_all(matrix, configs, lambda config, name: ran.append(name) or 0, said.append) == 0
    assert ran == ["1", "2", "3"]
    assert sum("not written down" in line for line in said) == 3


def test_a_run_that_cannot_be_started_keeps_none_from_running(matrix):
    def run(config, name):
        if name == "1":
            raise LaunchError.of("tim.run_dir", "was taken just now", "give another")
        ran.append(name)
        return 7 if name == "2" else 0

    configs = {cell.name: OmegaConf.create({"tim": {"run_dir": "r"}}) for cell in matrix.cells}
    ran, said, shown = [], [], []
    assert run_all(matrix, configs, run, said.append, shown.append) == 1
    assert ran == shown == ["2", "3"]
    assert any("1 could not be started: tim.run_dir: was taken just now" in line for line in said)


def test_ctrl_c_ends_the_matrix(matrix):
    ran = []

    def run(config, name):
        ran.append(name)
        return 130

    configs = {cell.name: OmegaConf.create({}) for cell in matrix.cells}
    assert run_all(matrix, configs, run, lambda line: None) == 130
    assert ran == ["1"]
    assert finished(matrix) == {}


def test_train_lists_what_a_matrix_would_run(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from verl_tim.cli import app
    from verl_tim.launch import start

    monkeypatch.setattr(start, "make_ready", lambda config, **_: None)
    words = [
        "train",
        "recipe=cpu_grpo",
        "+matrix=paper",
        "tim.only=v*",
        f"tim.run_dir={tmp_path}",
        "--dry-run",
        "--json",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["run"] for row in rows] == ["vexact", "vllm_recompute", "vllm_bypass", "vllm_invariant"]
    assert rows[0]["overrides"][:2] == ["rollout=vexact", "correction=none"]
    assert not any(row["done"] for row in rows)


def plain_verl(folder, *words):
    command = [
        "-m",
        "verl.trainer.main_ppo",
        "--config-path",
        "pkg://verl_tim.recipes.cpu_grpo",
        "--config-name",
        "cpu_grpo",
    ]
    return subprocess.run(
        [sys.executable, *command, *words], capture_output=True, text=True, cwd=folder, timeout=900, errors="replace"
    )


def test_a_plain_verl_multirun_is_checked_as_a_whole(tmp_path):
    """`-m` reaches the same expansion: what one of the runs cannot do is said before any of them starts."""
    done = plain_verl(tmp_path, "-m", "rollout=stock", "data.train_batch_size=20,28", f"tim.run_dir={tmp_path}/runs")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "these runs cannot start" in done.stderr
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in done.stderr
    for size in (20, 28):
        assert f"does not divide data.train_batch_size={size} (in data.train_batch_size={size})" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_two_runs_of_a_plain_verl_multirun(tmp_path):
    words = [
        "-m",
        "rollout=vexact,stock",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"tim.run_dir={tmp_path}/runs",
    ]
    done = plain_verl(tmp_path, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    exact = {}
    for rollout in ("vexact", "stock"):
        (line,) = (tmp_path / "runs" / f"rollout={rollout}" / "metrics.jsonl").read_text().splitlines()
        exact[rollout] = json.loads(line)["data"]["tim/exact_fraction"]
    assert exact["vexact"] == 1.0 > exact["stock"]
    again = plain_verl(tmp_path, *words)
    assert again.returncode == 0
    assert "run 1 of" not in again.stderr


def test_a_record_is_that_of_the_same_runs_in_a_folder_of_any_name(tmp_path):
    asked = ["+matrix=evidence", "tim.only=dense-grpo-*", "data.seed=1,2"]
    here, there = (matrix_of(find_recipe("evidence_grpo"), [*asked, f"tim.run_dir={tmp_path / name}"]) for name in "ab")
    here.folder.mkdir()
    there.folder.mkdir()
    for cell in here.cells[:7]:
        record(here, cell.name)
    (here.folder / RECORD).rename(there.folder / RECORD)
    assert [cell.name for cell in unfinished(there)] == [cell.name for cell in here.cells[7:]]
    longer = matrix_of(
        find_recipe("evidence_grpo"), [*asked, f"tim.run_dir={there.folder}", "trainer.total_training_steps=7"]
    )
    assert len(unfinished(longer)) == len(longer.cells), "another length is another run"
