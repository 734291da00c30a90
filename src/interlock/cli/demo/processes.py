"""The demo's worker processes: started once, reused for each scenario, replaced after a crash.

One process more than needed is running, because starting Python takes longer than a scenario: this spare replaces a
worker that crashed at once, and another spare starts meanwhile. Each worker has a process group of its own, so that
Ctrl-C reaches only the parent, which then kills the workers. If the parent is killed, each worker reads the end of its
socket and exits; the kernel resumes a worker that is stopped at that moment, since its process group is orphaned.

The parent is also a *watchdog*, because clients of some recipes would wait for ever. It closes the scenario, and
clients that wait for the lock then give up, when (1) there is no progress and the lock has no TTL; (2) there were more
stalls than the faults can cause, so that each client waits for a TTL; (3) there is no progress and no work is left; (4)
there is no progress for half a minute. There is no time limit on the whole scenario: a busy machine slows everything
down, and that is no failure.
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
_CHECK_INTERVAL = 0.04  # seconds between two checks of the progress
_MAX_IDLE_WITHOUT_TTL = 4.0  # TTLs without progress, while the lock has no TTL: nobody can ever take it
_MAX_IDLE_WHEN_DONE = 2.0  # TTLs without progress, when no work is left
_STALL = 0.6  # TTLs without progress that count as one stall
_MAX_IDLE = 30.0  # seconds without progress, whatever the reason


class _Worker:
    """A worker process, seen from the parent."""

    def __init__(self) -> None:
        self.connection, child_end = multiprocessing.Pipe()
        with child_end:
            # -P and PYTHONPATH: the worker imports the same interlock as the parent, whatever its working directory.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "interlock.cli.demo.worker", str(child_end.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the worker crashed: receive() reports that
            self.connection.send(message)

    def receive(self) -> tuple[str, Any]:
        """The next message: its kind, and its value."""
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
    """Worker processes and one spare: `with Processes(4) as workers: workers.run(scenario, ...)`."""

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
        """Kill all processes."""
        for worker in self._workers:
            worker.stop()

    def run(self, scenario: Scenario, execute: Execute, progress: Callable[[int], object]) -> float:
        """Run a scenario until its last client has finished, and call `progress` with the work done so far.

        Returns the duration in seconds.
        """
        scenario.prepare(execute)
        run = _Run(scenario, execute, self._workers[:-1], self.replace)
        while run.active:
            run.handle_messages()
            progress(run.check_progress())
        return time.monotonic() - run.started_at

    def replace(self, crashed: _Worker) -> _Worker:
        """Replace a crashed worker by the spare, and start another spare."""
        crashed.stop()
        self._workers.remove(crashed)
        self._workers.append(_Worker())
        return self._workers[-2]


class _Run:
    """One run of one scenario. It is also the watchdog."""

    def __init__(
        self, scenario: Scenario, execute: Execute, workers: list[_Worker], replace: Callable[[_Worker], _Worker]
    ) -> None:
        self.active: dict[_Worker, Scenario] = {}  # with the scenario that each worker received
        self.started_at = 0.0  # not started
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
        """Handle messages of workers for one check interval, and resume each worker whose pause is over."""
        workers = {worker.connection: worker for worker in self.active}
        for connection in multiprocessing.connection.wait(list(workers), _CHECK_INTERVAL):
            self._handle_message(workers[cast("Connection[Any, Any]", connection)])
        now = time.monotonic()
        for resume_at, worker in [*self._paused]:
            if resume_at <= now:
                self._paused.remove((resume_at, worker))
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
        scenario.restore_after_crash(self._execute)
        self._assign(self._replace(worker), scenario)
        if self._closed:
            self._send_all(CLOSE)

    def _send_all(self, message: str) -> None:
        for worker in self.active:
            worker.send(message)

    def check_progress(self) -> int:
        """Return the work done so far, and close the scenario if it is stuck. The watchdog's rules are above."""
        scenario = self._scenario
        done = scenario.count_done(self._execute)
        now = time.monotonic()
        # If the parent itself was delayed, the machine was busy: that time says nothing about the scenario.
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
