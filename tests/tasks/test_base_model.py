"""Small models: a function of their settings, in Hugging Face format, warmed up on training problems only, with a
score to raise."""

import json
import os
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_tim.models import load_model_config
from verl_tim.tasks import warmup as warmup_module
from verl_tim.tasks.architectures import init_model, resolve_shape
from verl_tim.tasks.base_model import base_model_spec, build_base_model
from verl_tim.tasks.catalog import get_task, resolve_difficulty
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.problems import pool_of, stream_pool
from verl_tim.tasks.sampling import generate_answers, mean_score, prompt_ids
from verl_tim.tasks.tokenizer import VOCAB_SIZE, build_tokenizer
from verl_tim.tasks.warmup import WarmupConfig, _Warmup
from verl_tim.tasks.worked import worked_solution

KINDS = ("qwen3", "qwen3_moe")
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
}
# a few steps of each stage, and no demands on what they reach
BRIEF = {
    "able_score": 0.0,
    "cooldown_steps": 4,
    "min_work_score": 0.0,
    "habit_steps": 2,
    "score_low": 0.0,
    "score_high": 1.0,
    "score_problems": 32,
    "batch_size": 16,
    "measured_problems": 32,
}
CHAIN_SUM = get_task("chain_sum")
DIFFICULTY = resolve_difficulty(CHAIN_SUM, None)


def make(kind, tmp_path, **changes):
    settings = {"shape": SMALL, "warmup": BRIEF, "cache_dir": tmp_path, "progress": False, **changes}
    return build_base_model(kind, **settings)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return make(kind, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(model_max_length=1024)


def fresh_model(kind, tokenizer):
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return init_model(kind, resolve_shape(kind, SMALL), **ids, seed=3)


def test_transformers_and_the_engine_accept_it(kind, folder):
    assert load_model_config(folder).vocab_size == VOCAB_SIZE
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == kind
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.head_dim in (32, 64)
    assert model.config.vocab_size % 64 == 0


def test_equal_settings_give_equal_bytes(kind, folder, tmp_path):
    again = make(kind, tmp_path)
    assert again.name == folder.name
    for file in folder.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    other = make(kind, tmp_path, seed=1)
    assert other.name != folder.name
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_building_leaves_the_process_as_it_was(tmp_path):
    torch.manual_seed(5)
    torch.set_num_threads(2)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    make("qwen3", tmp_path)
    assert torch.get_num_threads() == threads == 2
    torch.set_num_threads(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_it_is_found_again(kind, folder, monkeypatch):
    monkeypatch.setattr("verl_tim.tasks.base_model.warm_up", None)
    assert make(kind, folder.parent.parent) == folder


def test_card_says_how_it_was_made_and_how_it_scores(kind, folder):
    card = json.loads((folder / "model.json").read_text())
    assert card["spec"]["task"] == "chain_sum"
    assert card["spec"]["difficulty"] == DIFFICULTY
    assert set(card["spec"]["versions"]) == {"reasoning-gym", "tokenizers", "torch", "transformers"}
    assert card["warmup"]["work"]["steps"] == 4
    assert card["warmup"]["habit"]["steps"] == 2
    scores = [f"{pool}_{how}_score" for pool in ("train", "validation") for how in ("sampled", "greedy")]
    assert all(0.0 <= card["before_rl"][name] <= 1.0 for name in scores)
    assert 0.0 < card["before_rl"]["mean_top_probability"] <= 1.0
    assert "model.safetensors" in card["files"]
    if kind == "qwen3_moe":
        for shares in card["router"]["expert_share_per_layer"]:
            assert len(shares) == 8
            assert sum(shares) == pytest.approx(1.0)


def test_shared_prefix_changes_nothing_in_the_loss(kind, tokenizer):
    model = fresh_model(kind, tokenizer)
    stage = _Warmup(model, tokenizer, CHAIN_SUM, DIFFICULTY, WarmupConfig(router_loss=0.0), 0, False)
    problems = list(islice(stream_pool(CHAIN_SUM, resolve_difficulty(CHAIN_SUM, {"min_terms": 2}), 0, "train"), 8))
    stage._loss(problems, finished_share=1.0).backward()
    shared = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    losses = []
    for problem, prompt in zip(
        problems, prompt_ids(tokenizer, [problem.question for problem in problems]), strict=True
    ):
        solution = [*tokenizer.encode("\n".join(worked_solution(CHAIN_SUM, problem))), tokenizer.eos_token_id]
        logits_TV = model(torch.tensor([prompt + solution])).logits[0, len(prompt) - 1 : -1]
        losses.append(functional.cross_entropy(logits_TV, torch.tensor(solution), reduction="none"))
    torch.cat(losses).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(shared[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_warm_up_sees_training_problems_only(tokenizer, monkeypatch):
    seen = []

    def record(tokenizer, questions):
        seen.extend(questions)
        return prompt_ids(tokenizer, questions)

    monkeypatch.setattr(warmup_module, "prompt_ids", record)
    model = fresh_model("qwen3", tokenizer)
    warmup_module.warm_up(model, tokenizer, CHAIN_SUM, DIFFICULTY, WarmupConfig(**{**BRIEF}), seed=0, progress=False)
    assert len(seen) == 6 * 16
    assert {pool_of(question) for question in seen} == {"train"}


def test_habit_stage_breaks_most_solutions_off_and_falsifies_none(tokenizer):
    config = WarmupConfig(**{**BRIEF, "batch_size": 500})
    stage = _Warmup(fresh_model("qwen3", tokenizer), tokenizer, CHAIN_SUM, DIFFICULTY, config, 0, False)
    problems = list(islice(stage.problems, 500))
    shown = [stage._shown(problem, 0.3) for problem in problems]
    finished = sum(
        lines[-1] == problem.answer and len(lines) == 3 for lines, problem in zip(shown, problems, strict=True)
    )
    assert 120 <= finished <= 180
    for lines, problem in zip(shown, problems, strict=True):
        assert lines in (worked_solution(CHAIN_SUM, problem), worked_solution(CHAIN_SUM, problem)[:1])


def test_greedy_and_seeded_sampling_repeat(tokenizer):
    model = fresh_model("qwen3", tokenizer)
    questions = ["1 + 1 =", "1 + 2 + 3 + 4 + 5 ="]
    for temperature in (0.0, 1.0):
        first, second = (
            generate_answers(model, tokenizer, questions, temperature=temperature, seed=1) for _ in range(2)
        )
        assert first == second


def test_score_of_a_model_that_knows_nothing_is_next_to_nothing(tokenizer):
    problems = list(islice(stream_pool(CHAIN_SUM, DIFFICULTY, 0, "train"), 32))
    assert mean_score(fresh_model("qwen3", tokenizer), tokenizer, CHAIN_SUM, problems) < 0.1


def test_a_longer_task_gets_room_for_its_answers(tokenizer):
    def room(**settings):
        difficulty = resolve_difficulty(CHAIN_SUM, settings)
        return warmup_module.answer_room(
            tokenizer, CHAIN_SUM, list(islice(stream_pool(CHAIN_SUM, difficulty, 0, "train"), 64))
        )

    assert room() == 32, "the default task's models were made with this"
    longest = room(min_terms=12, max_terms=12, max_digits=2)
    assert longest > 40
    model = fresh_model("qwen3", tokenizer)
    model.generation_config.eos_token_id = None
    (answer,) = generate_answers(model, tokenizer, ["1 + 1 ="], temperature=1.0, seed=1, max_tokens=longest)
    assert len(answer) == longest or tokenizer.eos_token_id in answer


def test_the_device_is_part_of_what_a_model_is(monkeypatch):
    here = base_model_spec("qwen3", shape=SMALL)
    assert "device" not in here, "what was made on CPUs keeps its key"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert base_model_spec("qwen3", shape=SMALL, device="auto") == here
    with pytest.raises(InputError, match="device: this machine has no GPU"):
        base_model_spec("qwen3", shape=SMALL, device="cuda")
    with pytest.raises(InputError, match="unknown device 'gpu'; known devices: auto, cpu, cuda"):
        base_model_spec("qwen3", shape=SMALL, device="gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert base_model_spec("qwen3", shape=SMALL, device="auto") == {**here, "device": "cuda"}


@pytest.mark.parametrize("kind", KINDS)
def test_saved_weights_may_be_rounded_to_half_the_bytes(kind, tmp_path):
    whole, half = make(kind, tmp_path / "whole"), make(kind, tmp_path / "half", dtype="bfloat16")
    weights = {folder: load_file(folder / "model.safetensors") for folder in (whole, half)}
    assert weights[whole].keys() == weights[half].keys()
    for name, tensor in weights[whole].items():
        assert torch.equal(weights[half][name], tensor.bfloat16())
    cards = {folder: json.loads((folder / "model.json").read_text()) for folder in (whole, half)}
    assert cards[half]["spec"] == {**cards[whole]["spec"], "dtype": "bfloat16"}
    assert "dtype" not in cards[whole]["spec"], "what was made before it could be chosen keeps its key"
    assert cards[half]["before_rl"] == cards[whole]["before_rl"], "the scores are bf16's"
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_equal_settings_give_equal_bytes(kind, tmp_path):
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    first, second = (make(kind, tmp_path / name, device="cuda") for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert json.loads((first / "model.json").read_text())["spec"]["device"] == "cuda"
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == before
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kind": "gpt2"}, InputError, "unknown model kind 'gpt2'; known kinds: qwen3, qwen3_moe"),
        ({"task": "products"}, InputError, "warmed up on chain_sum, not on products"),
        ({"task": "sudoku2"}, InputError, "known tasks"),
        ({"seed": -1}, InputError, "seed: must be"),
        ({"dtype": "float16"}, InputError, "unknown dtype 'float16'; known dtypes: float32, bfloat16"),
        ({"shape": {"layers": 3}}, InputError, "shape: qwen3 has no layers; it has "),
        ({"shape": {"vocab_size": 128}}, InputError, "vocab_size is the tokenizer's"),
        ({"warmup": {"speed": 3}}, InputError, "unknown setting speed; known settings: batch_size"),
        ({"warmup": {**BRIEF, "min_work_score": 0.9}}, RuntimeError, "after its work stage, less than 0.9"),
        (
            {"warmup": {**BRIEF, "able_score": 0.9, "max_work_steps": 4, "check_every": 2}},
            RuntimeError,
            "after 4 supervised steps",
        ),
        ({"warmup": {**BRIEF, "score_low": 0.9}}, RuntimeError, r"outside \[0\.9, 1\.0\]"),
    ],
)
def test_what_cannot_be_made_is_said_and_leaves_nothing(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        make(changes.pop("kind", "qwen3"), tmp_path, **changes)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_default_models_have_a_signal_for_rl(kind, tmp_path, seed):
    card = json.loads(
        (build_base_model(kind, cache_dir=tmp_path, seed=seed, progress=False) / "model.json").read_text()
    )
    before = card["before_rl"]
    assert 0.15 <= before["train_sampled_score"] <= 0.40
    assert 0.15 <= before["validation_sampled_score"] <= 0.40
    assert before["validation_greedy_score"] <= 0.25, "room for validation to rise"
    assert card["warmup"]["work"]["sampled_score"] >= 0.7, "able to solve what it mostly does not"
    assert before["mean_top_probability"] > 0.5
    if kind == "qwen3_moe":
        assert card["router"]["least"] > 0.0005, "every expert of every layer is used"
        assert card["router"]["most"] < 0.35
