"""The port for asyncio: one connection per loop carries the commands of all tasks, and the pushes.

A call appends its packed bytes to a buffer and awaits a future. The connection writes the buffer once per turn of the
loop. The server sends replies in the order of the commands (RESP), and pushes among the replies (RESP3). The future of
a cancelled call stays in the row of expected replies, so that the connection drops the late reply and gives no other
call this reply. The server executes commands in the order in which the client sent these, so an undo that follows a
cancelled acquire takes effect after the acquire.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from interlock._connect.refusals import connection_error
from interlock._protocol.log import log
from interlock._protocol.timing import DRIFT, FOREVER, now
from interlock._protocol.types import ONLY_ROUTE, Disconnected, PushHandler, Route, ServerError
from interlock._quarantine.lossless import least_lossless_ttl
from interlock._quarantine.primacy import NOT_NAMED, TRUSTED_FOR, HostPort, Primacy
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
# commands in the buffer that are written before the turn ends, so that the server begins meanwhile
WRITE_BATCH: Final = 16
# seconds without a byte from the server, after which a call that times out ends the connection
SILENCE_LIMIT: Final = 0.9
STEADY_AFTER: Final = 1.0  # seconds that a connection must last for the next one to open without a pause
PING_AFTER: Final = 5.0  # seconds without a message after which the connection sends PING


class NullMutex:
    """A mutex that does nothing: one thread runs all tasks of a loop, so there is no other thread to exclude."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class AutoResetEvent:
    """A flag that one task waits for. Waiting clears the flag."""

    __slots__ = ("_up", "_waiter")

    def __init__(self) -> None:
        self._up = False
        self._waiter: asyncio.Future[bool] | None = None

    def set(self) -> None:
        """Set the flag, and wake the task that waits for the flag."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._up = True
        else:
            waiter.set_result(True)

    async def wait(self, until: float) -> bool:
        """See AutoResetEvent."""
        if self._up:
            self._up = False
            return True
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None
        if until != FOREVER:
            timer = loop.call_later(max(0.0, until - now()), _expire, waiter)
        try:
            raised: bool = await waiter
            return raised  # noqa: TRY300
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._up = True  # set and cancelled in the same turn: keep the flag for the next wait
            raise
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class Connection(asyncio.Protocol):
    """One open connection: a buffer of commands to send, and a row of the futures that expect replies, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sink: PushHandler, timeout: float) -> None:
        self.loop = loop
        self.push_handler = sink
        self.stamp: IdentityStamp
        self.host_port: HostPort = ("", 0)
        self.answered_since = 0.0  # when the last request known to have a reply was sent (see `is_trusted`)
        self.sent_count = 0  # requests sent so far
        self._mark = 0  # `sent_count` at the time `_marked`: each request after these was sent later
        self._marked = 0.0
        self.asking: asyncio.Task[None] | None = None  # asks other servers whether this one is still the primary
        self.wanted: dict[str, None] = {}  # the port's channels
        self.subscribed: set[str] = set()  # the channels in effect
        self.timeout = timeout
        self.reader = reader()
        self.transport: asyncio.Transport
        self.redis_writer: object  # of redis-py; kept, because its collection would close the transport
        self.expecting: deque[asyncio.Future[Any] | SentBatch] = deque()
        self.outgoing: list[bytes] = []
        self.broken: Disconnected | None = None
        self.last_heard = loop.time()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.watch = loop.call_later(timeout, self._watch)

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        """Send one command. Returns the future of its reply. Raises Disconnected."""
        reply = self.loop.create_future()
        self.send_for(packed, reply)
        return reply

    def send_for(self, packed: bytes, reply: asyncio.Future[Any] | SentBatch, number: int = 1) -> None:
        """Send packed commands, to which the server sends `number` replies. Raises Disconnected."""
        if self.broken is not None:
            raise Disconnected(str(self.broken), sent=False)
        if not self.expecting:
            self.last_heard = self.loop.time()  # the wait for a reply begins now
        try:
            self.expecting.extend([reply] * number)
            self.sent_count += number
            if not self.outgoing:
                self.loop.call_soon(self._flush)
            self.outgoing.append(packed)
            if len(self.outgoing) == WRITE_BATCH:
                self._flush()
        except BaseException as error:
            self._fail_interrupted(error)
            raise

    def _flush(self) -> None:
        try:
            if self.outgoing and self.broken is None:
                self.transport.write(b"".join(self.outgoing))
            self.outgoing.clear()
        except BaseException as error:
            self._fail_interrupted(error)
            raise

    def _fail_interrupted(self, error: BaseException) -> None:
        """End the connection after a signal handler raised in here: a later reply might reach the wrong future."""
        self.fail(Disconnected(f"it was interrupted: {error!r}", sent=True))

    def data_received(self, data: bytes) -> None:
        """Give each reply to the first future of the row, and each push to the push handler."""
        try:
            self.last_heard = self.loop.time()
            reader, row = self.reader, self.expecting
            reader.feed(data)
            while (reply := reader.gets()) is not WAITING:
                if type(reply) is Push:
                    if dispatch_push(reply, self.push_handler, self.wanted, self.subscribed):
                        row[0].set_result(None)  # the server answers SUBSCRIBE by a push
                        row.popleft()
                else:
                    if not row[0].done():
                        row[0].set_result(reply)
                    row.popleft()  # only now: `fail` reaches only the futures in the row
        except BaseException as error:
            self._fail_interrupted(error)
            raise

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail each future that expects a reply."""
        self.fail(Disconnected(str(exc or "it closed the connection"), sent=True))

    def fail(self, why: Disconnected) -> None:
        """End the connection: close its socket, and fail each future in the row with this error."""
        if self.broken is None:
            self.broken = why
            self.watch.cancel()
            self.subscribed.clear()
            self.transport.abort()
            for reply in self.expecting:
                if not reply.done():
                    reply.set_exception(why)
                    reply.exception()  # marks the error as read, for no task may await this future any more
            self.expecting.clear()
            if not self.ended.done():
                self.ended.set_result(None)

    def give_up(self, reply: asyncio.Future[Any] | SentBatch) -> None:
        """Fail this future, whose time is over; end the connection, too, after a silence of `SILENCE_LIMIT`."""
        if not reply.done():
            why = Disconnected("no answer in time", sent=True, timed_out=True)
            reply.set_exception(why)
            if self.loop.time() - self.last_heard >= SILENCE_LIMIT:
                self.fail(why)

    def is_trusted(self, since: float) -> bool:
        """Whether the server has answered a request that was sent at `since` or later. Call this before sending one."""
        answered = self.sent_count - len(self.expecting)
        if self.sent_count == self._mark:
            self._marked = now()
        elif answered > self._mark:
            if self._marked - self.answered_since <= TRUSTED_FOR:  # else there may have been a pause between the two
                self.answered_since = self._marked
            self._mark, self._marked = self.sent_count, now()
        return self.answered_since >= since

    def trust(self, asked: float) -> None:
        """Note that other servers, which the client asked at this time, named this server as the primary."""
        self.answered_since, self._mark, self._marked = asked, self.sent_count, asked

    def _watch(self) -> None:
        """Send PING after `PING_AFTER` of silence; end the connection if a reply is missing for `timeout`."""
        silent = self.loop.time() - self.last_heard
        if self.expecting and silent >= self.timeout:
            self.fail(Disconnected(f"no answer within {self.timeout:.3g} s", sent=True, timed_out=True))
            return
        if not self.expecting and silent >= PING_AFTER:
            self.send(PING)
        self.watch = self.loop.call_later(self.timeout / 4, self._watch)


async def _greeted(redis_connection: Any) -> None:
    """Run redis-py's setup after the TLS handshake; abort if it fails: a TLS goodbye would wait for a silent peer."""
    transport = redis_connection._writer.transport
    try:
        await redis_connection.on_connect()
    except BaseException:
        transport.abort()
        raise


class SentBatch:
    """Messages that were sent together. The batch stands in the row once for each reply, in place of a future."""

    __slots__ = ("connection", "error", "messages", "replies", "stamps", "then", "until")

    def __init__(self, messages: Sequence[Message], until: float) -> None:
        self.messages = messages
        self.until = until
        self.connection: Connection | None = None
        self.stamps: Sequence[str] = ()
        self.replies: list[Any] = []
        self.error: Exception | None = None  # in place of the replies
        self.then: Callable[[], None] | None = None  # called once the batch has all replies or an error

    @property
    def is_complete(self) -> bool:
        """Whether the batch has all its replies, or an error in place of these."""
        return self.error is not None or len(self.replies) == len(self.messages)

    def done(self) -> bool:
        """Like `Future.done`: whether the batch takes no more replies, since it failed."""
        return self.error is not None

    def set_result(self, reply: Any) -> None:
        """Like `Future.set_result`: add the next reply."""
        self.replies.append(reply)
        if self.then is not None and len(self.replies) == len(self.messages):
            self.then()

    def set_exception(self, error: Exception) -> None:
        """Like `Future.set_exception`: note the error, after which no more replies arrive."""
        self.error = error
        if self.then is not None:
            self.then()

    def exception(self) -> Exception | None:
        """Like `Future.exception`: the error, or None."""
        return self.error


class AsyncioRuntime:
    """See Runtime: tasks wait on the running loop, and background work runs in tasks."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.now = now
        self.event = AutoResetEvent
        self.mutex = NullMutex()
        self._tasks: set[asyncio.Future[Any]] = set()

    async def sleep_until(self, until: float) -> None:
        """See Runtime."""
        await AutoResetEvent().wait(until)

    def spawn(self, work: Callable[[], Coroutine[object, None, None]], name: str, over: Callable[[], None]) -> None:
        """See Runtime."""
        self.task(work(), name).add_done_callback(lambda _: over())

    def run_callback(self, callback: Callable[[T], object], subject: T) -> None:
        """See Runtime."""

        async def run_and_log() -> None:
            try:
                result = callback(subject)
                if asyncio.iscoroutine(result):
                    await result
            except Exception:  # noqa: BLE001 (logged)
                log.exception("interlock: the callback %r failed", callback)

        self.task(run_and_log(), "interlock-tell")

    def task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a background task, and keep a reference to the task until its end."""
        task = self.loop.create_task(work, name=name)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # a loop may end without close()
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, Disconnected | LockError):  # `_open_in_time` raises those
            log.error("interlock: a task of ours has failed", exc_info=error)

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """See Runtime."""
        return await asyncio.to_thread(work)

    def reset_after_fork(self) -> None:
        """See Runtime. Does nothing: the loop and all its tasks belong to the parent."""

    async def close(self) -> None:
        """See Runtime."""
        await _cancel(self._tasks)


async def _cancel(running: set[asyncio.Future[Any]]) -> None:
    tasks = [task for task in running if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class AsyncioPort:
    """The connection of one loop to one server."""

    is_quorum = False
    majority = 1
    drift = DRIFT

    def __init__(self, address: Address, history: ServerHistory, runtime: AsyncioRuntime) -> None:
        self.address = address
        self.history = history
        self.runtime = runtime
        self.display_url = address.display_url
        self.retry_for = address.retry_for
        self._can_fail_over = address.can_fail_over
        self.primacy = Primacy(address)
        self.push_handler: PushHandler
        self.loop = runtime.loop
        self._proofs = Proofs(self.runtime, self.history, self._lossless)
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._tasks: set[asyncio.Future[Any]] = set()
        self._wanted: dict[str, None] = {}  # channels
        self._listener: asyncio.Task[None] | None = None
        self._closed = False
        self._spares: list[Connection] = []  # idle connections on which grants wait for replicas
        # send the next batch with the texts of its scripts: the server did not know one of them
        self.send_script_text = False

    async def call(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        slot: int | None = None,
    ) -> Any:
        """See Server. `slot` is for a node of a cluster, whose identity stamp depends on the slot."""
        connection = self._connection
        if connection is None or connection.broken is not None or self._can_fail_over:
            connection = await self._checkout(until)
        stamp = connection.stamp.text if slot is None else connection.stamp.text_for(slot)
        future = connection.send(evalsha(script, keys, args, stamp))
        reply = await (future if until == FOREVER else self._reply(connection, future, until))
        if type(reply) is ReplyError:
            if is_noscript(reply):
                reply = await self._reply(connection, connection.send(eval_text(script, keys, args, stamp)), until)
            self._drop_if_readonly(connection, reply)
            raise_if_error(reply)
        return reply

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
        """See Server. Uses a spare connection: on the common one, the wait for replicas would delay all other calls."""
        connection = await self._checkout_spare(until)
        try:
            stamp = connection.stamp.text if slot is None else connection.stamp.text_for(slot)
            reply = await self._reply(connection, connection.send(evalsha(script, keys, args, stamp)), until)
            if is_noscript(reply):
                reply = await self._reply(connection, connection.send(eval_text(script, keys, args, stamp)), until)
            known, got = 0, None
            if type(reply) is list and reply[0] == GRANTED:
                known = self.history.count_replicas(await self._reply(connection, connection.send(REPLICATION), until))
                got = await self._reply(connection, connection.send(pack(acks.command(known, patience))), until)
        except BaseException:
            connection.fail(Disconnected("given up", sent=True))  # the wait in the server would delay the next call
            raise
        if self._closed or is_readonly(reply):
            connection.fail(Disconnected("closed", sent=False))
        else:
            self._spares.append(connection)
        return raise_if_error(reply), known, raise_if_error(got)

    async def call_asking(self, message: Message, until: float, slot: int) -> Any:
        """Repeat a call here after an ASK redirection: the cluster is moving the slot to this node."""
        connection = await self._checkout(until)
        reply: Any = None
        for packed in (evalsha, eval_text):
            asking = connection.send(ASKING)  # no other task can send between this command and the next
            reply = await self._reply(
                connection, connection.send(packed(*message, connection.stamp.text_for(slot))), until
            )
            if type(await asking) is ReplyError:  # a user without the right to ASKING would only get a redirection
                reply = asking.result()
            if not is_noscript(reply):
                break
        return raise_if_error(reply)

    async def call_many(self, messages: Sequence[Message], until: float) -> list[Any]:
        """See Server."""
        return await self.read_batch(await self.send_batch(messages, until))

    async def send_batch(self, messages: Sequence[Message], until: float, slots: Sequence[int] = ()) -> SentBatch:
        """Send the messages without waiting for replies: the first half of `call_many`."""
        sent, connection = SentBatch(messages, until), self._connection
        try:
            if connection is None or connection.broken is not None or self._can_fail_over:
                connection = await self._checkout(until)
            stamps = (
                [connection.stamp.text_for(slot) for slot in slots]
                if slots
                else [connection.stamp.text] * len(messages)
            )
            said, self.send_script_text = eval_text if self.send_script_text else evalsha, False
            packed = b"".join([said(*each, stamp) for each, stamp in zip(messages, stamps, strict=True)])
            connection.send_for(packed, sent, len(messages))
            sent.connection, sent.stamps = connection, stamps
        except Exception as error:  # noqa: BLE001 (one of many: see Server)
            sent.error = error
        return sent

    async def read_batch(self, sent: SentBatch, *, late: bool = False) -> list[Any]:
        """Wait for the replies: the second half of `call_many`.

        `late`: the caller needs no result any more. Then a script that the server did not know is not sent again.
        """
        connection, replies = sent.connection, sent.replies
        if not sent.is_complete and connection is not None and not await self.wait_any([sent], 1, sent.until):
            connection.give_up(sent)
        if sent.error is not None or connection is None:
            return [sent.error] * len(sent.messages)
        for i, reply in enumerate(replies):
            if type(reply) is ReplyError:
                try:
                    if not is_noscript(reply):
                        self._drop_if_readonly(connection, reply)
                    elif late:
                        self.send_script_text = True
                    else:
                        text = eval_text(*sent.messages[i], sent.stamps[i])
                        replies[i] = await self._reply(connection, connection.send(text), sent.until)
                except Disconnected as error:
                    return [error] * len(replies)
                if type(replies[i]) is ReplyError:
                    replies[i] = ServerError(str(replies[i]))
        return replies

    def discard_batch(self, sent: SentBatch) -> None:
        """Do nothing about a batch whose replies no caller will read: the batch drops these when they arrive."""

    @property
    def ready(self) -> bool:
        """Whether the connection is open, so that a call need not connect first."""
        return self._connection is not None and self._connection.broken is None

    async def ping(self, until: float) -> None:
        """Check that the server answers; connect first if necessary. Raises Disconnected or LockError."""
        connection = await self._checkout(until)
        await self._reply(connection, connection.send(PING), until)

    @staticmethod
    async def wait_any(sents: Sequence[SentBatch], number: int, until: float) -> list[int]:
        """Wait until so many batches have replies or an error, at most to `until`. Returns the indexes of these."""
        waiting = [sent for sent in sents if not sent.is_complete]
        missing, left = number - len(sents) + len(waiting), until - now()
        if missing > 0 and waiting and left > 0:
            loop = waiting[0].connection.loop  # type: ignore[union-attr]  # an incomplete batch has a connection
            enough = loop.create_future()

            def came() -> None:
                nonlocal missing
                missing -= 1
                if missing == 0:
                    _expire(enough)

            timer = loop.call_later(left, _expire, enough)
            for each in waiting:
                each.then = came
            try:
                await enough
            finally:
                timer.cancel()
                for each in waiting:
                    each.then = None
        return [i for i, sent in enumerate(sents) if sent.is_complete]

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
        return (await self._checkout(until)).stamp

    @property
    def subscribed(self) -> set[str]:
        """The channels to which the connection is subscribed now."""
        return self._connection.subscribed if self._connection is not None else set()

    @staticmethod
    def _drop_if_readonly(connection: Connection, reply: Any) -> None:
        if is_readonly(reply):
            connection.fail(
                Disconnected("it is a replica by now", sent=True)
            )  # another connection may lead to the primary

    async def _reply(self, connection: Connection, reply: asyncio.Future[Any], until: float) -> Any:
        left = until - now()
        if left >= self.address.timeout or reply.done():  # `Connection._watch` ends the connection before that
            return await reply
        timer = self.loop.call_later(max(0.0, left), connection.give_up, reply)
        try:
            return await reply
        finally:
            timer.cancel()

    # The connection

    async def _checkout(self, until: float) -> Connection:
        asked = now()
        while True:
            connection = self._connection
            if connection is None or connection.broken is not None:
                if self._connecting is None or self._connecting.done():
                    self._connecting = self._task(self._connect(), "interlock-connect")
                connection = await self._open_in_time(self._connecting, until)
            if await self._is_trusted(connection, asked, until):
                return connection

    async def _checkout_spare(self, until: float) -> Connection:
        """Take an idle connection, for this caller alone. A connection that opens too late serves a later caller."""
        asked = now()
        while True:
            if not self._spares:
                await self._open_in_time(self._task(self._open_spare(), "interlock-connect"), until)
            with contextlib.suppress(IndexError):  # another task took the connection
                connection = self._spares.pop()
                try:
                    if await self._is_trusted(connection, asked, until):
                        return connection
                except BaseException:
                    self._spares.append(connection)
                    raise

    async def _open_spare(self) -> None:
        self._spares.append(await self._open())

    async def _is_trusted(self, connection: Connection, asked: float, until: float) -> bool:
        """Whether the connection still leads to the same primary with the same data.

        Recent replies prove that; without recent replies, the client asks other servers, once for all callers.
        `asked`: when the caller made its request.
        """
        while connection.broken is None and self._can_fail_over and not connection.is_trusted(asked - TRUSTED_FOR):
            if connection.asking is None or connection.asking.done():
                connection.asking = self._task(self._ask_others(connection), "interlock-look")
            await self._open_in_time(connection.asking, until)
        return connection.broken is None

    async def _ask_others(self, connection: Connection) -> None:
        asked = now()
        same = await self.runtime.run_blocking(partial(self.primacy.is_confirmed, connection.host_port, FOREVER))
        if same and connection.broken is None:
            same = is_same_primary(await connection.send(REPLICATION), connection.stamp)
        if same:
            connection.trust(asked)
        else:
            connection.fail(Disconnected("it was not the primary all the time", sent=False))

    @staticmethod
    async def _open_in_time(making: asyncio.Task[T], until: float) -> T:
        left = max(0.001, until - now()) if until != FOREVER else None
        done, _ = await asyncio.wait([making], timeout=left)
        if not done:
            raise Disconnected("no connection in time", sent=False, timed_out=True)
        if making.cancelled():
            raise Disconnected("it was closed while connecting", sent=False)
        return making.result()

    async def _connect(self) -> Connection:
        connection = self._connection = await self._open()
        connection.wanted = self._wanted
        for channel in list(self._wanted):
            self._subscribe(connection, channel)
        return connection

    async def _open(self) -> Connection:
        if self._closed:  # `close` has run, so nothing would close a new connection
            raise Disconnected("it is closed", sent=False)
        make: Any = self.address.async_connection
        redis_connection: Any = None
        asked = now()
        if self.address.clustered and not await self.runtime.run_blocking(
            partial(self.primacy.is_confirmed, ("", 0), FOREVER)
        ):
            raise Disconnected(NOT_NAMED, sent=False)
        try:
            if self.address.kind == "embedded" or self.address.sentinels:  # finding the server may block
                redis_connection = await asyncio.to_thread(make, FOREVER)
            else:
                redis_connection = make(FOREVER)
            where = getattr(redis_connection, "host", ""), getattr(redis_connection, "port", 0)
            if self.address.kind == "tls":
                redis_connection.redis_connect_func = _greeted
            await redis_connection.connect()
        except Exception as error:  # noqa: BLE001 (also that of a user's credential provider)
            if redis_connection is not None:
                await redis_connection.disconnect(nowait=True)
            raise connection_error(error, self.address) from None
        connection = Connection(self.loop, self.push_handler, self.address.timeout)
        writer: Any = redis_connection._writer
        redis_connection._writer = redis_connection._reader = None  # from here on redis-py does nothing more
        connection.redis_writer, connection.transport = writer, writer.transport
        writer.transport.set_protocol(connection)
        try:
            greeting = [connection.send(pack(command)) for command in handshake_commands(self.address)]
            connection.stamp = complete_handshake([await reply for reply in greeting], self.address, self.history)
            connection.host_port = where
            connection.trust(asked)
        except BaseException:
            connection.fail(Disconnected("refused", sent=False))
            raise
        return connection

    def subscription_of(self, key: str) -> tuple[str, str]:  # noqa: ARG002 (see Server)
        """See Server."""
        channel = self.push_handler.channel
        return "1" if self._connection is not None and channel in self._connection.subscribed else "0", channel

    def route(self, key: str) -> Route:  # noqa: ARG002 (see Server)
        """See Server."""
        return ONLY_ROUTE

    def _subscribe(self, connection: Connection, channel: str) -> None:
        def answered(reply: asyncio.Future[Any]) -> None:
            if not reply.exception():
                try:
                    check_subscribe_reply(reply.result(), channel, self._wanted)
                except Disconnected as again:
                    connection.fail(again)

        for packed in subscribe_commands(channel):
            connection.send(packed).add_done_callback(answered)

    def ensure_subscribed(self, key: str) -> None:  # noqa: ARG002 (see Server)
        """See Server."""
        self.subscribe(self.push_handler.channel)

    def subscribe(self, channel: str) -> None:
        """Subscribe to one more channel. The first call starts the listener task."""
        if channel not in self._wanted:
            self._wanted[channel] = None
            if self._connection is not None and self._connection.broken is None:
                self._subscribe(self._connection, channel)
        if self._listener is None or self._listener.done():  # the user may have cancelled all tasks
            self._listener = self._task(self._stay_subscribed(), "interlock-listener")

    def unsubscribe_all(self) -> None:
        """Drop all channels and the connection: the server is no primary any more, so its identity stamp is void."""
        self._wanted.clear()
        if self._connection is not None:
            self._connection.fail(Disconnected("it is no primary any more", sent=True))

    async def _stay_subscribed(self) -> None:
        """Open a lost connection again at once, so that the client misses pushes for a short time only."""
        pause = 0.0
        while self._wanted and not self._closed:
            started = now()
            try:
                connection = await self._checkout(FOREVER)
                await asyncio.shield(connection.ended)
                pause = 0.0 if now() - started > STEADY_AFTER else min(1.0, pause * 2 or 0.02)
            except Disconnected:
                pause = min(1.0, pause * 2 or 0.02)
            except Exception as error:  # noqa: BLE001 (the next call tells the user)
                pause = 1.0
                log.warning("interlock: waiters are not woken by push, since %s", error)
            await asyncio.sleep(pause)

    def _task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a background task, which `close` cancels."""
        task = self.runtime.task(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel the background tasks, and close all connections."""
        self._closed = True
        await _cancel(self._tasks)
        open_ = [*self._spares, *([self._connection] if self._connection is not None else [])]
        for connection in open_:
            connection.fail(Disconnected("closed", sent=False))
        if open_:
            await asyncio.sleep(0)  # the transport closes its socket in the next turn

    def reset_after_fork(self) -> None:
        """In a child after fork: keep the parent's connections and tasks without closing any.

        The parent still polls its sockets. A child that closed a socket in the ordinary way would remove the socket
        from the parent's poll.
        """
        _parents.append((self._connection, self._spares, self._tasks, self.loop))


_parents: list[object] = []
