"""What the names in a comparison's tables mean, one line each: for the terminal, and for a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """One name.

    Attributes:
        name: as the legend has it; a label of a table is explained by it where it is the label, or where the label goes
            on behind it with a blank or a comma (`|d| p99, nats`, `validation gsm8k`).
        meaning: one line, in the words of docs/diagnosis.md.
    """

    name: str
    meaning: str

    def explains(self, label: str) -> bool:
        return label == self.name or label.startswith((f"{self.name} ", f"{self.name}, "))


# In the order of the summary.
TERMS = (
    Term("reward", "mean verifier score of the step's responses."),
    Term("validation", "score on problems that are not trained on."),
    Term(
        "|d|",
        "size of d = log p (trainer, under the weights that drew the token) − log q (rollout), over the step's "
        "response tokens: mean, p99 (all but one in a hundred are below it), largest.",
    ),
    Term("exact tokens", "share of tokens whose two log-probs agree bit for bit."),
    Term(
        "contribution skew",
        "what the mismatch adds to the loss contributions, positive and negative advantages together; changing sign: "
        "noise, walking away from 0: the early warning.",
    ),
    Term("k3 of trainer / rollout", "KL estimate of the mismatch, mean of exp(d) − 1 − d."),
    Term(
        "ppo_k3 of the loss's ratio",
        "the same estimate of the ratio in the loss; where the trainer computes the old log-probs itself "
        "(recomputation) it holds no mismatch, only how far the policy moved.",
    ),
    Term("gradient norm", "of the actor, before it is clipped."),
    Term("entropy", "of the policy's next token, mean over response tokens."),
    Term("response length", "tokens, mean over responses."),
    Term("at length limit", "share of responses that are as long as they may be."),
    Term("step time", "of a training step, without validation."),
    Term("tokens/s/device", "tokens of the batch, prompts too, over the step's time and the devices."),
)


def meaning(label: str) -> str:
    """Of a label in a table; KeyError for one without."""
    for term in TERMS:
        if term.explains(label):
            return term.meaning
    raise KeyError(label)


def legend(labels: Iterable[str]) -> list[Term]:
    """Those that explain some of the labels."""
    labels = list(labels)
    return [term for term in TERMS if any(map(term.explains, labels))]
