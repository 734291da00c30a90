"""The port for threads: every coroutine over it finishes without suspending.

A call takes an idle connection (or opens a new one), sends the request, waits for the reply, and puts the connection
back. So each thread that talks to the server has its own connection, and no other thread must wake up to read the
reply. Background work runs in daemon threads; one of these threads reads the subscription. The sockets block, and the
kernel enforces their timeout, which saves a poll before every send and receive.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from interlock._connect.refusals import connection_error
from interlock._protocol.log import log
from interlock._protocol.run import run
from interlock._protocol.timing import DRIFT, FOREVER, now
from interlock._protocol.types import ONLY_ROUTE, Disconnected, PushHandler, Route, ServerError
from interlock._quarantine.lossless import least_lossless_ttl
from interlock._quarantine.primacy import NOT_NAMED, TRUSTED_FOR, Primacy
from interlock._quarantine.proofs import Proofs
from interlock._transports.handshake import complete_handshake, handshake_commands, is_same_primary
from interlock._transports.pushes import check_subscribe_reply, dispatch_push, subscribe_commands
from interlock._transports.resp import (
    ASKING,
    PING,
    REPLICATION,
    WAITING,
    Push,
    ReplyError,
    eval_text,
    evalsha,
    is_noscript,
    is_readonly,
    pack,
    raise_if_error,
    reader,
)
from interlock.errors import LockError
from interlock.primitives.codes import GRANTED

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from interlock._connect.address import Address
    from interlock._protocol.acks import Acks
    from interlock._protocol.types import Argument, Message, Script
    from interlock._quarantine.history import ServerHistory
    from interlock._quarantine.stamp import IdentityStamp

T = TypeVar("T")
PING_AFTER: Final = 5.0  # seconds without a message after which the listener sends PING
# The kernel enforces the timeout of a plain socket only. A TLS socket enforces its own timeout, and so does a socket of
# gevent, which never blocks.
_SOCKET: Final = socket.socket if socket.socket.__module__ == "socket" else None
STEADY_AFTER: Final = 1.0  # seconds that a subscription must last for the next one to start without a pause
MAX_WAIT: Final = 3600.0  # seconds of one wait: `Lock.acquire` accepts no infinite timeout


class AutoResetEvent:
    """A flag that one thread waits for: a raw lock, which is the cheapest means to wake a thread."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Set the flag, and wake the thread that waits for the flag."""
        with contextlib.suppress(RuntimeError):  # the flag is set already
            self._lock.release()

    async def wait(self, until: float) -> bool:
        """See AutoResetEvent."""
        while until != FOREVER:
            left = until - now()
            if self._lock.acquire(timeout=max(0.0, min(left, MAX_WAIT))):
                return True
            if left <= MAX_WAIT:
                return False
        return self._lock.acquire()


class Connection:
    """One open connection, and its parser."""

    __slots__ = (
        "answered_since",
        "fresh",
        "host_port",
        "limit",
        "reader",
        "redis_connection",
        "sock",
        "stamp",
        "timeout",
        "unanswered_channels",
    )

    def __init__(self, address: Address, history: ServerHistory, until: float) -> None:
        within = max(0.001, until - now())
        self.redis_connection: Any = None  # kept, because the garbage collector would close the socket with this object
        try:
            self.redis_connection = address.connection(within)
            self.redis_connection.connect()
        except Exception as error:  # noqa: BLE001 (also that of a user's credential provider)
            if self.redis_connection is not None:
                self.redis_connection.disconnect()
            raise connection_error(error, address) from None
        sock: Any = self.redis_connection._sock
        self.sock: socket.socket = sock  # from here on redis-py does nothing more
        self.reader = reader()
        self.unanswered_channels: deque[str] = deque()  # of each command without a reply so far: its channel, or ""
        self.limit = 0.0
        self.timeout = address.timeout
        self.fresh = True
        self.answered_since = 0.0  # when the last request with a reply was sent (see `_is_still_primary`)
        self.host_port = getattr(self.redis_connection, "host", ""), getattr(self.redis_connection, "port", 0)
        try:
            greeting = handshake_commands(address)
            self.send(b"".join(map(pack, greeting)), until)
            self.stamp = complete_handshake([self.receive(until) for _ in greeting], address, history)
        except BaseException:
            self.close()
            raise

    def exchange(self, packed: bytes, until: float = FOREVER) -> Any:
        """Send a request, and wait for one reply. Raises Disconnected."""
        self.send(packed, until)
        return self.receive(until)

    def send(self, packed: bytes, until: float = FOREVER) -> None:
        """Send packed commands. Raises Disconnected."""
        if until != FOREVER or self.limit != self.timeout:
            self._set_timeout(until)
        try:
            self.sock.sendall(packed)
        except OSError as error:
            raise self._disconnected(error) from None

    def receive(self, until: float = FOREVER) -> Any:
        """Wait for the next reply. Raises Disconnected; after that the caller must close the connection."""
        reader = self.reader
        while (reply := reader.gets()) is WAITING:
            try:
                data = self.sock.recv(65536)
            except OSError as error:
                raise self._disconnected(error) from None
            if not data:
                raise Disconnected("it closed the connection", sent=True, stale=not self.fresh)
            reader.feed(data)
            if len(data) == 65536 and until != FOREVER:
                self._set_timeout(until)  # a long reply: each part gets only the time that is left
        return reply

    def _set_timeout(self, until: float) -> None:
        """Limit each send and receive from now on: to the time until then, and at most to `timeout`."""
        seconds = self.timeout
        if until != FOREVER:
            seconds = max(0.001, min(seconds, until - now()))
        if not seconds <= self.limit <= seconds * 1.01:  # setsockopt costs a tenth of a round trip
            self.limit = seconds
            if type(self.sock) is not _SOCKET:
                self.sock.settimeout(seconds)
                return
            if self.sock.gettimeout() is not None:
                self.sock.settimeout(None)
            value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def _disconnected(self, error: OSError) -> Disconnected:
        if isinstance(error, BlockingIOError | TimeoutError):
            return Disconnected(f"no answer within {self.limit:.3g} s", sent=True, timed_out=True)
        return Disconnected(str(error), sent=True, stale=not self.fresh)

    def shut_down(self) -> None:
        """Shut the socket down, so that a thread that waits for its data wakes up with an error."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket in this process only: the parent of a fork may still use the same connection."""
        with contextlib.suppress(OSError):
            self.sock.close()


class SentBatch(NamedTuple):
    """Messages that were sent together. Their replies arrive on `connection`, unless `error` is set."""

    messages: Sequence[Message]
    until: float
    connection: Connection | None
    error: Exception | None
    stamps: list[str]


class ThreadRuntime:
    """See Runtime: threads wait for raw locks, and background work runs in daemon threads."""

    def __init__(self) -> None:
        self.now = now
        self.event = AutoResetEvent
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """See Runtime. The threads of the parent do not exist here."""
        self.mutex = threading.RLock()  # reentrant: a signal handler may run in the thread that holds the mutex
        self._threads: list[threading.Thread] = []

    async def sleep_until(self, until: float) -> None:
        """See Runtime."""
        await AutoResetEvent().wait(until)

    def spawn(self, work: Callable[[], Coroutine[object, None, None]], name: str, over: Callable[[], None]) -> None:
        """See Runtime."""

        def whole() -> None:
            try:
                run(work())
            finally:
                over()

        self.start_thread(whole, name)

    def run_callback(self, callback: Callable[[T], object], subject: T) -> None:
        """See Runtime."""

        def run_and_log() -> None:
            try:
                callback(subject)
            except Exception:  # noqa: BLE001 (logged)
                log.exception("interlock: the callback %r failed", callback)

        threading.Thread(target=run_and_log, name="interlock-tell", daemon=True).start()

    def start_thread(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        with self.mutex:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """See Runtime."""
        return work()

    async def close(self) -> None:
        """See Runtime."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)


class ThreadPort:
    """Connections to one server, for any number of threads."""

    is_quorum = False
    majority = 1
    drift = DRIFT

    def __init__(self, address: Address, history: ServerHistory, runtime: ThreadRuntime) -> None:
        self.address = address
        self.history = history
        self.runtime = runtime
        self.display_url = address.display_url
        self.retry_for = address.retry_for
        self._can_fail_over = address.can_fail_over
        self.primacy = Primacy(address)
        self.push_handler: PushHandler
        self._start()

    def _start(self) -> None:
        self._idle: deque[Connection] = deque()
        self._proofs = Proofs(self.runtime, self.history, self._lossless)
        self._closed = False
        # send the next batch with the texts of its scripts: the server did not know one of them
        self.send_script_text = False
        self._subscription: Connection | None = None  # the connection that receives the pushes
        self._listener_started = False  # the listener thread was started: start no second one
        self._listener_running = False
        self._reconnect_delay = AutoResetEvent()
        self._identity = ""  # of the server at the newest connection
        self._subscribe_lock = threading.Lock()  # several threads may subscribe at once
        self._wanted: dict[str, None] = {}  # channels
        self.subscribed: set[str] = (
            set()
        )  # the channels in effect; a server that finds no subscriber to one of these takes this client for dead

    async def call(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        slot: int | None = None,
    ) -> Any:
        """See Server. `slot` is for a node of a cluster, whose identity stamp depends on the slot."""
        connection = self._checkout(until)
        try:
            stamp = connection.stamp.text if slot is None else connection.stamp.text_for(slot)
            reply = connection.exchange(evalsha(script, keys, args, stamp), until)
            if type(reply) is ReplyError and is_noscript(reply):
                reply = connection.exchange(eval_text(script, keys, args, stamp), until)
        except BaseException as error:
            self._discard(connection, error)
            raise
        self._checkin(connection)
        if type(reply) is ReplyError and is_readonly(reply):
            self._drop_all()
        return raise_if_error(reply)

    async def call_with_acks(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        acks: Acks,
        patience: float,
        slot: int | None = None,
    ) -> tuple[Any, int, Any]:
        """See Server."""
        connection = self._checkout(until)
        try:
            stamp = connection.stamp.text if slot is None else connection.stamp.text_for(slot)
            reply = connection.exchange(evalsha(script, keys, args, stamp), until)
            if is_noscript(reply):
                reply = connection.exchange(eval_text(script, keys, args, stamp), until)
            known, got = 0, None
            if type(reply) is list and reply[0] == GRANTED:
                known = self.history.count_replicas(connection.exchange(REPLICATION, until))
                got = connection.exchange(pack(acks.command(known, patience)), until)
        except BaseException as error:
            self._discard(connection, error)
            raise
        self._checkin(connection)
        if is_readonly(reply):
            self._drop_all()
        return raise_if_error(reply), known, raise_if_error(got)

    async def call_asking(self, message: Message, until: float, slot: int) -> Any:
        """Repeat a call here after an ASK redirection: the cluster is moving the slot to this node."""
        connection = self._checkout(until)
        try:
            reply: Any = None
            for packed in (evalsha, eval_text):
                connection.send(ASKING + packed(*message, connection.stamp.text_for(slot)), until)
                asking = connection.receive(until)
                reply = connection.receive(until)
                if type(asking) is ReplyError:  # a user without the right to ASKING would only get a redirection
                    reply = asking
                if not is_noscript(reply):
                    break
        except BaseException as error:
            self._discard(connection, error)
            raise
        self._checkin(connection)
        return raise_if_error(reply)

    async def call_many(self, messages: Sequence[Message], until: float) -> list[Any]:
        """See Server."""
        return await self.read_batch(await self.send_batch(messages, until))

    async def send_batch(self, messages: Sequence[Message], until: float, slots: Sequence[int] = ()) -> SentBatch:
        """Send the messages without waiting for replies: the first half of `call_many`."""
        try:
            connection = self._checkout(until)
        except Exception as error:  # noqa: BLE001 (one of many: see Server)
            return SentBatch(messages, until, None, error, [])
        try:
            stamps = (
                [connection.stamp.text_for(slot) for slot in slots]
                if slots
                else [connection.stamp.text] * len(messages)
            )
            said, self.send_script_text = eval_text if self.send_script_text else evalsha, False
            connection.send(b"".join(said(*each, stamp) for each, stamp in zip(messages, stamps, strict=True)), until)
        except Disconnected as error:
            self._discard(connection, error)
            return SentBatch(messages, until, None, error, [])
        except BaseException as error:
            self._discard(connection, error)
            raise
        return SentBatch(messages, until, connection, None, stamps)

    async def read_batch(self, sent: SentBatch, *, late: bool = False) -> list[Any]:
        """Read the replies: the second half of `call_many`.

        `late`: the caller needs no result any more. Then a script that the server did not know is not sent again.
        """
        connection, until, messages = sent.connection, sent.until, sent.messages
        if connection is None:
            return [sent.error] * len(messages)
        try:
            replies = [connection.receive(until) for _ in messages]
            for i, message in enumerate(messages):
                if is_noscript(replies[i]):
                    self.send_script_text |= late
                    if not late:
                        replies[i] = connection.exchange(eval_text(*message, sent.stamps[i]), until)
        except Disconnected as error:
            self._discard(connection, error)
            return [error] * len(messages)
        except BaseException as error:
            self._discard(connection, error)
            raise
        self._checkin(connection)
        if any(map(is_readonly, replies)):
            self._drop_all()
        return [ServerError(str(r)) if type(r) is ReplyError else r for r in replies]

    def discard_batch(self, sent: SentBatch) -> None:
        """Close the connection of a batch whose replies no caller will read."""
        if sent.connection is not None:
            sent.connection.close()

    @property
    def ready(self) -> bool:
        """Whether an idle connection is there, so that a call need not connect first."""
        return bool(self._idle)

    async def ping(self, until: float) -> None:
        """Check that the server answers; connect first if no connection is idle. Raises Disconnected or LockError."""
        connection = self._checkout(until)
        try:
            connection.exchange(PING, until)
        except BaseException as error:
            self._discard(connection, error)
            raise
        self._checkin(connection)

    @staticmethod
    async def wait_any(sents: Sequence[SentBatch], number: int, until: float) -> list[int]:
        """Wait until so many batches have replies or an error, at most to `until`. Returns the indexes of these."""
        ready = [i for i, sent in enumerate(sents) if sent.connection is None]
        waiting = {sent.connection.sock.fileno(): i for i, sent in enumerate(sents) if sent.connection is not None}
        poll = select.poll()
        for each in waiting:
            poll.register(each, select.POLLIN)
        while waiting and len(ready) < number:
            found = poll.poll(math.ceil(max(0.0, until - now()) * 1000))
            if not found:
                break
            for each, _ in found:
                poll.unregister(each)
                ready.append(waiting.pop(each))
        return ready

    async def prove_lossless(self, keys: Sequence[str | bytes], evidence: str, until: float) -> bool:  # noqa: ARG002 (see Server)
        """See Server."""
        return await self._proofs.prove_lossless(evidence, until)

    def old_primary_may_still_grant(self, key: str, slot: int = -1) -> str:  # noqa: ARG002 (see Server)
        """See Server."""
        return self._proofs.old_primary(slot)

    async def _lossless(self, evidence: str, stamp: IdentityStamp, left: float) -> float | None:
        return await self.runtime.run_blocking(partial(least_lossless_ttl, self.address, evidence, stamp, left))

    async def current_identity(self, until: float) -> IdentityStamp:
        """Return the identity stamp of the server that answers now. Raises Disconnected."""
        connection = self._checkout(until)
        self._checkin(connection)
        return connection.stamp

    def _checkout(self, until: float) -> Connection:
        try:
            connection = self._idle.pop()
        except IndexError:
            return self._open(until)
        connection.fresh = False
        if self._can_fail_over:
            asked = now()
            if asked - connection.answered_since > TRUSTED_FOR and not self._is_still_primary(connection, until):
                self._drop_all()
                return self._open(until)
            connection.answered_since = asked
        return connection

    def _is_still_primary(self, connection: Connection, until: float) -> bool:
        """Whether the connection still leads to the same primary with the same data.

        Other servers confirm the address of the primary; the server itself confirms its role and replication id. If the
        server is another one or does not answer, this method closes the connection.
        """
        try:
            same = self.primacy.is_confirmed(connection.host_port, until)
        except (Disconnected, LockError):  # no other server could say: the connection is as good as before
            self._checkin(connection)
            raise
        except BaseException:
            connection.close()
            raise
        try:
            same = same and is_same_primary(connection.exchange(REPLICATION, until), connection.stamp)
        except Disconnected:
            same = False
        except BaseException:
            connection.close()
            raise
        if not same:
            connection.close()
        return same

    def _open(self, until: float) -> Connection:
        asked = now()
        if self.address.clustered and not self.primacy.is_confirmed(("", 0), until):
            raise Disconnected(NOT_NAMED, sent=False)
        connection = Connection(self.address, self.history, until)
        connection.answered_since = asked
        if connection.stamp.identity != self._identity:
            if self._identity:
                self._drop_all()  # the older connections lead to another server, or to none
            self._identity = connection.stamp.identity
        return connection

    def _checkin(self, connection: Connection) -> None:
        self._idle.append(connection)
        if self._closed:
            self._close_idle()

    def _discard(self, connection: Connection, error: BaseException) -> None:
        connection.close()
        if isinstance(error, Disconnected) and (error.stale or error.timed_out):
            self._close_idle()  # connections that were idle for longer may be dead, too, without an error so far

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _drop_all(self) -> None:
        """Drop all connections, since the server is a replica by now: new connections may lead to another server."""
        self._close_idle()
        if self._subscription:
            self._subscription.shut_down()

    # The subscription

    def subscription_of(self, key: str) -> tuple[str, str]:  # noqa: ARG002 (see Server)
        """See Server."""
        channel = self.push_handler.channel
        return "1" if channel in self.subscribed else "0", channel

    def route(self, key: str) -> Route:  # noqa: ARG002 (see Server)
        """See Server."""
        return ONLY_ROUTE

    def ensure_subscribed(self, key: str) -> None:  # noqa: ARG002 (see Server)
        """See Server."""
        self.subscribe(self.push_handler.channel)

    def subscribe(self, channel: str) -> None:
        """Subscribe to one more channel. The first call starts the listener thread."""
        if channel in self._wanted:
            return
        with self.runtime.mutex:
            self._wanted[channel] = None
            if not self._listener_started:
                self._listener_started = True
                try:
                    self.runtime.start_thread(self._listen, "interlock-listener")
                except BaseException:  # such as KeyboardInterrupt: the thread may have started or not
                    self._listener_started = False
                    del self._wanted[channel]
                    raise
                return
        if (connection := self._subscription) is not None:
            with contextlib.suppress(Disconnected):  # the listener connects again, and subscribes to all channels
                self._subscribe(connection, channel)

    def unsubscribe_all(self) -> None:
        """Drop all channels and connections: the server, which was a primary, is none any more."""
        self._wanted.clear()
        self._drop_all()

    def _subscribe(self, connection: Connection, channel: str) -> None:
        with self._subscribe_lock:
            connection.unanswered_channels += (channel, channel)  # SUBSCRIBE and PUBLISH
            connection.send(b"".join(subscribe_commands(channel)))

    def _listen(self) -> None:
        with self.runtime.mutex:
            if self._listener_running:
                return  # another listener thread runs already
            self._listener_running = True
        pause = 0.0
        while not self._closed:
            with self.runtime.mutex:
                if not self._wanted:
                    self._listener_started = self._listener_running = False
                    return
            started = now()
            try:
                connection = self._subscription = self._open(FOREVER)
                try:
                    self._serve_subscription(connection)
                finally:
                    self.subscribed.clear()  # the server must not take a client without a subscription for dead
                    connection.close()
            except Disconnected:  # connect again at once, unless the connection lasted too short a time
                pause = 0.0 if now() - started > STEADY_AFTER else min(1.0, pause * 2 or 0.02)
            except Exception as error:  # noqa: BLE001 (polling goes on without it; the next call tells the user)
                pause = 1.0
                log.warning("interlock: waiters are woken by polling only, since %s", error)
            run(self._reconnect_delay.wait(now() + pause))

    def _serve_subscription(self, connection: Connection) -> None:
        connection.timeout = PING_AFTER
        for channel in list(self._wanted):
            self._subscribe(connection, channel)
        tested = 0
        while not self._closed:
            try:
                reply = connection.receive()
            except Disconnected as silence:
                if tested or not silence.timed_out:
                    raise
                tested = 1
                with self._subscribe_lock:
                    connection.unanswered_channels.append("")
                    connection.send(PING)
                continue
            tested = 0
            if type(reply) is not Push:
                if channel := connection.unanswered_channels.popleft():  # "" is a PING
                    check_subscribe_reply(reply, channel, self._wanted)
            elif dispatch_push(reply, self.push_handler, self._wanted, self.subscribed):
                connection.unanswered_channels.popleft()

    # The end of the port

    async def close(self) -> None:
        """Close all connections; the listener thread then ends."""
        self._closed = True
        self._reconnect_delay.set()
        if self._subscription:
            self._subscription.shut_down()
        self._close_idle()

    def reset_after_fork(self) -> None:
        """In a child after fork: close this process's copies of the sockets; the connections belong to the parent."""
        for connection in [*self._idle, *([self._subscription] if self._subscription else [])]:
            connection.close()
        closed = self._closed
        self._start()
        self._closed = closed
