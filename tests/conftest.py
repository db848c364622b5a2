from __future__ import annotations

import time

import hypothesis
import pytest

from verl_tim.numerics import probe
from verl_tim.numerics.linear import row_blocks, use_row_blocks
from verl_tim.tasks.architectures import init_model, resolve_shape
from verl_tim.tasks.tokenizer import build_tokenizer

# No test of ours is about time, and a busy machine would fail the others.
hypothesis.settings.register_profile("verl_tim", deadline=None)
hypothesis.settings.load_profile("verl_tim")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-limit", type=float, metavar="SECONDS", help="begin no test after so many seconds, and report the rest"
    )


BEGAN = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGAN] = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--time-limit")
    if limit is not None and time.monotonic() - item.config.stash[BEGAN] > limit:
        pytest.skip(f"NOT RUN: --time-limit={limit:.0f} seconds had passed")


@pytest.fixture(autouse=True, scope="module")
def _own_schedules():
    """What an engine's probe chose for this process ends with the file that made the engine."""
    blocks, dropped = row_blocks(), list(probe._dropped)
    yield
    use_row_blocks(blocks)
    probe._dropped[:] = dropped


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A small Qwen3 in Hugging Face format, untrained: enough for everything that only reads a model's folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(model_max_length=1024)
    model = init_model(
        "qwen3",
        resolve_shape("qwen3"),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=0,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
