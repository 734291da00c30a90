"""What the locks of one client share: a port, who we are, and keepers, loops that keep promises.

There are four chores: to tell the ends of leases, to renew leases, to vouch for waiters, and to undo attempts. Each
has a keeper of its own, which starts when its chore is due for the first time. So a server that is silent holds up what
it is asked, and nothing else: the end of a lease is told without any I/O, and so in time.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol

from . import _core
from ._core import FOREVER, TRY_FOR, Attempt, Core, Grant, Port, Signal, free_text, run
from ._names import SHORTEST_TTL, duration, token_part
from ._renewal import Renewal
from ._undo import Undo, message
from ._waiters import Waiters
from .errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger("interlock")
PARTING: Final = 1.0  # seconds that closing may take for its releases
BATCH: Final = 500  # releases in one write


class Chore(Protocol):
    """Something that is due from time to time."""

    def due(self) -> float: ...
    async def tick(self) -> None: ...


class Keeper:
    """One loop, which does one chore whenever that is due, until the session is closed."""

    def __init__(self, port: Port, name: str, session: Session) -> None:
        self.port = port
        self.name = name  # of its thread or task
        self.session = session
        self.chore: Chore
        self.alarm: Signal = port.signal()
        self.asleep_until = FOREVER
        self.started = False  # no other one is to be started
        self.running = False

    def nudge(self, due: float) -> None:
        """See to it that it is awake at this time."""
        if due < self.asleep_until:
            if not self.started:
                with self.port.mutex:
                    if not self.started:
                        self.started = True
                        try:
                            self.port.spawn(self.keep, self.name, self._kept)
                        except BaseException:  # an interrupt: it may have begun, or not
                            self.started = False
                            raise
                self.session.start_keepers()
            self.alarm.set()

    def _kept(self) -> None:
        """It has ended, by itself or since somebody cancelled all tasks. The next nudge starts it."""
        if not self.running:
            self.started, self.asleep_until = False, FOREVER

    async def keep(self) -> None:
        """Do the chore when it is due, until the session is closed. There is only one that does: a second one ends."""
        with self.port.mutex:
            if self.running:
                return
            self.running = True
        try:
            await self._keep()
        finally:
            self.running = False

    async def _keep(self) -> None:
        while not self.session.core.closed:
            try:
                self.asleep_until = FOREVER  # awake: whoever nudges now sets the alarm
                self.asleep_until = due = self.chore.due()
                await self.port.wait(self.alarm, due)
                await self.chore.tick()
            except Exception:  # a bug of ours must not end the renewal of leases
                log.exception("interlock: %s failed and goes on", self.name)
                await self.port.wait(self.port.signal(), self.port.now() + 0.1)


class Session:
    """One client: its core and its keepers. It is the `Sink` that the port tells what it hears."""

    def __init__(
        self,
        port: Port,
        label: str | None,
        where: Callable[[], str],
        max_ttl: float,
        farewell: Callable[[], Port],
        try_for: float = TRY_FOR,
    ) -> None:
        self.port = port
        self.label = label
        self.where = where  # the thread or task that asks, as a word
        self.max_ttl = max_ttl
        self.try_for = try_for
        self.farewell = farewell  # a port that works without a loop, when the process exits
        self._begin()
        _keep(self)

    def _begin(self) -> None:
        port = self.port
        host = token_part(socket.gethostname())
        self.me = f"{token_part(self.label)}@{host}/{os.getpid()}" if self.label else f"{host}/{os.getpid()}"
        self.channel = f"interlock:{secrets.token_hex(8)}"
        names = ("", "-renewal", "-waiters", "-undo")
        ends, renewal, waiters, undo = self.keepers = [Keeper(port, f"interlock-keeper{name}", self) for name in names]
        self.waiters = waiters.chore = Waiters(port, waiters.nudge)
        self.undo = undo.chore = Undo(port, undo.nudge)
        self.renewal = renewal.chore = Renewal(port, ends.nudge, renewal.nudge, self.undo)
        ends.chore = self.renewal.ends
        self.core = Core(port, self.waiters, self.renewal, self.undo, self.who, self.try_for)

    def who(self) -> str:
        return f"{self.me}/{self.where()}"

    # The port's word

    def subscribed(self, channel: str | None = None) -> None:
        """The channel is heard, from now on, or not any more: what came before may have been missed."""
        self.waiters.wake_all(channel)
        self.renewal.subscribed(channel)

    def pushed(self, payload: bytes) -> None:
        """A message for us."""
        verb, token, rest = (payload.decode(errors="replace") + "  ").split(" ", 2)
        if verb == "granted":
            self.waiters.granted(token)
        elif verb == "revoked":
            self.renewal.revoked(token, free_text(rest.rstrip()))

    def start_keepers(self) -> None:
        """Start those that have something to do, and could not start before, or were cancelled with all tasks."""
        for keeper in self.keepers:
            if not keeper.started and (due := keeper.chore.due()) != FOREVER:
                keeper.nudge(due)

    # What needs more than the core

    async def extend(self, grant: Grant, ttl: float) -> None:
        """See Lease.extend."""
        await self.core.extend(grant, duration(ttl, "ttl", least=SHORTEST_TTL, most=self.max_ttl))

    async def execute(
        self, grant: Grant, command: str, words: Sequence[str | bytes | float], keys: Sequence[str | bytes] | None
    ) -> Any:
        """See Lease.execute."""
        if self.port.several:
            raise ConfigError(
                f"{grant.primitive}: execute() needs one server that decides and does it in one step, and a quorum has "
                "none. Send the fence with what you write, or lock at that one server"
            )
        args = [word if isinstance(word, str | bytes) else repr(word) for word in words]
        if keys is None:
            asked: list[bytes] = await self.core.query(grant.primitive, "keys", command, *args)
            return await self.core.execute(grant, command, args, asked)
        if missing := [key for key in keys if key not in args]:
            raise ConfigError(f"execute({command!r}): {missing[0]!r} is in keys, but not among the arguments")
        return await self.core.execute(grant, command, args, keys)

    # Its end

    def end(self, *, announce: bool) -> list[Attempt]:
        """Grant nothing any more: what is to be given back, of leases and in queues.

        `announce` sets the `ended` events of the leases; without their loop that can't be done.
        """
        self.core.closed = True
        held, waiting = self.renewal.held(), list(self.waiters.expected.values())
        for attempt in waiting:
            attempt.in_doubt = True  # a request of it may be on its way
        for grant in held:
            self.renewal.forget(grant)
            if announce:
                grant.released()
            else:
                grant.ended = Grant.RELEASED
        undone = self.undo.attempts()
        dropped = [attempt for _, attempt in self.renewal.dropped]
        releasing = list(self.core.releasing.values())
        return [*(grant.attempt for grant in held), *dropped, *releasing, *waiting, *undone]

    @staticmethod
    async def give_back(attempts: list[Attempt], port: Port, until: float) -> None:
        """Release these and leave their queues, until then at the latest."""
        for i in range(0, len(attempts), BATCH):
            replies = await port.calls([message(attempt) for attempt in attempts[i : i + BATCH]], until)
            if all(isinstance(reply, Exception) for reply in replies):
                break

    async def close(self) -> None:
        """Release what is held and leave every queue, in bounded time; end the waiting and the keepers."""
        _sessions.discard(self)
        try:
            await self.give_back(self.end(announce=True), self.port, self.port.now() + PARTING)
        finally:
            self.waiters.wake_all()
            for keeper in self.keepers:
                keeper.alarm.set()

    def abandon(self) -> list[Attempt]:
        """Its loop is over, without a close: what is to be taken back now.

        What is held stays so: it is given back when the process ends.
        """
        if not self.renewal.held():
            _sessions.discard(self)
        left = [*self.undo.attempts(), *self.core.releasing.values()]
        for attempt in self.waiters.expected.values():
            attempt.in_doubt = True
            left.append(attempt)
        return left

    def forget(self) -> None:
        """In a child after fork: nothing is held here, and nobody waits."""
        for grant in self.renewal.held():
            grant.ended = Grant.FORKED
        closed = self.core.closed
        self.port.forget()
        self._begin()
        self.core.closed = closed


class Sessions(set["Session"]):
    """A set that can be referred to weakly."""


_sessions: Sessions = Sessions()  # all that are open: a process that ends gives back what they hold


def _keep(session: Session) -> None:
    if not _sessions:
        # With the first session, not on import: so it runs before a private server of this process is ended.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    _sessions.add(session)


def _after_fork() -> None:
    _core.generation += 1
    if util := sys.modules.get("multiprocessing.util"):
        # Such a child ends without atexit, by finalizers of its own, which it sets up after this.
        util.register_after_fork(_sessions, _finalize)
    for session in list(_sessions):
        session.forget()


def _finalize(_: Sessions) -> None:
    sys.modules["multiprocessing.util"].Finalize(None, _at_exit, exitpriority=0)


def _at_exit() -> None:
    """Give all back, within `PARTING` for all sessions together. No thread can be started any more.

    Each has its share of the time that is left: those whose server is silent leave time enough for the others.
    """
    owed = [(session, attempts) for session in list(_sessions) if (attempts := session.end(announce=False))]
    end = owed[0][0].port.now() + PARTING if owed else 0.0
    for left, (session, attempts) in zip(range(len(owed), 0, -1), owed, strict=True):
        with contextlib.suppress(Exception):  # the process ends, and what it held runs out
            now = session.port.now()
            run(session.give_back(attempts, session.farewell(), now + max(0.0, end - now) / left))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
