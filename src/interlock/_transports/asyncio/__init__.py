"""The transport for asyncio: one connection per loop carries the commands of all tasks, and the pushes.

A call appends its packed bytes to a buffer and awaits a future. The connection writes the buffer once per turn of the
loop. The server sends replies in the order of the commands (RESP), and pushes among the replies (RESP3). The future of
a cancelled call stays in the row of expected replies, so that the connection drops the late reply and gives no other
call this reply. The server executes commands in the order in which the client sent these, so an undo that follows a
cancelled acquire takes effect after the acquire.
"""
