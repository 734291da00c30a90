"""The port for threads: every coroutine over it finishes without suspending.

A call takes a connection from the idle ones (or opens one), sends, waits for the reply, and puts it back: so each
thread that talks has a connection of its own, and no other thread has to wake up for its reply. Background work
runs in daemon threads; one of them hears the subscription. Sockets block, with a timeout kept by the kernel,
which saves a poll before every send and receive.
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

from interlock._core import DRIFT, FOREVER, GRANTED, HERE, Disconnected, Place, ServerError, log, run
from interlock.errors import LockError

from . import _wire
from ._memory import lossless
from ._primacy import DOUBT, NOT_NAMED, Primacy
from ._proofs import Proofs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from interlock._acks import Acks
    from interlock._core import Argument, Message, Script
    from interlock.connect import Address

    from ._memory import Epoch, Memory

T = TypeVar("T")
QUIET: Final = 5.0  # seconds without a message after which the subscription is tested
# The kernel keeps the timeout of a plain socket. Not that of TLS, nor of gevent's, which never blocks: they do.
_SOCKET: Final = socket.socket if socket.socket.__module__ == "socket" else None
STEADY: Final = 1.0  # seconds that a subscription must last, so that the next one is made without a pause
LONGEST: Final = 3600.0  # seconds of one wait: locks take no infinite timeout


class Signal:
    """A flag that one thread waits for: a raw lock, which is the cheapest thing that can wake a thread."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Raise it."""
        with contextlib.suppress(RuntimeError):  # it is up already
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Whether it was raised in time; takes it down."""
        return self._lock.acquire(timeout=max(0.0, seconds)) if seconds != FOREVER else self._lock.acquire()


class Wire:
    """One open connection, and its parser."""

    __slots__ = ("epoch", "fresh", "keeper", "limit", "reader", "said", "sock", "timeout", "used", "where")

    def __init__(self, address: Address, memory: Memory, until: float) -> None:
        within = max(0.001, until - _wire.now())
        self.keeper: Any = None  # it would close the socket when collected
        try:
            self.keeper = address.connection(within)
            self.keeper.connect()
        except Exception as error:  # noqa: BLE001 (also that of a user's credential provider)
            if self.keeper is not None:
                self.keeper.disconnect()
            raise _wire.refused(error, address) from None
        sock: Any = self.keeper._sock
        self.sock: socket.socket = sock  # redis-py's part ends here
        self.reader = _wire.reader()
        self.said: deque[str] = deque()  # the channels of what was said and not answered yet
        self.limit = 0.0
        self.timeout = address.timeout
        self.fresh = True
        self.used = 0.0  # when the last request was sent that has been answered (see `_primacy`)
        self.where = getattr(self.keeper, "host", ""), getattr(self.keeper, "port", 0)
        try:
            greeting = _wire.greeting(address)
            self.send(b"".join(map(_wire.pack, greeting)), until)
            self.epoch = _wire.accepted([self.receive(until) for _ in greeting], address, memory)
        except BaseException:
            self.close()
            raise

    def exchange(self, packed: bytes, until: float = FOREVER) -> Any:
        """Send, and wait for one reply."""
        self.send(packed, until)
        return self.receive(until)

    def send(self, packed: bytes, until: float = FOREVER) -> None:
        """Send. Raises Disconnected."""
        if until != FOREVER or self.limit != self.timeout:
            self._within(until)
        try:
            self.sock.sendall(packed)
        except OSError as error:
            raise self._broken(error) from None

    def receive(self, until: float = FOREVER) -> Any:
        """The next reply. Raises Disconnected, after which the connection is no use any more."""
        reader = self.reader
        while (reply := reader.gets()) is _wire.WAITING:
            try:
                data = self.sock.recv(65536)
            except OSError as error:
                raise self._broken(error) from None
            if not data:
                raise Disconnected("it closed the connection", sent=True, stale=not self.fresh)
            reader.feed(data)
            if len(data) == 65536 and until != FOREVER:
                self._within(until)  # a long reply: each part may take no more than what is left
        return reply

    def _within(self, until: float) -> None:
        """No send or receive takes longer than this, from now on."""
        seconds = self.timeout
        if until != FOREVER:
            seconds = max(0.001, min(seconds, until - _wire.now()))
        if not seconds <= self.limit <= seconds * 1.01:  # setting it costs as much as a tenth of a round trip
            self.limit = seconds
            if type(self.sock) is not _SOCKET:
                self.sock.settimeout(seconds)
                return
            if self.sock.gettimeout() is not None:
                self.sock.settimeout(None)
            value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def _broken(self, error: OSError) -> Disconnected:
        if isinstance(error, BlockingIOError | TimeoutError):
            return Disconnected(f"no answer within {self.limit:.3g} s", sent=True, timed_out=True)
        return Disconnected(str(error), sent=True, stale=not self.fresh)

    def shut(self) -> None:
        """End it, so that a thread that waits on it is told."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, here only: the parent of a fork may use the same connection."""
        with contextlib.suppress(OSError):
            self.sock.close()


class Sent(NamedTuple):
    """What is on its way: its replies come over this connection, unless there was an error."""

    messages: Sequence[Message]
    until: float
    wire: Wire | None
    error: Exception | None
    epochs: list[str]


class ThreadPort:
    """Connections to one server, for any number of threads."""

    several = False
    majority = 1
    drift = DRIFT

    def __init__(self, address: Address, memory: Memory) -> None:
        self.address = address
        self.memory = memory
        self.shown = address.shown
        self.patience = address.patience
        self.primacy = Primacy(address)
        self.sink: _wire.Sink
        self.now = _wire.now
        self.signal = Signal
        self._begin()

    def _begin(self) -> None:
        self.mutex = threading.RLock()  # a signal handler may come in while its own thread is inside
        self._idle: deque[Wire] = deque()
        self._proofs = Proofs(self, self.memory, self._lossless)
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.teach = False  # the next message goes with the text of its script, for the server did not know one
        self._ears: Wire | None = None  # the connection that hears the subscription
        self._listening = False  # no other thread is to be started for it
        self._hearing = False
        self._rest = Signal()
        self._met = ""  # the identity of the server at the newest connection
        self._voice = threading.Lock()  # several may subscribe
        self._wanted: dict[str, None] = {}  # channels
        self.heard: set[str] = set()  # of them; a server without a subscriber to one of these knows that we are dead

    async def call(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        slot: int | None = None,
    ) -> Any:
        """See Port. `slot`, if this is a node of a cluster: what its epoch is depends on it."""
        wire = self._take(until)
        try:
            epoch = wire.epoch.text if slot is None else wire.epoch.of(slot)
            reply = wire.exchange(_wire.by_sha(script, keys, args, epoch), until)
            if type(reply) is _wire.ReplyError and _wire.unknown(reply):
                reply = wire.exchange(_wire.by_text(script, keys, args, epoch), until)
        except BaseException as error:
            self._broken(wire, error)
            raise
        self._give(wire)
        if type(reply) is _wire.ReplyError and _wire.demoted(reply):
            self._leave()
        return _wire.checked(reply)

    async def assured(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        acks: Acks,
        patience: float,
        slot: int | None = None,
    ) -> tuple[Any, int, Any]:
        """See Port."""
        wire = self._take(until)
        try:
            epoch = wire.epoch.text if slot is None else wire.epoch.of(slot)
            reply = wire.exchange(_wire.by_sha(script, keys, args, epoch), until)
            if _wire.unknown(reply):
                reply = wire.exchange(_wire.by_text(script, keys, args, epoch), until)
            known, got = 0, None
            if type(reply) is list and reply[0] == GRANTED:
                known = self.memory.count(wire.exchange(_wire.REPLICATION, until))
                got = wire.exchange(_wire.pack(acks.command(known, patience)), until)
        except BaseException as error:
            self._broken(wire, error)
            raise
        self._give(wire)
        if _wire.demoted(reply):
            self._leave()
        return _wire.checked(reply), known, _wire.checked(got)

    async def asked(self, message: Message, until: float, slot: int) -> Any:
        """A call about a slot that is on its way here, after a redirection by ASK."""
        wire = self._take(until)
        try:
            reply: Any = None
            for packed in (_wire.by_sha, _wire.by_text):
                wire.send(_wire.ASKING + packed(*message, wire.epoch.of(slot)), until)
                asking = wire.receive(until)
                reply = wire.receive(until)
                if type(asking) is _wire.ReplyError:  # without that right it only sends us back
                    reply = asking
                if not _wire.unknown(reply):
                    break
        except BaseException as error:
            self._broken(wire, error)
            raise
        self._give(wire)
        return _wire.checked(reply)

    async def calls(self, messages: Sequence[Message], until: float) -> list[Any]:
        """See Port."""
        return await self.finish(await self.begin(messages, until))

    async def begin(self, messages: Sequence[Message], until: float, slots: Sequence[int] = ()) -> Sent:
        """The first half of `calls`: send, and wait for nothing."""
        try:
            wire = self._take(until)
        except Exception as error:  # noqa: BLE001 (one of many: see Port)
            return Sent(messages, until, None, error, [])
        try:
            epochs = [wire.epoch.of(slot) for slot in slots] if slots else [wire.epoch.text] * len(messages)
            said, self.teach = _wire.by_text if self.teach else _wire.by_sha, False
            wire.send(b"".join(said(*each, epoch) for each, epoch in zip(messages, epochs, strict=True)), until)
        except Disconnected as error:
            self._broken(wire, error)
            return Sent(messages, until, None, error, [])
        except BaseException as error:
            self._broken(wire, error)
            raise
        return Sent(messages, until, wire, None, epochs)

    async def finish(self, sent: Sent, *, late: bool = False) -> list[Any]:
        """The second half: the replies. If it is late by now, a script that was unknown is not sent after all."""
        wire, until, messages = sent.wire, sent.until, sent.messages
        if wire is None:
            return [sent.error] * len(messages)
        try:
            replies = [wire.receive(until) for _ in messages]
            for i, message in enumerate(messages):
                if _wire.unknown(replies[i]):
                    self.teach |= late
                    if not late:
                        replies[i] = wire.exchange(_wire.by_text(*message, sent.epochs[i]), until)
        except Disconnected as error:
            self._broken(wire, error)
            return [error] * len(messages)
        except BaseException as error:
            self._broken(wire, error)
            raise
        self._give(wire)
        if any(map(_wire.demoted, replies)):
            self._leave()
        return [ServerError(str(r)) if type(r) is _wire.ReplyError else r for r in replies]

    def drop(self, sent: Sent) -> None:
        """Nobody will ask for these replies."""
        if sent.wire is not None:
            sent.wire.close()

    @property
    def ready(self) -> bool:
        """Whether something can be sent without connecting first."""
        return bool(self._idle)

    async def greet(self, until: float) -> None:
        """Connect if need be, and see that it answers. Raises what keeps it from that."""
        wire = self._take(until)
        try:
            wire.exchange(_wire.PING, until)
        except BaseException as error:
            self._broken(wire, error)
            raise
        self._give(wire)

    @staticmethod
    async def answered(sents: Sequence[Sent], number: int, until: float) -> list[int]:
        """Which of these have their replies, as soon as so many have, or the time is over."""
        ready = [i for i, sent in enumerate(sents) if sent.wire is None]
        waiting = {sent.wire.sock.fileno(): i for i, sent in enumerate(sents) if sent.wire is not None}
        poll = select.poll()
        for each in waiting:
            poll.register(each, select.POLLIN)
        while waiting and len(ready) < number:
            found = poll.poll(math.ceil(max(0.0, until - _wire.now()) * 1000))
            if not found:
                break
            for each, _ in found:
                poll.unregister(each)
                ready.append(waiting.pop(each))
        return ready

    async def proven(self, keys: Sequence[str | bytes], evidence: str, until: float) -> bool:  # noqa: ARG002 (see Port)
        """See Port."""
        return await self._proofs.wanted(evidence, until)

    def unsettled(self, key: str, slot: int = -1) -> str:  # noqa: ARG002 (see Port)
        """See Port."""
        return self._proofs.unsettled(slot)

    async def _lossless(self, evidence: str, epoch: Epoch, left: float) -> float | None:
        return await self.aside(partial(lossless, self.address, evidence, epoch, left))

    async def met(self, until: float) -> Epoch:
        """Under which epoch it is reached now. Raises Disconnected."""
        wire = self._take(until)
        self._give(wire)
        return wire.epoch

    async def aside(self, work: Callable[[], T]) -> T:
        """Do what blocks."""
        return work()

    def _take(self, until: float) -> Wire:
        try:
            wire = self._idle.pop()
        except IndexError:
            return self._open(until)
        wire.fresh = False
        if self.address.fickle:
            now = self.now()
            if now - wire.used > DOUBT and not self._same(wire, until):
                self._leave()
                return self._open(until)
            wire.used = now
        return wire

    def _same(self, wire: Wire, until: float) -> bool:
        """Whether it leads to the primary to which it led, with what that had: by the word of others, and its own."""
        try:
            same = self.primacy.is_confirmed(wire.where, until)
        except (Disconnected, LockError):  # nobody knows: the connection is what it was
            self._give(wire)
            raise
        except BaseException:
            wire.close()
            raise
        try:
            same = same and _wire.same(wire.exchange(_wire.REPLICATION, until), wire.epoch)
        except Disconnected:
            same = False
        except BaseException:
            wire.close()
            raise
        if not same:
            wire.close()
        return same

    def _open(self, until: float) -> Wire:
        asked = self.now()
        if self.address.clustered and not self.primacy.is_confirmed(("", 0), until):
            raise Disconnected(NOT_NAMED, sent=False)
        wire = Wire(self.address, self.memory, until)
        wire.used = asked
        if wire.epoch.identity != self._met:
            if self._met:
                self._leave()  # what is still open leads to another server, or to none
            self._met = wire.epoch.identity
        return wire

    def _give(self, wire: Wire) -> None:
        self._idle.append(wire)
        if self._closed:
            self._drain()

    def _broken(self, wire: Wire, error: BaseException) -> None:
        wire.close()
        if isinstance(error, Disconnected) and (error.stale or error.timed_out):
            self._drain()  # what has been idle for longer may be dead too, and nobody has told

    def _drain(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _leave(self) -> None:
        """The server is a replica by now: the next connections may lead to another one."""
        self._drain()
        if self._ears:
            self._ears.shut()

    async def wait(self, signal: Signal, until: float) -> bool:
        """See Port."""
        while until != FOREVER:
            left = until - _wire.now()
            if signal.wait(min(left, LONGEST)):
                return True
            if left <= LONGEST:
                return False
        return signal.wait(FOREVER)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, over: Callable[[], None]) -> None:
        """See Port."""

        def whole() -> None:
            try:
                run(work())
            finally:
                over()

        self._thread(whole, name)

    def tell(self, callback: Callable[[Any], object], subject: Any) -> None:
        """See Port."""

        def told() -> None:
            try:
                callback(subject)
            except Exception:  # noqa: BLE001 (logged)
                log.exception("interlock: the callback %r failed", callback)

        threading.Thread(target=told, name="interlock-tell", daemon=True).start()

    def _thread(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        with self.mutex:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    # The subscription

    def ear(self, key: str) -> tuple[str, str]:  # noqa: ARG002 (see Port)
        """See Port."""
        channel = self.sink.channel
        return "1" if channel in self.heard else "0", channel

    def place(self, key: str) -> Place:  # noqa: ARG002 (see Port)
        """See Port."""
        return HERE

    def listen(self, key: str) -> None:  # noqa: ARG002 (see Port)
        """See Port."""
        self.subscribe(self.sink.channel)

    def subscribe(self, channel: str) -> None:
        """Hear this channel, too, from now on."""
        if channel in self._wanted:
            return
        with self.mutex:
            self._wanted[channel] = None
            if not self._listening:
                self._listening = True
                try:
                    self._thread(self._hear, "interlock-listener")
                except BaseException:  # an interrupt: it may have begun, or not
                    self._listening = False
                    del self._wanted[channel]
                    raise
                return
        if (wire := self._ears) is not None:
            with contextlib.suppress(Disconnected):  # it is made anew, for all channels
                self._subscribe(wire, channel)

    def quiet(self) -> None:
        """Hear nothing any more: it is no primary. What is idle was connected to one."""
        self._wanted.clear()
        self._leave()

    def _subscribe(self, wire: Wire, channel: str) -> None:
        with self._voice:
            wire.said += (channel, channel)  # SUBSCRIBE and PUBLISH
            wire.send(b"".join(_wire.subscription(channel)))

    def _hear(self) -> None:
        with self.mutex:
            if self._hearing:
                return  # one is enough
            self._hearing = True
        pause = 0.0
        while not self._closed:
            with self.mutex:
                if not self._wanted:
                    self._listening = self._hearing = False
                    return
            started = self.now()
            try:
                wire = self._ears = self._open(FOREVER)
                try:
                    self._subscription(wire)
                finally:
                    self.heard.clear()  # the server must not take our silence for death
                    wire.close()
            except Disconnected:  # at once, unless it did not last
                pause = 0.0 if self.now() - started > STEADY else min(1.0, pause * 2 or 0.02)
            except Exception as error:  # noqa: BLE001 (polling goes on without it; the next call tells the user)
                pause = 1.0
                log.warning("interlock: waiters are woken by polling only, since %s", error)
            self._rest.wait(pause)

    def _subscription(self, wire: Wire) -> None:
        wire.timeout = QUIET
        for channel in list(self._wanted):
            self._subscribe(wire, channel)
        tested = 0
        while not self._closed:
            try:
                reply = wire.receive()
            except Disconnected as silence:
                if tested or not silence.timed_out:
                    raise
                tested = 1
                with self._voice:
                    wire.said.append("")
                    wire.send(_wire.PING)
                continue
            tested = 0
            if type(reply) is not _wire.Push:
                if channel := wire.said.popleft():  # not of PING
                    _wire.heed(reply, channel, self._wanted)
            elif _wire.hear(reply, self.sink, self._wanted, self.heard):
                wire.said.popleft()

    # Its end

    def close(self) -> None:
        """End the connections and the threads."""
        self._closed = True
        self._rest.set()
        if self._ears:
            self._ears.shut()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
        self._drain()

    def forget(self) -> None:
        """In a child after fork: what was open belongs to the parent."""
        for wire in [*self._idle, *([self._ears] if self._ears else [])]:
            wire.close()
        closed = self._closed
        self._begin()
        self._closed = closed
