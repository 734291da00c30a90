"""The server, as a simulated process sees it: what the core needs of the world, over the virtual network and clock."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from interlock._protocol.timing import DRIFT, FOREVER, RETRY_FOR
from interlock._protocol.types import ONLY_ROUTE, Disconnected, Route, ServerError
from interlock._quarantine.lossless import MIN_PROOF_TIME, PROOF_STEP_TIMEOUT, PROOF_STEPS, least_lossless_ttl
from interlock._quarantine.primacy import TRUSTED_FOR
from interlock._quarantine.proofs import Proofs
from interlock._transports.asyncio import SILENCE_LIMIT
from interlock.errors import LockError, Unavailable

from .chance import MESSAGE, TRAFFIC
from .coroutines import Future, Process, Task, Timer
from .network import Journey, Network
from .server_group import ServerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from interlock._client.session import Session
    from interlock._connect.address import Address as RealAddress
    from interlock._protocol.acks import Acks
    from interlock._protocol.types import Argument, Message, Script
    from interlock._quarantine.history import ServerHistory
    from interlock._quarantine.identity import Facts
    from interlock._quarantine.stamp import IdentityStamp

    from .scheduler import World
    from .server_group import Host

T = TypeVar("T")
IO_TIMEOUT: Final = 5.0  # seconds without an answer, as in interlock.connect


class SimSignal:
    """A flag that one coroutine of a process waits for. Every wait passes `before_send` first."""

    __slots__ = ("process", "up", "waiter")

    def __init__(self, process: Process) -> None:
        self.process = process
        self.up = False
        self.waiter: Future | None = None

    def set(self) -> None:
        """Raise it."""
        if self.waiter is not None and not self.waiter.done:
            self.waiter.resolve(True)
        else:
            self.up = True

    async def wait(self, until: float) -> bool:
        """See AutoResetEvent."""
        task = current(self.process.world)
        task.sends = False
        if task.traps:
            await task.before_send()
        if self.up:
            self.up = False
            return True
        future = self.waiter = Future()
        if until != FOREVER:
            self.process.world.at(self.process.when(until), Timer(future, False), self.process)
        try:
            raised: bool = await future
        finally:
            self.waiter = None
        return raised


class Link:
    """A connection to one process of a server, under whose identity everything is said that goes over it."""

    __slots__ = ("broken", "epoch", "heard", "host", "process", "row", "server", "used")

    def __init__(self, server: SimServer, host: Host, epoch: IdentityStamp, asked: float) -> None:
        self.server = server
        self.process = server.process
        self.host = host
        self.epoch = epoch
        self.broken = False  # and the client knows
        self.row: set[Future] = set()  # those who wait for a reply
        self.heard = server.process.world.now  # when the last word came, or the wait for one began
        self.used = asked  # when the last request was sent that has been answered, see `ports._primacy`

    def answered(self, sent: float) -> None:
        """The reply to a request that was sent then has come."""
        if sent - self.used <= TRUSTED_FOR:  # else a pause may lie between
            self.used = max(self.used, sent)


class Sent(NamedTuple):
    """What is on its way: a future for the replies, unless there was an error."""

    messages: Sequence[Message]
    until: float
    link: Link | None
    future: Future
    error: Exception | None


class SimRuntime:
    """See `Runtime`: a process of a simulated world, with its own clock."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.now = process.clock
        self.mutex = contextlib.nullcontext()

    def event(self) -> SimSignal:
        """See Runtime."""
        return SimSignal(self.process)

    async def sleep_until(self, until: float) -> None:
        """See Runtime."""
        await SimSignal(self.process).wait(until)

    def spawn(self, work: Callable[[], Coroutine[object, None, None]], name: str, over: Callable[[], None]) -> None:
        """See Runtime."""

        async def whole() -> None:
            try:
                await work()
            finally:
                over()

        self.process.spawn(whole(), name)

    def run_callback(self, callback: Callable[[T], object], subject: T) -> None:
        """See Runtime."""

        def told() -> None:
            callback(subject)

        self.process.world.soon(told, self.process)

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """See Runtime. Nothing blocks here."""
        return work()

    def reset_after_fork(self) -> None:
        """See Runtime. Nothing forks here."""

    async def close(self) -> None:
        """See Runtime. What runs in the background ends with its process."""


class SimServer:
    """See `Server`. Every await passes the place `before_send` first."""

    display_url = ServerGroup.display_url
    retry_for = RETRY_FOR
    is_quorum = False
    majority = 1
    drift = DRIFT

    def __init__(
        self, process: Process, network: Network, memory: ServerHistory, runtime: SimRuntime, longer: float = 0.0
    ) -> None:
        self.process = process
        self.network = network
        self.history = memory
        self.longer = longer  # seconds that an isolated primary may be believed for
        self.runtime = runtime
        self.push_handler: Session
        self._proofs = Proofs(runtime, self.history, self._verdict)
        self.asked: Callable[[Sequence[Message]], None] = lambda _batch: None  # before anything can happen
        self.sending: Callable[[Sequence[str], Sequence[Argument]], None] = lambda _keys, _args: None
        self.answered_at = -FOREVER  # when the last reply came
        self.link: Link | None = None
        self.met: set[Host] = set()
        self._expect: list[Callable[[Link | Disconnected], None]] = []  # who waits for the connection being made
        self._connecting = 0  # which one that is; 0: none
        self._connected = 0  # how many there were
        self._channel: bytes | None = None
        self._heard = "0"
        self.send_script_text = False  # the next message goes with the text of its script
        self._pause = 0.0  # before the listener connects again
        self.doubt = TRUSTED_FOR if network.group.promotes else FOREVER
        self.deaf_until = 0.0  # pushes may be lost until then

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Any:
        """See Server."""
        reply = (await self._exchange([(script, keys, args)], until))[0]
        if isinstance(reply, ServerError):
            raise reply
        return reply

    async def call_with_acks(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        acks: Acks,  # noqa: ARG002
        patience: float,  # noqa: ARG002 (replicas are not modelled)
    ) -> tuple[Any, int, Any]:
        """See Server."""
        return await self.call(script, keys, args, until), 0, 0

    async def call_many(self, messages: Sequence[Message], until: float) -> list[Any]:
        """See Server."""
        try:
            return await self._exchange(messages, until)
        except (Disconnected, LockError) as error:
            return [error] * len(messages)

    async def _exchange(self, batch: Sequence[Message], until: float) -> list[Any]:
        network, task = self.network, current(self.process.world)
        task.sends = True
        self.asked(batch)
        if task.traps:
            await task.before_send()
        weather = network.weather
        if weather.refused or weather.replica:
            journey = Journey(task, TRAFFIC)
            if network.strikes(journey, "connection refused", weather.refused):
                await self.runtime.sleep_until(min(until, self.runtime.now() + network.trip(journey)))
                raise Disconnected("connection refused", sent=False)
            if network.strikes(journey, "replica met", weather.replica):
                await self.runtime.sleep_until(min(until, self.runtime.now() + network.trip(journey)))
                raise Unavailable(f"{self.display_url} is a read-only replica. Connect to its primary")
        for _, keys, args in batch:
            self.sending([*map(str, keys)], args)
        replies = await self._request(batch, until, by_text=False)
        for i, reply in enumerate(replies):
            if isinstance(reply, ServerError) and str(reply).startswith("NOSCRIPT"):
                network.record.counts["script unknown"] += 1
                replies[i] = (await self._request([batch[i]], until, by_text=True))[0]
        return replies

    async def _request(self, batch: Sequence[Message], until: float, *, by_text: bool) -> list[Any]:
        limit = max(min(until, self.runtime.now() + IO_TIMEOUT), self.runtime.now() + 0.001)
        link = await self._linked(limit)
        return await self._replies(link, self._send(link, batch, by_text=by_text), limit, self.runtime.now())

    def _send(self, link: Link, batch: Sequence[Message], *, by_text: bool) -> Future:
        process, future = self.process, Future()
        scripts = [self.network.script(script) for script, _, _ in batch]
        epoch = _encoded(link.epoch.text)
        raw = [
            (script.source if by_text else script.sha, [*map(_encoded, keys)], [*map(_encoded, args), epoch])
            for script, (_, keys, args) in zip(scripts, batch, strict=True)
        ]
        once = any(args[0] == "execute" for _, _, args in batch)
        if not link.row:
            link.heard = process.world.now
        link.row.add(future)
        self.network.send(link, Journey(current(process.world), MESSAGE), raw, future, by_text=by_text, once=once)
        return future

    async def _replies(self, link: Link, future: Future, limit: float, sent: float) -> list[Any]:
        process = self.process
        silence = Disconnected("no answer in time", sent=True, timed_out=True)
        process.world.at(process.when(limit), Timer(future, silence), process)
        try:
            replies: list[Any] = await future
        except Disconnected as error:
            if error is silence and process.world.now - link.heard >= SILENCE_LIMIT:
                self.lost(link, "no answer in time")
            raise
        finally:
            link.row.discard(future)
        self.answered_at = link.heard = process.world.now
        link.answered(sent)
        if any(isinstance(reply, ServerError) and "READONLY" in str(reply) for reply in replies):
            self.lost(link, "it is a replica by now")
        return replies

    # For a quorum

    async def send_batch(self, messages: Sequence[Message], until: float) -> Sent:
        """The first half of `call_many`: send, and wait for nothing."""
        task = current(self.process.world)
        task.sends = True
        self.asked(messages)
        try:
            if task.traps:
                await task.before_send()
            link = await self._linked(max(until, self.runtime.now() + 0.001))
            for _, keys, args in messages:
                self.sending([*map(str, keys)], args)
            taught, self.send_script_text = self.send_script_text, False
            return Sent(messages, until, link, self._send(link, messages, by_text=taught), None)
        except Disconnected as error:
            future = Future()
            future.resolve(error)
            return Sent(messages, until, None, future, error)

    async def read_batch(self, sent: Sent, *, late: bool = False) -> list[Any]:
        """The second half: the replies."""
        messages, until = sent.messages, max(sent.until, self.runtime.now() + 0.001)
        if sent.link is None:
            return [sent.error] * len(messages)
        try:
            replies = await self._replies(sent.link, sent.future, until, -FOREVER)
            for i, reply in enumerate(replies):
                if isinstance(reply, ServerError) and str(reply).startswith("NOSCRIPT"):
                    self.network.record.counts["script unknown"] += 1
                    self.send_script_text |= late
                    if not late:
                        replies[i] = (await self._request([messages[i]], until, by_text=True))[0]
        except Disconnected as error:
            return [error] * len(messages)
        return replies

    def discard_batch(self, sent: Sent) -> None:
        """Nobody will ask for these replies."""

    @property
    def ready(self) -> bool:
        """Whether something can be sent without connecting first."""
        return self.link is not None

    async def ping(self, until: float) -> None:
        """Connect if need be, and see that it answers. Raises what keeps it from that."""
        until = max(until, self.runtime.now() + 0.001)
        link, heard = await self._linked(until), Future()
        journey = Journey(current(self.process.world), MESSAGE)
        self.network.deliver(link, journey, lambda: None, lambda: heard.resolve(None))
        link.row.add(heard)
        silence = Disconnected("no answer in time", sent=True, timed_out=True)
        self.process.world.at(self.process.when(until), Timer(heard, silence), self.process)
        try:
            await heard
        finally:
            link.row.discard(heard)

    async def wait_any(self, sents: Sequence[Sent], number: int, until: float) -> list[int]:
        """Which of these have their replies, as soon as so many have, or the time is over."""
        waiting = [sent.future for sent in sents if not sent.future.done]
        missing = number - (len(sents) - len(waiting))
        if missing > 0 and waiting and until > self.runtime.now():
            enough = Future()

            def came() -> None:
                nonlocal missing
                missing -= 1
                if missing == 0:
                    enough.resolve(None)

            self.process.world.at(self.process.when(until), Timer(enough, None), self.process)
            for each in waiting:
                each.watchers.append(came)
            try:
                await enough
            finally:
                for each in waiting:
                    each.watchers.remove(came)
        return [i for i, sent in enumerate(sents) if sent.future.done]

    async def close(self) -> None:
        """See Interlock.close."""

    # The connection

    async def _linked(self, limit: float) -> Link:
        asked = self.runtime.now()
        while (link := await self._any_link(limit)).used < asked - self.doubt:
            await self._confirmed(link, limit)
        return link

    async def _confirmed(self, link: Link, limit: float) -> None:
        """Ask others whether it leads to the primary still; if not, it is no use any more."""
        asked, future = self.runtime.now(), Future()
        journey = Journey(current(self.process.world), TRAFFIC)
        self.network.primary_named(self.process, journey, future.resolve)
        late = Disconnected("nobody says who the primary is", sent=False, timed_out=True)
        self.process.world.at(self.process.when(limit), Timer(future, late), self.process)
        if await future is link.host:
            link.used = max(link.used, asked)
        else:
            self.network.record.counts["another one is the primary"] += 1
            self.lost(link, "it is not the primary any more")

    async def _any_link(self, limit: float) -> Link:
        if self.link is not None:
            return self.link
        future = Future()
        self.expect(future.resolve)
        late = Disconnected("no connection in time", sent=False, timed_out=True)
        self.process.world.at(self.process.when(limit), Timer(future, late), self.process)
        link: Link = await future
        return link

    def expect(self, then: Callable[[Link | Disconnected], None]) -> None:
        """Connect, if nobody does, and tell this one how that ended."""
        self._expect.append(then)
        if self._connecting:
            return
        self._connected += 1
        number = self._connecting = self._connected
        began = self.runtime.now()
        world, journey = self.process.world, Journey(self.process, TRAFFIC)

        def ended(result: Link | Disconnected) -> None:
            if self._connecting == number:
                self._connecting = 0
                expected, self._expect = self._expect, []
                for each in expected:
                    each(result)

        def met(host: Host | None, found: Facts | None) -> None:
            if self._connecting != number:
                return
            if host is None or found is None:
                ended(Disconnected("connection refused", sent=False))
                return
            link = self.link = Link(self, host, self.history.identify(found, _ADDRESS, self.longer), began)
            host.links.add(link)
            self.met.add(host)
            if self._channel is not None:
                self._subscribe(link)
            ended(link)

        self.network.greet(self.process, journey, met)
        silent = Disconnected("no answer in time", sent=False, timed_out=True)
        world.at(world.now + IO_TIMEOUT, lambda: ended(silent), self.process)

    def lost(self, link: Link, why: str) -> None:
        """This connection is no use any more, and the client learns of it now."""
        if link.broken:
            return
        link.broken = True
        link.host.links.discard(link)
        if self._channel is not None:
            link.host.unsubscribe(self._channel, self)
        for future in list(link.row):
            future.resolve(Disconnected(why, sent=True))
        if self.link is link:
            self.link, self._heard = None, "0"
            if self._channel is not None:
                self._stay()

    def _stay(self) -> None:
        """Who listens connects again by himself, so that no push is missed for long."""

        def connected(result: Link | Disconnected) -> None:
            if isinstance(result, Disconnected):
                self._pause = min(1.0, self._pause * 2 or 0.02)
                self.process.world.at(self.process.world.now + self._pause, self._stay, self.process)
            else:
                self._pause = 0.0

        if self.link is None and self.process.alive:
            self.expect(connected)

    def reset_after_fork(self) -> None:
        """See Server. Nothing forks here."""

    def old_primary_may_still_grant(self, key: str) -> str:  # noqa: ARG002 (see Server)
        """See Server."""
        former = self._proofs.old_primary()
        self.network.record.counts["not believed yet"] += bool(former)
        return former

    async def prove_lossless(self, keys: Sequence[str | bytes], evidence: str, until: float) -> bool:  # noqa: ARG002 (see Server)
        """See Server."""
        return await self._proofs.prove_lossless(evidence, until)

    async def _verdict(self, evidence: str, epoch: IdentityStamp, left: float) -> float | None:
        """What `least_lossless_ttl` says, which asks over connections of its own: there, and back."""
        network, found = self.network, Future()
        process, journey = self.process, Journey(current(self.process.world), TRAFFIC)

        def asked() -> None:
            if not network.blocked(process, there=False):
                verdict = least_lossless_ttl(_as_address(network.group.seen_by(process)), evidence, epoch)
                process.world.at(process.world.now + network.trip(journey, 1), lambda: found.resolve(verdict), process)

        if not network.blocked(process, there=True):
            process.world.at(process.world.now + network.trip(journey), asked)
        patience = min(PROOF_STEP_TIMEOUT, max(MIN_PROOF_TIME, left) / PROOF_STEPS)
        process.world.at(process.world.now + patience, Timer(found, None), process)
        verdict: float | None = await found
        network.record.counts["proven lossless"] += verdict is not None and verdict < math.inf
        return verdict

    # The subscription

    def subscription_of(self, key: str) -> tuple[str, str]:  # noqa: ARG002 (see Server)
        """See Server."""
        return self._heard, self.push_handler.channel

    def route(self, key: str) -> Route:  # noqa: ARG002 (see Server)
        """See Server."""
        return ONLY_ROUTE

    def ensure_subscribed(self, key: str) -> None:  # noqa: ARG002 (see Server)
        """See Server."""
        if self._channel is None:
            self._channel = self.push_handler.channel.encode()
            if self.link is not None:
                self._subscribe(self.link)
            else:
                self._stay()

    def restored(self) -> None:
        """It was a part of a snapshot: it listened, and its connection is dead."""
        self._channel = self.push_handler.channel.encode()
        self._stay()

    @property
    def listens(self) -> bool:
        """Whether it has subscribed to its channel, or tries to."""
        return self._channel is not None

    def hear(self, payload: bytes) -> None:
        """A push has come."""
        self.push_handler.pushed(payload)

    def deafen(self, noticed: float) -> None:
        """A fault: the connection that hears breaks, which is noticed this many seconds later."""
        link = self.link
        if link is not None and self._channel is not None and link.host.unsubscribe(self._channel, self):
            self.network.record.counts["subscription broken"] += 1
            self.deaf_until = self.process.world.now + noticed
            self.process.world.at(
                self.process.world.now + noticed, lambda: self.lost(link, "it closed the connection"), self.process
            )

    def buried(self) -> None:
        """The process has crashed, and the server has noticed."""
        if self.link is not None and self._channel is not None:
            self.link.host.unsubscribe(self._channel, self)

    def _subscribe(self, link: Link) -> None:
        world, channel, journey = self.process.world, self._channel, Journey(self.process, TRAFFIC)
        assert channel is not None

        def heard() -> None:
            if not link.broken:
                link.host.subscribe(channel, self)

        def acknowledged() -> None:
            if self.link is link:
                self._heard, answered[:] = "1", [True]
                self.push_handler.subscribed()

        def in_vain() -> None:
            if not answered:
                self.lost(link, "no answer in time")

        answered: list[bool] = []
        self.network.deliver(link, journey, heard, acknowledged)
        world.at(world.now + IO_TIMEOUT, in_vain, self.process)


class _Name:
    """As `ServerHistory` knows an address."""

    display_url = ServerGroup.display_url
    previous_identity = "-"


def _as_address(address: Any) -> RealAddress:
    found: RealAddress = address
    return found


_ADDRESS: Final = _as_address(_Name)


def _encoded(value: Argument) -> bytes:
    """An argument as it goes over the wire."""
    if type(value) is str:
        return value.encode()
    return value if isinstance(value, bytes) else str(value).encode()


def current(world: World) -> Task:
    """The coroutine that runs now."""
    assert world.current is not None
    return world.current
