"""The surroundings of processes: no real clock, no chance, no garbage collector, and a log that reports errors."""

from __future__ import annotations

import contextlib
import logging
import os
import types
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from simulator.substitutes import substituted

from .process import Process

if TYPE_CHECKING:
    from collections.abc import Generator


class _Log(logging.Handler):
    """Makes each error in the log a broken rule of the process that runs."""

    def emit(self, record: logging.LogRecord) -> None:
        cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
        if Process.running is not None and "tasks" in vars(Process.running):
            tasks = Process.running.tasks
            tasks.failed = tasks.failed or f"logged: {record.getMessage()}{cause}"


def _running() -> Process:
    assert Process.running is not None
    return Process.running


def _now() -> float:
    return _running().tasks.now


def _uniform(low: float, high: float) -> float:
    return (low + high) / 2


def _token_hex(_: int) -> str:
    return "x"


def _urandom(_: int) -> bytes:
    return _running().random_bytes()


SUBSTITUTES: Final[dict[str, Any]] = {
    "now": _now,
    "random": types.SimpleNamespace(uniform=_uniform),
    "secrets": types.SimpleNamespace(token_hex=_token_hex),
    "os": types.SimpleNamespace(**(vars(os) | {"urandom": _urandom})),
}  # by the name under which a module imports it


@contextlib.contextmanager
def isolated() -> Generator[None]:
    """Give interlock the time of the process that runs, and counts in place of random numbers; stop the collector."""
    log = logging.getLogger("interlock")
    with (
        mock.patch.multiple(log, propagate=False, handlers=[_Log(logging.ERROR)], level=logging.ERROR),
        substituted(SUBSTITUTES),
    ):
        log.manager._clear_cache()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            Process.running = None
            log.manager._clear_cache()  # type: ignore[attr-defined]
