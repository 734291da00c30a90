"""All sessions of this process that are not closed: what they hold and wait for together, and whether they report."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from interlock._people.observer import on_switch
from interlock._protocol.snapshot import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from interlock._client.acquiring import Core
    from interlock._client.book import Book
    from interlock._client.grant import Attempt
    from interlock._client.renewal import Renewer
    from interlock._client.reports import Reports
    from interlock._client.waiting import Waiters
    from interlock._people.registry import Registry
    from interlock._protocol.resource import Resource
    from interlock._protocol.runtime import Runtime
    from interlock._protocol.server import Server


class OpenSession(Protocol):
    """What the process has to know of a `Session`."""

    runtime: Runtime
    core: Core
    book: Book
    renewer: Renewer
    waiters: Waiters
    registry: Registry
    reports: Reports
    exit_connection: Callable[[], Server]

    def report(self) -> None: ...
    def stop_granting(self, *, announce: bool) -> list[Attempt]: ...
    async def release_all(self, attempts: list[Attempt], server: Server, until: float) -> None: ...
    def reset_after_fork(self) -> None: ...


class Sessions(set[OpenSession]):
    """A set that can have weak references."""


open_sessions: Sessions = Sessions()


def all_books() -> list[Book]:
    """The leases of all clients in this process."""
    return [session.book for session in snapshot(open_sessions)]


def all_waits() -> Iterator[Attempt]:
    """What the callers of all clients in this process wait for."""
    for session in snapshot(open_sessions):
        yield from snapshot(session.waiters.registered.values())
        yield from session.core.cohorts.waiting()


def waiting() -> Counter[Resource]:
    """How many callers wait, by what they wait for, in all open sessions. Any thread may call this."""
    waiters: Counter[Resource] = Counter()
    for session in snapshot(open_sessions):
        attempts = snapshot(session.waiters.registered.values())
        waiters.update(each.resource for each in attempts if each.last_queued is not None and not each.abandoned)
        for cohort in snapshot(session.core.cohorts.by_key.values()):
            waiters.update(each.resource for each in snapshot(cohort.waiting) if not each.abandoned)
    return waiters


def _report() -> None:
    """Let all sessions report, or report no more."""
    for session in snapshot(open_sessions):
        session.report()


on_switch.append(_report)
