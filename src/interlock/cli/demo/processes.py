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

    from interlock.cli.demo.connection import Ask
    from interlock.cli.demo.scenario import Trial

__all__ = ["Crew"]

_CRASHED = "crashed"
_LOOK = 0.04  # seconds between two looks at the progress
_ENDLESS = 4.0  # TTLs without progress, with a lock that has no end: stuck for ever
_ALL_DONE = 2.0  # TTLs without progress when there is nothing left to do
_STANDSTILL = 0.6  # TTLs without progress that count as one of those that the trial's patience limits
_ABSURD = 30.0  # seconds without progress, whatever the reason


class _Member:
    """A worker process, as its parent sees it."""

    def __init__(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            # -P and the path: it shall import the same interlock as we, wherever it is started.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "interlock.cli.demo.worker", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def say(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it has crashed, which we shall read
            self.connection.send(message)

    def hear(self) -> tuple[str, Any]:
        """The next word, and its value."""
        try:
            message: tuple[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            return _CRASHED, None
        return message

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Crew:
    """So many worker processes, and one in reserve: `with Crew(4) as crew: crew.run(trial, ...)`."""

    def __init__(self, size: int) -> None:
        self._members: list[_Member] = []
        try:
            for _ in range(size + 1):
                self._members.append(_Member())
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End all processes."""
        for member in self._members:
            member.end()

    def run(self, trial: Trial, ask: Ask, progress: Callable[[int], object]) -> float:
        """Hold a trial, from its opening until the last client has left; `progress` is told how far it is.

        Returns the seconds that it took.
        """
        trial.open(ask)
        shift = _Shift(trial, ask, self._members[:-1], self.replace)
        while shift.busy:
            shift.listen()
            progress(shift.watch())
        return time.monotonic() - shift.opened

    def replace(self, crashed: _Member) -> _Member:
        """Put the one in reserve in place of one that crashed, and start another."""
        crashed.end()
        self._members.remove(crashed)
        self._members.append(_Member())
        return self._members[-2]


class _Shift:
    """The crew during one trial. It is also the doorman."""

    def __init__(self, trial: Trial, ask: Ask, team: list[_Member], replace: Callable[[_Member], _Member]) -> None:
        self.busy: dict[_Member, Trial] = {}  # and what each was told
        self.opened = 0.0  # not yet
        self._trial = trial
        self._ask = ask
        self._replace = replace
        self._arriving = set(team)
        self._stopped: list[tuple[float, _Member]] = []
        self._crashes = sum(fault.kind == "crash" for fault in trial.faults.values())
        self._closed = False
        self._done = 0
        self._still = 0.0
        self._standstills = 0
        self._looked = time.monotonic()
        for place, member in enumerate(team):
            self._engage(member, trial.at(place))

    def _engage(self, member: _Member, trial: Trial) -> None:
        self.busy[member] = trial
        member.say(trial)

    def listen(self) -> None:
        """Hear who has something to say, for a moment, and wake whose pause is over."""
        members = {member.connection: member for member in self.busy}
        for connection in multiprocessing.connection.wait(list(members), _LOOK):
            self._hear(members[cast("Connection[Any, Any]", connection)])
        now = time.monotonic()
        for due, member in [*self._stopped]:
            if due <= now:
                self._stopped.remove((due, member))
                member.process.send_signal(signal.SIGCONT)
                member.say(RESUME)

    def _hear(self, member: _Member) -> None:
        word, value = member.hear()
        if word == READY:
            self._arriving.discard(member)
            if self.opened:
                member.say(GO)
            elif not self._arriving:
                self.opened = time.monotonic()
                self._tell_all(GO)
        elif word == PAUSE:
            member.process.send_signal(signal.SIGSTOP)
            self._stopped.append((time.monotonic() + value, member))
        elif word == FAILED:
            raise Unavailable(value)
        elif word == DONE:
            del self.busy[member]
        else:
            self._crashed(member, self.busy.pop(member))

    def _crashed(self, member: _Member, trial: Trial) -> None:
        status = member.process.wait()
        if status != -signal.SIGKILL or not self._crashes:
            raise Unavailable(f"a process of the demo ended by itself, with status {status}")
        self._crashes -= 1
        trial.crashed(self._ask)
        self._engage(self._replace(member), trial)
        if self._closed:
            self._tell_all(CLOSE)

    def _tell_all(self, message: str) -> None:
        for member in self.busy:
            member.say(message)

    def watch(self) -> int:
        """Look how far it is, and close the trial if it is stuck. See the doorman's rules above."""
        trial = self._trial
        done = trial.progress(self._ask)
        now = time.monotonic()
        # Where we come late ourselves the machine was busy, which says nothing about the trial.
        passed, self._looked = min(now - self._looked, 2 * _LOOK), now
        if not self.opened or self._closed:
            return done
        ttl, before = trial.ttl, self._still
        self._still = 0.0 if done != self._done else before + passed
        self._done = done
        self._standstills += before < _STANDSTILL * ttl <= self._still
        if (
            (done >= trial.goal and self._still > _ALL_DONE * ttl)
            or (self._still > _ENDLESS * ttl and self._ask("PTTL", trial.lock) == -1)
            or self._standstills > trial.patience
            or self._still > _ABSURD
        ):
            self._closed = True
            self._tell_all(CLOSE)
        return done
