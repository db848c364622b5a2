"""Comparison: what differs, what the sentence says and why, the JSON and the table."""

from __future__ import annotations

import io
import json
import math
import re

import pytest
from fake_runs import write_run
from rich.console import Console

from verl_tim.commands.headline import headline
from verl_tim.diagnosis.compare import SUMMARY_STEPS, compare
from verl_tim.diagnosis.config_diff import correction_name, diff_configs
from verl_tim.diagnosis.formats import listed, percent, short
from verl_tim.diagnosis.manifest import ManifestError
from verl_tim.diagnosis.metric_log import MetricLog, Record, RunFolderError
from verl_tim.diagnosis.page import render_page
from verl_tim.diagnosis.verdict import Exactness, compare_rewards, exactness
from verl_tim.launch.process import MetricsReader


@pytest.fixture
def pair(tmp_path):
    return [write_run(tmp_path / "vexact"), write_run(tmp_path / "stock", rollout="stock")]


def rewrite(path, change):
    """Pass every metrics line of a run through `change` (None drops it)."""
    file = path / "metrics.jsonl"
    lines = [change(json.loads(text)) for text in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
    return path


def set_reward(path, reward):
    """`reward`: step -> value."""

    def change(line):
        if "critic/score/mean" in line["data"]:
            line["data"]["critic/score/mean"] = line["data"]["critic/rewards/mean"] = reward(line["step"])
        return line

    return rewrite(path, change)


def text_of(comparison):
    console = Console(file=io.StringIO(), width=240)
    console.print(comparison.table())
    return console.file.getvalue()


# compare.json ------------------------------------------------------------


def test_json_has_the_agreed_form(pair, tmp_path):
    json_path, html_path = compare(pair).write(tmp_path / "out")
    assert (json_path.name, html_path.name) == ("compare.json", "compare.html")
    content = json.loads(json_path.read_text())
    assert [run["name"] for run in content["runs"]] == ["vexact", "stock"]
    for run, rollout in zip(content["runs"], ("vexact", "stock"), strict=True):
        assert run.keys() == {"name", "path", "rollout", "correction", "steps", "metrics"}
        assert (run["rollout"], run["correction"], run["steps"]) == (rollout, "none", 30)
        assert all(entry.keys() == {"first", "last", "max", "mean"} for entry in run["metrics"].values())
    assert [run["path"] for run in content["runs"]] == [str(path) for path in pair]
    exact, stock = (run["metrics"] for run in content["runs"])
    assert exact["tim/delta_abs_max"] == {"first": 0.0, "last": 0.0, "max": 0.0, "mean": 0.0}
    assert exact["tim/exact_fraction"]["mean"] == 1.0
    assert stock["tim/delta_abs_max"]["max"] > 0
    assert content["differences"] == []
    assert content["mismatch"]["vexact"]["kind"] == "exact"
    assert content["mismatch"]["stock"]["kind"] == "mismatch"


def test_statistics_are_of_the_logged_values_in_step_order(tmp_path):
    path = write_run(tmp_path / "run", steps=3)
    set_reward(path, lambda step: {1: 0.5, 2: 0.9, 3: 0.1}[step])
    entry = compare([path]).to_dict()["runs"][0]["metrics"]["critic/score/mean"]
    assert entry == {"first": 0.5, "last": 0.1, "max": 0.9, "mean": pytest.approx(0.5)}


# What differs ------------------------------------------------------------


def test_a_fair_pair_differs_in_nothing(pair):
    comparison = compare(pair)
    assert comparison.what.settings == []
    assert comparison.what.unknown == []
    assert {d.key for d in comparison.what.rollout} >= {"run.rollout", "rollout.backend", "rollout.contract_id"}
    assert "Nothing but the rollout differs" in text_of(comparison)


@pytest.mark.parametrize("rollout", ["vexact", "stock"])
def test_runs_that_repeat_one_another_are_not_said_to_differ_in_the_rollout(tmp_path, rollout):
    comparison = compare([write_run(tmp_path / name, rollout=rollout) for name in ("a", "b")])
    for text in (text_of(comparison), render_page(comparison)):
        assert "Nothing differs between the runs" in text
        assert "but the rollout" not in text
        assert "besides the rollout" not in text
    assert comparison.to_dict()["same_rollout"] is True


def test_what_differs_between_runs_of_one_rollout_is_listed_its_settings_too(tmp_path):
    pages = "actor_rollout_ref.rollout.engine_kwargs.vexact.page_size"
    paths = [write_run(tmp_path / name, config={pages: size}) for name, size in (("a", 16), ("b", 32))]
    comparison = compare(paths)
    assert comparison.what.settings == []
    assert "The runs have the same rollout and differ in 1 setting" in comparison.verdict.notes[0]
    for text in (text_of(comparison), render_page(comparison).replace("<wbr>", "")):
        assert pages in text
        assert "Nothing" not in text
        assert "esides the rollout" not in text


def test_where_seeds_are_grouped_the_seed_is_said_to_differ(tmp_path):
    seeds = [write_run(tmp_path / f"stock-s{seed}", rollout="stock", seed=seed) for seed in (1, 2)]
    assert "Nothing but the seed differs between the runs" in text_of(compare(seeds))
    exact = write_run(tmp_path / "vexact")
    assert "Nothing but the rollout and the seed differ between the runs" in text_of(compare([exact, *seeds]))


def test_a_gap_between_runs_of_one_rollout_is_not_put_down_to_the_rollout(tmp_path):
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", collapse_at=12)]
    comparison = compare(paths)
    assert "end apart" in comparison.verdict.lead
    assert "the rollout" not in comparison.verdict.notes[0]
    assert "nothing that was compared differs" in comparison.verdict.notes[0]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"config": {"actor_rollout_ref.actor.optim.lr": 1e-4}}, "actor_rollout_ref.actor.optim.lr"),
        ({"config": {"actor_rollout_ref.rollout.temperature": 0.6}}, "actor_rollout_ref.rollout.temperature"),
        ({"config": {"actor_rollout_ref.rollout.n": 4}}, "actor_rollout_ref.rollout.n"),
        ({"config": {"data.train_files": "other.parquet"}}, "data.train_files"),
        ({"seed": 2}, "data.seed"),
        ({"trainer": "stock"}, "run.trainer_numerics"),
        ({"correction": "bypass_ppo"}, "run.correction"),
        ({"facts": {"param_dtype": "float32"}}, "trainer.param_dtype"),
        ({"steps": 31}, "trainer.total_training_steps"),
    ],
)
def test_every_difference_besides_the_rollout_heads_the_comparison(tmp_path, change, key):
    paths = [write_run(tmp_path / "vexact"), write_run(tmp_path / "stock", rollout="stock", **change)]
    comparison = compare(paths)
    assert key in [d.key for d in comparison.what.settings]
    assert key in text_of(comparison)
    assert "besides the rollout" in comparison.verdict.notes[0]


def test_one_fact_is_listed_once(tmp_path):
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", trainer="stock", delta=1e-3)]
    keys = [d.key for d in compare(paths).what.settings]
    assert "run.trainer_numerics" in keys
    assert "tim.trainer_numerics" not in keys


CORRECTION_KEYS = ("algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss.rollout_correction")


@pytest.mark.parametrize("manifest", [True, False])
def test_one_change_of_the_correction_is_listed_once(tmp_path, manifest):
    """The workers have a copy of its keys, and the manifest says them, too."""
    paths = [
        write_run(
            tmp_path / name,
            manifest=manifest,
            config={f"{key}.rollout_is_threshold": cap for key in CORRECTION_KEYS},
            correction_facts={"rollout_is_threshold": cap},
        )
        for name, cap in (("a", 2.0), ("b", 5.0))
    ]
    comparison = compare(paths)
    assert [d.key for d in comparison.what.settings] == [
        "correction.rollout_is_threshold" if manifest else "algorithm.rollout_correction.rollout_is_threshold"
    ]


def test_paths_into_the_run_folder_and_reporting_are_no_difference():
    one = {
        "tim": {"run_dir": "/x/one", "dump": {"dir": "/x/one/dumps"}},
        "log": ["/x/one/metrics.jsonl"],
        "trainer": {"logger": ["a"]},
    }
    two = {
        "tim": {"run_dir": "/x/two", "dump": {"dir": "/x/two/dumps"}},
        "log": ["/x/two/metrics.jsonl"],
        "trainer": {"logger": ["b"]},
    }
    assert diff_configs({"one": one, "two": two}) == []
    assert [d.key for d in diff_configs({"one": one, "two": {**two, "log": ["/x/one/metrics.jsonl"]}})] == ["log"]


def test_engine_options_belong_to_the_rollout_in_a_config():
    def config(name, **rollout):
        return {"actor_rollout_ref": {"rollout": {"name": name, "engine_kwargs": {name: {"page_size": 16}}, **rollout}}}

    pair = {"vexact": config("vexact"), "vllm": config("vllm", gpu_memory_utilization=0.5, logprobs_mode="processed")}
    assert diff_configs(pair) == []
    assert len(diff_configs(pair, include_rollout=True)) == 5


def test_without_manifest_or_config_the_comparison_says_what_it_does_not_know(tmp_path):
    paths = [write_run(tmp_path / "vexact"), write_run(tmp_path / "old", rollout="stock", manifest=False)]
    comparison = compare(paths)
    assert [run.rollout for run in comparison.runs] == ["vexact", "stock"]  # the second from its config
    assert "No manifest in old" in comparison.what.unknown[0]
    assert "Nothing but the rollout" not in text_of(comparison)
    (paths[1] / "config.yaml").unlink()
    comparison = compare(paths)
    assert comparison.runs[1].rollout == comparison.runs[1].correction == "unknown"
    assert len(comparison.what.unknown) == 2


def test_processes_that_disagree_are_told(tmp_path):
    path = write_run(tmp_path / "run")
    content = json.loads((path / "manifest.json").read_text())
    content["trainer"]["processes"].append("actor 1")
    content["trainer"]["different"] = {"actor 1": {"threads": 8}}
    (path / "manifest.json").write_text(json.dumps(content))
    assert compare([path]).disagreements == {"run": ["trainer actor 1: threads is 8"]}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"tim": {"choices": {"correction": "icepop"}}}, "icepop"),
        ({"algorithm": {"rollout_correction": {"preset": "token_tis", "bypass_mode": False}}}, "token_tis"),
        ({"algorithm": {"rollout_correction": None}}, "none"),
        ({"algorithm": {"rollout_correction": {"bypass_mode": False, "rollout_is": None}}}, "none"),
        ({"algorithm": {"rollout_correction": {"bypass_mode": True}}}, "bypass_ppo"),
        ({"algorithm": {"rollout_correction": {"bypass_mode": True, "loss_type": "reinforce"}}}, "bypass_reinforce"),
        (
            {"algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_rs": ["token_k1", "seq_mean_k3"]}}},
            "token_is+rs_token_k1+seq_mean_k3",
        ),
        ({"algorithm": {}}, None),
        ({}, None),
    ],
)
def test_the_name_of_a_correction(config, name):
    assert correction_name(config) == name


# The sentence: every branch follows from numbers ------------------------------------------------------------


def lead(*paths, **kwargs):
    return compare(list(paths), **kwargs).verdict.lead


def test_equal_rewards_at_a_small_size(pair):
    assert re.fullmatch(
        r"Rewards end equal within noise \(0\.\d+ and 0\.\d+, over the last 10 shared steps\), as is expected at "
        r"this size \(612 K parameters, 30 steps\); the mismatch shows in the log-probs: vexact equals the trainer bit "
        r"for bit on all [\d,]+ tokens, while stock differs on \d+\.\d % of its [\d,]+ tokens, "
        r"by 0\.00\d+ nats on average and by up to 0\.\d+\.",
        lead(*pair),
    )


@pytest.mark.parametrize("parameters", [1_700_000_000, None])
def test_equal_rewards_are_not_called_expected_without_knowing_a_small_size(tmp_path, parameters):
    said = lead(
        write_run(tmp_path / "vexact", parameters=parameters),
        write_run(tmp_path / "stock", rollout="stock", parameters=parameters),
    )
    assert "expected" not in said
    assert "equal within noise" in said
    assert "after 30 shared steps" in said


def test_every_figure_says_of_which_steps_it_is(pair):
    comparison = compare(pair)
    assert "over the last 10 shared steps" in comparison.verdict.lead
    assert SUMMARY_STEPS in " ".join(text_of(comparison).split())
    assert "(means of the first and last 10 steps) over 30 steps" in compare(pair[:1]).verdict.lead


def test_a_reward_ends_alike_in_the_sentence_and_in_the_table_of_a_quickstart(pair):
    """Both are means of as many steps."""
    comparison = compare(pair)
    steps = MetricsReader(pair[0] / "metrics.jsonl").new_steps()
    values = headline([step for step in steps if step.number > 0])
    assert f"({short(values['reward_last'])} and " in comparison.verdict.lead
    assert f"the last {values['reward_steps']} shared steps" in comparison.verdict.lead


def test_rewards_apart(tmp_path):
    good, bad = write_run(tmp_path / "vexact"), write_run(tmp_path / "stock", rollout="stock", collapse_at=12)
    comparison = compare([good, bad])
    said = comparison.verdict.lead
    assert re.match(
        r"Rewards end apart \(vexact 0\.\d+ and stock 0\.\d+, over the last 10 shared steps\); in the log-probs, ", said
    )
    assert "expected" not in said
    assert "runs with other seeds would tell" in comparison.verdict.notes[0]
    # The order in which the runs are given does not change which is said to be higher.
    assert "(vexact 0." in lead(bad, good)


def test_identical_rewards(tmp_path):
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
    for path in paths:
        set_reward(path, lambda step: 0.01 * step)
    said = lead(*paths)
    assert said.startswith("Rewards are identical at all 30 shared steps, as is expected at this size")
    unknown = [write_run(tmp_path / name, parameters=None, rollout=name) for name in ("vexact", "stock")]
    (unknown[1] / "metrics.jsonl").write_text((unknown[0] / "metrics.jsonl").read_text())
    assert compare(unknown).verdict.lead.startswith("Rewards are identical at all 30 shared steps; ")
    assert said.endswith("a and b equal the trainer bit for bit on all 65,588 tokens, so there is no mismatch to see.")


def test_too_short_and_missing_rewards(tmp_path):
    short_run, long_run = write_run(tmp_path / "a", steps=4), write_run(tmp_path / "b", rollout="stock")
    assert lead(short_run, long_run).startswith("With 4 shared steps it is too early to compare rewards; ")
    assert any(
        "different lengths (steps: a 4 and b 30)" in note for note in compare([short_run, long_run]).verdict.notes
    )
    silent = write_run(tmp_path / "c", drop=("critic/",))
    assert lead(silent, long_run).startswith("Rewards cannot be compared, since not every run logged one; ")


def test_two_mismatches_are_set_in_proportion(tmp_path):
    paths = [
        write_run(tmp_path / "a", rollout="stock", delta=1e-3),
        write_run(tmp_path / "b", rollout="stock", delta=4e-3),
    ]
    assert "(b's mean |d| is 4 times a's)" in lead(*paths)
    same = [paths[0], write_run(tmp_path / "c", rollout="stock", delta=1e-3)]
    assert "(much the same mean |d|)" in lead(*same)
    assert "vexact" not in lead(*paths)


def test_an_unmeasured_run_is_not_called_exact(tmp_path, pair):
    silent = write_run(tmp_path / "silent", rollout="vllm", drop=("tim/",))
    said = lead(pair[0], silent)
    assert said.endswith("; silent logged no mismatch metrics (tim/*).")
    assert "no mismatch to see" not in said
    other = write_run(tmp_path / "silent2", drop=("tim/",))
    assert lead(silent, other).endswith("no run logged mismatch metrics (tim/*).")


def test_a_vexact_run_that_is_not_exact_is_an_alarm(tmp_path, pair):
    def break_step_9(line):
        if line["step"] == 9:
            line["data"]["tim/exact_fraction"] = 0.999
        return line

    broken = rewrite(pair[0], break_step_9)
    comparison = compare([broken, pair[1]])
    assert "vexact should be exact" in comparison.verdict.alerts[0]
    assert "from step 9 on" in comparison.verdict.alerts[0]
    assert comparison.states[0].kind == "mismatch"
    assert "bit for bit" not in comparison.verdict.lead
    # With a stock trainer nobody promised bits.
    assert compare([write_run(tmp_path / "v2", trainer="stock", delta=1e-3)]).verdict.alerts == []


def test_an_exact_fraction_of_one_with_a_difference_is_a_mismatch():
    records = [Record(1, {"tim/exact_fraction": 1.0, "tim/delta_abs_max": 1e-7, "tim/valid_tokens": 5.0})]
    assert exactness(MetricLog(records)).kind == "mismatch"


@pytest.mark.parametrize("name", ["tim/exact_fraction", "tim/delta_abs_max"])
def test_a_step_whose_difference_is_not_finite_is_not_exact(name):
    exact = {"tim/exact_fraction": 1.0, "tim/delta_abs_max": 0.0, "tim/valid_tokens": 5.0}
    spoilt = {key: value for key, value in exact.items() if key != name}
    state = exactness(MetricLog([Record(1, exact), Record(2, spoilt, nonfinite=(name,))]))
    assert (state.kind, state.first_step, state.steps) == ("mismatch", 2, 2)


def test_exactness_weighs_tokens_and_says_when_bits_were_not_compared():
    state = exactness(
        MetricLog(
            [
                Record(1, {"tim/exact_fraction": 1.0, "tim/delta_abs_mean": 0.0, "tim/valid_tokens": 90.0}),
                Record(2, {"tim/exact_fraction": 0.0, "tim/delta_abs_mean": 1.0, "tim/valid_tokens": 10.0}),
            ]
        )
    )
    assert (state.exact_fraction, state.delta_mean, state.first_step, state.tokens) == (0.9, 0.1, 2, 100)
    zero = exactness(MetricLog([Record(1, {"tim/delta_abs_max": 0.0})]))
    assert (zero.kind, zero.bits, zero.tokens) == ("exact", False, None)


def test_missing_tokens_nonfinite_values_and_a_torn_file_are_told(tmp_path):
    def spoil(line):
        line["data"]["tim/missing_tokens"] = 2
        line["data"]["actor/grad_norm"] = None
        return line

    path = rewrite(write_run(tmp_path / "run", steps=6), spoil)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "da')
    notes = "\n".join(compare([path]).verdict.notes)
    assert "14 response tokens had no usable log-prob" in notes
    assert "actor/grad_norm was not finite at 7 of 7 logged steps" in notes
    assert "cut off" in notes


def test_a_run_whose_every_log_prob_is_missing_says_so(tmp_path):
    """Not one token could be compared: that is no run without metrics."""
    log = MetricLog([Record(s, {"tim/valid_tokens": 0.0, "tim/missing_tokens": 50.0}) for s in (1, 2)])
    assert exactness(log) == Exactness("unmeasured", missing=100)
    run = write_run(tmp_path / "run", rollout="stock", steps=2, drop=("tim/",))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["data"] |= {"tim/valid_tokens": 0, "tim/missing_tokens": 50}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (note,) = compare([run]).verdict.notes
    assert note.startswith("run: 150 response tokens had no usable log-prob")


def test_one_run(tmp_path):
    assert re.fullmatch(
        r"Reward rises from 0\.\d+ to 0\.\d+ \(means of the first and last 10 steps\) over 30 steps; "
        r"the rollout equals the trainer bit for bit on all [\d,]+ tokens\.",
        lead(write_run(tmp_path / "vexact")),
    )
    falling = write_run(tmp_path / "down", rollout="stock", collapse_at=3)
    assert re.match(
        r"Reward falls from 0\.\d+ to .* over 30 steps; the rollout differs on \d+\.\d % of its [\d,]+ tokens",
        lead(falling),
    )
    level = set_reward(write_run(tmp_path / "level"), lambda step: 0.5 + 0.01 * (-1) ** step)
    assert lead(level).startswith("Reward stays level from ")
    early = write_run(tmp_path / "early", steps=2, drop=("tim/",))
    assert re.match(r"Reward is 0\.\d+ after 2 steps; no tim/\* metrics were logged, and verl's own", lead(early))
    bare = write_run(tmp_path / "bare", steps=2, drop=("tim/", "training/", "critic/"))
    assert lead(bare) == "No reward was logged; no mismatch metrics (tim/*) were logged."


def test_many_runs(tmp_path, pair):
    paths = [
        *pair,
        write_run(tmp_path / "c", rollout="stock", delta=4e-3),
        write_run(tmp_path / "d", rollout="stock", delta=1e-2),
    ]
    said = lead(*paths)
    assert re.search(
        r"while mean \|d\| over all tokens, in nats, is stock 0\.\S+ \(largest 0\.\S+\), c 0\.\S+ \(.*\) and d 0\.\S+",
        said,
    )


def test_rewards_are_paired_by_step():
    """Both curves swing together by far more than they differ: only pairing can tell them apart."""

    def log(offset):
        return MetricLog(
            [Record(s, {"critic/score/mean": math.sin(s) + offset + 1e-3 * math.cos(7 * s)}) for s in range(1, 31)]
        )

    assert compare_rewards({"a": {"a": log(0.0)}, "b": {"b": log(0.05)}}).kind == "apart"
    same = compare_rewards({"a": {"a": log(0.0)}, "b": {"b": MetricLog(log(0.0).records[:-3])}})
    assert (same.kind, same.shared) == ("identical", 27)


@pytest.mark.parametrize(("spread", "kind"), [(0.001, "apart"), (0.1, "equal")])
def test_rewards_of_several_seeds_are_apart_only_beyond_what_seeds_explain(spread, kind):
    """Every step of every seed says that b is above a; how far seeds of one setting lie apart says what it is worth."""

    def seeds(level):
        return {
            f"{level}-{seed}": MetricLog(
                [Record(s, {"critic/score/mean": level + spread * seed + 1e-4 * math.cos(7 * s)}) for s in range(1, 31)]
            )
            for seed in range(3)
        }

    found = compare_rewards({"a": seeds(0.5), "b": seeds(0.55)})
    assert (found.kind, found.gap) == (kind, pytest.approx(0.05))
    # pooled variance spread^2 of 3 + 3 ends: t(4) = 2.78
    assert found.noise == pytest.approx(2.78 * spread * math.sqrt(2 / 3), rel=1e-6)


# Input ------------------------------------------------------------


def test_bad_input_is_named(tmp_path, pair):
    with pytest.raises(ValueError, match="at least one"):
        compare([])
    with pytest.raises(ValueError, match="given twice"):
        compare([pair[0], pair[0]])
    with pytest.raises(ValueError, match="names must be distinct"):
        compare(pair, names=["a", "a"])
    with pytest.raises(RunFolderError, match="does not exist"):
        compare([tmp_path / "nothing"])
    (pair[0] / "manifest.json").write_text("{}")
    with pytest.raises(ManifestError, match=r"manifest\.json: format None"):
        compare(pair)


def test_equal_folder_names_are_told_apart(tmp_path):
    paths = [write_run(tmp_path / name / "vexact", steps=2) for name in ("monday", "tuesday")]
    assert [run.name for run in compare(paths).runs] == ["monday/vexact", "tuesday/vexact"]
    assert [run.name for run in compare(paths, names=["a", "b"]).runs] == ["a", "b"]


# Numbers as text ------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.6172, "0.617"),
        (0.00214, "0.00214"),
        (0.000214, "2.1·10⁻⁴"),
        (-0.00052, "−5.2·10⁻⁴"),
        (12.345, "12.3"),
        (1234.5, "1,234"),
        (30.0, "30"),
        (4.9e8, "4.9·10⁸"),
        (None, "–"),
    ],
)
def test_short(value, text):
    assert short(value) == text


def test_percent_never_rounds_to_all_or_none():
    assert [percent(x) for x in (0.0, 1.0, 0.99999, 1e-6, 0.114, None)] == [
        "0 %",
        "100 %",
        "> 99.9 %",
        "< 0.1 %",
        "11.4 %",
        "–",
    ]


def test_listed():
    assert [listed(x) for x in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
