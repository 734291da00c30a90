"""The algorithm: how a lease is acquired, held, renewed and released. No threads, no event loop, no sockets.

acquiring      asks, waits, gives up;  retries: one request, sent again until a reply counts
waiting        the client's side of the queue in the server
cohort         callers of one process that wait for each other;  cohorts: all of them;  turns: what such a caller does
holding        what holders do with a lease;  book: the leases that are held;  renewal keeps them alive
lease_ends     how a lease ends, and the report of it;  reports: calls of the user's code
undo           takes back an attempt that nobody wants;  giving_back: the same for a lease, in the background
unread_releases  releases for whose replies no `with` waits: reads these replies later
owed           what is given back, until the server has answered
worker         runs the periodic tasks;  people: the points at which `_people` listens
grant          the data: an attempt, and what the client knows of a lease
claim          the states of a token of this client, as a table; today the simulator reads it
self_wait      a caller that waits for what it holds itself;  places: lines of the user's code;  reentrancy: whose lease
multi, barrier, latch, election, permits   what these need besides `Core`;  inspecting: which kind uses a name
error_texts    the errors for users
"""
