"""The permits of a semaphore: how many are free, and the limit."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from interlock._client.error_texts import about, reply_error
from interlock._client.inspecting import inspect
from interlock.errors import ConfigError
from interlock.primitives.messages import OperationReply
from interlock.primitives.permits import (
    HoldersCall,
    HoldersReply,
    LimitCall,
    _checked_limit,
    parse_state,
    permit_args,
)

if TYPE_CHECKING:
    from interlock._client.acquiring import Core
    from interlock._protocol.resource import Resource


HOLDERS_BATCH: Final = 500  # holders in one reply; more than get a lease, or renew theirs, in one millisecond


async def every_holder(core: Core, resource: Resource) -> list[bytes]:
    """The tokens of all holders, asked for in batches, so that no request blocks the server for long.

    Each holder is in at least one batch, even if its lease is renewed meanwhile: its end only moves to a later time.
    """
    found: dict[bytes, None] = {}
    from_ms = 0
    while True:
        call = HoldersCall(str(from_ms), str(HOLDERS_BATCH))
        tokens, last_end_ms = HoldersReply.parse(await core.requests.query(resource, *call.encode()))
        found.update(dict.fromkeys(tokens))
        if len(tokens) < HOLDERS_BATCH:
            return list(found)
        from_ms = max(last_end_ms, from_ms + 1)


async def available(core: Core, resource: Resource) -> int:
    """See Semaphore.available."""
    state = parse_state(resource.name, await inspect(core, resource, "1"))
    return max(0, (state.limit or int(permit_args(resource).limit)) - state.used)


async def set_limit(core: Core, resource: Resource, limit: object) -> Resource:
    """See Semaphore.set_limit."""
    try:
        number = _checked_limit(resource.name, limit)
    except ConfigError as error:
        raise about(resource, error) from None
    wanted = permit_args(resource)._replace(limit=str(number))
    call = LimitCall(f"limit/{secrets.token_hex(16)}", wanted.kind, wanted.limit)
    refusal, _ = OperationReply.parse(await core.requests.query(resource, *call.encode()))
    if refusal:
        raise reply_error(resource, refusal)
    return resource._replace(acquire_args=wanted)
