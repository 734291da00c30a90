"""Waiting at a barrier, and its reset. barrier.lua decides."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

from interlock._client.error_texts import reply_error
from interlock._client.grant import Attempt
from interlock._protocol.timing import HANDOVER_TTL, UNDO_GRACE
from interlock.errors import AcquireTimeout, BrokenBarrier, LockError
from interlock.primitives.codes import GRANTED, WRONG_KIND

if TYPE_CHECKING:
    from interlock._client.core import Core
    from interlock._protocol.types import Resource


async def wait(core: Core, resource: Resource, timeout: float | None) -> int:
    """See Barrier.wait."""
    attempt = core.attempt(resource, HANDOVER_TTL, wait=timeout is None or timeout > 0)
    attempt.is_queued = attempt.event is None  # it arrives even if it can't wait, and then has to leave

    def index(attempt: Attempt, reply: Any, _sent: float) -> int:
        core.waiters.unregister(attempt)
        return int(reply[1])

    try:
        return await core.wait_until_granted(resource, index, HANDOVER_TTL, timeout, _timeout_error, attempt)
    except AcquireTimeout as error:
        passed = await _passed_unheard(core, attempt)
        if passed is None:
            raise BrokenBarrier(str(error)) from error.__cause__
        return passed


async def _passed_unheard(core: Core, attempt: Attempt) -> int | None:
    """The index of one that has passed though its time is over: the others had gone on with it, unheard. Else None."""
    resource, phase = attempt.resource, attempt.generation or "-"  # not an arrival in any case
    _, channel = core.port.subscription_of(resource.keys[0])
    args = ("acquire", attempt.token, "0", attempt.handover_ttl_ms, "0", channel, "0", *resource.acquire_args, phase)
    with contextlib.suppress(LockError):
        reply, _ = await core.request(Attempt(resource, "-", 0, None), args, core.runtime.now() + UNDO_GRACE)
        if reply[0] == GRANTED:
            return int(reply[1])
    return None


def _timeout_error(resource: Resource, timeout: float, reply: Any) -> AcquireTimeout:
    parties = str(resource.acquire_args[0])
    return AcquireTimeout(
        f"{resource}: the others did not come within {timeout:g} s, and so it is broken for all until reset(). "
        f"Of {parties} parties {reply[1]} had come when last asked"
    )


async def reset(core: Core, resource: Resource) -> None:
    """See Barrier.reset."""
    reply = await core.query(resource, "reset", f"reset/{secrets.token_hex(16)}")
    if reply[0] == WRONG_KIND:
        raise reply_error(resource, WRONG_KIND, reply)
