"""Exhaustive searches: every order of events within bounds, where a seed is only one order.

There are two searches. The second one drives real processes, one server and its restarts, and cohorts of threads:

    world      real processes, one server, and what is on its way: states, next events, rules
    process    one process: the real session, whose inputs the search chooses
    tasks      the coroutines of a process, and their timers
    wire       its connections: what it sends becomes a request for the search
    isolation  no real clock and no chance around the processes
    automaton  a process as numbered states, so that the real code runs once for each step
    fingerprint  when two processes are in one state
    memory     the real Lua as a function, from the keys of a server and a message to the next keys and the reply
    orders     the breadth-first search
    telling    an event as text
    stories    the searches that the suite makes, with their bounds: of both

The first one searches the quorum's protocol, and the rest of this text is about that one.

Theory. Two clients acquire one lock of three servers. The servers run the real lock.lua. The clients are small state
machines of what PROTOCOL says that a client of a quorum does: it asks each server for a vote; it takes the highest
fence of a majority; it sends that fence in a second round unless a majority answered just that fence; it counts the
validity of its lease from before the first send. From each state the search tries every next event: a message arrives
at a server, once or with a late copy; a client decides by any majority of the replies that are there, gives up, renews,
releases; a tick passes; a server loses data (`column` says how). Each server judges by its voter record whether it
counts, and a client that has renewed its lease asks a server that lost it to grant it again. The search is breadth
first, so the first broken promise is also the one with the shortest story.

    node      the real Lua as a function, from a stored lock and a message to the lock after it and the reply
    column    one server, and its messages on their way from and to the clients
    clients   the actions of clients, and time
    search    the breadth-first search, and the story of a broken promise
    stories   the searches that the suite makes, with their bounds

Rules. In every state:
(a) At most one client holds the lock.
(b) The fences of successive grants grow.
(c) If nothing happened for longer than a ttl after a new client has connected, any majority would grant it a higher
    fence: nothing is stuck for ever, and no fence is lost.
(d) A lease that was released comes back at no server by a re-grant.

How the number of states stays small, without leaving out a story:
- A lost message is a message that stays on its way for ever, so a loss needs no event. A lost reply is a reply that the
  client does not count when it decides.
- A message that changes nothing, and whose reply does not count, may as well still be on its way.
- A client's messages matter from their first arrival on. So the first message of a round arrives at once, as if the
  client had sent the round later. That never makes the client count its lease from an earlier time.
- An attempt that has ended, and has nothing at a server any more, is forgotten there. A state in which no client can
  get a grant any more has no next event.
- Servers are alike but for their clocks, and clients are alike: states that differ only by their names are one state.
- The effect of a message on a server is computed once (`Lua`), and so is each step of a column.

Not modelled: waiters in the servers' queues; revocations; drift of clocks (clocks differ by constants); two `max_ttl`;
a server while it is re-seeded, when it refuses all; a server that two addresses lead to; more losses of data than the
bounds allow; messages that are older than the server's process: its connections end with it, and clients send
such messages again.
"""

from __future__ import annotations

from .clients import Bounds, Design
from .search import Found, search
from .stories import FULL, SUITE

__all__ = ["FULL", "SUITE", "Bounds", "Design", "Found", "search"]
