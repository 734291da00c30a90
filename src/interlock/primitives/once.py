"""The keys of work that runs once, its calls, and its results for users. once.lua decides, over lock.lua."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import quote

from interlock._protocol.names import MAX_NAME_BYTES, MIN_TTL, duration, shortened
from interlock._protocol.timing import DEFAULT_TTL
from interlock.errors import AcquireTimeout, ConfigError
from interlock.primitives.codes import QUARANTINE
from interlock.primitives.kind_record import Kind
from interlock.primitives.messages import AcquireReply, Busy, Queued, Raw, Words
from interlock.primitives.plain import Answer
from interlock.primitives.quorum_rules import QuorumRules

from .lock import LOCK_ADVICE, LockInspect, add_lock_to_view, lock_based_resource, marker_of, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._protocol.resource import Resource
    from interlock.primitives.view import View

R = TypeVar("R")
NO_NOTE: Final = ("0", "0")  # the arguments of a release that lets the next run start at once
MAX_AT_MOST: Final = 366 * 86_400.0  # seconds


class RunLimits:
    """The checked options of work, in seconds: how long a run may take, and for how long no other run may begin."""

    def __init__(self, at_most: object, at_least: object, keep: object, *, keyed: bool, max_ttl: float) -> None:
        self.at_most = duration(at_most, "at_most", minimum=MIN_TTL, maximum=MAX_AT_MOST)
        self.at_least = duration(at_least, "at_least", maximum=MAX_AT_MOST)
        if self.at_least > self.at_most:
            raise ConfigError(f"at_least ({self.at_least:g} s) must not be more than at_most ({self.at_most:g} s)")
        self.keep = duration(keep, "keep", minimum=1, maximum=MAX_AT_MOST) if keyed else 0.0
        self.ttl = min(self.at_most, DEFAULT_TTL, max_ttl)

    def release_args(self, *, succeeded: bool) -> tuple[str, str]:
        """Return the own arguments of a run's release: the ms after its start and after its end without another run."""
        return str(int(self.at_least * 1000)), str(int(self.keep * 1000) if succeeded else 0)


def once_resource(name: object, prefix: str, key: object) -> Resource:
    """Make the resource of the work of this name, or of its run for this key. Raises ConfigError."""
    if key is not None:
        if not isinstance(key, str) or not key:
            raise ConfigError(
                f"once({name!r}): key must be a str that names this run, such as '2026-01-31', not {key!r}"
            )
        if isinstance(name, str) and name:
            stem = f"{name}:key="
            name = stem + shortened(
                quote(key, safe="", errors="surrogatepass"), MAX_NAME_BYTES - len(stem.encode(errors="replace"))
            )
    return lock_based_resource("once", name, prefix, "done")._replace(release_args=NO_NOTE)


@dataclass(frozen=True)
class Ran(Answer, Generic[R]):
    """This call ran the work. True in an `if`."""

    name: str
    value: R
    """What the function returned."""
    by: str
    """The token of this run: host/pid/thread or task/random."""
    started: datetime
    """When the run began, by the server's clock."""

    def __bool__(self) -> Literal[True]:
        return True


@dataclass(frozen=True)
class Skipped(Answer):
    """This call did not run: another run goes on or has ended, or another caller has the lock. False in an `if`."""

    name: str
    by: str | None
    """The token of the other run or holder: host/pid/thread or task/random; None if unknown, as in a quarantine."""
    started: datetime | None
    """When the other run began, by the server's clock; None if unknown, as always after `synchronized`."""
    ended: datetime | None
    """When the other run ended, by the server's clock; None while it goes on."""
    quarantined: bool = False
    """Whether the server knows no holder, but keeps the name in quarantine after a restart or failover."""

    def __bool__(self) -> Literal[False]:
        return False


class RunSkipped(AcquireTimeout):
    """Another run holds the work, or its note keeps this run from starting; `skipped` describes that run."""

    skipped: Skipped


class RunTimes(NamedTuple):
    """The times of the run in a Busy of this primitive, in µs since 1970; b"0" is none."""

    started_us: bytes = b"0"
    ended_us: bytes = b"0"

    @property
    def ended(self) -> bool:
        """Whether the run is over, so that only its note keeps the next run from starting."""
        return self.ended_us != b"0"


def run_times(reply: AcquireReply) -> RunTimes:
    """Return the times of the run in a Busy, and no times for any other reply."""
    return RunTimes(*reply.own) if isinstance(reply, Busy) else RunTimes()


def skipped_error(resource: Resource, _timeout: float, reply: Busy | Queued) -> RunSkipped:
    """Make the error of a refused acquire, which describes the other run."""
    error = RunSkipped(f"{resource}: another run goes on, or keeps this run from starting")
    quarantined = reply.holder.startswith(QUARANTINE)
    by = b"" if quarantined else reply.holder.removeprefix(b"!")
    started_us, ended_us = run_times(reply)
    if quarantined and reply.pttl_ms >= 0:
        error.remaining = reply.pttl_ms / 1000
    error.skipped = Skipped(
        resource.name,
        by.decode(errors="replace") or None,
        datetime_of(started_us),
        datetime_of(ended_us),
        quarantined,
    )
    return error


def decisive_vote(votes: Sequence[AcquireReply]) -> AcquireReply | None:
    """Return the vote that alone decides an acquire, or None.

    A note of an ended run at one server proves that the run took place, whatever the other servers reply.
    """
    ended = [vote for vote in votes if isinstance(vote, Busy) and run_times(vote).ended]
    return max(ended, key=lambda vote: vote.pttl_ms, default=None)


def ran_result(name: str, token: str, fence: int, value: R) -> Ran[R]:
    """Make the result of a run. Its fence is the server's time at the start of the run, in µs since 1970."""
    return Ran(name, value, token, datetime_of(fence) or datetime.now(UTC))


def datetime_of(micros: bytes | int) -> datetime | None:
    """Convert a time of the server, in µs since 1970, into a datetime; 0 into None."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=int(micros)) if int(micros) else None


class OnceInspect(NamedTuple):
    """The reply to `inspect` of work that runs once."""

    lock: LockInspect
    note: bytes
    """The token, start and end of the last run; b"" if there is no note."""
    pttl_ms: int
    """How long the note still lasts, in ms."""

    @property
    def value(self) -> bytes:
        """The value of the lock."""
        return self.lock.value

    def encode(self) -> Raw:
        """See Reply."""
        return [self.lock.encode(), self.note, self.pttl_ms]

    @classmethod
    def parse(cls, reply: Raw) -> OnceInspect:
        """Parse the reply that the script returned."""
        lock, note, pttl_ms = reply
        return cls(LockInspect.parse(lock), note, pttl_ms)


def merge_inspect(
    replies: Sequence[OnceInspect], merge_lock: Callable[[Sequence[LockInspect]], LockInspect]
) -> OnceInspect:
    """Merge the replies of a quorum: the merged lock, and the note that lasts longest."""
    last = max(replies, key=lambda reply: reply.pttl_ms)
    return OnceInspect(merge_lock([reply.lock for reply in replies]), last.note, last.pttl_ms)


class ForgetCall(NamedTuple):
    """Deletes this note of the last run."""

    note: bytes

    def encode(self) -> Words:
        """See Call."""
        return ("forget", self.note)

    @classmethod
    def parse(cls, args: Raw) -> ForgetCall:
        """Parse an encoded call."""
        return cls(args[1])

    @property
    def differs_by_server(self) -> bool:
        """True: each server of a quorum has a note of its own, with times of its own clock."""
        return True

    def for_server(self, inspected: OnceInspect) -> ForgetCall | None:
        """Make this call for the server with this reply to `inspect`; None if that server has no note of this run."""
        return ForgetCall(inspected.note) if inspected.note.split(b" ")[0] == self.note.split(b" ")[0] else None


@dataclass(frozen=True)
class OnceState(Answer):
    """The state of work that runs once in the server, at one moment."""

    name: str
    running: str | None
    """The token of the current run: host/pid/thread or task/random; None if no run goes on."""
    started: datetime | None
    """When the current run began, by the server's clock; None if no run goes on."""
    remaining: float | None
    """Seconds until the lease of the current run ends by itself."""
    revoked: str | None
    """Why the current run was revoked; None if it was not revoked."""
    last: Skipped | None
    """The last run, as a skipped call returns it; None if the work may run."""
    free_in: float | None
    """Seconds until the work may run again; None if no last run keeps it from that."""


def parse_state(name: str, reply: Raw) -> OnceState:
    """Parse the reply to `inspect` into the state for users."""
    inspected = OnceInspect.parse(reply)
    lock, pttl_ms, note = state_of(name, inspected.lock), inspected.pttl_ms, inspected.note.decode(errors="replace")
    runner, started, ended = note.split(" ")[:3] if note else ("", "0", "0")
    return OnceState(
        name=name,
        running=lock.holder,
        started=datetime_of(lock.fence or 0) if lock.holder else None,
        remaining=lock.remaining,
        revoked=lock.revoked,
        last=Skipped(name, runner, datetime_of(int(started)), datetime_of(int(ended))) if note else None,
        free_in=pttl_ms / 1000 if pttl_ms >= 0 else None,
    )


def _add_to_view(view: View, reply: Raw) -> View:
    view = add_lock_to_view(view, OnceInspect.parse(reply).lock)
    state = parse_state(view.name, reply)
    last = state.last
    if last is None:
        return view
    times = {"started": last.started, "ended": last.ended}
    run_before = {"by": last.by, **{what: time.isoformat() if time else None for what, time in times.items()}}
    return replace(view, last_run=run_before, next_run=state.free_in)


def _record_in(reply: Raw) -> bytes:
    return OnceInspect.parse(reply).lock.record


def _marker_in(reply: Raw) -> bytes:
    return marker_of(OnceInspect.parse(reply).value)


def _made_to_ask(name: str, prefix: str) -> Resource:
    return once_resource(name, prefix, None)


ONCE: Final = Kind(
    "once",
    "a once()",
    "once",
    _made_to_ask,
    _add_to_view,
    LOCK_ADVICE,
    _record_in,
    _marker_in,
    QuorumRules(NO_NOTE, decisive_vote, OnceInspect.parse, merge_inspect),
)
