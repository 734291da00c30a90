"""The simulator: the real core and the real Lua on a virtual clock and a virtual network, all from one seed.

Theory. What a lock promises, it promises for every order in which messages, timers, pauses, crashes and
cancellations can come. Tests over real sockets see a few of these orders. Here nothing is real but the code under
test: asyncio's API, `Session`, `Core`, `Renewal`, `Waiters` and `Undo` run over a port whose clock, network and
background work are events of a scheduler; the scripts run in a real Lua over a small Redis in memory. A second costs
milliseconds, and a seed is one run, to the byte: what it found can be looked at again, and made small.

    chance      random numbers that stay put when something else is left out
    scheduler   time;  coroutines: what runs in it, and the places of an await at which something can strike
    server      the Lua;  commands: the small Redis around it
    group        the processes behind one address;  outages: how one comes after the other
    network     delays, losses, copies;  port: what the core sees of it
    profiles    which faults, how often, in which world;  faults: what they do
    subjects    what is tested: lock, rlock, semaphore, ... each with what its workers do and what must hold for it
    clients     processes;  workers: what they do with what they take;  terms: for how long, and how
    scenario    the course of a run: fault phase, quiet phase, drain;  simulation: one run, and its report
    invariants  what must hold at every instant
    plan        what a run decided, and what of it shall happen again
    shrinking   from a failing seed to its smallest story
    batch, cli  many seeds on all cores; the command line

Rules. (1) Nothing is patched but chance (random numbers and tokens come from the seed), and which task is the current
one. (2) Workers use the public API. (3) A rule that a profile can't keep is relaxed by name, never by luck.

Modelled: delay, loss, copies and late messages; refused and broken connections; a lost or doubled push; a broken
subscription; cancellations, pauses, crashes and closings at every await (before it, in it, at its end, and in the
moment of a handover) or at any time; clocks that start anywhere and drift; revocations, also by force; `extend`,
`execute`, `max_hold`, dropped leases; a server that forgot its scripts, is out of memory, was flushed, or whose clock
was set; servers that restart and fail over, with and without loss; an old primary that goes on beside the new one;
several servers that know nothing of each other, with clocks that differ.

Not modelled: clusters, acknowledged grants; eviction of single keys; errors like LOADING; fork; garbage collection in
the middle; a suspended machine whose timers stand still; threads that run at once (a step of a coroutine is atomic, as
under asyncio); the ports of single servers, the client libraries and RESP; thousands of waiters.
"""

from __future__ import annotations

from .plan import Fault, Plan, Section
from .profiles import PROFILES, RELAXED, SERVERS, SIDE_BY_SIDE, SNAPSHOTS, WORLDS, Profile, natural
from .shrinking import Shrunk, shrink
from .simulation import Report, simulate
from .subjects import SUBJECTS, Subject, subject_of

__all__ = [
    "PROFILES", "RELAXED", "SERVERS", "SIDE_BY_SIDE", "SNAPSHOTS", "SUBJECTS", "WORLDS", "Fault", "Plan", "Profile",
    "Report", "Section", "Shrunk", "Subject", "natural", "shrink", "simulate", "subject_of",
]  # fmt: skip
