"""`verl-tim compare` from the command line: options, files, refusals."""

from __future__ import annotations

import json

import pytest
from fake_runs import write_run
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.diagnosis.compare import compare
from verl_tim.diagnosis.curves import CORR_K, PLOTS, PPO_K, Line, Plot
from verl_tim.diagnosis.formats import written

runner = CliRunner()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [
        str(write_run(root / "vexact", steps=40)),
        str(write_run(root / "stock", rollout="stock", steps=40, collapse_at=20)),
    ]


def invoke(*words):
    return runner.invoke(app, ["compare", *map(str, words)])


def test_files_and_order_of_the_signals(runs, tmp_path):
    result = invoke(*runs, "--out", tmp_path, "--png", "--smooth", "rolling:5", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert json.loads((tmp_path / "compare.json").read_text()) == content
    warning = content["early_warning"]
    assert warning["baseline"] == "vexact"
    assert "3 standard deviations" in warning["band"]["text"]
    first = {row["signal"]: row["step"] for row in warning["signals"]}
    assert first["contribution skew"] == first["|d| max"] == 1
    assert 20 < first["reward"] <= 26
    steps = [row["step"] for row in warning["signals"] if row["step"] is not None]
    assert steps == sorted(steps)
    assert content["smoothing"] == "mean of 5 steps"
    # a picture with something in it, not a blank sheet
    from matplotlib.image import imread

    picture = imread(tmp_path / "compare.png")
    assert picture.shape[0] > 1000
    assert picture[..., :3].std() > 0.02


def test_the_table_names_baseline_and_steps(runs, tmp_path):
    text = " ".join(invoke(*runs, "--out", tmp_path).stdout.split())
    assert "What leaves vexact's band first" in text
    assert "contribution" in text


def band_table(result):
    """The cells of the rows of what leaves the band, and what stands below them."""
    assert result.exit_code == 0, result.output
    _, _, after = result.stdout.partition("leaves at step")
    rows, _, notes = after.partition("└")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in rows.splitlines() if line.startswith("│")]
    return cells, " ".join(notes.partition("┏")[0].split())


def test_no_cell_of_the_band_table_is_blank_and_every_word_is_explained(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    cells, notes = band_table(invoke(*runs, "--out", tmp_path))
    assert all(cell for row in cells for cell in row), cells
    assert {"–", "stayed"} <= {cell for row in cells for cell in row}
    assert "–: nothing to tell" in notes
    assert "its own first 21 steps (stayed: it does not)" in notes
    assert "too short" not in notes


def test_every_name_in_the_tables_is_explained_below_them_and_no_other(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = invoke(*runs, "--out", tmp_path).stdout
    assert "leaves at step: the first of 3 logged steps in a row" in " ".join(text.split())
    legend = text[text.rindex("└") :]
    comparison = compare(runs)
    for label in [d.signal for d in comparison.warnings] + [row.label for row in comparison.summary()]:
        assert any(f"\n{term.name}: " in legend for term in comparison.terms() if term.explains(label)), label
    assert "at length limit" in legend
    alone = invoke(runs[0], "--out", tmp_path).stdout
    assert "ppo_k3" not in alone, "its table is not there"
    page = (tmp_path / "compare.html").read_text()
    assert "noise, walking away from 0: the early warning." in page
    assert "noise, walking away" not in (tmp_path / "compare.json").read_text()
    assert json.loads(invoke(*runs, "--out", tmp_path, "--json").stdout)


def test_there_is_a_meaning_for_every_label_that_a_table_may_have():
    from verl_tim.diagnosis.compare import summary_metrics
    from verl_tim.diagnosis.early_warning import SIGNALS
    from verl_tim.diagnosis.metric_log import MetricLog, Record
    from verl_tim.diagnosis.terms import TERMS, meaning

    log = MetricLog([Record(1, {f"val-core/{name}/acc/mean@1": 0.5 for name in ("a", "b")})])
    labels = [*(signal.label for signal in SIGNALS), *(label for label, *_ in summary_metrics([log]))]
    assert all(map(meaning, labels))
    assert all(any(map(term.explains, labels)) for term in TERMS)
    with pytest.raises(KeyError):
        meaning("rewards")


def test_too_short_is_said_with_the_steps_that_it_takes(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    pair = [write_run(tmp_path / name, rollout=name, steps=12) for name in ("vexact", "stock")]
    cells, notes = band_table(invoke(*pair, "--out", tmp_path / "out"))
    assert "too short" in {row[2] for row in cells}
    assert "it takes 24 logged steps to tell (--band-window and --band-steps together); stock has 12" in notes
    brief = write_run(tmp_path / "brief", rollout="stock", steps=2)
    cells, notes = band_table(invoke(pair[0], brief, "--out", tmp_path / "out"))
    assert {row[0] for row in cells} == {"too short"}
    assert "it takes 3 steps that the run and all runs of the baseline logged" in notes
    assert "too short" in (page := (tmp_path / "out/compare.html").read_text())
    assert "it takes 3 steps that the run" in page


def test_band_options_act(runs, tmp_path):
    wide = json.loads(invoke(*runs, "--out", tmp_path, "--band-z", "1000", "--json").stdout)["early_warning"]
    assert next(row for row in wide["signals"] if row["signal"] == "reward")["state"] == "stayed"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--smooth", "ema:2"], "give off, ema:WEIGHT (0 < WEIGHT < 1) or rolling:STEPS (STEPS >= 2)"),
        (["--band-z", "0"], "give a positive number"),
        (["--band-window", "1"], "give at least 3 steps"),
        (["--band-steps", "0"], "give at least 1 step"),
        (["--baseline", "nobody"], "choose one of vexact, stock"),
        (["--group", "x"], "give a label and a pattern"),
        (["--group", "x=zzz*"], "give a pattern over the names vexact, stock"),
        (["--group", "x=*", "--group", "y=stock"], "give patterns that share no run"),
        (["--group", "vexact=stock"], "give labels that differ"),
        (["--name", "x"], "one for each run"),
    ],
)
def test_an_option_that_does_not_fit_is_named_with_what_would(runs, tmp_path, words, remedy):
    result = invoke(*runs, "--out", tmp_path / "out", "--json", *words)
    assert result.exit_code == 2
    (found,) = json.loads(result.stdout)["error"]["problems"]
    assert found["key"] == words[0]
    assert remedy in found["remedy"]
    assert remedy not in found["problem"]
    assert "--help" not in found["remedy"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["calibrate", "--rule", "nope"], "choose among token_k1, "),
        (["calibrate", "--max-share", "3"], "give a share between 0 and 1"),
        (["calibrate", "--step", "9"], "name dumped steps: 1"),
        (["report", "--step", "9"], "name dumped steps: 1"),
        (["baseline", "--skip", "99"], "skip fewer than 4"),
    ],
)
def test_so_is_one_of_the_other_commands(tmp_path, words, remedy):
    from fake_dumps import none, one_sign, write_dumps

    pair = [
        str(write_dumps(write_run(tmp_path / "stock", rollout="stock", steps=4), one_sign(0.3, 0.02))),
        str(write_dumps(write_run(tmp_path / "vexact", steps=4), none)),
    ]
    command, *option = words
    result = runner.invoke(
        app, [command, *pair[: 2 if command == "calibrate" else 1], *option, "--out", str(tmp_path / "o"), "--json"]
    )
    assert result.exit_code == 2, result.output
    (found,) = json.loads(result.stdout)["error"]["problems"]
    assert found["key"] == option[0]
    assert remedy in found["remedy"]


@pytest.mark.parametrize("command", ["compare", "report", "same", "baseline"])
def test_the_remedy_for_an_empty_folder_is_said_once(runs, tmp_path, command):
    (tmp_path / "empty").mkdir()
    words = [command, str(tmp_path / "empty"), *(runs[:1] if command in ("compare", "same") else [])]
    result = runner.invoke(app, [*words, "--json"])
    assert result.exit_code == 2
    (found,) = json.loads(result.stdout)["error"]["problems"]
    assert found["key"] == "RUN"
    assert found["problem"].endswith("no .wandb file)")
    assert result.stderr.count("give ") == 1


def test_a_group_is_named(runs, tmp_path):
    content = json.loads(invoke(*runs, "--out", tmp_path, "--group", "all=*", "--json").stdout)
    assert content["groups"] == [{"name": "all", "runs": ["vexact", "stock"]}]


def test_the_two_families_of_estimators_share_no_axis():
    for _, plots in PLOTS:
        for plot in plots:
            names = [name for line in plot.lines for name in line.names]
            assert not (any(map(CORR_K.match, names)) and any(map(PPO_K.match, names)))
    with pytest.raises(ValueError, match="one axis"):
        Plot("both", "Both", (Line(("tim/k3",)), Line(("tim/ppo_k3",))))


def test_runs_of_one_step(runs, tmp_path):
    short = write_run(tmp_path / "short", rollout="stock", steps=1)
    result = invoke(runs[0], short, "--out", tmp_path, "--png", "--json")
    assert result.exit_code == 0, result.output
    assert {row["state"] for row in json.loads(result.stdout)["early_warning"]["signals"]} == {"too short"}


@pytest.mark.parametrize("content", ["", "\n", '{"step": 1, "da', '{"step": 1, "data": {}}\n'])
@pytest.mark.parametrize("alone", [True, False])
def test_a_run_that_logged_nothing_is_named(runs, tmp_path, content, alone):
    empty = write_run(tmp_path / "empty", steps=1)
    (empty / "metrics.jsonl").write_text(content)
    for given in (empty, empty / "metrics.jsonl"):
        result = invoke(*([] if alone else runs), given, "--out", tmp_path / "out")
        assert result.exit_code == 2, result.output
        assert f"{empty}/metrics.jsonlholdsnometricofanystep" in "".join(result.stderr.split())
        assert result.stdout == ""
        assert not (tmp_path / "out").exists()
    result = runner.invoke(app, ["report", str(empty), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert "no token dumps" in " ".join(result.stderr.split())


def test_metrics_that_are_all_nan_are_metrics(tmp_path):
    run = write_run(tmp_path / "nan", steps=1)
    (run / "metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": null}}\n')
    assert invoke(run, "--out", tmp_path / "out").exit_code == 0


def test_a_tracker_without_values_is_named(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    SummaryWriter(str(tmp_path / "events")).close()
    result = invoke(tmp_path / "events", "--out", tmp_path)
    assert result.exit_code == 2, result.output
    assert "events holds no metric of any step" in " ".join(result.stderr.split())


def writers(runs, tmp_path):
    """Commands that write, what they write and the words for the place."""
    from fake_dumps import none, one_sign, write_dumps

    dumped = [
        str(write_dumps(tmp_path / name, mismatch)) for name, mismatch in (("a", one_sign(0.3, 0.02)), ("b", none))
    ]
    return [
        (["compare", *runs, "--png"], ["compare.html", "compare.json", "compare.png"], ""),
        (["report", runs[1]], ["report.html", "report.json"], ""),
        (["baseline", runs[1]], ["baseline.json"], "baseline.json"),
        (["calibrate", *dumped], ["calibrate.html", "calibrate.json", "correction/calibrated_a.yaml"], ""),
    ]


def test_files_of_an_earlier_call_are_replaced_and_no_others(runs, tmp_path):
    out = tmp_path / "out"
    for words, files, place in writers(runs, tmp_path):
        words = [*words, "--out", str(out / place)]
        assert runner.invoke(app, words).exit_code == 0
        again = runner.invoke(app, words)
        assert again.exit_code == 0, again.output
        for file in files:
            own = (out / file).read_bytes()
            (out / file).write_text("mine")
            result = runner.invoke(app, words)
            assert result.exit_code == 2, (file, result.output)
            assert "--out: " in result.stderr
            assert str(out / file) in result.stderr.replace("\n", "")
            assert (out / file).read_text() == "mine"
            (out / file).write_bytes(own)
        told = " ".join(runner.invoke(app, [words[0], "--help"]).output.replace("│", " ").split())
        assert "of an earlier call" in told
        assert "default: " in told


def test_a_comparison_of_other_runs_is_not_replaced_in_silence(tmp_path):
    stock, vexact, third = (
        write_run(tmp_path / name, rollout=rollout, steps=4)
        for name, rollout in (("stock", "stock"), ("vexact", "vexact"), ("third", "vexact"))
    )
    assert "replaced" not in invoke(vexact, stock).stderr
    for again in ((vexact, stock), (stock, vexact, "--no-by-seed"), (vexact, stock, "--name", "a", "--name", "b")):
        assert "replaced" not in invoke(*again).stderr, "of the same runs"
    told = invoke(third, stock, "--json")
    line = f"replaced: the comparison of a and b in {tmp_path}; --out with another folder keeps both"
    assert line in told.stderr.splitlines()
    assert json.loads(told.stdout)
    assert "replaced" not in invoke(vexact, stock, "--out", tmp_path / "own").stderr
    (tmp_path / "compare.json").write_text('{"about": "written by verl-tim compare", "runs": 3}')
    assert "replaced: an earlier comparison in" in invoke(vexact, stock).stderr
    (tmp_path / "compare.json").unlink()
    assert "replaced: an earlier comparison in" in invoke(vexact, stock).stderr


def test_files_go_beside_the_runs_where_no_place_is_named(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pair = [write_run(tmp_path / "runs" / name, rollout=name, steps=4) for name in ("vexact", "stock")]
    apart = write_run(tmp_path / "elsewhere" / "vexact", steps=4)
    for words, place in (
        (["compare", *pair], tmp_path / "runs" / "compare.html"),
        (["compare", pair[1], apart], tmp_path / "here" / "compare.html"),
        (["report", pair[1]], pair[1] / "report.html"),
        (["report", apart / "metrics.jsonl"], apart / "report.html"),
        (["baseline", pair[1]], tmp_path / "runs" / "baseline.json"),
    ):
        result = runner.invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        assert place.is_file(), words
        assert str(place) in result.stderr


@pytest.mark.parametrize("command", [("compare",), ("report",), ("baseline",), ("calibrate",), ("probe",)])
def test_a_place_that_cannot_be_written_to_is_named(runs, tmp_path, command):
    from fake_dumps import none, one_sign, write_dumps

    (tmp_path / "file").write_text("")
    given = {"compare": runs, "probe": ["nowhere"]}.get(command[0], runs[1:])
    out = tmp_path / "file"
    if command[0] == "baseline":
        out = tmp_path / "file" / "baseline.json"
    if command[0] == "calibrate":
        given = [write_dumps(tmp_path / "a", one_sign(0.3, 0.02)), write_dumps(tmp_path / "b", none)]
    result = runner.invoke(app, [*command, *map(str, given), "--out", str(out)])
    assert result.exit_code == 2, result.output
    assert "--out: cannot write" in result.output


def test_a_narrow_terminal_folds_long_names_and_shortens_no_label_and_no_number(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = ["a_rather_long_name_of_the_exact_run", "and_another_of_the_run_that_mismatches"]
    result = invoke(*runs, "--out", tmp_path, "--name", names[0], "--name", names[1])
    assert result.exit_code == 0, result.output
    table = result.stdout[result.stdout.rindex("┏") :]
    for label in ("reward", "|d| mean, nats", "contribution skew", "gradient norm"):
        assert f"│ {label}" in table
    assert "…" not in table
    assert all(line.count("│") == 8 for line in table.splitlines() if line.startswith("│")), table


def test_many_runs_stand_below_each_other_and_lose_no_number(tmp_path, monkeypatch):
    """Six settings have 18 columns of numbers: what does not fit beside the others gets a table of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    paths = [
        write_run(tmp_path / f"{rollout}-lr{lr:g}", rollout=rollout, config={"actor_rollout_ref.actor.optim.lr": lr})
        for rollout in ("vexact", "stock")
        for lr in (1e-3, 1e-4, 1e-5)
    ]
    text = invoke(*paths, "--out", tmp_path / "out").stdout
    assert "…" not in text.replace(" … ", "")  # a band is written low … high
    comparison = compare(paths)
    for row in comparison.summary():
        for value in (value for values in row.values for value in values):
            assert written(value, row.kind) in text


def with_restarts(path, restarts):
    """`restarts`: step -> replicas that died in it; 0 in the others, as a run logs it."""
    file = path / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["data"]["tim/rollout_restarts"] = float(restarts.get(line["step"], 0))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_replica_that_died_and_came_back_is_told_by_every_command(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    whole = with_restarts(write_run(tmp_path / "whole", steps=8), {})
    hit = with_restarts(write_run(tmp_path / "hit", steps=8), {3: 2, 7: 1})
    told = "3 times a rollout replica died and was started again, at steps 3 (2) and 7"
    entry = {"count": 3, "steps": [{"step": 3, "count": 2}, {"step": 7, "count": 1}]}
    none = {"count": 0, "steps": []}
    out = ["--out", str(tmp_path / "out")]
    for words, json_of in (
        (["compare", whole, hit, *out], {"whole": none, "hit": entry}),
        (["report", hit, *out], {"hit": entry}),
        (["same", whole, hit], {"first": none, "second": entry}),
    ):
        text = " ".join(runner.invoke(app, words).stdout.split())
        assert told in text, words
        assert text.count("died") == 1
        assert json.loads(runner.invoke(app, [*words, "--json"]).stdout)["restarts"] == json_of
    assert told in (tmp_path / "out" / "compare.html").read_text()
    assert told in (tmp_path / "out" / "report.html").read_text()


def test_of_seeds_that_are_grouped_the_one_with_the_restart_is_named(tmp_path):
    seeds = [with_restarts(write_run(tmp_path / f"s{n}", steps=8, seed=n), {5: 1} if n == 2 else {}) for n in (1, 2)]
    (note,) = [note for note in compare(seeds).verdict.notes if "died" in note]
    assert note == "s2: 1 rollout replica died and was started again, at step 5."


def test_report_tells_alerts_and_notes_too(tmp_path):
    broken = write_run(tmp_path / "vexact", steps=8, delta=1e-3)
    text = " ".join(runner.invoke(app, ["report", str(broken), "--out", str(tmp_path)]).stdout.split())
    assert "! vexact should be exact" in text
