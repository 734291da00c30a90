"""Locks: what the server did, seen after each script. Rules 2 to 6, and the server's half of 11."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from interlock._core import GRANTED, QUEUED, ServerError
from interlock.testing.simulator.commands import Hash, ZSet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock.testing.simulator.coroutines import Task
    from interlock.testing.simulator.server import Server

    from .attempts import Attempt, Attempts
    from .story import Story

FOLLOWED: Final = 1.3  # seconds after which a free lock must have been given to a live waiter: a vouch and a trip
WOKEN: Final = 0.05  # seconds after which who was handed the lock must know, if nothing at all goes wrong


@dataclass
class Seen:
    """A lock in the server, as the last script left it."""

    keys: tuple[bytes, ...]
    holder: bytes | None = None
    fence: int = 0
    expires: float = 0.0  # the world's time at which its key is over
    free_at: float | None = None
    arrivals: dict[bytes, tuple[int, float]] = field(default_factory=dict[bytes, tuple[int, float]])


class Locks:
    """All locks of the server."""

    def __init__(self, story: Story, server: Server, attempts: Attempts, *, quiet: bool, trusted: bool) -> None:
        self.story = story
        self.server = server
        self.attempts = attempts
        self.quiet = quiet  # no fault of any kind
        self.trusted = trusted  # the server loses no data and its clock is never set
        self.calm_since = float("inf")
        self.seen: dict[bytes, Seen] = {}
        self.handed: Callable[[Task], None] = lambda _task: None  # a waiter was handed the lock in this moment
        self.grants = 0
        self.slowest = 0.0  # seconds from an expiry to the next grant, with a live waiter, in calm weather
        self._arrived = 0

    def watch(self, keys: tuple[bytes, ...]) -> None:
        """A lock that will be used."""
        self.seen[keys[0]] = Seen(keys)

    def executed(self, sender: str, keys: Sequence[bytes], args: Sequence[bytes], reply: Any) -> None:
        """A script has run."""
        story, server, verb, token = self.story, self.server, args[0], args[1]
        code: object = reply
        with contextlib.suppress(TypeError, IndexError):
            code = reply[0]
        story.note("server runs %s's %s %s -> %s", sender, verb.decode(), token.decode(), reply)
        if isinstance(reply, ServerError):
            if not str(reply).startswith("NOSCRIPT") and not (server.full and str(reply).startswith("OOM")):
                story.violated(10, f"{verb.decode()} of {sender} failed: {reply}")
            return
        story.served(sender, verb, token.rpartition(b"/")[0], keys[0], code if isinstance(code, int) else 0)
        if not server.data.keys() <= server.expires.keys():
            story.violated(3, f"{server.data.keys() - server.expires.keys()} have no TTL after {verb!r}")
        attempt = self.attempts.known.get(token.removeprefix(b"!"))
        if attempt is not None:
            if verb == b"release":
                attempt.cleared = True
            elif verb == b"acquire" and code == QUEUED:
                self.attempts.queues(token, attempt)
            elif verb == b"execute" and code == GRANTED:
                self.attempts.ran(args[4].decode(), server.find(keys[0], bytes), token)
            elif verb == b"revoke" and code == 1 and args[2] == b"1":
                attempt.forced = True
        for key in keys[::2] if verb == b"renew" else keys[:1]:
            self._look(self.seen[key], verb)

    def _look(self, seen: Seen, verb: bytes) -> None:
        lock, record, queue, _, _ = seen.keys
        server, now = self.server, self.story.world.now
        holder: bytes | None = server.find(lock, bytes)
        present: dict[bytes, float] = server.find(queue, ZSet) or {}
        if verb != b"renew" and (present or seen.arrivals):
            self._arrivals(seen, holder, present)
        text: bytes | None = server.find(record, bytes)
        fence = int(text.split()[2]) if text else 0
        if holder is not None and not holder.startswith(b"!") and (holder, fence) != (seen.holder, seen.fence):
            self._granted(seen, holder, fence)
            if present:
                self._in_order(seen, holder, present)
        if holder is not None and holder not in present:
            seen.arrivals.pop(holder, None)  # it has its turn: if it comes again, it comes anew
        if holder is not None:
            attempt = self.attempts.known.get(holder.removeprefix(b"!"))
            if attempt is not None and attempt.cleared and self.trusted:
                self.story.violated(5, f"{holder!r} holds {lock!r} after its release was run")
            seen.free_at = None
            seen.expires = now + (server.expires.get(lock, server.now_ms) - server.now_ms) / 1000
        elif seen.free_at is None:
            seen.free_at = seen.expires if seen.holder is not None and seen.expires < now else now
        seen.holder, seen.fence = holder, max(fence, seen.fence)

    def _arrivals(self, seen: Seen, holder: bytes | None, present: dict[bytes, float]) -> None:
        for token in [token for token in seen.arrivals if token not in present and token != holder]:
            del seen.arrivals[token]
        for token in sorted(present, key=present.__getitem__) if len(present) > 1 else present:
            if token not in seen.arrivals or seen.arrivals[token][1] != present[token]:  # perhaps once again
                self._arrived += 1
                seen.arrivals[token] = self._arrived, present[token]

    def _in_order(self, seen: Seen, holder: bytes, present: dict[bytes, float]) -> None:
        """Rule 6. Who was subscribed and is not any more can't be woken, and may be passed over meanwhile."""
        server = self.server
        waiters: dict[bytes, bytes] = server.find(seen.keys[3], Hash) or {}
        mine, _ = seen.arrivals.get(holder, (self._arrived + 1, 0.0))
        for token in present:
            if token in waiters and token in seen.arrivals and seen.arrivals[token][0] < mine:
                alive, _, heard, channel, *_ = waiters[token].split()
                if int(alive) > server.now_ms and (heard != b"1" or server.subscribers(channel)):
                    self.story.violated(6, f"{holder!r} overtook {token!r}")

    def _granted(self, seen: Seen, holder: bytes, fence: int) -> None:
        now = self.story.world.now
        self.grants += 1
        if fence <= seen.fence:
            self.story.violated(2, f"{holder!r} got the fence {fence} after {seen.fence}")
        free_at = seen.free_at
        if free_at is None and seen.holder is not None and seen.expires < now:
            free_at = seen.expires
        if free_at is not None and (since := self._waited(seen, free_at)) is not None:
            self.slowest = max(self.slowest, now - since)
            if now - since > FOLLOWED:
                self.story.violated(4, f"{seen.keys[0]!r} was free for {now - since:.3f} s while somebody waited")
        waiter = self.attempts.known.get(holder)
        if waiter is not None and waiter.queued_at is not None:
            if self.quiet:
                self.story.world.at(now + WOKEN, lambda: self._woken(holder, waiter))
            self.handed(waiter.task)

    def _woken(self, token: bytes, waiter: Attempt) -> None:
        self.server.look()
        if not waiter.ended and self.server.find(waiter.key, bytes) == token:
            self.story.violated(4, f"{token!r} was handed the lock {WOKEN} s ago and does not know")

    def _waited(self, seen: Seen, free_at: float) -> float | None:
        """Since when a live waiter could have had this free lock, in calm weather."""
        if self.story.world.now <= self.calm_since or not self.trusted:
            return None
        since = self.attempts.since(seen.keys[0])
        return None if since is None else max(free_at, since, self.calm_since)

    def sweep(self) -> None:
        """What should have happened by now."""
        now = self.story.world.now
        if now <= self.calm_since:
            return
        self.server.look()
        for seen in self.seen.values():
            if self.server.find(seen.keys[0], bytes) is None:
                since = self._waited(seen, seen.free_at if seen.free_at is not None else seen.expires)
                if since is not None and now - since > FOLLOWED:
                    self.story.violated(4, f"{seen.keys[0]!r} is free since {since:.3f} and somebody waits")
                    seen.free_at = now
