"""Work that runs on one machine only, and is skipped by the others."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from interlock.primitives import once as script
from interlock.primitives.messages import DoneReply, InspectCall, RevokeCall
from interlock.primitives.once import ForgetCall, OnceInspect, OnceState, Ran, Skipped

from .functions import checked_function
from .lock import LockableCore
from .options import LeaseT
from .section import Section
from .synchronized import decorated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock._client.grant import AcquireOptions
    from interlock._protocol.types import Resource


R = TypeVar("R")


class OnceCore(LockableCore[OnceState, LeaseT]):
    """Work that runs on one machine only; see Interlock.once."""

    __slots__ = ("_limits",)
    _state_of = staticmethod(script.parse_state)

    def __init__(self, interlock: Any, resource: Resource, options: AcquireOptions, limits: script.RunLimits) -> None:
        super().__init__(interlock, resource, options)
        self._limits = limits

    async def _run(self, work: Callable[[LeaseT], Awaitable[R]]) -> Ran[R] | Skipped:
        """Call `work(lease)` (asyncio: await it), unless another process does that work or has done it.

        Returns Ran, with the value that `work` returned, or Skipped. Raises what `work` raises; LeaseLost if `work`
        took longer than at_most, or if its lease ended before it did: it was lost, or the Interlock was closed;
        Unavailable.
        """
        async with Section(self) as section:
            lease = await self._begin(section)
            if isinstance(lease, Skipped):
                return lease
            lease._begin(until_any_end=True)
            value: R = await self._call(work, lease)
            lease.ensure()
            lease._grant.attempt.release_args = self._limits.release_args(succeeded=True)  # what its release says
            return script.ran_result(lease.name, lease.token, lease.fence, value)

    async def _begin(self, section: Section) -> Any:
        """The lease of a run, which this section owns; or Skipped."""
        core = self._session.core
        attempt = core.attempt(
            self._primitive, self._options, 0, self._lease_of, busy=script.skipped_error, try_for=core.patient_timeout
        )
        try:
            lease = section.lease = await core.acquire(attempt)
        except script.RunSkipped as passed:
            return passed.skipped
        lease._in_with = True
        lease._grant.attempt.release_args = self._limits.release_args(succeeded=False)
        return lease

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function (asyncio: an `async def`): each call of it runs it once, or is skipped; see `run()`."""
        checked_function(self._primitive, function, for_asyncio=self._interlock._for_asyncio)

        async def once(*args: Any, **kwargs: Any) -> Any:
            @functools.wraps(function)
            def work(_: LeaseT) -> Any:
                return function(*args, **kwargs)

            return await self._run(work)

        return decorated(function, once, for_asyncio=self._interlock._for_asyncio)

    async def _forget(self) -> bool:
        """Let the work run again, though it has run. Returns whether anything kept it from that.

        Raises Unavailable or ConfigError.
        """
        inspected = OnceInspect.parse(await self._query(InspectCall("1")))
        if inspected.note:
            await self._query(ForgetCall(inspected.note))
        return bool(inspected.note)

    async def _revoke_holders(self, why: str, *, force: bool) -> bool:
        state = await self._state()
        if state.running is None:
            return False
        return DoneReply.parse(await self._query(RevokeCall(state.running, "1" if force else "0", why))).was_done
