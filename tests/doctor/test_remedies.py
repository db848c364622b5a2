"""What a config is told to change can be typed behind it: whole keys, a + only where one is due, no group it lacks."""

import ast
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_tim.doctor.examine import examine
from verl_tim.doctor.rules import ALL
from verl_tim.doctor.source import read
from verl_tim.doctor.view import View
from verl_tim.launch.checks import values
from verl_tim.launch.recipes import group_options
from verl_tim.training.config import WORKER_ENVIRONMENT, ConfigError
from verl_tim.training.remedy import COMMANDS, GROUP_WORD, KEY_WORD, OVERRIDES, typeable
from verl_tim.training.replay_config import REPLAY_KEY
from verl_tim.training.start_checks import check

from .conftest import GPU_MACHINE
from .test_rules import CASES

PACKAGE = Path(__file__).parents[2] / "verl_tim"
TOP = (*values.defaults_of({}), "tim")
ENGINE = "model_engine"  # a group of verl's own
# KEY=VALUE, with small letters only: environment variables have large ones
WRITTEN = re.compile(r"(?<![\w.\[{'\"=])\+?([a-z_][\w.]*)=(?=\S)")
# a word for a shell, in its quotes or without
TYPED = re.compile(r"'(?P<quoted>\+?\w+(?:\.\w+)+=[^']*)'|" + KEY_WORD.pattern)


def half_keys(text):
    return [
        key for key in WRITTEN.findall(text) if key != ENGINE and (key.partition(".")[0] not in TOP or "." not in key)
    ]


def typed(text):
    return {shlex.split(match[0])[0] for match in TYPED.finditer(text)}


def told(report):
    return [one.remedy for first in report.violations for one in (first, *first.also)]


def test_every_option_that_a_remedy_names_can_be_said_in_keys():
    known = {f"{group}={option}" for group, options in group_options().items() for option in options}
    files = [*PACKAGE.glob("doctor/rules/*.py"), *PACKAGE.glob("launch/checks/*.py"), *PACKAGE.glob("training/*.py")]
    named = {
        word[0]
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in GROUP_WORD.finditer(node.value)
    }
    assert len(named) > 10
    assert named & known <= {*OVERRIDES, *COMMANDS}


@pytest.mark.parametrize("option", OVERRIDES)
def test_the_keys_do_what_the_option_does(option, plain_file, configs, tmp_path):
    words = shlex.split(typeable(option, configs["verl"]))
    plain = read([str(plain_file), *words]).config
    recipe = read([option, f"tim.run_dir={tmp_path}/r", f"tim.cache_dir={tmp_path}/c"]).config
    assert len(words) == len(OVERRIDES[option])
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        # a recipe without replay leaves its mode to verl
        expected = OmegaConf.select(recipe, key, default="disabled" if key == REPLAY_KEY else None)
        if option != "tracker=file":  # which names a file, too
            assert OmegaConf.select(plain, key) == expected


def test_every_remedy_can_be_typed_behind_a_plain_config(plain_file, configs, view_of):
    words = {word for rule in ALL for word in typed(typeable(rule.remedy, configs["verl"]))}
    for case in CASES:
        if case.base == "verl":
            (rule,) = [rule for rule in ALL if rule.id == case.rule]
            for finding in rule.examine(view_of("verl", case.bad, **{**case.facts, **case.bad_facts})):
                words |= typed(typeable(finding.remedy, configs["verl"]))
    assert len(words) > 40
    refused = {}
    for word in sorted(words):
        try:
            read([str(plain_file), word])
        except Exception as error:
            refused[word] = str(error)
    assert refused == {}


def test_a_variable_of_the_workers_stays_text_through_the_shell(plain_file, configs):
    """Ray takes no number there."""
    for rule in ALL:
        for word in typed(typeable(rule.remedy, configs["verl"])):
            if WORKER_ENVIRONMENT in word:
                config = read([str(plain_file), word]).config
                assert isinstance(OmegaConf.select(config, word.lstrip("+").partition("=")[0]), str)


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_remedies_of_rules_write_whole_keys(rule, configs):
    assert half_keys(typeable(rule.remedy, configs["verl"])) == []


@pytest.mark.parametrize("case", CASES, ids=[f"{case.rule}-{case.key.rpartition('.')[2]}" for case in CASES])
def test_remedies_of_findings_write_whole_keys(case, view_of, configs):
    (rule,) = [rule for rule in ALL if rule.id == case.rule]
    for finding in rule.examine(view_of(case.base, case.bad, **{**case.facts, **case.bad_facts})):
        remedy = typeable(finding.remedy, configs["verl"])
        assert half_keys(remedy) == []
        assert not GROUP_WORD.search(remedy)


def test_only_a_recipe_is_told_of_groups(view_of):
    changes = {"actor_rollout_ref.rollout.name": "stock", "data.val_files": "/nowhere.parquet"}
    plain, recipe = (examine(view_of(base, changes, machine=GPU_MACHINE)) for base in ("verl", "vexact"))
    assert not [remedy for remedy in told(plain) if GROUP_WORD.search(remedy)]
    assert not [one for row in plain.checks for one in row.findings if GROUP_WORD.search(one.remedy)]
    assert "actor_rollout_ref.rollout.name=vexact" in told(plain)
    assert "rollout=vexact" in {one.remedy for one in recipe.violations}


def test_a_start_under_verls_own_command_is_told_the_same(view_of):
    """`check` runs in main_ppo, whose command line has no group of this package's either."""
    config = view_of("verl", {"actor_rollout_ref.rollout.name": "stock", "actor_rollout_ref.actor.strategy": "fsdp"})
    with pytest.raises(ConfigError) as refused:
        check(config.given)
    assert not GROUP_WORD.search(str(refused.value))
    assert half_keys(str(refused.value)) == []


def test_a_group_that_a_recipe_leaves_out_is_added(configs):
    config = OmegaConf.merge(configs["vexact"], {"tim": {"choices": {"tracker": None}}})
    assert typeable("take tracker=file, or rollout=vexact", config) == "take +tracker=file, or rollout=vexact"


def test_a_plus_stands_before_a_key_that_the_config_lacks_and_before_no_other(configs):
    key, lacks = "actor_rollout_ref.rollout.n", "actor_rollout_ref.model.override_config.x"
    assert typeable(f"set +{key}=8, {lacks}=1; so", configs["verl"]) == f"set {key}=8, +{lacks}=1; so"
    assert typeable("(trainer.logger=[console,file])", configs["verl"]) == "('trainer.logger=[console,file]')"


def test_an_aside_about_groups_is_left_out_and_what_is_no_option_stays(configs):
    for remedy, expected in (
        ("Set trainer.nnodes=1 (cluster=cpu does); so", "Set trainer.nnodes=1; so"),
        ("set trainer.v1.trainer_mode=sync, or trainer=mine",) * 2,
        (
            "take rollout=vexact or rollout=stock",
            "take actor_rollout_ref.rollout.name=vexact or actor_rollout_ref.rollout.name=stock",
        ),
    ):
        assert typeable(remedy, configs["verl"]) == expected


def test_a_laptop_with_a_plain_yaml_is_told_what_it_can_write(plain_file):
    """No GPU, a model and data that are not here: everything that a first try meets."""
    words = ["actor_rollout_ref.model.path=/models/none", "data.train_files=/none.parquet", "trainer.logger=[clearml]"]
    machine = replace(GPU_MACHINE, gpus=(), modules=frozenset())
    remedies = told(examine(View(read([str(plain_file), *words]).config, machine)))
    assert len(remedies) > 10
    assert not [remedy for remedy in remedies if GROUP_WORD.search(remedy) or half_keys(remedy)]
    assert "Set +actor_rollout_ref.model.override_config.attn_implementation=sdpa" in remedies
