"""The network between clients and server: it delays, loses, doubles and delivers late; and the port over it.

Theory. A request is one message of one or more script calls. It and its reply travel alone, each with a delay of
its own, so requests overtake each other, as over several connections. A caller that has given up (a timeout, a
reset, a cancellation, a crash) does not stop its message: that still arrives, perhaps half a minute later, after
anything else that was sent in between. Pushes travel the same way to who is subscribed when they are published.

What TCP rules out is not done, unless `Weather.wild`: a copy of a request never arrives after its reply was read.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from interlock._core import FOREVER, Disconnected, ServerError
from interlock.errors import Unavailable

from .scheduler import Future, Process, Task, World
from .server import Server, encoded

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Coroutine, Sequence

    from interlock._core import Argument, Message, Script
    from interlock._session import Session

IO_TIMEOUT: Final = 5.0  # seconds without an answer, as in interlock.connect
LATEST: Final = 30.0  # seconds that a message may take at the most


@dataclass(frozen=True)
class Weather:
    """How likely each fault is, per message; delays in seconds."""

    trip: float = 0.0005  # one way, on average
    slow: float = 0.0  # it takes around 0.3 s
    late: float = 0.0  # it takes up to LATEST
    lost: float = 0.0  # a request never arrives
    unanswered: float = 0.0  # a reply never arrives
    doubled: float = 0.0  # a request arrives twice
    refused: float = 0.0  # no connection: nothing is sent
    replica: float = 0.0  # the connection is to a replica for a moment, which the port refuses
    reset: float = 0.0  # of what is lost: the client is told, and need not wait for its timeout
    push_lost: float = 0.0
    push_doubled: float = 0.0
    wild: bool = False  # copies may arrive even after the reply was read

    @property
    def clean(self) -> bool:
        """Whether every message arrives, once and soon."""
        return not (self.slow or self.late or self.lost or self.unanswered or self.doubled or self.refused)


CALM: Final = Weather()


class Network:
    """Messages on their way."""

    def __init__(self, world: World, server: Server, counts: Counter[str]) -> None:
        self.world = world
        self.server = server
        self.counts = counts
        self.weather = CALM
        self.ears: dict[bytes, SimPort] = {}  # who is subscribed to which channel
        self.executed: Callable[[str, Sequence[bytes], Sequence[bytes], Any], None] = _ignore
        self.cut_off = False  # nothing gets through in either direction
        server.publish = self.publish
        server.subscribers = lambda channel: int(channel in self.ears)

    def chance(self, likelihood: float, name: str) -> bool:
        """Whether a fault happens now; counted by its name."""
        if likelihood and self.world.random.random() < likelihood:
            self.counts[name] += 1
            return True
        return False

    def trip(self) -> float:
        """How long the next message takes."""
        random, weather = self.world.random, self.weather
        if self.chance(weather.late, "message late"):
            return random.uniform(1.0, LATEST)
        if self.chance(weather.slow, "message slow"):
            return random.expovariate(1 / 0.3)
        return weather.trip * random.uniform(0.5, 1.5)

    # Requests

    def send(self, sender: Process, batch: Sequence[Message], future: Future, *, by_text: bool) -> None:
        """One message with script calls on its way; the future gets the replies."""
        raw = [
            (script.source if by_text else script.sha, [*map(encoded, keys)], [*map(encoded, args)])
            for script, keys, args in batch
        ]
        copies = 1
        if self.cut_off or self.chance(self.weather.lost, "request lost"):
            copies = 0
            self._reset(sender, future)
        elif self.chance(self.weather.doubled, "request doubled"):
            copies = 2
        for _ in range(copies):
            self.world.at(self.world.now + self.trip(), lambda: self._arrive(sender, raw, future, by_text))

    def _reset(self, sender: Process, future: Future) -> None:
        if self.chance(self.weather.reset, "connection reset"):
            stale = self.world.random.random() < 0.3
            error = Disconnected("it closed the connection", sent=True, stale=stale)
            self.world.at(self.world.now + self.trip(), lambda: future.resolve(error), sender)

    def _arrive(self, sender: Process, raw: Sequence[Any], future: Future, by_text: bool) -> None:
        if future.done and isinstance(future.value, list) and not self.weather.wild:
            return  # a second copy, and the reply was read: TCP would not deliver this any more
        if future.done:
            self.counts["executed after its caller had given up"] += 1
        some = len(raw)
        if some > 1 and self.chance(self.weather.unanswered, "batch cut short"):
            some = self.world.random.randrange(some)
        run = self.server.eval if by_text else self.server.evalsha
        replies: list[Any] = []
        for script, keys, args in raw[:some]:
            replies.append(run(script, keys, args))
            self.executed(sender.name, keys, args, replies[-1])
        if some < len(raw) or self.cut_off or self.chance(self.weather.unanswered, "reply lost"):
            self._reset(sender, future)
            return
        self.world.at(self.world.now + self.trip(), lambda: future.resolve(replies), sender)

    # Pushes

    def publish(self, channel: bytes, payload: bytes) -> int:
        """Called by the server in the middle of a script."""
        port = self.ears.get(channel)
        if port is None:
            self.counts["push to nobody"] += 1
            return 0
        if self.cut_off or self.chance(self.weather.push_lost, "push lost"):
            return 1
        for _ in range(1 + self.chance(self.weather.push_doubled, "push doubled")):
            self.world.at(self.world.now + self.trip(), lambda: port.sink.pushed(payload), port.process)
        return 1


class SimSignal:
    """A flag that one coroutine waits for."""

    def __init__(self) -> None:
        self.up = False
        self.waiter: Future | None = None

    def set(self) -> None:
        """Raise it."""
        if self.waiter is not None and not self.waiter.done:
            self.waiter.resolve(True)
        else:
            self.up = True


class SimPort:
    """The port over the virtual network: see `interlock._core.Port`."""

    shown = "sim://"

    def __init__(self, process: Process, network: Network) -> None:
        self.process = process
        self.network = network
        self.sink: Session
        self.mutex = contextlib.nullcontext()
        self.now = process.clock
        self.sending: Callable[[str, Sequence[Argument]], None] = lambda _key, _args: None
        self._channel: bytes | None = None

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Any:
        """See Port."""
        reply = (await self._exchange([(script, keys, args)], until))[0]
        if isinstance(reply, ServerError):
            raise reply
        return reply

    async def calls(self, messages: Sequence[Message], until: float) -> list[Any]:
        """See Port."""
        return await self._exchange(messages, until)

    async def _exchange(self, batch: Sequence[Message], until: float) -> list[Any]:
        network = self.network
        if network.chance(network.weather.refused, "connection refused"):
            await self.wait(SimSignal(), min(until, self.now() + self.network.trip()))
            raise Disconnected("connection refused", sent=False)
        if network.chance(network.weather.replica, "replica met"):
            await self.wait(SimSignal(), min(until, self.now() + self.network.trip()))
            raise Unavailable(f"{self.shown} is a read-only replica. Connect to its primary")
        for _, keys, args in batch:
            self.sending(str(keys[0]), args)
        replies = await self._request(batch, until, by_text=False)
        for i, reply in enumerate(replies):
            if isinstance(reply, ServerError) and str(reply).startswith("NOSCRIPT"):
                network.counts["script unknown"] += 1
                replies[i] = (await self._request([batch[i]], until, by_text=True))[0]
        return replies

    async def _request(self, batch: Sequence[Message], until: float, *, by_text: bool) -> list[Any]:
        process, future = self.process, Future()
        self.network.send(process, batch, future, by_text=by_text)
        limit = max(min(until, self.now() + IO_TIMEOUT), self.now() + 0.001)
        silence = Disconnected("no answer in time", sent=True, timed_out=True)
        process.world.at(process.when(limit), lambda: future.resolve(silence), process)
        replies: list[Any] = await future
        return replies

    def signal(self) -> SimSignal:
        """See Port."""
        return SimSignal()

    async def wait(self, signal: SimSignal, until: float) -> bool:
        """See Port."""
        if signal.up:
            signal.up = False
            return True
        future = signal.waiter = Future()
        if until != FOREVER:
            self.process.world.at(self.process.when(until), lambda: future.resolve(False), self.process)
        try:
            raised: bool = await future
        finally:
            signal.waiter = None
        return raised

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """See Port."""
        self.process.spawn(work(), name)

    def tell(self, callback: Callable[[Any], object], subject: Any) -> None:
        """See Port."""

        def told() -> None:
            callback(subject)

        self.process.world.soon(told, self.process)

    def forget(self) -> None:
        """See Port. Nothing forks here."""

    # The subscription

    def listen(self, channel: str) -> None:
        """See Port."""
        if self._channel is None:
            self._channel = channel.encode()
            self._subscribe()

    def deafen(self) -> None:
        """A fault: the connection that hears breaks, which is noticed a while later."""
        if self._channel is not None and self._channel in self.network.ears:
            del self.network.ears[self._channel]
            self.network.counts["subscription broken"] += 1
            world = self.process.world
            noticed = world.now + world.random.choice((self.network.trip(), world.random.uniform(0.0, IO_TIMEOUT)))
            world.at(noticed, self._noticed, self.process)

    def buried(self) -> None:
        """The process has crashed, and the server has noticed."""
        if self._channel is not None:
            self.network.ears.pop(self._channel, self)

    def _noticed(self) -> None:
        self.sink.unsubscribed()
        self._subscribe()

    def _subscribe(self) -> None:
        world, channel = self.process.world, self._channel
        assert channel is not None

        def heard() -> None:
            if self.process.alive:
                self.network.ears[channel] = self
                world.at(world.now + self.network.trip(), lambda: self.sink.subscribed(), self.process)  # noqa: PLW0108

        world.at(world.now + self.network.trip(), heard)


def _ignore(_sender: str, _keys: Sequence[bytes], _args: Sequence[bytes], _reply: Any) -> None:
    pass


def current(world: World) -> Task:
    """The coroutine that runs now."""
    assert world.current is not None
    return world.current
