"""The session of one client: all its synchronizers share a server, a name, and workers in the background.

There are six tasks: report the ends of leases, renew leases, send the heartbeats of waiters, undo attempts, write into
the registry what the session holds and waits for, and tell a user's code what the others found. Each task has a worker
of its own, which starts when its task is due for the first time. So a silent server delays only the work that needs its
replies, and slow code of a user only the reports to it; the end of a lease needs neither, and the worker of ends
reports it in time.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, Any, Final

from interlock._client.acquiring import Core
from interlock._client.book import Book
from interlock._client.cohorts import Cohorts
from interlock._client.grant import Attempt, Grant
from interlock._client.lease_ends import DROPPED, LeaseEnds
from interlock._client.owed import Owed
from interlock._client.renewal import Renewer
from interlock._client.reports import Reports
from interlock._client.retries import Requests
from interlock._client.undo import Undo, release_message
from interlock._client.unread_releases import UnreadReleases
from interlock._client.waiting import Waiters
from interlock._client.worker import Worker
from interlock._people import grant_log, observer
from interlock._people.deadlock_search import DeadlockSearch
from interlock._people.long_waits import LongWaits
from interlock._people.looks import Looks
from interlock._people.observed import BY_CALLERS, by_workers
from interlock._people.registry import Registry
from interlock._people.timeouts import Timeouts
from interlock._people.views import Views
from interlock._protocol import forks
from interlock._protocol.names import token_part
from interlock._protocol.retry_for import BY_TIMEOUT
from interlock._protocol.snapshot import snapshot
from interlock._protocol.timing import FOREVER, TRY_FOR
from interlock._protocol.tokens import Process
from interlock._session.fork_and_exit import CLOSE_TIMEOUT, track
from interlock._session.open_sessions import all_books, all_waits, open_sessions
from interlock.primitives.codes import free_text

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from interlock._client.worker import PeriodicTask
    from interlock._protocol.resource import Resource
    from interlock._protocol.retry_for import RetryFor
    from interlock._protocol.server import Server

RELEASE_BATCH: Final = 500  # releases in one write


class Session:
    """One client: its core and its workers. It is the `PushHandler` of its server."""

    def __init__(
        self,
        server: Server,
        label: str | None,
        caller: Callable[[Resource], tuple[str, weakref.ref[Any] | None]],
        max_ttl: float,
        exit_connection: Callable[[], Server],
        try_for: float = TRY_FOR,
        frames_to_user: int = 1,
        *,
        retry_for: RetryFor = BY_TIMEOUT,
        registry: bool = True,
    ) -> None:
        self.server = server
        self.runtime = server.runtime
        self.label = label
        self.caller = caller  # see Core
        self.max_ttl = max_ttl
        self.try_for = try_for
        self.retry_for = retry_for
        self.frames_to_user = frames_to_user  # see Core
        self.writes_registry = registry
        self.closed = False
        self.exit_connection = exit_connection  # a server that works without a loop, when the process exits
        self._start()
        track(self)
        self.report()  # second: an observer that is added from here on finds this session
        if self.requests.fork_count != forks.count:  # a signal handler has forked before `track`
            self._start()

    def _start(self) -> None:
        server = self.server
        label = token_part(self.label) if self.label else ""
        process = Process(label, token_part(socket.gethostname()), os.getpid())
        self.requests = requests = Requests(server, self.retry_for)
        requests.closed = self.closed
        self.channel = f"interlock:{secrets.token_hex(8)}"
        ends, renewal, waiters, undo, registry, reports = self.workers = [
            Worker(self.runtime, f"interlock-worker-{task}", requests, self.start_workers)
            for task in ("ends", "renewal", "waiters", "undo", "registry", "reports")
        ]
        self.waiters = waiters.task = Waiters(server, waiters.wake_at, ends.wake_at, self._look_at_waiting)
        self.owed = Owed()
        self.undo = Undo(server, self.owed, undo.wake_at)
        self.reports = reports.task = Reports(self.runtime, reports.wake_at)
        self.book = Book(server, ends)
        self.cohorts = Cohorts(self.runtime, self.book, ends.wake_at)
        self.ends = ends.task = LeaseEnds(
            self.book, self.cohorts, self.undo, self.waiters, self.reports, renewal.wake_at, self._look_at_held
        )
        self.renewer = renewal.task = Renewer(server, self.book, self.ends)
        self.unread_releases = undo.task = UnreadReleases(server, self.undo, self.ends, undo.wake_at)
        self.registry = Registry(
            server,
            self.waiters,
            self.book,
            self.cohorts,
            registry.wake_at,
            process,
            self.channel.rpartition(":")[2],
            all_books,
            writes=self.writes_registry,
        )
        self.views = Views(self.registry)
        self.deadlocks = DeadlockSearch(self.registry, self.views)
        registry.task = Looks(
            self.registry,
            LongWaits(self.runtime, self.registry.holding, self.cohorts.blocking, self.deadlocks.say),
        )
        grant_log.look()
        self.core = Core(
            requests,
            self.waiters,
            self.ends,
            self.unread_releases,
            str(process),
            self.caller,
            self.max_ttl,
            self.try_for,
            self.frames_to_user,
            all_books=all_books,
            all_waits=all_waits,
            say_more=Timeouts(self.registry, self.deadlocks).say_more,
        )

    def _look_at_waiting(self) -> None:
        """Let the registry look at what waits. The worker of heartbeats calls this with each round."""
        self.registry.look()

    def _look_at_held(self) -> None:
        """Let the log of grants and the registry look. The worker of ends calls this while a lease is held."""
        grant_log.look()
        if self.writes_registry:
            self.registry.look()
        else:
            self.registry.look_for_cohorts()

    def add_worker(self, name: str, task: PeriodicTask) -> Worker:
        """Run one more task whenever it is due, until this session is closed or a fork makes it begin anew."""
        worker = Worker(self.runtime, f"interlock-worker-{name}", self.requests, self.start_workers)
        worker.task = task
        self.workers.append(worker)
        return worker

    # The calls of the server

    def subscribed(self, channel: str | None = None) -> None:
        """The subscription of this channel (None: of all) began or ended: the client may have missed pushes before."""
        self.waiters.subscription_changed(channel)
        self.book.subscription_changed(channel)

    def dispatch_push(self, payload: bytes) -> None:
        """Handle a push to this client: a grant or a revocation."""
        verb, token, rest = (payload.decode(errors="replace") + "  ").split(" ", 2)
        if verb == "granted":
            self.waiters.on_granted(token)
        elif verb == "revoked":
            self.ends.revoked(token, free_text(rest.rstrip()))

    def report(self) -> None:
        """Report to the observers from now on, or no more if there are none."""
        observes = bool(observer.observers)
        self.core.points.people = BY_CALLERS if observes else None
        self.ends.points.people = by_workers(self.reports) if observes else None

    def start_workers(self) -> None:
        """Start each worker whose task is due at some time, if it could not start before or was cancelled."""
        for worker in self.workers:
            if not worker.started and (due := worker.task.due()) != FOREVER:
                worker.wake_at(due)

    # The end of the session

    def stop_granting(self, *, announce: bool) -> list[Attempt]:
        """Stop granting. Returns the attempts to release: leases, waiters, and undos that are not done.

        `announce` sets the `ended` events of the leases, which needs their asyncio loop to be running.
        """
        self.closed = self.requests.closed = True
        held, waiting = self.book.held(), self.waiters.claims()
        for grant in held:
            self.book.remove(grant.hold)
            if announce:
                grant.mark_released()
            else:
                grant.end(Grant.RELEASED)
            if (people := self.ends.points.people) is not None:
                people.released(grant, self.runtime.now())
        # Other threads and finalizers go on meanwhile. They move a claim from what is held to `orphans`, and from there
        # to `dropped` or `owed`; a claim is in its next place before it leaves the former one. This thread reads the
        # places in that order, so it misses none.
        for hold, why in self.ends.end_orphans():
            if why != DROPPED:
                self.owed[hold.token] = hold.claim
        dropped = [attempt for _, attempt in snapshot(self.ends.dropped)]
        self.unread_releases.forget_all()
        return [*(grant.hold.claim for grant in held), *dropped, *waiting, *list(self.owed.values())]

    async def release_all(self, attempts: list[Attempt], server: Server, until: float) -> None:
        """Release these attempts, take them out of their queues, and delete the session's entry in the registry.

        Returns by the time `until` at the latest.
        """
        messages = [release_message(attempt) for attempt in attempts]
        for i in range(0, len(messages), RELEASE_BATCH):
            replies = await server.call_many(messages[i : i + RELEASE_BATCH], until)
            if all(isinstance(reply, Exception) for reply in replies):
                break
        if server is self.server:  # else no loop runs any more in which a report could end
            await self.registry.end(until)
        if self.registry.has_entry:
            await server.call_many([self.registry.leave_message()], until)

    async def close(self) -> None:
        """Release all leases and leave every queue, in bounded time; wake all waiters, and end the workers."""
        now = self.runtime.now()
        try:
            await self.unread_releases.settle(FOREVER, now + CLOSE_TIMEOUT / 2)
        finally:
            try:
                await self._release_all_and_end(now + CLOSE_TIMEOUT)
            finally:
                open_sessions.discard(self)  # last: a child that another thread forks meanwhile must reset it

    async def _release_all_and_end(self, until: float) -> None:
        try:
            await self.release_all(self.stop_granting(announce=True), self.server, until)
        finally:
            self.waiters.wake_all()
            self.cohorts.wake_all()
            for worker in self.workers:
                worker.wakeup.set()
            self.reports.end()  # last: it runs code of a user

    def abandon(self) -> list[Attempt]:
        """Note that the asyncio loop ended without a close. Returns the attempts to undo now.

        Leases stay held: the session releases them when the process exits.
        """
        if self.requests.is_of_parent:
            return []
        if not self.book.held():
            open_sessions.discard(self)
        orphans = [grant.hold.claim for grant, why in snapshot(self.ends.orphans) if why != DROPPED]
        self.reports.end()
        return [*list(self.owed.values()), *orphans, *self.waiters.claims()]

    def reset_after_fork(self) -> None:
        """In a child after a fork: mark all leases as ended, end all calls of the parent, and start with no waiters.

        Nothing of the former client sends anything in this process, and no worker of it starts. A session of asyncio
        does not start again: its loop shares what it watches (epoll) with the parent's.
        """
        for grant in self.book.held():
            grant.end_reason = Grant.FORKED
        self.requests.closed = True
        can_go_on = self.runtime.reset_after_fork()
        self.server.reset_after_fork()
        self.waiters.wake_all()  # a signal handler may fork while its thread waits
        self.cohorts.wake_all()
        if not can_go_on:
            open_sessions.discard(self)
            return
        self._start()
        self.report()
