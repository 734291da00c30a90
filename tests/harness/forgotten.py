"""Connections that were idle for long, and connections that somebody forgot: of the pools of one Interlock."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from interlock._transports.blocking.pool import BlockingPool

if TYPE_CHECKING:
    from interlock._session.session import Session

A_WHILE = 60.0  # seconds


def pools(session: Session) -> list:
    """The pool of each server: of one, of the nodes of a cluster, or of a quorum."""
    server = session.server
    if hasattr(server, "slots"):
        return [node.server.pool for node in server.slots._nodes.values()]
    return [node.server.pool for node in server.nodes] if hasattr(server, "nodes") else [server.pool]


def connections(pool) -> list:
    """The open connections of a pool that no caller uses, without that of a subscription for threads."""
    if isinstance(pool, BlockingPool):
        return list(pool.idle)
    return [*pool._spares, *([pool._connection] if pool._connection and not pool._connection.broken else [])]


def socket_of(connection) -> socket.socket:
    """The socket of a connection of either mode."""
    return connection._sock if hasattr(connection, "_sock") else connection.transport.get_extra_info("socket")


def stay_idle(session: Session) -> None:
    """Let all open connections have been idle for a while, as if this test had waited for so long."""
    for pool in pools(session):
        for connection in connections(pool):
            if isinstance(pool, BlockingPool):
                connection.last_answered_sent -= A_WHILE
            else:
                connection._silent_since -= A_WHILE


def forget(session: Session) -> None:
    """Let all open connections have been idle for a while, and lead nowhere from now on, without a sign.

    What the client sends goes to another socket, which nobody reads.
    """
    stay_idle(session)
    for pool in pools(session):
        for connection in connections(pool):
            near, far = socket.socketpair()
            _deaf.append(far)
            os.dup2(near.fileno(), socket_of(connection).fileno())
            near.close()
            if isinstance(pool, BlockingPool):
                connection._limit = 0.0  # of the socket before


def close_forgotten() -> None:
    """Close the other ends of forgotten connections, once the test has closed its Interlocks."""
    while _deaf:
        _deaf.pop().close()


_deaf: list[socket.socket] = []
