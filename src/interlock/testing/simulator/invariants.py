"""What must hold at every instant, watched from outside: in the server after each script, in clients after each event.

Rules, by the numbers in violations.
 1. At most one lease in the whole system for which `ensure()` would pass.
 2. Fences grow strictly in the order of grants; what is written right after `ensure()` is never too old.
 3. No key without a TTL, after any script.
 4. A lock that is free is given to a live waiter in time; no acquire waits for ever; a timeout bounds the call.
 5. Nothing is left: a token that was taken back never holds again; with clean weather an attempt that ended
    without a lease has left lock and queue within a second; in the end server and clients are empty.
 6. No live waiter is overtaken by one that came later.
 7. A lease that has ended is never renewed.
 8. A lost lease is told, soon and once; a released one never.
 9. A lease is alive when it is handed to the caller, and `ensure()` never passes again after it failed.
10. No exception but those of `interlock.errors`, and no error in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from interlock._core import QUEUED, Grant, ServerError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from interlock._core import Argument, Primitive

    from .scheduler import Process, Task, World
    from .server import Server

SWEEP: Final = 0.25  # seconds between two looks at what should have happened
FOLLOWED: Final = 1.3  # seconds after which a free lock must have been given to a live waiter: a vouch and a trip
TOLD: Final = 3.5  # seconds after which a loss must have been told: each of the keeper's calls may take one
WOKEN: Final = 0.05  # seconds after which who was handed the lock must know, if nothing at all goes wrong
UNDONE: Final = 1.0  # seconds after which nothing of an attempt may be left, in clean weather
KEEPER: Final = "interlock-keeper"  # the coroutine of a session that renews
ENOUGH: Final = 20  # violations of one run


@dataclass
class Attempt:
    """What is known of one acquire."""

    process: Process
    key: bytes
    queued_at: float | None = None
    ended: bool = False
    cleared: bool = False  # its release was run by the server


@dataclass
class Held:
    """A lease in a client."""

    process: Process
    grant: Grant
    lapsed_at: float | None = None
    told: int = 0

    def certain(self) -> bool:
        """Whether `ensure()` would pass now."""
        return self.grant.lapsed(self.process.clock()) is None


@dataclass
class Seen:
    """A lock in the server, as the last script left it."""

    keys: tuple[bytes, ...]
    holder: bytes | None = None
    fence: int = 0
    expires: float = 0.0  # the world's time at which its key is over
    free_at: float | None = None
    arrivals: dict[bytes, tuple[int, float]] = field(default_factory=dict[bytes, tuple[int, float]])
    written: int = 0  # the newest fence that the protected resource accepted


class Monitor:
    """It sees everything and changes nothing."""

    def __init__(
        self, world: World, server: Server, counts: Counter[str], *, clean: bool, quiet: bool, trusted: bool
    ) -> None:
        self.quiet = quiet  # no fault of any kind
        self.world = world
        self.server = server
        self.counts = counts
        self.clean = clean  # every message arrives, once and soon
        self.trusted = trusted  # the server loses no data and its clock is never set
        self.calm_since = float("inf")
        self.over = False
        self.violations: list[str] = []
        self.trace: list[tuple[float, str]] = []
        self.order = hashlib.blake2b(digest_size=8)  # of what happened in which order, whenever it was
        self.locks: dict[bytes, Seen] = {}
        self.attempts: dict[bytes, Attempt] = {}
        self.held: dict[bytes, list[Held]] = {}
        self.grants = 0
        self.arrived = 0
        self.slowest = 0.0  # seconds from an expiry to the next grant, with a live waiter, in calm weather
        world.after_event = self.after_event

    def watch(self, primitive: Primitive) -> None:
        """A lock that will be used."""
        keys = tuple(key.encode() for key in primitive.keys)
        self.locks[keys[0]] = Seen(keys)
        self.held[keys[0]] = []

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.trace.append((self.world.now, text))

    def violated(self, rule: int, text: str) -> None:
        """A rule is broken."""
        if self.over:
            return
        self.note(f"VIOLATION of rule {rule}: {text}")
        if len(self.violations) < ENOUGH:
            self.violations.append(f"[{self.world.now:.6f}] rule {rule}: {text}")

    # What clients send

    def sending(self, process: Process, key: str, args: Sequence[Argument]) -> None:
        """A request leaves its process."""
        verb, *rest = args
        self.note(f"{process.name} sends {verb!s} {' '.join(map(str, rest[:2]))}")
        if verb == "acquire":
            token = str(rest[0]).encode()
            if token not in self.attempts:
                self.attempts[token] = Attempt(process, key.encode())
            if self.world.current is not None:
                self.world.current.subject = token
        elif verb == "renew" and self.world.current is not None and self.world.current.name == KEEPER:
            # (An extend() that is tried again may cross a release: the server refuses it.)
            tokens = {str(token).encode() for token in rest[::2]}
            for held in (held for holds in self.held.values() for held in holds):
                if held.grant.ended is not None and held.grant.token.encode() in tokens:
                    self.violated(7, f"{held.grant.token} is renewed though {held.grant.ended}")

    # What the server runs

    def executed(self, sender: str, keys: Sequence[bytes], args: Sequence[bytes], reply: Any) -> None:
        """A script has run."""
        verb, token = args[0], args[1]
        code: object = reply
        with contextlib.suppress(TypeError, IndexError):
            code = reply[0]
        self.note(f"server runs {sender}'s {verb.decode()} {token.decode()} -> {reply}")
        if isinstance(reply, ServerError):
            if not str(reply).startswith("NOSCRIPT"):
                self.violated(10, f"{verb.decode()} of {sender} failed: {reply}")
            return
        self.order.update(b"%s %s %s %s;" % (sender.encode(), verb, token, repr(code).encode()))
        now_ms = self.server.millis()
        for key in self.server.data:
            if key not in self.server.expires:
                self.violated(3, f"{key!r} has no TTL after {verb!r}")
        attempt = self.attempts.get(token)
        if verb == b"release" and attempt is not None:
            attempt.cleared = True
        elif verb == b"acquire" and code == QUEUED and attempt is not None and attempt.queued_at is None:
            attempt.queued_at = self.world.now
        for key in keys[::2] if verb == b"renew" else keys[:1]:
            self._look(self.locks[key], verb, now_ms)

    def _look(self, seen: Seen, verb: bytes, now_ms: int) -> None:
        lock, record, queue, waiters, _ = seen.keys
        server, now = self.server, self.world.now
        holder: bytes | None = server.find(lock, bytes)
        if verb != b"renew":
            present: dict[bytes, float] = server.data.get(queue, {})
            for token in [token for token in seen.arrivals if token not in present and token != holder]:
                del seen.arrivals[token]
            for token in server.ordered(queue):
                if token not in seen.arrivals or seen.arrivals[token][1] != present[token]:  # perhaps once again
                    self.arrived += 1
                    seen.arrivals[token] = self.arrived, present[token]
        text: bytes | None = server.find(record, bytes)
        fence = int(text.split()[2]) if text else 0
        if holder is not None and not holder.startswith(b"!") and (holder, fence) != (seen.holder, seen.fence):
            self._granted(seen, holder, fence)
            server.purge(waiters)
            alive: dict[bytes, bytes] = server.data.get(waiters, {})
            mine, _ = seen.arrivals.get(holder, (self.arrived + 1, 0.0))
            for token in server.ordered(queue):
                if seen.arrivals[token][0] < mine and int(alive.get(token, b"0 ").split()[0]) > now_ms:
                    self.violated(6, f"{holder!r} overtook {token!r}")
        if (
            holder is not None
            and (attempt := self.attempts.get(holder.removeprefix(b"!")))
            and attempt.cleared
            and self.trusted
        ):
            self.violated(5, f"{holder!r} holds {lock!r} after its release was run")
        if holder is None:
            if seen.free_at is None:
                seen.free_at = seen.expires if seen.holder is not None and seen.expires < now else now
        else:
            seen.free_at = None
            seen.expires = now + (server.expires.get(lock, now_ms) - now_ms) / 1000
        seen.holder, seen.fence = holder, max(fence, seen.fence)

    def _granted(self, seen: Seen, holder: bytes, fence: int) -> None:
        now = self.world.now
        self.grants += 1
        if fence <= seen.fence:
            self.violated(2, f"{holder!r} got the fence {fence} after {seen.fence}")
        waiter = self.attempts.get(holder)
        if self.quiet and waiter is not None and waiter.queued_at is not None:
            self.world.at(now + WOKEN, lambda: self._woken(holder, waiter))
        free_at = seen.free_at
        if free_at is None and seen.holder is not None and seen.expires < now:
            free_at = seen.expires
        if free_at is not None and (since := self._waited(seen, free_at)) is not None:
            self.slowest = max(self.slowest, now - since)
            if now - since > FOLLOWED:
                self.violated(4, f"{seen.keys[0]!r} was free for {now - since:.3f} s while somebody waited")

    def _woken(self, token: bytes, waiter: Attempt) -> None:
        if not waiter.ended and self.server.find(waiter.key, bytes) == token:
            self.violated(4, f"{token!r} was handed the lock {WOKEN} s ago and does not know")

    def _waited(self, seen: Seen, free_at: float) -> float | None:
        """Since when a live waiter could have had this free lock, in calm weather."""
        since = [
            attempt.queued_at
            for attempt in self.attempts.values()
            if attempt.queued_at is not None
            and not attempt.ended
            and attempt.process.awake
            and attempt.key == seen.keys[0]
        ]
        if not since or not self.trusted:
            return None
        return max(free_at, min(since), self.calm_since) if self.world.now > self.calm_since else None

    # What clients hold

    def leased(self, process: Process, grant: Grant) -> None:
        """An acquire is about to return this."""
        held = Held(process, grant)
        self.held[grant.primitive.keys[0].encode()].append(held)
        self.note(f"{process.name} holds {grant.token} fence {grant.fence} until {process.when(grant.deadline):.6f}")
        if not held.certain():
            self.violated(9, f"{grant.token} is returned though {grant.lapsed(process.clock())}")

    def told(self, lease: Any) -> None:
        """Its holder hears that a lease is lost."""
        self.note(f"the holder is told: {lease._grant.token}: {lease._grant.ended}")
        for held in self.held[lease._grant.primitive.keys[0].encode()]:
            if held.grant is lease._grant:
                held.told += 1
                if held.told > 1 or held.grant.ended == Grant.RELEASED:
                    self.violated(8, f"{held.grant.token} is told {held.told} times: {held.grant.ended}")

    def after_event(self) -> None:
        """Rules 1 and 9, at every instant."""
        for key, holds in self.held.items():
            if len(holds) > 1:
                certain = [held for held in holds if held.certain()]
                if len(certain) > 1 and self.trusted:
                    self.violated(1, f"{key!r} is held by {' and by '.join(held.grant.token for held in certain)}")
                    certain[0].grant.lose("the simulation has seen enough of it")
                self._tidy(holds)
            elif holds and holds[0].lapsed_at is not None:
                self._tidy(holds)

    def _tidy(self, holds: list[Held]) -> None:
        for held in list(holds):
            certain, now = held.certain(), self.world.now
            if held.lapsed_at is None:
                if not certain and held.process.awake:  # now its code could have seen it
                    held.lapsed_at = now
            elif certain:
                self.violated(9, f"ensure() passes again for {held.grant.token}")
                held.lapsed_at = None
            if held.lapsed_at is not None and not certain and self._settled(held):
                holds.remove(held)

    def _settled(self, held: Held) -> bool:
        """Whether nothing more is expected of an ended lease. Rule 8."""
        grant = held.grant
        if not held.process.alive or grant.owner is None or grant.owner() is None:
            return True
        if grant.ended == Grant.RELEASED or held.told:
            return True
        since = max(held.lapsed_at or 0.0, held.process.paused_until)
        if self.world.now - since > TOLD:
            self.violated(8, f"nobody is told that {grant.token} is lost: {grant.lapsed(held.process.clock())}")
            return True
        return False

    def wrote(self, grant: Grant, *, sure: bool) -> None:
        """The protected resource gets a write with this fence; `sure`: ensure() passed in this instant."""
        seen = self.locks[grant.primitive.keys[0].encode()]
        if grant.fence >= seen.written:
            seen.written = grant.fence
            self.counts["write accepted"] += 1
        else:
            self.counts["write refused by its fence"] += 1
            if sure and self.trusted:
                self.violated(2, f"a certain holder's write with {grant.fence} comes after {seen.written}")

    # How attempts end

    def ended(self, task: Task, *, with_lease: bool) -> None:
        """The coroutine's acquire is over."""
        token = task.subject
        attempt = self.attempts.get(token)
        if attempt is None or attempt.ended:
            return
        attempt.ended = True
        if not with_lease and self.clean:
            process, pauses = attempt.process, attempt.process.pauses
            self.world.at(self.world.now + UNDONE, lambda: self._undone(token, attempt, process, pauses))

    def closed(self, process: Process) -> None:
        """A session has closed: with clean weather, what it held and queued is gone."""
        if self.clean and process.alive:
            for token, attempt in self.attempts.items():
                if attempt.process is process:
                    self._undone(token, attempt, process, process.pauses)

    def _undone(self, token: bytes, attempt: Attempt, process: Process, pauses: int) -> None:
        if not process.alive or process.pauses != pauses:
            return
        lock, _, queue, waiters, _ = self.locks[attempt.key].keys
        holder: bytes = self.server.find(lock, bytes) or b""
        for place, found in (
            ("the lock", holder.removeprefix(b"!") == token),
            ("the queue", token in self.server.ordered(queue)),
            ("the waiters", token in self.server.data.get(waiters, ())),
        ):
            if found:
                self.violated(5, f"{token!r} ended without a lease and is still in {place}")

    def sweep(self) -> None:
        """What should have happened by now."""
        for seen in self.locks.values():
            self._tidy(self.held[seen.keys[0]])
            if self.server.find(seen.keys[0], bytes) is None and self.world.now > self.calm_since:
                free_at = seen.free_at if seen.free_at is not None else seen.expires
                since = self._waited(seen, free_at)
                if since is not None and self.world.now - since > FOLLOWED:
                    self.violated(4, f"{seen.keys[0]!r} is free since {since:.3f} and somebody waits")
                    seen.free_at = self.world.now
        self.world.at(self.world.now + SWEEP, self.sweep)
