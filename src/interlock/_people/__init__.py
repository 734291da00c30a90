"""What people learn of locks: who holds what and where, who waits for long, who revoked what, metrics and traces.

The protocol decides nothing by what stands here, and `_client` imports nothing of it: `_client/people.py` has the
points at which it is plugged in.

`registry` tells other processes what this one holds and waits for, and reads what they say; `answers` asks the server
one question for many callers. `timeouts` says more in the error of a caller whose time is over, `long_waits` logs
waits that last, `looks` is the task of these, and `deadlock_search` finds cycles of waits. `revocation` revokes, with
a note in the audit. `views` joins what the server and the processes say of a name, `motion` says whether it moves, and
`fleet` looks at all names again and again. `observed` turns what the client reports into calls of the observers, which
`observer` defines; `observation` is what is kept about one attempt, and `grant_log` the observer that logs grants.
`machine` says whether a process on this host has ended.
"""
