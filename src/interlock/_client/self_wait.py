"""A caller that waits for what the same caller holds.

Theory. An attempt knows the thread or task that made it, and the place in the user's code; so does each grant. A
waiter that has waited for `LOOK_AFTER`, or whose time is over, looks for the holder among the grants of this process:
a server grants a token once, so a token says which grant it is, whichever Interlock has it. If the holder's token
begins as that of the waiter, the waiter looks at once.

Rules. (a) A Deadlock is raised only if the wait can't end by itself: the caller holds the lease for as long as the body
of a `with` or a decorated function runs, this body makes the call that waits, and the lease is renewed without end.
All else is logged. (b) A call that does not wait never raises a Deadlock. (c) A signal handler, or a finalizer, runs
on the stack of the code that it interrupts. So if interlock was just acquiring or releasing there what the handler
waits for, that call can't go on before the handler has ended: a Deadlock, too, whose search is the stack itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._client.error_texts import WAIT_ADVICE, about
from interlock._client.grant import Attempt, Grant, Hold
from interlock._client.places import calling_place, interrupted_calls, line_of
from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER
from interlock.errors import AcquireTimeout, Deadlock
from interlock.primitives.kinds import kind_named
from interlock.primitives.messages import Queued
from interlock.primitives.permits import PermitArgs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from interlock._client.book import Book
    from interlock._client.places import Place
    from interlock._protocol.resource import Resource
    from interlock.errors import LockError
    from interlock.primitives.messages import Busy

LOOK_AFTER: Final = 1.0  # seconds of waiting after which a waiter looks whether it waits for itself
MAX_SEARCHED: Final = 1000  # leases of a client that a waiter for permits looks through: about 0.5 ms
_RANDOM_DIGITS: Final = 32  # at the end of a token: before these stand process, and thread or task


class SelfWait(NamedTuple):
    """What a waiter itself holds of the resource for which it waits."""

    attempt: Attempt
    held: list[Grant]
    caller: str
    """"thread" or "task"."""

    def is_deadlock(self) -> bool:
        """Whether only the end of this caller's own `with` or call could end the wait. Only that caller may ask."""
        if self.attempt.timeout == 0 or self.attempt.should_stop is not None:
            return False
        lasting = [grant for grant in self.held if lasts(grant) and _encloses(grant)]
        return bool(lasting) and _are_too_many(self.attempt, lasting)

    def error(self) -> Deadlock:
        """For a wait that can't end."""
        return deadlock(self.attempt.resource, self.caller, self.held[0].attempt.place, self._way_out())

    def warning(self) -> str:
        """For the log, while the waiter waits on."""
        lasting = any(lasts(grant) for grant in self.held)
        return (
            f"{self.attempt.resource}: this very {self.caller} holds it, since {self._since()}, and waits for it at "
            f"{line_of(calling_place())}, {'for ever' if lasting else 'until that lease ends'} unless another "
            f"{self.caller} releases it. {self._way_out()}"
        )

    def sentence(self) -> str:
        """For the error of a caller that did not get it."""
        return f"This very {self.caller} holds it, since {self._since()}. {self._way_out()}"

    def _since(self) -> str:
        return ", ".join(dict.fromkeys(line_of(grant.attempt.place) for grant in self.held))

    def _way_out(self) -> str:
        return way_out(self.attempt.resource)


def way_out(resource: Resource) -> str:
    """What a caller may do that holds this already."""
    return kind_named(resource.kind).self_wait_advice


def deadlock(resource: Resource, caller: str, held_at: Place | None, advice: str) -> Deadlock:
    """The error for a thread or task (`caller`) that would wait for itself here, for ever."""
    text = (
        f"{resource}: this {caller} is inside it already, since {line_of(held_at)}, and would wait for itself for ever "
        f"at {line_of(calling_place())}. {advice}"
    )
    return about(resource, Deadlock(text))


def interrupted(attempt: Attempt) -> list[Attempt]:
    """The attempts on the same lock of calls that can't go on before this one has returned: see rule (c)."""
    key, found = attempt.resource.keys[0], list[Attempt]()
    for variables in interrupted_calls():
        for name in ("self", "attempt", "attempts", "grant", "hold", "lease", "leases", "section"):
            found += _attempts_in(variables.get(name))
    return [each for each in dict.fromkeys(found) if each.resource.keys[0] == key and not each.abandoned]


def _attempts_in(value: Any) -> list[Attempt]:
    """The attempts of what a function of interlock works for."""
    if isinstance(value, Attempt):
        return [value]
    if isinstance(value, Grant):  # find() knows the grants of calls, and says more about them
        is_of_call = (section := section_of(value)) is not None and section.is_call
        return [] if is_of_call and value.end_reason is None else [value.attempt, value.hold.claim]
    if isinstance(value, Hold):
        return _attempts_in(value.grant) or [value.claim]
    if isinstance(value, dict | list):  # of a multi
        parts: list[Any] = [*(value.values() if isinstance(value, dict) else value)]  # pyright: ignore[reportUnknownVariableType]
        return [attempt for part in parts for attempt in _attempts_in(part)]
    for inner in ("_grant", "_leases", "lease"):  # of a Lease, a MultiLease, a Section
        if (held := getattr(value, inner, None)) is not None:
            return _attempts_in(held)
    return []


def blocks_at_server(attempt: Attempt, reply: Queued, below: Attempt, mine: Book) -> bool:
    """Whether a call that this one has interrupted holds, in the server, what this one waits for."""
    grant = mine.find(reply.holder.decode(errors="replace"))  # a lease may have passed to it, under another token
    is_holder = reply.holder == below.token.encode() or (grant is not None and grant.attempt is below)
    return is_holder and _are_too_many(attempt, [below])


def interrupts(attempt: Attempt, what: str) -> Deadlock:
    """The error for a call that waits for the code that it has interrupted; `what` that code does."""
    text = (
        f"{attempt.resource}: this thread {what}. A signal handler or a finalizer has interrupted that, and would wait "
        f"for it for ever at {line_of(calling_place())}. Let another thread do there what needs the lock, or use "
        "timeout=0"
    )
    return about(attempt.resource, Deadlock(text))


def kind_of_caller(caller: object) -> str:
    """A thread or a task, as messages call it."""
    return "task" if hasattr(caller, "get_name") else "thread"


def name_of_caller(caller: Any) -> str:
    """The name of a thread or task. A greenlet of gevent or eventlet that nobody started as a thread is no `Thread`."""
    return str(caller.get_name() if hasattr(caller, "get_name") else caller.name)


def lasts(grant: Grant) -> bool:
    """Whether this lease is renewed without end."""
    hold = grant.hold
    return hold.renews and hold.max_hold_until == FOREVER and grant.end_reason is None


def section_of(grant: Grant) -> Any:
    """The Section of the `with` or the decorated call that holds this lease; None if there is none, or it was left."""
    section = grant.held_by() if grant.held_by is not None else None
    return section if section is not None and section.lease is not None else None


def begins_alike(attempt: Attempt, reply: Queued | Busy) -> bool:
    """Whether the token of the holder names the process, and the thread or task, that this attempt names."""
    return reply.holder[:-_RANDOM_DIGITS] == attempt.token[:-_RANDOM_DIGITS].encode()


def find(
    attempt: Attempt, reply: Queued | Busy, mine: Book, all_books: Callable[[], Iterable[Book]]
) -> SelfWait | None:
    """What the caller of this attempt itself holds of its resource, if that alone keeps the caller waiting.

    `mine`: the leases of the client that waits; `all_books`: those of each client in this process.
    """
    caller = attempt.live_caller
    if caller is None or attempt.make_lease is None:  # a latch and a barrier have no holder
        return None
    args = attempt.resource.acquire_args
    token, where, held = reply.holder.decode(errors="replace"), mine, list["Grant"]()
    for book in (mine, *all_books()):
        if (grant := book.find(token)) is not None:
            where, held = book, [grant]
            break
    if isinstance(args, PermitArgs):
        if args.own_lease or where.count() > MAX_SEARCHED:
            return None
        # The reply names one holder of several, so the search goes through all leases. MAX_SEARCHED bounds its cost,
        # since every waiter of a crowd searches.
        held = [grant for grant in where.held() if grant.resource.keys[0] == attempt.resource.keys[0]]
    held = [grant for grant in held if grant.attempt.live_caller is caller]
    is_why = bool(held) and _are_too_many(attempt, held)
    return SelfWait(attempt, held, kind_of_caller(caller)) if is_why else None


def _encloses(grant: Grant) -> bool:
    section = section_of(grant)
    return section is not None and section.encloses_this_call(grant.attempt.place)


def _are_too_many(attempt: Attempt, held: Sequence[Grant | Attempt]) -> bool:
    """Whether the attempt can't be granted beside these, whatever other callers release."""
    if not isinstance(attempt.resource.acquire_args, PermitArgs):
        return True
    args = [grant.resource.acquire_args for grant in held]
    taken = sum(int(each.permits) for each in args if isinstance(each, PermitArgs))
    return taken + int(attempt.resource.acquire_args.permits) > int(attempt.resource.acquire_args.limit)


class SelfWaits:
    """Where the callers of one client look whether they wait for themselves, and what they do then."""

    def __init__(self, book: Book, all_books: Callable[[], Iterable[Book]]) -> None:
        self.runtime = book.runtime
        self.book = book
        self.all_books = all_books  # of all clients in this process

    def look_for_interrupted(self, attempt: Attempt, blocks: Callable[[Attempt], bool]) -> None:
        """Raise Deadlock if this call, in a signal handler or a finalizer, has interrupted what it is to wait for.

        Also if it has interrupted a step under the mutex: all other threads, and the renewals, wait for that step.
        """
        if attempt.should_stop is not None:
            return
        for below in interrupted(attempt):
            if blocks(below):
                raise interrupts(attempt, f"is just acquiring or releasing it, at {line_of(below.place)}")
        if self.runtime.holds_mutex():
            raise interrupts(attempt, "is in a step of interlock for which all its other threads wait")

    def look(self, attempt: Attempt, reply: Queued, *, warn: bool) -> None:
        """Raise Deadlock if the caller waits for itself for ever; log a self-wait that may end, if `warn`."""
        own = self._find(attempt, reply)
        if own is not None and own.is_deadlock():
            raise own.error()
        if own is not None and warn:
            log.warning("%s", own.warning(), extra=lock_fields(attempt.resource, token=attempt.token))

    def busy_error(self, attempt: Attempt, reply: Queued | Busy) -> LockError:
        """The error for a caller that did not get the resource. It says so if the caller itself holds the resource."""
        assert attempt.busy is not None
        waits = isinstance(reply, Queued)
        error = attempt.busy(attempt.resource, (attempt.timeout or 0) if waits else 0, reply)
        if isinstance(error, AcquireTimeout) and (waits or begins_alike(attempt, reply)):
            own = self._find(attempt, reply)
            if own is not None:
                error.args = (f"{str(error).removesuffix(WAIT_ADVICE).rstrip('. ')}. {own.sentence()}",)
        return error

    def _find(self, attempt: Attempt, reply: Queued | Busy) -> SelfWait | None:
        return find(attempt, reply, self.book, self.all_books)
