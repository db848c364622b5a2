"""How a problem is put to the model, and where its answer is then looked for.

| style | asks for | used by |
|---|---|---|
| `published` | what the data set's own prompts ask for | sets that publish whole prompts |
| `boxed` | reasoning, and the answer in `\\boxed{}` | Qwen2.5-Math's and DeepSeek-R1's recommended instruction |
| `answer_line` | reasoning, and a last line `Answer: ...` | DAPO-Math-17k and its AIME file |
| `hash` | reasoning, and the answer behind `####` | verl's GSM8K example |
| `bare` | nothing | base models |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from verl_tim.tasks.errors import InputError

PUBLISHED_STYLE = "published"

# {problem} is where the problem stands.
TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        # Qwen2.5-Math's and DeepSeek-R1's model cards: "Please reason step by step, and put your final answer within
        # \boxed{}."; verl examples/data_preprocess/math_dataset.py asks in like words behind the problem
        "boxed": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.",
        # every prompt of BytedTsinghua-SIA/DAPO-Math-17k and BytedTsinghua-SIA/AIME-2024
        "answer_line": (
            "Solve the following math problem step by step. The last line of your response should be of the form "
            "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
            'Remember to put your answer on its own line after "Answer:".'
        ),
        # verl examples/data_preprocess/gsm8k.py
        "hash": '{problem} Let\'s think step by step and output the final answer after "####".',
        "bare": "{problem}",
    }
)
STYLES = (PUBLISHED_STYLE, *TEMPLATES)

# Where `math.answer` looks; `auto`: the prompt is not ours and asks for what it likes.
ANSWER_FORMATS: Mapping[str, str] = MappingProxyType(
    {"boxed": "boxed", "answer_line": "answer_line", "hash": "hash", "bare": "auto"}
)


def check_style(style: str) -> None:
    """Raises InputError for an unknown style."""
    if style not in STYLES:
        raise InputError(f"prompt_style: unknown style {style!r}; known styles: {', '.join(STYLES)}")


def fill(style: str, problem: str) -> str:
    """The user's message of a template."""
    # not str.format: \boxed{} and problems are full of braces
    return TEMPLATES[style].replace("{problem}", problem)


def unfill(style: str, message: str) -> str | None:
    """The problem inside a message made with a template; None if it was not."""
    before, _, after = TEMPLATES[style].partition("{problem}")
    if not (message.startswith(before) and message.endswith(after)) or len(message) < len(before) + len(after):
        return None
    return message[len(before) : len(message) - len(after)]
