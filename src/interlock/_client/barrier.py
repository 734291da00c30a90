"""Waiting at a barrier, and resetting a barrier. barrier.lua decides."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from interlock._client.error_texts import about, reply_error
from interlock._client.grant import NO_LEASE, Attempt
from interlock._client.retries import Question
from interlock._protocol.timing import UNDO_GRACE
from interlock.errors import AcquireTimeout, BrokenBarrier, LockError
from interlock.primitives.barrier import ResetCall
from interlock.primitives.messages import AcquireCall, Granted, OperationReply, parse_acquire

if TYPE_CHECKING:
    from interlock._client.acquiring import Core
    from interlock._protocol.resource import Resource
    from interlock.primitives.messages import Busy, Queued


async def wait(core: Core, resource: Resource, timeout: float | None) -> int:
    """See Barrier.wait."""
    attempt = core.attempt(resource, NO_LEASE, timeout, busy=_timeout_error)
    attempt.is_queued = attempt.event is None  # the attempt arrives even if it can't wait, so it may need an undo
    try:
        return await core.acquire(attempt)  # type: ignore[no-any-return]
    except AcquireTimeout as error:
        passed = await _passed_unnoticed(core, attempt)
        if passed is None:
            raise about(resource, BrokenBarrier(str(error))) from error.__cause__
        return passed


async def _passed_unnoticed(core: Core, attempt: Attempt) -> int | None:
    """The index of a timed-out attempt that the barrier had let pass, by a push that the client missed; else None."""
    resource, generation = attempt.resource, attempt.generation or "-"  # "-": never counted as an arrival
    _, channel = core.server.subscription_of(resource.keys[0])
    own = (*resource.acquire_args, generation)
    call = AcquireCall(attempt.token, "0", attempt.handover_ttl_ms, "0", channel, "0", own)
    with contextlib.suppress(LockError):
        reply, _ = await core.requests.ask_until_answered(
            Question(resource), call.encode(), core.runtime.now() + UNDO_GRACE
        )
        match parse_acquire(reply):
            case Granted(index):
                return index
            case _:
                pass
    return None


def _timeout_error(resource: Resource, timeout: float, reply: Queued | Busy) -> AcquireTimeout:
    parties = str(resource.acquire_args[0])
    error = AcquireTimeout(
        f"{resource}: not all parties arrived within {timeout:g} s, so it is broken for all of them until reset(). "
        f"{reply.tally} of {parties} parties had arrived when last asked"
    )
    error.waited = timeout
    return about(resource, error)


async def reset(core: Core, resource: Resource) -> None:
    """See Barrier.reset."""
    call = ResetCall(f"reset/{secrets.token_hex(16)}")
    refusal, _ = OperationReply.parse(await core.requests.query(resource, *call.encode()))
    if refusal:
        raise reply_error(resource, refusal)
