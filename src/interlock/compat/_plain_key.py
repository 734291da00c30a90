"""Acquires and releases a plain key, the lock of another library. plain_key.lua decides.

Rules. (1) The client undoes every attempt that ends without the key, as for each primitive. (2) An attempt that got the
key, and of which another copy may be on its way, leaves a tombstone before its caller goes on: nobody sends a release
of that attempt later, since the caller releases by the value.
"""

from __future__ import annotations

import secrets
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from interlock._client.grant import NO_LEASE, AcquireOptions, Attempt, tombstone_ms
from interlock._protocol.names import duration, keys_of
from interlock._protocol.types import Resource
from interlock.errors import AcquireTimeout, Unavailable
from interlock.primitives.messages import ReleaseCall, ReleaseReply, encode_release
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from interlock._client.core import Core

# Not those of a lock() of the same name, which would take the record for one of its own kind.
COMPANIONS: Final = ("plain-record", "plain-queue", "plain-waiters", "plain-gone")
NO_TTL_MS: Final = "0"
UNDO_FOR: Final = 86400.0  # seconds for which the client repeats the undo of a key that has no ttl
MIN_TTL: Final = 0.001  # seconds: the server counts in ms


# The words of a release that say whose key it deletes: see plain_key.lua.
BY_ATTEMPT, BY_VALUE, ANY, NONE = "attempt", "value", "any", "none"


@lru_cache(maxsize=1024)
def plain_key_resource(key: str) -> Resource:
    """Make the resource of this key. Raises ConfigError."""
    checked, keys = keys_of(key, "", COMPANIONS)
    return Resource("lock", checked, load("plain_key", "interlock.compat"), keys)


@lru_cache(maxsize=256)
def options_of(ttl: float | None, what: str) -> AcquireOptions:
    """How a plain key is acquired. `ttl` is in seconds, None is none; `what`: its name there. Raises ConfigError."""
    if ttl is None:
        options = AcquireOptions(UNDO_FOR)
        options.ttl_ms = NO_TTL_MS
        return options
    return AcquireOptions(duration(ttl, what, minimum=MIN_TTL))


async def acquire(
    core: Core, resource: Resource, options: AcquireOptions, value: bytes, timeout: float | None, poll: float
) -> bool:
    """Acquire the key with this value. Returns False if another has it after `timeout` seconds.

    `timeout`: None waits for ever, 0 does not wait. `poll`: seconds between two looks at a key that a client of the
    other library has. Raises Unavailable or ConfigError.
    """
    poll_ms = str(max(1, int(duration(poll, "sleep") * 1000)))
    mine = resource._replace(acquire_args=(value, poll_ms), release_args=(value, BY_ATTEMPT))
    attempt = core.attempt(mine, options, timeout)
    try:
        await core.acquire(attempt)
    except AcquireTimeout:
        return False
    except Unavailable:
        if not timeout or timeout >= core.try_for:
            raise
        # The timeout of the other library bounds its waiting, and not how late an answer may be.
        return await acquire(core, resource, options, value, 0.0, poll)
    if attempt.in_doubt:
        await _settle(core, attempt)
    return True


async def _settle(core: Core, attempt: Attempt) -> None:
    """Make sure that a late copy of the acquire takes nothing. The key stays the attempt's."""
    call = ReleaseCall(attempt.token, tombstone_ms(attempt), ("", NONE))
    try:
        await core.query(attempt.resource, *call.encode())
    except BaseException:
        core.undo.add(attempt)
        raise


async def release(
    core: Core, resource: Resource, value: bytes, *, whose: str = BY_VALUE, repeat_for: AcquireOptions | None = None
) -> bool:
    """Release the key if it has this value, and wake the next waiter. Returns whether it had this value.

    `repeat_for`: if the call ends without a reply, the release goes on in the background as long as a key with these
    options may last. Only for a value that nobody acquires again. Raises Unavailable or ConfigError.
    """
    token = f"release/{secrets.token_hex(16)}"
    attempt = Attempt(resource, token, repeat_for or NO_LEASE, release_args=(value, whose))
    until = core.runtime.now() + core.patient_timeout
    was_ours, ask_again = False, 1
    try:
        while ask_again:  # one script call drops only a limited number of dead waiters
            raw, _ = await core.request(attempt, encode_release(token, "0", attempt.release_args), until)
            reply = ReleaseReply.parse(raw)
            was_ours |= bool(reply.was_ours)
            ask_again = reply.ask_again
    except BaseException:
        if repeat_for is not None:
            core.undo.add(attempt)
        raise
    # A copy of the request that got no reply may have released the key before the copy that got this one.
    return was_ours or attempt.in_doubt
