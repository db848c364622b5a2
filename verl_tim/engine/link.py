"""Messages between the driver of an engine and one of its worker processes, over a socket pair.

A thread reads, so that the end of the other side is noticed whatever this side is doing.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class LinkClosed(Exception):
    """The other side is gone."""


class Link:
    """One end.

    Args:
        handle: of the socket; owned from now on.
        on_message: takes a message in the reading thread and says whether it is kept for :meth:`receive`.
        on_end: called in the reading thread when the other side is gone.
    """

    def __init__(
        self, handle: int, *, on_end: Callable[[], None], on_message: Callable[[Any], bool] = lambda message: True
    ) -> None:
        self._connection: Connection = Connection(handle)
        self._inbox: queue.Queue[Any] = queue.Queue()
        self._on_message, self._on_end = on_message, on_end
        self._ended = object()
        self._reader = threading.Thread(target=self._read, name="vexact-link", daemon=True)
        self._reader.start()

    def send(self, message: Any) -> None:
        """Raises LinkClosed when the other side is gone."""
        # plain pickle: multiprocessing's own would move tensors through shared memory behind our back
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            self._connection.send_bytes(data)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self, timeout: float | None = None) -> Any:
        """The next message; LinkClosed when the other side is gone, queue.Empty after `timeout` seconds."""
        message = self._inbox.get(timeout=timeout)
        if message is self._ended:
            self._inbox.put(message)
            raise LinkClosed("the other side is gone")
        return message

    def interrupt(self) -> None:
        """Let :meth:`receive` raise LinkClosed once the messages that are here are read."""
        self._inbox.put(self._ended)

    def close(self) -> None:
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                message = pickle.loads(self._connection.recv_bytes())
                if self._on_message(message):
                    self._inbox.put(message)
        except (EOFError, OSError):
            pass
        finally:
            self.interrupt()
            self._on_end()
