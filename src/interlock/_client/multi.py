"""Several things at once, all or none: in one step of the server if they are free, else one after another.

Theory. Whoever wants several waits for them in the order of their keys. All who do so agree on that order (it is
part of the wire format), so there is no circle in which each waits for the next. Those already had are leases like
any other, renewed while the next is awaited. multi.lua is the short cut for when nothing is busy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from interlock._client.error_texts import reply_error
from interlock._client.grant import Attempt, Grant
from interlock._protocol.timing import capped_ttl
from interlock.errors import LockError, Unavailable
from interlock.primitives.messages import AcquireCall, Refused, Retry
from interlock.primitives.multi import AllGranted, FirstRefused, Part, TogetherCall, multi_resource, parse_together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._client.core import Core
    from interlock._protocol.types import Resource

MAX_TRIES = 100  # steps in a row in which the server only found dead waiters to skip


class Request(NamedTuple):
    """What is asked of one of them, and how it will be held."""

    resource: Resource
    make_lease: Callable[[Grant], Any]
    ttl: float
    renews: bool
    max_hold: float | None


def apart(core: Core, requests: Sequence[Request]) -> bool:
    """Whether they are in several places, so that no script sees all of them."""
    return len({core.port.route(request.resource.keys[0]) for request in requests}) > 1


async def together(core: Core, requests: Sequence[Request], until: float, leases: dict[str, Any]) -> Resource | None:
    """The first that is busy, and then nothing is held; or None, and the lease of each is in `leases` by its name.

    Raises what would keep one from being had. The caller gives up what is in `leases` then.
    """
    whole = multi_resource([request.resource for request in requests])
    ttls = [each.ttl if each.max_hold is None else capped_ttl(each.ttl, each.max_hold) for each in requests]
    attempts = [core.attempt(each.resource, ttl, wait=False) for each, ttl in zip(requests, ttls, strict=True)]
    asked = Attempt(whole, "-", min(ttls), None)
    granted = False
    try:
        for attempt in attempts:
            core.waiters.register(attempt)  # so that closing gives back what may be on its way
        call = TogetherCall([_part(core, attempt) for attempt in attempts])
        reply, sent = await _ask(core, asked, call, until)
        for _ in range(MAX_TRIES):
            if isinstance(reply, FirstRefused) and isinstance(reply.reply, Retry):
                reply, sent = await _ask(core, asked, call, until)
        if isinstance(reply, FirstRefused):
            first = requests[reply.which]
            if isinstance(reply.reply, Refused):
                raise reply_error(first.resource, reply.reply)
            _unregister(core, attempts, undo=asked.in_doubt)  # also if it was refused when it was asked again
            return first.resource
        granted = True
        for request, attempt, part in zip(requests, attempts, reply.parts, strict=True):
            attempt.in_doubt = asked.in_doubt
            lease = core.lease_from_grant(
                attempt, part.number, sent, request.make_lease, renews=request.renews, max_hold=request.max_hold
            )
            if lease is None:
                raise Unavailable(f"{whole}: {core.port.display_url} answers too late for a lease of {attempt.ttl:g} s")
            leases[request.resource.name] = lease
        return None  # noqa: TRY300 (what follows is for those who got nothing)
    except BaseException as error:
        _unregister(core, attempts, undo=granted or asked.in_doubt or not isinstance(error, LockError))
        raise


async def _ask(core: Core, asked: Attempt, call: TogetherCall, until: float) -> tuple[AllGranted | FirstRefused, float]:
    """The reply, and when the request was sent that it answers."""
    reply, sent = await core.request(asked, call.encode(), until)
    return parse_together(reply), sent


def _unregister(core: Core, attempts: Sequence[Attempt], *, undo: bool) -> None:
    """They wait no more; `undo`: they may have been granted."""
    for attempt in attempts:
        if undo:
            attempt.in_doubt = True
            core.undo.add(attempt)
        core.waiters.unregister(attempt)


def _part(core: Core, attempt: Attempt) -> Part:
    """The acquire of one, as its own script knows it."""
    resource = attempt.resource
    subscribed, channel = core.port.subscription_of(resource.keys[0])
    ttl_ms = str(int(attempt.ttl * 1000))
    call = AcquireCall(attempt.token, ttl_ms, attempt.handover_ttl_ms, subscribed, channel, "0", resource.acquire_args)
    return Part(resource.script.name, len(resource.keys), call)
