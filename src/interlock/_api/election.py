"""An election: one of many processes leads, and the others wait to follow it."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from interlock._client.election import Watch
from interlock._client.election import leader as leader_of
from interlock._client.grant import Grant
from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log
from interlock._protocol.server import Stopped
from interlock.errors import AcquireTimeout, ConfigError, LeaseLost, Unavailable

from .functions import checked_stop, checked_work
from .lease import LeaseCore
from .lock import LockCore
from .misuse_errors import made_by_interlock
from .options import LeaseT
from .section import CallSection, Section

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractAsyncContextManager

    from interlock._client.acquiring import Core
    from interlock._client.grant import AcquireOptions
    from interlock._protocol.resource import Resource
    from interlock._protocol.unset import Unset
    from interlock.primitives.election import Leader

OUTAGE_PAUSE: Final = 0.5  # seconds after which a campaign that the server did not answer begins anew


class LeadershipCore(LeaseCore):
    """The leader's lease."""

    __slots__ = ()

    @property
    def term(self) -> int:
        """Which reign it is: a number that only grows; the fence."""
        return self.fence

    async def _resign(self) -> bool:
        return await self._release()


class ElectionCore(LockCore[LeaseT]):
    """One of many leads; see Interlock.election."""

    __slots__ = ("_won",)
    _init_advice = "An Interlock makes it, as in Interlock(url).election(name)"
    _lease_type: Callable[[Core, Grant], LeaseT]
    _stop_scope: Callable[[Any], AbstractAsyncContextManager[object, bool | None]]
    """Cancels its body when the event is set, if this mode can."""

    @made_by_interlock
    def __init__(self, interlock: Any, resource: Resource, options: AcquireOptions) -> None:
        super().__init__(interlock, resource, options)
        self._won: weakref.ref[Any] | None = None  # the last of its leases

    async def _campaign(self, timeout: float | Unset | None) -> LeaseT:
        return await self._acquire(timeout)

    async def _resign(self) -> bool:
        lease = self._won() if self._won else None
        return lease is not None and await lease._release()

    async def _leader(self) -> Leader | None:
        return await leader_of(self._session.core, self._primitive)

    @contextmanager
    def _observe(self) -> Generator[Watch]:
        """An observer of the changes of leader. A `with` of it ends without an error if the Interlock is closed."""
        watch = Watch(self._session.core, self._primitive)
        try:
            yield watch
        except ConfigError:
            if not watch.core.requests.closed or watch.core.requests.is_of_parent:
                raise
        finally:
            watch.close()

    async def _run(self, work: Callable[[LeaseT], Any], *, stop: Any) -> Any | None:
        self._interlock._check_not_closed()
        checked_work(self._primitive, work)
        checked_stop(self._primitive, stop, for_asyncio=self._interlock._for_asyncio)
        if stop is not None and stop.is_set():
            return None
        polled = stop.is_set if stop is not None and not self._interlock._for_asyncio else None
        lease: Any = None
        async with self._stop_scope(stop):
            while True:
                try:
                    async with CallSection(self) as section:
                        lease = await self._elect(section, polled)
                        if lease is None:
                            return None
                        lease._begin(until_any_end=True)
                        return await self._call(work, lease)
                except LeaseLost as error:
                    if not self._campaigns_again(lease, error):
                        return None
        return None

    @staticmethod
    def _campaigns_again(lease: Any, error: LeaseLost) -> bool:
        """Whether run() goes on after this error: not if the lease was released. Raises the error of another lease."""
        if lease is None or error.token != lease.token or lease._grant.why_ended == Grant.FORKED:
            raise error
        # The state does not tell: it is RELEASED also for a lease whose release has found that the lease was lost.
        return str(error) != str(lease._grant.error(Grant.RELEASED))

    async def _elect(self, section: Section, should_stop: Callable[[], bool] | None) -> Any:
        """Wait through each outage for the lease of the next term, which this section then owns; None if run() ends."""
        warned = False
        while not self._interlock._closed:
            session = self._session
            core = session.core
            attempt = core.attempt(self._primitive, self._options, None, self._lease_of, should_stop=should_stop)
            try:
                lease = section.lease = await core.acquire(attempt)
            except Stopped:
                break
            except LeaseLost as error:
                if error.token not in {None, attempt.token}:
                    raise  # of a `with` around this
                continue  # it was revoked in the moment in which it was handed over
            except (Unavailable, AcquireTimeout) as error:
                if not warned:
                    log.warning("%s The campaign goes on", error, extra=lock_fields(self._primitive))
                    warned = True
                await session.runtime.sleep_until(session.runtime.now() + OUTAGE_PAUSE)
            except ConfigError:
                if not session.core.requests.closed:
                    raise
            else:
                lease._mark_in_with(section)
                return lease
        return None

    def _lease_of(self, core: Core, grant: Grant) -> Any:
        lease = self._lease_type(core, grant)
        self._won = weakref.ref(lease)
        return lease
