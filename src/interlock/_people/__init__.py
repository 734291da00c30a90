"""What people learn of locks: who holds what and where, who waits for long, who revoked what, metrics and traces.

The protocol decides nothing by what stands here.

`registry` tells other processes what this one holds and waits for, and reads what they say; `answers` asks the server
one question for many callers. `long_waits` logs waits that last, and `deadlock_search` finds cycles of waits. A
`revocation` is noted in the audit. `observer` is what observers are called with, `observed` the core that calls them,
and `grant_log` the observer that logs grants.
"""
