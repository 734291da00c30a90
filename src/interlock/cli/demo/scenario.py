"""A trial of a recipe: processes with clients that all want the same thing, their bad luck, and the books.

What is wanted, and what the books say, is another matter for each ladder: see `sale` and `rush`.

Bad luck is planned. What the clients do is numbered by the server, so "number 12" is the same moment of the trial for
every recipe, whichever process it falls to. The plan, made from a seed, says which number meets which fault, and where:
in the middle of *taking* the lock or permit, for recipes that need more than one step; just after it is *taken*; while
*holding* it; or while *releasing* it. A recipe breaks at its own weak point; the plan does not know recipes.
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

CLOSED_CHECK_INTERVAL = 1.0  # seconds between two looks of a waiting client whether the scenario is closed


class CardDeclined(Exception):  # noqa: N818  # it is an event of the trial, and no mistake
    """The buyer's card was declined: an exception in the middle of a sale, as happens to all code."""


class ScenarioClosed(Exception):  # noqa: N818
    """The trial was closed while the client waited."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, where, and for how many TTLs.

    `crash`: the process is killed. `pause`: it is stopped (SIGSTOP), as by a long collection or a suspended machine.
    `slow`: only this client takes long. `error`: an exception in the section.
    """

    kind: Literal["crash", "pause", "slow", "error"]
    point: Point
    ttls: float = 0.0


def schedule_faults(
    episodes: Iterable[Sequence[Fault]], rng: random.Random, gap: int, after_first: int = 0
) -> dict[int, Fault]:
    """Give the faults of each episode numbers in a row, at most `gap` after the episode before.

    After the first episode so many more numbers are left out.
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
    """A number of the table: its name in `--json`, its heading, and how it looks when it is not 0."""

    name: str
    heading: str
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(ABC):
    """One trial of one recipe: all that a worker process must know."""

    columns: ClassVar[tuple[Column, ...]]
    done_label: ClassVar[str]  # what is said of the goal's units that were reached

    recipe: Recipe[Any]
    url: str = ""
    prefix: str = ""  # of every key, this trial's own
    goal: int  # tickets to sell, or calls to make
    clients: int  # in each process
    ttl: float  # of the lock or permit, seconds
    max_stalls: float  # how often all may stand still before the trial is closed
    faults: dict[int, Fault] = field(default_factory=dict[int, Fault])
    clock_offsets: tuple[float, ...] = ()  # seconds that the clock of each process is ahead, as far as it is
    process_index: int = 0  # which of the processes this one is

    @property
    def lock(self) -> str:
        """The key that is the lock, or the counter or set, of all recipes that have one in the server."""
        return f"{self.prefix}lock"

    @property
    def events_key(self) -> str:
        """The hash that counts what was seen to happen; kept in the server, for processes crash."""
        return f"{self.prefix}events"

    @property
    def counter_key(self) -> str:
        """The counter of what the clients do."""
        return f"{self.prefix}numbers"

    @property
    def clock_offset(self) -> float:
        """Seconds that this process' clock is ahead."""
        return self.clock_offsets[self.process_index] if self.process_index < len(self.clock_offsets) else 0.0

    def for_process(self, process_index: int) -> Self:
        """The same for the process at this place."""
        return replace(self, process_index=process_index)

    def make_local_lock(self) -> LocalLock:
        """What keeps the threads of one process apart."""
        return threading.Lock()

    @abstractmethod
    def prepare(self, execute: Execute) -> None:
        """Lay out what there is at first."""

    @abstractmethod
    def run_client(self, context: Context[Any], connection: BareConnection) -> None:
        """Be one client, until nothing is wanted any more. Raises Closed."""

    @abstractmethod
    def progress(self, execute: Execute) -> int:
        """How much of the goal is reached."""

    def crashed(self, execute: Execute) -> None:  # noqa: B027  # most leave nothing
        """Put right what the crash of this process left undone outside of the recipe."""

    @abstractmethod
    def result(self, execute: Execute, seconds: float) -> Result:
        """Read the books when all is over."""

    def read_events(self, execute: Execute) -> Counter[str]:
        """Read the notes."""
        counts: dict[bytes, bytes] = execute("HGETALL", self.events_key)
        return Counter({name.decode(): int(count) for name, count in counts.items()})


class Context(Generic[K]):
    """What the clients of one process share during one trial."""

    def __init__(self, scenario: K, inject: Callable[[Fault, float], None]) -> None:
        self.scenario = scenario
        self.inject = inject  # makes a fault happen to this process, or thread, for so many seconds
        self.local_lock = scenario.make_local_lock()
        self.locks = Interlock(scenario.url, prefix=scenario.prefix)
        self.closed = threading.Event()


class Client(Generic[K]):
    """One attempt of a client; what a recipe has to work with."""

    poll_interval: ClassVar[tuple[float, float]]  # seconds between two tries of the recipes that have to poll

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
        """The time of day, by the clock of this process: seconds."""
        return time.time() + self.scenario.clock_offset

    def record(self, event: str) -> None:
        """Count something that was seen to happen."""
        self.execute("HINCRBY", self.scenario.events_key, event, 1)

    def take_number(self) -> None:
        """Be the next one; from now on the fault of this number may happen."""
        self.number = self.execute("INCR", self.scenario.counter_key)
        self._fault = self.scenario.faults.get(self.number)

    def wait(self, take: Callable[[], T | None]) -> T:
        """Try until `take()` gives the lock; raises Closed when the trial is closed first."""
        while not (got := take()):
            if self.context.closed.wait(random.uniform(*self.poll_interval)):
                raise ScenarioClosed
        return got

    def inject_at(self, point: Point) -> None:
        """Meet the fault that is planned for this number at this point, if there is one: once."""
        fault = self._fault
        if fault is None or fault.point != point:
            return
        self._fault = None
        self.record(fault.kind)
        if fault.kind == "error":
            raise CardDeclined
        self.context.inject(fault, fault.ttls * self.scenario.ttl)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(ABC):
    """What the books say after a trial."""

    strengths: ClassVar[Mapping[str, str]]  # what interlock is praised for, by what was seen
    uneventful: ClassVar[str]  # what is said of it when nothing happened

    seconds: float
    events: Counter[str]  # the notes, and what the books tell besides

    @property
    @abstractmethod
    def correct(self) -> bool:
        """Whether all came out as it should."""

    @property
    @abstractmethod
    def failure(self) -> str:
        """What is said of a bad result that has not shown the recipe's own flaw."""

    @abstractmethod
    def numbers(self) -> dict[str, int]:
        """The numbers of the table, by column."""

    def addition(self, event: str) -> str:  # noqa: ARG002  # most have nothing to add
        """What is to be added to the flaw with this sign."""
        return ""

    def explain(self, recipe: Recipe[Any]) -> str:
        """Explain the result in a sentence, by what was seen."""
        events = self.events
        if recipe.event and events[recipe.event]:
            return recipe.flaw.format_map(events) + self.addition(recipe.event)
        if not self.correct:
            return self.failure
        if not recipe.event:
            shown = [f"{text} ({events[event]}x)" for event, text in self.strengths.items() if events[event]]
            return ", ".join(shown) or self.uneventful
        return "nothing went wrong in this run"
