"""A model of who may vote in a quorum, and a search through every order of its events (ADR 60).

Theory. A lock of a quorum has one holder as long as no member votes that has forgotten a lease which is alive. The rule
by which a member knows this is small, and each wrong form of it breaks only in a story of several events. So the rule
stands here without a server, and a search goes through all stories within bounds, breadth first: the first broken
promise has the shortest story.

What is modelled. Each member has a role, a replid, and a clock that differs from the others by a constant. In its data
stand, for one lock, the key (token, expiry), the record (fence, replid that granted), the tombstones and the queue; and
for the server the voter record (replid, `since`, the longest max_ttl seen). A copy of the data is a copy of all that,
the voter record included. Clients ask all members under one token, and hold the lock as soon as a majority has voted
(with fences: agreed), until a ttl after they began to ask. They renew, get re-grants, release, wait in the queue, and
end. A script call is one event. A replica that takes over an address is a member that restarts without its last writes.

    rules   the rule and its wrong variants, as options; the bounds of a search; the faults
    member  one member: what each message and each fault does to its data, computed once for each state of a member
    world   clients and members together: the next events, and the promises
    search  the breadth-first search, and the story of a broken promise
    run     a scripted run: a rolling restart
    worlds  the searches with their bounds: the right rule, the wrong ones, and what is outside of the promise

Promises. In every state:
(a) At most one client holds the lock, each by its own deadline.
(b) The fence of each holder is higher than that of the holder before.
(c) No re-grant gives a token to a member at which the release of that token has arrived.
(d) Each member that is left alone votes again after max_ttl, once a client has reached it.
A scripted run shows that a lease outlives a rolling restart.

How the number of states stays small:
- Times are relative to now, and an age ends at the longest max_ttl. So any number of ticks has finitely many states. A
  fence moves away from the clock with each tick, so searches with fences bound the ticks.
- A lost message stays on its way for ever. A lost reply is a client that ends before it decides. An acquire that was
  refused stays on its way, since the client asks again under the same token.
- The first message of an attempt or a renewal arrives at once, as if the client had sent it later.
- A client decides as soon as a majority has answered: no later moment gives it a longer lease.
- Replids are numbers relative to that of now, and those of other members are all one.
- Members are alike but for their clocks, and so are clients with one max_ttl: states that differ by names are one.

What that hides. A replid that comes back (each change makes a new one: so do Redis and Valkey at a restart, a
promotion, and the first replica). Data that go from one member to another and back, for rules that compare stamps.
Clocks that drift (a clock that is set is a fault outside of the promise). More than two, in one search three, attempts,
faults and renewals at once. Losses of more than the last one or two writes that are not a loss of everything.
Revocations, takeovers by `owner=`, several locks, the isolation of a replica's old primary. The answers to one attempt
count for a whole ttl here, and for a quarter of a second in most rounds of a real client: the model finds stories that
need more luck there.
"""

from __future__ import annotations

from .rules import Bounds, Rule
from .search import Found, search

__all__ = ["Bounds", "Found", "Rule", "search"]
