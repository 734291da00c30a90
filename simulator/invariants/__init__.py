"""What must hold at every instant, watched from outside: in the server after each script, in clients after each event.

Rules, by the numbers in violations.
 1. At most one lease in the whole system for which `ensure()` would pass; of what several may have, no more of them
    than may be (`Thing.apart`). The same in the server, by its own clock; and it has every lease that would pass.
 2. Fences grow strictly in the order of grants; what is written right after `ensure()` is never too old.
 3. No key without a TTL, after any script, and no record whose TTL is over before the clock has reached its fence. No
    grant is longer than was asked for, nor a handover that waits for its confirmation longer than its life.
 4. If there is room for the first live waiter, it has it in time; no acquire waits for ever; a timeout bounds the call.
    A caller is told that another one has it only if a server has answered lately.
    Who holds nothing and waits for news (of a latch, a barrier, an election) has it in time.
 5. Nothing is left: a token that was taken back never holds again; with clean weather an attempt that ended
    without a lease has left its thing and the queue within a second; in the end server and clients are empty.
 6. No live waiter is overtaken by one that came later, unless it lost its subscription and can't be woken.
 7. A lease that has ended is never renewed.
 8. A lost lease is told, soon and once; a released one never.
 9. A lease is alive when it is handed to the caller, and `ensure()` never passes again after it failed.
10. No exception but those of `interlock.errors`, and no error in the log.
11. An `execute` is sent once, runs once at the most and only while its lease holds; and its caller is never told
    otherwise.
12. What a subject says of itself, where nobody else can.
13. While leases may last that a server has lost, nobody is granted anything; who has one may have it confirmed.
    By hand a quarantine is ended only by a message that names it, not by one that was meant for another server.

A lease that was taken away at once, by force, is outside rule 1 and the second half of 2: its holder hears of it later.
The same goes for leases that nobody there knows of: the server has lost all of that name, even its record, and the
first who asks is a client that came after the loss. Then rule 13 ends, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .attempts import Attempts
from .leases import Leases
from .server_state import ServerState
from .trace import Trace, Violation
from .votes import Votes

if TYPE_CHECKING:
    from collections import Counter

    from simulator.profiles import Profile
    from simulator.scheduler import World
    from simulator.server_group import ServerGroup
    from simulator.subjects import Thing

__all__ = ["Monitor", "Trace", "Violation"]

SWEEP: Final = 0.25  # seconds between two looks at what should have happened


class Monitor:
    """It sees everything and changes nothing."""

    def __init__(
        self, trace: Trace, world: World, groups: list[ServerGroup], counts: Counter[str], profile: Profile
    ) -> None:
        self.trace = trace
        self.world = world
        self.attempts = Attempts(trace, groups[0], clean=profile.clean)
        self.leases = Leases(trace, self.attempts, counts, trusted=profile.trusted)
        quiet = profile.clean and not profile.rates
        if len(groups) == 1:
            self.server_state = ServerState(trace, groups[0], self.attempts, quiet=quiet, trusted=profile.trusted)
        else:
            self.server_state = Votes(trace, groups, self.attempts, self.leases, profile)
        self.sweeping = True
        world.after_step = self.leases.after_step

    def watch(self, thing: Thing) -> None:
        """Something that will be used."""
        self.server_state.watch(thing)
        self.attempts.watch(thing)
        self.leases.watch(thing)

    def lost(self, *, lossy: bool, lasts: float, other_clock: bool) -> None:
        """Another process serves now; what it has lost may last for so many seconds."""
        self.server_state.lost(lossy=lossy, lasts=lasts, other_clock=other_clock)

    def sweep(self) -> None:
        """What should have happened by now; and again in a while."""
        self.leases.sweep()
        self.server_state.sweep()
        if self.sweeping:
            self.world.at(self.world.now + SWEEP, self.sweep)
