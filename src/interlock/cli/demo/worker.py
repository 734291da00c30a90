"""A worker process of the demo: it runs the clients of one trial after another, as its parent says.

    python -m interlock.cli.demo.worker FD       FD: our end of a pair of sockets

It is told a `Trial` and answers READY; then GO, perhaps CLOSE, and it answers DONE when its last client has left, or
FAILED and why. As it cannot wake itself, it is stopped by the parent: it says PAUSE and for how long, and goes on
at RESUME. A crash is SIGKILL. When the parent has gone, so does the worker. (Its words are pairs of plain values:
the parent could not unpickle a class of this module, which runs as __main__.)
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

from interlock.cli.demo.connection import Wire
from interlock.cli.demo.scenario import Closed, Fault, Scene, Trial

__all__ = ["CLOSE", "DONE", "FAILED", "GO", "PAUSE", "READY", "RESUME"]

READY, GO, CLOSE, PAUSE, RESUME, DONE, FAILED = "ready", "go", "close", "pause", "resume", "done", "failed"


class Worker:
    """One process of clients."""

    def __init__(self, parent: Connection[Any, Any]) -> None:
        self._parent = parent
        self._speaking = threading.Lock()
        self._go = threading.Event()
        self._resume = threading.Event()
        self._scene: Scene[Any] | None = None

    def listen(self) -> NoReturn:
        """Do what the parent says until it has gone."""
        while True:
            try:
                message = self._parent.recv()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(message, Trial):
                self._go.clear()
                self._scene = Scene(message, self._suffer)
                threading.Thread(target=self._run, args=[self._scene], daemon=True).start()
            elif message == GO:
                self._go.set()
            elif message == RESUME:
                self._resume.set()
            elif message == CLOSE and self._scene is not None:
                self._scene.closed.set()

    def _say(self, word: str, value: object = None) -> None:
        with self._speaking:
            self._parent.send((word, value))

    def _run(self, scene: Scene[Any]) -> None:
        clients = scene.trial.clients
        try:
            with contextlib.closing(scene.locks), ThreadPoolExecutor(clients) as pool:
                self._say(READY)
                self._go.wait()
                for client in [pool.submit(self._visit, scene) for _ in range(clients)]:
                    client.result()
            self._say(DONE)
        except Exception as error:  # noqa: BLE001  # whatever it is, people should see it in the parent's one line
            self._say(FAILED, f"{type(error).__name__}: {error}")

    def _visit(self, scene: Scene[Any]) -> None:
        with contextlib.closing(Wire(scene.trial.url)) as wire:
            try:
                scene.trial.visit(scene, wire)
            except Closed:
                wire.ask("HINCRBY", scene.trial.notes, "left", 1)

    def _suffer(self, fault: Fault, seconds: float) -> None:
        if fault.kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "pause":
            self._resume.clear()
            self._say(PAUSE, seconds)
            self._resume.wait()
        else:
            time.sleep(seconds)


if __name__ == "__main__":
    logging.getLogger("interlock").addHandler(logging.NullHandler())  # the table tells of a lost lease
    Worker(Connection(int(sys.argv[1]))).listen()
