"""What acquiring, holding, renewing and releasing mean: the algorithm, once, over a small `Port`.

Theory. The server decides; this side asks, believes for a bounded time, and asks again. Every question is a
script call that may be sent twice: `acquire` is keyed by a token that names one attempt, so asking again is at
once the retry of a lost reply, a waiter's poll, and the confirmation of a lock that was handed over.

Rules.
 1. Belief ends by our own clock, counted from *before* the request was sent (`Grant.deadline`).
 2. An attempt that does not end in a `Grant` is undone, whatever ended it: a timeout, a cancellation, Ctrl-C.
 3. If a request of an attempt was sent and its reply did not come, the attempt is *in doubt*: a copy of the
    request may still reach the server. Whatever ends it then leaves a tombstone, so that the copy takes nothing.
 4. Renewal ends before the release is sent; a lease that has ended refuses everything without I/O.
 5. Nothing here knows threads, asyncio, sockets or wall clocks: that is the port's business. The port for
    threads never suspends a coroutine, so `run()` drives this code with no event loop.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from .errors import AcquireTimeout, BrokenBarrier, ConfigError, LeaseLost, LockError, Unavailable

if TYPE_CHECKING:
    import weakref
    from collections.abc import Coroutine, Sequence
    from contextlib import AbstractContextManager

    from ._acks import Acks, Assurance
    from ._renewal import Renewal
    from ._undo import Undo
    from ._waiters import Waiters

T = TypeVar("T")
L = TypeVar("L")
log = logging.getLogger("interlock")

# Reply codes, the same in every .lua file.
GRANTED, QUEUED, BUSY, RETRY, NOT_FOUND, REVOKED, NO_EXPIRY, WRONG_KIND, LIMIT_MISMATCH, BROKEN = range(1, 11)

RETRY_FOR: Final = 5.0  # seconds that a server may stay away before a call says Unavailable
TRY_FOR: Final = 1.0  # seconds that a call which does not wait may take, unless the Interlock says otherwise
ANSWER_COUNTS_FOR: Final = 1.5  # seconds of a server's silence after which its last answer tells nothing any more
GRANT_LIFE: Final = 3.0  # seconds that a handover waits for its confirmation, at most (less with a short ttl)
GONE_FOR: Final = 60.0  # seconds after which a late copy of a request is no longer expected
TOO_LATE: Final = 8  # answers in a row that come after the lease they grant has lapsed
SHORTEST_PAUSE: Final = 0.02  # seconds between two tries of one request
LONGEST_PAUSE: Final = 0.6
DRIFT: Final = 0.001  # of a ttl: see margin()
# seconds that a caller in a quarantine waits for a proof that nothing was lost; meanwhile nobody vouches for it
PROOF: Final = 2.0
COURTESY: Final = 0.2  # seconds that a caller whose time is over waits for its undo, so that it finds nothing left
STOP_POLL: Final = 0.2  # seconds between two looks whether a caller that waits has been told to stop
FOREVER: Final = math.inf
UNHEARD: Final = "the heartbeats of this waiter were not answered"
UNSETTLED: Final = "it has just become the primary, and the one before may still grant beside it"
QUARANTINE: Final = b"!quarantine:"  # what holds a lock whose server may have lost a lease; the evidence follows

generation = 0  # of this process: a child of a fork is another one, in which no grant of its parent counts

# Error replies that pass by themselves: the server starts, is busy, or fails over.
_PASSING = ("LOADING", "BUSY ", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "NOREPLICAS", "UNKILLABLE")


def passing(text: str) -> bool:
    """Whether a server that says this may serve in a moment."""
    return text.startswith(_PASSING) or "READONLY" in text or "-NOREPLICAS" in text  # the last: from within a script


class Script(NamedTuple):
    """A .lua file: its name, text, and the SHA1 by which servers know it."""

    name: str
    source: str
    sha: str


Argument = str | bytes
Message = tuple[Script, "Sequence[str | bytes]", "Sequence[Argument]"]  # a script, its KEYS, its ARGV


class Disconnected(Exception):  # noqa: N818 (a state of the wire, not an error of ours)
    """No reply came. `sent`: the server may have run the request. `stale`: the connection had been idle."""

    def __init__(self, cause: str, *, sent: bool, stale: bool = False, timed_out: bool = False) -> None:
        super().__init__(cause)
        self.sent = sent
        self.stale = stale
        self.timed_out = timed_out


class ServerError(Exception):
    """The server answered with an error: it ran nothing, or only a part of nothing that matters."""


class Stopped(Exception):  # noqa: N818 (a wish of the caller's, not an error)
    """An attempt was told to stop before it was granted."""


class Place(NamedTuple):
    """Where a key is: keys of one slot may stand in one message; a node that is silent is so for all of its slots."""

    node: object
    slot: int


HERE: Final = Place(0, 0)  # of all keys, where there is but one


class Signal(Protocol):
    """A flag that one waits for; waiting takes it down. Setting it twice is setting it once."""

    def set(self) -> None: ...


class Port(Protocol):
    """All that the core needs of the world: a clock, a server, a way to wait, and work in the background.

    To add one: implement these, and run the conformance suite over it. Every `until` is a time of `now()`.
    """

    shown: str
    patience: float
    """Seconds that it may be away before a call says Unavailable."""
    several: bool
    """Whether a refusal may leave something behind, since several servers are asked."""
    majority: int
    """How many servers grant a lease."""

    drift: float
    """By how much of a ttl we stop believing before the server does: clocks run at different speeds."""

    @property
    def mutex(self) -> AbstractContextManager[object]:
        """For compound steps on what several threads share; never held during I/O."""
        ...

    def now(self) -> float:
        """Seconds on a clock that nobody can set and that runs on while the machine sleeps."""
        ...

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Any:
        """Send one script call, once, and return its reply. Raises Disconnected or ServerError."""
        ...

    async def assured(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        acks: Acks,
        patience: float,
    ) -> tuple[Any, int, Any]:
        """As `call`; and if it granted, how many replicas are known, and the reply to what waits for them.

        Raises Disconnected or ServerError.
        """
        ...

    async def calls(self, messages: Sequence[Message], until: float) -> list[Any]:
        """Send many at once. An error stands in the place of its reply: nothing is raised for one of many."""
        ...

    async def proven(self, keys: Sequence[str | bytes], evidence: str, until: float) -> bool:
        """Whether nothing was lost since the server of that identity granted these; if so, messages say it from now on.

        Looks again until then, if it may turn out yet.
        """
        ...

    def unsettled(self, key: str) -> str:
        """The identity of one that may still grant this key beside the server that answers by now; "" if there is none.

        Then what the new one grants or renews counts for nothing yet: what it lets go on may run out at the other.
        Whether it is proven that nothing was lost is looked for in the background: nobody is held up by that.
        """
        ...

    def signal(self) -> Signal: ...

    async def wait(self, signal: Any, until: float) -> bool:
        """Whether the signal was set before `until`."""
        ...

    def place(self, key: str) -> Place:
        """Where this key is: messages about keys of one place may be one message."""
        ...

    def ear(self, key: str) -> tuple[str, str]:
        """Whether pushes about this key are heard now, "0" or "1"; and the channel where they would be."""
        ...

    def listen(self, key: str) -> None:
        """Subscribe to that channel in the background, and again after every reconnection."""
        ...

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, over: Callable[[], None]) -> None:
        """Run this in the background, and call `over` when it ends, however that comes."""
        ...

    def forget(self) -> None:
        """In a child after fork: drop what belongs to the parent, without a word to anybody."""
        ...

    def tell(self, callback: Callable[[Any], object], subject: Any) -> None:
        """Call a user's callback where it can neither delay nor break us."""
        ...


class Primitive(NamedTuple):
    """One named thing in the server: which script decides, over which keys."""

    kind: str
    name: str
    script: Script
    keys: tuple[str, ...]
    renewed: tuple[str, ...]
    """Those of the keys that a renewal needs."""
    terms: tuple[Argument, ...] = ()
    """What an acquire says beside what all say."""
    owner: str = ""
    """With what its tokens begin: for holders that are the same in another process."""
    parting: tuple[str, ...] = ()
    """What a release says beside what all say."""
    phased: bool = False
    """Whether its waiters say in which generation of it they wait, so that no other one can keep them."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class Attempt:
    """One try to get a primitive, from its first request until it is granted or undone."""

    __slots__ = (
        "acks", "assurance", "drift", "entered", "extended_until", "in_doubt", "life_ms", "over", "parting", "phase",
        "primitive", "signal", "silent", "stopped", "token", "ttl",
    )  # fmt: skip

    def __init__(self, primitive: Primitive, token: str, ttl: float, signal: Signal | None) -> None:
        self.primitive = primitive
        self.token = token
        self.ttl = ttl
        self.extended_until = 0.0  # until when the server may keep it, if somebody asked for more than the ttl
        self.life_ms = str(int(min(GRANT_LIFE, ttl) * 1000))
        self.signal = signal
        self.over = False  # nobody waits for it any more
        self.in_doubt = False  # a copy of a request may still be on its way
        self.entered = False  # it stands in the queue
        self.silent = FOREVER  # when the first of its requests and heartbeats was sent that have no answer yet
        self.phase = ""  # the generation in which it waits, if its primitive has such
        self.parting = primitive.parting
        self.drift = DRIFT
        self.acks: Acks | None = None  # what must have the grant, so that it counts
        self.assurance: Assurance | None = None  # what had it, if more than its server
        self.stopped: Callable[[], bool] | None = None  # whether its caller wants it no more

    def lasts_until(self, now: float) -> float:
        """When the server has forgotten it at the latest, if it gets no further request about it."""
        return max(now + max(self.ttl, GRANT_LIFE), self.extended_until)


class Grant:
    """What this process knows of one lease: until when it may believe in it, and why it ended."""

    __slots__ = (
        "attempt", "deadline", "ended", "ends", "failing", "fence", "generation", "overdue", "owner", "renews", "slot",
    )  # fmt: skip
    RELEASED: Final = "it was released"
    FORKED: Final = "it belongs to the parent process; a child holds nothing after fork"

    def __init__(self, attempt: Attempt, fence: int, sent: float, *, renews: bool, ends: float) -> None:
        self.attempt = attempt
        self.fence = fence
        self.renews = renews
        self.ends = ends  # when max_hold is over
        self.deadline = 0.0
        self.ended: str | None = None  # why, once it has
        self.generation = generation
        self.owner: weakref.ref[Any] | None = None  # the Lease to tell
        self.slot: dict[str, Grant] | None = None  # where renewal keeps it
        self.confirmed(sent, attempt.ttl)

    @property
    def primitive(self) -> Primitive:
        return self.attempt.primitive

    @property
    def token(self) -> str:
        return self.attempt.token

    def confirmed(self, sent: float, ttl: float) -> None:
        """The server granted or lengthened it, in answer to a request sent at `sent`. Never shortens."""
        self.failing = False
        self.overdue = sent + self.attempt.ttl / 2  # due at ttl/3, and ttl/6 of grace
        deadline = sent + ttl - margin(ttl, self.attempt.drift)
        if deadline > self.deadline:
            self.deadline = min(self.ends, deadline)

    def lapsed(self, now: float) -> str | None:
        """Why the lease can't be relied on at this time, or None if it can."""
        if self.generation != generation:
            self.ended = self.FORKED
        if self.ended is not None or now < self.deadline:
            return self.ended
        if self.deadline == self.ends:
            return "its max_hold is over"
        return "its ttl passed without a renewal" if self.renews else "its ttl passed"

    def lose(self, why: str) -> Any:
        """End it as lost; returns the Lease to tell, if somebody still has it."""
        if self.ended is not None:
            return None
        self.ended = why
        return self.owner() if self.owner else None

    def released(self) -> None:
        """We end it ourselves: whoever watches for its end is told."""
        if lease := self.lose(self.RELEASED):
            lease._on_end()

    def error(self, why: str) -> LeaseLost:
        """What its holder is told."""
        error = LeaseLost(
            f"the lease on {self.primitive} has ended: {why}. Acquire it again"
            if why == self.RELEASED
            else f"the lease on {self.primitive} (fence {self.fence}) is lost: {why}. "
            "Stop writing: another holder may be at work"
        )
        error.token = self.token
        return error


Busy = Callable[[Primitive, float, Any], LockError]  # the timeout in seconds, and the reply


def capped(ttl: float, max_hold: float, drift: float = DRIFT) -> float:
    """The ttl of a lease that ends with max_hold, at the latest."""
    return min(ttl, max_hold + 2 * margin(ttl, drift))


def margin(ttl: float, drift: float = DRIFT) -> float:
    """Seconds by which we stop believing before the server does: clocks run at different speeds.

    With several servers, that is Redlock's: a hundredth and 2 ms.
    """
    return max(drift * ttl, 0.001) if drift == DRIFT else drift * ttl + 0.002


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Finish a coroutine that never suspends, as every one over the threads' port does."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("a coroutine over the threads' port was suspended")


class Core:
    """One client of the protocol: it asks for locks, holds, renews and gives back."""

    def __init__(
        self,
        port: Port,
        waiters: Waiters,
        renewal: Renewal,
        undo: Undo,
        who: Callable[[], str],
        try_for: float = TRY_FOR,
    ) -> None:
        self.port = port
        self.waiters = waiters
        self.renewal = renewal
        self.undo = undo
        self.who = who
        self.try_for = try_for  # seconds that a call which does not wait may take
        self.releasing: dict[str, Attempt] = {}  # what is being given back now
        self.closed = False

    async def acquire(
        self,
        primitive: Primitive,
        hold: Callable[[Grant], L],
        ttl: float,
        timeout: float | None,
        renews: bool = True,
        max_hold: float | None = None,
        busy: Busy | None = None,
        acks: Acks | None = None,
        try_for: float | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> L:
        """A lease, made by `hold`. Raises AcquireTimeout if somebody else has it, Unavailable if no server tells.

        `timeout` is in seconds: None waits for ever, 0 not at all; then `try_for` bounds the call, by default that of
        the Interlock. A grant that replicas or disks must acknowledge may take as long as ever. `stopped` is asked
        several times a second while it waits; once it is true, Stopped is raised.
        """

        def held(attempt: Attempt, reply: Any, sent: float) -> L | None:
            return self.hold(attempt, reply[1], sent, hold, renews=renews, max_hold=max_hold)

        ttl = self._capped(ttl, max_hold)
        attempt = self.attempt(primitive, ttl, wait=timeout is None or timeout > 0)
        attempt.acks, attempt.stopped = acks, stopped
        if acks is not None and try_for is None:
            try_for = self.patient
        return await self.obtain(primitive, held, ttl, timeout, busy, attempt, try_for)

    @property
    def patient(self) -> float:
        """Seconds that a call may take which does not wait, but has more to do than one try."""
        return max(RETRY_FOR, self.try_for)

    def _capped(self, ttl: float, max_hold: float | None) -> float:
        return ttl if max_hold is None else capped(ttl, max_hold, self.port.drift)

    def attempt(self, primitive: Primitive, ttl: float, *, wait: bool) -> Attempt:
        """A new one, with a token that nobody ever had."""
        token = f"{primitive.owner}{self.who()}/{os.urandom(16).hex()}"
        attempt = Attempt(primitive, token, ttl, self.port.signal() if wait else None)
        attempt.drift = self.port.drift
        return attempt

    async def obtain(
        self,
        primitive: Primitive,
        accept: Callable[[Attempt, Any, float], L | None],
        ttl: float,
        timeout: float | None,
        busy: Busy | None = None,
        attempt: Attempt | None = None,
        try_for: float | None = None,
    ) -> L:
        """Ask until it is granted: what `accept` makes of that, and leaves the waiters; or again, if that is None.

        Raises what `busy` makes of a refusal, or of the last answer when the time is over; Unavailable if there was
        none, or if the server has been silent since for so long that its answer tells nothing any more.
        """
        port, busy = self.port, busy or held_by_another
        started = port.now()
        wait = timeout is None or timeout > 0
        until = FOREVER if timeout is None else started + (timeout or (self.try_for if try_for is None else try_for))
        attempt = attempt or self.attempt(primitive, ttl, wait=wait)
        token, ttl_ms, waits = attempt.token, str(int(ttl * 1000)), "1" if wait else "0"
        late, doubted, proven = 0, True, ""
        refused: Any = None  # the last answer that somebody else has it
        try:
            self.waiters.expect(attempt)
            while True:
                heard, channel = port.ear(primitive.keys[0])
                args = ("acquire", token, ttl_ms, attempt.life_ms, heard, channel, waits, *primitive.terms)
                reply, sent = await self.ask(attempt, (*args, attempt.phase) if primitive.phased else args, until)
                code = reply[0]
                if code == GRANTED:
                    accepted = accept(attempt, reply, sent)
                    if accepted is not None:
                        attempt.stopped = None  # what is asked of it from now on is no part of the waiting
                        return accepted
                    late += 1
                    if late == TOO_LATE:
                        raise Unavailable(f"{primitive}: {port.shown} answers too late for a lease of {ttl:g} s")
                    continue
                attempt.entered |= code == QUEUED
                if (evidence := quarantined(reply)) and doubted and evidence != proven:
                    proven = evidence  # once for each: not every client can make use of what it has proven
                    doubted = await port.proven(primitive.keys, evidence, min(until, port.now() + PROOF * wait))
                    continue
                if code == QUEUED:
                    refused = reply
                    if primitive.phased:
                        attempt.phase = reply[4].decode()
                    if not await self._wait(attempt, reply, until):
                        raise self._last_word(attempt, busy(primitive, timeout or 0, reply))
                elif code == BUSY:
                    raise busy(primitive, 0, reply)
                elif code != RETRY:
                    raise unobtainable(primitive, code, reply)
        except BaseException as error:
            attempt.over = True  # before any call: an interrupt here must not leave a waiter that nobody is
            self.waiters.leave(attempt)
            if attempt.entered or attempt.in_doubt or late or port.several or not isinstance(error, LockError):
                undone = self.undo.add(attempt)
                if isinstance(error, AcquireTimeout):
                    await port.wait(undone, port.now() + COURTESY)
            if refused is not None and gave_up(error) and answered_lately(attempt, port.now()):
                # The caller's time is over, and the server said just before that somebody else has it.
                raise busy(primitive, timeout or 0, refused) from error
            raise

    def _last_word(self, attempt: Attempt, refusal: LockError) -> LockError:
        """What to raise for a waiter whose time is over: the refusal that came last, if it still counts."""
        now = self.port.now()
        if answered_lately(attempt, now):
            return refusal
        return unanswered(attempt, self.port.shown, now, Disconnected(UNHEARD, sent=True))

    async def _wait(self, attempt: Attempt, reply: Any, until: float) -> bool:
        """Wait until there is a reason to ask again. False: the time is over. Raises Stopped."""
        port, stopped = self.port, attempt.stopped
        if stopped is None:
            return await self.waiters.wait(attempt, reply[2], bool(reply[3]), until)
        woken = await self.waiters.wait(attempt, reply[2], bool(reply[3]), min(until, port.now() + STOP_POLL))
        while not woken and port.now() < until:
            if stopped():
                raise Stopped
            woken = await port.wait(attempt.signal, min(until, port.now() + STOP_POLL))
        return woken

    def hold(
        self,
        attempt: Attempt,
        fence: int,
        sent: float,
        hold: Callable[[Grant], L],
        *,
        renews: bool,
        max_hold: float | None,
    ) -> L | None:
        """The lease of a grant, which waits no more; None if its answer took longer than it lasts."""
        grant = Grant(attempt, fence, sent, renews=renews, ends=FOREVER if max_hold is None else sent + max_hold)
        if grant.lapsed(self.port.now()):
            return None
        try:
            lease = hold(grant)
            self.renewal.add(grant)
            if why := self.renewal.early.get(attempt.token):  # its push was faster than the reply that granted it
                self.undo.add(attempt)
                raise grant.error(f"it was revoked: {why}")
            if self.closed:  # closing gives it back, whether it has seen it or not
                raise self._closed(attempt.primitive)
            self.waiters.leave(attempt)
        except BaseException:
            grant.ended = Grant.RELEASED
            self.renewal.forget(grant)
            raise
        return lease

    def give_up(self, grant: Grant) -> Signal:
        """Give it back in the background, for nobody will use it. The signal tells when that is done."""
        grant.released()
        self.renewal.forget(grant)
        return self.undo.add(grant.attempt)

    def leave_behind(self, grant: Grant) -> None:
        """The same without I/O and locks: also called while it is garbage collected, in whichever thread."""
        grant.ended = grant.ended or Grant.RELEASED
        self.undo.later.append(grant.attempt)  # first here, then out of the other: see Ends.due
        self.renewal.forget(grant)

    async def ask(self, attempt: Attempt, args: Sequence[Argument], until: float) -> tuple[Any, float]:
        """One question of an attempt, retried while the server is away: the reply, and when it was sent."""
        port, primitive = self.port, attempt.primitive
        give_up, pause = until, 0.0
        cause: Exception | None = None
        while True:
            if self.closed:
                raise self._closed(primitive)
            if attempt.stopped is not None and attempt.stopped():
                raise Stopped
            sent = port.now()
            try:
                if attempt.acks is None or args[0] != "acquire":
                    reply = await port.call(primitive.script, primitive.keys, args, give_up)
                else:
                    reply = await self._assured(attempt, args, give_up)
                if args[0] not in {"acquire", "renew"} or reply[0] != GRANTED or not port.unsettled(primitive.keys[0]):
                    attempt.silent = FOREVER
                    return reply, sent
                attempt.in_doubt, cause, stale = True, ServerError(UNSETTLED), False
            except Disconnected as error:
                attempt.in_doubt |= error.sent
                stale = error.stale
                if cause is None or not error.timed_out or give_up - sent > LONGEST_PAUSE:
                    cause = error  # else it had so little time that its silence tells less than what came before
            except ServerError as error:
                attempt.in_doubt |= attempt.acks is not None  # it may be what waits for replicas that was refused
                if not passing(str(error)):
                    raise refusal(primitive, port.shown, str(error)) from None
                cause, stale = error, False
            except BaseException:
                attempt.in_doubt = True  # cancelled or interrupted while the request was on its way
                raise
            attempt.silent = min(attempt.silent, sent)
            give_up = min(give_up, sent + port.patience)
            if not stale:
                pause = min(LONGEST_PAUSE, (pause * 2 or SHORTEST_PAUSE) * random.uniform(0.75, 1.25))
            now = port.now()
            if now + 2 * SHORTEST_PAUSE >= give_up:
                raise unanswered(attempt, port.shown, now, cause) from cause
            # Half of the rest at most: the last try comes at the end of the caller's time, not long before.
            await port.wait(port.signal(), now + min(pause, max(SHORTEST_PAUSE, (give_up - now) / 2)))

    async def _assured(self, attempt: Attempt, args: Sequence[Argument], until: float) -> Any:
        """The reply, of a grant once enough have it. Raises Unavailable if they don't in time."""
        primitive, acks = attempt.primitive, attempt.acks
        assert acks is not None
        patience = min(acks.patience(attempt.ttl), 0.9 * (until - self.port.now()))  # so that its answer is in time
        reply, known, got = await self.port.assured(primitive.script, primitive.keys, args, until, acks, patience)
        if reply[0] == GRANTED:
            attempt.in_doubt = True  # until it is clear that it counts: what ends here is undone
            attempt.assurance = acks.assured(primitive, known, got, acks.patience(attempt.ttl))
        return reply

    @staticmethod
    def _closed(primitive: Primitive) -> ConfigError:
        return ConfigError(f"{primitive}: this Interlock is closed. Make a new one")

    async def release(self, grant: Grant) -> bool:
        """Give it back: whether it was still ours. Raises Unavailable if nobody can tell."""
        attempt = grant.attempt
        try:
            now = self.port.now()
            grant.lapsed(now)
        except BaseException:
            self.give_up(grant)
            raise
        if grant.ended is not None:
            if grant.ended not in {Grant.RELEASED, Grant.FORKED}:
                self.undo.add(attempt)  # what a revocation left is for the next one
            return False
        doubt = attempt.in_doubt
        try:
            grant.released()
            self.renewal.forget(grant)
            self.releasing[attempt.token] = attempt
            args = ("release", attempt.token, gone_ms(attempt), *attempt.parting)
            attempt.in_doubt = False  # from here on it tells whether a release was sent twice
            until = FOREVER
            if grant.deadline < now + RETRY_FOR:  # after its ttl it is free by itself
                until = max(grant.deadline, now + 0.5)
            was_ours = False
            while True:
                (ours, again), _ = await self.ask(attempt, args, until)
                was_ours |= bool(ours)  # the first answer tells; while we come again, others release, too
                if not again:
                    # The server remembers one releaser. If it was asked twice and knows of another by now, then
                    # the first release was run: nothing says that the lease had ended before.
                    return was_ours or (attempt.in_doubt and now < grant.deadline)
        except BaseException as error:
            if self.closed and isinstance(error, ConfigError):  # closing releases it
                return True
            self.undo.add(attempt)
            raise
        finally:
            attempt.in_doubt |= doubt
            self.releasing.pop(attempt.token, None)

    async def leave(self, grant: Grant, error: BaseException | None) -> None:
        """End a section: raises LeaseLost if the lease did not last, unless the body raised already.

        A server that is away then is no reason to fail work that was done under a lease that held: the
        release goes on in the background, and the lease runs out by itself.
        """
        why = None
        try:
            why = grant.lapsed(self.port.now())
            if why == Grant.RELEASED:
                return
            if why is not None:
                self.renewal.lose(grant, why)
            if await self.release(grant):
                return
        except LockError as failed:
            if error is None and not isinstance(failed, Unavailable):
                raise
            log.warning("%s The release goes on in the background", failed)
            return
        except BaseException:
            self.give_up(grant)
            raise
        lost = grant.error(why or "it had ended in the server before it was released")
        if error is None:
            raise lost
        if isinstance(error, LeaseLost):
            return
        while error.__context__ is not None and error.__context__ is not lost:
            error = error.__context__
        error.__context__ = lost

    async def extend(self, grant: Grant, ttl: float) -> None:
        """Lengthen the lease to `ttl` seconds from now. Raises LeaseLost."""
        if why := grant.lapsed(self.port.now()):
            raise grant.error(why)
        # Not beyond max_hold: what is not believed here must not keep others out there.
        ttl = min(ttl, max(0.001, grant.ends - self.port.now() + 2 * margin(ttl, self.port.drift)))
        try:
            request = ("renew", grant.token, str(int(ttl * 1000)))
            reply, sent = await self._about(grant, grant.primitive.renewed, request)
        finally:  # also if no reply came: the server may have done it
            grant.attempt.extended_until = max(grant.attempt.extended_until, self.port.now() + ttl)
        if isinstance(reply[0], bytes):  # a failed renewal is no loss
            why = reply[0].decode()
            raise Unavailable(f"{grant.primitive} was not extended, and lasts as before: {why}. Try again")
        if why := renewal_verdict(reply[0]):
            self.renewal.lose(grant, why)
            raise grant.error(why)
        if why := grant.lapsed(self.port.now()):
            self.renewal.lose(grant, why)
            raise grant.error(why)
        grant.confirmed(sent, ttl)
        self.renewal.moved(grant)

    async def execute(self, grant: Grant, command: str, args: Sequence[Argument], keys: Sequence[str | bytes]) -> Any:
        """Run one command in the server, only if the lease is still ours there. Never sent twice."""
        if why := grant.lapsed(self.port.now()):
            raise grant.error(why)
        primitive = grant.primitive
        message = ("execute", grant.token, command, *args)
        try:
            reply = await self.port.call(primitive.script, (*primitive.keys, *keys), message, FOREVER)
        except Disconnected as error:
            done = "it may have run" if error.sent else "it was not sent"
            raise Unavailable(f"{primitive}: no answer to {command} ({error}): {done}") from error
        except ServerError as error:
            raise refusal(primitive, self.port.shown, str(error)) from None
        if reply[0] != GRANTED:
            why = f"it had ended in the server, where {command} was not run"
            self.renewal.lose(grant, why)
            raise grant.error(why)
        return reply[1]

    async def _about(self, grant: Grant, keys: Sequence[str], args: Sequence[Argument]) -> tuple[Any, float]:
        narrowed = Attempt(grant.primitive._replace(keys=tuple(keys)), grant.token, grant.attempt.ttl, None)
        return await self.ask(narrowed, args, min(grant.deadline, self.port.now() + self.port.patience))

    async def query(self, primitive: Primitive, *args: Argument) -> Any:
        """A question that belongs to no attempt: inspect, revoke."""
        reply, _ = await self.ask(Attempt(primitive, "-", 0, None), args, self.port.now() + RETRY_FOR)
        return reply


def gave_up(error: BaseException) -> bool:
    """Whether `ask` raised this since no try of it was answered in time."""
    return isinstance(error, Unavailable) and isinstance(error.__cause__, Disconnected | ServerError)


def answered_lately(attempt: Attempt, now: float) -> bool:
    """Whether the last answer about this attempt still tells something: no request has been unanswered for long."""
    return now - attempt.silent < ANSWER_COUNTS_FOR


def unanswered(attempt: Attempt, shown: str, now: float, cause: Exception) -> Unavailable:
    """The error for a server that has been away, or not ready, for too long."""
    primitive, waited = attempt.primitive, f"{max(0.0, now - attempt.silent):.3g} s"
    if isinstance(cause, ServerError):
        return Unavailable(f"{primitive}: {shown} can't serve it for {waited} ({cause}). Try again, or wait longer")
    tls = ", and does that port speak TLS" if "rediss" in shown else ""
    return Unavailable(
        f"{primitive}: no answer from {shown} for {waited} ({cause}). Is the server up and reachable from here{tls}?"
    )


def gone_ms(attempt: Attempt) -> str:
    """How long a tombstone of this attempt must stand, in ms: only one in doubt needs one."""
    return str(int(GONE_FOR * 1000)) if attempt.in_doubt else "0"


def free_text(rest: str) -> str:
    """The free text that ends a stored text or a push: it begins with " !", after words of a later version, if any.

    A version before the mark wrote nothing but the free text there.
    """
    _, mark, text = f" {rest}".partition(" !")
    return text if mark else rest


def renewal_verdict(state: Any) -> str | None:
    """Why a renewal's answer means that the lease is lost; None if it holds."""
    if state == GRANTED:
        return None
    if state != NOT_FOUND:
        return f"it was revoked: {state[1].decode(errors='replace')}"
    return "the server has no such lease any more: it was revoked by force, or the server lost it"


def quarantined(reply: Any) -> str | None:
    """The evidence, if a refusal is for a quarantine: the identity of the server that granted last."""
    holder = reply[1] if reply[0] in {QUEUED, BUSY} else None
    if isinstance(holder, bytes) and holder.startswith(QUARANTINE):
        return holder.removeprefix(QUARANTINE).partition(b">")[0].decode(errors="replace")
    return None


def held_by_another(primitive: Primitive, timeout: float, reply: Any) -> AcquireTimeout:
    """What is said to one that did not get it."""
    holder = reply[1].decode(errors="replace")
    tried = f"was not acquired within {round(timeout, 3):g} s" if timeout else "is not free"
    if not holder:
        return AcquireTimeout(f"{primitive} {tried}: others are before us in the queue")
    if quarantined(reply):
        return AcquireTimeout(
            f"{primitive} {tried}: it is in quarantine for {max(0, reply[2]) / 1000:.3g} s more, since its server was "
            "restarted or replaced, and may have lost a lease that is alive. Wait; or, if nothing is at work there, "
            'end it: .revoke("I know", force=True)'
        )
    revoked = ", whose lease is revoked and" if holder.startswith("!") else ", which"
    holder = holder.removeprefix("!")
    error = AcquireTimeout(
        f"{primitive} {tried}: it is held by {holder}{revoked} had {max(0, reply[2]) / 1000:.3g} s "
        "left when last asked. Wait longer, or see .inspect()"
    )
    error.holder = holder
    return error


def unobtainable(primitive: Primitive, code: int, reply: Any) -> LockError:
    text = reply[1].decode(errors="replace") if len(reply) > 1 and isinstance(reply[1], bytes) else ""
    if code == NO_EXPIRY:
        return ConfigError(
            f"{primitive} is held without an expiry, which interlock never does, by {text!r} in the key "
            f"{primitive.keys[0]!r}. If nobody is at work there, DEL that key; nothing was changed"
        )
    if code == WRONG_KIND:
        version_and_kind = " ".join(text.split()[:2])
        return ConfigError(
            f"{primitive}: the name is in use as something else, or by another version ({version_and_kind!r}). "
            "Use another name"
        )
    if code == LIMIT_MISMATCH:
        what, way = (
            ("parties", "") if primitive.kind == "barrier" else ("limit", ", or change it for all with set_limit()")
        )
        return ConfigError(f"{primitive} has the {what} {reply[1]}, which others use now. Give that one{way}")
    if code == BROKEN:
        return BrokenBarrier(f"{primitive}: who waits here waits in vain, since {text}")
    if code == REVOKED:
        return LeaseLost(f"{primitive} was revoked ({text}) in the moment it was handed over. Acquire it again")
    return AcquireTimeout(f"{primitive}: this attempt was given up and can't be granted any more. Acquire it again")


_RIGHTS: Final = "the server's ACL forbids it. Give this user the rights listed in docs/acl.md"


def refusal(subject: object, shown: str, text: str) -> LockError:
    """An error reply of the server, in words that tell the way out."""
    for word, error, advice in (
        ("WRONGTYPE", ConfigError, "one of its keys holds something else. Use another name or prefix"),
        ("READONLY", Unavailable, "that is a read-only replica. Connect to its primary"),
        ("NOPERM", ConfigError, _RIGHTS),
        ("ACL failure in script", ConfigError, _RIGHTS),
        ("user executing the script can't", ConfigError, _RIGHTS),
        ("non deterministic", ConfigError, "its lua-replicate-commands is off. Set it to yes (its default)"),
        ("NOAUTH", ConfigError, "a password is needed. Put it into the URL"),
        ("WRONGPASS", ConfigError, "the user name or password is wrong"),
        ("OOM", Unavailable, "the server has no memory left. Raise maxmemory or remove data"),
        ("MISCONF", Unavailable, "the server can't write to its disk"),
        ("MOVED", ConfigError, "that is one node of a cluster. Use a URL redis+cluster://"),
        ("WAITAOF", ConfigError, "fsync=True needs appendonly yes there, and Redis 7.2 or Valkey"),
        ("CROSSSLOT", ConfigError, "the keys are in different slots. Give them the same hash tag"),
        *((passing, Unavailable, "the server is not ready. Try again") for passing in _PASSING),
    ):
        if word in text:
            return error(f"{subject} at {shown}: {advice} [{text}]")
    return LockError(f"{subject} at {shown}: the server refused [{text}]")
