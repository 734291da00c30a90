"""The flash sale: a shop with N tickets, its buyers, the faults, and the ledger.

A sale is a read and then a write, as in many shops:

    HGET shop stock                      ->  7
    (a short pause)
    HSET shop stock 6  sale:<entry> 7    ->  ticket 7 is sold

One command writes both the stock and the ledger, so a crash never sells half a ticket, and the ledger is right
whatever happens to the buyer. The stock can be wrong, since two buyers can read the same 7. The ledger cannot: each
sale adds a line with its ticket. So `sold` counts lines, and a ticket on two lines was sold twice.

The server numbers *entries* for the faults (see `scenario`): an entry is a buyer that passes the lock. The rules of
the plan:

 (a) The crash comes first. Later, it could kill a paused buyer, whose late write is a flaw that the demo must show.
 (b) After a buyer that releases late (past its TTL), the next buyer holds for long (within its TTL). So when the late
     buyer runs again, it can free the lock of another buyer that is still inside.
 (c) Between two episodes of faults there is at least one sale: a long time without a sale means that the shop is stuck.
 (d) A fault that must outlast a TTL lasts more than half a TTL longer, so that others get in even on a busy machine.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from interlock.cli.demo.scenario import CardDeclined, Client, Column, Context, Fault, Result, Scenario, schedule_faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.cli.demo.connection import BareConnection, Execute
    from interlock.cli.demo.recipe import Recipe

__all__ = ["Buyer", "FlashSale", "SaleResult", "plan"]

T = TypeVar("T")

_THINK_SECONDS = (0.002, 0.004)  # seconds between read and write


def plan(tickets: int, seed: int) -> dict[int, Fault]:
    """The faults of a sale of so many tickets, by the number of the entry. The rules are above."""
    rng = random.Random(seed)
    episodes = [
        [Fault("error", "holding")],
        [Fault("slow", "holding", 1.7)],
        [Fault("pause", "holding", 1.7)],
        [Fault("slow", "releasing", 1.4), Fault("slow", "holding", 0.85)],
    ]
    rng.shuffle(episodes)
    return schedule_faults([[Fault("crash", "taken")], *episodes], rng, max(1, tickets // 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashSale(Scenario):
    """One flash sale under one recipe."""

    columns = (
        Column("sold", "sold"),
        Column("oversold", "oversold", "bold red"),
        Column("lost_sales", "lost", "yellow"),
    )
    done_label = "sold"

    recipe: Recipe[Callable[[Buyer], bool]]

    @property
    def shop(self) -> str:
        """The hash with the stock and the ledger."""
        return f"{self.prefix}shop"

    def prepare(self, execute: Execute) -> None:
        """Write the initial stock."""
        execute("HSET", self.shop, "stock", self.goal)

    def run_client(self, context: Context[Any], connection: BareConnection) -> None:
        """Buy ticket after ticket until they are sold out."""
        buy = self.recipe.run
        has_tickets = True
        while has_tickets:
            buyer = Buyer(context, connection)
            with contextlib.suppress(CardDeclined):
                has_tickets = buy(buyer)
            buyer.count_if_still_locked()

    def count_done(self, execute: Execute) -> int:
        """How many tickets were sold so far."""
        lines: int = execute("HLEN", self.shop)
        return lines - 1

    def result(self, execute: Execute, seconds: float) -> SaleResult:
        """Read the ledger and the events."""
        ledger: dict[bytes, bytes] = execute("HGETALL", self.shop)
        tickets = [ticket for line, ticket in ledger.items() if line.startswith(b"sale:")]
        events = self.read_events(execute)
        if execute("PTTL", self.lock) == -1:
            events["no_ttl"] = 1
        events["sold_twice"] = len(tickets) - len(set(tickets))
        return SaleResult(tickets=self.goal, sold=len(tickets), seconds=seconds, events=events)


class Buyer(Client[FlashSale]):
    """One attempt to buy a ticket."""

    poll_interval = (0.01, 0.03)
    _entered_at = 0.0

    def wait(self, take: Callable[[], T | None]) -> T:
        """Call `take()` until it returns the lock, and enter; raises ScenarioClosed if the scenario is closed first."""
        taken = super().wait(take)
        self.enter()
        return taken

    def enter(self) -> None:
        """Take the next number, as the buyer that has just passed the lock."""
        self._entered_at = time.monotonic()
        self.take_number()
        self.inject_at("taken")

    def read_stock(self) -> int:
        """How many tickets are left."""
        return int(self.execute("HGET", self.scenario.shop, "stock"))

    def sell(self, write: Execute | None = None) -> bool:
        """Read the stock, pause, write: buy a ticket if one is left. Returns False if the tickets are sold out."""
        stock = self.read_stock()
        if stock <= 0:
            return False
        time.sleep(random.uniform(*_THINK_SECONDS))
        self.inject_at("holding")
        if time.monotonic() - self._entered_at > self.scenario.ttl:
            self.count_event("past_ttl")
        (write or self.execute)("HSET", self.scenario.shop, "stock", stock - 1, f"sale:{self.number}", stock)
        return True

    def delete(self) -> None:
        """Delete the lock: with GETDEL instead of DEL, which also returns whose lock it was, for the result."""
        freed = self.execute("GETDEL", self.lock)
        if freed not in {None, self.token}:
            self.count_event("freed_other")

    def count_if_still_locked(self) -> None:
        """Count the event if this buyer has not released the lock."""
        if self.execute("GET", self.lock) == self.token:
            self.count_event("not_released")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaleResult(Result):
    """The ledger of a sale. Events: `no_ttl`, a lock without TTL was left; `sold_twice`, a ticket was sold again."""

    strengths: ClassVar = {
        "slow": "renewed for slow buyers",
        "refused": "a late write refused by the server",
        "crash": "a crash waited out",
    }
    uneventful = "one at a time, in order"

    tickets: int
    sold: int

    @property
    def is_correct(self) -> bool:
        """Whether the buyers bought exactly the tickets in stock."""
        return self.sold == self.tickets

    @property
    def failure(self) -> str:
        """How many buyers outlasted the TTL or gave up."""
        return f"{self.events['past_ttl']} buyers worked longer than the TTL, {self.events['gave_up']} gave up"

    def numbers(self) -> dict[str, int]:
        """Tickets sold; tickets sold beyond the stock; tickets left over although buyers were waiting."""
        return {
            "sold": self.sold,
            "oversold": max(0, self.sold - self.tickets),
            "lost_sales": max(0, self.tickets - self.sold),
        }

    def addition(self, event: str) -> str:
        """A recipe that does not release shares the flaw of a recipe that is right but for the TTL."""
        late = self.events["past_ttl"] if event == "not_released" and self.sold > self.tickets else 0
        return f"; work outlasted it ({late}x)" if late else ""
