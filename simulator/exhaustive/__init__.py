"""An exhaustive search of the quorum: every order of events there can be, within bounds, and not one from a seed.

Theory. Two clients take one lock of three servers. The servers run the real lock.lua. The clients are small state
machines of what PROTOCOL says a client of a quorum does: a vote from each server; the highest fence of a majority; a
second round if not a majority answered just that; validity counted from before the first send. From each state all
that can happen next is tried: a message arrives at a server, once, or with a late copy; a client decides with any
majority of the answers that are there, gives up, renews, releases; a tick passes; a server restarts without memory, or
without its last writes. Breadth first, so the first broken promise is also the shortest story of it.

    node      the real Lua, as a function of what a server remembers and a message
    column    a server and what is on its way between it and the clients
    clients   what clients do, and time
    search    breadth first over all of it, and the story of what was found

Rules. What must hold in every state:
 1. At most one client believes.
 2. The fences of successive grants grow.
 3. From here on, any majority would grant a newcomer a higher fence, once all was quiet for longer than a ttl: nothing
    is stuck for ever, and nothing is lost.

How the number of states is kept small, without leaving out a story:
- A lost message is one that stays on its way for ever, so there is no event for it. A lost reply is one that the
  client does not count when it decides.
- A message that changes nothing and is answered with nothing that counts might as well still be on its way.
- What a client sends is only of use once it arrives: so the first of it arrives at once, and the client has waited with
  the sending until then. (What it counts its lease from is never earlier by that.)
- An attempt that is over and has nothing at a server any more is forgotten there. So are attempts at the end, once
  nobody can be granted anything in the story.
- Servers are alike but for their clocks, clients are alike: states that differ by their names only are one.
- What one server does with a message is computed once (`Lua`), and so is each step of a column.

Not modelled: waiting in the servers' queues, revocation, drift of clocks (they are set differently, by constants), more
restarts than the bounds say, and messages between a client and a server that are older than the server's process, since
a connection ends with it: who sent them sends them again.
"""

from __future__ import annotations

from .clients import Bounds, Design
from .search import Found, search
from .stories import FULL, SUITE

__all__ = ["FULL", "SUITE", "Bounds", "Design", "Found", "search"]
