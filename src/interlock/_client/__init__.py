"""The algorithm: how a lease is acquired, held, renewed and released. No threads, no event loop, no sockets.

`requests` sends one request, and sends it again; `core` acquires; `holding` is what holders do with a lease; `turns`
lets callers of one process wait for each other; `waiting` is the client's side of the queue; `renewal` keeps leases
alive and reports their ends; `undo` and `giving_back` take back what nobody uses; `worker` runs the periodic tasks.
`grant` has the data: an attempt, and what the client knows of a lease.
"""
