"""Attempts: what clients send, and what may be left of it. Rules 5, 7 and the client's half of 11."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from interlock.testing.simulator.commands import ZSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._core import Argument, Grant, Message
    from interlock.testing.simulator.coroutines import Process, Task
    from interlock.testing.simulator.server import Server

    from .story import Story

UNDONE: Final = 1.0  # seconds after which nothing of an attempt may be left, in clean weather
KEEPER: Final = "interlock-keeper"  # the coroutine of a session that renews


@dataclass
class Attempt:
    """What is known of one acquire."""

    process: Process
    task: Task
    key: bytes
    queued_at: float | None = None
    ended: bool = False
    cleared: bool = False  # its release was run by the server
    forced: bool = False  # it was taken away by force: its holder learns of it later
    grant: Grant | None = None


class Attempts:
    """All attempts of a run, by token."""

    def __init__(self, story: Story, server: Server, *, clean: bool) -> None:
        self.story = story
        self.server = server
        self.clean = clean  # every message arrives, once and soon
        self.known: dict[bytes, Attempt] = {}
        self.queued: dict[bytes, dict[bytes, Attempt]] = {}  # those that were queued and have not ended, by lock
        self.companions: dict[bytes, tuple[bytes, bytes]] = {}  # queue and waiters, by lock
        self.operations: dict[str, int] = {}  # by what an `execute` writes: how often the server ran it
        self.outcomes: dict[str, bool] = {}  # whether its caller knows it to have been run

    def watch(self, keys: Sequence[bytes]) -> None:
        """A lock that will be used."""
        self.queued[keys[0]] = {}
        self.companions[keys[0]] = keys[2], keys[3]

    def asked(self, batch: Sequence[Message]) -> None:
        """Rule 7: what the keeper is about to send. (Then it may be stopped, and much can happen before it is sent.)"""
        task = self.story.world.current
        if task is None or task.label != KEEPER:
            return  # an extend() that is tried again may cross a release: the server refuses it
        for _, _, (verb, *rest) in batch:
            for token in rest[::2] if verb == "renew" else ():
                grant = self.known[str(token).encode()].grant
                if grant is not None and grant.ended is not None:
                    self.story.violated(7, f"{grant.token} is renewed though {grant.ended}")

    def sending(self, process: Process, key: str, args: Sequence[Argument]) -> None:
        """A request leaves its process."""
        verb, *rest = args
        self.story.note("%s sends %s %s", process.name, verb, rest)
        task = self.story.world.current
        if verb == "acquire":
            token = str(rest[0]).encode()
            assert task is not None
            if token not in self.known:
                self.known[token] = Attempt(process, task, key.encode())
            task.subject = token
        elif verb == "execute":
            operation = str(rest[3])
            if operation in self.operations:
                self.story.violated(11, f"execute of {operation} is sent twice")
            self.operations[operation] = 0

    def queues(self, token: bytes, attempt: Attempt) -> None:
        """It was told to wait."""
        if attempt.queued_at is None:
            attempt.queued_at = self.story.world.now
            if not attempt.ended:
                self.queued[attempt.key][token] = attempt

    def since(self, key: bytes) -> float | None:
        """Since when a live process waits for this lock."""
        queued = self.queued[key]
        return min((attempt.queued_at or 0.0 for attempt in queued.values() if attempt.process.awake), default=None)

    # How they end

    def ended(self, task: Task, *, with_lease: bool) -> None:
        """The coroutine's acquire is over."""
        token = task.subject
        attempt = self.known.get(token)
        if attempt is None or attempt.ended:
            return
        attempt.ended = True
        self.queued[attempt.key].pop(token, None)
        if not with_lease and self.clean:
            world, since = self.story.world, self.story.world.now
            world.at(since + UNDONE, lambda: self._undone(token, attempt, since))

    def closed(self, process: Process) -> None:
        """A session has closed: with clean weather, what it held and queued is gone."""
        if self.clean and process.alive:
            for token, attempt in self.known.items():
                if attempt.process is process:
                    self._undone(token, attempt, self.story.world.now)

    def _undone(self, token: bytes, attempt: Attempt, since: float) -> None:
        if not attempt.process.alive or attempt.process.paused_until > since:
            return
        self.server.look()
        queue, waiters = self.companions[attempt.key]
        holder: bytes = self.server.find(attempt.key, bytes) or b""
        for place, found in (
            ("the lock", holder.removeprefix(b"!") == token),
            ("the queue", token in (self.server.find(queue, ZSet) or ())),
            ("the waiters", token in self.server.data.get(waiters, ())),
        ):
            if found:
                self.story.violated(5, f"{token!r} ended without a lease and is still in {place}")

    # What was executed under a lease

    def ran(self, operation: str, holder: bytes | None, token: bytes) -> None:
        """The server ran an `execute` and says that it was under the lease of this token."""
        self.operations[operation] = self.operations.get(operation, 0) + 1
        if holder != token:
            self.story.violated(11, f"execute of {operation} ran though {holder!r} holds the lock")
        if self.operations[operation] > 1:
            self.story.violated(11, f"execute of {operation} ran {self.operations[operation]} times")
        if self.outcomes.get(operation) is False:
            self.story.violated(11, f"execute of {operation} ran though its caller was told that it had not")

    def answered(self, operation: str, *, ran: bool) -> None:
        """The caller of an `execute` knows whether it was run."""
        self.outcomes[operation] = ran
        if ran != bool(self.operations.get(operation)):
            self.story.violated(11, f"execute of {operation}: its caller was told {ran} and it is not so")
