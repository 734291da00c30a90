"""Gathers what `interlock top` shows from the server. Knows nothing of a terminal.

Theory. A person watches while something is wrong, so the server may be away: then a snapshot keeps what was known, and
says since when nothing new arrives. A thread of its own gathers, so that the view answers keys meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from interlock._protocol.run_to_end import run
from interlock._protocol.server import Disconnected
from interlock.cli.lookup import MOST, View, look, look_at_all
from interlock.cli.options import connect
from interlock.errors import LockError
from interlock.primitives.deadlocks import Deadlocked, ThingName, find

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock.primitives.registry import Listed
    from interlock.threads import Interlock

__all__ = ["Gatherer", "Snapshot", "Source"]


@dataclass(frozen=True)
class Snapshot:
    """What was known at one moment."""

    url: str
    """Of the server, without its password."""
    taken_at: float = 0.0
    """When the server last said something, by time.monotonic()."""
    ping: float | None = None
    """Seconds of a round trip; None before the first one."""
    interval: float = 60.0
    """Seconds after which a newer one should be there."""
    error: str = ""
    """Why there is nothing newer; "" if there is."""
    things: tuple[Listed, ...] = ()
    deadlocks: tuple[Deadlocked, ...] = ()
    processes: int = 0
    """How many processes hold something or wait."""
    details: View | None = None
    """What the server says of the name whose details are shown."""
    clients: int | None = None
    """How many clients are connected, to all servers together; None if a server does not say."""
    rows: dict[tuple[str, str], list[Listed]] = field(
        default_factory=dict[tuple[str, str], list["Listed"]], init=False, repr=False, compare=False
    )
    """The rows of the view by order and filter, once it has made them."""

    @property
    def holding(self) -> int:
        """How many things are held."""
        return sum(bool(each.holders) for each in self.things)

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return sum(each.waiting for each in self.things)

    @property
    def waiting_processes(self) -> int:
        """In how many processes they wait."""
        return len({party.process for each in self.things for party in each.waiters})

    @property
    def silent(self) -> int:
        """How many processes hold something and are silent."""
        return len({party.process for each in self.things for party in each.holders if party.is_silent})

    def as_json(self) -> dict[str, Any]:
        """The snapshot for --json."""
        return {
            "url": self.url,
            "ping": self.ping,
            "processes": self.processes,
            "clients": self.clients,
            "deadlocks": [_deadlock_as_json(each) for each in self.deadlocks],
            "things": [asdict(each) for each in self.things],
        }


def _deadlock_as_json(deadlock: Deadlocked) -> dict[str, Any]:
    return {
        "seconds": deadlock.seconds,
        "certain": deadlock.certain,
        "behind": deadlock.behind,
        "members": [
            {
                "waits_for": member.thing._asdict() | asdict(member.waiter),
                "holds": [held.thing._asdict() | asdict(held.party) for held in member.holds],
            }
            for member in deadlock.members
        ],
    }


@dataclass
class Source:
    """Where the snapshots are from: the server of these URLs."""

    urls: Sequence[str]
    pattern: str = "*"
    prefix: str | None = None
    """Only the things of this prefix; None: of all."""
    _by_prefix: dict[str, Interlock] = field(default_factory=dict[str, "Interlock"])

    def locks(self, prefix: str = "lock:") -> Interlock:
        """The Interlock of this prefix. Raises ConfigError."""
        if prefix not in self._by_prefix:
            self._by_prefix[prefix] = connect(self.urls, prefix, "interlock top")
        return self._by_prefix[prefix]

    def gather(self, details: ThingName | None = None) -> Snapshot:
        """What the server knows now. Raises Unavailable or ConfigError."""
        locks = self.locks()
        every = look_at_all(locks)
        ping = locks.ping()  # over the connection that the list has opened
        return Snapshot(
            url=self.url,
            taken_at=time.monotonic(),
            ping=ping,
            things=tuple(each for each in every if self._is_wanted(each)),
            deadlocks=tuple(find(every)),  # of any name: callers that want other names may wait behind a deadlock
            processes=len({party.process for each in every for party in (*each.holders, *each.waiters)}),
            details=self._details(details),
            clients=self._clients(locks),
        )

    @staticmethod
    def _clients(locks: Interlock) -> int | None:
        server = locks._session.server
        with contextlib.suppress(LockError, Disconnected):
            return run(server.connected_clients(server.runtime.now() + locks.try_for))
        return None

    def _details(self, thing: ThingName | None) -> View | None:
        if thing is not None:
            with contextlib.suppress(LockError):  # the rest of the snapshot is good
                return look(self.locks(thing.prefix), thing.name, MOST)
        return None

    def _is_wanted(self, listed: Listed) -> bool:
        return fnmatchcase(listed.name, self.pattern) and self.prefix in {None, listed.prefix}

    @property
    def url(self) -> str:
        """The server, without its password."""
        return self.locks()._session.server.display_url

    def close(self) -> None:
        """Close all connections."""
        for locks in self._by_prefix.values():
            with contextlib.suppress(LockError):
                locks.close()


class Gatherer:
    """Gathers again and again, in a thread, and calls `on_news` after each try."""

    def __init__(self, source: Source, interval: float, on_news: Callable[[], object]) -> None:
        self.source = source
        self.interval = interval
        self.on_news = on_news
        self.latest = Snapshot(source.url, time.monotonic(), interval=interval)
        self.details: ThingName | None = None  # of which the view shows more
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._run, name="interlock-top", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def hurry(self, details: ThingName | None) -> None:
        """Gather at once, with these details."""
        self.details = details
        self._now.set()

    def _run(self) -> None:
        while True:
            self._now.clear()
            details = self.details
            try:
                self.latest = replace(self.source.gather(details), interval=self.interval)
            except Exception as error:  # noqa: BLE001 (whatever it is, the view must go on)
                self.latest = replace(self.latest, error=str(error) or type(error).__name__, details=None)
            self.on_news()
            self._now.wait(self.interval)
