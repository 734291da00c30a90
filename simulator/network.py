"""The network between clients and server: it delays, loses and doubles messages, and delivers some very late.

Theory. A request is one message of one or more script calls. The request and its reply travel alone, each with its own
delay, so requests overtake each other, as over several connections. A caller that gave up (a timeout, a reset, a
cancellation, a crash) does not stop its message: the message still arrives, perhaps ten seconds later, after all
messages that were sent in between. Pushes travel the same way, to the clients that are subscribed at the time of the
publication.

Rules.
(a) The network does nothing that TCP rules out: a copy of a request never arrives after the client read the reply. An
    `execute`, which a client sends once only, has no copy.
(b) The name of each fault names the sender of the message, so that a plan can leave the fault out of a repetition.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.server import Disconnected

from .chance import ERA, MESSAGE
from .coroutines import process_of

if TYPE_CHECKING:
    from interlock._protocol.resource import Script
    from interlock._quarantine.identity import Facts

    from .chance import Actor
    from .coroutines import Future, Process
    from .plan import Record
    from .scheduler import World
    from .server_group import Host, Link, ServerGroup, Subscriber

FOR_PEOPLE: Final = {"audit", "registry", "kind"}  # scripts that grant nothing: they get no planted bugs
LATEST: Final = 10.0  # seconds of travel at most: longer than any timeout and any ttl here
SOON: Final = 0.01  # seconds: a message that travels longer is not soon there
_KINDS: Final = {
    kind: number
    for number, kind in enumerate((
        "connection refused", "connected to a replica", "request lost", "request doubled", "batch cut short",
        "reply lost", "connection reset", "message late", "message slow", "push lost", "push doubled", "push late",
    ))
}  # fmt: skip
_TRIP, _LATE, _SLOW, _STALE, _CUT = range(100, 105)  # further purposes of a message's numbers
_REPLY: Final = 2  # legs of a journey: request, its copy, reply, its copy, the news of a reset, pushes
_NEWS: Final = 4
_PUSHES: Final = 8


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
    replica: float = 0.0  # the connection is to a replica for a moment, which the client refuses
    reset: float = 0.0  # of lost messages: the client sees a reset, and need not wait for its timeout
    push_lost: float = 0.0
    push_doubled: float = 0.0
    push_late: float = 0.0  # a push takes up to LATEST

    @property
    def clean(self) -> bool:
        """Whether every request and every reply arrives once and soon."""
        faults = self.slow or self.late or self.lost or self.unanswered or self.doubled or self.refused
        return not faults and self.trip <= SOON


NO_FAULTS: Final = Weather()
Executed = Callable[["Host", str, Sequence[bytes], Sequence[bytes], Any], None]  # host, sender, KEYS, ARGV, reply


# By the world's time, when the message was sent; ARGV, reply
Answered = Callable[[float, Sequence[bytes], Any], None]


class Journey:
    """One message with its copies and its reply: its name, and its own random numbers."""

    __slots__ = ("_actor", "key", "process", "pushes")

    def __init__(self, actor: Actor, purpose: int = MESSAGE) -> None:
        self.key = actor.next_key(purpose)
        self.pushes = 0  # sent by the scripts of this message
        self._actor = actor.name
        self.process = process_of(actor)

    def __str__(self) -> str:
        _, era, _, count = self.key
        return self._actor + (f"@{-(era + 1) * ERA:g}s" if era < 0 else f"#{era}") + f".{count}"


class Network:
    """Messages on their way between clients and one group."""

    def __init__(self, world: World, group: ServerGroup, record: Record, lua: Callable[[str], str] = str) -> None:
        self.world = world
        self.group = group
        self.record = record
        self.weather = NO_FAULTS
        self.executed: Executed = _ignore
        self.answered: Answered = _ignore_reply
        self.cut_off = False  # nothing gets through in either direction
        self.one_way: dict[tuple[str, bool], float] = {}  # until when no request (True) or no reply of a client passes
        self._lua = lua
        self._sent: dict[str, Script] = {}  # the script that is sent in place of another, by the SHA of the latter

    def blocked(self, process: Process, *, there: bool) -> bool:
        """Whether the network blocks the requests of this client, or the replies to it, now."""
        return self.cut_off or self.one_way.get((process.base, there), 0.0) > self.world.now

    def strikes(self, journey: Journey, kind: str, likelihood: float, leg: int = 0) -> bool:
        """Whether this fault strikes this message."""
        if not likelihood or self.world.chance.number(*journey.key, _KINDS[kind], leg) >= likelihood:
            return False
        name = f"{kind}: {journey}" + (f" leg {leg}" if leg else "")
        if not self.record.happens(self.world.now, kind, name):
            return False
        self.record.meets(kind, journey.process)
        return True

    def trip(self, journey: Journey, leg: int = 0) -> float:
        """Return the seconds of this leg."""
        weather, number, key = self.weather, self.world.chance.number, journey.key
        if weather.late and self.strikes(journey, "message late", weather.late, leg):
            return 1.0 + number(*key, _LATE, leg) * (LATEST - 1.0)
        if weather.slow and self.strikes(journey, "message slow", weather.slow, leg):
            return -0.3 * math.log(1 - number(*key, _SLOW, leg))
        return weather.trip * (0.5 + number(*key, _TRIP, leg))

    # Requests

    def script(self, script: Script) -> Script:
        """Return the script to send: with the planted bug, if there is one."""
        if script.sha not in self._sent:
            source = script.source if script.name in FOR_PEOPLE else self._lua(script.source)
            sha = hashlib.sha1(source.encode()).hexdigest()  # noqa: S324 (Redis names them so)
            self._sent[script.sha] = script._replace(source=source, sha=sha)
        return self._sent[script.sha]

    def send(
        self, link: Link, journey: Journey, raw: Sequence[Any], future: Future, *, by_text: bool, once: bool
    ) -> None:
        """Send one message of script calls; the future gets the replies. `once`: the message has no copies."""
        weather, copies = self.weather, 1
        if self.blocked(link.process, there=True) or self.strikes(journey, "request lost", weather.lost):
            copies = 0
            self._reset(link, journey, future)
        elif not once and self.strikes(journey, "request doubled", weather.doubled):
            copies = 2
        for copy in range(copies):
            self.world.at(
                self.world.now + self.trip(journey, copy),
                lambda copy=copy: self._arrive(link, journey, raw, future, by_text, copy),  # type: ignore[misc]
            )

    def _reset(self, link: Link, journey: Journey, future: Future) -> None:
        if self.strikes(journey, "connection reset", self.weather.reset):
            stale = self.world.chance.number(*journey.key, _STALE) < 0.3
            error = Disconnected("it closed the connection", sent=True, stale=stale)
            self.world.at(self.world.now + self.trip(journey, _NEWS), lambda: future.resolve(error), link.process)

    def _arrive(
        self, link: Link, journey: Journey, raw: Sequence[Any], future: Future, by_text: bool, copy: int
    ) -> None:
        host, process = link.host, link.process
        if host.paused:
            host.delayed.append(lambda: self._arrive(link, journey, raw, future, by_text, copy))
            return
        if future.done and isinstance(future.value, list):
            return  # a second copy, and the reply was read: TCP would not deliver this any more
        if not host.reached_by(process):
            self.reset_connection(link, self.trip(journey, _NEWS))
            return
        if future.done:
            self.record.counts["script ran after its caller gave up"] += 1
        count, weather = len(raw), self.weather
        if count > 1 and self.strikes(journey, "batch cut short", 5 * weather.unanswered, copy):  # there are few
            count = int(self.world.chance.number(*journey.key, _CUT, copy) * count)
        host.server.publish = lambda channel, payload: self._publish(journey, host, channel, payload)
        replies: list[Any] = []
        for script, keys, args in raw[:count]:
            replies.append(host.run(by_text, script, keys, args))
            self.executed(host, process.name, keys, args, replies[-1])
            if not host.alive:
                return  # the host ended in this call
        if (
            count < len(raw)
            or self.blocked(process, there=False)
            or self.strikes(journey, "reply lost", weather.unanswered, copy)
        ):
            self._reset(link, journey, future)
            return
        self.world.at(
            self.world.now + self.trip(journey, _REPLY + copy),
            lambda: self._deliver_replies(raw, replies, future),
            process,
        )

    def _deliver_replies(self, raw: Sequence[Any], replies: list[Any], future: Future) -> None:
        if not future.done:
            for (_, _, args), reply in zip(raw, replies, strict=True):
                self.answered(future.began, args, reply)
        future.resolve(replies)

    # Connections

    def connect(self, process: Process, journey: Journey, then: Callable[[Host | None, Facts | None], None]) -> None:
        """Open a connection: call `then` with the host that answers, and its facts.

        A replica has no facts here. If no host accepts the connection, `then` gets (None, None).
        """

        def arrived() -> None:
            host = self.group.route(process)
            if host is not None and self.blocked(process, there=False):
                return
            found = host.facts() if host is not None and not host.replicates else None
            self.world.at(self.world.now + self.trip(journey, _REPLY), lambda: then(host, found), process)

        if not self.blocked(process, there=True):
            self.world.at(self.world.now + self.trip(journey), arrived)

    def ask_for_primary(self, process: Process, journey: Journey, then: Callable[[Host], None]) -> None:
        """Ask other servers, such as sentinels, for the primary: call `then` with it."""

        def at_the_others() -> None:
            if not self.blocked(process, there=False):
                named = self.group.primary
                self.world.at(self.world.now + self.trip(journey, 1), lambda: then(named), process)

        if not self.blocked(process, there=True):
            self.world.at(self.world.now + self.trip(journey), at_the_others)

    def reset_connection(self, link: Link, after: float) -> None:
        """Reset a connection whose host has ended or is cut off from the client, if a machine can send a reset."""
        if self.group.resets and not self.blocked(link.process, there=False):
            self.world.at(self.world.now + after, lambda: link.drop_all("it closed the connection"), link.process)

    def deliver(self, link: Link, journey: Journey, arrived: Callable[[], None], back: Callable[[], None]) -> None:
        """Deliver a message that runs no script."""
        process = link.process

        def at_the_host() -> None:
            if link.host.paused:
                link.host.delayed.append(at_the_host)
            elif not link.host.reached_by(process):
                self.reset_connection(link, self.trip(journey, _NEWS))
            elif process.alive:
                arrived()
                if not self.blocked(process, there=False):
                    self.world.at(self.world.now + self.trip(journey, 1), back, process)

        if not self.blocked(process, there=True):
            self.world.at(self.world.now + self.trip(journey), at_the_host)

    # Pushes

    def _publish(self, journey: Journey, host: Host, channel: bytes, payload: bytes) -> int:
        """Send a push; a server calls this in the middle of a script, which this message brought."""
        subscribers = host.subscribed.get(channel)
        if not subscribers:
            journey.pushes += 1
            self.record.counts["push without a subscriber"] += 1
            return 0
        self.record.counts["push to two subscribers"] += len(subscribers) > 1
        return sum(self._push(journey, subscriber, payload) for subscriber in list(subscribers))

    def _push(self, journey: Journey, subscriber: Subscriber, payload: bytes) -> int:
        journey.pushes += 1
        leg = _PUSHES + 2 * journey.pushes
        if self.blocked(subscriber.process, there=False) or self.strikes(
            journey, "push lost", self.weather.push_lost, leg
        ):
            return 1
        for copy in range(1 + self.strikes(journey, "push doubled", self.weather.push_doubled, leg)):
            late = self.weather.push_late and self.strikes(journey, "push late", self.weather.push_late, leg + copy)
            trip = (
                self.world.chance.number(*journey.key, _LATE, leg) * LATEST if late else self.trip(journey, leg + copy)
            )
            self.world.at(
                self.world.now + trip,
                lambda: subscriber.receive_push(payload),
                subscriber.process,
            )
        return 1


def _ignore(_host: Host, _sender: str, _keys: Sequence[bytes], _args: Sequence[bytes], _reply: Any) -> None:
    pass


def _ignore_reply(_sent: float, _args: Sequence[bytes], _reply: Any) -> None:
    pass
