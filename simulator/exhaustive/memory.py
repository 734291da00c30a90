"""The keys of one server as numbered images, and the real Lua as a function: image and message to image and reply.

Theory. The search visits the same keys and the same message over and over, so the Lua runs once for each pair. An image
is what a snapshot of the server has: its keys, their values, their ends. Keys whose time is over are not in it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from interlock._protocol.server import ServerError
from interlock.primitives import scripts as _scripts
from interlock.primitives.lock import lock_resource
from simulator.commands import Hash, ZSet
from simulator.server import CLOCK_START, Server

if TYPE_CHECKING:
    from collections.abc import Callable

RESOURCE: Final = lock_resource("a", "lock:")
LOCK, RECORD, QUEUE, WAITERS, GONE = (key.encode() for key in RESOURCE.keys)
EMPTY: Final = 0  # the number of the image without keys
START_MS: Final = CLOCK_START // 1000
Call: TypeAlias = tuple[tuple[bytes, ...], tuple[bytes, ...]]  # KEYS and ARGV
Keys: TypeAlias = "tuple[tuple[bytes, str, Any, int], ...]"  # key, kind, value, end in ms


class Ran(NamedTuple):
    """What a script call did."""

    image: int
    reply: Any
    pushes: tuple[tuple[bytes, bytes], ...]
    """Channel and payload of each message that it published."""


class Memory:
    """All images so far. `change` may change the text of lock.lua, to plant a bug."""

    def __init__(self, change: Callable[[str], str] = str) -> None:
        self._seconds = 0.0
        self._server = Server(lambda: self._seconds)
        self._source = change(_scripts.load("lock").source)
        self._images: list[Keys] = [()]
        self._numbers: dict[Keys, int] = {(): EMPTY}
        self.run = cache(self._run)
        self.at = cache(self._at)
        self.tokens = cache(self._tokens)

    @property
    def runs(self) -> int:
        """The number of times that the Lua really ran."""
        return self._server.scripts

    def _run(self, image: int, now: int, call: Call, subscribed: frozenset[bytes]) -> Ran:
        """Run a script call at this time (seconds), while somebody is subscribed to these channels."""
        server, pushes = self._server, list[tuple[bytes, bytes]]()

        def publish(channel: bytes, payload: bytes) -> int:
            pushes.append((channel, payload))
            return int(channel in subscribed)

        server.publish, server.subscribers = publish, lambda channel: int(channel in subscribed)
        self._load(image, now)
        keys, args = call
        reply = server.eval(self._source, keys, args)
        return Ran(self._number(), str(reply) if isinstance(reply, ServerError) else reply, tuple(pushes))

    def _at(self, image: int, now: int) -> int:
        """Return the image at this time, without the keys whose time is over."""
        self._load(image, now)
        return self._number()

    def _load(self, image: int, now: int) -> None:
        server, self._seconds = self._server, now
        server.data.clear()
        server.expires.clear()
        for key, kind, value, end in self._images[image]:
            server.data[key] = value if kind == "text" else Hash(value) if kind == "hash" else ZSet(value)
            server.expires[key] = end

    def _number(self) -> int:
        server, keys = self._server, list[tuple[bytes, str, Any, int]]()
        server.purge_all()
        for key in sorted(server.data):
            value, end = server.data[key], server.expires.get(key, 0)
            if isinstance(value, bytes):
                keys.append((key, "text", value, end))
            else:
                keys.append((key, "hash" if isinstance(value, Hash) else "set", tuple(sorted(value.items())), end))
        image = tuple(keys)
        number = self._numbers.get(image)
        if number is None:
            number = self._numbers[image] = len(self._images)
            self._images.append(image)
        return number

    # Looking at images

    def holder(self, image: int) -> tuple[bytes, int]:
        """Return the value of the lock's key, and when it ends, in ms since the world began; b"" if there is none."""
        return next(((value, end - START_MS) for key, _, value, end in self._images[image] if key == LOCK), (b"", 0))

    def granted_by(self, image: int) -> bytes:
        """Return the identity of the server that granted last, as the record has it; b"" if there is no record."""
        records = [value for key, _, value, _ in self._images[image] if key == RECORD]
        return bytes(records[0].split(b" ")[3]) if records else b""

    def count(self, image: int) -> int:
        """Return how many keys there are."""
        return len(self._images[image])

    def lasts(self, image: int) -> bool:
        """Whether there is more than the record of a free lock."""
        return any(key != RECORD for key, *_ in self._images[image])

    def _tokens(self, image: int) -> frozenset[bytes]:
        """Return the tokens that hold the lock, or wait for it."""
        found = set[bytes]()
        for key, _, value, _ in self._images[image]:
            if key == LOCK:
                found.add(value)
            elif key in {QUEUE, WAITERS}:
                found |= {member for member, _ in value}
        return frozenset(found)

    def describe(self, image: int) -> str:
        """Return the keys as text, for people."""
        return ", ".join(f"{key.decode()}={value!r}" for key, _, value, _ in self._images[image])
