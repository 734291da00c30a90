"""The API limit: an API that takes five calls at a time, its callers, the faults, and the API's own log.

A call requests a few pages from the API, one after the other. The API appends each request to its log, a stream:

    XADD api * <call> <how it got its permit>

So the log shows how many calls were open at once: a call is open from its first request in the log to its last one, in
the order of the log. The count needs no clock, and a caller that crashed sends no more requests. A call whose first
request stands in the log while five other calls are open is one too many.

After all callers have finished, the demo asks for all permits: those that it does not get within two timeouts have
leaked.

The server numbers *calls* for the faults (see `scenario`), before the call takes a permit. The caller repeats a call
that was lost or refused, with a new number. The clocks of some processes are wrong, by less than the timeout. The rules
of the plan:

 (a) The crash comes first, and no other fault until each caller has taken a number: the crash ends several calls, and
     would end their faults, too.
 (b) Faults that outlast the timeout come next, so that other callers are still busy when the timeout has passed.
 (c) Then come calls that are long, but within the timeout, and callers that are slow in the middle of taking a permit.
     These come in pairs: if one of a pair does no harm, because its clock is ahead or a permit is free just then, the
     other one does.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from interlock.cli.demo.connection import BareConnection
from interlock.cli.demo.scenario import (
    CLOSED_CHECK_INTERVAL,
    Client,
    Column,
    Context,
    Fault,
    Result,
    Scenario,
    schedule_faults,
)
from interlock.errors import LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from interlock.cli.demo.connection import Execute
    from interlock.cli.demo.recipe import Recipe

__all__ = ["CLOCK_OFFSETS", "ApiLimit", "ApiLimitResult", "Caller", "Permit", "plan"]

CLOCK_OFFSETS = (0.0, -0.6, 0.6)  # TTLs by which the clocks of the first processes are ahead; other clocks are right

_PAGES_PER_CALL = 3
_PAGE_SECONDS = (0.012, 0.02)  # between two requests of a call, at random
_LEAK_CHECK = 2.0  # TTLs for which the demo asks for permits after all callers have finished


def plan(calls: int, callers: int, seed: int) -> dict[int, Fault]:
    """The faults of so many calls of so many callers, by the number of the call. The rules are above."""
    rng = random.Random(seed)
    outlasting = [
        [Fault("slow", "holding", 1.7)],
        [Fault("slow", "holding", 1.7)],
        [Fault("pause", "taken", 1.7)],
    ]
    within = [
        *[[Fault("slow", "holding", 0.85)] * 2 for _ in range(2)],
        *[[Fault("slow", "taking", 0.4)] * 2 for _ in range(4)],
    ]
    rng.shuffle(outlasting)
    rng.shuffle(within)
    return schedule_faults([[Fault("crash", "taken")], *outlasting, *within], rng, max(1, calls // 30), callers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimit(Scenario):
    """The API limit under one recipe."""

    columns = (
        Column("calls", "calls"),
        Column("most", "at once"),
        Column("too_many", "too many", "bold red"),
        Column("leaked", "leaked", "yellow"),
    )
    done_label = "made"

    recipe: Recipe[Callable[[Caller], Permit | None]]
    limit: int  # calls that the API takes at a time

    @property
    def api(self) -> str:
        """The key of the API's log."""
        return f"{self.prefix}api"

    @property
    def todo(self) -> str:
        """The key of the list of calls to make."""
        return f"{self.prefix}todo"

    @property
    def doing(self) -> str:
        """The key of the list of calls that this process is making."""
        return f"{self.prefix}doing:{self.process_index}"

    def make_local_lock(self) -> threading.Semaphore:
        """Make the semaphore that only limits threads of one process."""
        return threading.Semaphore(self.limit)

    def prepare(self, execute: Execute) -> None:
        """Write the list of calls."""
        execute("RPUSH", self.todo, *range(self.goal))

    def run_client(self, context: Context[Any], connection: BareConnection) -> None:
        """Make one call after another until none is left."""
        while connection.execute("LMOVE", self.todo, self.doing, "LEFT", "RIGHT"):
            while not Caller(context, connection).call():
                pass
            # One transaction: a call that a crash leaves in the list was not made.
            connection.transaction(("LPOP", self.doing), ("HINCRBY", self.events_key, "made", 1))

    def count_done(self, execute: Execute) -> int:
        """How many calls were made so far."""
        return int(execute("HGET", self.events_key, "made") or 0)

    def restore_after_crash(self, execute: Execute) -> None:
        """Put the calls that this process was making back into the list."""
        while execute("LMOVE", self.doing, self.todo, "RIGHT", "LEFT"):
            pass

    def result(self, execute: Execute, seconds: float) -> ApiLimitResult:
        """Read the API's log and the events, and count the permits that are still free."""
        lines = [(call, how) for _, (call, how) in execute("XRANGE", self.api, "-", "+")]
        most, too_many = count_open_calls(lines, self.limit)
        events = self.read_events(execute) + too_many
        events["too_many"] = too_many.total()
        events["leaked"] = self.limit - self._count_free_permits()
        return ApiLimitResult(calls=self.goal, calls_made=events["made"], most=most, seconds=seconds, events=events)

    def _count_free_permits(self) -> int:
        """How many permits new callers get, up to the limit."""
        context: Context[ApiLimit] = Context(self, lambda _fault, _seconds: None)
        with contextlib.closing(context.locks), contextlib.closing(BareConnection(self.url)) as connection:
            deadline = time.monotonic() + _LEAK_CHECK * self.ttl
            while True:
                tries = (Caller(context, connection, timeout=0.0).take() for _ in range(self.limit))
                permits = [permit for permit in tries if permit]
                for permit in permits:
                    permit.release()
                if len(permits) == self.limit or time.monotonic() > deadline:
                    return len(permits)
                time.sleep(self.ttl / 5)


@dataclass(frozen=True, slots=True)
class Permit:
    """A permit, as a recipe returns it."""

    release: Callable[[], object]
    """Releases the permit."""
    execute: Execute | None = None
    """Sends a command that the server runs only while the permit is held, if the recipe offers that."""
    by_rank: bool = False
    """Whether the set was full, and its low rank gave the permit all the same."""


class Caller(Client[ApiLimit]):
    """One attempt to make a call."""

    poll_interval = (0.003, 0.006)

    def __init__(
        self, context: Context[ApiLimit], connection: BareConnection, timeout: float = CLOSED_CHECK_INTERVAL
    ) -> None:
        super().__init__(context, connection)
        self.limit = self.scenario.limit
        self.timeout = timeout  # seconds to wait for a permit in the server, if the recipe can wait there

    def take(self) -> Permit | None:
        """Try once to take a permit."""
        return self.scenario.recipe.run(self)

    def call(self) -> bool:
        """Make the call. Returns whether the API served all of its pages."""
        self.take_number()
        permit = self.wait(self.take)
        try:
            self.inject_at("taken")
            self.request(permit)
            self.inject_at("holding")
            for _ in range(_PAGES_PER_CALL - 1):
                time.sleep(random.uniform(*_PAGE_SECONDS))
                self.request(permit)
        except LeaseLost:
            self.count_event("refused")
            return False
        finally:
            permit.release()
        return True

    def request(self, permit: Permit) -> None:
        """Request a page from the API. Raises LeaseLost if the server checks the permit, and the permit has ended."""
        (permit.execute or self.execute)(
            "XADD", self.scenario.api, "*", self.token, "by_rank" if permit.by_rank else "served"
        )


def count_open_calls(log: Iterable[tuple[bytes, bytes]], limit: int) -> tuple[int, Counter[str]]:
    """The most calls that were open at once, and how the calls too many got their permits."""
    lines = list(log)
    last = {call: number for number, (call, _) in enumerate(lines)}
    open_calls = set[bytes]()
    most, too_many = 0, Counter[str]()
    for number, (call, how) in enumerate(lines):
        if call not in open_calls:
            too_many[how.decode()] += len(open_calls) >= limit
            open_calls.add(call)
            most = max(most, len(open_calls))
        if last[call] == number:
            open_calls.remove(call)
    return most, too_many


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimitResult(Result):
    """The API's log, counted. Events: `too_many` calls; `by_rank`, those of them with a low rank; `leaked` permits."""

    strengths: ClassVar = {
        "slow": "renewed for slow calls",
        "refused": "a late request refused",
        "crash": "a crash waited out",
    }
    uneventful = "never too many, in order"

    calls: int
    calls_made: int
    most: int

    @property
    def is_correct(self) -> bool:
        """Whether all calls were made, never too many at once, and no permit has leaked."""
        return self.calls_made == self.calls and not self.events["too_many"] and not self.events["leaked"]

    @property
    def failure(self) -> str:
        """How many calls were too many, how many permits leaked, and how many callers gave up."""
        events = self.events
        return f"calls too many: {events['too_many']}, leaked: {events['leaked']}, gave up: {events['gave_up']}"

    def numbers(self) -> dict[str, int]:
        """Calls made; the most that were open at once; those that were too many; permits that leaked."""
        return {
            "calls": self.calls_made,
            "most": self.most,
            "too_many": self.events["too_many"],
            "leaked": self.events["leaked"],
        }
