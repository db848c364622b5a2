"""A worker process of split engines: `python -m verl_tim.engine.worker SOCKET`, started by `crew.Crew`.

It runs the driver's verbs on its own rank's engines, in the order told. It ends with the driver: when told so, or when
the driver's socket closes, whatever it is doing.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import traceback
from typing import Any

import torch

from verl_tim.engine.crew import Hello
from verl_tim.engine.device import rank_device
from verl_tim.engine.engine import Engine
from verl_tim.engine.link import Link
from verl_tim.engine.parallel import make_store
from verl_tim.engine.weight_stream import ReceivedWeights

logger = logging.getLogger(__name__)


def _driver_is_gone() -> None:
    os._exit(1)  # the main thread may wait in an exchange that nobody will join


class _Worker:
    def __init__(self, hello: Hello, link: Link) -> None:
        torch.set_num_threads(hello.threads)
        device = rank_device(hello.split.device, hello.rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        link.send(("here", None))
        self._link = link
        self._ranks = hello.split.ranks(hello.rank, make_store(hello.port))
        self._engines: dict[int, Engine] = {}

    def serve(self) -> None:
        """Do as told until told to end."""
        while True:
            kind, *content = self._link.receive()
            if kind == "close":
                return
            if kind == "engine":
                number, config, device = content
                made = None if device is None else device()
                self._engines[number] = Engine(config, ranks=self._ranks, device=made)
                self._link.send(("ready", None))
            elif kind == "drop":
                del self._engines[content[0]]
                gc.collect()  # its tensors, before the next engine measures what is free
            else:
                number, verb, *arguments = content
                self._run(self._engines[number], verb, arguments)

    def _run(self, engine: Engine, verb: str, arguments: list[Any]) -> None:
        if verb == "update_weights":
            self._update_weights(engine, *arguments)
        elif verb == "each_rank":
            (function,) = arguments
            self._link.send(("result", function(engine)))
        else:
            getattr(engine, verb)(*arguments)

    def _update_weights(self, engine: Engine, version: int, in_flight: Any, reader: Any) -> None:
        stream = ReceivedWeights(self._link, self._ranks, reader)
        problem = None
        try:
            engine.update_weights(stream, version, in_flight=in_flight)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        stream.finish()
        self._link.send(("updated", problem))


def main(handle: int) -> None:
    """Serve until the driver ends it; exit code 1 after an error, which the driver is told with its traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the driver, which ends its workers
    link = Link(handle, on_end=_driver_is_gone)
    code = 0
    try:
        worker = _Worker(link.receive(), link)
        worker.serve()
    except BaseException:
        code = 1
        logger.exception("a rank failed")
        link.send(("failed", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no teardown that would wait for other ranks


if __name__ == "__main__":
    main(int(sys.argv[1]))
