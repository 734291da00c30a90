"""One blocking connection: a socket, a parser, and the replies that nobody has read yet.

The socket blocks, and the kernel enforces its timeout, which saves a poll before every send and receive.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from interlock._connect.refusals import connection_error
from interlock._protocol.forks import KNOWN
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import FOREVER, now
from interlock._transports.connections import NO_STAMP, PendingReplies, inode_of
from interlock._transports.handshake import complete_handshake, handshake_commands
from interlock._transports.idle import set_socket_options
from interlock._transports.resp import WAITING, reader

if TYPE_CHECKING:
    from collections.abc import Sequence, Sized

    from interlock._connect.address import Address, NamedPrimary
    from interlock._quarantine.server_history import ServerHistory
    from interlock._transports.blocking.runtime import AutoResetEvent, ThreadRuntime
    from interlock._transports.connections import Command

# The kernel enforces the timeout of a plain socket only. A TLS socket enforces its own timeout, and so does a socket of
# gevent, which never blocks.
_SOCKET: Final = socket.socket if socket.socket.__module__ == "socket" else None


OF_PARENT: Final = "the connection belongs to the parent process"


class Owner(Protocol):
    """What a connection needs of its pool."""

    address: Address
    history: ServerHistory
    runtime: ThreadRuntime
    idle: deque[BlockingConnection]
    open_connections: set[BlockingConnection]
    closed: bool
    waiting: deque[AutoResetEvent]

    @property
    def turns(self) -> Sized: ...
    def wake_one(self) -> None: ...
    def note_closed(self) -> None: ...
    def close_idle(self) -> None: ...
    def drop_all(self) -> None: ...


class BlockingConnection:
    """See Connection. Between `checkout` and `checkin` one thread uses it."""

    __slots__ = (
        "_idle",
        "_limit",
        "_reader",
        "_redis_connection",
        "_sock",
        "_unread",
        "fresh",
        "inode",
        "is_counted",
        "last_answered_sent",
        "named",
        "pool",
        "stamp",
        "timeout",
    )

    def __init__(self, pool: Owner, until: float) -> None:
        address = pool.address
        within = max(0.001, until - now())
        self.pool = pool
        self._idle = pool.idle  # of this process: after a fork, the child has another deque
        self._redis_connection: Any = None  # kept, because the garbage collector would close the socket with it
        try:
            self._redis_connection = address.connection(within)
            self._redis_connection.connect()
        except BaseException as error:  # of any kind: a user's credential provider may raise it, or an interrupt
            if self._redis_connection is not None:
                self._redis_connection.disconnect()
            if isinstance(error, Exception):
                failed = connection_error(error, address)
                raise failed from failed.__cause__
            raise
        sock: Any = self._redis_connection._sock
        self._sock: socket.socket = sock  # from here on redis-py does nothing more
        self.inode = inode_of(sock.fileno())
        self._reader = reader()
        self._unread: deque[PendingReplies] = deque()  # in the order in which their commands were sent
        self._limit = 0.0
        self.timeout = address.timeout
        self.fresh = True
        self.is_counted = False  # whether it counts for `max_connections`
        # When the last request was sent that was answered. The pool notes the time before the reply: a connection that
        # gets no reply is not used again.
        self.last_answered_sent = 0.0
        self.named: NamedPrimary = self._redis_connection.named
        self.stamp = NO_STAMP
        try:
            pool.open_connections.add(self)  # whole: a child closes all that it finds there
            set_socket_options(sock, address.parameters)
            commands, sent_at = handshake_commands(address), now()
            self.write(b"".join(commands), until)
            replies = [self.read(until) for _ in commands]
            self.stamp = complete_handshake(
                replies, address, pool.history, self.named.epoch, pool.runtime.mutex, sent_at
            )
        except BaseException:
            self.close()
            raise

    # Commands and replies

    async def exchange(self, command: Command, until: float) -> object:
        """See Connection."""
        self.write(command, until)
        while self._unread:
            self._read_next_unread(until)
        return self.read(until)

    def send(self, commands: Sequence[Command], until: float) -> PendingReplies:
        """See Connection."""
        pending = PendingReplies(len(commands), self._sock.fileno())
        self.write(b"".join(commands), until)
        if commands:
            self._unread.append(pending)
        return pending

    def flush(self) -> None:
        """See Connection. Does nothing: `send` has written the commands."""

    async def receive(self, pending: PendingReplies, until: float) -> list[object]:
        """See Connection. Reads the unread replies to earlier commands first."""
        if until != FOREVER and not pending.is_complete:
            self._set_timeout(until)  # less is left than when the commands were sent
        while not pending.is_complete:
            self._read_next_unread(until)
        if pending.error is not None:
            raise pending.error
        return pending.replies

    def _read_next_unread(self, until: float) -> None:
        first = self._unread[0]
        first.set_result(self.read(until))
        if first.is_complete:
            self._unread.popleft()

    def write(self, packed: bytes, until: float = FOREVER) -> None:
        """Send packed commands. Raises Disconnected."""
        try:
            if until != FOREVER or self._limit != self.timeout:
                self._set_timeout(until)
            if not KNOWN[0]:  # a signal handler has forked in C since the call began: its reply would reach the parent
                raise Disconnected(OF_PARENT, sent=False)
            self._sock.sendall(packed)
        except OSError as error:
            raise self._disconnected(error) from None

    def read(self, until: float = FOREVER) -> object:
        """Wait for the next reply or push. Raises Disconnected; after that the caller must close the connection."""
        reader = self._reader
        while (reply := reader.gets()) is WAITING:
            try:
                if not KNOWN[0]:
                    raise Disconnected(OF_PARENT, sent=True)
                data = self._sock.recv(65536)
            except OSError as error:
                raise self._disconnected(error) from None
            if not data:
                raise Disconnected("it closed the connection", sent=True, stale=not self.fresh)
            reader.feed(data)
            self.stamp.answered_at = now()
            if len(data) == 65536 and until != FOREVER:
                self._set_timeout(until)  # a long reply: each part gets only the time that is left
        return reply

    def limit(self, seconds: float) -> None:
        """Let each answer from now on take at most so many seconds."""
        self.timeout = seconds
        self._set_timeout(FOREVER)

    def _set_timeout(self, until: float) -> None:
        """Limit each send and receive from now on: to the time until then, and at most to `timeout`."""
        seconds = self.timeout
        if until != FOREVER:
            seconds = max(0.001, min(seconds, until - now()))
        if not seconds <= self._limit <= seconds * 1.01:  # setsockopt costs a tenth of a round trip
            self._limit = seconds
            if type(self._sock) is not _SOCKET:
                self._sock.settimeout(seconds)
                return
            if self._sock.gettimeout() is not None:
                self._sock.settimeout(None)
            value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def _disconnected(self, error: OSError) -> Disconnected:
        if isinstance(error, BlockingIOError | TimeoutError):
            return Disconnected(f"no answer within {self._limit:.3g} s", sent=True, timed_out=True)
        return Disconnected(str(error), sent=True, stale=not self.fresh)

    # The end

    def checkin(self) -> None:
        """See Connection."""
        self.fresh = False
        self._idle.append(self)
        if self.pool.waiting or self.pool.turns:
            self.pool.wake_one()
        if self.pool.closed:
            self.pool.close_idle()

    async def read_unread(self, pending: PendingReplies, until: float) -> None:
        """See Connection."""
        try:
            self._idle.remove(self)
        except ValueError:  # another thread uses the connection
            return
        try:
            self._set_timeout(until)
            await self.receive(pending, until)
        except Disconnected as error:
            self.discard(error)
        except BaseException as error:
            self.discard(error)
            raise
        else:
            self.checkin()

    def discard(self, error: BaseException) -> None:
        """See Connection. Closes the connection, which may have unread replies."""
        self.close()
        if isinstance(error, Disconnected) and (error.stale or error.timed_out):
            self.pool.close_idle()  # connections that were idle for longer may be dead, too, without an error so far

    def drop_all(self, why: str) -> None:  # noqa: ARG002 (see Connection)
        """See Connection."""
        self.pool.drop_all()

    def shut_down(self) -> None:
        """Shut the socket down, so that a thread that waits for its data wakes up with an error."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close_copy(self) -> None:
        """In a child after a fork: close the copy of the parent's socket, unless the program has closed it before."""
        if inode_of(self._sock.fileno()) != self.inode:
            self._sock.detach()
        self.close()

    def close(self) -> None:
        """Close the socket in this process only: the parent of a fork may still use the same connection."""
        with contextlib.suppress(OSError):
            self._sock.close()
        self.pool.open_connections.discard(self)
        if self.is_counted:
            self.is_counted = False
            if self.pool.idle is self._idle:  # else the process has forked since
                self.pool.note_closed()
        while self._unread:
            self._unread.popleft().set_exception(Disconnected("the connection was closed", sent=True))
