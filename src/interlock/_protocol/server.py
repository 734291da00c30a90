"""What the client needs of a server: the protocol `Server`, its messages, and what may happen to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from interlock._protocol.resource import Argument, Script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._protocol.acks import Acks
    from interlock._protocol.runtime import Runtime

# The beginnings of error replies that end by themselves: the server starts, is busy, or fails over; or the login of one
# connection has ended, and a new connection logs in again.
TRANSIENT = ("LOADING", "BUSY ", "NOAUTH", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "NOREPLICAS", "UNKILLABLE")


def is_transient(text: str) -> bool:
    """Whether a server with this error reply may serve in a moment."""
    return (
        text.startswith(TRANSIENT)
        or "READONLY" in text
        or "-NOREPLICAS" in text  # from within a script
        or may_have_written(text)
    )


def may_have_written(text: str) -> bool:
    """Whether the server ended the script midway, with this error: what the script had written stays.

    While a slot migrates, its old server runs a script whose keys it all has. If the script deletes one of them and
    reads it again, the server says that the key belongs to the new one.
    """
    return "non local key" in text


Reply: TypeAlias = "Sequence[object]"  # of a script: each script replies with a list
Message = tuple[Script, "Sequence[str | bytes]", "Sequence[Argument]"]  # a script, its KEYS, its ARGV


class Disconnected(Exception):  # noqa: N818 (a state of the connection, not an error of interlock)
    """No reply arrived. `sent`: the server may have run the request. `stale`: the connection had been idle.

    `timed_out`: the reply was not there in time.
    """

    def __init__(self, cause: str, *, sent: bool, stale: bool = False, timed_out: bool = False) -> None:
        super().__init__(cause)
        self.sent = sent
        self.stale = stale
        self.timed_out = timed_out


class ServerError(Exception):
    """The server replied with an error. Sending the call again is safe. With acks, the error may follow a grant."""


class TokenSpent(Exception):  # noqa: N818 (a state of the attempt, not an error)
    """A server may still run a release of this token: a grant under the same token could end at any time."""


class Stopped(Exception):  # noqa: N818 (a decision of the caller, not an error)
    """The caller stopped an attempt before the server granted the attempt."""


class SentCall(Protocol):
    """A script call whose sender does not wait for the reply: see `Server.send`."""

    @property
    def reply(self) -> Reply | Exception | None:
        """The reply, or the error in its place (ServerError or Disconnected). None while nobody has read it."""
        ...

    async def read(self, until: float) -> None:
        """Read the reply by this time, unless another caller uses the connection, and so reads it soon."""
        ...


class AckedReply(NamedTuple):
    """The reply to a script call, and which replicas or disks acknowledged what the call wrote."""

    reply: Reply
    replicas: int
    """How many replicas the server is known to have."""
    acknowledged: int | list[int]
    """The reply to WAIT or WAITAOF."""


class Route(NamedTuple):
    """Where a key is: one message may have keys of one slot; a silent node is silent for all of its slots."""

    node: object
    slot: int


ONLY_ROUTE: Final = Route(0, 0)  # the route of all keys, where there is one server


class Server(Protocol):
    """All that the client needs of a server: of one server, of a cluster, or of a quorum.

    To add a kind of server: implement these members, and run the conformance suite. Every `until` is a time of
    `Runtime.now()`.
    """

    @property
    def push_handler(self) -> PushHandler:
        """The object to call for each push: set it before the first call."""
        ...

    @push_handler.setter
    def push_handler(self, handler: PushHandler) -> None: ...

    @property
    def runtime(self) -> Runtime: ...

    @property
    def display_url(self) -> str:
        """The address without secrets, for messages."""
        ...

    @property
    def retry_for(self) -> float:
        """Seconds that the server may be away before a call without a timeout of its own raises Unavailable."""
        ...

    @property
    def has_answered(self) -> bool:
        """Whether this client, in any event loop or before a fork, has ever had an answer from there."""
        ...

    @property
    def is_quorum(self) -> bool:
        """Whether several servers vote: one of them may then keep a grant although the quorum refused the attempt."""
        ...

    @property
    def can_fail_over(self) -> bool:
        """Whether another server may take over: else `old_primary_may_still_grant` names none at any time."""
        ...

    @property
    def majority(self) -> int:
        """How many servers must grant a lease."""
        ...

    @property
    def drift(self) -> float:
        """The part of a ttl by which the deadline is earlier than the end in the server: see margin()."""
        ...

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Reply:
        """Send one script call, once, and return its reply. Raises Disconnected or ServerError."""
        ...

    async def call_with_acks(self, message: Message, until: float, acks: Acks, ack_timeout: float) -> AckedReply:
        """Send one script call as `call` does; after a grant, also wait `ack_timeout` seconds for acknowledgements.

        Raises Disconnected or ServerError.
        """
        ...

    async def call_many(self, messages: Sequence[Message], until: float) -> list[Reply | Exception]:
        """Send many messages at once. Returns each reply, or the exception of the message that failed, in order."""
        ...

    def send(self, message: Message) -> SentCall | None:
        """Send one script call at once, and wait for nothing.

        Returns None, having sent nothing, if no connection is idle, or if only a wait would show that it lives, or
        leads to the primary. Raises nothing for a broken connection: the error is then the reply.
        """
        ...

    async def prove_lossless(self, keys: Sequence[str | bytes], lost_identity: str, until: float) -> bool:
        """Whether no lease on these keys was lost since the server with this identity granted it.

        If there is a proof, all later messages carry that proof. If a proof may still appear, searches until `until`.
        """
        ...

    def old_primary_may_still_grant(self, key: str) -> str:
        """The identity of an old primary that may still grant this key beside the current server; "" if there is none.

        While there is one, no grant or renewal of the current server counts: a lease that the current server
        renews may expire at the old primary, which then grants the key to another client. The client searches in the
        background for a proof that no lease was lost; no caller waits for the search.
        """
        ...

    def route(self, key: str) -> Route:
        """Where this key is. Messages about keys of one route may travel as one message."""
        ...

    def subscription_of(self, key: str | bytes) -> tuple[str, str]:
        """Whether the client is subscribed to pushes about this key, "0" or "1"; and the channel of these pushes."""
        ...

    def ensure_subscribed(self, key: str) -> None:
        """Subscribe to the channel of this key in the background, and again after every reconnection."""
        ...

    async def connected_clients(self, until: float) -> int | None:
        """How many clients are connected: the sum over those servers that grant locks. None if one does not say.

        For people, after a call that was answered. Raises Disconnected or LockError.
        """
        ...

    def reset_after_fork(self) -> None:
        """In a child after a fork: drop everything that belongs to the parent, and send nothing."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class PushHandler(Protocol):
    """The object that a server calls for each push and each change of a subscription."""

    channel: str

    def dispatch_push(self, payload: bytes) -> None: ...
    def subscribed(self, channel: str | None = None) -> None: ...
