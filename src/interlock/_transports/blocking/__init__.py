"""The transport for threads: none of its coroutines ever suspends.

A call takes an idle connection (or opens a new one), sends the request, waits for the reply, and puts the connection
back. So each thread that talks to the server has its own connection, and no other thread must wake up to read the
reply. Background work runs in daemon threads; one of these threads reads the subscription.
"""
