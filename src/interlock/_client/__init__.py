"""The algorithm: how a lease is acquired, held, renewed and released. No threads, no event loop, no sockets.

`requests` sends one request, and sends it again; `core` acquires; `holding` is what holders do with a lease; `turns`
lets callers of one process wait for each other; `waiting` is the client's side of the queue; `book` has the leases
that are held, `renewal` keeps them alive, `lease_ends` reports their ends; `undo`, `leaving` and `giving_back` give
back what nobody uses, and `owed` has it until the server has answered; `worker` runs the periodic tasks. `grant` has
the data: an attempt, and what the client knows of a lease.
"""
