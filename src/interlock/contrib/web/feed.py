"""One reader for all viewers of a process: it looks at the fleet about once a second, and says what has changed.

Theory. Ten viewers must cost as much as one, and no viewer nothing. So one thread looks, while somebody watches, and
encodes each difference once. A *topic* is what one page shows: all names, one name, processes, audit, health. A topic
numbers its messages. A viewer that has missed some gets the whole state, so no viewer misses a change.

Rules. (a) The thread begins with the first viewer, and ends `LINGER` after the last one. Then it forgets everything but
the pasts. (b) It has connections of its own, and runs beside the event loop of its host. (c) A message says what the
page can't read, or which error there was. The last picture stays, with the time at which it was true. (d) A viewer that
polls counts as one for `POLLS` after its question.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from interlock._people.fleet import Fleet, Look
from interlock._people.revocation import audit
from interlock._people.views import MOST, Name
from interlock._protocol.forks import KNOWN, after_fork, notice
from interlock._protocol.log import log
from interlock._protocol.run_to_end import run
from interlock._protocol.snapshot import snapshot
from interlock.contrib.web.past import Pasts
from interlock.contrib.web.rows import deadlock_row, details_of, process_rows, row_of, text
from interlock.errors import LockError
from interlock.threads import Interlock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = ["AUDIT", "HEALTH", "NOW", "PROCESSES", "Feed", "topic_of_lock"]

NOW: Final = "now"
PROCESSES: Final = "processes"
AUDIT: Final = "audit"
HEALTH: Final = "health"
LOCK: Final = "lock"
LINGER: Final = 30.0  # seconds that the reader goes on without a viewer: for the next page, for a reconnect
POLLS: Final = 10.0  # seconds for which a viewer that polls counts
KEPT: Final = 30  # differences that a topic keeps, for viewers that are late
OF_PROCESS: Final = 20  # leases, and waits, of one process
SHOWN: Final = 500  # holders, and waiters, of one name
REVOCATIONS: Final = 100
AUDIT_INTERVAL: Final = 3.0  # seconds between two questions, while somebody looks
HEALTH_INTERVAL: Final = 60.0
CLOCKS: Final = 5.0  # seconds between the server's clock and this machine's that are worth a line
PRUNE: Final = 100  # looks between two searches for pasts that say nothing


def topic_of_lock(name: Name) -> str:
    """The topic of one name."""
    return json.dumps([LOCK, *name])


@dataclass
class Topic:
    """What one page shows."""

    name: Name | None = None
    """Of the lock that this topic is about; None if it is about more."""
    version: int = 0
    first: int = 0
    """The version before the first message: a viewer with an older one gets the whole state."""
    whole: dict[str, Any] = field(default_factory=dict[str, Any])
    log: deque[tuple[int, bytes]] = field(default_factory=lambda: deque[tuple[int, bytes]](maxlen=KEPT))
    encoded: tuple[int, bytes] = (0, b"")
    listeners: set[Callable[[], object]] = field(default_factory=set["Callable[[], object]"])
    polled_until: float = 0.0
    due: float = 0.0
    """When it is to be asked about again."""
    change: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the next message says beside the head."""

    @property
    def is_watched(self) -> bool:
        """Whether anybody looks at it."""
        return bool(self.listeners) or time.monotonic() < self.polled_until


class Feed:
    """What the viewers of this process see. All methods may be called by any thread."""

    def __init__(self, target: Any, *, label: str, examine: Callable[[], list[dict[str, str]]] | None = None) -> None:
        """`target`: what an Interlock takes, or its address. `examine`: what the doctor finds, for the health page."""
        self.target, self.label, self.examine = target, label, examine
        self._begin_anew()
        _feeds.add(self)

    def _begin_anew(self) -> None:
        """Know nothing, as at the start: also in a process that was forked, where another thread may hold the mutex."""
        self.topics: dict[str, Topic] = {}
        self.pasts = Pasts()
        self.url = ""
        self._rows: dict[int, dict[str, Any]] = {}
        self._numbers: dict[Name, int] = {}
        self._gone: list[int] = []  # numbers of rows that are no more, of which no message has told yet
        self._next_number = secrets.randbelow(2**52)  # so that a row of another process never has the same; exact in JS
        self._own_mutex = threading.RLock()
        self._news = threading.Condition(self._own_mutex)
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._locks: Interlock | None = None
        self._head: dict[str, Any] = {"error": "", "live": 0.0, "notices": []}
        self._findings: dict[str, Any] = {}
        self._examine_at = 0.0
        self._looks = 0
        self._epoch = secrets.token_hex(4)  # a version of another process, or of before a restart, says nothing here
        self._version = 0
        self._closing = False

    @property
    def _mutex(self) -> threading.RLock:
        if not KNOWN[0]:
            notice()  # then this feed begins anew
        return self._own_mutex

    # For viewers

    def listen(self, topic: str, listener: Callable[[], object]) -> None:
        """Call `listener` after each look, until leave(). Any thread may call it, and it must not block."""
        with self._mutex:
            found = self._topic(topic)
            self._begin(is_new=not found.is_watched)
            found.listeners.add(listener)

    def leave(self, topic: str, listener: Callable[[], object]) -> None:
        """The opposite of listen()."""
        with self._mutex:
            if (found := self.topics.get(topic)) is not None:
                found.listeners.discard(listener)
                found.polled_until = max(found.polled_until, time.monotonic() + POLLS)  # its next stream begins soon

    def poll(self, topic: str, version: str, timeout: float = 0.0) -> list[bytes]:
        """As `after`, for a viewer that asks again and again. Waits for news for `timeout` seconds at most."""
        until = time.monotonic() + timeout
        with self._mutex:
            found = self._topic(topic)
            self._begin(is_new=not found.is_watched)
            found.polled_until = time.monotonic() + POLLS
            while not (messages := self.after(topic, version)) and (left := until - time.monotonic()) > 0:
                self._news.wait(left)
            return messages

    def after(self, topic: str, version: str) -> list[bytes]:
        """The messages after this version, in order; or the whole state, if some of them are gone. JSON."""
        epoch, _, number = version.partition(".")
        known = int(number) if epoch == self._epoch and number.isdecimal() else 0
        with self._mutex:
            found = self.topics.get(topic)
            if found is None or not found.log or known == found.version:
                return []
            if found.log[0][0] - 1 <= known < found.version and known >= found.first:
                return [each for number, each in found.log if number > known]
            if found.encoded[0] != found.version:
                found.encoded = found.version, _encoded(self._message(found) | found.whole | {"full": True})
            return [found.encoded[1]]

    def locks(self) -> Interlock:
        """The Interlock that reads; for revocations, too. Raises ConfigError."""
        with self._mutex:
            if self._locks is None:
                self._locks = Interlock(self.target, label=self.label, registry=False)
                self.url = self._locks._session.server.display_url
            return self._locks

    def hurry(self) -> None:
        """Look now."""
        self._wake.set()

    def open(self) -> None:
        """Let viewers begin a reader again, after close()."""
        with self._mutex:
            self._closing = False

    def close(self) -> None:
        """End the reader."""
        with self._mutex:
            for topic in self.topics.values():
                topic.listeners.clear()
                topic.polled_until = 0.0
            thread = self._thread
            self._closing = True
        self._wake.set()
        if thread is not None:
            thread.join(5.0)

    # The thread

    def _topic(self, topic: str) -> Topic:
        found = self.topics.get(topic)
        if found is None:
            first, *name = json.loads(topic) if topic.startswith("[") else [topic]
            found = self.topics[topic] = Topic(Name(*name) if first == LOCK else None)
        return found

    def _begin(self, *, is_new: bool) -> None:
        """Start the reader unless it runs. `is_new`: nobody has watched this topic, so look now. Under the mutex."""
        if is_new:
            self._wake.set()
        if (self._thread is None or not self._thread.is_alive()) and not self._closing:
            if self._thread is not None:  # it died: what it knew of names is old, and no viewer's version counts
                self._rows.clear()
                self._numbers.clear()
                self._epoch = secrets.token_hex(4)
            self._thread = threading.Thread(target=self._run, name="interlock-page", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        fleet: Fleet | None = None
        watched_at = time.monotonic()
        while True:
            began = time.monotonic()
            self._wake.clear()
            with self._mutex:
                if any(topic.is_watched for topic in self.topics.values()):
                    watched_at = began
                if self._closing or began - watched_at > LINGER:
                    self._end()
                    return
            rest = 1.0
            try:
                if fleet is None:
                    session = self.locks()._session
                    fleet = Fleet(session.views, session.core)
                look = run(fleet.look(self._opened()))
                self._note(look)
                self._look_at_the_rest(began)
                self._publish()
                settled = fleet.settle(look)
                rest = settled.rest
                self._head |= {"turn": round(settled.turn, 1), "cost": round(settled.cost, 4)}
            except Exception as error:  # noqa: BLE001 (whatever it is, the page must say it and go on)
                if not isinstance(error, LockError):
                    log.exception("interlock: the page could not look at the locks")
                with self._mutex:
                    self._head |= {"error": str(error) or type(error).__name__}
                self._look_at_the_rest(began)
                self._publish()
            # A new viewer, or a revocation, is served at once; but a look rests three times as long as it took.
            took = time.monotonic() - began
            if self._wake.wait(max(0.0, rest - took)):
                time.sleep(min(rest, max(0.1, 3 * took)))

    def _end(self) -> None:
        """Nobody watches: forget everything but the pasts. Under the mutex."""
        self._thread = None
        self.topics.clear()
        self._rows.clear()
        self._numbers.clear()
        locks, self._locks = self._locks, None
        if locks is not None:
            try:
                locks.close()
            except LockError as error:
                log.debug("interlock: the page: %s", error)

    def _opened(self) -> list[Name]:
        with self._mutex:
            return [topic.name for topic in self.topics.values() if topic.name is not None and topic.is_watched]

    def _note(self, look: Look) -> None:
        """Note what a look has seen."""
        self._looks += 1
        opened = self._opened()
        changed = list[dict[str, Any]]()
        rows = dict[int, dict[str, Any]]()
        for name, view in look.seen.items():
            past = self.pasts.look(name, view)
            number = self._numbers.get(name)
            if number is None:
                self._next_number += 1
                number = self._numbers[name] = self._next_number
            row = row_of(number, name, view, past.moments)
            if self._rows.get(number) != row:
                rows[number] = row
                changed.append(row)
        for name in look.gone:
            self.pasts.forget(name, look.now)
            if (number := self._numbers.pop(name, None)) is not None:
                with self._mutex:
                    self._rows.pop(number, None)
                    self._gone.append(number)
        if self._looks % PRUNE == 0:
            self.pasts.prune()
        details = self._details(opened)
        deadlocks = [deadlock_row(each, look.now) for each in look.deadlocks]
        with self._mutex:
            self._rows |= rows
            gone, self._gone = self._gone, []
            topic = self._topic(NOW)
            topic.change = {"rows": changed, "gone": gone, "deadlocks": deadlocks}
            topic.whole = {"rows": list(self._rows.values()), "gone": [], "deadlocks": deadlocks}
            for name, document in details.items():
                self._say(self._topic(topic_of_lock(name)), document)
            if (topic := self._topic(PROCESSES)).is_watched:
                self._say(topic, process_rows(look.parties, look.said_at, OF_PROCESS))
            wall = time.time()
            self._head |= {
                "error": "",
                "live": look.now,
                "ahead": round(look.now - wall, 3),
                "names": len(self._rows),
                "notices": _notices(look, wall),
            }

    def _details(self, opened: Sequence[Name]) -> dict[Name, dict[str, Any]]:
        """What the pages of single names show."""
        found = dict[Name, dict[str, Any]]()
        for name in opened:
            try:
                found[name] = self._details_of(name)
            except Exception as error:  # noqa: BLE001 (the other names go on)
                found[name] = {"problem": str(error) or type(error).__name__}
        return found

    def _details_of(self, name: Name) -> dict[str, Any]:
        session = self.locks()._session
        view = run(session.views.look(session.core, name.name, name.prefix, MOST))
        kind = Name(view.kind, name.name, name.prefix) if view.kind else name
        past = self.pasts.look(kind, view) if view.is_known else self.pasts.of.get(kind)
        document: dict[str, Any] = {"past": past.as_json()} if past is not None else {}
        moments = past.moments if past is not None else Pasts().look(kind, view).moments
        document |= {"row": row_of(0, kind, view, moments), "details": details_of(view, moments, SHOWN)}
        return document

    def _look_at_the_rest(self, now: float) -> None:
        """The audit and the health, which change seldom."""
        for name, ask in ((AUDIT, self._revocations), (HEALTH, self._health)):
            with self._mutex:
                topic = self._topic(name)
                is_due = topic.is_watched and now >= topic.due
            if is_due:
                try:
                    document = ask(topic, now)
                except Exception as error:  # noqa: BLE001 (as above)
                    topic.due = now + AUDIT_INTERVAL
                    document = {"problem": str(error) or type(error).__name__}
                with self._mutex:
                    self._say(topic, document)

    def _revocations(self, topic: Topic, now: float) -> Any:
        topic.due = now + AUDIT_INTERVAL
        found = run(audit(self.locks()._session.core, None, REVOCATIONS))
        return [
            {
                "at": each.at.timestamp(), "name": text(each.name), "kind": each.kind, "by": text(each.by),
                "reason": text(each.reason), "forced": each.forced, "holders": [text(who) for who in each.holders],
                "holding": each.holding, "result": text(each.result), "prefix": _prefix(each.key, each.name),
            }
            for each in found
        ]  # fmt: skip

    def _health(self, _topic: Topic, now: float) -> Any:
        if self.examine is not None and now >= self._examine_at:
            self._examine_at = now + HEALTH_INTERVAL
            self._findings = {"findings": self.examine(), "at": time.time()}
        quarantine = [
            {"kind": row["kind"], "name": row["name"], "prefix": row["prefix"], "until": row["quarantine"]}
            for row in self._rows.values()
            if "quarantine" in row
        ]
        return self._findings | {"quarantine": quarantine}

    def _say(self, topic: Topic, document: Any) -> None:
        """Make this the whole state of a topic. Under the mutex."""
        if topic.whole.get("doc", topic) != document:
            topic.whole = topic.change = {"doc": document}

    def _message(self, topic: Topic) -> dict[str, Any]:
        return {"v": f"{self._epoch}.{topic.version}", "at": time.time(), "url": self.url, **self._head}

    def _publish(self) -> None:
        """Give each topic a message, if only to say that all is as it was, and call the listeners."""
        with self._mutex:
            for name in [name for name, topic in self.topics.items() if not topic.is_watched]:
                del self.topics[name]
            for topic in self.topics.values():
                if not topic.whole and not self._head["error"]:
                    continue  # nothing is known yet
                if not topic.version:
                    topic.version = topic.first = self._version = self._version + 1_000_000
                topic.version += 1
                topic.log.append((topic.version, _encoded(self._message(topic) | topic.change)))
                topic.change = {}
            listeners = [(topic, each) for topic in self.topics.values() for each in topic.listeners]
            self._news.notify_all()
        for topic, each in listeners:
            try:
                each()
            except Exception:  # noqa: BLE001 (one viewer's event loop has ended, and the others go on)
                with self._mutex:
                    topic.listeners.discard(each)


_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()


def _after_fork() -> None:
    for feed in snapshot(_feeds):
        feed._begin_anew()


after_fork(_after_fork)


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def _prefix(key: str, name: str) -> str:
    return key.removesuffix(name)


def _notices(look: Look, wall: float) -> list[dict[str, str]]:
    """What keeps this page from telling everything, and what would be right."""
    found = list[dict[str, str]]()
    if look.unread.error:
        found.append({
            "text": f"The server does not show what processes hold and wait for: {look.unread.error}",
            "advice": "Names that this page knows, the audit and the health go on. Give the user the rights that "
                      "`interlock doctor` names",
        })  # fmt: skip
    if look.unread.entries:
        number = look.unread.entries
        found.append({
            "text": f"{number} {'entry' if number == 1 else 'entries'} of processes can't be read: another version "
                    "of interlock wrote them, or something else did",
            "advice": "What their processes hold is missing here, unless others wait for it. Run the page with the "
                      "newest version of the fleet",
        })  # fmt: skip
    if abs(look.now - wall) > CLOCKS:
        ahead = "ahead of" if look.now > wall else "behind"
        found.append({
            "text": f"The server's clock is {abs(look.now - wall):.0f} s {ahead} the clock of this page's machine",
            "advice": "Times here are the server's. Let an NTP client set both clocks slowly",
        })  # fmt: skip
    return found
