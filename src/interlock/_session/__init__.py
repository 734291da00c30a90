"""One client: `session` joins the algorithm (`_client`) with what people learn of it (`_people`).

`session` also handles pushes and `close()`. `open_sessions` has the sessions of this process; `fork_and_exit` says what
becomes of them when the process forks or exits.
"""
