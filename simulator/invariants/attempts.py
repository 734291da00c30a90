"""Attempts: what clients send, and what may be left of it. Rules 5, 7 and the client's half of 11."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from simulator.messages import requests

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from interlock._client.grant import Grant
    from interlock._protocol.types import Argument, Message
    from simulator.coroutines import Process, Task
    from simulator.server_group import ServerGroup
    from simulator.subjects import Thing

    from .trace import Trace

UNDONE: Final = 1.0  # seconds after which nothing of an attempt may be left, in clean weather
KEEPER: Final = "interlock-keeper"  # with what the names of a session's keepers begin
RENEWAL: Final = "interlock-keeper-renewal"  # the one that renews


@dataclass
class Attempt:
    """What is known of one acquire."""

    process: Process
    task: Task
    thing: Thing
    ttl_ms: int
    life_ms: int  # how long a handover to it may wait for its confirmation
    began: float
    queued_at: float | None = None
    confirmed: bool = False  # it asked, and was told that it has it: it does not wait any more
    ended: bool = False
    cleared: bool = False  # its release was run by the server
    ousted: bool = False  # it was taken away at once, by force, or forgotten by all: its holder learns of it later
    grant: Grant | None = None

    def certain(self) -> bool:
        """Whether `ensure()` of its lease would pass now."""
        return self.grant is not None and self.grant.reason_ended(self.process.clock()) is None


class Attempts:
    """All attempts of a run, by token."""

    def __init__(self, trace: Trace, group: ServerGroup, *, clean: bool) -> None:
        self.trace = trace
        self.group = group
        self.clean = clean  # every message arrives, once and soon
        self.renewals = True  # rule 7 is watched
        self.known: dict[bytes, Attempt] = {}
        self.things: dict[bytes, Thing] = {}  # by key
        self.queued: dict[bytes, dict[bytes, Attempt]] = {}  # those that were queued and have not ended, by key
        self.operations: dict[str, int] = {}  # by what an `execute` writes: how often the server ran it
        self.outcomes: dict[str, bool] = {}  # whether its caller knows it to have been run

    def watch(self, thing: Thing) -> None:
        """Something that will be used."""
        self.things[thing.key] = thing
        self.queued[thing.key] = {}

    def asked(self, batch: Sequence[Message]) -> None:
        """Rule 7: what the keeper is about to send. (Then it may be stopped, and much can happen before it is sent.)"""
        task = self.trace.world.current
        if task is None or task.label != RENEWAL or not self.renewals:
            return  # an extend() that is tried again may cross a release: the server refuses it
        for _, _, (verb, *rest) in batch:
            for token in rest[::2] if verb == "renew" else ():
                grant = self.known[str(token).encode()].grant
                if grant is not None and grant.end_reason is not None:
                    self.trace.violated(7, f"{grant.token} is renewed though {grant.end_reason}")

    def sending(self, process: Process, keys: Sequence[str], args: Sequence[Argument]) -> None:
        """A request leaves its process."""
        verb, *rest = args
        self.trace.note("%s sends %s %s", process.name, verb, rest)
        task = self.trace.world.current
        if verb == "acquire":
            assert task is not None
            for (key, *_), (_, *asked) in requests(keys, args):
                self._begins(process, task, self.things[key.encode()], asked)
        elif verb == "execute":
            operation = str(rest[3])
            if operation in self.operations:
                self.trace.violated(11, f"execute of {operation} is sent twice")
            self.operations[operation] = 0

    def _begins(self, process: Process, task: Task, thing: Thing, asked: Sequence[Argument]) -> None:
        token = str(asked[0]).encode()
        if token not in self.known:
            self.known[token] = Attempt(process, task, thing, int(asked[1]), int(asked[2]), self.trace.world.now)
            thing.asked(token, asked[6:])
            task.attempts.append(token)

    def queues(self, token: bytes, attempt: Attempt) -> None:
        """It was told to wait."""
        attempt.confirmed = False
        if attempt.queued_at is None:
            attempt.queued_at = self.trace.world.now
            if not attempt.ended:
                self.queued[attempt.thing.key][token] = attempt

    # How they end

    def ended(self, task: Task, kept: Collection[bytes]) -> None:
        """The coroutine's call is over, and of its attempts only these have become leases."""
        since = self.trace.world.now
        for token in task.attempts:
            attempt = self.known[token]
            attempt.ended = True
            self.queued[attempt.thing.key].pop(token, None)
            if token not in kept and self.clean:
                self._soon_undone(token, attempt, since)
        task.attempts = []

    def closed(self, process: Process) -> None:
        """A session has closed: with clean weather, what it held and queued is gone."""
        if self.clean and process.alive:
            for token, attempt in self.known.items():
                if attempt.process is process:
                    self._undone(token, attempt, self.trace.world.now)

    def _soon_undone(self, token: bytes, attempt: Attempt, since: float) -> None:
        self.trace.world.at(since + UNDONE, lambda: self._undone(token, attempt, since))

    def _undone(self, token: bytes, attempt: Attempt, since: float) -> None:
        if not attempt.process.alive or attempt.process.paused_until > since:
            return
        server = self.group.primary.server
        if attempt.thing.notes and server.refused > since:
            self._soon_undone(token, attempt, self.trace.world.now)
            return
        server.look()
        for place, tokens in attempt.thing.places(server):
            if token in tokens:
                self.trace.violated(5, f"{token!r} ended without a lease and is still in {place}")

    # What was executed under a lease

    def ran(self, operation: str, *, holds: bool) -> None:
        """The server ran an `execute`; `holds`: under a lease that it knows."""
        self.operations[operation] = self.operations.get(operation, 0) + 1
        if not holds:
            self.trace.violated(11, f"execute of {operation} ran without its lease")
        if self.operations[operation] > 1:
            self.trace.violated(11, f"execute of {operation} ran {self.operations[operation]} times")
        if self.outcomes.get(operation) is False:
            self.trace.violated(11, f"execute of {operation} ran though its caller was told that it had not")

    def answered(self, operation: str, *, ran: bool) -> None:
        """The caller of an `execute` knows whether it was run."""
        self.outcomes[operation] = ran
        if ran != bool(self.operations.get(operation)):
            self.trace.violated(11, f"execute of {operation}: its caller was told {ran} and it is not so")
