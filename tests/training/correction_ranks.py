"""Two gloo ranks that go through a list of cases together, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = 2


def run(folder: str, which: str) -> dict[str, list[str]]:
    """case -> differences, for the cases "some" or "every", with half of the mini-batch on each of two ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(RANKS),
            "DIST_INIT_METHOD": f"file://{scratch}/store",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", __name__, folder, f"{scratch}/found.json", which]
        logs = [Path(f"{scratch}/rank{rank}.txt") for rank in range(RANKS)]
        with contextlib.ExitStack() as stack:
            processes = [
                subprocess.Popen(
                    command,
                    env={**environment, "RANK": str(rank)},
                    stdout=stack.enter_context(log.open("w")),
                    stderr=subprocess.STDOUT,
                )
                for rank, log in enumerate(logs)
            ]
            codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"exit codes {codes}:\n" + "\n---\n".join(log.read_text()[-3000:] for log in logs))
        return json.loads(Path(f"{scratch}/found.json").read_text())


def main(folder: str, out: str, which: str) -> None:
    import torch
    import verl.utils.distributed as distributed

    from tests.training.correction_bench import Bench
    from tests.training.correction_cases import differences, every, micro_batches_of, some

    torch.set_num_threads(1)
    distributed.initialize_global_process_group_ray()
    rank = torch.distributed.get_rank()
    bench = Bench(folder, rank=rank, ranks=RANKS)
    if which == "every":
        found = {name: differences(bench, case, micro_batches_of(RANKS)) for name, case in every()}
    else:
        found = {name: differences(bench, case, (micro_batch,)) for name, case, micro_batch in some()[::2]}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
