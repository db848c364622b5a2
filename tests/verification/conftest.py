"""Random models and a process group that the tests of this folder share."""

from __future__ import annotations

import pytest

from verl_tim.training.in_process import single_rank_group
from verl_tim.verification.random_models import make_random_model


@pytest.fixture(scope="session")
def random_models(tmp_path_factory):
    """{kind: folder}."""
    return {kind: str(make_random_model(kind, tmp_path_factory.mktemp(kind))) for kind in ("qwen3", "qwen3_moe")}


@pytest.fixture
def one_rank():
    with single_rank_group():
        yield
