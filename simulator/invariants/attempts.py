"""Attempts: the requests of clients, and their possible remains. S5, S7 and the client's half of S11."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from simulator.messages import requests

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from interlock._client.grant import Grant
    from interlock._protocol.resource import Argument
    from interlock._protocol.server import Message
    from interlock._session.session import Session
    from simulator.coroutines import Process, Task
    from simulator.server_group import ServerGroup
    from simulator.subjects import ResourceModel

    from .trace import Trace

UNDO_TIME: Final = 1.0  # seconds after which an attempt may leave nothing, in clean weather
ASK_TIME: Final = 0.1  # seconds within which a waiter asks after a new subscription
MAX_BEHIND_NOBODY: Final = 1.2  # seconds
WORKERS: Final = "interlock-worker"  # the beginning of the names of a session's background tasks
RENEWAL_WORKER: Final = "interlock-worker-renewal"  # the background task for renewals


@dataclass
class Attempt:
    """The facts about one acquire."""

    process: Process
    task: Task
    resource: ResourceModel
    ttl_ms: int
    handover_ttl_ms: int
    began: float
    queued_at: float | None = None
    asked_at: float = 0.0  # when its client sent its last acquire
    confirmed: bool = False  # the client got the grant: it waits no longer
    ended: bool = False
    cleared: bool = False  # the server ran its release
    exempt: bool = False  # from S1: revoked by force, or forgotten by all servers; its holder learns of that later
    grant: Grant | None = None

    def certain(self) -> bool:
        """Whether `ensure()` of the attempt's lease would pass now."""
        return self.grant is not None and self.grant.reason_ended(self.process.clock()) is None


class Attempts:
    """All attempts of a run, by token."""

    def __init__(self, trace: Trace, group: ServerGroup, *, clean: bool) -> None:
        self.trace = trace
        self.group = group
        self.clean = clean  # whether every message arrives once and soon
        self.check_s7 = True  # whether to check S7
        self.known: dict[bytes, Attempt] = {}
        self.resources: dict[bytes, ResourceModel] = {}  # by key
        self.queued: dict[bytes, dict[bytes, Attempt]] = {}  # those that were queued and have not ended, by key
        self.operations: dict[str, int] = {}  # by the text that an `execute` writes: how often it ran
        self.outcomes: dict[str, bool] = {}  # whether the caller knows that it ran
        self.sessions: dict[Process, Session] = {}  # of each process
        self._behind_nobody: dict[Any, float] = {}  # callers in a cohort with nobody before them, and since when
        self.unanswered: Counter[bytes] = Counter()  # requests of users about a lease without a reply, by token
        self._executes: dict[str, Grant | None] = {}  # the section that sent each `execute`
        self.passed: dict[Process, set[bytes]] = {}  # attempts that other callers of the cohort have taken over

    def watch(self, resource: ResourceModel) -> None:
        """Watch a resource that workers will use."""
        self.resources[resource.key] = resource
        self.queued[resource.key] = {}

    def check_renewals(self, batch: Sequence[Message]) -> None:
        """S7: check a renewal that the background task is about to send; a fault may still delay the request."""
        task = self.trace.world.current
        if task is None or task.label != RENEWAL_WORKER or not self.check_s7:
            return  # a repeated extend() may overlap a release: the server refuses the extend
        for _, _, (verb, *rest) in batch:
            for token in rest[::2] if verb == "renew" else ():
                grant = self.known[str(token).encode()].grant
                if (
                    grant is not None
                    and grant.end_reason is not None
                    and not self.is_in_cohort(grant.token, task.process)
                ):
                    self.trace.violated(7, f"{grant.token} is renewed though {grant.end_reason}")

    def note_request(self, process: Process, keys: Sequence[str], args: Sequence[Argument]) -> None:
        """Note a request that leaves its process."""
        verb, *rest = args
        self.trace.note("%s sends %s %s", process.name, verb, rest)
        task = self.trace.world.current
        if verb == "acquire":
            assert task is not None
            for (key, *_), (_, *asked) in requests(keys, args):
                self._note_begin(process, task, self.resources[key.encode()], asked)
        elif verb == "confirm":  # its section starts with this
            self.known[str(rest[0]).encode()].confirmed = True
        elif verb == "execute":
            operation = str(rest[3])
            if operation in self.operations:
                self.trace.violated(11, f"execute of {operation} is sent twice")
            self.operations[operation] = 0
            self._executes[operation] = self.known[str(rest[0]).encode()].grant

    def _note_begin(self, process: Process, task: Task, resource: ResourceModel, asked: Sequence[Argument]) -> None:
        token = str(asked[0]).encode()
        if token not in self.known:
            self.known[token] = Attempt(process, task, resource, int(asked[1]), int(asked[2]), self.trace.world.now)
            resource.note_attempt(token, asked[6:])
        self.known[token].asked_at = self.trace.world.now
        if token not in task.attempts:  # it may be that of another caller of its cohort
            task.attempts.append(token)

    def note_queued(self, token: bytes, attempt: Attempt) -> None:
        """Note that the server put the attempt into the queue."""
        attempt.confirmed = False
        if attempt.queued_at is None:
            attempt.queued_at = self.trace.world.now
            if not attempt.ended:
                self.queued[attempt.resource.key][token] = attempt

    def is_in_cohort(self, token: str, process: Process) -> bool:
        """Whether a caller of this process has this token in its cohort: it asks the server, or is in its section."""
        for cohort in self.sessions[process].core.cohorts.by_key.values():
            driver, section = cohort.driver, cohort.section
            if driver is not None and driver.token == token and not driver.abandoned:
                return True
            if section is not None and section.token == token and not section.attempt.abandoned:
                return True
        return False

    def sweep(self) -> None:
        """S4: whoever waits in a cohort has somebody before it. A lease that was dropped ends within a second."""
        before, now, self._behind_nobody = self._behind_nobody, self.trace.world.now, {}
        for process, session in self.sessions.items():
            core = session.core
            for cohort in core.cohorts.by_key.values() if process.awake and not core.requests.closed else ():
                driver, section = cohort.driver, cohort.section
                is_driven = driver is not None and not driver.abandoned
                is_held = section is not None and section.reason_ended(process.clock()) is None
                if cohort.waiting and not is_driven and not is_held:
                    self._behind_nobody |= {attempt: before.get(attempt, now) for attempt in cohort.waiting}
        for attempt, since in self._behind_nobody.items():
            if now - since > MAX_BEHIND_NOBODY:
                self.trace.violated(
                    4, f"nobody has been before {attempt.token} since {since:.3f}, which waits in its cohort"
                )

    def note_subscription(self, process: Process) -> None:
        """Note that the server pushes to this process from now on. S4: each of its waiters asks at once."""
        if not self.clean:
            return
        since, waiters = self.trace.world.now, self.sessions[process].waiters
        waiting = [
            attempt for attempt in waiters.registered.values() if attempt.is_queued and attempt.event is not None
        ]

        def check() -> None:
            for attempt in waiting if process.awake and process.paused_until < since else ():
                known, is_waiting = self.known.get(attempt.token.encode()), attempt.token in waiters.registered
                if known is not None and is_waiting and not attempt.abandoned and known.asked_at < since:
                    self.trace.violated(4, f"{attempt.token} has not asked since the subscription at {since:.3f}")

        self.trace.world.at(since + ASK_TIME, check)

    # How they end

    def note_end(self, task: Task, kept: Collection[bytes]) -> None:
        """Note the end of a coroutine's call: of its attempts, only these have become leases.

        An attempt goes on if another caller of its cohort has taken it over: until the end of a later call.
        """
        since, process = self.trace.world.now, task.process
        ended = {*task.attempts, *self.passed.pop(process, ())}
        self.passed[process] = {
            token for token in ended if token not in kept and self.is_in_cohort(token.decode(), process)
        }
        for token in sorted(ended - self.passed[process]):
            attempt = self.known[token]
            attempt.ended = True
            self.queued[attempt.resource.key].pop(token, None)
            if token not in kept and self.clean:
                self._check_undone_later(token, attempt, since)
        task.attempts = []

    def note_close(self, process: Process) -> None:
        """Note a closed session: with clean weather, its leases and its waiters are gone."""
        if self.clean and process.alive:
            for token, attempt in self.known.items():
                if attempt.process is process:
                    self._check_undone(token, attempt, self.trace.world.now)

    def _check_undone_later(self, token: bytes, attempt: Attempt, since: float) -> None:
        self.trace.world.at(since + UNDO_TIME, lambda: self._check_undone(token, attempt, since))

    def _check_undone(self, token: bytes, attempt: Attempt, since: float) -> None:
        if not attempt.process.alive or attempt.process.paused_until > since:
            return
        server = self.group.primary.server
        if attempt.resource.release_writes and server.refused_at > since:
            self._check_undone_later(token, attempt, self.trace.world.now)
            return
        server.read_clock()
        for place, tokens in attempt.resource.token_stores(server):
            if token in tokens:
                self.trace.violated(5, f"{token!r} ended without a lease and is still in {place}")

    # Commands that ran under a lease

    def note_execution(self, operation: str, token: bytes, *, holds: bool) -> None:
        """Note that the server ran an `execute` with this token. `holds`: under a lease that the server knows."""
        self.operations[operation] = self.operations.get(operation, 0) + 1
        if operation in self._executes and self._executes[operation] is not self.known[token].grant:
            self.trace.violated(11, f"execute of {operation} ran in a later section of its lease")
        if not holds:
            self.trace.violated(11, f"execute of {operation} ran without its lease")
        if self.operations[operation] > 1:
            self.trace.violated(11, f"execute of {operation} ran {self.operations[operation]} times")
        if self.outcomes.get(operation) is False:
            self.trace.violated(11, f"execute of {operation} ran, though its call reported that it had not")

    def note_outcome(self, operation: str, *, ran: bool) -> None:
        """Note that the caller of an `execute` knows whether it ran."""
        self.outcomes[operation] = ran
        if ran != bool(self.operations.get(operation)):
            self.trace.violated(11, f"execute of {operation}: its call reported ran={ran}, which is wrong")
