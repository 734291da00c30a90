"""The bottom layer: names, times, and the types that client, transports and servers share.

types          the contracts Server, Runtime and PushHandler; messages, routes, errors
acks           how many replicas must have a grant
timing         durations that several layers use;  names, tokens: what may be in a name and is in a token
run            runs a coroutine that never suspends;  log, lock_fields: the logger, and what its records carry
"""
