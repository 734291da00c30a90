"""Several resources at once, all or none: in one step of the server if all are free, else one after another.

Theory. A client that acquires several resources waits for them in the order of their keys. All clients agree on that
order (it is part of the wire format), so no circle of clients can form in which each waits for the next. While the
client waits for the next resource, it renews the leases that it already holds. multi.lua is the short cut for
resources that are all free, for `MAX_TOGETHER` of them at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from interlock._client.error_texts import busy_error, reply_error
from interlock._client.retries import Question
from interlock.errors import AcquireTimeout, LockError, Unavailable
from interlock.primitives.messages import NO_WAITING, AcquireCall, Busy, Refused, Retry
from interlock.primitives.multi import AllGranted, FirstRefused, Part, TogetherCall, multi_resource, parse_together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._client.acquiring import Core
    from interlock._client.grant import AcquireOptions, Attempt, Grant
    from interlock._protocol.resource import Resource

MAX_TOGETHER = 50  # resources in one call, which then takes less than 2 ms of the server
MAX_TRIES = 100  # calls in a row in which the server only dropped dead waiters
MANY_DEAD = Busy(b"", 0, is_head=False)  # the refusal after so many calls


class Request(NamedTuple):
    """One resource to acquire, and how its lease will be held."""

    resource: Resource
    options: AcquireOptions
    make_lease: Callable[[Core, Grant], Any]


def apart(core: Core, requests: Sequence[Request]) -> bool:
    """Whether the resources have several routes, so that no single script call can see them all."""
    return len({core.server.route(request.resource.keys[0]) for request in requests}) > 1


async def together(
    core: Core, requests: Sequence[Request], until: float, leases: dict[str, Any]
) -> AcquireTimeout | None:
    """Acquire all resources in one call. Returns None, with the lease of each in `leases` by its name.

    If a resource is busy, returns the error about the first such resource, and no lease is held. Raises the error that
    keeps the client from acquiring any of them; the caller must then release the leases in `leases`.
    """
    whole = multi_resource([request.resource for request in requests])
    attempts = [core.attempt(resource, options, 0, make_lease) for resource, options, make_lease in requests]
    asking = Question(whole)
    granted = False
    try:
        for attempt in attempts:
            core.waiters.register(attempt)  # so that close() releases what the server may grant
        call = TogetherCall([_part(core, attempt) for attempt in attempts])
        reply, sent = await _send_call(core, asking, call, until)
        for _ in range(MAX_TRIES):
            if isinstance(reply, FirstRefused) and isinstance(reply.reply, Retry):
                reply, sent = await _send_call(core, asking, call, until)
        if isinstance(reply, FirstRefused):
            first = requests[reply.refused_index]
            if isinstance(reply.reply, Refused):
                raise reply_error(first.resource, reply.reply)
            # Undone even after a refusal: the server may have granted an earlier copy of the call, without a reply.
            _unregister(core, attempts, undo=asking.in_doubt)
            return busy_error(first.resource, 0, reply.reply if isinstance(reply.reply, Busy) else MANY_DEAD)
        granted = True
        for request, attempt, part in zip(requests, attempts, reply.parts, strict=True):
            attempt.in_doubt = asking.in_doubt
            lease = core.lease_from_grant(attempt, part.number, sent)
            if lease is None:
                raise Unavailable(
                    f"{whole}: {core.server.display_url} answers too late for a lease of {attempt.ttl:g} s"
                )
            leases[request.resource.name] = lease
        return None  # noqa: TRY300 (the code below runs only if no lease is held)
    except BaseException as error:
        _unregister(core, attempts, undo=granted or asking.in_doubt or not isinstance(error, LockError))
        raise


def report_refusal(core: Core, requests: Sequence[Request], busy: AcquireTimeout) -> None:
    """Report to the observers, if there are any, that one of these resources was busy."""
    refused = [request for request in requests if request.resource.name == busy.name]
    if (people := core.points.people) is not None and refused:
        attempt, now = core.attempt(refused[0].resource, refused[0].options, 0), core.runtime.now()
        people.begins(attempt, now)
        people.not_acquired(attempt, busy, now)


async def _send_call(
    core: Core, asking: Question, call: TogetherCall, until: float
) -> tuple[AllGranted | FirstRefused, float]:
    """The reply, and when the answered request was sent."""
    reply, sent = await core.requests.ask_until_answered(asking, call.encode(), until)
    return parse_together(reply), sent


def _unregister(core: Core, attempts: Sequence[Attempt], *, undo: bool) -> None:
    """Unregister the attempts. `undo`: the server may have granted them, so undo them, too."""
    for attempt in attempts:
        if undo:
            attempt.in_doubt = True
            core.undo.add(attempt)
        core.waiters.unregister(attempt)


def _part(core: Core, attempt: Attempt) -> Part:
    """The acquire call of one resource, as its own script reads the call."""
    resource = attempt.resource
    subscribed, channel = core.server.subscription_of(resource.keys[0])
    timing = attempt.ttl_ms, attempt.handover_ttl_ms
    call = AcquireCall(attempt.token, *timing, subscribed, channel, NO_WAITING, resource.acquire_args)
    return Part(resource.script.name, len(resource.keys), call)
