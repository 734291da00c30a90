"""A scenario: processes with clients that contend for one lock or semaphore, the faults, and the result.

Scenarios differ in what the clients do under the lock, and in what counts as the result: see `flash_sale` and
`api_limit`.

A plan decides the faults. The server numbers the actions of the clients, so "number 12" is the same moment of the
scenario under every recipe, whichever process takes that number. The plan, made from a seed, says which number meets
which fault at which point: in the middle of *taking* the lock or permit (recipes that need more than one step), just
after it is *taken*, while *holding* it, or while *releasing* it. The plan does not know recipes; each recipe fails at
its own weak point.
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeAlias, TypeVar

from interlock import Interlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from interlock.cli.demo.connection import BareConnection, Execute
    from interlock.cli.demo.recipe import Recipe

__all__ = [
    "CLOSED_CHECK_INTERVAL",
    "CardDeclined",
    "Client",
    "Column",
    "Context",
    "Fault",
    "LocalLock",
    "Result",
    "Scenario",
    "ScenarioClosed",
    "schedule_faults",
]

T = TypeVar("T")
K = TypeVar("K", bound="Scenario")
Point = Literal["taking", "taken", "holding", "releasing"]
LocalLock: TypeAlias = "threading.Lock | threading.Semaphore"

CLOSED_CHECK_INTERVAL = 1.0  # seconds after which a waiting client checks again whether the scenario is closed


class CardDeclined(Exception):  # noqa: N818  # an event of the scenario, not an error of the demo
    """The buyer's card was declined: an exception in the middle of a sale."""


class ScenarioClosed(Exception):  # noqa: N818
    """The scenario was closed while the client waited."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, the point at which it happens, and its duration in TTLs.

    `crash`: the process is killed. `pause`: the process is stopped (SIGSTOP), as by a long garbage collection or a
    suspended machine. `slow`: only this client is slow. `error`: an exception in the critical section.
    """

    kind: Literal["crash", "pause", "slow", "error"]
    point: Point
    ttls: float = 0.0


def schedule_faults(
    episodes: Iterable[Sequence[Fault]], rng: random.Random, gap: int, after_first: int = 0
) -> dict[int, Fault]:
    """Give the faults of each episode consecutive numbers, at most `gap` after the previous episode.

    `after_first` more numbers stay without a fault after the first episode.
    """
    faults: dict[int, Fault] = {}
    number = 1
    for episode in episodes:
        number += rng.randint(1, gap)
        if faults:
            number, after_first = number + after_first, 0
        for fault in episode:
            faults[number] = fault
            number += 1
    return faults


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its name in `--json`, its heading, and the style of a number other than 0."""

    name: str
    heading: str
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(ABC):
    """One scenario under one recipe: all that a worker process must know."""

    columns: ClassVar[tuple[Column, ...]]
    done_label: ClassVar[str]  # what happens to the units of the goal, for the progress bar

    recipe: Recipe[Any]
    url: str = ""
    prefix: str = ""  # of every key that the scenario writes
    goal: int  # tickets to sell, or calls to make
    clients: int  # in each process
    ttl: float  # of the lock or permit, seconds
    max_stalls: float  # the watchdog closes the scenario after more stalls
    faults: dict[int, Fault] = field(default_factory=dict[int, Fault])
    clock_offsets: tuple[float, ...] = ()  # seconds by which the clock of each process is ahead; missing ones are right
    process_index: int = 0  # the number of this worker process

    @property
    def lock(self) -> str:
        """The key of the lock, counter or set of every recipe that keeps one in the server."""
        return f"{self.prefix}lock"

    @property
    def events_key(self) -> str:
        """The hash that counts events; the server keeps it, because processes crash."""
        return f"{self.prefix}events"

    @property
    def counter_key(self) -> str:
        """The key of the counter that numbers the actions of the clients."""
        return f"{self.prefix}numbers"

    @property
    def clock_offset(self) -> float:
        """Seconds by which the clock of this process is ahead."""
        return self.clock_offsets[self.process_index] if self.process_index < len(self.clock_offsets) else 0.0

    def for_process(self, process_index: int) -> Self:
        """The same scenario, for the worker process of this number."""
        return replace(self, process_index=process_index)

    def make_local_lock(self) -> LocalLock:
        """Make the lock that excludes only threads of one process."""
        return threading.Lock()

    @abstractmethod
    def prepare(self, execute: Execute) -> None:
        """Write the initial data to the server."""

    @abstractmethod
    def run_client(self, context: Context[Any], connection: BareConnection) -> None:
        """Run one client until no work is left. Raises ScenarioClosed."""

    @abstractmethod
    def count_done(self, execute: Execute) -> int:
        """How many units of the goal are done: tickets sold, or calls made."""

    def restore_after_crash(self, execute: Execute) -> None:  # noqa: B027  # optional: only one scenario needs it
        """Restore the data that the crash of this process left behind, other than the recipe's own."""

    @abstractmethod
    def result(self, execute: Execute, seconds: float) -> Result:
        """Read the result from the server, after all clients have finished."""

    def read_events(self, execute: Execute) -> Counter[str]:
        """Read the counts of events."""
        counts: dict[bytes, bytes] = execute("HGETALL", self.events_key)
        return Counter({name.decode(): int(count) for name, count in counts.items()})


class Context(Generic[K]):
    """What the clients of one process share while one scenario runs."""

    def __init__(self, scenario: K, inject: Callable[[Fault, float], None]) -> None:
        self.scenario = scenario
        self.inject = inject  # injects a fault of so many seconds into this process or thread
        self.local_lock = scenario.make_local_lock()
        self.locks = Interlock(scenario.url, prefix=scenario.prefix)
        self.closed = threading.Event()


class Client(Generic[K]):
    """One attempt of a client: the tools that a recipe works with."""

    poll_interval: ClassVar[tuple[float, float]]  # seconds between two tries of a recipe that polls

    def __init__(self, context: Context[K], connection: BareConnection) -> None:
        self.context = context
        self.scenario = context.scenario
        self.connection = connection
        self.execute = connection.execute
        self.lock = self.scenario.lock
        self.ttl_ms = round(self.scenario.ttl * 1000)
        self.token = b"%032x" % random.getrandbits(128)
        self.number = 0
        self._fault: Fault | None = None

    def now(self) -> float:
        """Seconds since the epoch, by the clock of this process."""
        return time.time() + self.scenario.clock_offset

    def count_event(self, event: str) -> None:
        """Count an event."""
        self.execute("HINCRBY", self.scenario.events_key, event, 1)

    def take_number(self) -> None:
        """Take the next number, and with it the fault that the plan has for that number."""
        self.number = self.execute("INCR", self.scenario.counter_key)
        self._fault = self.scenario.faults.get(self.number)

    def wait(self, take: Callable[[], T | None]) -> T:
        """Call `take()` until it returns the lock; raises ScenarioClosed if the scenario is closed first."""
        while not (taken := take()):
            if self.context.closed.wait(random.uniform(*self.poll_interval)):
                raise ScenarioClosed
        return taken

    def inject_at(self, point: Point) -> None:
        """Inject the fault that the plan has for this number at this point, if any: once."""
        fault = self._fault
        if fault is None or fault.point != point:
            return
        self._fault = None
        self.count_event(fault.kind)
        if fault.kind == "error":
            raise CardDeclined
        self.context.inject(fault, fault.ttls * self.scenario.ttl)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(ABC):
    """The result of a scenario."""

    strengths: ClassVar[Mapping[str, str]]  # what interlock did well, by event
    uneventful: ClassVar[str]  # what interlock did well if no such event was counted

    seconds: float
    events: Counter[str]  # events counted during the run, or found in the data afterwards

    @property
    @abstractmethod
    def is_correct(self) -> bool:
        """Whether the result is the one that a correct lock gives."""

    @property
    @abstractmethod
    def failure(self) -> str:
        """The explanation of a wrong result that has not shown the recipe's own flaw."""

    @abstractmethod
    def numbers(self) -> dict[str, int]:
        """The numbers of the table, by column."""

    def addition(self, event: str) -> str:  # noqa: ARG002  # optional
        """A supplement to the sentence about the flaw that this event shows."""
        return ""

    def explain(self, recipe: Recipe[Any]) -> str:
        """Explain the result in a sentence, by the events."""
        events = self.events
        if recipe.event and events[recipe.event]:
            return recipe.flaw.format_map(events) + self.addition(recipe.event)
        if not self.is_correct:
            return self.failure
        if not recipe.event:
            strengths = [f"{text} ({events[event]}x)" for event, text in self.strengths.items() if events[event]]
            return ", ".join(strengths) or self.uneventful
        return "nothing went wrong in this run"
