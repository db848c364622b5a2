from __future__ import annotations

import pytest
import torch

from tests.training.tiny import model_folder


@pytest.fixture(autouse=True)
def one_thread():
    """The models are too small to share out, and threads that wait for each other on a busy machine take for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A dense model folder."""
    return str(model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3"))
