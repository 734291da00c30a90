"""A scripted run: the events of one story, named by the beginnings of their texts; and a rolling restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .member import HOLDING
from .rules import EMPTY, Bounds
from .world import MEMBERS, World

if TYPE_CHECKING:
    from .rules import Rule
    from .world import State

ANY_NUMBER: Final = 10**6


class Run:
    """One state after the other, as a script says."""

    def __init__(self, rule: Rule, bounds: Bounds) -> None:
        self.world = World(rule, bounds)
        self.state: State = self.world.first_state()
        self.story: list[str] = []
        self.broken = ""

    def does(self, text: str) -> bool:
        """Let the first event happen whose text begins with this one. Returns whether there is one."""
        for each in self.world.next_states(self.state):
            if each.text.startswith(text):
                self.state, self.broken = each.after, self.broken or each.broken
                self.story.append(each.text)
                return True
        return False

    def is_holder(self, who: int) -> bool:
        """Whether this client holds the lock."""
        return self.state.clients[who].phase == HOLDING

    def fence(self, who: int) -> int:
        """The fence of this client."""
        return self.state.clients[who].fence


def rolling_restart(rule: Rule) -> Run:
    """A holds the lock and renews each tick; the members restart empty one by one; then B acquires the lock.

    A ttl is three ticks, as a lease is renewed each third of it. The next member restarts a tick after the one before
    votes again. The run ends early if A loses the lock.
    """
    bounds = Bounds(
        ttls=(3, 3), starts=ANY_NUMBER, renewals=ANY_NUMBER, faults=3, kinds=(EMPTY,), fences=True, used=True
    )
    run = Run(rule, bounds)
    run.does("A asks as A1; X")
    for member in "YZ":
        run.does(f"{member} gets A1's acquire")
    for member in MEMBERS[:3]:
        run.does(f"{member} {EMPTY}")
        for _ in range(bounds.ttls[0] + 2):
            if not run.is_holder(0):
                return run
            renews(run, member)
            run.does("tick")
    run.does("A releases A1")
    for member in MEMBERS[:3]:
        run.does(f"{member} gets A1's release")
    run.does("B asks as B1; X")
    for message in ("acquire", "agreed fence"):
        for member in MEMBERS[:3]:
            run.does(f"{member} gets B1's {message}")
    return run


def renews(run: Run, restarted: str) -> None:
    """Let A renew, and all members answer; the one that has restarted answers first, and then gets its re-grant."""
    if not run.does(f"A renews A1; {restarted}"):
        run.does("A renews A1; ")
    for member in MEMBERS[:3]:
        run.does(f"{member} gets A1's renewal")
    run.does(f"{restarted} gets A1's re-grant")
