"""One client: `session` joins the algorithm (`_client`) with what people learn of it (`_people`).

`session` also handles pushes, forks and `close()`.
"""
