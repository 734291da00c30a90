"""The algorithm: how a lease is acquired, held, renewed and released. No threads, no event loop, no sockets.

`core` has the requests with their retries, and what ends them; `waiting` the client's side of the queue; `renewal`
keeps leases alive and reports their ends; `undo` takes attempts back; `worker` runs the periodic tasks. `grant` has the
data: an attempt, and what the client knows of a lease.
"""
