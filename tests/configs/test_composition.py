"""Every choice of every group composes into a config that verl's own config classes take."""

import inspect
import itertools
import multiprocessing
import random
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf, _utils
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.diagnosis.manifest import flatten
from verl_tim.launch import compose, prepare
from verl_tim.launch.compose import compose_config, hydra_for
from verl_tim.launch.errors import LaunchError
from verl_tim.launch.recipes import find_recipe, group_options, recipe_names

RECIPES = recipe_names()
GROUPS = group_options()
# Recipes, rollouts, corrections and clusters in every combination: test_every_run.py.
# The files of the correction group have the same keys (test_correction.py); under bypass they exchange the loss, too.
CORRECTIONS = {"none", "icepop", "bypass_ppo"}


def config_of(recipe, choices, model_folder="MODEL"):
    overrides = [f"{group}={choice}" for group, choice in choices.items()]
    overrides.append(f"actor_rollout_ref.model.path={model_folder}")
    if choices.get("task") == "parquet":
        overrides += ["data.train_files=TRAIN.parquet", "data.val_files=VAL.parquet"]
    config = compose_config(find_recipe(recipe), overrides)
    prepare.absolute_paths(config)
    prepare.resolve(config)
    return config


def assert_verl_takes(config):
    """verl 0.9.1's validate_config, and the dataclasses its workers make of the config."""
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    # verl's own; the plugin puts our checks in front of it
    inspect.unwrap(validate_config)(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=config.algorithm.adv_estimator == "gae",
    )
    assert rollout.calculate_log_probs is True
    assert rollout.prompt_length == config.data.max_prompt_length
    assert actor.strategy == "fsdp2"
    assert actor.policy_loss.rollout_correction == config.algorithm.rollout_correction
    return rollout, actor


def assert_choices_arrived(config, recipe, choices):
    """What each group promises, read where verl reads it."""
    chosen = config.tim.choices
    assert chosen.recipe == recipe
    for group, choice in choices.items():
        assert chosen[group] == choice
    rollout = config.actor_rollout_ref.rollout
    name = choices.get("rollout", "vexact")
    assert rollout.name == ("vllm" if name.startswith("vllm") else name)
    env = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert ("VLLM_BATCH_INVARIANT" in env) == (name == "vllm_invariant")
    assert f"{config.tim.run_dir}/metrics.jsonl" == env.VERL_FILE_LOGGER_PATH
    contract = choices.get("trainer", "contract") == "contract"
    assert config.actor_rollout_ref.model.use_fused_kernels is contract
    assert config.actor_rollout_ref.model.fused_kernel_options.impl_backend == ("contract" if contract else "torch")
    replay = choices.get("routing_replay", "off")
    mode = OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.router_replay.mode")
    assert mode == {"off": None, "r2": "R2", "r3": "R3"}[replay]
    assert rollout.enable_rollout_routing_replay is (replay == "r3")
    bypass = choices.get("correction", "none").startswith("bypass_")
    assert config.algorithm.rollout_correction.bypass_mode is bypass
    assert (config.actor_rollout_ref.actor.policy_loss.loss_mode == "bypass_mode") is bypass
    assert OmegaConf.missing_keys(config) == {"reward.reward_model.rollout.name"}


def pairwise(groups):
    """A small list of choices in which every pair of options of any two groups occurs."""
    names = sorted(groups)
    wanted = {
        frozenset([(a, x), (b, y)]) for a, b in itertools.combinations(names, 2) for x in groups[a] for y in groups[b]
    }
    rows = []
    while wanted:
        row = dict(next(iter(sorted(map(sorted, wanted)))))
        for name in names:
            if name not in row:
                row[name] = max(
                    groups[name],
                    key=lambda option: sum(frozenset([(name, option), pair]) in wanted for pair in row.items()),
                )
        wanted -= {frozenset(pair) for pair in itertools.combinations(sorted(row.items()), 2)}
        rows.append(row)
    return rows


def test_every_group_offers_something():
    assert set(GROUPS) == {
        "cluster",
        "correction",
        "matrix",
        "model",
        "rollout",
        "routing_replay",
        "task",
        "tracker",
        "trainer",
    }
    assert all(GROUPS.values())
    assert GROUPS["rollout"] == ["stock", "vexact", "vllm", "vllm_invariant"]
    assert GROUPS["trainer"] == ["contract", "stock"]
    assert set(GROUPS["correction"]) > CORRECTIONS
    assert GROUPS["cluster"] == ["cpu", "cpu2x1", "gpu1", "gpu1_shared", "gpu2x8", "gpu8", "gpu8x8"]
    assert (
        recipe_names()
        == [
            *("cpu_grpo", "cpu_moe_grpo", "cpu_reinforce", "cpu_tool_grpo"),
            *("dense_grpo", "dense_grpo_1gpu", "dense_reinforce", "dense_reinforce_1gpu"),
            *("evidence_grpo", "evidence_reinforce"),
            *("moe_grpo", "moe_grpo_1gpu", "moe_reinforce"),
        ]
        == RECIPES
    )


def own_values(group, option):
    """Key -> value of what one choice of a group sets by itself, interpolations as they are written."""
    from verl_tim import configs

    file = Path(configs.__path__[0], group, f"{option}.yaml")
    values = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    below = {}
    for other in values.pop("defaults", []):
        if other != "_self_":
            below |= own_values(group, other)
    return below | flatten(values)


def test_no_group_takes_back_what_the_cluster_says():
    """A cluster knows its machine; rollout and trainer come after it in a recipe's defaults and would win."""
    clusters = {
        (key, str(value)) for cluster in GROUPS["cluster"] for key, value in own_values("cluster", cluster).items()
    }
    said = {key for key, _ in clusters}
    for group in sorted(set(GROUPS) - {"cluster", "matrix"}):
        for option in GROUPS[group]:
            for key, value in own_values(group, option).items():
                assert key not in said or all(str(value) == theirs for name, theirs in clusters if name == key), (
                    f"{group}={option} sets {key}={value} over the cluster's"
                )


@pytest.mark.parametrize("rollout", GROUPS["rollout"])
def test_a_shared_gpu_is_shared_with_every_rollout(rollout):
    with hydra_for(find_recipe("evidence_grpo")):
        config = config_of("evidence_grpo", {"rollout": rollout})
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.1


def typed(node):
    if isinstance(node, dict):
        return {key: typed(value) for key, value in node.items()}
    return [typed(value) for value in node] if isinstance(node, list) else (type(node), node)


@pytest.mark.parametrize("recipe", ["cpu_grpo", "moe_reinforce"])
def test_the_quick_parser_reads_what_the_other_reads(recipe, monkeypatch):
    def composed():
        with hydra_for(find_recipe(recipe)):
            return typed(OmegaConf.to_container(compose_config(find_recipe(recipe), ["rollout=vllm"])))

    of_python, quick = _utils.get_yaml_loader, composed()
    assert _utils.get_yaml_loader is of_python
    monkeypatch.setattr(compose.yaml, "__with_libyaml__", False)
    assert quick == composed()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"defaults: [cpu_grpo]\ntim: {run_dir: [a}\n", r"config: a file is not YAML: .*mine.yaml.*line 2"),
        (b"data: {seed: 1}\ndata: {seed: 2}\n", r"config: a file is not YAML: .*duplicate key data .*line 2"),
        (b"data: \xff\xfe\n", r"config: a file is not text: .*mine.yaml"),
        (b"", r"defaults: bring none of verl's groups -> .*ppo_trainer"),
        (b"[1, 2]", r"config: .*ListConfig"),
        (b"defaults: [nothing_there]", r"recipe: .*nothing_there"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_told_without_a_traceback(content, told, tmp_path):
    (tmp_path / "mine.yaml").write_bytes(content)
    result = CliRunner().invoke(app, ["train", f"recipe={tmp_path / 'mine.yaml'}", "--dry-run"])
    assert result.exit_code == 2
    assert re.search(told, " ".join(result.stderr.split())), result.stderr


@pytest.mark.parametrize("replay", GROUPS["routing_replay"])
def test_routing_replay_reaches_the_workers_engine(replay):
    from verl_tim.training.replay_checks import replay_findings
    from verl_tim.training.replay_config import mode_of_engine

    choices = {"rollout": "stock", "trainer": "stock", "routing_replay": replay}
    with hydra_for(find_recipe("cpu_moe_grpo")):
        config = config_of("cpu_moe_grpo", choices)
    assert_choices_arrived(config, "cpu_moe_grpo", choices)
    rollout, actor = assert_verl_takes(config)
    assert mode_of_engine(actor.engine) == replay
    assert rollout.enable_rollout_routing_replay is (replay == "r3")
    assert list(replay_findings(config, cpu_only=True)) == []


@pytest.mark.parametrize(
    ("recipe", "trainer", "returned"),
    [
        # its build for CPUs returns none
        ("cpu_moe_grpo", "contract", False),
        ("moe_grpo_1gpu", "contract", True),
        ("evidence_grpo", "contract", False),
        ("moe_grpo", "contract", True),
        # plain transformers' routers are not recorded: vLLM's choices would have no counterpart
        ("moe_grpo", "stock", False),
    ],
)
@pytest.mark.parametrize("rollout", ["vllm", "vllm_invariant"])
def test_vllm_returns_routes_where_both_sides_are_recorded(recipe, trainer, returned, rollout):
    choices = {"rollout": rollout, "trainer": trainer}
    with hydra_for(find_recipe(recipe)):
        config = config_of(recipe, choices)
    kwargs = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert kwargs.enable_return_routed_experts is returned
    assert config.tim.vllm_routes is returned


@pytest.mark.parametrize(("recipe", "on_gpu"), [("cpu_grpo", False), ("dense_grpo_1gpu", True)])
def test_vllm_sleeps_and_records_graphs_on_a_gpu_only(recipe, on_gpu):
    from verl.utils.config import omega_conf_to_dataclass

    with hydra_for(find_recipe(recipe)):
        config = config_of(recipe, {"rollout": "vllm"})
    rollout = config.actor_rollout_ref.rollout
    assert rollout.enable_sleep_mode is on_gpu
    assert rollout.enforce_eager is not on_gpu
    assert ("kv_cache_memory_bytes" in rollout.engine_kwargs.vllm) is not on_gpu
    assert omega_conf_to_dataclass(rollout).enable_sleep_mode is on_gpu


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_as_it_is_becomes_verl_dataclasses(recipe, model_folder):
    from verl.utils.config import omega_conf_to_dataclass

    with hydra_for(find_recipe(recipe)):
        config = config_of(recipe, {}, model_folder)
    assert_choices_arrived(config, recipe, {})
    assert_verl_takes(config)
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    assert model.hf_config._attn_implementation == "sdpa"
    assert model.tokenizer.eos_token == "<|im_end|>"


def rows_of_pairs():
    groups = {name: options for name, options in GROUPS.items() if name not in ("cluster", "matrix")}
    return pairwise({"recipe": RECIPES, **groups, "correction": sorted(CORRECTIONS)})


def compose_rows(rows):
    """Composes rows of choices, each through verl's config classes; how many there were."""
    count = 0
    for recipe in RECIPES:
        mine = [row for row in rows if row["recipe"] == recipe]
        if not mine:
            continue
        with hydra_for(find_recipe(recipe)):
            for row in mine:
                choices = {group: choice for group, choice in row.items() if group != "recipe"}
                config = config_of(recipe, choices)
                assert_choices_arrived(config, recipe, choices)
                if choices["routing_replay"] == "r2" and choices["correction"].startswith("bypass_"):
                    # bypass skips the forward in which r2 records; ours says so, too (test_replay_checks.py)
                    with pytest.raises(ValueError, match=r"requires algorithm\.rollout_correction\.bypass_mode=False"):
                        assert_verl_takes(config)
                else:
                    assert_verl_takes(config)
                count += 1
    return count


def test_a_sample_of_choices_composes():
    assert compose_rows(random.Random(0).sample(rows_of_pairs(), 12)) == 12


@pytest.mark.exhaustive
def test_every_pair_of_choices_composes():
    rows = rows_of_pairs()
    seen = {(group, choice) for row in rows for group, choice in row.items()}
    assert {choice for group, choice in seen if group == "task"} == set(GROUPS["task"])
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert sum(pool.map(compose_rows, [rows[::2], rows[1::2]])) == len(rows)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.total_training_steps=20",
        "actor_rollout_ref.rollout.temperature=0.6",
        "actor_rollout_ref.actor.optim.lr=3e-6",
        "data.max_response_length=17",
        "algorithm.gamma=0.9",
        "trainer.use_v1=false",
        "tim.gate.on_mismatch=warn",
        "+actor_rollout_ref.model.override_config.sliding_window=null",
    ],
)
def test_a_key_override_wins_over_every_group(override):
    key, value = override.lstrip("+").split("=")
    with hydra_for(find_recipe("cpu_grpo")):
        config = compose_config(
            find_recipe("cpu_grpo"), ["rollout=stock", "trainer=stock", "correction=recompute", override]
        )
    assert str(OmegaConf.select(config, key)).lower() == str(OmegaConf.create(f"v: {value}").v).lower()


def test_verls_own_groups_are_still_reachable():
    with hydra_for(find_recipe("cpu_grpo")):
        config = compose_config(
            find_recipe("cpu_grpo"), ["model_engine=dp", "rollout@actor_rollout_ref.rollout=rollout"]
        )
    assert config.actor_rollout_ref.rollout.name == "vexact"


def test_reinforce_takes_one_step_per_batch_without_a_ratio():
    with hydra_for(find_recipe("cpu_reinforce")):
        config = config_of("cpu_reinforce", {})
        halved = compose_config(find_recipe("cpu_reinforce"), ["data.train_batch_size=64"])
    actor = config.actor_rollout_ref.actor
    assert actor.ppo_mini_batch_size == config.data.train_batch_size
    assert actor.ppo_epochs == 1
    assert actor.policy_loss.loss_mode == "gpg"
    assert config.algorithm.adv_estimator == "reinforce_plus_plus"
    assert halved.actor_rollout_ref.actor.ppo_mini_batch_size == 64


def test_only_the_rollout_differs_between_the_runs_of_a_pair():
    def flat(rollout):
        with hydra_for(find_recipe("cpu_grpo")):
            config = compose_config(
                find_recipe("cpu_grpo"),
                [
                    f"rollout={rollout}",
                    "tim.run_dir=runs/x",
                    "trainer.experiment_name=x",
                    "actor_rollout_ref.model.path=M",
                ],
            )
        prepare.resolve(config)
        result = {}

        def walk(node, prefix):
            for key, value in node.items():
                if isinstance(value, dict):
                    walk(value, f"{prefix}{key}.")
                else:
                    result[f"{prefix}{key}"] = value

        walk(OmegaConf.to_container(config), "")
        return result

    exact, stock = flat("vexact"), flat("stock")
    differing = {key for key in exact.keys() | stock.keys() if exact.get(key) != stock.get(key)}
    assert {key for key in differing if not key.startswith("actor_rollout_ref.rollout.engine_kwargs.")} == {
        "actor_rollout_ref.rollout.name",
        "distillation.teacher_models.teacher_model.inference.name",
        "tim.choices.rollout",
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_choice_of_rollout_changes_the_rollout_only(recipe):
    """A comparison changes one thing: the page must find nothing else that differs."""
    from verl_tim.diagnosis.config_diff import diff_configs

    configs = {}
    with hydra_for(find_recipe(recipe)):
        for rollout in ("vexact", "stock", "vllm"):
            overrides = [
                f"rollout={rollout}",
                "actor_rollout_ref.model.path=MODEL",
                f"trainer.experiment_name={rollout}",
            ]
            config = compose_config(find_recipe(recipe), overrides)
            prepare.absolute_paths(config)
            prepare.resolve(config)
            configs[rollout] = OmegaConf.to_container(config, throw_on_missing=False)
    assert [difference.key for difference in diff_configs(configs)] == []
    assert any(difference.of_rollout for difference in diff_configs(configs, include_rollout=True))


@pytest.mark.parametrize("group", ["routing_replay", "rollout", "correction"])
def test_a_group_of_one_option_takes_no_second(group):
    """Hydra would compose both, the last over the first, without a word."""
    first, second = GROUPS[group][:2]
    with hydra_for(find_recipe("cpu_moe_grpo")), pytest.raises(LaunchError) as refused:
        config_of("cpu_moe_grpo", {group: f"[{first},{second}]"})
    (found,) = refused.value.findings
    assert (found.key, found.problem.split(",")[0]) == (group, "takes one option")
    assert f"-m {group}={first},{second}" in found.remedy
