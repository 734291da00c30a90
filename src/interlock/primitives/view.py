"""What the server has under a name, whatever kind uses it, as people see it: in `ls()`, on the command line, on pages.

Each primitive adds to a `View` what its own reply to `inspect` says (`add_to_view`, see `Kind`). Only people need a
view, so the primitives import this module when they make one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from interlock._protocol.tokens import Token
from interlock.primitives.codes import NEWER, OTHER

if TYPE_CHECKING:
    from interlock.primitives.registry import Party as Said

T = TypeVar("T")
HANDING_OVER: Final = "handing over"  # the state while it is granted, and no holder has confirmed its handover yet


@dataclass(frozen=True)
class Party:
    """One that holds or waits: what its token says, and what its process has said."""

    token: str
    """Of the lease, or of the attempt that waits; or what another library wrote."""
    host: str | None = None
    pid: int | None = None
    caller: str | None = None
    """The thread or task."""
    label: str | None = None
    """The `label` of its Interlock."""
    owner: str | None = None
    """The `owner` of an rlock."""
    since: float | None = None
    """Seconds for which it has held or waited."""
    place: str | None = None
    """The line of the user's code, as file:line."""
    trace_id: str | None = None
    reported_ago: float | None = None
    """Seconds since its process last said what it holds and waits for."""
    gone: bool = False
    """Whether its process has ended: known of processes on this host only."""
    said: Said | None = field(default=None, repr=False, compare=False)
    """What its process has said of it."""


@dataclass(frozen=True)
class Holder(Party):
    """One that holds."""

    fence: int | None = None
    remaining: float | None = None
    """Seconds until the lease ends by itself; None: never."""
    permits: int | None = None
    """Of a semaphore."""
    side: str | None = None
    """Of a read-write lock: "read" or "write"."""
    revoked: str | None = None
    """Why the lease was revoked."""
    confirmed: bool = True
    """False while it is handed over: the holder has not begun its section yet."""


@dataclass(frozen=True)
class Waiter(Party):
    """One that waits."""

    permits: int | None = None
    side: str | None = None


@dataclass(frozen=True)
class View:
    """What the server has under a name. Fields that the kind does not have are None."""

    name: str
    key: str
    kind: str | None
    """The name of the method of Interlock that makes it, such as "semaphore"; an rlock is a lock. "plain key": of
    another library; "other data"; "another version"; None: the server has nothing under this name."""
    state: str
    """free, held, handing over, quarantine; of a latch: counting, open, revoked; of a barrier: waiting, broken; else
    unknown."""
    holders: list[Holder] = field(default_factory=list[Holder])
    holding: int = 0
    """How many hold: `holders` has the first ones."""
    waiters: list[Waiter] = field(default_factory=list[Waiter])
    """In order."""
    waiting: int = 0
    """How many callers wait: in the server's queue, and behind other callers of their processes."""
    processes: int = 0
    """In how many processes they wait."""
    departed: int | None = None
    """How many waiters have left the server's queue since it was last empty."""
    fence: int | None = None
    """Of the newest grant."""
    quarantine: float | None = None
    """Seconds for which the server grants nothing, since it may have lost a lease that is alive."""
    motion: str = ""
    """If callers wait: "moves" if it passes from holder to holder, "stuck" if it does not; "" if nobody can tell."""
    handovers: float | None = None
    """If it moves: waiters that leave the server's queue, a second; None if nobody has counted them."""
    unchanged: float | None = None
    """Seconds since it was last granted to anybody."""
    now: float | None = None
    """When this was true, by the server's clock: seconds since 1970."""
    limit: int | None = None
    used: int | None = None
    count: int | None = None
    left: int | None = None
    parties: int | None = None
    generation: int | None = None
    broken: str | None = None
    """Why a barrier or latch is broken."""
    expires: float | None = None
    """Seconds after which the server forgets a latch that nobody uses."""
    last_run: dict[str, str | None] | None = None
    """Of a once: by, started, ended."""
    next_run: float | None = None
    """Of a once: seconds for which the last run keeps the next one from starting."""

    @property
    def is_known(self) -> bool:
        """Whether something uses the name of which interlock can say who holds it."""
        return self.kind not in {None, OTHER, NEWER}

    @property
    def is_busy(self) -> bool:
        """Whether a caller that asks now has to wait: for a holder, for the end of a quarantine, or at a latch."""
        if self.state in {"held", HANDING_OVER} and self.limit is not None and self.used is not None:
            return self.used >= self.limit or self.waiting > 0
        return self.state in {"held", HANDING_OVER, "quarantine", "counting"}

    def as_json(self) -> dict[str, Any]:
        """The view for --json."""
        bare = replace(self, holders=[replace(each, said=None) for each in self.holders],
                       waiters=[replace(each, said=None) for each in self.waiters])  # fmt: skip
        fields = asdict(bare)
        for party in (*fields["holders"], *fields["waiters"]):
            del party["said"]
        return fields


def with_fields(of: T, **fields: Any) -> T:
    """A copy of a view or a party with these fields: as `dataclasses.replace`, at a tenth of its time."""
    made = object.__new__(type(of))
    made.__dict__.update(of.__dict__, **fields)
    return made


def of_token(token: str, ours: str | None = None) -> dict[str, Any]:
    """What a token says, as the fields of a Party. `ours`: the token of the attempt that wrote a foreign value."""
    said = Token.parse(ours or token)
    if said is None:
        return {"token": token}
    process = said.process
    return {
        "token": token,
        "host": process.host,
        "pid": process.pid,
        "caller": said.caller,
        "label": process.label or None,
        "owner": said.owner or None,
    }
