"""Counting a latch down, and waiting until it is open. latch.lua decides."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from interlock._client.error_texts import reply_error
from interlock._protocol.names import positive_int
from interlock._protocol.timing import HANDOVER_TTL
from interlock.errors import AcquireTimeout
from interlock.primitives.codes import GRANTED
from interlock.primitives.latch import MAX_COUNT

if TYPE_CHECKING:
    from interlock._client.core import Core
    from interlock._client.grant import Attempt
    from interlock._protocol.types import Resource


async def count_down(core: Core, resource: Resource, by: object) -> int:
    """See Latch.count_down."""
    number = positive_int(by, "what it counts down", resource, MAX_COUNT)
    reply = await core.query(resource, "count", f"count/{secrets.token_hex(16)}", str(number), *resource.acquire_args)
    if reply[0] != GRANTED:
        raise reply_error(resource, reply[0], reply)
    left: int = reply[1]
    return left


async def wait(core: Core, resource: Resource, timeout: float | None) -> None:
    """See Latch.wait."""

    def opened(attempt: Attempt, _reply: Any, _sent: float) -> bool:
        core.waiters.unregister(attempt)
        return True

    await core.wait_until_granted(resource, opened, HANDOVER_TTL, timeout, _timeout_error)


def _timeout_error(resource: Resource, timeout: float, reply: Any) -> AcquireTimeout:
    return AcquireTimeout(f"{resource} did not open within {timeout:g} s: {reply[1]} have yet to count down")
