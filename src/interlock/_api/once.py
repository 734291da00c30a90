"""Work that one machine runs, and the others skip."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, Self

from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER, STOP_POLL_INTERVAL
from interlock.primitives import once as script
from interlock.primitives.once import ForgetCall, OnceInspect, OnceState, Ran, Skipped

from .functions import checked_function, checked_work
from .lock import LockableCore
from .misuse_errors import ONCE_HINTS, NoWith, made_by_interlock
from .misuse_warnings import warn_of_missing_f
from .options import LeaseT
from .run_names import NAMED, RunNames, RunSource
from .section import Section
from .synchronized import decorated

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._client.grant import AcquireOptions
    from interlock._protocol.resource import Resource
    from interlock.primitives.lock import LockInspect

    from .lease import LeaseCore


# Seconds that a run may wait longer than max_ttl for its quorum, whose servers begin to abstain when it connects.
ABSTENTION_SLACK: Final = 1.0


class OnceCore(LockableCore[OnceState, LeaseT], NoWith):
    """Work that runs on one machine only; see Interlock.once."""

    __slots__ = ("_limits", "_source")
    _init_advice = "An Interlock makes it, as in Interlock(url).once(name, at_most=60)"
    _hints = ONCE_HINTS
    _name_may_be_format = True
    _instead_of_with = "it runs a function, by run(work) or as a decorator"
    _state_of = staticmethod(script.parse_state)

    @made_by_interlock
    def __init__(
        self,
        interlock: Any,
        resource: Resource,
        options: AcquireOptions,
        limits: script.RunLimits,
        source: RunSource = NAMED,
    ) -> None:
        super().__init__(interlock, resource, options)
        self._limits = limits
        self._source = source

    def _named(self, resource: Resource) -> Self:
        """The same work under a name and a key that a call has made."""
        return type(self)(self._interlock, resource, self._options, self._limits)

    def _now(self) -> Self:
        """This work, with the name and the key that their functions return now. Raises ConfigError."""
        if not self._source.made_at_call:
            return self
        return self._named(RunNames(self._primitive, self._source, self._interlock.prefix).of((), {}))

    async def _run(self, work: Callable[[LeaseT], Any]) -> Ran[Any] | Skipped:
        checked_work(self._primitive, work)
        for text in (self._source.name, self._source.key):
            if isinstance(text, str) and "{" in text:
                warn_of_missing_f(self._primitive, text)
        return await self._now()._run_named(work)

    async def _run_named(self, work: Callable[[LeaseT], Any]) -> Ran[Any] | Skipped:
        async with Section(self) as section:
            lease = await self._begin(section)
            if isinstance(lease, Skipped):
                return lease
            lease._begin(until_any_end=True)
            value = await self._call(work, lease)
            lease._ensure()
            self._note(lease, succeeded=True)
            return script.ran_result(lease.name, lease.token, lease.fence, value)

    async def _begin(self, section: Section) -> Any:
        """The lease of a run, which this section owns; or Skipped."""
        core, until = self._session.core, FOREVER
        while True:
            attempt = core.attempt(
                self._primitive,
                self._options,
                0,
                self._lease_of,
                busy=script.skipped_error,
                try_for=core.patient_timeout,
            )
            try:
                lease = section.lease = await core.acquire(attempt)
            except script.RunSkipped as passed:
                now = core.runtime.now()
                until = min(until, now + min(self._limits.at_most, self._interlock.max_ttl) + ABSTENTION_SLACK)
                if not await self._outlasts(passed, until):
                    return passed.skipped
            else:
                lease._mark_in_with()
                self._note(lease, succeeded=False)
                return lease

    async def _outlasts(self, passed: script.RunSkipped, until: float) -> bool:
        """Wait while most servers of a quorum abstain: nobody is known to run the work. Returns whether to ask again.

        Not past `until`, and never for one server: its quarantine may be that of a run which goes on.
        """
        core = self._session.core
        if not core.server.is_quorum or passed.remaining is None:
            return False
        end = core.runtime.now() + max(passed.remaining, ABSTENTION_SLACK / 100)
        if end > until:
            return False
        log.info(
            "%s waits %.3g s, until its quorum grants again",
            self._primitive,
            passed.remaining,
            extra=lock_fields(self._primitive),
        )
        while (now := core.runtime.now()) < end and not core.requests.closed:
            await core.runtime.sleep_until(min(end, now + STOP_POLL_INTERVAL))
        return True

    def _note(self, lease: LeaseCore, *, succeeded: bool) -> None:
        """Let the release of this lease say what became of its run."""
        claim = lease._grant.hold.claim
        claim.resource = claim.resource._replace(release_args=self._limits.release_args(succeeded=succeeded))

    def _decorate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, made so that of several calls one runs it, and the others skip it."""
        checked_function(self._primitive, function, for_asyncio=self._interlock._for_asyncio)
        names = RunNames(self._primitive, self._source, self._interlock.prefix, function)
        frozen = names.frozen(function)

        async def once(*args: Any, **kwargs: Any) -> Any:
            for text in frozen:
                text.warn_if_stale()

            @functools.wraps(function)
            def work(_: LeaseT) -> Any:
                return function(*args, **kwargs)

            named = self._named(names.of(args, kwargs)) if names.differ else self
            return await named._run_named(work)

        return decorated(function, once, for_asyncio=self._interlock._for_asyncio)

    async def _forget(self) -> bool:
        named = self._now()
        inspected = OnceInspect.parse(await named._inspected("1"))
        if inspected.note:
            await named._query(ForgetCall(inspected.note))
        return bool(inspected.note)

    async def _state(self) -> OnceState:
        named = self._now()
        return self._state_of(named.name, await named._inspected("100"))

    async def _revoke_holders(self, reason: str, *, force: bool) -> bool:
        return await super(OnceCore, self._now())._revoke_holders(reason, force=force)

    async def _inspected_lock(self) -> LockInspect:
        return OnceInspect.parse(await self._inspected("1")).lock
