"""All rules together: what is an error, that nothing is said twice, and that good configs are clean."""

import json
import py_compile
import shlex
import time
from dataclasses import replace

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.doctor.examine import examine
from verl_tim.doctor.machine import Machine, _has_byte_code
from verl_tim.doctor.rule import Level, Rule, Severity
from verl_tim.doctor.rules import OWN
from verl_tim.doctor.rules.schedule import disk
from verl_tim.doctor.source import read
from verl_tim.doctor.view import View
from verl_tim.training.finding import Finding

from .conftest import GPU_MACHINE, VERSIONS

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"


def rules(report, level=None):
    """Every rule that found something, also in a setting of which another one speaks first."""
    found = [one for first in report.violations for one in (first, *first.also)]
    return {one.rule for one in found if level in (None, one.level)}


def run(*words):
    return CliRunner().invoke(app, ["doctor", *words])


def test_zero_mismatch_is_clean(view_of):
    report = examine(view_of("vexact"))
    assert report.violations == ()
    assert {row.state for row in report.checks} == {"ok"}


def test_a_chosen_mismatch_warns_and_an_unchosen_one_is_an_error(view_of):
    stock = {f"{ROLLOUT}.name": "stock", f"{ROLLOUT}.engine_kwargs.stock": {"page_size": 16}}
    chosen = examine(view_of("vexact", stock))
    assert rules(chosen, Level.ERROR) == set()
    assert rules(chosen, Level.WARNING) == {"exact.rollout-engine"}
    assert rules(examine(view_of("vexact", stock), exact=True), Level.ERROR) == {"exact.rollout-engine"}
    assert "exact.rollout-engine" in rules(examine(view_of("verl")), Level.ERROR)


def test_everything_at_once(view_of):
    report = examine(
        view_of(
            "verl",
            {
                f"{MODEL}.use_liger": True,
                f"{MODEL}.lora_rank": 8,
                f"{ROLLOUT}.top_p": 0.9,
                f"{ROLLOUT}.calculate_log_probs": False,
                f"{CORRECTION}.rollout_is": "token",
                "data.max_response_length": 300,
                "actor_rollout_ref.actor.use_dynamic_bsz": True,
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 256,
            },
        )
    )
    assert {
        "exact.liger",
        "exact.lora",
        "exact.sampling-support",
        "correction.log-probs-missing",
        "stops.token-budget",
    } <= rules(report, Level.ERROR)
    assert [one.level for one in report.violations] == sorted(
        (one.level for one in report.violations), key=list(Level).index
    )


def test_a_reason_to_refuse_a_start_is_said_once_as_an_error(view_of):
    report = examine(view_of("vexact", {f"{MODEL}.use_liger": True}))
    (one,) = report.errors
    assert (one.rule, one.key) == ("exact.liger", f"{MODEL}.use_liger")
    # also where the rest of the config chose a mismatch
    report = examine(view_of("vexact", {f"{MODEL}.use_liger": True, f"{ROLLOUT}.name": "stock"}))
    assert f"{MODEL}.use_liger" in {one.key for one in report.errors}


def test_what_keeps_a_run_from_starting_comes_first_then_what_ends_it(view_of):
    changes = {
        f"{ROLLOUT}.nmae": 1,
        f"{MODEL}.use_liger": True,
        "data.max_response_length": 300,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 256,
    }
    errors = [one.rule for one in examine(view_of("verl", changes, machine=None)).errors]
    assert errors[:2] == ["start.spelling", "stops.token-budget"]
    assert "exact.liger" in errors[2:]


@pytest.mark.parametrize(
    ("base", "key", "value", "first", "others"),
    [
        # one wrong value, which several rules see
        ("verl", f"{MODEL}.override_config.attn_implementation", "flash_attention_2", "start.cpu", 2),
        ("vexact", f"{ROLLOUT}.name", "vllmm", "start.values", 0),
        ("vexact", f"{ROLLOUT}.n", "eight", "start.values", 0),
        ("verl", "actor_rollout_ref.actor.strategy", "fsdp", "start.strategy", 1),
    ],
)
def test_one_setting_is_one_finding_that_holds_what_every_rule_says_of_it(view_of, base, key, value, first, others):
    machine = replace(GPU_MACHINE, gpus=(), modules=frozenset())
    report = examine(view_of(base, {key: value}, machine=machine))
    (one,) = [one for one in report.violations if one.key == key]
    assert one.blocks
    assert one.rule == first
    assert len(one.also) == others
    assert all(other.key == key and other.problem and other.remedy for other in one.also)


def test_a_group_may_hold_several_mistakes(view_of, monkeypatch):
    """What rules say of a group as a whole may be about different keys of it."""
    other = Rule("waste.other", Severity.WASTE, (CORRECTION,), "", "", lambda view: [Finding(CORRECTION, "so", "not")])
    monkeypatch.setattr("verl_tim.doctor.examine.OWN", [*OWN, other])
    changes = {f"{CORRECTION}.rollout_is": "token"}
    found = [one for one in examine(view_of("vexact", changes)).violations if one.key == CORRECTION]
    assert [one.rule for one in found] == ["waste.nothing-to-correct", "waste.other"]
    assert all(one.also == () for one in found)


def test_wrong_values_do_not_hide_the_rest(view_of):
    report = examine(view_of("vexact", {f"{ROLLOUT}.n": "eight", f"{MODEL}.use_liger": True}))
    assert {"start.values", "exact.liger"} <= rules(report, Level.ERROR)
    assert {row.check.name: row.state for row in report.checks}["rollout and trainer"] == "not looked at"


def test_without_the_machine_only_the_config_counts(view_of):
    changes = {"trainer.n_gpus_per_node": 8, "data.train_batch_size": 16, "ray_kwargs.ray_init.num_cpus": 2}
    with_machine = examine(view_of("verl", changes))
    without = examine(view_of("verl", changes, machine=None))
    assert {"start.machine", "start.ray"} <= rules(with_machine)
    assert not {"start.machine", "start.ray", "start.cpu", "start.strategy"} & rules(without)


def test_the_folder_of_a_run_may_hold_the_run(configs, tmp_path):
    OmegaConf.save(configs["vexact"], tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {}}\n')
    result = run("--json", str(tmp_path), f"tim.run_dir={tmp_path}")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("rollout", ["vexact", "stock"])
@pytest.mark.parametrize("recipe", ["cpu_grpo", "cpu_reinforce", "cpu_moe_grpo", "cpu_tool_grpo"])
def test_our_recipes_have_no_error(recipe, rollout, tmp_path):
    words = [f"recipe={recipe}", f"rollout={rollout}", f"tim.run_dir={tmp_path}/r", f"tim.cache_dir={tmp_path}/c"]
    source = read(words)
    report = examine(View(source.config, None, source.underscore_numbers))
    assert report.errors == ()


def test_exit_codes_and_json(plain_file, tmp_path):
    broken = run("--json", "--no-machine", str(plain_file), f"{ROLLOUT}.top_k=20")
    assert broken.exit_code == 1
    said = json.loads(broken.stdout)
    assert said["ok"] is False
    assert said["source"] == str(plain_file)
    (one,) = [one for one in said["violations"] if one["rule"] == "exact.sampling-support"]
    assert one["key"] == f"{ROLLOUT}.top_k"
    assert one["level"] == "error"
    assert one["severity"] == "breaks exactness"
    assert set(one) == {"rule", "severity", "level", "key", "problem", "why", "remedy", "blocks", "also", "of_machine"}
    assert one["blocks"] is False
    assert one["also"] == []
    assert all(one[name] for name in ("rule", "severity", "level", "key", "problem", "why", "remedy"))
    assert sum(said["counts"].values()) == len(said["violations"])
    unreadable = run("--json", str(tmp_path / "none.yaml"))
    assert unreadable.exit_code == 2
    assert json.loads(unreadable.stdout)["error"]["problems"][0]["problem"] == "is neither file nor folder"
    assert "none.yaml" in unreadable.stderr.replace("\n", "")


def test_text_names_rule_key_reason_and_remedy(plain_file):
    result = run("--no-machine", str(plain_file), f"{MODEL}.use_liger=true")
    said = " ".join(result.stdout.split())
    assert result.exit_code == 1
    for words in (f"{MODEL}.use_liger: it is True", "[exact.liger]", "Breaks exactness (error):", "-> Set it to false"):
        assert words in said
    (reason,) = [rule.why for rule in OWN if rule.id == "exact.liger"]
    assert reason not in said
    assert reason in run("--why", "--no-machine", str(plain_file), f"{MODEL}.use_liger=true").stdout
    assert " errors" in result.stdout
    assert "Traceback" not in result.output


def test_a_band_that_yaml_read_as_a_number_is_an_error_not_bad_input():
    result = run("--json", "--no-machine", f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    # one mistake, by the rule that knows what was written; what else it brings about stands with it
    (one,) = [one for one in said["violations"] if one["level"] == "error"]
    assert one["rule"] == "correction.band-read-as-number"
    assert one["blocks"] is True
    assert [other["rule"] for other in one["also"]] == ["correction.threshold-below-one"]
    assert said["counts"]["error"] == 1


def test_it_is_fast(view_of):
    view_of("vexact")
    examine(view_of("vexact"))  # imports and caches
    started = time.monotonic()
    examine(view_of("vexact"))
    assert time.monotonic() - started < 3


def test_a_machine_tells_of_no_room_in_words(tmp_path):
    """The disk's rule and preflight ask the same function."""
    (tmp_path / "file").write_text("")
    machine = Machine()
    assert machine.free_disk(tmp_path / "file" / "checkpoints") == f"{tmp_path}/file is a file"
    assert machine.free_disk(tmp_path / "to" / "be" / "made") > 0
    assert Machine(disk=5).free_disk(tmp_path / "file" / "checkpoints") == 5


def test_a_place_that_cannot_be_is_no_finding_of_the_disk(view_of, tmp_path):
    (tmp_path / "file").write_text("")
    changes = {"trainer.save_freq": 5, "trainer.default_local_dir": f"{tmp_path}/file/checkpoints"}
    view = view_of(changes=changes, machine=Machine(), parameters=10**15)
    assert list(disk(view)) == []
    view = view_of(
        changes={**changes, "trainer.default_local_dir": str(tmp_path)}, machine=Machine(), parameters=10**15
    )
    assert [one.key for one in disk(view)] == ["trainer.save_freq"]


def test_byte_code_is_looked_for_beside_the_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "compiled_or_not.py"
    source.write_text("")
    assert not _has_byte_code("compiled_or_not")
    py_compile.compile(str(source))
    assert _has_byte_code("compiled_or_not")
    assert _has_byte_code("no_such_package")
    assert _has_byte_code("itertools"), "which has no source"


def test_what_the_exact_pair_ends_stands_together_and_is_ended(view_of, plain_file):
    report = examine(view_of("verl"))
    assert len(report.together) > 8
    assert {one.severity for one in report.together} == {Severity.EXACTNESS}
    assert set(report.together) <= set(report.violations)
    with_pair = View(read([str(plain_file), *shlex.split(report.together_remedy)]).config, GPU_MACHINE)
    left = {(one.rule, one.key) for first in examine(with_pair).violations for one in (first, *first.also)}
    assert not left & {(one.rule, one.key) for one in report.together}


def test_what_the_exact_pair_does_not_end_keeps_a_remedy_of_its_own(view_of):
    report = examine(view_of("verl", {"actor_rollout_ref.model.lora_rank": 8}))
    (lora,) = [one for one in report.violations if one.rule == "exact.lora"]
    assert lora not in report.together
    assert examine(view_of("vexact", {"actor_rollout_ref.model.use_liger": True})).together == ()


def test_of_a_value_that_cannot_be_meant_no_other_rule_speaks(view_of):
    report = examine(view_of("verl", {"actor_rollout_ref.rollout.n": "x"}))
    (wrong,) = [one for one in report.violations if one.key == "actor_rollout_ref.rollout.n"]
    assert (wrong.rule, wrong.also) == ("start.values", ())
    right = {row.check.name: row.until for row in report.checks if row.state == "not looked at"}
    assert set(right.values()) == {"values"}
    assert "data" in right


def test_what_is_of_the_machine_is_marked(view_of):
    found = examine(view_of("verl", machine=Machine((), {}, VERSIONS, frozenset(), disk=2**50))).violations
    marked = [one for one in found if one.of_machine]
    assert marked
    assert not [one for one in examine(view_of("verl", machine=None)).violations if one.of_machine]
