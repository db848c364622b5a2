"""One thread: models this small gain nothing from more, and tests that run side by side lose a lot."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from fake_hub import FakeHub

    return FakeHub(tmp_path / "hub", monkeypatch)
