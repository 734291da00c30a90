"""Sends what clients send, without clients: the project's own encoders, over a few bare connections.

10,000 waiters are 10,000 tokens here. The server can't tell them from 10,000 clients: it runs the same scripts on the
same keys. What differs is the way there, which is a pipeline; `clients` measures real connections.
"""

from __future__ import annotations

import re
import secrets
import select
from typing import TYPE_CHECKING, Any

from checkouts import fresh_token
from floor import Bare, floor_messages
from interlock._transports.resp import evalsha
from interlock.primitives.codes import GRANTED, QUEUED
from interlock.primitives.messages import AcquireCall, HeartbeatCall, ReleaseCall, RenewCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from interlock._protocol.resource import Resource

PIPELINE = 100  # messages in one write
TTL_MS, HANDOVER_MS = "60000", "3000"
RELEASED = 1  # in the reply to a release: the lease was the sender's


class Sender:
    """Two connections to a server: one sends, one is subscribed to the channel that all waiters name."""

    def __init__(self, path: str) -> None:
        self.bare, self.pushes = Bare(path), Bare(path)
        self.stamp = floor_messages(path)[0][-1]  # the identity of this server
        self.channel = f"interlock:{secrets.token_hex(8)}"
        self.pushes.call("SUBSCRIBE", self.channel)
        self._loaded: set[str] = set()

    def close(self) -> None:
        self.bare.close()
        self.pushes.close()

    # Messages

    def acquire(self, resource: Resource, token: str, channel: str = "") -> bytes:
        call = AcquireCall(token, TTL_MS, HANDOVER_MS, "1", channel or self.channel, "inf", resource.acquire_args)
        return self._packed(resource, resource.keys, call.encode())

    def release(self, resource: Resource, token: str) -> bytes:
        return self._packed(resource, resource.keys, ReleaseCall(token, "0").encode())

    def heartbeat(self, resource: Resource, tokens: Sequence[str]) -> bytes:
        call = HeartbeatCall(self.channel, "1", [(token, HANDOVER_MS) for token in tokens])
        return self._packed(resource, resource.keys, call.encode())

    def renew(self, resources: Sequence[Resource], tokens: Sequence[str]) -> bytes:
        keys = [key for resource in resources for key in resource.renew_keys]
        return self._packed(resources[0], keys, RenewCall([(token, TTL_MS) for token in tokens]).encode())

    def _packed(self, resource: Resource, keys: Sequence[Any], args: Sequence[Any]) -> bytes:
        script = resource.script
        if script.sha not in self._loaded:
            self.bare.call("SCRIPT", "LOAD", script.source)
            self._loaded.add(script.sha)
        return evalsha(script, keys, args, self.stamp)

    # Sending

    def send(self, messages: Sequence[bytes], codes: Sequence[int] = ()) -> list[Any]:
        """Send them in pipelines, and check that the replies begin with these codes, in turn."""
        replies = []
        for i in range(0, len(messages), PIPELINE):
            part = messages[i : i + PIPELINE]
            self.bare.socket.sendall(b"".join(part))
            replies += [self.bare.receive() for _ in part]
        for i, reply in enumerate(replies):
            assert not isinstance(reply, Exception), reply
            assert not codes or reply[0] == codes[i % len(codes)], (reply, i)
        return replies

    def micros(self, messages: Sequence[bytes], codes: Sequence[int] = ()) -> float:
        """µs of the server in the scripts of these messages, all together."""
        self.bare.call("CONFIG", "RESETSTAT")
        self.send(messages, codes)
        calls, micros = self.spent()
        assert calls == len(messages)
        return micros

    def spent(self) -> tuple[int, float]:
        """Script calls, and the µs in them, since the last CONFIG RESETSTAT."""
        found = re.findall(rb"cmdstat_evalsha:calls=(\d+),usec=(\d+)", self.bare.call("INFO", "commandstats"))
        return (int(found[0][0]), float(found[0][1])) if found else (0, 0.0)

    def pushed(self, seconds: float = 0.0) -> Iterator[str]:
        """The tokens that the server has woken, of the pushes that have arrived, or that arrive in so many seconds."""
        while select.select([self.pushes.socket], [], [], seconds)[0]:
            self.pushes.reader.feed(self.pushes.socket.recv(1 << 20))
            while (push := self.pushes.reader.gets()) is not False:
                verb, token, *_ = push[2].decode().split(" ")
                if verb == "granted":
                    yield token
            seconds = 0.0

    def drop_pushes(self) -> None:
        for _ in self.pushed():
            pass

    # Crowds

    def hold(self, resource: Resource, count: int) -> list[str]:
        """So many that hold it."""
        tokens = [fresh_token() for _ in range(count)]
        self.send([self.acquire(resource, token) for token in tokens], [GRANTED])
        return tokens

    def queue(self, resource: Resource, count: int) -> list[str]:
        """So many that wait for it."""
        tokens = [fresh_token() for _ in range(count)]
        self.send([self.acquire(resource, token) for token in tokens], [QUEUED])
        return tokens

    # Memory

    def bytes_of(self, resource: Resource) -> int:
        """Bytes of all its keys, by MEMORY USAGE of every element."""
        return sum(int(self.bare.call("MEMORY", "USAGE", str(key), "SAMPLES", "0") or 0) for key in resource.keys)

    def used_memory(self) -> int:
        (used,) = re.findall(rb"used_memory:(\d+)", self.bare.call("INFO", "memory"))
        return int(used)

    def core_seconds(self) -> float:
        """Processor time of the server's process, system calls included."""
        return sum(map(float, re.findall(rb"used_cpu_(?:user|sys):([\d.]+)", self.bare.call("INFO", "cpu"))))

    def per_push(self, act: Callable[[list[str]], list[bytes]], left: int) -> float:
        """µs in scripts until so many waiters were woken; each batch of them sends what `act` says."""
        self.bare.call("CONFIG", "RESETSTAT")
        while left > 0:
            woken = list(self.pushed(5.0))
            assert woken, f"{left} waiters were not woken"
            left -= len(woken)
            self.send(act(woken), [GRANTED])
        return self.spent()[1]
