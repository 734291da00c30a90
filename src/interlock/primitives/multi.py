"""Several things at once, all or none: in one step of the server if they are free, else one after another.

Theory. Whoever wants several waits for them in the order of their keys. All who do so agree on that order (it is
part of the wire format), so there is no circle in which each waits for the next. Those already had are leases like
any other, renewed while the next is awaited. multi.lua is the short cut for when nothing is busy.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock._core import BUSY, GRANTED, RETRY, Attempt, Grant, Primitive, capped, unobtainable
from interlock._scripts import load
from interlock.errors import LockError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._core import Core

TRIES = 100  # steps in a row in which the server only found dead waiters to skip


class Request(NamedTuple):
    """What is asked of one of them, and how it will be held."""

    primitive: Primitive
    hold: Callable[[Grant], Any]
    ttl: float
    renews: bool
    max_hold: float | None


def multi(primitives: Sequence[Primitive]) -> Primitive:
    """All of them, as one."""
    names = ", ".join(primitive.name for primitive in primitives)
    return Primitive("multi", names, load("multi"), tuple(key for each in primitives for key in each.keys), ())


def apart(core: Core, requests: Sequence[Request]) -> bool:
    """Whether they are in several places, so that no script sees all of them."""
    return len({core.port.place(request.primitive.keys[0]) for request in requests}) > 1


async def together(core: Core, requests: Sequence[Request], until: float, leases: dict[str, Any]) -> Primitive | None:
    """The first that is busy, and then nothing is held; or None, and the lease of each is in `leases` by its name.

    Raises what would keep one from being had. The caller gives up what is in `leases` then.
    """
    whole = multi([request.primitive for request in requests])
    ttls = [each.ttl if each.max_hold is None else capped(each.ttl, each.max_hold) for each in requests]
    attempts = [core.attempt(each.primitive, ttl, wait=False) for each, ttl in zip(requests, ttls, strict=True)]
    asked = Attempt(whole, "-", min(ttls), None)
    granted = False
    try:
        for attempt in attempts:
            core.waiters.expect(attempt)  # so that closing gives back what may be on its way
        args = ("acquire", *(_acquire(core, attempt) for attempt in attempts))
        reply, sent = await core.ask(asked, args, until)
        for _ in range(TRIES):
            if reply[0] == RETRY:
                reply, sent = await core.ask(asked, args, until)
        if reply[0] != GRANTED:
            first: Request = requests[int(reply[1])]
            if reply[0] not in {BUSY, RETRY}:
                raise unobtainable(first.primitive, reply[0], reply[2])
            _leave(core, attempts, undo=asked.in_doubt)  # also if it was refused when it was asked again
            return first.primitive
        granted = True
        for request, attempt, (_, fence) in zip(requests, attempts, reply[1:], strict=True):
            attempt.in_doubt = asked.in_doubt
            lease = core.hold(attempt, fence, sent, request.hold, renews=request.renews, max_hold=request.max_hold)
            if lease is None:
                raise Unavailable(f"{whole}: {core.port.shown} answers too late for a lease of {attempt.ttl:g} s")
            leases[request.primitive.name] = lease
        return None  # noqa: TRY300 (what follows is for those who got nothing)
    except BaseException as error:
        _leave(core, attempts, undo=granted or asked.in_doubt or not isinstance(error, LockError))
        raise


def _leave(core: Core, attempts: Sequence[Attempt], *, undo: bool) -> None:
    """They wait no more; `undo`: they may have been granted."""
    for attempt in attempts:
        if undo:
            attempt.in_doubt = True
            core.undo.add(attempt)
        core.waiters.leave(attempt)


def _acquire(core: Core, attempt: Attempt) -> str:
    """The request of one, as its own script knows it."""
    primitive = attempt.primitive
    ttl_ms = str(int(attempt.ttl * 1000))
    ear = core.port.ear(primitive.keys[0])
    words = ("acquire", attempt.token, ttl_ms, attempt.life_ms, *ear, "0", *primitive.terms)
    return json.dumps([primitive.script.name, len(primitive.keys), *words])
