"""Counting a latch down, and waiting until the latch is open. latch.lua decides."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from interlock._client.error_texts import about, reply_error
from interlock._client.grant import NO_LEASE
from interlock._client.inspecting import inspect
from interlock._protocol.names import positive_int
from interlock.errors import AcquireTimeout
from interlock.primitives.codes import LIMIT_MISMATCH
from interlock.primitives.latch import MAX_COUNT, CountCall, LatchInspect
from interlock.primitives.messages import OperationReply, Refused

if TYPE_CHECKING:
    from interlock._client.acquiring import Core
    from interlock._protocol.resource import Resource
    from interlock.primitives.messages import Busy, Queued


async def count_down(core: Core, resource: Resource, by: object) -> int:
    """See Latch.count_down."""
    number = positive_int(by, "n of count_down()", resource, MAX_COUNT)
    call = CountCall(f"count/{secrets.token_hex(16)}", str(number), resource.acquire_args)
    refusal, left = OperationReply.parse(await core.requests.query(resource, *call.encode()))
    if refusal:
        raise reply_error(resource, refusal)
    return left


async def count(core: Core, resource: Resource) -> int:
    """See Latch.count."""
    found = LatchInspect.parse(await inspect(core, resource, "1"))
    own = int(resource.acquire_args[0])
    if found.generation and not found.why and found.counts_from != own:
        raise reply_error(resource, Refused(LIMIT_MISMATCH, found.counts_from))
    return found.left if found.generation else own


async def wait(core: Core, resource: Resource, timeout: float | None) -> None:
    """See Latch.wait."""
    await core.acquire(core.attempt(resource, NO_LEASE, timeout, busy=_timeout_error))


def _timeout_error(resource: Resource, timeout: float, reply: Queued | Busy) -> AcquireTimeout:
    text = (
        f"{resource} did not open within {timeout:g} s: {reply.tally} have yet to count down. Wait longer, or see "
        ".inspect()"
    )
    error = about(resource, AcquireTimeout(text))
    error.waited = timeout
    return error
