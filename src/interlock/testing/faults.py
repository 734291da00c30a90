"""Faults of leases: a test takes a lease away from the code that it tests, or stops its renewals.

Theory. A fault has two halves. The first one is real: a script of this package, or `revoke` of the lock's own script,
changes the private server over a connection of the fault's own. The second one only saves time: in production a holder
learns of the change from a push, a timer or its next renewal; here the test asks the server in the holder's place, and
gives the reply to the same functions that the holder's workers call. So the holder sees what it sees in production, and
sees it before the call returns.

Rules.
(a) Only a lease on a private server of this process can be lost or paused. The check sends nothing.
(b) One plain function serves threads and asyncio: it blocks for a round trip to the server, which is a process of this
    machine. What belongs to an event loop happens in that loop, whichever thread calls.
(c) A lease that expires ends for its holder first, then in the server, so that no other holder begins before.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from interlock._api.lease import LeaseCore
from interlock._api.multilease import MultiLeaseCore
from interlock._client.renewal import Answers, _renew_message, _ttl_ms
from interlock._protocol.names import duration
from interlock._protocol.run_to_end import run
from interlock._protocol.server import Disconnected, ServerError
from interlock._protocol.snapshot import snapshot
from interlock._protocol.timing import FOREVER
from interlock._session.open_sessions import open_sessions
from interlock.embedded import _processes
from interlock.errors import ConfigError, Unavailable
from interlock.primitives.messages import Failed, Gone, Renewed, RenewReply, RevokeCall, Revoked, reason_lost
from interlock.primitives.scripts import load

from .server import is_at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from interlock import aio, threads
    from interlock._client.acquiring import Core
    from interlock._client.grant import Grant, Hold
    from interlock._client.renewal import Renewer, SendRenewals
    from interlock._connect.address import Address
    from interlock._protocol.resource import Script
    from interlock._protocol.server import Message, Reply
    from interlock._protocol.server import Server as AnyServer
    from interlock._quarantine.server_history import ServerHistory
    from interlock._session.open_sessions import OpenSession
    from interlock.embedded import Server
    from interlock.primitives.messages import RenewState

    Lease: TypeAlias = threads.Lease | threads.MultiLease | aio.Lease | aio.MultiLease

__all__ = ["Loss", "lose_lease", "pause_renewal"]

Loss: TypeAlias = Literal["expired", "revoked", "forgotten"]

LOSSES: Final = ("expired", "revoked", "forgotten")
WHY: Final = "a test called lose_lease()"  # the reason of a revocation
TIMEOUT: Final = 5.0  # seconds that the server, or the event loop of the lease, may take
CALLBACK_TIMEOUT: Final = 1.0  # seconds that lose_lease() waits for the end of on_lost
MIN_REMAINING: Final = 0.01  # seconds
PAUSED: Final = b"a test has paused the renewals of this lease"
_pausing = threading.Lock()  # for changes of what is paused


def lose_lease(lease: Lease | str, how: Loss = "expired") -> None:
    """Let the holder lose this lease. When the call returns, the loss has been reported, as it is in production.

    Args:
        lease: the lease; or the name of its lock, if the code under test holds the lease in this process. Of several
            leases as one, all are lost.
        how: "expired": its ttl passed without a renewal, as after an outage, or in a process that stood still; others
            can acquire the lock from now on (a server that is paused keeps the lease for the rest of its ttl).
            "revoked": somebody called `revoke()`; others can acquire the lock once the holder has left. "forgotten":
            the server lost the lock with its queue, as by an eviction or FLUSHALL; all holders of a semaphore or
            read-write lock lose it, but only this lease is reported at once.

    Afterwards `lease.lost` is set, `ensure()` raises LeaseLost, and so will the end of the `with`. In threads `on_lost`
    has run (the call waits a second for it at most). In asyncio the task inside is cancelled, and `on_lost` called, at
    the next `await`: with a call from another thread that has happened, too.

    Blocks for about a millisecond. Raises ConfigError if there is no such lease, or if it is not on a private server of
    this process; Unavailable if that server does not answer.
    """
    if how not in LOSSES:
        raise ConfigError(f"lose_lease(): how must be one of {', '.join(map(repr, LOSSES))}, not {how!r}")
    before = {*threading.enumerate()}
    for held in _find(lease, "lose_lease"):
        if held.grant.end_reason is None:
            held.lose(how)
    for thread in threading.enumerate():
        if thread.name == "interlock-callback" and thread not in before:
            thread.join(CALLBACK_TIMEOUT)


@contextlib.contextmanager
def pause_renewal(lease: Lease | str, *, remaining: float | None = None) -> Generator[None]:
    """In this `with` no renewal of this lease gets through: it is in JEOPARDY at once, and LOST at its deadline.

    The deadline is up to a ttl away. With `remaining` the lease ends after so many seconds at the latest, whatever ttl
    the code under test has given it. At the end of the `with` a lease that has not ended is renewed: it is HELD again.

    `lease` as for `lose_lease()`. Only renewals are paused: `extend()`, `execute()` and `release()` reach the server.
    Raises ConfigError if there is no such lease, if it is never renewed, or if it is not on a private server of this
    process; Unavailable if there is a `remaining`, and that server does not answer.
    """
    if remaining is not None:
        duration(remaining, "remaining", minimum=MIN_REMAINING)
    paused = _find(lease, "pause_renewal")
    for held in paused:
        if not held.grant.hold.renews:
            raise ConfigError(
                f"pause_renewal(): the lease on {held.grant.resource} is never renewed (renew=False). It ends with its "
                "ttl; to end it now, call lose_lease()"
            )
    try:
        for held in paused:
            held.pause(remaining)
        yield
    finally:
        for held in paused:
            held.resume()


class Pause:
    """Stands before the questions of one renewer: each renewal of a paused lease fails, and no server hears of it."""

    def __init__(self, send_renewals: SendRenewals) -> None:
        self.send_renewals = send_renewals
        self.paused: frozenset[Hold] = frozenset()

    async def __call__(self, server: AnyServer, holds: list[Hold], silent_nodes: dict[object, bytes]) -> Answers:
        """See `interlock._client.renewal.send_renewals`."""
        paused = [hold for hold in holds if hold in self.paused]
        answers = await self.send_renewals(server, [hold for hold in holds if hold not in self.paused], silent_nodes)
        states = [
            (hold, Failed(PAUSED) if hold in self.paused else state)  # the request may have been under way
            for hold, state in answers.states
        ]
        return answers._replace(states=[*((hold, Failed(PAUSED)) for hold in paused), *states])


def _pause_of(renewer: Renewer) -> Pause:
    """The Pause that stands before the questions of this renewer; made if there is none. Under `_pausing`."""
    if not isinstance(renewer.send_renewals, Pause):
        renewer.send_renewals = Pause(renewer.send_renewals)
    return renewer.send_renewals


class Held(NamedTuple):
    """A lease that this process holds on a private server."""

    grant: Grant
    core: Core
    server: Server
    address: Address
    history: ServerHistory

    def lose(self, how: Loss) -> None:
        """End the lease in the server, and report the loss to its holder."""
        resource, token = self.grant.resource, self.grant.token
        if how == "expired":
            why = self.grant.reason_ended(FOREVER)
            assert why is not None
            self._report_lost(why)
            if self._server_answers():
                self._call((_faults(), resource.keys, ("shorten", token, "0")))
            return
        if how == "revoked":
            self._call((resource.script, resource.keys, RevokeCall(token, "0", WHY).encode()))
        else:
            self._call((_faults(), resource.keys, ("forget", token)))
        state, _ = self._ask_in_place_of_holder()
        assert isinstance(state, Gone | Revoked), f"the server still has the lease on {resource}: {state}"
        self._report_lost(reason_lost(state))

    def pause(self, remaining: float | None) -> None:
        """Let each renewal fail from now on."""
        hold, now = self.grant.hold, self.core.runtime.now

        def fail() -> None:
            with _pausing:
                for renewer in self._renewers():
                    _pause_of(renewer).paused |= {hold}
            hold.renewal_failing = True
            if remaining is not None:
                hold.deadline = min(hold.deadline, now() + remaining)
            self.core.book.put_aside(hold)  # its renewal fails, and is due again at the deadline at the latest
            self.core.ends.wake_renewer_at(now())

        self._in_its_loop(fail)
        if remaining is not None and self._server_answers():
            ms_left = str(math.ceil(remaining * 1000))
            self._call((_faults(), self.grant.resource.keys, ("shorten", self.grant.token, ms_left)))

    def resume(self) -> None:
        """Let renewals through again, and renew the lease at once, unless it has ended or the server is silent."""
        grant = self.grant
        with _pausing:
            for renewer in self._renewers():
                _pause_of(renewer).paused -= {grant.hold}
        if grant.reason_ended(self.core.runtime.now()) is not None or not self._server_answers():
            return
        try:
            state, sent = self._ask_in_place_of_holder()
        except Unavailable:  # its own renewals go on to try
            return
        if isinstance(state, Gone | Revoked):
            self._report_lost(reason_lost(state))
        elif isinstance(state, Renewed):
            drift = self.core.server.drift
            grant.hold.extend_deadline(sent, _ttl_ms(grant.hold, sent, drift) / 1000, drift)

    def _report_lost(self, why: str) -> None:
        reports = self.core.ends.reports
        has_loop = hasattr(self.core.runtime, "loop")

        def lose() -> None:
            self.core.ends.lose(self.grant, why)
            if has_loop:  # the loop has to turn before its task makes the reports
                reports.make_all()

        self._in_its_loop(lose)
        if not has_loop:
            told = threading.Event()
            reports.add(told.set)
            told.wait(CALLBACK_TIMEOUT)

    def _renewers(self) -> Iterator[Renewer]:
        """The renewer of its session, unless that is closed."""
        return (session.renewer for session in snapshot(open_sessions) if session.core is self.core)

    def _ask_in_place_of_holder(self) -> tuple[RenewState, float]:
        """Send the renewal of this lease. Returns what the server says of it, and when the request was sent."""
        sent = self.core.runtime.now()
        reply = self._call(_renew_message([self.grant.hold], sent, self.core.server.drift))
        return RenewReply.parse(reply).states[0], sent

    def _server_answers(self) -> bool:
        """Whether the server runs and was not paused."""
        return _processes[self.server][-1].poll() is None and not getattr(self.server, "_is_paused", False)

    def _call(self, message: Message) -> Reply:
        """The reply of the server to this message, over a connection of its own. Raises Unavailable."""
        from interlock._servers.single import SingleServer  # noqa: PLC0415 (with redis-py)
        from interlock._transports.blocking.pool import BlockingPool  # noqa: PLC0415
        from interlock._transports.blocking.runtime import ThreadRuntime  # noqa: PLC0415

        if not self._server_answers():
            raise Unavailable(
                f"{self.grant.resource}: this fault needs the private server, which is paused or was killed. Let it "
                'run again first; or take how="expired", which needs no server'
            )
        runtime = ThreadRuntime()
        server = SingleServer(
            self.address,
            self.history,
            runtime,
            lambda address, history, primacy: BlockingPool(address, history, primacy, runtime),
        )
        try:
            return run(server.call(*message, runtime.now() + TIMEOUT))
        except (Disconnected, ServerError) as error:
            raise Unavailable(f"{self.grant.resource}: the private server does not answer: {error}") from error
        finally:
            run(server.close())

    def _in_its_loop(self, step: Callable[[], None]) -> None:
        """Take this step where the lease belongs: in its event loop, if it has one, and wait until that is done."""
        loop: asyncio.AbstractEventLoop | None = getattr(self.core.runtime, "loop", None)
        if loop is None or not loop.is_running() or loop is asyncio._get_running_loop():
            step()
            return
        done: Future[None] = Future()

        def take() -> None:
            try:
                step()
            except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
                done.set_exception(error)
            else:
                loop.call_soon(done.set_result, None)  # after what the step has scheduled

        loop.call_soon_threadsafe(take)
        try:
            done.result(TIMEOUT)
        except TimeoutError:
            raise Unavailable(
                f"{self.grant.resource}: the event loop that holds the lease has run nothing for {TIMEOUT:g} s. Call "
                "the fault from a task of that loop, or do not block the loop"
            ) from None


def _faults() -> Script:
    return load("faults", "interlock.testing")


def _find(lease: Lease | LeaseCore | str, fault: str) -> list[Held]:
    """The leases that the user means. Raises ConfigError."""
    if isinstance(lease, str):
        return [_named(lease, fault)]
    if isinstance(lease, MultiLeaseCore):
        return [held for each in lease._leases.values() for held in _find(each, fault)]
    if not isinstance(lease, LeaseCore):  # pyright: ignore[reportUnnecessaryIsInstance]  # not all users have one
        raise ConfigError(
            f"{fault}() takes a lease or the name of its lock, not {lease!r}. acquire() and `with` give the lease"
        )
    grant, core = lease._grant, lease._core
    if grant.end_reason is not None and lease.state != "lost":
        raise ConfigError(
            f"{fault}(): the lease on {grant.resource} has ended: {grant.end_reason}. Call {fault}() while it is held: "
            "from inside of the `with`, or from what the code under test calls there"
        )
    return [_held(grant, core, fault)]


def _named(name: str, fault: str) -> Held:
    """The one lease on the lock of this name. Raises ConfigError."""
    held = [
        (grant, session.core)
        for session in list(open_sessions)
        if not _is_over(session)
        for grant in dict.fromkeys(session.book.held())
        if grant.resource.name == name and grant.reason_ended(session.runtime.now()) is None
    ]
    if not held:
        raise ConfigError(
            f"{fault}(): this process holds no lease on {name!r}. Call {fault}() while the code under test holds it: "
            "from what that code calls in its critical section. To end the lease of another process, revoke() the lock"
        )
    if len(held) > 1:
        raise ConfigError(
            f"{fault}(): this process holds {len(held)} leases on {name!r}. Give the lease itself instead of the name"
        )
    return _held(*held[0], fault)


def _is_over(session: OpenSession) -> bool:
    """Whether the event loop of this session was closed: what it holds, it holds for nobody."""
    loop: asyncio.AbstractEventLoop | None = getattr(session.runtime, "loop", None)
    return loop is not None and loop.is_closed()


def _held(grant: Grant, core: Core, fault: str) -> Held:
    """This lease with its private server. Raises ConfigError if it is on any other server."""
    from interlock._servers.single import SingleServer  # noqa: PLC0415 (with redis-py)

    for server in list(_processes):
        if isinstance(core.server, SingleServer) and is_at(server, core.server.address):
            return Held(grant, core, server, core.server.address, core.server.history)
    raise ConfigError(
        f"{fault}(): the lease on {grant.resource} is on {core.server.display_url}, which is no private server of this "
        "process, and faults are for tests only. Use the fixture interlock_server, or "
        "interlock.testing.BreakableServer(), and give its .url to the Interlock"
    )
