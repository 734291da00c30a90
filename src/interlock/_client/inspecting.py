"""Asking what the server has under a name, if that is of the kind that the caller means.

A person who looks at a name, or revokes it, may mean another kind than the one that uses it. Each kind has a record
under the same key, and the second word of the record is the kind.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from interlock._client.error_texts import is_of_another_kind, reply_error
from interlock.errors import ConfigError, Unavailable
from interlock.primitives.codes import WRONG_KIND
from interlock.primitives.kind import KindCall, KindReply, kind_resource
from interlock.primitives.kinds import kind_named
from interlock.primitives.messages import InspectCall, Refused

if TYPE_CHECKING:
    from interlock._client.acquiring import Core
    from interlock._protocol.resource import Resource


async def inspect(core: Core, resource: Resource, max_waiters: str) -> Any:
    """The reply to `inspect`. Raises ConfigError if the name is in use as another kind of synchronizer."""
    try:
        reply = await core.requests.query(resource, *InspectCall(max_waiters).encode())
    except ConfigError as error:
        if "WRONGTYPE" in str(error) and not core.server.is_quorum:
            await _raise_for_other_kind(core, resource)
        raise
    record = kind_named(resource.kind).record_in(reply)
    if record and is_of_another_kind(resource, record):
        raise reply_error(resource, Refused(WRONG_KIND, record))
    return reply


async def kind_of(core: Core, name: str, prefix: str) -> KindReply:
    """What the server has under a name of which the caller does not know the kind. Raises Unavailable or ConfigError.

    On a quorum, what most servers have that know the name.
    """
    return KindReply.parse(await core.requests.query(kind_resource(name, prefix), *KindCall().encode()))


async def _raise_for_other_kind(core: Core, resource: Resource) -> None:
    """Raise a ConfigError that names the kind that uses this name, if its record says one."""
    with contextlib.suppress(Unavailable):
        found = await kind_of(core, resource.name, resource.prefix)
        if is_of_another_kind(resource, found.record):
            raise reply_error(resource, Refused(WRONG_KIND, found.record))
