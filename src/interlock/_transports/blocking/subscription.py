"""The subscription of a pool for threads: one connection that receives pushes, and the thread that reads it."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Protocol

from interlock._protocol.log import log
from interlock._protocol.mutex import new_mutex
from interlock._protocol.run_to_end import run
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import FOREVER, now
from interlock._transports.blocking.runtime import AutoResetEvent, ThreadRuntime
from interlock._transports.idle import PING_AFTER, PING_ANSWER_WITHIN
from interlock._transports.pushes import check_subscribe_reply, next_pause, spread, subscribe_commands, take_push
from interlock._transports.resp import PING, Push

if TYPE_CHECKING:
    from interlock._protocol.server import PushHandler
    from interlock._transports.blocking.connection import BlockingConnection


class Owner(Protocol):
    """What a subscription needs of its pool."""

    runtime: ThreadRuntime
    push_handler: PushHandler
    closed: bool

    def open(self, until: float) -> BlockingConnection: ...


class Listening:
    """One connection that receives pushes."""

    def __init__(self, connection: BlockingConnection) -> None:
        self.connection = connection
        self.unanswered: deque[str] = deque()  # the channel of each command without a reply; "" for a PING


class Subscription:
    """The channels of one pool, and the listener thread, which connects again whenever its connection breaks."""

    def __init__(self, pool: Owner) -> None:
        self.pool = pool
        self.wanted: dict[str, None] = {}  # channels
        self.subscribed: set[str] = set()  # the channels in effect
        self._listening: Listening | None = None
        self._started = False  # the listener thread was started: start no second one
        self._running = False
        self._reconnect_delay = AutoResetEvent()
        self._lock = new_mutex()  # several threads may subscribe at once

    def subscribe(self, channel: str) -> None:
        """Subscribe to one more channel. The first call starts the listener thread."""
        if channel in self.wanted:
            return
        runtime = self.pool.runtime
        with runtime.mutex:
            self.wanted[channel] = None
            if not self._started:
                self._started = True
                try:
                    runtime.start_thread(self._listen, "interlock-listener")
                except BaseException:  # such as KeyboardInterrupt: the thread may have started or not
                    self._started = False
                    del self.wanted[channel]
                    raise
                return
        if (listening := self._listening) is not None:
            with contextlib.suppress(Disconnected):  # the listener connects again, and subscribes to all channels
                self._subscribe(listening, channel)

    def _subscribe(self, listening: Listening, channel: str) -> None:
        with self._lock:
            listening.unanswered += (channel, channel)  # SUBSCRIBE and PUBLISH
            listening.connection.write(b"".join(subscribe_commands(channel)))

    def _listen(self) -> None:
        with self.pool.runtime.mutex:
            if self._running:
                return  # another listener thread runs already
            self._running = True
        pause, warned = 0.0, ""
        while not self.pool.closed:
            with self.pool.runtime.mutex:
                if not self.wanted:
                    self._started = self._running = False
                    return
            started = now()
            try:
                listening = self._listening = Listening(self.pool.open(FOREVER))
                try:
                    self._serve(listening)
                finally:
                    self.subscribed.clear()  # else the server would skip the waiters of this client
                    listening.connection.close()
            except Disconnected:  # connect again at once, unless the connection lasted too short a time
                pause = next_pause(pause, now() - started)
            except Exception as error:  # noqa: BLE001 (waiters still poll; the next call raises the error)
                pause = 1.0
                if str(error) != warned:
                    warned = str(error)
                    log.warning("interlock: waiters are woken by polling only, since %s", error)
            run(self._reconnect_delay.wait(now() + spread(pause)))

    def _serve(self, listening: Listening) -> None:
        connection, unanswered = listening.connection, listening.unanswered
        connection.limit(PING_AFTER)
        for channel in list(self.wanted):
            self._subscribe(listening, channel)
        pinged = False
        while not self.pool.closed:
            try:
                reply = connection.read()
            except Disconnected as silence:
                if pinged or not silence.timed_out:
                    raise
                pinged = True
                connection.limit(PING_ANSWER_WITHIN)
                with self._lock:
                    unanswered.append("")
                    connection.write(PING)
                continue
            if pinged:
                pinged = False
                connection.limit(PING_AFTER)
            if type(reply) is not Push:
                if channel := unanswered.popleft():  # "" is a PING
                    check_subscribe_reply(reply, channel, self.wanted)
            elif take_push(reply, self.pool.push_handler, self.wanted, self.subscribed):
                unanswered.popleft()

    # The end

    def shut_down(self) -> None:
        """Make the listener thread connect again, or end if the pool is closed."""
        if self._listening is not None:
            self._listening.connection.shut_down()

    def end(self) -> None:
        """End the listener thread of a closed pool."""
        self._reconnect_delay.set()
        self.shut_down()
