"""What the locks of one client share: a server, a name, and workers in the background.

There are four tasks: report the ends of leases, renew leases, send the heartbeats of waiters, and undo attempts. Each
task has a worker of its own, which starts when its task is due for the first time. So a silent server holds up only
the work that needs its answer; the end of a lease needs none, and is reported in time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import sys
from typing import TYPE_CHECKING, Any, Final

from interlock._client.core import Core
from interlock._client.grant import Attempt, Grant, count_fork
from interlock._client.renewal import Renewal
from interlock._client.undo import Undo, release_message
from interlock._client.waiting import Waiters
from interlock._client.worker import Worker
from interlock._protocol.names import MIN_TTL, duration, token_part
from interlock._protocol.run import run
from interlock._protocol.timing import FOREVER, TRY_FOR
from interlock.errors import ConfigError
from interlock.primitives.codes import free_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._protocol.types import Port

CLOSE_TIMEOUT: Final = 1.0  # seconds that closing may take for its releases
RELEASE_BATCH: Final = 500  # releases in one write


class Session:
    """One client: its core and its workers. It is the `PushHandler` of its port."""

    def __init__(
        self,
        port: Port,
        label: str | None,
        caller_name: Callable[[], str],
        max_ttl: float,
        exit_connection: Callable[[], Port],
        try_for: float = TRY_FOR,
    ) -> None:
        self.port = port
        self.runtime = port.runtime
        self.label = label
        self.caller_name = caller_name  # the thread or task that asks, as a word
        self.max_ttl = max_ttl
        self.try_for = try_for
        self.exit_connection = exit_connection  # a port that works without a loop, when the process exits
        self._start()
        _track(self)

    def _start(self) -> None:
        port = self.port
        host = token_part(socket.gethostname())
        self.process_id = f"{token_part(self.label)}@{host}/{os.getpid()}" if self.label else f"{host}/{os.getpid()}"
        self.channel = f"interlock:{secrets.token_hex(8)}"
        names = ("", "-renewal", "-waiters", "-undo")
        ends, renewal, waiters, undo = self.workers = [
            Worker(self.runtime, f"interlock-keeper{name}", lambda: self.core.closed, self.start_workers)
            for name in names
        ]
        self.waiters = waiters.task = Waiters(port, waiters.wake_at)
        self.undo = undo.task = Undo(port, undo.wake_at)
        self.renewal = renewal.task = Renewal(port, ends.wake_at, renewal.wake_at, self.undo)
        ends.task = self.renewal.ends
        self.core = Core(port, self.waiters, self.renewal, self.undo, self.holder_id, self.try_for)

    def holder_id(self) -> str:
        return f"{self.process_id}/{self.caller_name()}"

    # The port's word

    def subscribed(self, channel: str | None = None) -> None:
        """The channel is heard, from now on, or not any more: what came before may have been missed."""
        self.waiters.wake_all(channel)
        self.renewal.subscribed(channel)

    def pushed(self, payload: bytes) -> None:
        """A message for us."""
        verb, token, rest = (payload.decode(errors="replace") + "  ").split(" ", 2)
        if verb == "granted":
            self.waiters.on_granted(token)
        elif verb == "revoked":
            self.renewal.revoked(token, free_text(rest.rstrip()))

    def start_workers(self) -> None:
        """Start those that have something to do, and could not start before, or were cancelled with all tasks."""
        for worker in self.workers:
            if not worker.started and (due := worker.task.due()) != FOREVER:
                worker.wake_at(due)

    # What needs more than the core

    async def extend(self, grant: Grant, ttl: float) -> None:
        """See Lease.extend."""
        await self.core.extend(grant, duration(ttl, "ttl", least=MIN_TTL, most=self.max_ttl))

    async def execute(
        self, grant: Grant, command: str, words: Sequence[str | bytes | float], keys: Sequence[str | bytes] | None
    ) -> Any:
        """See Lease.execute."""
        if self.port.is_quorum:
            raise ConfigError(
                f"{grant.resource}: execute() needs one server that decides and does it in one step, and a quorum has "
                "none. Send the fence with what you write, or lock at that one server"
            )
        args = [word if isinstance(word, str | bytes) else repr(word) for word in words]
        if keys is None:
            asked: list[bytes] = await self.core.query(grant.resource, "keys", command, *args)
            return await self.core.execute(grant, command, args, asked)
        if missing := [key for key in keys if key not in args]:
            raise ConfigError(f"execute({command!r}): {missing[0]!r} is in keys, but not among the arguments")
        return await self.core.execute(grant, command, args, keys)

    # Its end

    def stop_granting(self, *, announce: bool) -> list[Attempt]:
        """Grant nothing any more: what is to be given back, of leases and in queues.

        `announce` sets the `ended` events of the leases; without their loop that can't be done.
        """
        self.core.closed = True
        held, waiting = self.renewal.held(), list(self.waiters.registered.values())
        for attempt in waiting:
            attempt.in_doubt = True  # a request of it may be on its way
        for grant in held:
            self.renewal.remove(grant)
            if announce:
                grant.mark_released()
            else:
                grant.end_reason = Grant.RELEASED
        undone = self.undo.attempts()
        dropped = [attempt for _, attempt in self.renewal.dropped]
        releasing = list(self.core.releasing.values())
        return [*(grant.attempt for grant in held), *dropped, *releasing, *waiting, *undone]

    @staticmethod
    async def release_all(attempts: list[Attempt], port: Port, until: float) -> None:
        """Release these and leave their queues, until then at the latest."""
        for i in range(0, len(attempts), RELEASE_BATCH):
            replies = await port.calls([release_message(attempt) for attempt in attempts[i : i + RELEASE_BATCH]], until)
            if all(isinstance(reply, Exception) for reply in replies):
                break

    async def close(self) -> None:
        """Release what is held and leave every queue, in bounded time; end the waiting and the workers."""
        _sessions.discard(self)
        try:
            await self.release_all(self.stop_granting(announce=True), self.port, self.runtime.now() + CLOSE_TIMEOUT)
        finally:
            self.waiters.wake_all()
            for worker in self.workers:
                worker.wakeup.set()

    def abandon(self) -> list[Attempt]:
        """Its loop is over, without a close: what is to be taken back now.

        What is held stays so: it is given back when the process ends.
        """
        if not self.renewal.held():
            _sessions.discard(self)
        left = [*self.undo.attempts(), *self.core.releasing.values()]
        for attempt in self.waiters.registered.values():
            attempt.in_doubt = True
            left.append(attempt)
        return left

    def reset_after_fork(self) -> None:
        """In a child after fork: nothing is held here, and nobody waits."""
        for grant in self.renewal.held():
            grant.end_reason = Grant.FORKED
        closed = self.core.closed
        self.runtime.reset_after_fork()
        self.port.reset_after_fork()
        self._start()
        self.core.closed = closed


class Sessions(set["Session"]):
    """A set that can be referred to weakly."""


_sessions: Sessions = Sessions()  # all that are open: a process that ends gives back what they hold


def _track(session: Session) -> None:
    if not _sessions:
        # With the first session, not on import: so it runs before a private server of this process is ended.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    _sessions.add(session)


def _after_fork() -> None:
    count_fork()
    if util := sys.modules.get("multiprocessing.util"):
        # Such a child ends without atexit, by finalizers of its own, which it sets up after this.
        util.register_after_fork(_sessions, _finalize)
    for session in list(_sessions):
        session.reset_after_fork()


def _finalize(_: Sessions) -> None:
    sys.modules["multiprocessing.util"].Finalize(None, _at_exit, exitpriority=0)


def _at_exit() -> None:
    """Give all back, within `CLOSE_TIMEOUT` for all sessions together. No thread can be started any more.

    Each has its share of the time that is left: those whose server is silent leave time enough for the others.
    """
    owed = [(session, attempts) for session in list(_sessions) if (attempts := session.stop_granting(announce=False))]
    end = owed[0][0].runtime.now() + CLOSE_TIMEOUT if owed else 0.0
    for left, (session, attempts) in zip(range(len(owed), 0, -1), owed, strict=True):
        with contextlib.suppress(Exception):  # the process ends, and what it held runs out
            now = session.runtime.now()
            run(session.release_all(attempts, session.exit_connection(), now + max(0.0, end - now) / left))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
