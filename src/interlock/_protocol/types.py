"""What client, transports and servers say to each other: messages, routes, errors, and the `Port`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextlib import AbstractContextManager

    from interlock._protocol.acks import Acks

# Error replies that pass by themselves: the server starts, is busy, or fails over.
TRANSIENT = ("LOADING", "BUSY ", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "NOREPLICAS", "UNKILLABLE")


def is_transient(text: str) -> bool:
    """Whether a server that says this may serve in a moment."""
    return text.startswith(TRANSIENT) or "READONLY" in text or "-NOREPLICAS" in text  # the last: from within a script


class Script(NamedTuple):
    """A .lua file: its name, text, and the SHA1 by which servers know it."""

    name: str
    source: str
    sha: str


T = TypeVar("T")
Argument = str | bytes
Message = tuple[Script, "Sequence[str | bytes]", "Sequence[Argument]"]  # a script, its KEYS, its ARGV


class Disconnected(Exception):  # noqa: N818 (a state of the wire, not an error of ours)
    """No reply came. `sent`: the server may have run the request. `stale`: the connection had been idle."""

    def __init__(self, cause: str, *, sent: bool, stale: bool = False, timed_out: bool = False) -> None:
        super().__init__(cause)
        self.sent = sent
        self.stale = stale
        self.timed_out = timed_out


class ServerError(Exception):
    """The server answered with an error: it ran nothing, or only a part of nothing that matters."""


class Stopped(Exception):  # noqa: N818 (a wish of the caller's, not an error)
    """An attempt was told to stop before it was granted."""


class Route(NamedTuple):
    """Where a key is: keys of one slot may stand in one message; a node that is silent is so for all of its slots."""

    node: object
    slot: int


ONLY_ROUTE: Final = Route(0, 0)  # of all keys, where there is but one


class AutoResetEvent(Protocol):
    """A flag that one waits for; waiting takes it down. Setting it twice is setting it once."""

    def set(self) -> None: ...


class Runtime(Protocol):
    """How code waits and runs in the background: with threads, in a loop of asyncio, or in a simulated world."""

    @property
    def mutex(self) -> AbstractContextManager[object]:
        """For compound steps on what several threads share; never held during I/O."""
        ...

    def now(self) -> float:
        """Seconds on a clock that nobody can set and that runs on while the machine sleeps."""
        ...

    def event(self) -> AutoResetEvent:
        """A new event, which is not set."""
        ...

    async def wait(self, event: Any, until: float) -> bool:
        """Wait for an event of this runtime, and reset it. Returns False if the time was over first."""
        ...

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, over: Callable[[], None]) -> None:
        """Run this in the background, and call `over` when it ends, however that comes."""
        ...

    def run_callback(self, callback: Callable[[Any], object], subject: Any) -> None:
        """Call a user's callback where it can neither delay nor break us."""
        ...

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """The result of a function that blocks."""
        ...

    def reset_after_fork(self) -> None:
        """In a child after fork: drop what belongs to the parent."""
        ...

    async def close(self) -> None:
        """End the work in the background, within about a second."""
        ...


class Port(Protocol):
    """All that the client needs of a server, be it one, a cluster or a quorum.

    To add one: implement these, and run the conformance suite over it. Every `until` is a time of `Runtime.now()`.
    """

    @property
    def runtime(self) -> Runtime: ...

    display_url: str
    retry_for: float
    """Seconds that it may be away before a call says Unavailable."""
    is_quorum: bool
    """Whether a refusal may leave something behind, since several servers are asked."""
    majority: int
    """How many servers grant a lease."""

    drift: float
    """By how much of a ttl we stop believing before the server does: clocks run at different speeds."""

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Any:
        """Send one script call, once, and return its reply. Raises Disconnected or ServerError."""
        ...

    async def call_with_acks(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        acks: Acks,
        patience: float,
    ) -> tuple[Any, int, Any]:
        """As `call`; and if it granted, how many replicas are known, and the reply to what waits for them.

        Raises Disconnected or ServerError.
        """
        ...

    async def calls(self, messages: Sequence[Message], until: float) -> list[Any]:
        """Send many at once. An error stands in the place of its reply: nothing is raised for one of many."""
        ...

    async def prove_lossless(self, keys: Sequence[str | bytes], evidence: str, until: float) -> bool:
        """Whether nothing was lost since the server of that identity granted these; if so, messages say it from now on.

        Looks again until then, if it may turn out yet.
        """
        ...

    def old_primary_may_still_grant(self, key: str) -> str:
        """The identity of one that may still grant this key beside the server that answers by now; "" if there is none.

        Then what the new one grants or renews counts for nothing yet: what it lets go on may run out at the other.
        Whether it is proven that nothing was lost is looked for in the background: nobody is held up by that.
        """
        ...

    def route(self, key: str) -> Route:
        """Where this key is: messages about keys of one place may be one message."""
        ...

    def subscription_of(self, key: str) -> tuple[str, str]:
        """Whether pushes about this key are heard now, "0" or "1"; and the channel where they would be."""
        ...

    def ensure_subscribed(self, key: str) -> None:
        """Subscribe to that channel in the background, and again after every reconnection."""
        ...

    def reset_after_fork(self) -> None:
        """In a child after fork: drop what belongs to the parent, without a word to anybody."""
        ...

    async def close(self) -> None:
        """End all connections."""
        ...


class Resource(NamedTuple):
    """One named thing in the server: which script decides, over which keys."""

    kind: str
    name: str
    script: Script
    keys: tuple[str, ...]
    renew_keys: tuple[str, ...]
    """Those of the keys that a renewal needs."""
    acquire_args: tuple[Argument, ...] = ()
    """What an acquire says beside what all say."""
    owner_prefix: str = ""
    """With what its tokens begin: for holders that are the same in another process."""
    release_args: tuple[str, ...] = ()
    """What a release says beside what all say."""
    has_generation: bool = False
    """Whether its waiters say in which generation of it they wait, so that no other one can keep them."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class PushHandler(Protocol):
    """Whom a port tells what it hears."""

    channel: str

    def pushed(self, payload: bytes) -> None: ...
    def subscribed(self, channel: str | None = None) -> None: ...
