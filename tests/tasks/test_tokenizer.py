"""The tokenizer: nothing lost, the special tokens apart, the prompt as verl will build it."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from verl_tim.tasks.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, build_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(model_max_length=1024).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_special_tokens_stand_apart(tokenizer):
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == VOCAB_SIZE
    assert VOCAB_SIZE % 64 == 0
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""


def test_a_line_break_and_a_digit_are_one_token_each(tokenizer):
    assert len(tokenizer.encode("\n", add_special_tokens=False)) == 1
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1234567890")] == list("1234567890")


@pytest.mark.parametrize("skip_special_tokens", [False, True])
@given(text=st.text(max_size=200) | st.text(alphabet="0123456789 +-=*()\n\r\t.,:é日\u0301", max_size=100))
@settings(max_examples=300)
def test_any_text_survives(tokenizer, skip_special_tokens, text):
    if any(token in text for token in SPECIAL_TOKENS):
        return
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=skip_special_tokens) == text


@given(tokens=st.lists(st.sampled_from([*SPECIAL_TOKENS, "user", "\n", "7", " - ", "e\u0301"]), max_size=20))
@settings(max_examples=100)
def test_special_tokens_survive_in_text(tokenizer, tokens):
    text = "".join(tokens)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [i for i in ids if i < 3] == [SPECIAL_TOKENS.index(token) for token in tokens if token in SPECIAL_TOKENS]


def test_chat_template_is_chatml(tokenizer):
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "1 + 1 =\n"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2 ="},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe exact.<|im_end|>\n<|im_start|>user\n1 + 1 =\n<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2 + 2 =<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(messages[:2], tokenize=False) == text[: text.index("<|im_start|>assistant")]


def test_verl_builds_the_prompt_from_it(folder):
    from verl.utils.tokenizer import hf_tokenizer, normalize_token_ids
    from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder

    tokenizer = hf_tokenizer(str(folder))
    assert tokenizer.pad_token_id == 0
    messages = [{"role": "user", "content": "1 + 1 ="}]
    built = QwenContinuousTokenBuilder(tokenizer).build_initial_tokens(messages)
    direct = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    assert list(built) == normalize_token_ids(direct)


def test_another_process_makes_the_same_one(folder, tmp_path):
    code = "import sys; from verl_tim.tasks.tokenizer import build_tokenizer\n"
    code += "build_tokenizer(model_max_length=1024).save_pretrained(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    for file in folder.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_more_tokens_than_were_learned_change_no_text():
    small, large = (build_tokenizer(model_max_length=64, vocab_size=size) for size in (VOCAB_SIZE, 2048))
    text = "what is 12 + <513> 4?\n é"
    assert len(large) == 2048
    assert large.encode(text) == small.encode(text)
    assert large.decode([VOCAB_SIZE, 2047]) == f"<{VOCAB_SIZE}><2047>"
    with pytest.raises(ValueError, match="vocab_size=100: the tokenizer has at least 512 tokens"):
        build_tokenizer(model_max_length=64, vocab_size=100)
