"""The simulator: the real core and the real Lua on a virtual clock and a virtual network, all from one seed.

Theory. A lock must keep its promises in every order in which messages, timers, pauses, crashes and cancellations can
happen. Tests over real sockets see a few of these orders. Here only the code under test is real: asyncio's API,
`Session`, `Core`, `Renewal`, `Waiters` and `Undo` run over a server whose clock, network and background work are events
of a scheduler; the scripts run in a real Lua over a small Redis in memory. A virtual second costs milliseconds of real
time. A seed determines its run to the byte, so a failing run can be repeated and shrunk.

    chance      random numbers that stay the same when a plan leaves out something else
    scheduler   time;  coroutines: the code that runs, and the points of an await at which a fault can strike
    server      the Lua;  commands: the small Redis around it
    group        the processes behind one address;  outages: how one comes after the other
    network     delays, losses, copies;  sim_server: the server as the core sees it
    profiles    which faults, how often, in which world;  faults: the effects of each fault
    subjects    the synchronizers under test: lock, rlock, semaphore, ... each with its workers' actions and its rules
    clients     processes;  workers: their actions with a lease;  terms: for how long, and how
    scenario    the course of a run: fault phase, quiet phase, drain;  simulation: one run, and its report
    invariants  what must hold at every instant
    plan        the decisions of a run, and those that shall happen again
    shrinking   from a failing seed to its smallest trace
    batch, cli  many seeds on all cores; the command line

Rules. (1) The simulator patches only chance (the seed determines random numbers and tokens) and the current task.
(2) Workers use the public API. (3) A profile that can't keep a rule relaxes the rule by name, never by luck.

Modelled: delay, loss, copies and late messages; refused and broken connections; a lost or doubled push; a broken
subscription; cancellations, pauses, crashes and closings at every await (before it, in it, at its end, and in the
moment of a handover) or at any time; clocks that start anywhere and drift; revocations, also by force; `extend`,
`execute`, `max_hold`, dropped leases; a server that forgot its scripts, is out of memory, was flushed, or whose clock
was set; servers that restart and fail over, with and without loss; an old primary that goes on beside the new one;
several independent servers, with clocks that differ.

Not modelled: clusters, acknowledged grants; eviction of single keys; errors like LOADING; fork; garbage collection in
the middle; a suspended machine whose timers stand still; threads that run at once (a step of a coroutine is atomic, as
under asyncio); the ports of single servers, the client libraries and RESP; thousands of waiters.
"""

from __future__ import annotations

from .plan import Fault, Plan, Section
from .profiles import PROFILES, RELAXED, SERVERS, SIDE_BY_SIDE, SNAPSHOTS, WORLDS, Profile, profile_of
from .shrinking import Shrunk, shrink
from .simulation import Report, simulate
from .subjects import SUBJECTS, Subject, subject_of

__all__ = [
    "PROFILES", "RELAXED", "SERVERS", "SIDE_BY_SIDE", "SNAPSHOTS", "SUBJECTS", "WORLDS", "Fault", "Plan", "Profile",
    "Report", "Section", "Shrunk", "Subject", "profile_of", "shrink", "simulate", "subject_of",
]  # fmt: skip
