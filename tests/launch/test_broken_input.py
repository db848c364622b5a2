"""Files that are there and broken, templates, reward functions: named before Ray starts, and never with a traceback."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from verl_tim.cli import app
from verl_tim.launch.checks import all_findings, chat, data, model, reward
from verl_tim.tasks.architectures import init_model, resolve_shape

from .conftest import ROW

MODEL, TRAIN = "actor_rollout_ref.model.path", "data.train_files"
LONG = {**ROW, "prompt": [{"role": "user", "content": "1 + " * 100}]}


@pytest.fixture
def folder(model_folder, tmp_path):
    """A copy of the model folder, to be broken."""
    copy = tmp_path / "model"
    shutil.copytree(model_folder, copy)
    return copy


def findings(config):
    """All that a start would report, by key."""
    return {finding.key: finding for finding in all_findings(config)}


def only(found):
    (finding,) = list(found)
    return finding


# ------------------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("kept", [0.9, 0.0001, 0.0])
def test_a_torn_weight_file(config_of, folder, kept):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(len(content) * kept)])
    found = findings(config_of(f"{MODEL}={folder}"))
    assert set(found) == {MODEL}
    assert "torn" in found[MODEL].problem
    assert "model.safetensors" in found[MODEL].problem


def test_a_torn_shard_is_named(config_of, folder):
    (folder / "model-2.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    finding = only(model.check_model(config_of(f"{MODEL}={folder}")))
    assert "model-2.safetensors (" in finding.problem
    assert "model.safetensors (" not in finding.problem


def test_a_config_that_holds_no_keys(config_of, folder):
    (folder / "config.json").write_text("[]")
    found = findings(config_of(f"{MODEL}={folder}", "tim.deterministic=true", "routing_replay=r3"))
    assert "config.json holds no keys" in found[MODEL].problem


def test_weights_of_another_architecture(config_of, folder, tmp_path):
    shape = resolve_shape("qwen3_moe")
    other = init_model("qwen3_moe", shape, eos_token_id=1, pad_token_id=0, seed=0)
    other.save_pretrained(tmp_path / "moe")
    shutil.copy(tmp_path / "moe/model.safetensors", folder / "model.safetensors")
    finding = findings(config_of(f"{MODEL}={folder}"))[MODEL]
    assert "not of the model in its config.json" in finding.problem
    assert "mlp.down_proj.weight" in finding.problem  # lacking
    assert "experts" in finding.problem  # too many
    assert "one model" in finding.remedy


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128}, "another shape in model.embed_tokens.weight"),
        ({"intermediate_size": 96}, "another shape in model.layers.0.mlp"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lack model.layers.2."),
        ({"num_hidden_layers": 1, "layer_types": None}, "has not: model.layers.1."),
    ],
)
def test_weights_of_another_size(config_of, folder, changes, words, capfd):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    assert words in only(model.check_model(config_of(f"{MODEL}={folder}"))).problem
    # transformers' own table and progress bar stay out of it
    assert "MISMATCH" not in capfd.readouterr().err


def test_a_config_that_transformers_refuses(config_of, folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "no_such_model"}))
    assert "no_such_model" in only(model.check_model(config_of(f"{MODEL}={folder}"))).problem


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_weights_that_fit_are_let_through(config_of, tmp_path, kind):
    init_model(kind, resolve_shape(kind), eos_token_id=1, pad_token_id=0, seed=0).save_pretrained(tmp_path / kind)
    assert list(model.check_model(config_of(f"{MODEL}={tmp_path / kind}"))) == []


def test_quantised_weights_are_left_to_the_workers(config_of, folder):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "hidden_size": 128, "quantization_config": {"quant_method": "fp8"}}))
    assert list(model.check_model(config_of(f"{MODEL}={folder}"))) == []


# --------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.01])
def test_a_truncated_parquet_file(config_of, parquet, kept):
    path = parquet("cut")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    found = findings(config_of(f"{TRAIN}={path}"))
    assert set(found) == {TRAIN}
    assert f"{path} is torn" in found[TRAIN].problem


@pytest.mark.parametrize("checksums", [True, False])
def test_a_parquet_file_with_a_hole(config_of, tmp_path, checksums):
    """Footer and first rows are whole, a part in the middle is not: as after a download that was resumed wrongly."""
    path = tmp_path / "hole.parquet"
    rows = [{**ROW, "data_source": f"source {number}"} for number in range(4000)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500, write_page_checksum=checksums)
    content = bytearray(path.read_bytes())
    start, end = len(content) // 2, len(content) * 3 // 4
    content[start:end] = bytes(end - start)
    path.write_bytes(content)
    found = findings(config_of(f"{TRAIN}={path}"))
    assert set(found) == {TRAIN}
    assert f"{path} is torn" in found[TRAIN].problem


def test_a_file_that_changed_is_read_again(config_of, parquet):
    path = parquet("changing")
    config = config_of(f"{TRAIN}={path}")
    assert list(data.check_files(config)) == []
    path.write_bytes(path.read_bytes()[:-9])
    assert only(data.check_files(config)).key == TRAIN


# ---------------------------------------------------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for message in messages %}{{ message.content }}", "TemplateSyntaxError"),
        ("{{ messages[0].content | no_such_filter }}", "no_such_filter"),
        ("{{ raise_exception('only tools here') }}", "only tools here"),
        ("<|im_start|>assistant\n", "leaves the prompt out"),
        (
            "{% for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}",
            "leaves the prompt",
        ),
    ],
)
def test_a_chat_template_that_gives_no_prompt(config_of, folder, template, words):
    (folder / "chat_template.jinja").write_text(template)
    found = findings(config_of(f"{MODEL}={folder}"))
    assert set(found) == {MODEL}
    assert words in found[MODEL].problem
    assert chat.TEMPLATE_KEY in found[MODEL].remedy


def test_a_custom_chat_template_is_the_key_to_change(config_of):
    config = config_of()
    config.actor_rollout_ref.model.custom_chat_template = "{{ messages"
    found = findings(config)
    assert set(found) == {chat.TEMPLATE_KEY}
    assert "TemplateSyntaxError" in found[chat.TEMPLATE_KEY].problem


def test_prompts_that_the_template_refuses(config_of, folder):
    (folder / "chat_template.jinja").write_text(
        "{% if '+' in messages[0].content and 'What' not in messages[0].content %}{{ raise_exception('no sums') }}"
        "{% endif %}{{ messages[0].content }}"
    )
    finding = findings(config_of(f"{MODEL}={folder}"))[TRAIN]
    assert "no sums" in finding.problem


# ------------------------------------------------------------------------------------------------------------ lengths


def test_all_prompts_are_too_long_and_would_be_dropped(config_of, parquet):
    path = parquet("long", prompt=LONG["prompt"])
    config = config_of(f"{TRAIN}={path}", "data.max_prompt_length=64", "data.filter_overlong_prompts=true")
    finding = findings(config)["data.max_prompt_length"]
    assert "would leave nothing" in finding.problem
    needed = int(finding.remedy.split("data.max_prompt_length=")[1].split()[0])
    config.data.max_prompt_length = config.actor_rollout_ref.rollout.prompt_length = needed
    assert list(data.check_lengths(config)) == []


@pytest.mark.parametrize(("short", "key"), [(15, "data.train_batch_size"), (16, None)])
def test_what_is_left_must_fill_a_batch(config_of, tmp_path, short, key):
    path = tmp_path / "mixed.parquet"
    pq.write_table(pa.Table.from_pylist([ROW] * short + [LONG] * 20), path)
    config = config_of(f"{TRAIN}={path}", "data.max_prompt_length=64", "data.filter_overlong_prompts=true")
    found = list(data.check_lengths(config))
    assert [finding.key for finding in found] == ([key] if key else [])
    assert all("leaves 15 of 35" in finding.problem for finding in found)


# ------------------------------------------------------------------------------------------------------------- reward


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(
        "weight = 1\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    )
    return path


@pytest.mark.parametrize("group", ["reward.custom_reward_function", "custom_reward_function"])
@pytest.mark.parametrize(
    ("path", "name", "at", "words"),
    [
        ("/nowhere/reward.py", "compute_score", "path", "not found"),
        ("FILE", "compute_scores", "name", "defines no compute_scores"),
        ("FILE", "null", "name", "is not given"),
        ("FILE", "weight", "name", "is no function"),
        ("BROKEN", "compute_score", "path", "SyntaxError"),
        ("SCRIPT", "compute_score", "path", "SystemExit: 0"),
        ("pkg://verl_tim.tasks.no_such", "compute_score", "path", "No module named"),
        ("pkg://my_misspelt", "compute_score", "path", "AttributeError: module 'math' has no attribute 'tua'"),
    ],
)
def test_a_reward_function_that_cannot_be_loaded(
    config_of, reward_file, tmp_path, monkeypatch, group, path, name, at, words
):
    broken, script = tmp_path / "broken.py", tmp_path / "script.py"
    broken.write_text("def compute_score(:\n")
    script.write_text("raise SystemExit(0)\n")
    (tmp_path / "my_misspelt.py").write_text("import math\n\nFULL = math.tua\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = {"FILE": reward_file, "BROKEN": broken, "SCRIPT": script}.get(path, path)
    finding = only(reward.check(config_of(f"{group}.path={path}", f"{group}.name={name}")))
    assert finding.key == f"{group}.{at}"
    assert words in finding.problem


def test_a_reward_function_that_loads(config_of, reward_file):
    group = "reward.custom_reward_function"
    assert list(reward.check(config_of(f"{group}.path={reward_file}", f"{group}.name=compute_score"))) == []
    assert list(reward.check(config_of(f"{group}.path=null"))) == []


# ----------------------------------------------------------------------------------------------------- the whole start


@pytest.mark.parametrize(("command", "exit_code", "stream"), [("train", 2, "stderr"), ("doctor", 1, "stdout")])
def test_the_command_line_names_everything_at_once(folder, parquet, tmp_path, command, exit_code, stream):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (folder / "chat_template.jinja").write_text("{{ messages")
    torn = parquet("cut")
    torn.write_bytes(torn.read_bytes()[:-20])
    result = CliRunner().invoke(
        app,
        [
            command,
            f"{MODEL}={folder}",
            f"{TRAIN}={torn}",
            f"data.val_files={parquet('good')}",
            f"tim.run_dir={tmp_path}/run",
            "tim.cache_dir=/proc/cache",
            "reward.custom_reward_function.name=no_such",
        ],
    )
    assert result.exit_code == exit_code
    said = getattr(result, stream).replace("\n", " ")
    for key in (MODEL, TRAIN, "tim.cache_dir", "reward.custom_reward_function.name"):
        assert f"{key}: " in said
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()
