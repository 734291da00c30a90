"""A worker process of the demo: it runs the buyers of one sale after another, as its parent says.

    python -m interlock.cli.worker FD       FD: our end of a pair of sockets

It is told a `Sale` and answers READY; then GO, perhaps CLOSE, and it answers DONE when its last buyer has left, or
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

from interlock.cli.recipes import RECIPES
from interlock.cli.sale import Buyer, Closed, Declined, Fault, Sale, Till, Wire

__all__ = ["CLOSE", "DONE", "FAILED", "GO", "PAUSE", "READY", "RESUME"]

READY, GO, CLOSE, PAUSE, RESUME, DONE, FAILED = "ready", "go", "close", "pause", "resume", "done", "failed"


class Worker:
    """One process of buyers."""

    def __init__(self, parent: Connection[Any, Any]) -> None:
        self._parent = parent
        self._speaking = threading.Lock()
        self._go = threading.Event()
        self._resume = threading.Event()
        self._till: Till | None = None

    def listen(self) -> NoReturn:
        """Do what the parent says until it has gone."""
        while True:
            try:
                message = self._parent.recv()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(message, Sale):
                self._go.clear()
                self._till = Till(message, self._suffer)
                threading.Thread(target=self._run, args=[self._till], daemon=True).start()
            elif message == GO:
                self._go.set()
            elif message == RESUME:
                self._resume.set()
            elif message == CLOSE and self._till is not None:
                self._till.closed.set()

    def _say(self, word: str, value: object = None) -> None:
        with self._speaking:
            self._parent.send((word, value))

    def _run(self, till: Till) -> None:
        try:
            with contextlib.closing(till.locks), ThreadPoolExecutor(till.sale.buyers) as pool:
                self._say(READY)
                self._go.wait()
                for buyer in [pool.submit(self._shop, till) for _ in range(till.sale.buyers)]:
                    buyer.result()
            self._say(DONE)
        except Exception as error:  # noqa: BLE001  # whatever it is, people should see it in the parent's one line
            self._say(FAILED, f"{type(error).__name__}: {error}")

    def _shop(self, till: Till) -> None:
        """Buy ticket after ticket until they are sold out."""
        buy = RECIPES[till.sale.recipe].buy
        with contextlib.closing(Wire(till.sale.url)) as wire:
            more = True
            while more:
                buyer = Buyer(till, wire.ask)
                try:
                    more = buy(buyer)
                except Declined:
                    pass
                except Closed:
                    buyer.note("left")
                    return
                buyer.look_back()

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
