"""What `Interlock` and its locks are in both modes: checked descriptions, without any I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ._names import SHORTEST_TTL, checked_name, seconds, tagged
from ._owned import Owned
from .connect import address
from .errors import ConfigError
from .primitives.lock import state as lock_state
from .primitives.permits import state as permits_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._core import Primitive
    from ._session import Session


class Unset:
    """The type of `UNSET`: an argument that was not given, where None means something."""

    def __repr__(self) -> str:
        return "the lock's own timeout"


UNSET: Final = Unset()


@dataclass(frozen=True, slots=True)
class Terms:
    """How a lock is acquired and held: checked."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    fair: bool
    on_lost: Callable[[Any], object] | None

    def __post_init__(self) -> None:
        timeout_of(self.timeout)
        if self.max_hold is not None:
            seconds(self.max_hold, "max_hold", least=SHORTEST_TTL)
        if self.on_lost is not None and not callable(self.on_lost):
            raise ConfigError(f"on_lost must be callable with the lease, not {self.on_lost!r}")


def timeout_of(timeout: object) -> float | None:
    """Seconds to wait: None for ever, 0 not at all. Raises ConfigError."""
    if timeout is None or seconds(timeout, "timeout") == float("inf"):
        return None
    return seconds(timeout, "timeout")


class BaseInterlock:
    """Where the locks are, and what is common to them."""

    def __init__(self, target: object, *, prefix: str, max_ttl: float, label: str | None, for_asyncio: bool) -> None:
        if prefix:
            checked_name(prefix)
            tagged(re.sub(r"\{[^{}]*$", "", prefix))  # a tag may end in the name, but not be broken already
        self.prefix = prefix
        self.max_ttl = seconds(max_ttl, "max_ttl", least=SHORTEST_TTL)
        if label is not None and not re.search(r"\w", label):
            raise ConfigError(f"label must be some words for people, not {label!r}")
        self.label = label
        self._address = address(target, for_asyncio=for_asyncio)
        self._closed = False
        self._owned = Owned()

    def _open(self) -> None:
        if self._closed:
            raise ConfigError("this Interlock is closed. Make a new one")

    def _checked_ttl(self, ttl: float) -> float:
        if not seconds(ttl, "ttl", least=SHORTEST_TTL) <= self.max_ttl:
            raise ConfigError(
                f"ttl must be at most max_ttl ({self.max_ttl:g} s), not {ttl:g}: long work needs no long ttl, since "
                "the lease is renewed. Or raise Interlock(max_ttl=...)"
            )
        return float(ttl)

    def _terms(
        self,
        ttl: float,
        timeout: float | None,
        renew: bool,
        max_hold: float | None,
        fair: bool,
        on_lost: Callable[[Any], object] | None,
    ) -> Terms:
        self._open()
        return Terms(self._checked_ttl(ttl), timeout, renew, max_hold, fair, on_lost)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.Interlock {self._address.shown}{' closed' if self._closed else ''}>"


class BaseLock:
    """A description of something that can be held: safe to share between threads and tasks.

    Nothing is sent until it is acquired.
    """

    __slots__ = ("_entered", "_interlock", "_primitive", "_terms")

    def __init__(self, interlock: Any, primitive: Primitive, terms: Terms) -> None:
        self._interlock = interlock
        self._primitive = primitive
        self._terms = terms
        self._entered: dict[object, list[Any]] = {}  # the leases of `with`, by thread or task, the innermost last

    @property
    def name(self) -> str:
        """The name, without the prefix."""
        return self._primitive.name

    @property
    def _session(self) -> Session:
        session: Session = self._interlock._session
        return session

    def _may_enter(self, who: object) -> None:
        """Refuse what would wait for itself for ever. Raises ConfigError."""
        if any(lease._grant.ended is None for lease in self._entered.get(who, ())):
            raise self._again("a lock is not reentrant; rlock() is")

    def _again(self, advice: str) -> ConfigError:
        return ConfigError(
            f"{self._primitive}: this thread or task is inside it already and would wait for itself for ever; {advice}"
        )

    def _enter(self, who: object, lease: Any) -> None:
        self._entered.setdefault(who, []).append(lease)

    def _leave(self, who: object) -> Any:
        leases = self._entered[who]
        lease = leases.pop()
        if not leases:
            del self._entered[who]
        return lease

    async def _state(self) -> Any:
        return lock_state(self.name, await self._session.core.query(self._primitive, "inspect", "100"))

    async def _revoke(self, reason: str, *, force: bool) -> bool:
        return await revoke(self._session, self._primitive, reason, force=force)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.name!r}>"


class BasePermits(BaseLock):
    """A description of something that several hold: a semaphore, or one side of a read-write lock."""

    __slots__ = ()

    def _may_enter(self, who: object) -> None:
        """Several permits may be had by one."""

    async def _state(self) -> Any:
        return permits_state(self.name, await self._session.core.query(self._primitive, "inspect", "100"))

    async def _revoke(self, reason: str, *, force: bool) -> bool:
        primitive, core = self._primitive, self._session.core
        why = f"{checked_reason(primitive, reason)} (by {core.who()})"
        *_, holders, _ = await core.query(primitive, "inspect", "1000000")
        done = [await core.query(primitive, "revoke", who, "1" if force else "0", why) for who in holders[::3]]
        return any(each[0] for each in done)


def checked_reason(primitive: Primitive, reason: str) -> str:
    """What its holder is told. Raises ConfigError if that is nothing."""
    why = re.sub(r"[\x00-\x1f\x7f]+", " ", reason).strip()[:200]
    if not why:
        raise ConfigError(f"{primitive}: a revocation needs a reason, which its holder is told")
    return why


async def revoke(session: Session, primitive: Primitive, reason: str, *, force: bool) -> bool:
    """See Lock.revoke."""
    core = session.core
    why = checked_reason(primitive, reason)
    value, pttl, *_ = await core.query(primitive, "inspect", "1")
    holder = value.removeprefix(b"!")
    if not holder or (value != holder and not force):
        return False
    if pttl == -1 and not force:
        raise ConfigError(
            f"{primitive} is held without an expiry by {holder.decode(errors='replace')!r}: a revocation that "
            "waits for its holder would wait for ever. If nobody is at work there, use force=True"
        )
    done, _ = await core.query(primitive, "revoke", value, "1" if force else "0", f"{why} (by {core.who()})")
    return bool(done)
