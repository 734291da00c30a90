"""The number of permits: how many are free, and how many there are."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from interlock._client.error_texts import reply_error
from interlock.primitives.codes import GRANTED
from interlock.primitives.permits import _checked_limit, parse_state

if TYPE_CHECKING:
    from interlock._client.core import Core
    from interlock._protocol.types import Resource


async def available(core: Core, resource: Resource) -> int:
    """See Semaphore.available."""
    now = parse_state(resource.name, await core.query(resource, "inspect", "1"))
    return max(0, (now.limit or int(resource.acquire_args[2])) - now.used)


async def set_limit(core: Core, resource: Resource, limit: object) -> Resource:
    """See Semaphore.set_limit."""
    number = _checked_limit(resource.name, limit)
    kind, wants, _, under = resource.acquire_args
    reply = await core.query(resource, "limit", f"limit/{secrets.token_hex(16)}", kind, str(number))
    if reply[0] != GRANTED:
        raise reply_error(resource, reply[0], reply)
    return resource._replace(acquire_args=(kind, wants, str(number), under))
