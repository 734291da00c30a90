"""One server of the quorum: the real lock.lua as a function, from a stored lock and a message to lock and reply.

Theory. The search visits the same server in the same state over and over, so the Lua runs once for each pair of stored
lock and message. For that there must be few different stored locks: times are relative to now, and data that changes no
reply is left out (the last holder of a free lock, the last released token, the end of the record: the server keeps it
for minutes, and a search lasts seconds; the evidence in a marker). Of an identity and of a replid only one thing
matters: whether it is the present one of this server. The stamp of each message has an older one: a server that is
re-seeded closes no connection.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._quarantine.voter import VoterRecord
from interlock.primitives import scripts as _scripts
from simulator.commands import ZSet
from simulator.server import CLOCK_START, Server

if TYPE_CHECKING:
    from collections.abc import Callable

TICK: Final = 1000  # ms
TTL: Final = 3  # ticks
TTL_MS: Final = TTL * TICK - 1  # a key ends when its time is past: with this, exactly TTL ticks after the message
KEYS: Final = (b"lock", b"record", b"queue", b"waiters", b"gone")
LOCK, RECORD, _, _, GONE = KEYS
VOTER: Final = b"voter"
KEPT: Final = 1_000_000_000  # ms: a record never ends
FOR_MONTHS: Final = 80 * 86_400_000  # ms: so that no call renews the voter record
GRANTED: Final = 1
REPLID, EARLIER_REPLID = "0" * 40, "1" * 40
HERE, ELSEWHERE, NOWHERE = b"process00000:000000000000", b"process11111:111111111111", b"-"
STAMP: Final = b"process00000:222222222222+ %d" % TTL_MS
MARKER: Final = b"!quarantine:@?"


NO_FENCE: Final = -CLOCK_START  # the fence of a record that only names the last identity: 0 in its text


class StoredLock(NamedTuple):
    """The keys of one lock in one server."""

    holder: bytes = b""
    pttl: int = 0  # ms
    fence: int | None = None
    """The fence in the record, in µs from now; None: there is no record."""
    granted_by: bytes = NOWHERE
    """The identity of the last grant, as the record has it. `last_ttl` is the ttl of that grant."""
    last_ttl: bytes = b"0"
    holder_noted: bool = False
    """Whether the record names the holder."""
    gone: tuple[bytes, ...] = ()
    """The tokens that have a tombstone."""
    served: int | None = None
    """For how many ticks the server has served by its voter record, TTL at most; None: there is no such record."""
    is_voter: bool = False
    """Whether the voter record has the present replid."""

    def after_tick(self) -> StoredLock:
        """Return the same lock a tick later."""
        fence = self.fence if self.fence is None or self.fence == NO_FENCE else self.fence - TICK * 1000
        served = None if self.served is None else min(TTL, self.served + 1)
        if self.pttl < TICK:
            return self._replace(holder=b"", pttl=0, fence=fence, holder_noted=False, served=served)
        return self._replace(pttl=self.pttl - TICK, fence=fence, served=served)

    def elsewhere(self) -> StoredLock:
        """Return the same data in a server with another replid."""
        return self._replace(is_voter=False, granted_by=NOWHERE if self.granted_by == NOWHERE else ELSEWHERE)

    def swapped(self) -> StoredLock:
        """Return the same lock with the names of the clients swapped."""
        return self._replace(holder=swap(self.holder), gone=tuple(sorted(map(swap, self.gone))))


NOTHING: Final = StoredLock()
USED: Final = StoredLock(served=TTL, is_voter=True)  # of a server that clients reached long ago
_SWAP: Final = bytes.maketrans(b"AB", b"BA")


def token(client: int, attempt: int) -> bytes:
    """Return the token of an attempt of client A or B."""
    return b"%c%d" % (65 + client, attempt)


def swap(text: bytes) -> bytes:
    """Swap A and B. No other word that a server stores has a capital A or B."""
    return text.translate(_SWAP)


def abstention(stored: StoredLock, skew: int) -> bytes:
    """Return the words by which the server names its present abstention."""
    return b"%s %d" % (REPLID.encode(), _since_ms(stored, skew))


def _since_ms(stored: StoredLock, skew: int) -> int:
    return CLOCK_START // 1000 + (skew - (stored.served or 0)) * TICK


class Lua:
    """Runs lock.lua once for each stored lock and message. `change` may change the text of the script."""

    def __init__(self, change: Callable[[str], str] = str) -> None:
        self._server = Server(lambda: 0.0)
        self._server.info = lambda _section: f"role:master\r\nmaster_replid:{REPLID}\r\n".encode()
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
        if stored.gone:
            server.data[GONE], server.expires[GONE] = ZSet(dict.fromkeys(stored.gone, float(now + KEPT))), now + KEPT
        if stored.served is not None:
            replid = REPLID if stored.is_voter else EARLIER_REPLID
            server.data[VOTER] = VoterRecord(replid, _since_ms(stored, skew), TTL_MS).encode().encode()
            server.expires[VOTER] = now + FOR_MONTHS
        keys: tuple[bytes, ...] = () if message[0] == b"voter" else KEYS[:2] if message[0] == b"renew" else KEYS
        reply = server.eval(self._source, (*keys, VOTER), (*message, STAMP))
        return self._stored(server, now, skew), reply

    @staticmethod
    def _stored(server: Server, now: int, skew: int) -> StoredLock:
        if server.data.keys() - {LOCK, RECORD, GONE, VOTER}:
            raise NotImplementedError(f"no stored for {server.data}")
        holder: bytes = server.data.get(LOCK, b"")
        pttl = server.expires[LOCK] - now if holder else 0
        if holder.startswith(MARKER):
            holder = MARKER
        stored = StoredLock(holder, pttl, gone=tuple(sorted(server.data.get(GONE, ()))))
        if VOTER in server.data:
            record = VoterRecord.parse(server.data[VOTER].decode())
            if record is None or record.longest_ms != TTL_MS:
                raise NotImplementedError(f"no stored for {server.data}")
            served = min(TTL, (CLOCK_START // 1000 + skew * TICK - record.since_ms) // TICK)
            stored = stored._replace(served=served, is_voter=record.replid == REPLID)
        if RECORD not in server.data:
            return stored
        version, kind, fence, granted_by, last_ttl, _, named, _ = server.data[RECORD].split(b" ")
        if (version, kind) != (b"1", b"lock"):
            raise NotImplementedError(f"no stored for {server.data}")
        return stored._replace(
            fence=int(fence) - CLOCK_START,
            granted_by=granted_by if granted_by in (HERE, NOWHERE) else ELSEWHERE,
            last_ttl=last_ttl,
            holder_noted=bool(holder) and named == holder,
        )
