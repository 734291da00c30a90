"""The transports: one for threads, one for asyncio, and the commands and replies that both use.

connections    the contract of both: ConnectionPool, Connection, and PendingReplies, which nobody has read yet
resp           commands and replies as bytes
handshake      the first commands on a connection
pushes         what the server sends unasked
blocking/      for threads;  asyncio/: for tasks
"""
