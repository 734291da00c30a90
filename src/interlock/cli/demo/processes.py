"""The demo's processes: started once, used for trial after trial, replaced when a crash has taken one.

One more is kept warm than are at work, as starting Python takes longer than a trial: it steps in at once for one that
crashed, and the next one warms up meanwhile. Each has a process group of its own, so that Ctrl-C reaches only us and we
end them; should we be killed, they see our end of the socket close, and one that is stopped is then woken (and ended)
by the kernel, which does this for stopped groups that are orphaned.

The crew is also the *doorman*, for some recipes would wait for ever. It closes the trial, upon which who waits for the
lock gives up, when (1) nothing is done any more and the lock has no end; (2) all stood still so often that it cannot
be the faults, which means that each waits for the TTL; (3) nothing is done any more as all is done. There is
no closing time: on a busy machine everything is slow, and that must not look like a failure.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, cast

from interlock.cli.demo.worker import CLOSE, DONE, FAILED, GO, PAUSE, READY, RESUME
from interlock.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import TracebackType
    from typing import Self

    from interlock.cli.demo.connection import Execute
    from interlock.cli.demo.scenario import Scenario

__all__ = ["Processes"]

_CRASHED = "crashed"
_CHECK_INTERVAL = 0.04  # seconds between two looks at the progress
_MAX_IDLE_WITHOUT_TTL = 4.0  # TTLs without progress, with a lock that has no end: stuck for ever
_MAX_IDLE_WHEN_DONE = 2.0  # TTLs without progress when there is nothing left to do
_STALL = 0.6  # TTLs without progress that count as one of those that the trial's patience limits
_MAX_IDLE = 30.0  # seconds without progress, whatever the reason


class _Worker:
    """A worker process, as its parent sees it."""

    def __init__(self) -> None:
        self.connection, child_end = multiprocessing.Pipe()
        with child_end:
            # -P and the path: it shall import the same interlock as we, wherever it is started.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "interlock.cli.demo.worker", str(child_end.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it has crashed, which we shall read
            self.connection.send(message)

    def receive(self) -> tuple[str, Any]:
        """The next word, and its value."""
        try:
            message: tuple[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            return _CRASHED, None
        return message

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Processes:
    """So many worker processes, and one in reserve: `with Crew(4) as crew: crew.run(trial, ...)`."""

    def __init__(self, size: int) -> None:
        self._workers: list[_Worker] = []
        try:
            for _ in range(size + 1):
                self._workers.append(_Worker())
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.stop()

    def run(self, scenario: Scenario, execute: Execute, progress: Callable[[int], object]) -> float:
        """Hold a trial, from its opening until the last client has left; `progress` is told how far it is.

        Returns the seconds that it took.
        """
        scenario.prepare(execute)
        run = _Run(scenario, execute, self._workers[:-1], self.replace)
        while run.active:
            run.handle_messages()
            progress(run.check_progress())
        return time.monotonic() - run.started_at

    def replace(self, crashed: _Worker) -> _Worker:
        """Put the one in reserve in place of one that crashed, and start another."""
        crashed.stop()
        self._workers.remove(crashed)
        self._workers.append(_Worker())
        return self._workers[-2]


class _Run:
    """The crew during one trial. It is also the doorman."""

    def __init__(
        self, scenario: Scenario, execute: Execute, workers: list[_Worker], replace: Callable[[_Worker], _Worker]
    ) -> None:
        self.active: dict[_Worker, Scenario] = {}  # and what each was told
        self.started_at = 0.0  # not yet
        self._scenario = scenario
        self._execute = execute
        self._replace = replace
        self._not_ready = set(workers)
        self._paused: list[tuple[float, _Worker]] = []
        self._crashes_left = sum(fault.kind == "crash" for fault in scenario.faults.values())
        self._closed = False
        self._done = 0
        self._idle = 0.0
        self._stalls = 0
        self._checked_at = time.monotonic()
        for process_index, worker in enumerate(workers):
            self._assign(worker, scenario.for_process(process_index))

    def _assign(self, worker: _Worker, scenario: Scenario) -> None:
        self.active[worker] = scenario
        worker.send(scenario)

    def handle_messages(self) -> None:
        """Hear who has something to say, for a moment, and wake whose pause is over."""
        workers = {worker.connection: worker for worker in self.active}
        for connection in multiprocessing.connection.wait(list(workers), _CHECK_INTERVAL):
            self._handle_message(workers[cast("Connection[Any, Any]", connection)])
        now = time.monotonic()
        for due, worker in [*self._paused]:
            if due <= now:
                self._paused.remove((due, worker))
                worker.process.send_signal(signal.SIGCONT)
                worker.send(RESUME)

    def _handle_message(self, worker: _Worker) -> None:
        kind, value = worker.receive()
        if kind == READY:
            self._not_ready.discard(worker)
            if self.started_at:
                worker.send(GO)
            elif not self._not_ready:
                self.started_at = time.monotonic()
                self._send_all(GO)
        elif kind == PAUSE:
            worker.process.send_signal(signal.SIGSTOP)
            self._paused.append((time.monotonic() + value, worker))
        elif kind == FAILED:
            raise Unavailable(value)
        elif kind == DONE:
            del self.active[worker]
        else:
            self._replace_crashed(worker, self.active.pop(worker))

    def _replace_crashed(self, worker: _Worker, scenario: Scenario) -> None:
        status = worker.process.wait()
        if status != -signal.SIGKILL or not self._crashes_left:
            raise Unavailable(f"a process of the demo ended by itself, with status {status}")
        self._crashes_left -= 1
        scenario.crashed(self._execute)
        self._assign(self._replace(worker), scenario)
        if self._closed:
            self._send_all(CLOSE)

    def _send_all(self, message: str) -> None:
        for worker in self.active:
            worker.send(message)

    def check_progress(self) -> int:
        """Look how far it is, and close the trial if it is stuck. See the doorman's rules above."""
        scenario = self._scenario
        done = scenario.progress(self._execute)
        now = time.monotonic()
        # Where we come late ourselves the machine was busy, which says nothing about the trial.
        passed, self._checked_at = min(now - self._checked_at, 2 * _CHECK_INTERVAL), now
        if not self.started_at or self._closed:
            return done
        ttl, idle_before = scenario.ttl, self._idle
        self._idle = 0.0 if done != self._done else idle_before + passed
        self._done = done
        self._stalls += idle_before < _STALL * ttl <= self._idle
        if (
            (done >= scenario.goal and self._idle > _MAX_IDLE_WHEN_DONE * ttl)
            or (self._idle > _MAX_IDLE_WITHOUT_TTL * ttl and self._execute("PTTL", scenario.lock) == -1)
            or self._stalls > scenario.max_stalls
            or self._idle > _MAX_IDLE
        ):
            self._closed = True
            self._send_all(CLOSE)
        return done
