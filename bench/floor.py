"""The floor: the messages that interlock itself sends, packed once, and sent over bare sockets without our Python.

The messages are taken from the server's MONITOR. The floor's token is the same in each round. That is the same work for
the script, since that token was released before.
"""

from __future__ import annotations

import asyncio
import re
import socket
from typing import TYPE_CHECKING, Any

import hiredis

from goals import OURS
from interlock import Interlock
from interlock.primitives.codes import GRANTED, QUEUED
from measure import now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

Pair = tuple[bytes, bytes]  # acquire, release


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

    def call(self, *words: str) -> Any:
        """Send one command, and wait for its reply."""
        return self.ask(packed(words))

    def close(self) -> None:
        self.socket.close()


class BareWaiter:
    """The floor of a handover: it acquires and releases over one bare connection, and hears the push over another."""

    def __init__(self, path: str, acquire: Sequence[str], release: Sequence[str], me: str) -> None:
        token, channel = f"floor/{me}", f"floor:{me}"
        verb = 3 + int(acquire[2])  # then: token, ttl, handover ttl, subscribed, channel, max waiters, and the rest
        before, after = acquire[verb + 2 : verb + 4], acquire[verb + 7 :]
        self.acquire = packed([*acquire[: verb + 1], token, *before, "1", channel, "inf", *after])
        self.release = packed([*release[: verb + 1], token, *release[verb + 2 :]])
        self.granted = f"granted {token}".encode()
        self.requests, self.pushes = Bare(path), Bare(path)
        self.pushes.call("SUBSCRIBE", channel)

    def __enter__(self) -> None:
        while (code := self.requests.ask(self.acquire)[0]) != GRANTED:
            assert code == QUEUED, code
            assert self.pushes.receive()[2].startswith(self.granted)

    def __exit__(self, *_: object) -> None:
        assert self.requests.ask(self.release)[0] == 1  # it was ours

    def close(self) -> None:
        self.requests.close()
        self.pushes.close()


class Tapped:
    """What clients send: taken from the server's MONITOR while `body` runs."""

    def __init__(self, path: str, body: Callable[[], None]) -> None:
        monitor = Bare(path)
        monitor.call("MONITOR")
        body()
        end = f"end-{now()}"
        probe = Bare(path)
        probe.call("ECHO", end)
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
        """The acquires with their releases, in the order of the acquires; the last that was released of each lock."""
        acquires, releases = self.messages("acquire"), self.messages("release")
        by_token = {_token(message): message for message in releases}
        last = {message[3]: message for message in acquires if _token(message) in by_token}  # by the lock's key
        return [(packed(message), packed(by_token[_token(message)])) for message in last.values()]


def _parsed(line: bytes | str) -> list[str]:
    """A line of MONITOR: time [db address] "command" "argument"... Commands of scripts are left out."""
    text = line.decode() if isinstance(line, bytes) else line
    _, _, rest = text.partition("] ")
    return [] if " lua] " in text else [re.sub(r'\\(["\\])', r"\1", part) for part in rest[1:-1].split('" "')]


def _token(message: Sequence[str]) -> str:
    return message[4 + int(message[2])]


def packed(message: Sequence[str]) -> bytes:
    done: bytes = hiredis.pack_command(tuple(message))
    return done


def floor_pair(path: str, make: Callable[[Interlock], Any] | None = None) -> Pair:
    """What one acquire and one release send, packed; of a lock, or of what `make` makes."""
    acquire, release = floor_messages(path, make)
    return packed(acquire), packed(release)


def floor_messages(path: str, make: Callable[[Interlock], Any] | None = None) -> tuple[list[str], list[str]]:
    """What one acquire and one release send."""
    from contenders import TTL

    with Interlock(f"unix://{path}") as locks:
        section = make(locks) if make else locks.lock("floor", ttl=TTL)

        def body() -> None:
            for _ in range(2):  # the first may have to teach the server the script
                with section:
                    pass

        tapped = Tapped(path, body)
    return tapped.messages("acquire")[-1], tapped.messages("release")[-1]


def floor_pairs(path: str, count: int) -> list[Pair]:
    """What the tasks of one loop send, each on a lock of its own."""
    from contenders import AsyncClients

    async def section(make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        async with make():
            pass

    async def all_of_them() -> None:
        clients = AsyncClients(path)
        for _ in range(2):
            await asyncio.gather(*(section(clients.lock(OURS, f"floor-{i}")) for i in range(count)))
        await clients.close()

    return Tapped(path, lambda: asyncio.run(all_of_them())).pairs()
