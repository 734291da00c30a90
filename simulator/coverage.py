"""Which pairs of (state of a claim, event) the runs have had: thousands of seeds that all do the same find nothing.

Theory. A *claim* is one token of a process, from its first request until the server has surely forgotten it; most
faults of the protocol lie in one event that meets a claim in one state. So each event notes the states of all claims
that it may concern: those of one process, or those of all processes if it is an event of a server. A batch adds up the
pairs, and prints those that no run had. `IMPOSSIBLE` declares the pairs that can't happen, with the reasons.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from interlock._client.grant import Grant
    from interlock._session.session import Session

    from .coroutines import Process

STATES: Final = {
    "asking": "its request is on its way, and it stands in no queue",
    "waiting behind a caller": "it waits in the cohort of its process",
    "queued": "it stands in the server's queue",
    "handed over": "the server has granted it the lock, and its client has not confirmed that",
    "passed, not begun": "a lease has passed to it, and its section has not begun",
    "held": "its lease is alive, and nothing is due",
    "renewing": "a renewal of its lease, or a question about it, is due or under way",
    "in jeopardy": "the last renewal of its lease has failed",
    "used by a request": "a request of its user has no reply: extend, execute",
    "revoked unheard": "somebody has revoked its lease, and its client does not know",
    "releasing": "its release is under way, and its caller waits for the reply",
    "left": "its release is on its way, and nobody waits for the reply",
    "undoing": "its undo is due or under way",
}
OF_A_PROCESS: Final = (
    "cancel", "pause", "crash", "close", "snapshot", "break subscription", "foreign code", "section ends",
    "lease passed on", "deadline passes", "push granted", "push revoked",
    "connection refused", "connected to a replica", "request lost", "request doubled", "batch cut short", "reply lost",
    "connection reset", "message late", "message slow", "push lost", "push doubled", "push late", "one way",
)  # fmt: skip
OF_A_SERVER: Final = (
    "revoke", "force", "cut off", "out of memory", "script flush", "later version", "flush all", "clock step",
    "restart", "restart with old keys", "restart without keys", "failover", "planned failover", "primary isolated",
    "primary paused", "first replica", "spare", "new primary",
    "emptied", "re-seeded by a member", "re-seeded by its replica", "address moved",
)  # fmt: skip
EVENTS: Final = (*OF_A_PROCESS, *OF_A_SERVER)
Pair = tuple[str, str]

_REPLICAS: Final = ("failover", "planned failover", "primary isolated", "primary paused")
IMPOSSIBLE: Final[Mapping[Pair, str]] = {
    **{
        (state, "snapshot"): "only a process that holds nothing and waits for nothing is frozen: Client.idle"
        for state in STATES
    },
    **{
        ("left", event): "where replicas take over, the end of a `with` waits for its reply: Server.send"
        for event in _REPLICAS
    },
}


class Coverage:
    """The pairs that one run has had."""

    def __init__(
        self,
        sessions: Mapping[Process, Session],
        is_revoked: Callable[[Grant], bool],
        is_handed_over: Callable[[str], bool],
    ) -> None:
        """The two questions are about the server, whose answer the client may not know yet."""
        self.pairs: Counter[Pair] = Counter()
        self._sessions = sessions
        self._is_revoked = is_revoked
        self._is_handed_over = is_handed_over

    def note(self, event: str, process: Process | None = None) -> None:
        """Note an event that concerns the claims of this process; None: of all processes."""
        for each in (process,) if process is not None else tuple(self._sessions):
            if each.alive and each in self._sessions:
                for state in set(self._states(self._sessions[each])):
                    self.pairs[state, event] += 1

    def _states(self, session: Session) -> Iterator[str]:
        yield from self._states_of_waiters(session)
        for grant in session.book.held():
            yield from self._states_of_lease(grant, session)
        for state, claims in (
            ("releasing", len(session.owed) > len(session.undo.jobs) + len(session.unread_releases.left)),
            ("left", session.unread_releases.left),
            ("undoing", session.undo.jobs),
        ):
            if claims:
                yield state

    def _states_of_waiters(self, session: Session) -> Iterator[str]:
        for attempt in list(session.waiters.registered.values()):
            yield "queued" if attempt.is_queued else "asking"
            if self._is_handed_over(attempt.token):
                yield "handed over"
        for cohort in session.core.cohorts.by_key.values():
            if cohort.waiting:
                yield "waiting behind a caller"
            if cohort.section is not None and cohort.section.lease is None:
                yield "passed, not begun"

    def _states_of_lease(self, grant: Grant, session: Session) -> Iterator[str]:
        if self._is_revoked(grant):
            yield "revoked unheard"
        is_busy = False
        for state, is_true in (
            ("renewing", grant.token in session.book.set_aside),
            ("in jeopardy", grant.hold.renewal_failing),
            ("used by a request", grant.hold.unanswered > 0),
        ):
            if is_true:
                is_busy = True
                yield state
        if not is_busy:
            yield "held"


def lines(pairs: Counter[Pair]) -> list[str]:
    """Say for people which pairs a batch has seen, and list the others."""
    events = [event for event in EVENTS if any(pairs[state, event] for state in STATES)]
    possible = [(state, event) for state in STATES for event in events if (state, event) not in IMPOSSIBLE]
    unseen = [pair for pair in possible if not pairs[pair]]
    seen = f"{len(possible) - len(unseen)} of {len(possible)}"
    said = [f"coverage: {seen} pairs of (state of a claim, event) were seen, of {len(events)} events that met a claim"]
    for state in STATES:
        missing = ", ".join(event for each, event in unseen if each == state)
        if missing:
            said.append(f"  never while {state}: {missing}")
    wrong = sorted(pair for pair in pairs if pair in IMPOSSIBLE)
    return said + [f"  SEEN, and declared impossible in coverage.py: {event} while {state}" for state, event in wrong]
