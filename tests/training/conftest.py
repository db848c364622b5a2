"""Fixtures: model folders, and a process group of one, which verl's FSDP engine needs."""

from __future__ import annotations

import pytest
import torch

from tests.training.tiny import model_folder, parquet


@pytest.fixture(autouse=True)
def one_thread():
    """The models are too small to share out, and threads that wait for each other on a busy machine take for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """kind -> model folder, made once."""
    made: dict[str, str] = {}

    def folder(kind: str, tied: bool = False) -> str:
        name = f"{kind}-tied" if tied else kind
        if name not in made:
            made[name] = str(model_folder(tmp_path_factory.mktemp(name), kind, tied=tied))
        return made[name]

    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folder with train.parquet and val.parquet, for real runs."""
    folder = tmp_path_factory.mktemp("data")
    parquet(folder / "train.parquet", 64)
    parquet(folder / "val.parquet", 8, split="test", seed=1)
    return folder


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """A default process group of one rank, through verl's own function as verl_tim patches it.

    A module's and not the session's: the next file of this process may want to make its own.
    """
    import verl.utils.distributed as distributed

    if torch.distributed.is_initialized():
        yield
        return
    patcher = pytest.MonkeyPatch()
    patcher.setenv("RANK", "0")
    patcher.setenv("WORLD_SIZE", "1")
    patcher.setenv("DIST_INIT_METHOD", f"file://{tmp_path_factory.mktemp('group')}/store")
    distributed.initialize_global_process_group_ray()
    yield
    torch.distributed.destroy_process_group()
    patcher.undo()
