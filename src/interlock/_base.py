"""What `Interlock` and its locks are in both modes: checked descriptions, and what is done with them.

What waits is written once, as `async def`: the API for asyncio awaits it, that for threads drives it by `run()`.
"""

from __future__ import annotations

import re
import secrets
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ._acks import Acks
from ._acks import acks as acks_of
from ._core import COURTESY, FOREVER, Grant, Stopped, log
from ._names import SHORTEST_TTL, checked_name, duration, positive_int, tagged
from ._owned import HeldByCaller
from .connect import Quorum, address
from .errors import AcquireTimeout, ConfigError, LeaseLost, LockError, Unavailable
from .ports._memory import Memories
from .primitives import barrier, latch, multi, once, permits
from .primitives.lock import state as lock_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ._core import Primitive
    from ._section import BaseSection
    from ._session import Session

TTL: Final = 30.0  # seconds that a lease lasts, unless somebody says otherwise
SHORTEST_TRY: Final = 0.01  # seconds: less than a round trip is no try
LONGEST_TRY: Final = 3600.0  # seconds
MOST: Final = 1000  # things that a multi takes
OUTAGE_PAUSE: Final = 0.5  # seconds after which a campaign that the server did not answer begins anew
AGREED: Final = ("lock", "rlock", "multi", "election", "once")  # what servers that know nothing of each other can keep


class Unset:
    """The type of `UNSET`: an argument that was not given, where None means something."""

    def __repr__(self) -> str:
        return "the lock's own timeout"


UNSET: Final = Unset()


@dataclass(frozen=True, slots=True)
class AcquireOptions:
    """How a lock is acquired and held: checked."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    fair: bool
    on_lost: Callable[[Any], object] | None
    acks: Acks | None = None

    def __post_init__(self) -> None:
        timeout_of(self.timeout)
        if self.max_hold is not None:
            duration(self.max_hold, "max_hold", least=SHORTEST_TTL)
        if self.on_lost is not None and not callable(self.on_lost):
            raise ConfigError(f"on_lost must be callable with the lease, not {self.on_lost!r}")


def timeout_of(timeout: object) -> float | None:
    """Seconds to wait: None for ever, 0 not at all. Raises ConfigError."""
    if timeout is None or duration(timeout, "timeout") == float("inf"):
        return None
    return duration(timeout, "timeout")


def _wanted(quarantine: object) -> bool:
    if not isinstance(quarantine, bool):
        raise ConfigError(f"quarantine must be True or False, not {quarantine!r}; its length is max_ttl, in seconds")
    return quarantine


class BaseInterlock:
    """Where the locks are, and what is common to them."""

    @staticmethod
    def _current_owner() -> Any:
        """The thread or the task that runs now."""
        raise NotImplementedError

    def __init__(
        self,
        target: object,
        *,
        prefix: str,
        max_ttl: float,
        quarantine: bool,
        try_for: float,
        label: str | None,
        for_asyncio: bool,
    ) -> None:
        if prefix:
            checked_name(prefix)
            tagged(re.sub(r"\{[^{}]*$", "", prefix))  # a tag may end in the name, but not be broken already
        self.prefix = prefix
        self.max_ttl = duration(max_ttl, "max_ttl", least=SHORTEST_TTL)
        self.try_for = duration(try_for, "try_for", least=SHORTEST_TRY, most=LONGEST_TRY)
        if label is not None and not re.search(r"\w", label):
            raise ConfigError(f"label must be some words for people, not {label!r}")
        self.label = label
        self._address = target if isinstance(target, Quorum) else address(target, for_asyncio=for_asyncio)
        self._memories = Memories(self.max_ttl if _wanted(quarantine) else None)
        self._closed = False
        self._held_by_caller = HeldByCaller()

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ConfigError("this Interlock is closed. Make a new one")

    def _require_supported(self, kind: str) -> None:
        """Raises ConfigError for what there is not, where this one is connected."""
        if isinstance(self._address, Quorum) and kind not in AGREED:
            raise ConfigError(
                f"a quorum has no {kind}: its servers agree on one holder, not on a count. It has {', '.join(AGREED)} "
                f"and synchronized; for a {kind} use one server, Sentinel, or a cluster"
            )

    def _checked_ttl(self, ttl: float) -> float:
        if not duration(ttl, "ttl", least=SHORTEST_TTL) <= self.max_ttl:
            raise ConfigError(
                f"ttl must be at most max_ttl ({self.max_ttl:g} s), not {ttl:g}: long work needs no long ttl, since "
                "the lease is renewed. Or raise Interlock(max_ttl=...)"
            )
        return float(ttl)

    def _options(
        self,
        *,
        ttl: float = TTL,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        fair: bool = False,
        on_lost: Callable[[Any], object] | None = None,
        acks: int | str | None = None,
        fsync: bool = False,
    ) -> AcquireOptions:
        self._check_not_closed()
        ttl = self._checked_ttl(min(TTL, self.max_ttl) if ttl is TTL else ttl)  # not said: no more than there may be
        wanted = acks_of(acks, fsync)
        if wanted is not None and isinstance(self._address, Quorum):
            raise ConfigError(
                "a quorum takes no acks= and no fsync=: a majority of its servers is what its leases rest on, and "
                "lease.assurance says of how many"
            )
        return AcquireOptions(ttl, timeout, renew, max_hold, fair, on_lost, wanted)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.Interlock {self._address.shown}{' closed' if self._closed else ''}>"


class Named:
    """Something that a name stands for, on this Interlock: safe to share between threads and tasks."""

    __slots__ = ("__weakref__", "_interlock", "_primitive")

    def __init__(self, interlock: Any, primitive: Primitive) -> None:
        interlock._require_supported(primitive.kind)
        self._interlock = interlock
        self._primitive = primitive

    @property
    def name(self) -> str:
        """The name, without the prefix."""
        return self._primitive.name

    @property
    def _session(self) -> Session:
        session: Session = self._interlock._session
        return session

    def _ask(self, *args: str | bytes) -> Any:
        """A question to the server, to be awaited."""
        return self._session.core.query(self._primitive, *args)

    def _why(self, reason: str) -> str:
        """What is told to those from whom it is taken. Raises ConfigError if that is nothing."""
        why = re.sub(r"[\x00-\x1f\x7f]+", " ", reason).strip()[:200]
        if not why:
            raise ConfigError(f"{self._primitive}: a revocation needs a reason, which its holder is told")
        return f"{why} (by {self._session.core.who()})"

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.name!r}>"


class BaseLock(Named):
    """A description of something that can be held. Nothing is sent until it is acquired."""

    __slots__ = ("_by_hand", "_inside", "_options")
    _kind: type[Any]  # of its leases

    def __init__(self, interlock: Any, primitive: Primitive, options: AcquireOptions) -> None:
        super().__init__(interlock, primitive)
        self._options = options
        self._inside: dict[weakref.ref[Any], weakref.ref[Any]] = {}  # by thread or task: the lease it entered last
        self._by_hand: list[BaseSection] = []  # what was entered by __enter__() without a `with`, the innermost last

    # Acquiring

    async def _take(
        self, timeout: float | Unset | None, primitive: Primitive | None = None, try_for: float | None = None
    ) -> Any:
        """A lease, waited for; or with timeout=0 tried for, for at most so many seconds.

        An interrupt before it is returned gives it back.
        """
        if (lease := self._reenter()) is not None:
            return lease
        options = self._options
        lease = await self._session.core.acquire(
            primitive or self._asked(),
            self._hold,
            options.ttl,
            self._timeout(timeout),
            options.renew,
            options.max_hold,
            acks=options.acks,
            try_for=try_for,
        )
        try:
            self._on_acquired(lease)
        except BaseException:
            lease._abandon()
            raise
        return lease

    def _timeout(self, timeout: float | Unset | None) -> float | None:
        return self._options.timeout if isinstance(timeout, Unset) else timeout_of(timeout)

    def _reenter(self) -> Any:
        """The lease that this thread or task has already, taken once more; None if it is to be asked for."""
        return None

    def _asked(self) -> Primitive:
        """What is asked for. Raises ConfigError for what could never be had."""
        return self._primitive

    def _hold(self, grant: Any) -> Any:
        return self._kind(self._session, self._options.on_lost, grant)

    def _on_acquired(self, lease: Any) -> None:
        """It was had."""

    # Its `with`

    def _check_not_inside(self, who: weakref.ref[Any]) -> None:
        """Refuse what would wait for itself for ever. Raises ConfigError."""
        inside = self._inside.get(who)
        if inside is not None and (lease := inside()) is not None and not lease._ended:
            raise ConfigError(
                f"{self._primitive}: this thread or task is inside it already and would wait for itself for ever; "
                "a lock is not reentrant; rlock() is"
            )

    async def _enter(self, section: BaseSection) -> Any:
        """The lease of a `with`, which this section owns. Whatever ends it otherwise: the section gives up."""
        who = section.who
        if who is not None:
            self._check_not_inside(who)
        lease = section.lease = await self._take(UNSET)
        lease._in_with = not section.by_hand
        if who is not None:
            self._inside[who] = weakref.ref(lease)
        if section.by_hand:
            self._by_hand.append(section)
        return lease

    def _left(self, section: BaseSection) -> None:
        """The section was left, or has given up."""
        section.lease = None
        if section.who is not None:
            self._inside.pop(section.who, None)

    def _entered_by_hand(self, who: object) -> Any:
        """The section that is left now, by __exit__() without a `with`. Raises ConfigError if that is not clear."""
        with self._session.port.mutex:
            found = self._found_by_hand(who)
        if not isinstance(found, int):
            return found
        raise ConfigError(
            f"{self._primitive}: __exit__() was called by another thread or task than __enter__(), and "
            f"{f'{found} leases were entered so' if found else 'no lease was entered so'}: nobody can tell which lease "
            "is meant. Keep the lease: `lease = s.acquire()`, and then `with lease:` or lease.release()"
        )

    def _found_by_hand(self, who: object) -> Any:
        """The caller's own, or the only one, which is taken out; else how many there are."""
        entered = [section for section in self._by_hand if section.lease is not None]
        mine = [section for section in entered if section.who is not None and section.who() is who]
        held = [section for section in entered if not section.lease._ended] or entered
        found = mine[-1:] or held
        if len(found) == 1:
            self._by_hand.remove(found[0])
            return found[0]
        # One of them will not be left. Who can still leave its own does; the others are renewed no more, if nobody else
        # has their lease.
        for section in held:
            if _over(section.who):
                self._by_hand.remove(section)
        return len(held)

    # For people

    async def _state(self) -> Any:
        return lock_state(self.name, await self._ask("inspect", "100"))

    async def _revoke(self, reason: str, *, force: bool) -> bool:
        return await revoke(self._session, self._primitive, self._why(reason), force=force)


class BaseRLock(BaseLock):
    """A lock that its holder may take again."""

    __slots__ = ()

    @property
    def _owner(self) -> Any:
        return self._primitive.owner or self._interlock._current_owner()

    def _reenter(self) -> Any:
        held = [
            lease for lease in self._interlock._held_by_caller.of(self._owner, self._primitive.keys[0]) if lease.inside
        ]
        held.sort(key=lambda lease: lease._ended)  # one that was taken over comes last
        return held[0].reenter() if held else None

    def _on_acquired(self, lease: Any) -> None:
        self._interlock._held_by_caller.add(self._owner, self._primitive.keys[0], lease)

    def _check_not_inside(self, who: weakref.ref[Any]) -> None: ...


class BasePermits(BaseLock):
    """A description of something that several hold: a semaphore, or one side of a read-write lock."""

    __slots__ = ()

    def _check_not_inside(self, who: weakref.ref[Any]) -> None:
        """Several permits may be had by one."""

    async def _state(self) -> permits.SemaphoreState:
        return permits.state(self.name, await self._ask("inspect", "100"))

    async def _revoke(self, reason: str, *, force: bool) -> bool:
        why = self._why(reason)
        *_, holders, _, _, marker = await self._ask("inspect", "1000000")
        names = [marker, *holders[::3]] if marker and force else holders[::3]
        done = [await self._ask("revoke", name, "1" if force else "0", why) for name in names]
        return any(each[0] for each in done)


class BaseRWSide(BasePermits):
    """Reading, or writing: beside what this thread or task has of the same read-write lock."""

    __slots__ = ()

    def _asked(self) -> Primitive:
        owned = self._interlock._held_by_caller.of(self._interlock._current_owner(), self._primitive.keys[0])
        return permits.beside(self._primitive, owned)

    def _on_acquired(self, lease: Any) -> None:
        self._interlock._held_by_caller.add(self._interlock._current_owner(), self._primitive.keys[0], lease)


class BaseMulti(BaseLock):
    """Several things, all or none."""

    __slots__ = ("_members",)

    def __init__(self, interlock: Any, lockables: Iterable[Any], options: AcquireOptions) -> None:
        members = sorted(lockables, key=lambda each: each._primitive.keys[0].encode())
        super().__init__(interlock, multi.multi([member._primitive for member in members]), options)
        self._members = members

    @staticmethod
    def _checked(interlock: Any, lockables: tuple[Any, ...]) -> tuple[Any, ...]:
        positive_int(len(lockables), "the number of its locks", "multi", MOST)
        seen: set[str] = set()
        for each in lockables:
            if not isinstance(each, BaseLock) or each._primitive.script.name not in {"lock", "permits"}:
                raise ConfigError(
                    f"multi() takes locks, rlocks, semaphores, and the .read() or .write() of an rwlock, not {each!r}"
                )
            if each._interlock is not interlock:
                raise ConfigError(f"multi(): {each!r} belongs to another Interlock. Make all of them with one")
            if each._primitive.owner:
                raise ConfigError(f"multi(): {each!r} has an owner= and would be taken over: acquire it by itself")
            if each._primitive.keys[0] in seen:
                raise ConfigError(f"multi(): the name {each.name!r} is there twice, and would wait for itself")
            seen.add(each._primitive.keys[0])
        return lockables

    async def _take(
        self, timeout: float | Unset | None, primitive: Primitive | None = None, try_for: float | None = None
    ) -> Any:
        assert primitive is None
        assert try_for is None
        core, timeout = self._session.core, self._timeout(timeout)
        try_for = core.patient if any(each._options.acks for each in self._members) else core.try_for
        until = FOREVER if timeout is None else core.port.now() + (timeout or try_for)
        leases: dict[str, Any] = {}
        try:
            for member in self._members:
                name = member.name  # before it is taken: no call comes between that and `leases`, so no interrupt
                if (lease := member._reenter()) is not None:
                    leases[name] = lease
            rest = [member for member in self._members if member.name not in leases]
            names = [member.name for member in rest]
            requests = [
                multi.Request(each._asked(), each._hold, each._options.ttl, each._options.renew, each._options.max_hold)
                for each in rest
            ]
            # Otherwise each is had by itself: in different slots, on several servers, or acknowledged by replicas.
            apart = core.port.several or multi.apart(core, requests)
            one_step = not apart and not any(each._options.acks for each in rest)
            busy: Primitive | None = None
            if rest:
                busy = await multi.together(core, requests, until, leases) if one_step else requests[0].primitive
            if busy is None:
                for member, name in zip(rest, names, strict=True):
                    member._on_acquired(leases[name])
            elif timeout == 0 and one_step:
                raise AcquireTimeout(f"{self._primitive} is not free, since {busy} is not")
            else:
                for member, name in zip(rest, names, strict=True):
                    left = max(0.0, until - core.port.now())
                    leases[name] = await member._take(left if timeout else timeout, try_for=left)
                    for lease in leases.values():  # what was had first may have been lost since
                        lease.ensure()
            return self._kind(self._session, self._options.on_lost, self._primitive.name, leases)
        except BaseException as error:
            undone = [lease._abandon() for lease in reversed(leases.values())]
            now = core.port.now()
            if isinstance(error, LockError):
                for signal in filter(None, undone):  # the one that was waited for had its courtesy already
                    await core.port.wait(signal, min(until, now) + COURTESY)
            if timeout and isinstance(error, AcquireTimeout):
                raise AcquireTimeout(f"{self._primitive} was not acquired within {timeout:g} s: {error}") from error
            raise

    async def _state(self) -> dict[str, Any]:
        return {member.name: await member._state() for member in self._members}

    async def _revoke(self, reason: str, *, force: bool) -> bool:
        return any([await member._revoke(reason, force=force) for member in self._members])


class BaseLatch(Named):
    """A latch: what it asks."""

    __slots__ = ()

    async def _count(self) -> int:
        left = (await self._state()).left
        return int(self._primitive.terms[0]) if left is None else left

    async def _state(self) -> latch.LatchState:
        return latch.state(self.name, await self._ask("inspect", "100"))

    async def _revoke(self, reason: str) -> bool:
        (done,) = await self._ask("revoke", f"revoke/{secrets.token_hex(16)}", f"it was revoked: {self._why(reason)}")
        return bool(done)


class BaseBarrier(Named):
    """A barrier: what it asks."""

    __slots__ = ()

    async def _state(self) -> barrier.BarrierState:
        return barrier.state(self.name, await self._ask("inspect", "100"))

    async def _revoke(self, reason: str) -> bool:
        (done,) = await self._ask("revoke", f"revoke/{secrets.token_hex(16)}", f"it was revoked: {self._why(reason)}")
        return bool(done)


class BaseElection(BaseLock):
    """An election: which of its leases was the last one."""

    __slots__ = ("_won",)

    def __init__(self, interlock: Any, primitive: Primitive, options: AcquireOptions) -> None:
        super().__init__(interlock, primitive, options)
        self._won: weakref.ref[Any] | None = None

    def _on_acquired(self, lease: Any) -> None:
        self._won = weakref.ref(lease)

    def _elected(self) -> Any:
        return self._won() if self._won else None

    async def _elect(self, section: BaseSection, stopped: Callable[[], bool] | None = None) -> Any:
        """The lease of the next term, which this section owns, waited for through every outage.

        None if run() is to end instead.
        """
        options, told = self._options, False
        while not self._interlock._closed:
            session = self._session
            try:
                lease = section.lease = await session.core.acquire(
                    self._primitive,
                    self._hold,
                    options.ttl,
                    None,
                    options.renew,
                    options.max_hold,
                    acks=options.acks,
                    stopped=stopped,
                )
            except Stopped:
                break
            except LeaseLost:  # it was revoked in the moment in which it was handed over
                continue
            except (Unavailable, AcquireTimeout) as error:
                if not told:
                    log.warning("%s The campaign goes on", error)
                    told = True
                await session.port.wait(session.port.signal(), session.port.now() + OUTAGE_PAUSE)
            except ConfigError:
                if not session.core.closed:
                    raise
            else:
                lease._in_with = True
                self._on_acquired(lease)
                return lease
        return None

    @staticmethod
    def _campaigns_again(lease: Any, error: LeaseLost) -> bool:
        """Whether run() goes on after this came out of a term: not if the lease was given back. Raises another's."""
        if error.token != lease.token:
            raise error
        # Not its state: of one that turned out to be lost when it was released, that is RELEASED, too.
        return str(error) != str(lease._grant.error(Grant.RELEASED))


class BaseOnce(BaseLock):
    """Work that runs once: how a run begins and ends."""

    __slots__ = ("_limits",)

    def __init__(self, interlock: Any, primitive: Primitive, options: AcquireOptions, limits: once.Limits) -> None:
        super().__init__(interlock, primitive, options)
        self._limits = limits

    async def _begin(self, section: BaseSection) -> Any:
        """The lease of a run, which this section owns; or Skipped."""
        limits, core = self._limits, self._session.core
        try:
            lease = section.lease = await core.acquire(
                self._primitive, self._hold, limits.ttl, 0, True, limits.at_most, once.passed, try_for=core.patient
            )
        except once.Passed as passed:
            return passed.skipped
        lease._in_with = True
        lease._grant.attempt.parting = limits.parting(succeeded=False)
        return lease

    def _done(self, lease: Any, value: Any) -> once.Ran[Any]:
        """The run has succeeded: its release will say so. Raises LeaseLost if the lease did not last until now."""
        lease.ensure()
        lease._grant.attempt.parting = self._limits.parting(succeeded=True)
        return once.ran(lease._grant, value)

    async def _forget(self) -> bool:
        _, note, _ = await self._ask("inspect", "1")
        if note:
            await self._ask("forget", note)
        return bool(note)

    async def _state(self) -> once.OnceState:
        return once.state(self.name, await self._ask("inspect", "1"))

    async def _revoke(self, reason: str, *, force: bool) -> bool:
        state = await self._state()
        if state.running is None:
            return False
        done, _ = await self._ask("revoke", state.running, "1" if force else "0", self._why(reason))
        return bool(done)


def _over(who: weakref.ref[Any] | None) -> bool:
    """Whether this thread or task has ended, as far as anybody can tell."""
    one = who() if who is not None else None
    return one is None or not (one.is_alive() if hasattr(one, "is_alive") else not one.done())


async def revoke(session: Session, primitive: Primitive, why: str, *, force: bool) -> bool:
    """See Lock.revoke."""
    query = session.core.query
    value, pttl, *_ = await query(primitive, "inspect", "1")
    holder = value.removeprefix(b"!")
    if not holder or (value != holder and not force):
        return False
    if pttl == -1 and not force:
        raise ConfigError(
            f"{primitive} is held without an expiry by {holder.decode(errors='replace')!r}: a revocation that "
            "waits for its holder would wait for ever. If nobody is at work there, use force=True"
        )
    done, _ = await query(primitive, "revoke", value, "1" if force else "0", why)
    return bool(done)
