"""What the locks of one client share: a port, who we are, and the keeper, one loop that keeps promises.

The keeper does three chores, each when it is due: it renews leases, vouches for waiters, and undoes attempts.
It starts with the first of them. Each chore bounds its calls, so that none holds up the others for long.
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
from ._core import FOREVER, Attempt, Core, Grant, Port, Signal, run
from ._names import SHORTEST_TTL, seconds, word
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


class Session:
    """One client: its core and its keeper. It is the `Sink` that the port tells what it hears."""

    def __init__(
        self,
        port: Port,
        label: str | None,
        where: Callable[[], str],
        max_ttl: float,
        farewell: Callable[[], Port],
    ) -> None:
        self.port = port
        self.label = label
        self.where = where  # the thread or task that asks, as a word
        self.max_ttl = max_ttl
        self.farewell = farewell  # a port that works without a loop, when the process exits
        self._begin()
        _keep(self)

    def _begin(self) -> None:
        port = self.port
        host = word(socket.gethostname())
        self.me = f"{word(self.label)}@{host}/{os.getpid()}" if self.label else f"{host}/{os.getpid()}"
        self.channel = f"interlock:{secrets.token_hex(8)}"
        self.alarm: Signal = port.signal()
        self.asleep_until = FOREVER
        self.started = False
        self.waiters = Waiters(port, self.nudge)
        self.renewal = Renewal(port, self.nudge)
        self.undo = Undo(port, self.nudge)
        self.chores: tuple[Chore, ...] = (self.renewal, self.waiters, self.undo)
        self.core = Core(port, self.waiters, self.renewal, self.undo, self.who)

    def who(self) -> str:
        return f"{self.me}/{self.where()}"

    # The port's word

    def subscribed(self, channel: str | None = None) -> None:
        """The channel is heard, from now on, or not any more: what came before may have been missed."""
        self.waiters.wake_all(channel)

    def pushed(self, payload: bytes) -> None:
        """A message for us."""
        verb, token, why = (payload.decode(errors="replace") + "  ").split(" ", 2)
        if verb == "granted":
            self.waiters.granted(token)
        elif verb == "revoked":
            self.renewal.revoked(token, why.strip())

    # The keeper

    def nudge(self, due: float) -> None:
        """See to it that the keeper is awake at this time."""
        if due < self.asleep_until:
            if not self.started:
                with self.port.mutex:
                    if not self.started:
                        self.port.spawn(self.keep, "interlock-keeper", self._kept)
                        self.started = True
            self.alarm.set()

    def _kept(self) -> None:
        """The keeper has ended, by itself or since somebody cancelled all tasks. The next nudge starts it."""
        self.started, self.asleep_until = False, FOREVER

    async def keep(self) -> None:
        """Do every chore when it is due, until the session is closed."""
        while not self.core.closed:
            try:
                self.asleep_until = FOREVER  # awake: whoever nudges now sets the alarm
                due = min(chore.due() for chore in self.chores)
                self.asleep_until = due
                await self.port.wait(self.alarm, due)
                for chore in self.chores:
                    await chore.tick()
            except Exception:  # a bug of ours must not end the renewal of leases
                log.exception("interlock: the keeper failed and goes on")
                await self.port.wait(self.port.signal(), self.port.now() + 0.1)

    # What needs more than the core

    async def extend(self, grant: Grant, ttl: float) -> None:
        """See Lease.extend."""
        await self.core.extend(grant, seconds(ttl, "ttl", least=SHORTEST_TTL, most=self.max_ttl))

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

    async def part(self, port: Port) -> None:
        """Release what is held and leave every queue, in bounded time."""
        self.core.closed = True
        held, waiting = self.renewal.held(), list(self.waiters.expected.values())
        for attempt in waiting:
            attempt.in_doubt = True  # a request of it may be on its way
        for grant in held:
            self.renewal.forget(grant)
            grant.ended = Grant.RELEASED
        undone = [attempt for attempt, _, _ in self.undo.jobs.values()]
        dropped = [attempt for _, attempt in self.renewal.dropped]
        releasing = list(self.core.releasing.values())
        attempts = [*(grant.attempt for grant in held), *dropped, *releasing, *waiting, *undone]
        until = port.now() + PARTING
        for i in range(0, len(attempts), BATCH):
            replies = await port.calls([message(attempt) for attempt in attempts[i : i + BATCH]], until)
            if all(isinstance(reply, Exception) for reply in replies):
                break

    async def close(self) -> None:
        """The same, and end the waiting and the keeper."""
        _sessions.discard(self)
        self.core.closed = True
        try:
            await self.part(self.port)
        finally:
            self.waiters.wake_all()
            self.alarm.set()

    def abandon(self) -> list[Attempt]:
        """Its loop is over, without a close: what is to be taken back now.

        What is held stays so: it is given back when the process ends.
        """
        if not self.renewal.held():
            _sessions.discard(self)
        left = [*(attempt for attempt, _, _ in self.undo.jobs.values()), *self.core.releasing.values()]
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
    for session in list(_sessions):
        with contextlib.suppress(Exception):  # the process ends, and what it held runs out
            run(session.part(session.farewell()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
