"""What a transport implements: `ConnectionPool`, and its `Connection`s, to one server.

Theory. `SingleServer` needs little of a connection: to send a command and wait for its reply; or to send several
commands, and read their replies later. In between, the connection holds the unread replies (`PendingReplies`), and it
gives each reply to the command to which the reply belongs.

Rules.
(a) Each `take` or `checkout` ends with `checkin`, or with `discard` after an error: then a late reply reaches no other
    command.
(b) A reply that nobody reads does no harm. The connection reads and drops it before the next reply, or when it arrives.
(c) A connection that was given back may have unread replies. Its next user reads them, or `read_unread` if nobody uses
    the connection. A connection that breaks leaves an error in their place.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Protocol

from interlock._quarantine.stamp import IdentityStamp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._protocol.server import PushHandler

Command = bytes
"""A command as it travels: see `resp`."""
NO_STAMP: Final = IdentityStamp(None, None, "-")  # of a connection before its handshake is over: it sends nothing


def inode_of(number: int) -> int:
    """What tells the file with this number from one that gets the number later; 0 if there is no such file."""
    try:
        return os.fstat(number).st_ino
    except OSError:
        return 0


class PendingReplies:
    """The replies to commands that were sent together: those that have arrived, or the error in their place.

    On an asyncio connection, this object stands in the row of expected replies once for each reply, like a future.
    """

    __slots__ = ("error", "fileno", "number", "on_complete", "replies")

    def __init__(self, number: int, fileno: int = -1) -> None:
        self.number = number
        self.fileno = fileno  # of the socket on which they arrive, where threads wait for it
        self.replies: list[object] = []
        self.error: Exception | None = None
        self.on_complete: Callable[[], None] | None = None  # called once all replies or an error are there

    @property
    def is_complete(self) -> bool:
        """Whether all replies are there, or an error in their place."""
        return self.error is not None or len(self.replies) == self.number

    def done(self) -> bool:
        """Like `Future.done`: whether no more replies are taken, because of an error."""
        return self.error is not None

    def set_result(self, reply: object) -> None:
        """Like `Future.set_result`: add the next reply."""
        self.replies.append(reply)
        if self.on_complete is not None and len(self.replies) == self.number:
            self.on_complete()

    def set_exception(self, error: Exception) -> None:
        """Like `Future.set_exception`: note the error, after which no more replies arrive."""
        self.error = error
        if self.on_complete is not None:
            self.on_complete()

    def exception(self) -> Exception | None:
        """Like `Future.exception`: the error, or None."""
        return self.error


class Connection(Protocol):
    """An open connection, after its handshake. Every `until` is a time of `Runtime.now()`."""

    stamp: IdentityStamp
    """The identity of the server to which the connection leads. Each read from the server is noted there."""

    async def exchange(self, command: Command, until: float) -> object:
        """Send a command, and wait for its reply; an error reply is a value. Raises Disconnected."""
        ...

    def send(self, commands: Sequence[Command], until: float) -> PendingReplies:
        """Send commands, and wait for nothing. Raises Disconnected."""
        ...

    def flush(self) -> None:
        """Write at once what was sent, also if the caller goes on without a pause. Raises Disconnected."""
        ...

    async def receive(self, pending: PendingReplies, until: float) -> list[object]:
        """Wait for all of these replies. Raises Disconnected."""
        ...

    def checkin(self) -> None:
        """Give the connection back to its pool."""
        ...

    async def read_unread(self, pending: PendingReplies, until: float) -> None:
        """After a checkin: wait for these replies, or for an error in their place, unless another caller does."""
        ...

    def discard(self, error: BaseException) -> None:
        """Give the connection back after this error: no caller waits for its replies any more."""
        ...

    def drop_all(self, why: str) -> None:
        """Close all connections to this server: a new one may lead to the primary, or log in again."""
        ...


class ConnectionPool(Protocol):
    """The connections of one client to one server, one of which receives the pushes."""

    push_handler: PushHandler

    @property
    def ready(self) -> bool:
        """Whether a connection is open, so that a call need not connect first."""
        ...

    def take(self) -> Connection | None:
        """An open connection that surely leads to the primary, if there is one: `checkout` without waiting."""
        ...

    async def checkout(self, until: float) -> Connection:
        """A connection that leads to the primary; opened if necessary. Raises Disconnected or LockError."""
        ...

    async def checkout_exclusive(self, until: float) -> Connection:
        """Like `checkout`, but no other caller uses the connection until this caller gives it back."""
        ...

    async def wait_any(self, pending: Sequence[PendingReplies], number: int, until: float) -> list[int]:
        """Wait until so many of these are complete, at most to `until`. Returns the indexes of the complete ones."""
        ...

    @property
    def subscribed(self) -> set[str]:
        """The channels whose subscription is in effect.

        The server passes over a waiter whose client claims a subscription that it does not have.
        """
        ...

    def subscribe(self, channel: str) -> None:
        """Subscribe to one more channel in the background, and again after every reconnection."""
        ...

    def drop_idle(self) -> None:
        """Drop the connections that were idle for long: one of them turned out to be dead (see `idle`)."""
        ...

    def unsubscribe_all(self) -> None:
        """Drop all channels and connections, since the server is no longer a primary."""
        ...

    def reset_after_fork(self) -> None:
        """In a child after a fork: drop everything that belongs to the parent, and send nothing."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
