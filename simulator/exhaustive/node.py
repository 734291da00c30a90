"""A node of the quorum: the real lock.lua as a function, from what a server remembers and a message to both again.

Theory. A search meets the same server in the same state over and over, so each pair of stored and message is run
once, and looked up from then on. That asks for few memories: times are relative to now, and what no answer
hangs on is left out (the holder of a lock that nobody holds, the last token released, how long the record is kept:
minutes, where a search lasts seconds).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock.primitives import scripts as _scripts
from simulator.server import CLOCK_START, Server

if TYPE_CHECKING:
    from collections.abc import Callable

TICK: Final = 1000  # ms
TTL: Final = 3  # ticks
TTL_MS: Final = TTL * TICK - 1  # a key is gone when its time is past: so exactly TTL ticks after the message
KEYS: Final = (b"lock", b"record", b"queue", b"waiters", b"gone")
LOCK, RECORD = KEYS[:2]
KEPT: Final = 1_000_000_000  # ms that a record is kept: for ever
GRANTED: Final = 1


NO_FENCE: Final = -CLOCK_START  # that of a record which says only who granted last: 0 in its text


class StoredLock(NamedTuple):
    """What a server has of one lock."""

    holder: bytes = b""
    pttl: int = 0  # ms
    fence: int | None = None
    """Of the record, µs from now on everybody's clock; None: there is no record."""
    granted_by: bytes = b"-"
    """The identity and the ttl of the last grant."""
    last_ttl: bytes = b"0"
    holder_noted: bool = False
    """Whether the record names the holder, too."""

    def after_tick(self) -> StoredLock:
        """The same a tick later."""
        fence = self.fence if self.fence is None or self.fence == NO_FENCE else self.fence - TICK * 1000
        if self.pttl < TICK:
            return self._replace(holder=b"", pttl=0, fence=fence, holder_noted=False)
        return self._replace(pttl=self.pttl - TICK, fence=fence)

    def swapped(self) -> StoredLock:
        """The same with the clients' names changed."""
        return self._replace(holder=swap(self.holder))


NOTHING: Final = StoredLock()
_SWAP: Final = bytes.maketrans(b"AB", b"BA")


def token(client: int, attempt: int) -> bytes:
    """Of an attempt of client A or B."""
    return b"%c%d" % (65 + client, attempt)


def swap(text: bytes) -> bytes:
    """A for B, and B for A. Nothing else that a server keeps has a capital A or B."""
    return text.translate(_SWAP)


def identity_stamp(skew: int, restarts: int, since: int, previous: bytes) -> bytes:
    """What ends each message (see queue.lua): who this node is, and since when.

    `previous` is what clients know of those before: "*" for all of them, "?" for that there may have been one, "-".
    """
    started = CLOCK_START // 1000 + (skew + since) * TICK
    if previous == b"*":
        previous = _identity(restarts - 1) if restarts else b"-"
    return b"%s+%d %d %s %s" % (_identity(restarts), started, TTL_MS, previous, _identity(restarts)[:13])


def _identity(restarts: int) -> bytes:
    return b"process%05d:history%05d" % (restarts, restarts)


class Lua:
    """lock.lua, run once for each stored and message. `planted`: what to make of its text."""

    def __init__(self, planted: Callable[[str], str] = str) -> None:
        self._server = Server(lambda: 0.0)
        self._source = planted(_scripts.load("lock").source)
        self.run = cache(self._run)

    @property
    def runs(self) -> int:
        """How often it really ran."""
        return self._server.scripts

    def _run(self, stored: StoredLock, skew: int, message: tuple[bytes, ...]) -> tuple[StoredLock, Any]:
        """What the server remembers then, and its reply. `skew`: ticks that its clock is ahead of everybody's."""
        server = self._server
        server.skew = skew * TICK / 1000
        now = server.read_clock()
        server.data.clear()
        server.expires.clear()
        if stored.holder:
            server.data[LOCK], server.expires[LOCK] = stored.holder, now + stored.pttl
        if stored.fence is not None:
            named = stored.holder if stored.holder_noted else b"-"
            words = (CLOCK_START + stored.fence, stored.granted_by, stored.last_ttl, named)
            server.data[RECORD], server.expires[RECORD] = b"1 lock %d %s %s - %s -" % words, now + KEPT
        keys = KEYS[:2] if message[0] == b"renew" else KEYS
        reply = server.eval(self._source, keys, message)
        if server.data.keys() - {LOCK, RECORD}:
            raise NotImplementedError(f"no stored for {server.data}")
        holder: bytes = server.data.get(LOCK, b"")
        pttl = server.expires[LOCK] - now if holder else 0
        if RECORD not in server.data:
            return StoredLock(holder, pttl), reply
        version, kind, fence, granted_by, last_ttl, _, named, _ = server.data[RECORD].split(b" ")
        if (version, kind) != (b"1", b"lock"):
            raise NotImplementedError(f"no stored for {server.data}")
        return StoredLock(
            holder, pttl, int(fence) - CLOCK_START, granted_by, last_ttl, bool(holder) and named == holder
        ), reply
