"""The port of a simulated process: what the core needs of the world, over the virtual network and clock."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from interlock._core import DRIFT, FOREVER, RETRY_FOR, Disconnected, Place, ServerError
from interlock.errors import LockError, Unavailable

from .chance import MESSAGE, TRAFFIC
from .coroutines import Future, Process, Task, Timer
from .network import Journey, Network

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from interlock._acks import Acks
    from interlock._core import Argument, Message, Script
    from interlock._session import Session

    from .scheduler import World

IO_TIMEOUT: Final = 5.0  # seconds without an answer, as in interlock.connect


class SimSignal:
    """A flag that one coroutine waits for."""

    __slots__ = ("up", "waiter")

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
    """See `interlock._core.Port`. Every await passes a brink first."""

    shown = "sim://"
    patience = RETRY_FOR
    several = False
    drift = DRIFT

    def __init__(self, process: Process, network: Network) -> None:
        self.process = process
        self.network = network
        self.sink: Session
        self.mutex = contextlib.nullcontext()
        self.now = process.clock
        self.asked: Callable[[Sequence[Message]], None] = lambda _batch: None  # before anything can happen
        self.sending: Callable[[Sequence[str], Sequence[Argument]], None] = lambda _keys, _args: None
        self._channel: bytes | None = None
        self._heard = "0"
        self.epoch = ""  # what goes out with every message, see queue.lua

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Any:
        """See Port."""
        reply = (await self._exchange([(script, keys, args)], until))[0]
        if isinstance(reply, ServerError):
            raise reply
        return reply

    async def assured(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        acks: Acks,  # noqa: ARG002
        patience: float,  # noqa: ARG002 (replicas are not modelled)
    ) -> tuple[Any, int, Any]:
        """See Port."""
        return await self.call(script, keys, args, until), 0, 0

    async def calls(self, messages: Sequence[Message], until: float) -> list[Any]:
        """See Port."""
        try:
            return await self._exchange(messages, until)
        except (Disconnected, LockError) as error:
            return [error] * len(messages)

    async def _exchange(self, batch: Sequence[Message], until: float) -> list[Any]:
        network, task = self.network, current(self.process.world)
        task.sends = True
        self.asked(batch)
        if task.traps:
            await task.brink()
        weather = network.weather
        if weather.refused or weather.replica:
            journey = Journey(task, TRAFFIC)
            if network.strikes(journey, "connection refused", weather.refused):
                await self.wait(SimSignal(), min(until, self.now() + network.trip(journey)))
                raise Disconnected("connection refused", sent=False)
            if network.strikes(journey, "replica met", weather.replica):
                await self.wait(SimSignal(), min(until, self.now() + network.trip(journey)))
                raise Unavailable(f"{self.shown} is a read-only replica. Connect to its primary")
        for _, keys, args in batch:
            self.sending([*map(str, keys)], args)
        replies = await self._request(batch, until, by_text=False)
        for i, reply in enumerate(replies):
            if isinstance(reply, ServerError) and str(reply).startswith("NOSCRIPT"):
                network.record.counts["script unknown"] += 1
                replies[i] = (await self._request([batch[i]], until, by_text=True))[0]
        return replies

    async def _request(self, batch: Sequence[Message], until: float, *, by_text: bool) -> list[Any]:
        process, future = self.process, Future()
        scripts = [self.network.script(script) for script, _, _ in batch]
        raw = [
            (
                script.source if by_text else script.sha,
                [*map(_encoded, keys)],
                [*map(_encoded, args), _encoded(self.epoch)],
            )
            for script, (_, keys, args) in zip(scripts, batch, strict=True)
        ]
        once = any(args[0] == "execute" for _, _, args in batch)
        journey = Journey(current(process.world), MESSAGE)
        self.network.send(process, journey, raw, future, by_text=by_text, once=once)
        limit = max(min(until, self.now() + IO_TIMEOUT), self.now() + 0.001)
        silence = Disconnected("no answer in time", sent=True, timed_out=True)
        process.world.at(process.when(limit), Timer(future, silence), process)
        replies: list[Any] = await future
        return replies

    def signal(self) -> SimSignal:
        """See Port."""
        return SimSignal()

    async def wait(self, signal: SimSignal, until: float) -> bool:
        """See Port."""
        task = current(self.process.world)
        task.sends = False
        if task.traps:
            await task.brink()
        if signal.up:
            signal.up = False
            return True
        future = signal.waiter = Future()
        if until != FOREVER:
            self.process.world.at(self.process.when(until), Timer(future, False), self.process)
        try:
            raised: bool = await future
        finally:
            signal.waiter = None
        return raised

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, over: Callable[[], None]) -> None:
        """See Port."""

        async def whole() -> None:
            try:
                await work()
            finally:
                over()

        self.process.spawn(whole(), name)

    def tell(self, callback: Callable[[Any], object], subject: Any) -> None:
        """See Port."""

        def told() -> None:
            callback(subject)

        self.process.world.soon(told, self.process)

    def forget(self) -> None:
        """See Port. Nothing forks here."""

    # The subscription

    def ear(self, key: str) -> tuple[str, str]:  # noqa: ARG002 (see Port)
        """See Port."""
        return self._heard, self.sink.channel

    def place(self, key: str) -> Place:  # noqa: ARG002 (see Port)
        """See Port."""
        return Place(0, 0)

    async def proven(self, keys: Sequence[str | bytes], evidence: str, until: float) -> bool:  # noqa: ARG002 (see Port)
        """See Port."""
        return False

    def listen(self, key: str) -> None:  # noqa: ARG002 (see Port)
        """See Port."""
        if self._channel is None:
            self._channel = self.sink.channel.encode()
            self._subscribe()

    def hear(self, payload: bytes) -> None:
        """A push has come."""
        self.sink.pushed(payload)

    def deafen(self, noticed: float) -> None:
        """A fault: the connection that hears breaks, which is noticed this many seconds later."""
        if self._channel is not None and self.network.ears.pop(self._channel, None) is not None:
            self.network.record.counts["subscription broken"] += 1
            self.process.world.at(self.process.world.now + noticed, self._noticed, self.process)

    def buried(self) -> None:
        """The process has crashed, and the server has noticed."""
        if self._channel is not None:
            self.network.ears.pop(self._channel, self)

    def _noticed(self) -> None:
        self._heard = "0"
        self._subscribe()

    def _acknowledged(self) -> None:
        self._heard = "1"
        self.sink.subscribed()

    def _subscribe(self) -> None:
        world, channel, journey = self.process.world, self._channel, Journey(self.process, TRAFFIC)
        assert channel is not None

        def heard() -> None:
            if self.process.alive:
                self.network.ears[channel] = self
                back = world.now + self.network.trip(journey, 1)
                world.at(back, self._acknowledged, self.process)

        world.at(world.now + self.network.trip(journey), heard)


def _encoded(value: Argument) -> bytes:
    """An argument as it goes over the wire."""
    if type(value) is str:
        return value.encode()
    return value if isinstance(value, bytes) else str(value).encode()


def current(world: World) -> Task:
    """The coroutine that runs now."""
    assert world.current is not None
    return world.current
