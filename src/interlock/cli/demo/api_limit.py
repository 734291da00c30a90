"""The rush: an API that takes five calls at a time, its callers, their bad luck, and the API's own log.

A call asks the API for a few pages, one after the other. The API notes each request in its log, a stream:

    XADD api * <call> <how it got its permit>

So the API itself tells how many it had to serve at once: a call is open from its first request to its last one that the
log has, in the order of the log. No clock takes part, and whoever crashed asks for nothing any more. A call whose
first request comes while five others are open is one too many.

When all have left, newcomers ask for permits: what they do not get within two timeouts has leaked.

What is numbered, for the faults (see `trial`), is calls, before they ask for a permit. A call that was lost or refused
is made again, with a new number. Some processes' clocks are wrong, by less than the timeout. The rules of the plan:

  1. The crash comes first, and nothing more until each caller has had a number: it takes calls along, and their faults.
  2. What outlasts the timeout comes next, so that the others are still busy when it has passed.
  3. Then come calls that are long, but within the timeout; and callers that are slow in the middle of taking a permit.
     They come in pairs: if one does no harm, as its clock is ahead, or as there is room just then, the other does.
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

CLOCK_OFFSETS = (0.0, -0.6, 0.6)  # of the first processes: TTLs that they are ahead; those of the others are right

_PAGES_PER_CALL = 3  # of a call
_PAGE_SECONDS = (0.012, 0.02)  # seconds until the next one
_LEAK_CHECK = 2.0  # TTLs for which newcomers ask for permits when all have left


def plan(calls: int, callers: int, seed: int) -> dict[int, Fault]:
    """The faults of so many calls of so many callers, by number of call. See the rules above."""
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
    """One rush under one recipe."""

    columns = (
        Column("calls", "calls"),
        Column("most", "at once"),
        Column("over", "too many", "bold red"),
        Column("leaked", "leaked", "yellow"),
    )
    done_label = "made"

    recipe: Recipe[Callable[[Caller], Permit | None]]
    limit: int  # calls that the API takes at a time

    @property
    def api(self) -> str:
        """The API: its log."""
        return f"{self.prefix}api"

    @property
    def todo(self) -> str:
        """The list of calls that are to be made."""
        return f"{self.prefix}todo"

    @property
    def doing(self) -> str:
        """The list of those that this process makes now."""
        return f"{self.prefix}doing:{self.process_index}"

    def make_local_lock(self) -> threading.Semaphore:
        """What keeps the threads of one process apart."""
        return threading.Semaphore(self.limit)

    def prepare(self, execute: Execute) -> None:
        """List the calls."""
        execute("RPUSH", self.todo, *range(self.goal))

    def run_client(self, context: Context[Any], connection: BareConnection) -> None:
        """Make call after call, until no more are to be made."""
        while connection.execute("LMOVE", self.todo, self.doing, "LEFT", "RIGHT"):
            while not Caller(context, connection).call():
                pass
            # Together: what a crash leaves in the list was not made.
            connection.transaction(("LPOP", self.doing), ("HINCRBY", self.events_key, "made", 1))

    def progress(self, execute: Execute) -> int:
        """How many calls were made."""
        return int(execute("HGET", self.events_key, "made") or 0)

    def crashed(self, execute: Execute) -> None:
        """List again what this process was doing."""
        while execute("LMOVE", self.doing, self.todo, "RIGHT", "LEFT"):
            pass

    def result(self, execute: Execute, seconds: float) -> ApiLimitResult:
        """Read the API's log and the notes, and let newcomers ask for permits."""
        lines = [(call, how) for _, (call, how) in execute("XRANGE", self.api, "-", "+")]
        most, over = count_open_calls(lines, self.limit)
        events = self.read_events(execute) + over
        events["over"] = over.total()
        events["leaked"] = self.limit - self._free_permits()
        return ApiLimitResult(calls=self.goal, made=events["made"], most=most, seconds=seconds, events=events)

    def _free_permits(self) -> int:
        """How many permits newcomers get, up to the limit."""
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
    """A permit that was taken."""

    release: Callable[[], object]
    """Gives it back."""
    execute: Execute | None = None
    """Says a command under this permit only, where that can be had."""
    by_rank: bool = False
    """Whether the set was full, and it was taken all the same, as its rank was low."""


class Caller(Client[ApiLimit]):
    """One attempt to make a call."""

    poll_interval = (0.003, 0.006)

    def __init__(
        self, context: Context[ApiLimit], connection: BareConnection, timeout: float = CLOSED_CHECK_INTERVAL
    ) -> None:
        super().__init__(context, connection)
        self.limit = self.scenario.limit
        self.timeout = timeout  # seconds to wait for a permit in the server, where that can be done

    def take(self) -> Permit | None:
        """Try to take a permit."""
        return self.scenario.recipe.run(self)

    def call(self) -> bool:
        """Make the call: whether the API served all of it."""
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
            self.record("refused")
            return False
        finally:
            permit.release()
        return True

    def request(self, permit: Permit) -> None:
        """Ask the API for a page. Raises LeaseLost if the permit is one that the server checks, and has ended."""
        (permit.execute or self.execute)(
            "XADD", self.scenario.api, "*", self.token, "by_rank" if permit.by_rank else "served"
        )


def count_open_calls(log: Iterable[tuple[bytes, bytes]], limit: int) -> tuple[int, Counter[str]]:
    """How many calls were open at the most, and how those got in that were too many."""
    lines = list(log)
    last = {call: number for number, (call, _) in enumerate(lines)}
    open_calls = set[bytes]()
    most, over = 0, Counter[str]()
    for number, (call, how) in enumerate(lines):
        if call not in open_calls:
            over[how.decode()] += len(open_calls) >= limit
            open_calls.add(call)
            most = max(most, len(open_calls))
        if last[call] == number:
            open_calls.remove(call)
    return most, over


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimitResult(Result):
    """What the API's log says. `over`: calls too many; `cut`: those that a low rank let in; `leaked`: permits."""

    strengths: ClassVar = {
        "slow": "renewed for slow calls",
        "refused": "a late request refused",
        "crash": "a crash waited out",
    }
    uneventful = "never too many, in order"

    calls: int
    made: int
    most: int

    @property
    def correct(self) -> bool:
        """Whether all calls were made, never too many at once, and all permits are there."""
        return self.made == self.calls and not self.events["over"] and not self.events["leaked"]

    @property
    def failure(self) -> str:
        """How callers fared."""
        return (
            f"calls too many: {self.events['over']}, leaked: {self.events['leaked']}, gave up: {self.events['gave_up']}"
        )

    def numbers(self) -> dict[str, int]:
        """Calls made; the most that the API had at once; those that were too many; permits that are gone."""
        return {"calls": self.made, "most": self.most, "over": self.events["over"], "leaked": self.events["leaked"]}
