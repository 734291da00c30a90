"""The messages that the scripts of several primitives share: calls, which `encode` makes ARGV, and replies.

Theory. A call is a verb with its arguments, a reply is what the script returns for that verb. The tables in the headers
of the .lua files list both. Only this module and the modules beside the .lua files know the position of each word in a
list. All other modules use the names here. A quorum sends a call to several servers and merges their replies, so a
quorum also parses calls and encodes replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

from interlock._protocol.resource import Argument
from interlock.primitives.codes import ABSTAINS, BUSY, GRANTED, NOT_FOUND, QUARANTINE, QUEUED, RETRY, REVOKED

Words = Sequence[Argument]
Raw = Sequence[Any]  # a reply in the form in which a transport returns it


class Call(Protocol):
    """A verb with its arguments."""

    def encode(self) -> Words:
        """The ARGV of the script, without the identity stamp."""
        ...


class Reply(Protocol):
    """A reply of a script."""

    def encode(self) -> Raw:
        """The list that the script returns."""
        ...


# acquire

NO_WAITING, NO_BOUND = "0", "inf"  # the words of AcquireCall.max_waiters that are no number of callers


class AcquireCall(NamedTuple):
    """Asks for a lease, or to pass a latch or a barrier; the same call polls for a waiter and confirms a handover."""

    token: str
    ttl_ms: str
    handover_ttl_ms: str
    subscribed: str
    """ "1" if the client is subscribed to the channel, else "0"."""
    channel: str
    max_waiters: str
    """The caller may wait if fewer callers wait already: a number, NO_WAITING or NO_BOUND."""
    own: tuple[Argument, ...] = ()
    """The arguments of this primitive after the common ones."""

    def encode(self) -> Words:
        """See Call."""
        return encode_acquire(*self)

    @property
    def may_wait(self) -> bool:
        """Whether the caller waits at all."""
        return self.max_waiters != NO_WAITING

    @classmethod
    def parse(cls, args: Raw) -> AcquireCall:
        """Parse an encoded call."""
        _, token, ttl_ms, handover_ttl_ms, subscribed, channel, max_waiters, *own = args
        return cls(token, ttl_ms, handover_ttl_ms, subscribed, channel, max_waiters, tuple(own))


def encode_acquire(
    token: str,
    ttl_ms: str,
    handover_ttl_ms: str,
    subscribed: str,
    channel: str,
    max_waiters: str,
    own: tuple[Argument, ...],
) -> Words:
    """Return the ARGV of an AcquireCall with these fields. Every acquire runs this function, so keep it fast."""
    return ("acquire", token, ttl_ms, handover_ttl_ms, subscribed, channel, max_waiters, *own)


class Granted(NamedTuple):
    """The server granted the lease, or lets the caller pass the latch or barrier."""

    number: int
    """The fence of the lease. At a barrier: the index of the party. At a latch: 0."""

    def encode(self) -> Raw:
        """See Reply."""
        return [GRANTED, self.number]


class Queued(NamedTuple):
    """The caller stands in the queue."""

    holder: bytes
    """Token of a holder, or a marker; b"" if the resource has no holder."""
    pttl_ms: int
    is_head: bool
    """Whether the caller is the head of the queue."""
    tally: int = 0
    """At a latch: how many counts are left until it opens. At a barrier: how many parties have arrived."""
    generation: str = ""
    """Of the latch or barrier at which the caller waits."""

    def encode(self) -> Raw:
        """See Reply; for primitives that have no generation."""
        return [QUEUED, self.holder, self.pttl_ms, int(self.is_head)]


class Busy(NamedTuple):
    """Another attempt holds the resource, and the caller may not wait."""

    holder: bytes
    pttl_ms: int
    is_head: bool
    tally: int = 0
    own: tuple[bytes, ...] = ()
    """The words of this primitive after the common ones."""

    def encode(self) -> Raw:
        """See Reply."""
        return [BUSY, self.holder, self.pttl_ms, int(self.is_head), *self.own]


class Retry(NamedTuple):
    """The caller must ask again at once."""

    code: int = RETRY

    def encode(self) -> Raw:
        """See Reply."""
        return [self.code]


class Refused(NamedTuple):
    """This request can never succeed: `code` says why."""

    code: int
    detail: bytes | int = b""
    """The record, the value, the reason or the limit: see the header of the script."""

    def encode(self) -> Raw:
        """See Reply."""
        return [self.code, self.detail]


AcquireReply = Granted | Queued | Busy | Retry | Refused


def parse_acquire(reply: Raw) -> AcquireReply:
    """Parse the reply to an acquire, of each script except multi.lua."""
    code = reply[0]
    if code == GRANTED:
        return Granted(reply[1] if len(reply) > 1 else 0)
    if code in {QUEUED, BUSY}:
        return _parse_blocked(*reply)
    return Retry() if code == RETRY else Refused(*reply)


def _parse_blocked(code: int, blocker: bytes | int, pttl_ms: int, head: int, *own: bytes) -> Queued | Busy:
    if isinstance(blocker, int):  # the tally of a latch or a barrier
        return (
            Queued(b"", pttl_ms, bool(head), blocker, *map(bytes.decode, own))
            if code == QUEUED
            else Busy(b"", pttl_ms, bool(head), blocker)
        )
    return Queued(blocker, pttl_ms, bool(head)) if code == QUEUED else Busy(blocker, pttl_ms, bool(head), 0, own)


def lengthens_lease(args: Words, reply: Raw) -> bool:
    """Whether this reply grants or renews a lease, so that another server must not do the same at the same time."""
    return args[0] in {"acquire", "renew", "reserve"} and bool(reply[0] == GRANTED)


def is_acquire(args: Words) -> bool:
    """Whether the message is an acquire."""
    return args[0] == "acquire"


ABSTENTION = "@?"  # what lost_identity() returns if servers of a quorum abstain: see voter.lua


def lost_identity(reply: AcquireReply) -> str | None:
    """Return the identity of the server that granted last, if a quarantine is the cause of the reply; else None."""
    if isinstance(reply, Queued | Busy) and reply.holder.startswith(QUARANTINE):
        return reply.holder.removeprefix(QUARANTINE).partition(b">")[0].decode(errors="replace")
    return None


# release


class ReleaseCall(NamedTuple):
    """Gives a lease back, or leaves the queue, or undoes an attempt."""

    token: str
    tombstone_ms: str
    own: tuple[Argument, ...] = ()
    """The arguments of this primitive after the common ones."""

    def encode(self) -> Words:
        """See Call."""
        return encode_release(*self)

    @classmethod
    def parse(cls, args: Raw) -> ReleaseCall:
        """Parse an encoded call."""
        return cls(args[1], args[2], tuple(args[3:]))


def encode_release(token: str, tombstone_ms: str, own: tuple[Argument, ...]) -> Words:
    """Return the ARGV of a ReleaseCall with these fields. Every release runs this function, so keep it fast."""
    return ("release", token, tombstone_ms, *own)


class ReleaseReply(NamedTuple):
    """The reply of the server to a release."""

    was_ours: int
    """1 if the sender held the lease, else 0."""
    ask_again: int
    """1 if dead waiters are left before a live one, so that the sender must send the release again; else 0."""

    def encode(self) -> Raw:
        """See Reply."""
        return list(self)

    @classmethod
    def parse(cls, reply: Raw) -> ReleaseReply:
        """Parse the reply that a script returned."""
        return cls(*reply)


# renew


class RenewCall(NamedTuple):
    """Lengthens leases. Each pair is the token of a lease and its ttl in ms."""

    leases: Sequence[tuple[str, str]]

    def encode(self) -> Words:
        """See Call."""
        return ["renew", *chain.from_iterable(self.leases)]

    @classmethod
    def parse(cls, args: Raw) -> RenewCall:
        """Parse an encoded call."""
        return cls(list(zip(args[1::2], args[2::2], strict=True)))


class Renewed(NamedTuple):
    """The server lengthened the lease."""

    code: int = GRANTED

    def encode(self) -> object:
        """The state that the script returns."""
        return self.code


class Gone(NamedTuple):
    """The server has no such lease."""

    code: int = NOT_FOUND

    def encode(self) -> object:
        """The state that the script returns."""
        return self.code


class Revoked(NamedTuple):
    """The lease was revoked."""

    why: bytes

    def encode(self) -> object:
        """The state that the script returns."""
        return [REVOKED, self.why]


class Failed(NamedTuple):
    """The renewal failed; whether the lease is alive is unknown."""

    cause: bytes

    def encode(self) -> object:
        """The state that the script returns."""
        return self.cause


class Abstains(NamedTuple):
    """A server of a quorum does not count now, whether it has lengthened the lease or not."""

    abstention: str
    """The words that name its abstention, if it has lost the lease; "" if it has the lease."""

    def encode(self) -> object:
        """The state that the script returns."""
        return [ABSTAINS, self.abstention.encode()]


RenewState = Renewed | Gone | Revoked | Failed | Abstains
RENEWED, GONE = Renewed(), Gone()


class RenewReply(NamedTuple):
    """A state for each lease of the call."""

    states: Sequence[RenewState]

    def encode(self) -> Raw:
        """See Reply."""
        return [state.encode() for state in self.states]

    @classmethod
    def parse(cls, reply: Raw) -> RenewReply:
        """Parse the reply that a script returned."""
        return cls([_parse_renewed(state) for state in reply])


def _parse_renewed(state: Any) -> RenewState:
    if state == GRANTED:
        return RENEWED
    if state == NOT_FOUND:
        return GONE
    if isinstance(state, bytes):
        return Failed(state)
    return Abstains(state[1].decode()) if state[0] == ABSTAINS else Revoked(state[1])


def reason_lost(state: Gone | Revoked) -> str:
    """Return the reason why the lease is lost, by the reply to a renewal."""
    if isinstance(state, Revoked):
        return f"it was revoked: {state.why.decode(errors='replace')}"
    return "the server has no such lease any more: it was revoked by force, or the server lost it"


# heartbeat


class HeartbeatCall(NamedTuple):
    """Reports that waiters of one client are alive. Each pair is the token of a waiter and its handover ttl in ms."""

    channel: str
    subscribed: str
    waiters: Sequence[tuple[str, str]]

    def encode(self) -> Words:
        """See Call."""
        return ["heartbeat", self.channel, self.subscribed, *chain.from_iterable(self.waiters)]

    @classmethod
    def parse(cls, args: Raw) -> HeartbeatCall:
        """Parse an encoded call."""
        return cls(args[1], args[2], list(zip(args[3::2], args[4::2], strict=True)))


MORE_DEAD_WAITERS = -3  # a pttl of HeartbeatReply: more dead waiters than one call drops
NO_KEY = -2  # a pttl: there is no such key
NO_EXPIRY_PTTL = -1  # a pttl: the key never expires


class HeartbeatReply(NamedTuple):
    """The reply to a heartbeat: the ms until the next lease ends, the head of the queue, the state of each waiter."""

    pttl_ms: int
    head: bytes
    states: Sequence[int]
    """GRANTED, QUEUED, RETRY or NOT_FOUND."""

    def encode(self) -> Raw:
        """See Reply."""
        return [self.pttl_ms, self.head, *self.states]

    @classmethod
    def parse(cls, reply: Raw) -> HeartbeatReply:
        """Parse the reply that a script returned."""
        return cls(reply[0], reply[1], reply[2:])


# execute, revoke, inspect


class ExecuteCall(NamedTuple):
    """Runs one command in the server if the sender holds the lease."""

    token: str
    command: str
    args: Sequence[Argument]

    def encode(self) -> Words:
        """See Call."""
        return ("execute", self.token, self.command, *self.args)


class ExecuteReply(NamedTuple):
    """Whether the server ran the command, and the reply of the command."""

    ran: bool
    value: Any

    @classmethod
    def parse(cls, reply: Raw) -> ExecuteReply:
        """Parse the reply that a script returned."""
        return cls(True, reply[1]) if reply[0] == GRANTED else cls(False, None)


class RevokeCall(NamedTuple):
    """Revokes a lease, or ends a quarantine. `token` is that of the holder, or a marker that `inspect` returned."""

    token: Argument
    force: str
    why: str

    def encode(self) -> Words:
        """See Call."""
        return ("revoke", self.token, self.force, self.why)

    @classmethod
    def parse(cls, args: Raw) -> RevokeCall:
        """Parse an encoded call."""
        return cls(*args[1:])


class BreakCall(NamedTuple):
    """Breaks a latch or a barrier for all that wait."""

    marker: str
    """Names this call, so that a copy of the call breaks nothing else."""
    why: str

    def encode(self) -> Words:
        """See Call."""
        return ("revoke", self.marker, self.why)


class DoneReply(NamedTuple):
    """Whether the server executed the call, and the pttl of the key that the call changed."""

    done: int
    pttl_ms: int = NO_KEY

    @property
    def was_done(self) -> bool:
        """Whether the call has changed something."""
        return bool(self.done)

    def encode(self) -> Raw:
        """See Reply."""
        return list(self)

    @classmethod
    def parse(cls, reply: Raw) -> DoneReply:
        """Parse the reply that a script returned."""
        return cls(*reply)


class InspectCall(NamedTuple):
    """Asks for the state of a resource, with at most `most` entries of each list."""

    most: str

    def encode(self) -> Words:
        """See Call."""
        return ("inspect", self.most)

    @classmethod
    def parse(cls, args: Raw) -> InspectCall:
        """Parse an encoded call."""
        return cls(args[1])


class OperationReply(NamedTuple):
    """The reply to `count`, `reset` or `limit`, which the server executes once for each operation id."""

    refused: Refused | None
    number: int = 0
    """The rest of the count, or the limit."""

    @classmethod
    def parse(cls, reply: Raw) -> OperationReply:
        """Parse the reply that a script returned. For `reset`, the number is 1 if the server executed it, else 0."""
        if len(reply) == 1:
            return cls(None, reply[0])
        return cls(None, reply[1]) if reply[0] == GRANTED else cls(Refused(*reply))
