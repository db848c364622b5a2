"""A deterministic model for the engine's tests that reads everything it knows out of the KV pages.

A row's KV is its token and position. A row's hidden state is a hash of the tokens that its block table leads to, so a
page that was lost, shared wrongly, overwritten or misaddressed changes what is drawn, and a stored position that is not
the expected one raises at once. :func:`expected_draw` says what must be drawn, from the token list alone.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import torch

from verl_tim.numerics.paging import DecodeBatch
from verl_tim.numerics.sampling import Sampled

VOCAB = 61
EOS = 1
MODULUS = 2**20 - 3
MAX_LEN = 512
_POWERS = np.empty(4096, np.int64)
_power = 1
for _i in range(len(_POWERS)):
    _POWERS[_i] = _power
    _power = _power * 48271 % MODULUS


def prefix_hashes(tokens, salt: int) -> np.ndarray:
    """Hash of tokens[: i + 1] for every i."""
    tokens = np.asarray(tokens, np.int64)
    return (np.cumsum((tokens + 7 + salt) * _POWERS[: len(tokens)] % MODULUS) + salt) % MODULUS


def logits_of(hashes: np.ndarray) -> np.ndarray:
    """Peaked logits, (B,) int64 -> (B, VOCAB) float32."""
    mixed = (hashes[:, None] * 69621 + np.arange(VOCAB) * 16807 * (hashes[:, None] % 1009 + 1)) % MODULUS
    return (8.0 * mixed / MODULUS).astype(np.float32)


def _noise(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    key = (seed[:, None] % MODULUS * 31 + position[:, None] * 7919 + np.arange(VOCAB) * 104729) % MODULUS
    key = key * 48271 % MODULUS
    uniform = (key * 69621 % MODULUS + 0.5) / MODULUS
    return -np.log(-np.log(uniform))


def draw(logits_BV: np.ndarray, temperature: np.ndarray, seed: np.ndarray, position: np.ndarray) -> Sampled:
    assert np.isfinite(logits_BV.max(-1)).all(), "broken logits reached the sampler"
    greedy = temperature == 0
    scaled = logits_BV / np.where(greedy, 1, temperature)[:, None].astype(np.float32)
    log_probs = torch.log_softmax(torch.from_numpy(scaled), dim=-1)
    token = torch.from_numpy((scaled + np.where(greedy, 0, 1)[:, None] * _noise(seed, position)).argmax(-1))
    return Sampled(
        token_B=token,
        log_prob_B=log_probs.gather(-1, token[:, None])[:, 0],
        kept_mass_B=torch.ones(len(token)),
        top1_B=torch.from_numpy(scaled.argmax(-1)),
    )


def expected_draw(tokens, *, salt: int, temperature: float, seed: int) -> tuple[int, float]:
    """Token and log-prob that follow ``tokens``, from scratch."""
    logits = logits_of(prefix_hashes(tokens, salt)[-1:])
    sampled = draw(logits, np.array([temperature]), np.array([seed]), np.array([len(tokens)]))
    return int(sampled.token_B[0]), float(sampled.log_prob_B[0])


class FakeModel:
    """Offers what runner.RunnableModel asks for. Its weights are one tensor, "salt"."""

    numerics = "stock"
    dtype = torch.float32
    device = torch.device("cpu")
    attention = "stock"
    row_floor = 8
    kv_shape = (2, 1, 2)

    def __init__(self, *, eos=(EOS,), max_position_embeddings: int = MAX_LEN) -> None:
        self.config = SimpleNamespace(
            architecture="Fake",
            vocab_size=VOCAB,
            max_position_embeddings=max_position_embeddings,
            eos_token_ids=eos,
        )
        self.salt: int | None = None
        self.recording = False  # the engine measures or records: no step runs
        self.forwards = 0
        self.rows_seen: list[int] = []  # live rows per step
        self.fail_at: int | None = None  # forward call that raises
        self.poison: set[int] = set()  # prompts that begin with such a token get NaN logits

    def load_checkpoint(self, path: str) -> None:
        self.salt = 0

    def load_weights(self, weights) -> None:
        self.salt = None
        for name, tensor in weights:
            if name != "salt":
                raise KeyError(f"unknown weight {name}")
            self.salt = int(tensor)
        assert self.salt is not None, "missing weight salt"

    def release_weights(self) -> None:
        self.salt = None

    def weight_checksum(self) -> str:
        return str(self.salt)

    @contextlib.contextmanager
    def any_weights(self):
        salt, self.salt, self.recording = self.salt, self.salt or 0, True
        yield
        self.salt, self.recording = salt, False

    def _decode(self, token_ids_T, batch, k_pages, v_pages):
        """A `DecodeBatch`: the rows of the null slot are inert, the others are a step of their own."""
        positions = batch.position_T.numpy()
        assert (batch.slot_T.numpy() >= 0).all()
        null = (batch.gpu.block_table_SM[:, 0] == 0).numpy()
        assert (batch.gpu.context_len_S.numpy() == positions + 1).all()
        assert (positions[null] == 0).all()
        assert (batch.slot_T.numpy()[null] == 0).all()
        assert (token_ids_T.numpy()[null] == 0).all(), "a padding row left a token in the null slot"
        hidden = torch.zeros(len(positions), 2, dtype=torch.float64)
        live = np.flatnonzero(~null)
        if len(live) == 0:
            return hidden
        padding = -len(live) % self.row_floor
        pad = torch.nn.functional.pad
        at = torch.from_numpy(live)
        step = SimpleNamespace(
            slot_T=pad(batch.slot_T[at], (0, padding)),
            position_T=pad(batch.position_T[at], (0, padding)),
            query_start_S1=torch.arange(len(live) + 1),
            context_len_S=batch.position_T[at] + 1,
            block_table_SM=batch.gpu.block_table_SM[at],
        )
        hidden[at] = self.forward(pad(token_ids_T[at], (0, padding)), step, k_pages, v_pages)[: len(live)]
        return hidden

    def forward(self, token_ids_T, paged, k_pages, v_pages, chosen=None):
        if isinstance(paged, DecodeBatch):
            return self._decode(token_ids_T, paged, k_pages, v_pages)
        if self.recording:
            return torch.zeros(len(token_ids_T), 2, dtype=torch.float64)
        self.forwards += 1
        if self.fail_at is not None and self.forwards >= self.fail_at:
            raise FloatingPointError(f"forward {self.forwards} failed")
        assert self.salt is not None, "ran without weights"
        page_size = k_pages.shape[2]
        tokens, slots, positions = token_ids_T.numpy(), paged.slot_T.numpy(), paged.position_T.numpy()
        starts, contexts = paged.query_start_S1.numpy(), paged.context_len_S.numpy()
        live = int(starts[-1])
        self.rows_seen.append(live)
        assert len(tokens) == len(slots) == len(positions)
        assert len(tokens) % 8 == 0
        assert len(tokens) - live < 8
        assert (slots[live:] < page_size).all(), "a padding row writes outside the null page"
        assert (slots[:live] >= page_size).all(), "a live row writes to the null page"
        assert len(np.unique(slots[:live])) == live, "two rows write one slot"
        hidden = np.zeros((len(tokens), 2))
        for layer in range(len(k_pages)):
            flat_k, flat_v = k_pages[layer].view(-1, 2), v_pages[layer].view(-1, 2)
            flat_k[slots] = torch.stack([token_ids_T, paged.position_T], -1).to(torch.float32)
            flat_v[slots] = float(self.salt) + layer
            for s, context in enumerate(contexts.tolist()):
                rows = np.arange(starts[s], starts[s + 1])
                assert positions[rows[-1]] == context - 1
                assert (np.diff(positions[rows]) == 1).all()
                at = np.arange(context)
                where = paged.block_table_SM[s].numpy()[at // page_size] * page_size + at % page_size
                assert (where >= page_size).all(), "a sequence reads the null page"
                keys, values = flat_k[where].numpy(), flat_v[where].numpy()
                assert (keys[:, 1] == at).all(), "a page holds another position's KV"
                assert (values == self.salt + layer).all(), "KV of other weights is in use"
                hashes = prefix_hashes(keys[:, 0], self.salt)[positions[rows]]
                hidden[rows, 0] = hashes
                hidden[rows, 1] = keys[0, 0]
        return torch.from_numpy(hidden)

    def logits(self, hidden_BD):
        logits = torch.from_numpy(logits_of(hidden_BD[:, 0].numpy().astype(np.int64)))
        for row, first in enumerate(hidden_BD[:, 1].tolist()):
            if int(first) in self.poison:
                logits[row] = float("nan")
        return logits

    def draw(self, hidden_BD, sampling, cut_R=None):
        logits_BV = self.logits(hidden_BD)
        broken_B = ~torch.isfinite(logits_BV.amax(dim=-1))
        logits_BV[broken_B] = 0.0
        sampled = draw(
            logits_BV.numpy(), sampling.temperature_B.numpy(), sampling.seed_B.numpy(), sampling.position_B.numpy()
        )
        sampled.log_prob_B[broken_B] = torch.nan
        return sampled
