"""What the engine's tests share: engines over the fake model, and the check of an output against first principles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from tests.engine.fake_model import FakeModel, expected_draw
from verl_tim.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from verl_tim.engine.core import default_seed
from verl_tim.engine.crew import Crew, Split


def fake_engine(model: FakeModel | None = None, *, device=None, **settings) -> Engine:
    defaults = {"model_path": "fake", "numerics": "stock", "page_size": 4, "kv_cache_tokens": 256, "max_num_seqs": 8}
    return Engine(EngineConfig(**{**defaults, **settings}), model=model or FakeModel(), device=device)


@contextlib.contextmanager
def kept_crews(device: str) -> Iterator[Callable[[int, int], Crew]]:
    """(tensor ranks, pipeline stages) -> the processes of that split, started when first wanted: the engines of a
    module run on them one after the other. Those that a failed test has ended are replaced, so that it fails alone."""
    made: dict[tuple[int, int], Crew] = {}

    def of(tensor: int, stages: int) -> Crew:
        split = (tensor, stages)
        if split not in made or made[split].is_over:
            made[split] = Crew(Split(*split, device))
        return made[split]

    yield of
    for crew in made.values():
        crew.close()
        assert all(process.poll() is not None for process in crew.processes)


def run_all(engine: Engine, *, audit: bool = True, max_steps: int = 100_000) -> dict[str, RequestOutput]:
    """Step until nothing is left; every request may end once only."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            break
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        if audit:
            engine.audit()
    assert not engine.has_work(), f"still running after {max_steps} steps"
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages, "pages leaked"
    return outputs


def check_output(output: RequestOutput, prompt, params: SamplingParams, *, engine_seed: int = 0, eos=(1,), salts=None):
    """Every token and log-prob is what the tokens before it and the weights of its version demand."""
    seed = default_seed(engine_seed, output.request_id) if params.seed is None else params.seed
    tokens = list(prompt)
    for token, log_prob, version in zip(output.token_ids, output.log_probs, output.weight_versions, strict=True):
        salt = version if salts is None else salts[version]
        want, want_log_prob = expected_draw(tokens, salt=salt, temperature=params.temperature, seed=seed)
        assert (token, log_prob) == (want, want_log_prob)
        tokens.append(token)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    ends = [token in stops for token in output.token_ids]
    assert not any(ends[:-1]), "drew on past a stop token"
    if output.finish_reason == "stop":
        assert ends[-1]
    elif output.finish_reason == "length":
        assert not ends[-1]
    assert output.prompt_len == len(prompt)


def random_prompts(count: int, low: int, high: int, vocab: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab, rng.integers(low, high + 1)).tolist() for _ in range(count)]
