"""A worker process of the demo: it runs the clients of each scenario that its parent sends.

    python -m interlock.cli.demo.worker FD       FD: the worker's end of a pair of sockets

The parent sends a `Scenario`, and the worker answers READY. The parent sends GO, and perhaps CLOSE; the worker answers
DONE when its last client has finished, or FAILED with the error. A stopped process cannot resume itself, so for a pause
the worker sends PAUSE with a duration, the parent stops it, and sends RESUME after that time. For a crash the worker
kills itself with SIGKILL. It exits when the parent has exited. (Messages of the worker are pairs of plain values: the
parent could not unpickle a class of this module, which runs as __main__.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from interlock.cli.demo.connection import BareConnection
from interlock.cli.demo.scenario import Context, Fault, Scenario, ScenarioClosed

__all__ = ["CLOSE", "DONE", "FAILED", "GO", "PAUSE", "READY", "RESUME"]

READY, GO, CLOSE, PAUSE, RESUME, DONE, FAILED = "ready", "go", "close", "pause", "resume", "done", "failed"


class Worker:
    """One process of clients."""

    def __init__(self, parent: Connection[Any, Any]) -> None:
        self._parent = parent
        self._send_lock = threading.Lock()
        self._go = threading.Event()
        self._resume = threading.Event()
        self._context: Context[Any] | None = None

    def handle_messages(self) -> NoReturn:
        """Handle messages of the parent until the parent exits."""
        while True:
            try:
                message = self._parent.recv()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(message, Scenario):
                self._go.clear()
                self._context = Context(message, self._inject)
                threading.Thread(target=self._run, args=[self._context], daemon=True).start()
            elif message == GO:
                self._go.set()
            elif message == RESUME:
                self._resume.set()
            elif message == CLOSE and self._context is not None:
                self._context.closed.set()

    def _send(self, kind: str, value: object = None) -> None:
        with self._send_lock:
            self._parent.send((kind, value))

    def _run(self, context: Context[Any]) -> None:
        clients = context.scenario.clients
        try:
            with contextlib.closing(context.locks), ThreadPoolExecutor(clients) as pool:
                self._send(READY)
                self._go.wait()
                for client in [pool.submit(self._run_client, context) for _ in range(clients)]:
                    client.result()
            self._send(DONE)
        except Exception as error:  # noqa: BLE001  # the parent prints any error on one line
            self._send(FAILED, f"{type(error).__name__}: {error}")

    def _run_client(self, context: Context[Any]) -> None:
        with contextlib.closing(BareConnection(context.scenario.url)) as connection:
            try:
                context.scenario.run_client(context, connection)
            except ScenarioClosed:
                connection.execute("HINCRBY", context.scenario.events_key, "gave_up", 1)

    def _inject(self, fault: Fault, seconds: float) -> None:
        if fault.kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "pause":
            self._resume.clear()
            self._send(PAUSE, seconds)
            self._resume.wait()
        else:
            time.sleep(seconds)


if __name__ == "__main__":
    logging.getLogger("interlock").addHandler(logging.NullHandler())  # the table reports lost leases
    Worker(Connection(int(sys.argv[1]))).handle_messages()
