"""Bad input is named, with key and remedy, before anything is started."""

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_tim.launch import prepare
from verl_tim.launch.checks import (
    Check,
    all_findings,
    data,
    keys,
    machine,
    model,
    prometheus,
    run_checks,
    verl_config,
)
from verl_tim.launch.errors import Finding, LaunchError
from verl_tim.launch.run_folder import check_free, claim
from verl_tim.launch.start import composed, make_ready

from .conftest import ROW

ROLLOUT = "actor_rollout_ref.rollout.name"


def only(findings):
    (finding,) = list(findings)
    return finding


def test_a_good_config_has_no_finding(config_of):
    config = config_of()
    for check in (
        keys.check,
        check_free,
        machine.check,
        machine.check_packages,
        model.check_model,
        model.check_tokenizer,
    ):
        assert list(check(config)) == []
    for check in (data.check_files, data.check_lengths, verl_config.check_verl_tim, verl_config.check_verl):
        assert list(check(config)) == []


# --------------------------------------------------------------------------------------------------------- prometheus


def of_prometheus(config_of, file, *, enable=True):
    prefix = "actor_rollout_ref.rollout"
    return config_of(
        f"{prefix}.prometheus.enable={enable}", f"{prefix}.disable_log_stats=false", f"{prefix}.prometheus.file={file}"
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("scrape_configs: [{job_name: node}]", "which has the job node"),
        ("rule_files: [alerts.yml]\nscrape_configs: [{job_name: ray}]", "which has rule_files"),
        ("- a list", "which has other content"),
        ("global: [", "cannot be read"),
    ],
)
def test_prometheus_settings_that_verl_would_replace_are_kept(config_of, tmp_path, text, named):
    file = tmp_path / "prometheus.yml"
    file.write_text(text)
    finding = only(prometheus.check(of_prometheus(config_of, file)))
    assert finding.key == "actor_rollout_ref.rollout.prometheus.file"
    assert named in finding.problem
    assert not list(prometheus.check(of_prometheus(config_of, file, enable=False)))


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        # what verl wrote for an earlier run, and Ray's own
        "global: {scrape_interval: 10s}\nscrape_configs: [{job_name: ray}, {job_name: rollout, static_configs: []}]",
        "global: {scrape_interval: 10s}\nscrape_configs: [{job_name: ray}]",
    ],
    ids=["none", "empty", "verl's", "ray's"],
)
def test_prometheus_settings_of_nobody_else_are_verls_to_write(config_of, tmp_path, text):
    file = tmp_path / "prometheus.yml"
    if text is not None:
        file.write_text(text)
    assert not list(prometheus.check(of_prometheus(config_of, file)))


# ---------------------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["trainer.total_training_step=2"], "trainer.total_training_step", "trainer.total_training_steps"),
        (["total_training_steps=2"], "total_training_steps", "trainer.total_training_steps"),
        (
            ["actor_rollout_ref.rollout.temp=1"],
            "actor_rollout_ref.rollout.temp",
            "actor_rollout_ref.rollout.temperature",
        ),
        (["rolout=stock"], "rolout", "rollout"),
        (["rollout=stok"], "rollout", "'stock'"),
        (["trainer=contrakt"], "trainer", "'contract'"),
        (["correction=token_tiss"], "correction", "'token_tis'"),
        (["task=chainsum"], "task", "'chain_sum'"),
        (["recipe=cpu_grop"], "recipe", "'cpu_grpo'"),
        (["recipe=nowhere/mine.yaml"], "recipe", "path of a YAML"),
        (["recipe=cpu_grpo", "recipe=cpu_grpo"], "recipe", "one recipe"),
        (["rollout"], "rollout", "KEY=VALUE"),
        (["data.train_batch_size=[1"], "data.train_batch_size=[1", "KEY=VALUE"),
    ],
)
def test_what_does_not_compose_is_named(overrides, key, words):
    with pytest.raises(LaunchError) as caught:
        composed(overrides)
    finding = only(caught.value.findings)
    assert finding.key == key
    assert words in finding.remedy


def test_unknown_tim_key(composer):
    config = composer("+tim.gat.exact=false")
    prepare.absolute_paths(config)
    findings = {finding.key: finding for finding in keys.check(config)}
    assert "tim.gate" in findings["tim.gat"].remedy
    assert set(findings) == {"tim.gat", "tim.gat.exact"}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.total_training_step", "trainer.total_training_steps"),
        ("data.train_batchsize", "data.train_batch_size"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.actor.policy_loss.loss_mod", "actor_rollout_ref.actor.policy_loss.loss_mode"),
        # one slip in a short name: neighbours in each other's place, another letter, one too many, one left out
        ("actor_rollout_ref.rollout.nmae", "actor_rollout_ref.rollout.name"),
        ("data.sede", "data.seed"),
        ("actor_rollout_ref.model.pth", "actor_rollout_ref.model.path"),
        ("data.sead", "data.seed"),
        ("actor_rollout_ref.actor.optim.lrr", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.nnode", "trainer.nnodes"),
        # two slips where verl's class takes no other name
        ("actor_rollout_ref.rollout.respons_lenght", "actor_rollout_ref.rollout.response_length"),
    ],
)
def test_a_misspelt_key_of_verl_is_named_with_the_one_that_was_meant(config_of, key, meant):
    """Behind a + or in a YAML Hydra takes it, and verl would never read it."""
    finding = only(keys.check_spelling(config_of(f"+{key}=1")))
    assert finding.key == key
    assert meant in finding.remedy


def test_keys_that_verls_classes_refuse_are_named_one_by_one_and_once(config_of):
    """The class itself would tell of the first one only, and without its path."""
    unknown = [
        "actor_rollout_ref.actor.optim.mine",
        "actor_rollout_ref.actor.policy_loss.unknown_knob",
        "actor_rollout_ref.rollout.mine",
        "actor_rollout_ref.rollout.val_kwargs.beam",
    ]
    config = config_of(*(f"+{key}=1" for key in unknown))
    assert sorted((one.key, one.remedy) for one in keys.check_spelling(config)) == [
        (key, "take it out") for key in unknown
    ]
    assert list(verl_config.check_verl(config)) == []


def test_the_keys_are_compared_with_verls_once(config_of, monkeypatch, tmp_path):
    """Also where data are made between two rounds of checks, and where one key is wrong."""
    looked = []
    compare = keys._misspelt
    monkeypatch.setattr(keys, "_misspelt", lambda *words: looked.extend([1] * (words[2] == "")) or compare(*words))
    assert [finding.key for finding in all_findings(config_of("+data.sead=1"))] == ["data.sead"]
    assert len(looked) == 1
    looked.clear()
    config = config_of("tim.task.train_size=32", "tim.task.val_size=4", "data.train_files=null", "data.val_files=null")
    make_ready(config, progress=False)
    assert config.data.train_files.startswith(f"{tmp_path}/cache")
    assert len(looked) == 1


def test_verls_classes_are_asked_one_and_all(config_of):
    config = config_of("actor_rollout_ref.actor.loss_agg_mode=none", "actor_rollout_ref.rollout.prompt_length=x")
    config.actor_rollout_ref.rollout.mode = "sync"
    assert [one.key for one in verl_config.check_verl(config)] == [
        "actor_rollout_ref.actor",
        "actor_rollout_ref.rollout",
    ]


def test_keys_that_verl_reads_beyond_its_yaml_are_left_alone(config_of):
    fine = [
        "+actor_rollout_ref.model.override_config.rope_theta=1",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.seeds=1",
        "+ray_kwargs.ray_init.num_gpu=1",
        "+trainer.something_of_mine=1",
        "+trainer.n=1",
        "+data.apply_chat_template_kwargs.enable_thinking=false",
    ]
    assert list(keys.check_spelling(config_of(*fine))) == []


def test_generator_settings_are_the_tasks_business(config_of):
    assert list(keys.check(config_of("+tim.task.difficulty.min_terms=2"))) == []


def test_unset_keys_are_named(composer):
    config = composer("task=parquet", "model=hf")
    prepare.absolute_paths(config)
    found = {finding.key: finding.remedy for finding in keys.check(config)}
    assert set(found) == {"data.train_files", "data.val_files", "actor_rollout_ref.model.path"}
    assert "prompt, data_source, reward_model" in found["data.train_files"]


def test_unset_keys_stop_the_start(tmp_path):
    config = composed(["task=parquet", "model=hf", f"tim.run_dir={tmp_path}/run"])
    with pytest.raises(LaunchError, match=r"data\.train_files"):
        make_ready(config, progress=False)


# -------------------------------------------------------------------------------------------------------------- model


def test_missing_model_folder(config_of):
    finding = only(model.check_model(config_of("actor_rollout_ref.model.path=/nowhere/model")))
    assert finding.key == "actor_rollout_ref.model.path"
    assert "/nowhere/model" in finding.problem


def test_folder_that_is_no_model(config_of, tmp_path):
    finding = only(model.check_model(config_of(f"actor_rollout_ref.model.path={tmp_path}")))
    assert "no config.json" in finding.problem


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: _shards(folder, '{"weight_map": {"a": "model.safetensors", "b": "2.safetensors"}}'), "lacks 2"),
        (lambda folder: _shards(folder, "[]"), "not an index"),
        (lambda folder: _edit(folder / "config.json", architectures=["A", "B"]), "exactly one"),
        (lambda folder: _edit(folder / "config.json", architectures=None), "exactly one"),
    ],
)
def test_broken_model_folder(config_of, model_folder, tmp_path, spoil, words):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    spoil(folder)
    finding = only(model.check_model(config_of(f"actor_rollout_ref.model.path={folder}")))
    assert finding.key == "actor_rollout_ref.model.path"
    assert words in finding.problem


def _shards(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)


def _edit(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "no tokenizer"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
        (lambda folder: _edit(folder / "tokenizer_config.json", eos_token=None), "no eos_token"),
        (lambda folder: _edit(folder / "config.json", vocab_size=8), "only 8 rows"),
    ],
)
def test_tokenizer_without_what_verl_needs(config_of, model_folder, tmp_path, spoil, words):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    spoil(folder)
    findings = list(model.check_tokenizer(config_of(f"actor_rollout_ref.model.path={folder}")))
    assert any(words in finding.problem for finding in findings)
    assert all(finding.key in (model.KEY, model.TOKENIZER_KEY) for finding in findings)


def test_qwen_tokenizer_without_its_end_of_turn(config_of, model_folder, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    plain = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "1": 2}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    for path in (*folder.glob("tokenizer*"), folder / "chat_template.jinja"):
        path.unlink()
    PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<eos>", unk_token="<unk>", chat_template="{{ messages[0]['content'] }}"
    ).save_pretrained(folder)
    problems = " ".join(
        finding.problem for finding in model.check_tokenizer(config_of(f"actor_rollout_ref.model.path={folder}"))
    )
    assert "<|im_end|>" in problems
    assert "line break" in problems


# --------------------------------------------------------------------------------------------------------------- data


def test_missing_data_file(config_of):
    finding = only(data.check_files(config_of("data.train_files=/nowhere/train.parquet")))
    assert (finding.key, "/nowhere/train.parquet" in finding.problem) == ("data.train_files", True)


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_missing_column_is_named(config_of, parquet, column):
    finding = only(data.check_files(config_of(f"data.val_files={parquet('bad', **{column: None})}")))
    assert finding.key == "data.val_files"
    assert f"lacks column {column}" in finding.problem


def test_renamed_prompt_column_is_fine(config_of, parquet):
    path = parquet("renamed", prompt=None, question=ROW["prompt"])
    assert (
        list(
            data.check_files(
                config_of(f"data.train_files={path}", f"data.val_files={path}", "data.prompt_key=question")
            )
        )
        == []
    )


def test_prompt_that_is_no_chat(config_of, parquet):
    finding = only(data.check_files(config_of(f"data.train_files={parquet('bad', prompt='1 + 2')}")))
    assert "row 0" in finding.problem
    assert "role" in finding.problem


def test_reward_model_without_truth(config_of, parquet):
    finding = only(data.check_files(config_of(f"data.train_files={parquet('bad', reward_model={'style': 'rule'})}")))
    assert "ground_truth" in finding.problem


@pytest.mark.parametrize("name", ["bad.parquet", "bad.csv", "bad.jsonl"])
def test_file_that_is_no_data(config_of, tmp_path, name):
    (tmp_path / name).write_text("not a table\n")
    finding = only(data.check_files(config_of(f"data.train_files={tmp_path / name}")))
    assert finding.key == "data.train_files"


def test_fewer_rows_than_a_batch(config_of, parquet):
    finding = only(data.check_files(config_of(f"data.train_files={parquet('few', rows=3)}")))
    assert finding.key == "data.train_batch_size"
    assert "3 rows" in finding.problem


def test_prompt_plus_answer_over_the_context(config_of):
    finding = only(data.check_lengths(config_of("data.max_response_length=5000")))
    assert finding.key == "data.max_response_length"
    assert "1024" in finding.problem


def test_prompt_longer_than_allowed(config_of, parquet):
    path = parquet("long", prompt=[{"role": "user", "content": "1 + " * 100}])
    config = config_of(f"data.train_files={path}", "data.max_prompt_length=64")
    finding = only(data.check_lengths(config))
    assert finding.key == "data.max_prompt_length"
    longest = int(finding.remedy.split("data.max_prompt_length=")[1].split(",")[0])
    config.data.max_prompt_length = config.actor_rollout_ref.rollout.prompt_length = longest
    assert list(data.check_lengths(config)) == []


def test_prompts_are_measured_once_for_all_runs_and_anew_where_file_or_template_is_another(
    config_of, parquet, monkeypatch
):
    rendered, render = [], data.chat.render

    def seen(tokenizer, prompt, options):
        if prompt[0]["content"].startswith("1 +"):  # of the file
            rendered.append(prompt)
        return render(tokenizer, prompt, options)

    monkeypatch.setattr(data.chat, "render", seen)
    path = parquet("some", prompt=[{"role": "user", "content": "1 + 1"}])
    config = config_of(f"data.train_files={path}", "data.max_prompt_length=64")
    assert list(data.check_lengths(config)) == []
    first = len(rendered)
    assert first
    config.data.seed = 2
    assert list(data.check_lengths(config)) == []
    assert len(rendered) == first, "another run with the same prompts"
    OmegaConf.update(config, "data.apply_chat_template_kwargs", {"no_such_word": True}, force_add=True)
    assert list(data.check_lengths(config)) == []
    again = len(rendered)
    assert again > first
    parquet("some", prompt=[{"role": "user", "content": "1 + " * 100}])
    assert only(data.check_lengths(config)).key == "data.max_prompt_length"
    assert len(rendered) > again


# ------------------------------------------------------------------------------------------------------------ machine


def test_gpu_cluster_without_gpu(config_of, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    finding = only(machine.check(config_of("cluster=gpu1")))
    assert (finding.key, finding.remedy) == ("trainer.n_gpus_per_node", "take cluster=cpu")


def test_verifiers_that_do_not_import_are_said_at_the_start(config_of, monkeypatch):
    """A `six.py` in the working folder hides the package, and verl ends minutes later with "an empty list as keys"."""

    def hidden(name):
        raise ModuleNotFoundError("No module named 'six.moves'; 'six' is not a package")

    config = config_of()
    assert not list(machine.check_packages(config))
    monkeypatch.setattr(machine, "import_module", hidden)
    (finding,) = machine.check_packages(config)
    assert finding.key == "reward.custom_reward_function.path"
    assert "'six' is not a package" in finding.problem
    config.reward.custom_reward_function.path = "mine.py"
    assert not list(machine.check_packages(config))


def not_installed(name):
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(("version", "accepted"), [("0.28.0+cpu", True), ("0.24.0", False), ("0.24.0+cu130", False)])
def test_vllm_without_gpu_is_its_build_for_cpus(config_of, monkeypatch, version, accepted):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("verl_tim.rollout.vllm_cpu.installed", lambda: version)
    assert [finding.key for finding in machine.check(config_of("rollout=vllm"))] == [] if accepted else [ROLLOUT]


@pytest.fixture
def no_vllm(monkeypatch):
    for module in ("machine", "trackers"):
        monkeypatch.setattr(f"verl_tim.launch.checks.{module}.find_spec", lambda name: None)
    monkeypatch.setattr("verl_tim.rollout.vllm_cpu.metadata.version", not_installed)


@pytest.mark.usefixtures("no_vllm")
def test_vllm_without_gpu_and_package(config_of, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    config = config_of("rollout=vllm", "tracker=wandb")
    finding = only(machine.check(config))
    assert finding.key == ROLLOUT
    assert "vllm is not installed" in finding.problem
    assert "scripts/vllm_cpu.sh" in finding.remedy
    found = {finding.key: finding.remedy for finding in machine.check_packages(config)}
    assert ROLLOUT not in found, "one thing is missing, and one remedy mends it"
    assert "verl_tim[wandb]" in found["trainer.logger"]
    assert "TransferQueue" in found["trainer.use_v1"]


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize(("gpus", "cluster"), [(1, False), (0, True)])
def test_vllm_without_package_where_there_are_gpus(config_of, monkeypatch, gpus, cluster):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    config = config_of("rollout=vllm")
    monkeypatch.setattr("verl_tim.launch.checks.machine.joins_a_cluster", lambda config: cluster)
    assert not list(machine.check(config))
    found = {finding.key: finding.remedy for finding in machine.check_packages(config)}
    assert "verl_tim[gpu]" in found[ROLLOUT]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("ray_kwargs.ray_init.num_cpus=4", "ray_kwargs.ray_init.num_cpus"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "tensor_model_parallel_size"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "pipeline_model_parallel_size"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vexact.pages=2", "engine_kwargs.vexact"),
        ("actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.actor.strategy"),
        ("actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.rollout.dtype"),
    ],
)
def test_what_the_engine_cannot_do(config_of, override, key):
    findings = [f"{finding.key} {finding.problem}" for finding in verl_config.check_verl_tim(config_of(override))]
    assert any(key in finding for finding in findings)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.adv_estimator=gae", "critic"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-median", "token-median"),
    ],
)
def test_what_verl_refuses(config_of, override, words):
    assert words in only(verl_config.check_verl(config_of(override))).problem


# --------------------------------------------------------------------------------------------------------- run folder


def test_run_folder_is_taken_once(config_of):
    config = config_of()
    folder = claim(config)
    assert OmegaConf.load(folder.path / "config.yaml") == config
    finding = only(check_free(config))
    assert finding.key == "tim.run_dir"
    assert "left no checkpoint" in finding.remedy
    assert "resume_mode" not in finding.remedy, "there is nothing to go on from"
    with pytest.raises(LaunchError, match=r"tim.run_dir"):
        claim(config)


def test_run_folder_may_be_resumed(config_of):
    config = config_of()
    claim(config)
    config.trainer.resume_mode = "auto"
    assert list(check_free(config)) == []
    assert claim(config).path.is_dir()


def test_run_folder_with_a_checkpoint_names_the_key_that_goes_on(config_of):
    config = config_of()
    claim(config)
    checkpoints = Path(config.trainer.default_local_dir)
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    assert "trainer.resume_mode=auto" in only(check_free(config)).remedy


def test_run_folder_that_is_a_file(config_of, tmp_path):
    (tmp_path / "run").write_text("")
    assert "is a file" in only(check_free(config_of())).problem


def test_nothing_is_left_to_resolve(config_of):
    config = config_of()

    def walk(node):
        for value in node.values() if isinstance(node, dict) else node:
            if isinstance(value, (dict, list)):
                yield from walk(value)
            else:
                yield value

    assert not [value for value in walk(OmegaConf.to_container(config)) if isinstance(value, str) and "${" in value]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tim.task.name=chainsum", "chainsum"),
        ("+tim.task.difficulty.min_term=2", "min_term"),
        ("tim.task.train_size=0", "train_size"),
    ],
)
def test_bad_task_settings(composer, tmp_path, override, words):
    config = composer(f"tim.cache_dir={tmp_path}", override)
    with pytest.raises(LaunchError, match=words):
        prepare.make_data(config, progress=False)


def test_data_are_made_and_found_again(composer, tmp_path):
    made = []
    for _ in range(2):
        config = composer(f"tim.cache_dir={tmp_path}", "tim.task.train_size=16", "tim.task.val_size=4")
        prepare.make_data(config, progress=False)
        made.append(config.data.train_files)
    assert made[0] == made[1]
    assert list(data.check_files(config_with_batch(config, 16))) == []


def config_with_batch(config, size):
    config.data.train_batch_size = size
    return config


def test_a_run_that_cannot_start_makes_nothing(composer, tmp_path, monkeypatch):
    """What can be known without model and data is known before they are made."""
    monkeypatch.setattr(prepare, "make_missing", lambda *_, **__: pytest.fail("made something"))
    config = composer(
        f"tim.cache_dir={tmp_path}",
        f"tim.run_dir={tmp_path}/run",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    with pytest.raises(LaunchError, match="tensor_model_parallel_size"):
        make_ready(config, progress=False)


def test_a_registration_that_failed_stops_the_start(monkeypatch):
    """verl swallows what goes wrong in a plugin; the start must not."""
    from verl_tim import plugin
    from verl_tim.launch import start

    monkeypatch.setitem(plugin._failed, "register_rollouts", RuntimeError("no such registry"))
    with pytest.raises(LaunchError, match="no such registry"):
        start.make_ready(OmegaConf.create({}))


def test_what_is_misspelt_is_looked_for_once_and_told_to_the_check_that_needs_it():
    asked = []

    def spelling(config):
        asked.append("spelling")
        yield Finding("data.sed", "is not a key", "did you mean data.seed?")

    def of_verl(config, *, misspelt):
        asked.append(misspelt)
        return []

    rows = [Check("spelling", spelling, names_misspelt=True), Check("verl", of_verl, takes_misspelt=True)]
    config = OmegaConf.create({})
    assert [check.name for check, _ in run_checks(config, rows)] == ["spelling", "verl"]
    assert [check.name for check, _ in run_checks(config, rows, spelt=True)] == ["verl"]
    run_checks(config, rows[1:])
    # known to be right only where the caller says so: of nobody who looked, the check looks itself
    assert asked == ["spelling", ["data.sed"], [], None]


def test_a_finding_of_what_the_others_compute_with_ends_the_list():
    def finds(config):
        yield Finding("data.seed", "is wrong", "mend it")

    rows = [Check("one", finds, ends_the_list=True), Check("two", finds)]
    assert [check.name for check, _ in run_checks(OmegaConf.create({}), rows)] == ["one"]
    rows = [Check("one", lambda config: [], ends_the_list=True), Check("two", finds)]
    assert [check.name for check, _ in run_checks(OmegaConf.create({}), rows)] == ["one", "two"]
