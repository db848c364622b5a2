"""The tokenizer of the small models: byte-level BPE, learned from the tasks' own problems, in Hugging Face format.

What it keeps of Qwen's: the special tokens and their roles, ChatML as chat template, one token per digit, one token
for a line break (verl 0.9.1 utils/tokenizer/continuous_token.py:556 wants that of a Qwen3). What it does not: Qwen's
NFC normaliser, which makes decode(encode(text)) differ from text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl_tim.tasks.catalog import TASKS, resolve_difficulty
from verl_tim.tasks.problems import stream_problems

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, START_TOKEN, END_TOKEN)

# A multiple of 64, special tokens included, so that the model's vocabulary needs no padding: engines that mask
# logits beyond len(tokenizer) and trainers that do not then agree on what is normalised over.
VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Qwen2's split: words with the space before them, single digits, runs of punctuation, line breaks.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS_SEED = 0
_CORPUS_PROBLEMS_PER_TASK = 400


def build_tokenizer(*, model_max_length: int, vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """The tokenizer, the same one for every task, model and seed: a function of the installed reasoning-gym and
    tokenizers only.

    Its special tokens: pad `<|endoftext|>`, end of turn (eos) `<|im_end|>`, start of turn `<|im_start|>`; pad and
    eos differ, so that masking one never masks the other. Any text survives encode and decode unchanged.

    Args:
        vocab_size: more than the tasks' texts need: the rest are tokens that no text is encoded to, for models that
            have so many rows.

    Raises:
        ValueError: vocab_size is less than what is learned.
    """
    if vocab_size < VOCAB_SIZE:
        raise ValueError(f"vocab_size={vocab_size}: the tokenizer has at least {VOCAB_SIZE} tokens")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    if core.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(
            f"tokenizer: learned {core.get_vocab_size()} tokens in place of {VOCAB_SIZE}; the corpus is too small"
        )
    if vocab_size > VOCAB_SIZE:
        core = _filled(core, vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[START_TOKEN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
        padding_side="left",
    )


def _filled(core: Tokenizer, vocab_size: int) -> Tokenizer:
    """With tokens that no merge makes, such as "<512>", up to vocab_size."""
    spec = json.loads(core.to_str())
    vocabulary = spec["model"]["vocab"]
    vocabulary.update({f"<{number}>": number for number in range(len(vocabulary), vocab_size)})
    return Tokenizer.from_str(json.dumps(spec))


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def tokenizer_spec() -> dict[str, Any]:
    """All that the tokenizer is a function of, beside the installed packages; part of a model's content key."""
    return {
        "vocab_size": VOCAB_SIZE,
        "corpus_seed": _CORPUS_SEED,
        "problems_per_task": _CORPUS_PROBLEMS_PER_TASK,
        "corpus": {task.name: resolve_difficulty(task, None) for task in TASKS.values()},
    }


def _corpus() -> Iterator[str]:
    # role names come with every prompt, hence their weight
    yield from ["system\nuser\nassistant\n"] * _CORPUS_PROBLEMS_PER_TASK
    for task in TASKS.values():
        problems = stream_problems(task, resolve_difficulty(task, None), _CORPUS_SEED)
        for problem in islice(problems, _CORPUS_PROBLEMS_PER_TASK):
            if problem is not None:
                yield problem.question
