"""One server of the quorum: the real lock.lua as a function, from a stored lock and a message to lock and reply.

Theory. The search visits the same server in the same state over and over, so the Lua runs once for each pair of stored
lock and message. For that there must be few different stored locks: times are relative to now, and data that changes no
reply is left out (the last holder of a free lock, the last released token, the end of the record: the server keeps it
for minutes, and a search lasts seconds).
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
TTL_MS: Final = TTL * TICK - 1  # a key ends when its time is past: with this, exactly TTL ticks after the message
KEYS: Final = (b"lock", b"record", b"queue", b"waiters", b"gone")
LOCK, RECORD = KEYS[:2]
KEPT: Final = 1_000_000_000  # ms: a record never ends
GRANTED: Final = 1


NO_FENCE: Final = -CLOCK_START  # the fence of a record that only names the last identity: 0 in its text


class StoredLock(NamedTuple):
    """The keys of one lock in one server."""

    holder: bytes = b""
    pttl: int = 0  # ms
    fence: int | None = None
    """The fence in the record, in µs from now; None: there is no record."""
    granted_by: bytes = b"-"
    """The identity of the last grant, as the record has it. `last_ttl` is the ttl of that grant."""
    last_ttl: bytes = b"0"
    holder_noted: bool = False
    """Whether the record names the holder."""

    def after_tick(self) -> StoredLock:
        """Return the same lock a tick later."""
        fence = self.fence if self.fence is None or self.fence == NO_FENCE else self.fence - TICK * 1000
        if self.pttl < TICK:
            return self._replace(holder=b"", pttl=0, fence=fence, holder_noted=False)
        return self._replace(pttl=self.pttl - TICK, fence=fence)

    def swapped(self) -> StoredLock:
        """Return the same lock with the names of the clients swapped."""
        return self._replace(holder=swap(self.holder))


NOTHING: Final = StoredLock()
_SWAP: Final = bytes.maketrans(b"AB", b"BA")


def token(client: int, attempt: int) -> bytes:
    """Return the token of an attempt of client A or B."""
    return b"%c%d" % (65 + client, attempt)


def swap(text: bytes) -> bytes:
    """Swap A and B. No other word that a server stores has a capital A or B."""
    return text.translate(_SWAP)


def identity_stamp(skew: int, restarts: int, since: int, previous: bytes) -> bytes:
    """Return the identity stamp at the end of each message (see message.lua): which server answers, and since when.

    `previous` is the clients' knowledge of earlier identities of this server: "*" if they know them all, "?" if there
    may have been one, "-" if they know of none.
    """
    started = CLOCK_START // 1000 + (skew + since) * TICK
    if previous == b"*":
        previous = _identity(restarts - 1) if restarts else b"-"
    return b"%s+%d %d 0 %s %s" % (_identity(restarts), started, TTL_MS, previous, _identity(restarts)[:13])


def _identity(restarts: int) -> bytes:
    return b"process%05d:history%05d" % (restarts, restarts)


class Lua:
    """Runs lock.lua once for each stored lock and message. `change` may change the text of the script."""

    def __init__(self, change: Callable[[str], str] = str) -> None:
        self._server = Server(lambda: 0.0)
        self._source = change(_scripts.load("lock").source)
        self.run = cache(self._run)

    @property
    def runs(self) -> int:
        """The number of times that the Lua really ran."""
        return self._server.scripts

    def _run(self, stored: StoredLock, skew: int, message: tuple[bytes, ...]) -> tuple[StoredLock, Any]:
        """Return the stored lock after the message, and the reply. `skew`: ticks by which its clock is ahead."""
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
