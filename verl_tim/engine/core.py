"""What goes in and what comes out: sampling parameters, a request with its state machine, its output."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from verl_tim.engine.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

# Below this a temperature is greedy decoding in disguise, and logits / T may overflow fp32.
MIN_TEMPERATURE = 1e-3
MAX_SEED = 2**63 - 1
# More than any vocabulary; what holds a larger number of tokens is a mistake, and no kernel's integer.
MAX_TOP_K = 2**31 - 1
# Rows keep parameters in float32, where a larger number would be infinite and a smaller one zero: another parameter.
_LARGEST, _SMALLEST = (float(bound) for bound in (np.finfo(np.float32).max, np.finfo(np.float32).tiny))


def _integer(name: str, value: Any) -> int:
    """``value`` as an int; bools and floats are refused, NumPy and torch integers are not."""
    if isinstance(value, bool):
        raise RequestError(f"{name}={value!r}: expected an integer, got a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise RequestError(f"{name}={value!r}: expected an integer, got {type(value).__name__}") from None


def _number(name: str, value: Any) -> float:
    """``value`` as a finite float."""
    if isinstance(value, (bool, str)) or value is None:
        raise RequestError(f"{name}={value!r}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RequestError(f"{name}={value!r}: expected a number, got {type(value).__name__}") from None
    if not math.isfinite(number):
        raise RequestError(f"{name}={value!r}: expected a finite number")
    return number


@dataclass(frozen=True)
class SamplingParams:
    """How one request draws its tokens. Every field is checked when the object is made.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it in fp32, at least ``MIN_TEMPERATURE``.
        top_k: keep the k likeliest tokens; -1 or 0 is off.
        top_p: keep the smallest set of tokens whose mass reaches top_p, in (0, 1]; 1 is off.
        min_p: drop tokens below min_p times the likeliest token's probability, in [0, 1]; 0 is off.
        seed: None derives one from the engine's seed and the request id (:func:`default_seed`).
        stop_token_ids: end the response as the model's end-of-sequence tokens do; the token itself is kept.
        max_tokens: most tokens to draw, None for what the context leaves; more than that is clamped to it.
        ignore_eos: draw on past the model's end-of-sequence tokens; stop_token_ids still stop.
        repetition_penalty: only 1.0. A penalty makes the sampled distribution depend on the history in a way that the
            trainer's log-prob does not know, so any other value would be a mismatch by construction.
        record_routes: keep the experts that each sparse layer chose at each position; nothing in a dense model, nor
            in pipeline stages on GPUs.

    Raises:
        RequestError: a value is out of range or of the wrong type; the message names it.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    record_routes: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # the dataclass is frozen; this is its constructor

        put("temperature", _number("temperature", self.temperature))
        if self.temperature < 0 or 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature={self.temperature!r}: expected 0 (greedy) or at least {MIN_TEMPERATURE}; "
                "use temperature=0 for greedy decoding"
            )
        if self.temperature > _LARGEST:
            raise RequestError(f"temperature={self.temperature!r}: expected at most {_LARGEST}, float32's largest")
        put("top_k", _integer("top_k", self.top_k))
        if not -1 <= self.top_k <= MAX_TOP_K:
            raise RequestError(f"top_k={self.top_k}: expected a number of tokens from 1 to {MAX_TOP_K}, or -1 (off)")
        if self.top_k == 0:
            put("top_k", -1)
        put("top_p", _number("top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p={self.top_p}: expected a mass in (0, 1]; 1 is off")
        if self.top_p < _SMALLEST:
            raise RequestError(f"top_p={self.top_p}: expected at least {_SMALLEST}, float32's smallest")
        put("min_p", _number("min_p", self.min_p))
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p={self.min_p}: expected a fraction in [0, 1]; 0 is off")
        if self.seed is not None:
            put("seed", _integer("seed", self.seed))
            if not 0 <= self.seed <= MAX_SEED:
                raise RequestError(f"seed={self.seed}: expected 0 <= seed < 2**63")
        stops = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(stops, (str, bytes)) or not isinstance(stops, Iterable):
            raise RequestError(f"stop_token_ids={stops!r}: expected a list of token ids")
        put("stop_token_ids", tuple(_integer("stop_token_ids", token) for token in stops))
        if any(token < 0 for token in self.stop_token_ids):
            raise RequestError(f"stop_token_ids={self.stop_token_ids}: token ids are not negative")
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens))
            if self.max_tokens < 1:
                raise RequestError(f"max_tokens={self.max_tokens}: expected at least 1, or None for the whole context")
        for name in ("ignore_eos", "record_routes"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise RequestError(f"{name}={getattr(self, name)!r}: expected true or false")
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty))
        if self.repetition_penalty != 1.0:
            raise RequestError(
                f"repetition_penalty={self.repetition_penalty}: only 1.0 is supported, since the trainer's log-prob "
                "knows no penalty; set repetition_penalty to 1.0"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters from what a client sent; strict, so that no parameter is dropped unnoticed.

        ``logprobs`` (None, a bool, 0 or 1) and ``n`` (1) are accepted and change nothing: the drawn token's log-prob is
        always recorded, and a request is one response. ``max_new_tokens`` is another name of ``max_tokens``.

        Raises:
            RequestError: no mapping, an unknown name (the message lists the known ones) or a value out of range.
        """
        if not isinstance(values, Mapping):
            raise RequestError(f"params={values!r}: expected a mapping of sampling parameters by name")
        known = {f.name for f in dataclasses.fields(cls)}
        values = dict(values)
        logprobs = values.pop("logprobs", None)
        is_switch = logprobs is None or isinstance(logprobs, (bool, np.bool_))
        if not is_switch and _integer("logprobs", logprobs) not in (0, 1):
            raise RequestError(f"logprobs={logprobs}: only the drawn token's log-prob is returned; use logprobs=0")
        n = values.pop("n", None)
        if n is not None and _integer("n", n) != 1:
            raise RequestError(f"n={n}: a request is one response; send the prompt n times with different request ids")
        if "max_new_tokens" in values:
            if values.get("max_tokens") is not None:
                raise RequestError("max_new_tokens and max_tokens are two names of one parameter; send one of them")
            values["max_tokens"] = values.pop("max_new_tokens")
        unknown = sorted(set(values) - known, key=str)
        if unknown:
            raise RequestError(
                f"unknown sampling parameter {', '.join(map(repr, unknown))}; known: "
                f"{', '.join(sorted(known | {'logprobs', 'n', 'max_new_tokens'}))}"
            )
        return cls(**values)


def default_seed(engine_seed: int, request_id: str) -> int:
    """Seed of a request that brings none: a fixed hash, so it depends on no batch, order, replica or process."""
    digest = hashlib.blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def as_token_ids(name: str, token_ids: Any, vocab_size: int) -> np.ndarray:
    """``token_ids`` (list, NumPy array or tensor of ints) as a new int64 array, each in [0, vocab_size).

    Raises:
        RequestError: empty, not one-dimensional, not integers, or out of the vocabulary.
    """
    try:
        array = np.asarray(token_ids)
    except ValueError:  # ragged
        raise RequestError(f"{name}: expected a flat list of token ids") from None
    if array.ndim != 1:
        raise RequestError(f"{name}: expected a flat list of token ids, got an array of shape {array.shape}")
    if array.size == 0:
        raise RequestError(f"{name} is empty: a request needs at least one prompt token")
    if not np.issubdtype(array.dtype, np.integer):
        raise RequestError(f"{name}: expected integer token ids, got {array.dtype}")
    array = array.astype(np.int64)
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if outside.size:
        at = int(outside[0])
        raise RequestError(
            f"{name}[{at}]={int(array[at])} is outside the model's vocabulary of {vocab_size} tokens; "
            "tokenize with the model's own tokenizer"
        )
    return array


class RequestState(enum.Enum):
    """Where a request is. PREEMPTED waits like WAITING, but has drawn tokens to recompute or has lost its pages."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_ALLOWED = {
    RequestState.WAITING: {RequestState.RUNNING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.PREEMPTED: {RequestState.RUNNING, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


@dataclass
class Drawn:
    """The record of the N tokens a request has drawn, each written in the step that drew it and never again.

    token_N int32, log_prob_N float32, kept_mass_N float32, top1_N int32, version_N int64.
    """

    token_N: np.ndarray
    log_prob_N: np.ndarray
    kept_mass_N: np.ndarray
    top1_N: np.ndarray
    version_N: np.ndarray

    @classmethod
    def none(cls) -> Drawn:
        return cls(
            np.empty(0, np.int32),
            np.empty(0, np.float32),
            np.empty(0, np.float32),
            np.empty(0, np.int32),
            np.empty(0, np.int64),
        )

    def __len__(self) -> int:
        return len(self.token_N)


@dataclass(eq=False)
class Request:
    """One prompt on its way to one response.

    While it waits, the request owns its record (``drawn``); while it runs, the row it was loaded into does.
    """

    request_id: str
    prompt_P: np.ndarray  # int64
    params: SamplingParams
    seed: int
    max_total: int  # prompt plus the most tokens it may draw
    stop_ids: tuple[int, ...]
    arrival: int  # admission number; smaller is older
    state: RequestState = RequestState.WAITING
    drawn: Drawn = field(default_factory=Drawn.none)
    num_preempted: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache at first admission
    finish_reason: FinishReason | None = None
    page_keys: list[bytes] = field(default_factory=list)  # prefix cache: keys of its full pages, under page_root
    page_root: bytes = b""
    num_registered: int = 0  # of its pages, how many the cache was told about since it runs
    routes_TLK: np.ndarray | None = None  # of its positions, where they are recorded (`page_routes`)

    def __post_init__(self) -> None:
        assert (self.prompt_P.ndim, self.prompt_P.dtype) == (1, np.int64)
        assert self.prompt_len > 0
        assert self.max_total > self.prompt_len, "a request draws at least one token"
        assert 0 <= self.seed <= MAX_SEED

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_P)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and drawn. Valid while the request does not run."""
        assert self.state is not RequestState.RUNNING, "a running request's record lives in its row"
        return self.prompt_len + len(self.drawn)

    def to(self, state: RequestState) -> None:
        """Move to ``state``; a transition outside the state machine is a bug of the engine."""
        assert state in _ALLOWED[self.state], f"request {self.request_id}: {self.state.value} -> {state.value}"
        self.state = state

    def finish(self, reason: FinishReason) -> None:
        self.to(RequestState.FINISHED)
        self.finish_reason = reason
        assert len(self.drawn) <= self.max_total - self.prompt_len
        assert reason != "length" or len(self.drawn) == self.max_total - self.prompt_len
        assert reason != "stop" or self.drawn.token_N[-1] in self.stop_ids

    def output(self, error: RequestError | None = None) -> RequestOutput:
        assert self.state is RequestState.FINISHED
        assert self.finish_reason is not None
        assert (error is not None) == (self.finish_reason == "error")
        drawn = self.drawn
        return RequestOutput(
            request_id=self.request_id,
            token_ids=drawn.token_N.tolist(),
            log_probs=drawn.log_prob_N.tolist(),
            kept_mass=drawn.kept_mass_N.tolist(),
            top1_ids=drawn.top1_N.tolist(),
            weight_versions=drawn.version_N.tolist(),
            finish_reason=self.finish_reason,
            num_preempted=self.num_preempted,
            prompt_len=self.prompt_len,
            num_cached_tokens=self.num_cached_tokens,
            routes_TLK=self._routes(),
            error=error,
        )

    def _routes(self) -> np.ndarray | None:
        if self.routes_TLK is None or not len(self.drawn):
            return None
        return self.routes_TLK[: self.prompt_len + len(self.drawn) - 1]


@dataclass(frozen=True)
class RequestOutput:
    """What became of a request. The five lists have one entry per drawn token, the stop token included.

    Attributes:
        log_probs: full-vocabulary log-prob at the sampling temperature (at temperature 0: at 1), nats, recorded in the
            step that drew the token. Each float is exactly an fp32 value.
        kept_mass: probability mass left by top-k, top-p and min-p at that step; 1.0 where nothing was cut.
        top1_ids: the likeliest token at that step.
        weight_versions: version of the weights that drew the token.
        finish_reason: "stop" (end-of-sequence or stop token), "length", "abort", or "error" (then ``error`` says why).
        num_preempted: how often the request gave its KV pages to older ones and was recomputed.
        num_cached_tokens: prompt tokens whose KV was taken from the prefix cache.
        routes_TLK: int16, the experts that each sparse layer chose at each of the T = prompt + drawn - 1 positions that
            the model ran over (the last drawn token is never fed), most probable first; of a position that was computed
            more than once, those of the first time. None where they were not asked for, nothing was drawn, or the model
            is dense.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    kept_mass: list[float]
    top1_ids: list[int]
    weight_versions: list[int]
    finish_reason: FinishReason
    num_preempted: int
    prompt_len: int
    num_cached_tokens: int = 0
    routes_TLK: np.ndarray | None = None
    error: RequestError | None = None

    def __post_init__(self) -> None:
        lengths = {
            len(values)
            for values in (self.token_ids, self.log_probs, self.kept_mass, self.top1_ids, self.weight_versions)
        }
        if self.routes_TLK is not None:
            lengths.add(len(self.routes_TLK) - self.prompt_len + 1)
        assert len(lengths) == 1, f"request {self.request_id}: unequal lengths {lengths}"

    @property
    def routes_NLK(self) -> np.ndarray | None:
        """Of the rows that drew the tokens: position t drew the token of position t + 1."""
        return None if self.routes_TLK is None else self.routes_TLK[self.prompt_len - 1 :]
