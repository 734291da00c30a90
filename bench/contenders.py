"""Who is measured: interlock, its peers, and the floor; one small adapter each.

A contender is a context manager that holds the lock, made by `sync_lock` or `async_lock`: so the loops around it
are the same for all. Peers are configured as fast as their documentation allows: redis-py's Lock and
python-redis-lock renew nothing here, while interlock renews, as it always does.

The floor sends the messages that interlock itself sent: they are taken from the server's MONITOR, packed once,
and sent over bare sockets. Its token is the same in each round, which is the same work for the script, since
that token was released before.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

import hiredis
import redis
import redis.asyncio
import redis_lock
from redis_fifo_lock import FifoLock

import interlock
import interlock.aio
from interlock.primitives.codes import GRANTED, QUEUED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

FLOOR, OURS, FAIR = "floor", "interlock", "interlock, fair=True"
REDIS_PY, EAGER, BLPOP, FIFO = "redis-py Lock", "redis-py Lock, sleep=0.001", "python-redis-lock", "redis-fifo-lock"
TTL = 30.0

now = time.monotonic  # CLOCK_MONOTONIC: the same for all processes of a machine


class Clients:
    """The clients of one process, made when they are asked for. Ended by `close()`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ours: interlock.Interlock | None = None
        self.peer: redis.Redis | None = None

    def sync_lock(self, contender: str, name: str) -> AbstractContextManager[Any]:
        """A lock for one thread, which that thread can enter again and again."""
        if contender in {OURS, FAIR}:
            if self.ours is None:
                self.ours = interlock.Interlock(f"unix://{self.path}")
            return self.ours.lock(name, ttl=TTL, fair=contender == FAIR)
        if self.peer is None:
            self.peer = redis.Redis(unix_socket_path=self.path)
        if contender == BLPOP:
            return redis_lock.Lock(self.peer, name, expire=int(TTL))
        return self.peer.lock(name, timeout=TTL, sleep=0.001 if contender == EAGER else 0.1)

    def close(self) -> None:
        for client in (self.ours, self.peer):
            if client is not None:
                client.close()


class AsyncClients:
    """The clients of one event loop."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ours = interlock.aio.Interlock(f"unix://{path}")
        self.peer = redis.asyncio.Redis(unix_socket_path=path)

    def async_lock(self, contender: str, name: str) -> Callable[[], AbstractAsyncContextManager[Any]]:
        """What makes the lock of one task for one section."""
        if contender == OURS:
            lock = self.ours.lock(name, ttl=TTL)
            return lambda: lock
        if contender == FIFO:
            return FifoLock(self.peer, name, lease_ms=int(TTL * 1000)).hold
        lock_of_peer: Any = self.peer.lock(name, timeout=TTL)
        return lambda: lock_of_peer

    async def close(self) -> None:
        await self.ours.close()
        await self.peer.aclose()


# The floor


class Bare:
    """A bare blocking connection: bytes out, replies in."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.reader = hiredis.Reader()

    def receive(self) -> Any:
        """The next reply."""
        while (reply := self.reader.gets()) is False:
            self.reader.feed(self.socket.recv(65536))
        return reply

    def ask(self, packed: bytes) -> Any:
        """Send, and wait for one reply."""
        self.socket.sendall(packed)
        return self.receive()

    def close(self) -> None:
        self.socket.close()


class BareWaiter:
    """The floor of a handover: it acquires and releases over one bare connection, and hears the push over another."""

    def __init__(self, path: str, acquire: Sequence[str], release: Sequence[str], me: str) -> None:
        token, channel = f"floor/{me}", f"floor:{me}"
        verb = 3 + int(acquire[2])  # then: token, ttl, life, heard, channel, wait, and what only this primitive says
        before, after = acquire[verb + 2 : verb + 4], acquire[verb + 7 :]
        self.acquire = _packed([*acquire[: verb + 1], token, *before, "1", channel, "inf", *after])
        self.release = _packed([*release[: verb + 1], token, *release[verb + 2 :]])
        self.granted = f"granted {token}".encode()
        self.wire, self.ears = Bare(path), Bare(path)
        self.ears.ask(_packed(("SUBSCRIBE", channel)))

    def __enter__(self) -> None:
        while (code := self.wire.ask(self.acquire)[0]) != GRANTED:
            assert code == QUEUED, code
            assert self.ears.receive()[2] == self.granted

    def __exit__(self, *_: object) -> None:
        assert self.wire.ask(self.release)[0] == 1  # it was ours

    def close(self) -> None:
        self.wire.close()
        self.ears.close()


Pair = tuple[bytes, bytes]  # acquire, release


class Tapped:
    """What interlock sends: taken from the server's MONITOR while `body` runs."""

    def __init__(self, path: str, body: Callable[[], None]) -> None:
        monitor = Bare(path)
        monitor.ask(hiredis.pack_command(("MONITOR",)))
        body()
        end = f"end-{now()}"
        probe = Bare(path)
        probe.ask(hiredis.pack_command(("ECHO", end)))
        probe.close()
        self.commands: list[list[str]] = []
        while end not in (command := _parsed(monitor.receive())):
            if command:
                self.commands.append(command)
        monitor.close()

    def messages(self, verb: str) -> list[list[str]]:
        """The calls of one verb, in the order in which the server ran them."""
        return [c for c in self.commands if c[0] == "EVALSHA" and c[3 + int(c[2])] == verb]

    def tokens(self, verb: str) -> list[str]:
        """Who made these calls."""
        return [_token(message) for message in self.messages(verb)]

    def pairs(self) -> list[Pair]:
        """The acquires with their releases, in the order of the acquires; the last of each lock."""
        acquires, releases = self.messages("acquire"), self.messages("release")
        last = {_key(message): message for message in acquires}
        by_token = {_token(message): message for message in releases}
        return [(_packed(message), _packed(by_token[_token(message)])) for message in last.values()]


def _parsed(line: bytes | str) -> list[str]:
    """A line of MONITOR: time [db address] "command" "argument"... Commands of scripts are left out."""
    text = line.decode() if isinstance(line, bytes) else line
    _, _, rest = text.partition("] ")
    return [] if " lua] " in text else [part.replace('\\"', '"') for part in rest[1:-1].split('" "')]


def _key(message: Sequence[str]) -> str:
    return message[3]


def _token(message: Sequence[str]) -> str:
    return message[4 + int(message[2])]


def _packed(message: Sequence[str]) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(message))
    return packed


def floor_pair(path: str) -> Pair:
    """What one acquire and one release send, packed."""
    acquire, release = floor_messages(path)
    return _packed(acquire), _packed(release)


def floor_messages(path: str) -> tuple[list[str], list[str]]:
    """What one acquire and one release send."""
    clients = Clients(path)
    lock = clients.sync_lock(OURS, "floor")

    def body() -> None:
        for _ in range(2):  # the first may have to teach the server the script
            with lock:
                pass

    tapped = Tapped(path, body)
    clients.close()
    return tapped.messages("acquire")[-1], tapped.messages("release")[-1]


def floor_pairs(path: str, count: int) -> list[Pair]:
    """What the tasks of one loop send, each on a lock of its own."""

    async def section(make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        async with make():
            pass

    async def all_of_them() -> None:
        clients = AsyncClients(path)
        for _ in range(2):
            await asyncio.gather(*(section(clients.async_lock(OURS, f"floor-{i}")) for i in range(count)))
        await clients.close()

    return Tapped(path, lambda: asyncio.run(all_of_them())).pairs()
