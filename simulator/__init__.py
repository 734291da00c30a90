"""The simulator: the real algorithm and the real Lua on a virtual clock and a virtual network, all from one seed.

Theory. A lock must keep its promises in every order in which messages, timers, pauses, crashes and cancellations can
happen. Tests over real sockets see a few of these orders. Here only the code under test is real: the API for asyncio,
everything in `interlock/_client/`, one server and a quorum of `interlock/_servers/`, and the scripts, which run in a
real Lua over a small Redis in memory. Clock, connections and background work are events of a scheduler. A virtual
second costs milliseconds of real time. A seed determines its run to the byte, so that a failing run can be repeated and
shrunk.

A run in short: a few *clients* (processes) with a few *workers* (tasks) each use one or two *resources* of one
*subject* (lock, semaphore, ...), while the faults of one *profile* strike. After every step the *invariants* check the
rules. `docs/simulator.md` tells how to use the simulator. The map of the source:

    one run
      simulation     isolate the process, run one seed, report
      scenario       the course of a run: fault phase, quiet phase, drain;  parts: its parts, as protocols
      plan           the decisions of a run, and how to repeat only some of them
    time and chance
      scheduler      the heap of later events: virtual time
      coroutines     tasks that wait for futures, and the points of an await at which a fault can strike
      loop           what the API needs of the module asyncio
      chance         random numbers that stay the same when a plan leaves out something else
      substitutes    what interlock's modules get in place of time and chance
    servers and the network
      server         a small Redis that runs the real scripts;  commands: its commands;  messages: requests in a call
      server_group   the processes behind one address, of which one is the primary
      network        messages on their way: delayed, lost, doubled, late
      sim_server     a server of `interlock/_servers/`;  sim_pool: its connections;  sim_runtime: clock and events
    clients
      clients        processes with a session, and their workers
      workers        how a worker acquires, holds and releases;  usage: the random choices of one use
      subjects/      the synchronizers under test: the actions of workers, and the rules of that synchronizer
    faults
      profiles       which faults, how often, in which world
      faults         the effect of each fault;  strikes: when each strikes
      outages        servers that restart and fail over;  outage_kinds: how long each part of that may last
      later          a later version of interlock that shares the server
    judgement
      invariants/    the rules that must hold at every instant, S1 to S15
      shrinking      from a failing seed to the smallest run that still fails
    many runs
      coverage       which events met claims in which states, in all runs
      batch          many seeds on all cores;  cli: the command line;  progress: its progress bar
    exhaustive/      other searches: every order of events within bounds, without seeds

Rules.
(a) The simulator replaces only time, chance (random numbers, tokens) and what interlock's modules use of asyncio.
(b) Workers use the public API.
(c) A profile under which a rule can't hold relaxes the rule by name, never by luck.

Modelled: delayed, lost, doubled and late messages; refused and broken connections; lost and doubled pushes; broken
subscriptions; cancellations, pauses, crashes and closings at every await (before it, in it, at its end, and in the
moment of a handover) or at any time; clocks that start anywhere and drift; revocations, also by force; `extend`,
`execute`, `max_hold`, dropped leases; a server that forgets its scripts, has no memory left, is flushed, or whose clock
is set; servers that restart and fail over, with and without loss; an old primary that goes on beside the new one;
several independent servers with different clocks.

Not modelled: clusters; grants with acks; eviction of single keys; errors like LOADING; fork; garbage collection during
a run; a suspended machine whose timers stand still; threads that run at the same time (a step of a coroutine is atomic,
as under asyncio); the transports, the client libraries and RESP; thousands of waiters.
"""

from __future__ import annotations

from .plan import Fault, Plan, Section
from .profiles import (
    CROWDS,
    EVERY,
    PROFILES,
    RELAXED,
    SERVERS,
    SIDE_BY_SIDE,
    SNAPSHOTS,
    VOTERS,
    WORLDS,
    Profile,
    profile_of,
)
from .shrinking import Shrunk, shrink
from .simulation import Report, simulate
from .subjects import SUBJECTS, Subject, subject_of

__all__ = [
    "CROWDS", "EVERY", "PROFILES", "RELAXED", "SERVERS", "SIDE_BY_SIDE", "SNAPSHOTS", "SUBJECTS", "VOTERS", "WORLDS",
    "Fault", "Plan", "Profile", "Report", "Section", "Shrunk", "Subject", "profile_of", "shrink", "simulate",
    "subject_of",
]  # fmt: skip
