"""The flash sale: a shop with N tickets, its buyers, their bad luck, and the books.

A sale is what shops do, a read and then a write:

    HGET shop stock                      ->  7
    (a moment of thought)
    HSET shop stock 6  sale:<entry> 7    ->  ticket 7 is sold

The write is one command for the stock and for the ledger, so a crash never sells half a ticket, and the books are
right whatever became of the buyer. The stock can be wrong, as two buyers can read the same 7; the ledger cannot: it has
a line for each sale and says which ticket was sold. So `sold` counts lines, and a ticket on two lines was sold twice.

Bad luck is planned. An *entry* is a buyer getting past the lock; the server numbers them, so "entry 12" is the same
moment of the sale for every recipe, whichever process it falls to. The plan, made from a seed, says which entry meets
which fault, and where: just after the lock is *taken*, while *holding* it between read and write, or while *releasing*
it. A recipe breaks at its own weak point; the plan does not know recipes. These are the rules of the plan:

  1. The crash comes first. Later it might take a sleeping buyer along, whose late write is the flaw to be shown.
  2. Who is late in releasing (past its TTL) is followed by one that holds for long (within its TTL). So when the late
     one awakes there is somebody else's lock to be freed, and its holder is still inside.
  3. Between two of them is a sale at least, so that a shop where nothing is sold for long is known to be stuck.
  4. What is to outlive a TTL lasts more than half a TTL longer, enough for others to get in on a busy machine.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import redis

from interlock import Interlock
from interlock.connect import address
from interlock.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Account", "Buyer", "Closed", "Declined", "Fault", "Sale", "Till", "Wire", "plan"]

T = TypeVar("T")
Ask = Callable[..., Any]  # a Redis command, word by word, and its reply
Point = Literal["taken", "holding", "releasing"]

_THINK = (0.002, 0.004)  # seconds between read and write
_POLL = (0.01, 0.03)  # seconds between two tries of the recipes that have to poll
_ANSWER = 5.0  # seconds within which a server must answer


class Declined(Exception):  # noqa: N818  # it is an event of the sale, and no mistake
    """The buyer's card was declined: an exception in the middle of a sale, as happens to all code."""


class Closed(Exception):  # noqa: N818
    """The shop has closed while the buyer waited for the lock."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, where in a sale, and for how many TTLs of the lock.

    `crash`: the process is killed. `pause`: it is stopped (SIGSTOP), as by a long collection or a suspended machine.
    `slow`: only this buyer takes long. `error`: an exception in the section.
    """

    kind: Literal["crash", "pause", "slow", "error"]
    point: Point
    ttls: float = 0.0


def plan(tickets: int, seed: int) -> dict[int, Fault]:
    """The faults of a sale of so many tickets, by number of entry. See the rules above."""
    dice = random.Random(seed)
    episodes = [
        [Fault("error", "holding")],
        [Fault("slow", "holding", 1.7)],
        [Fault("pause", "holding", 1.7)],
        [Fault("slow", "releasing", 1.4), Fault("slow", "holding", 0.85)],
    ]
    dice.shuffle(episodes)
    faults: dict[int, Fault] = {}
    entry = 1
    for episode in [[Fault("crash", "taken")], *episodes]:
        entry += dice.randint(1, max(1, tickets // 10))
        for fault in episode:
            faults[entry] = fault
            entry += 1
    return faults


@dataclass(frozen=True, slots=True)
class Sale:
    """One sale under one recipe: all that a worker process must know."""

    recipe: str
    url: str
    prefix: str  # of every key, this sale's own
    tickets: int
    buyers: int  # in each process
    ttl: float  # of the lock, seconds
    patience: float  # how often sales may stand still before the shop closes
    faults: dict[int, Fault] = field(default_factory=dict[int, Fault])

    @property
    def shop(self) -> str:
        """The hash with the stock and the ledger."""
        return f"{self.prefix}shop"

    @property
    def lock(self) -> str:
        """The key that is the lock of all recipes that have one in the server."""
        return f"{self.prefix}lock"

    @property
    def notes(self) -> str:
        """The hash that counts what was seen to happen; kept in the server, for processes crash."""
        return f"{self.prefix}notes"

    @property
    def entries(self) -> str:
        """The counter of entries."""
        return f"{self.prefix}entries"


class Wire:
    """A bare connection, on which any command may be said; replies are bytes and numbers. For one thread."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a bad URL, Unavailable where nobody answers."""
        self._address = address(url, for_asyncio=False)
        with self._told():
            self._connection = self._address.connection(_ANSWER)  # its methods have no types
            self._connection.connect()

    def ask(self, *words: str | bytes | float) -> Any:
        """Say a command, word by word, and return the reply."""
        with self._told():
            self._connection.send_command(*words)
            return self._connection.read_response()

    def close(self) -> None:
        """Hang up."""
        self._connection.disconnect()

    @contextlib.contextmanager
    def _told(self) -> Generator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            raise Unavailable(f"{self._address.shown}: {error}") from error


class Till:
    """What the buyers of one process share during one sale."""

    def __init__(self, sale: Sale, suffer: Callable[[Fault, float], None]) -> None:
        self.sale = sale
        self.suffer = suffer  # makes a fault happen to this process, or thread, for so many seconds
        self.mutex = threading.Lock()
        self.locks = Interlock(sale.url, prefix=sale.prefix)
        self.closed = threading.Event()


class Buyer:
    """One attempt to buy a ticket; what a recipe has to work with."""

    def __init__(self, till: Till, ask: Ask) -> None:
        self.till = till
        self.ask = ask
        self.lock = till.sale.lock
        self.ttl_ms = round(till.sale.ttl * 1000)
        self.token = b"%032x" % random.getrandbits(128)
        self.entry = 0
        self._entered_at = 0.0

    def note(self, what: str) -> None:
        """Count something that was seen to happen."""
        self.ask("HINCRBY", self.till.sale.notes, what, 1)

    def wait(self, take: Callable[[], T | None]) -> T:
        """Try until `take()` gives the lock; raises Closed when the shop closes first."""
        while not (got := take()):
            if self.till.closed.wait(random.uniform(*_POLL)):
                raise Closed
        self.enter()
        return got

    def enter(self) -> None:
        """Be the next one past the lock."""
        self._entered_at = time.monotonic()
        self.entry = self.ask("INCR", self.till.sale.entries)
        self.point("taken")

    def stock(self) -> int:
        """How many tickets are left."""
        return int(self.ask("HGET", self.till.sale.shop, "stock"))

    def sell(self, write: Ask | None = None) -> bool:
        """Read, think, write: buy a ticket if there is one left. False: sold out."""
        stock = self.stock()
        if stock <= 0:
            return False
        time.sleep(random.uniform(*_THINK))
        self.point("holding")
        if time.monotonic() - self._entered_at > self.till.sale.ttl:
            self.note("late")
        (write or self.ask)("HSET", self.till.sale.shop, "stock", stock - 1, f"sale:{self.entry}", stock)
        return True

    def point(self, point: Point) -> None:
        """Meet the fault that is planned for this entry at this point, if there is one."""
        fault = self.till.sale.faults.get(self.entry)
        if fault is None or fault.point != point:
            return
        self.note(fault.kind)
        if fault.kind == "error":
            raise Declined
        self.till.suffer(fault, fault.ttls * self.till.sale.ttl)

    def delete(self) -> None:
        """DEL the lock; as GETDEL, for the books: it tells whose lock was freed."""
        freed = self.ask("GETDEL", self.lock)
        if freed not in {None, self.token}:
            self.note("freed")

    def look_back(self) -> None:
        """Note it if the lock was left locked."""
        if self.ask("GET", self.lock) == self.token:
            self.note("kept")


@dataclass(frozen=True, slots=True)
class Account:
    """What the books say after a sale."""

    tickets: int
    sold: int
    seconds: float
    seen: Counter[str]  # the notes; `endless`: the lock was left without end; `twice`: sales of a ticket sold before

    @property
    def oversold(self) -> int:
        """Tickets sold that there were not."""
        return max(0, self.sold - self.tickets)

    @property
    def lost_sales(self) -> int:
        """Tickets left over, though buyers were waiting."""
        return max(0, self.tickets - self.sold)

    @classmethod
    def read(cls, sale: Sale, ask: Ask, seconds: float) -> Account:
        """Read the ledger and the notes of a sale that is over."""
        books: dict[bytes, bytes] = ask("HGETALL", sale.shop)
        tickets = [ticket for line, ticket in books.items() if line.startswith(b"sale:")]
        notes: dict[bytes, bytes] = ask("HGETALL", sale.notes)
        seen: Counter[str] = Counter({name.decode(): int(count) for name, count in notes.items()})
        if ask("PTTL", sale.lock) == -1:
            seen["endless"] = 1
        seen["twice"] = len(tickets) - len(set(tickets))
        return cls(sale.tickets, len(tickets), seconds, seen)
