"""The bottom layer: names, times, and the types that client, transports and servers share.

server         the protocols Server and PushHandler; messages, routes, errors;  runtime: the protocol Runtime
resource       what a message is about;  acks: how many replicas must have a grant
timing         durations that several layers use;  names, tokens: what may be in a name and is in a token
run_to_end     runs a coroutine that never suspends;  log, lock_fields: the logger, and what its records carry
info           the fields of a reply to INFO;  snapshot: copies of what other threads change
"""
