"""The floor: the messages that interlock itself sends, packed once, and sent over bare sockets without our Python.

The messages are taken from the server's MONITOR. The floor's token is the same in each round. That is the same work for
the script, since that token was released before.
"""

from __future__ import annotations

import asyncio
import re
import select
import socket
from typing import TYPE_CHECKING, Any

import hiredis

from goals import OURS, THREE
from interlock import Interlock
from interlock.primitives.codes import GRANTED
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

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()


class Majority:
    """Bare connections to all servers of a quorum. A call is over once a majority has answered."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._wires = [Bare(path) for path in paths]
        self._majority = len(paths) // 2 + 1
        self._owed = [0 for _ in paths]  # replies, by server
        self._by_fileno = {wire.socket.fileno(): i for i, wire in enumerate(self._wires)}
        self._poll = select.poll()
        for fileno in self._by_fileno:
            self._poll.register(fileno, select.POLLIN)

    def ask(self, messages: Sequence[bytes], number: int = 1) -> list[Any]:
        """Send each server its message, of so many commands. The last replies of the servers that have answered all."""
        last: list[Any] = [None for _ in self._wires]
        for i, (wire, message) in enumerate(zip(self._wires, messages, strict=True)):
            wire.socket.sendall(message)
            self._owed[i] += number
        while sum(not owed for owed in self._owed) < self._majority:
            for fileno, _ in self._poll.poll():
                i = self._by_fileno[fileno]
                reader = self._wires[i].reader
                reader.feed(self._wires[i].socket.recv(65536))
                while (reply := reader.gets()) is not False:
                    assert not isinstance(reply, Exception), reply
                    self._owed[i] -= 1
                    last[i] = reply
        return [reply for reply, owed in zip(last, self._owed, strict=True) if not owed]

    def close(self) -> None:
        for wire in self._wires:
            wire.close()


class BareWaiter:
    """The floor of a handover: it acquires and releases over bare connections, and hears the push over others.

    `messages`: what an acquire and a release send to each of the servers, of which a majority must grant.
    """

    def __init__(self, paths: Sequence[str], messages: Sequence[tuple[Sequence[str], Sequence[str]]], me: str) -> None:
        token, channel = f"floor/{me}", f"floor:{me}"
        self.acquires, self.releases = [], []
        for acquire, release in messages:
            verb = 3 + int(acquire[2])  # then: token, ttl, handover ttl, subscribed, channel, max waiters, and the rest
            before, after = acquire[verb + 2 : verb + 4], acquire[verb + 7 :]
            self.acquires.append(packed([*acquire[: verb + 1], token, *before, "1", channel, "inf", *after]))
            self.releases.append(packed([*release[: verb + 1], token, *release[verb + 2 :]]))
        self.majority = len(paths) // 2 + 1
        self.requests = Majority(paths)
        self.pushes = [Bare(path) for path in paths]
        for each in self.pushes:
            each.call("SUBSCRIBE", channel)

    def __enter__(self) -> None:
        self._hear(0)  # what came late of the handover before
        while sum(reply[0] == GRANTED for reply in self.requests.ask(self.acquires)) < self.majority:
            heard: set[Bare] = set()
            while len(heard) < self.majority:
                heard |= self._hear(None)

    def _hear(self, timeout: float | None) -> set[Bare]:
        """Read the pushes that are there, or wait for one. The connections over which pushes came."""
        ready, _, _ = select.select(self.pushes, [], [], timeout)
        for each in ready:
            assert b"granted" in each.socket.recv(65536)
        return {*ready}

    def __exit__(self, *_: object) -> None:
        assert any(was_ours for was_ours, _ in self.requests.ask(self.releases))  # one may not have granted it

    def close(self) -> None:
        self.requests.close()
        for each in self.pushes:
            each.close()


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


def quorum_messages(paths: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """What one acquire and one release send to each server of a quorum."""
    from contenders import Clients

    tapped: list[Tapped] = []

    def tap(left: Sequence[str]) -> None:
        if left:
            tapped.append(Tapped(left[-1], lambda: tap(left[:-1])))
            return
        clients = Clients(*paths)
        for _ in range(3):  # the first has to teach the servers the script; the last reads late replies of the others
            with clients.lock(THREE, "floor"):
                pass
        clients.close()

    tap(paths)
    return [(each.messages("acquire")[-1], each.messages("release")[-1]) for each in tapped]


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
