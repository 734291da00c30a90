"""Several lockables as one: all or none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from interlock._client import multi as client
from interlock._protocol.timing import FOREVER, UNDO_GRACE
from interlock._protocol.unset import Unset
from interlock.errors import AcquireTimeout, ConfigError, LockError
from interlock.primitives.kinds import kind_named
from interlock.primitives.lock import LockState
from interlock.primitives.multi import multi_resource
from interlock.primitives.permits import SemaphoreState

from .lock import LockableCore
from .misuse_errors import made_by_interlock
from .options import UNSET, LeaseT, timeout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from interlock._client.grant import AcquireOptions


MAX_LOCKABLES: Final = 1000
Leases = dict[str, Any]  # by name, in the order in which they were acquired: what an error rolls back


class MultiLockCore(LockableCore[dict[str, LockState | SemaphoreState], LeaseT]):
    """Several lockables, all or none; see Interlock.multi."""

    __slots__ = ("_members",)
    _init_advice = "An Interlock makes it, as in Interlock(url).multi(lock, other_lock)"
    _lease_type: Callable[..., LeaseT]

    @made_by_interlock
    def __init__(self, interlock: Any, lockables: Iterable[Any], options: AcquireOptions) -> None:
        members = sorted(lockables, key=lambda each: each._primitive.keys[0].encode())
        super().__init__(interlock, multi_resource([member._primitive for member in members]), options)
        self._members = members

    async def _acquire(self, timeout: float | Unset | None = UNSET) -> LeaseT:
        core = self._session.core
        timeout = self._options.timeout if isinstance(timeout, Unset) else timeout_of(timeout, self._primitive)
        try_for = core.patient_timeout if any(each._options.acks for each in self._members) else core.try_for
        until = FOREVER if timeout is None else core.runtime.now() + (timeout or try_for)
        leases: Leases = {}
        try:
            self._reenter_members(leases)
            missing = [member for member in self._members if member.name not in leases]
            for i in range(0, len(missing), client.MAX_TOGETHER):
                part = missing[i : i + client.MAX_TOGETHER]
                if not await self._take_in_one_step(part, leases, timeout, until):
                    await self._take_in_order(part, leases, timeout, until)
                if i:
                    self._ensure_all(leases)
            return self._lease_type(core, self._options.on_lost, self._primitive.name, leases)
        except BaseException as error:
            await self._roll_back(leases, error, until)
            if isinstance(error, AcquireTimeout):
                raise self._timeout_error(error, timeout or 0.0) from error
            raise

    def _timeout_error(self, error: AcquireTimeout, timeout: float) -> AcquireTimeout:
        """The error that names the multi, made of the error for one of its members."""
        waited = timeout if error.waiting is None else 0.0
        within = f" within {waited:g} s" if waited else ""
        late = AcquireTimeout(f"{self._primitive} was not acquired{within}: {error}")
        late.name, late.waited = self._primitive.name, waited
        late.holder, late.quarantined, late.waiting = error.holder, error.quarantined, error.waiting
        late.remaining = error.remaining
        return late

    def _reenter_members(self, leases: Leases) -> None:
        """Enter again what this thread or task holds already."""
        for member in self._members:
            name = member.name  # before it is entered: no call comes between that and `leases`, so no interrupt
            if (lease := member._reenter()) is not None:
                leases[name] = lease

    async def _take_in_one_step(
        self, missing: Sequence[Any], leases: Leases, timeout: float | None, until: float
    ) -> bool:
        """Acquire all of these if one script can do that, and they are free. Returns whether it did.

        No script can if they are in different slots or on several servers, or if replicas or disks have to acknowledge
        one of them. Raises AcquireTimeout if timeout is 0, and one of them is not free.
        """
        core = self._session.core
        requests = [client.Request(each._to_request(), each._options, each._lease_of) for each in missing]
        if core.server.is_quorum or client.apart(core, requests) or any(each._options.acks for each in missing):
            return False
        busy = await client.together(core, requests, until, leases)
        if busy is not None and timeout == 0:
            client.report_refusal(core, requests, busy)
            raise busy
        return busy is None

    async def _take_in_order(self, missing: Sequence[Any], leases: Leases, timeout: float | None, until: float) -> None:
        """Acquire these one after another, in the order of their keys. All clients do, so there is no deadlock."""
        core, names = self._session.core, [member.name for member in missing]
        for member, name in zip(missing, names, strict=True):
            left = max(0.0, until - core.runtime.now())
            resource, patience = member._to_request(), left if timeout else timeout
            options = replace(member._options, joins=False)  # its lease stays in the multi
            attempt = core.attempt(resource, options, patience, member._lease_of, try_for=left)
            leases[name] = await core.acquire(attempt)
            self._ensure_all(leases)

    @staticmethod
    def _ensure_all(leases: Leases) -> None:
        """Raise LeaseLost if one of these leases has been lost meanwhile."""
        for lease in leases.values():
            lease._ensure()

    async def _roll_back(self, leases: Leases, error: BaseException, until: float) -> None:
        """Give back these leases in the background. For an error of interlock, wait a moment until that is done."""
        runtime = self._session.runtime
        undone = [lease._abandon() for lease in reversed(leases.values())]
        now = runtime.now()
        if isinstance(error, LockError):
            for signal in filter(None, undone):  # the attempt that failed has waited for its own undo
                await signal.wait(min(until, now) + UNDO_GRACE)

    async def _state(self) -> dict[str, LockState | SemaphoreState]:
        return {member.name: await member._state() for member in self._members}

    async def _revoke_holders(self, reason: str, *, force: bool) -> bool:
        return any([await member._revoke_holders(reason, force=force) for member in self._members])


def checked_members(interlock: object, lockables: tuple[Any, ...]) -> tuple[Any, ...]:
    """The lockables of a multi. Raises ConfigError, unless one caller can hold all of them at once."""
    if not 1 <= len(lockables) <= MAX_LOCKABLES:
        raise ConfigError(f"multi() takes 1 to {MAX_LOCKABLES} locks, not {len(lockables)}")
    seen: set[str] = set()
    for each in lockables:
        if not isinstance(each, LockableCore) or not kind_named(each._primitive.kind).may_join_multi:
            raise ConfigError(
                f"multi() takes locks, rlocks, semaphores, and the .read() or .write() of an rwlock, not {each!r}"
                + (". Give them one by one: multi(*locks)" if isinstance(each, list | tuple) else "")
            )
        if each._interlock is not interlock:
            raise ConfigError(f"multi(): {each!r} belongs to another Interlock. Make all of them with one")
        if each._primitive.owner_prefix:
            raise ConfigError(
                f"multi(): {each!r} has an owner=, so another process may take it over. Acquire it by itself"
            )
        if each._primitive.keys[0] in seen:
            raise ConfigError(
                f"multi(): {each.name!r} is there twice, and the second would wait for the first. Name it once"
            )
        seen.add(each._primitive.keys[0])
    return lockables
