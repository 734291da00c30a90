"""Acquires and releases a plain key, the lock of another library. plain_key.lua decides.

Rules. (a) The client undoes every attempt that ends without the key, as for each primitive. (b) An attempt that got the
key, and of which another copy may be on its way, leaves a tombstone before its caller goes on: the release by which the
caller gives the key back leaves none.
"""

from __future__ import annotations

import secrets
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from interlock._client.grant import NO_LEASE, AcquireOptions, Attempt, tombstone_ms
from interlock._client.retries import Question
from interlock._protocol.names import duration, keys_of
from interlock._protocol.resource import Resource
from interlock.errors import AcquireTimeout, Unavailable
from interlock.primitives.messages import ReleaseCall, ReleaseReply, encode_release
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from interlock._client.acquiring import Core

# Not those of a lock() of the same name, which would take the record for one of its own kind.
COMPANIONS: Final = ("plain-record", "plain-queue", "plain-waiters", "plain-gone")
NO_TTL_MS: Final = "0"
UNDO_FOR: Final = 86400.0  # seconds for which the client repeats the undo of a key that has no ttl
MIN_TTL: Final = 0.001  # seconds: the server counts in ms


# The words of a release that say whose key it deletes: see plain_key.lua.
BY_ATTEMPT, BY_HOLDER, BY_VALUE, NOT_LEASE, ANY, NONE = "attempt", "holder", "value", "not-lease", "any", "none"


@lru_cache(maxsize=1024)
def plain_key_resource(key: str, signal: str | None = None, signal_ms: int = 0) -> Resource:
    """Make the resource of this key. Raises ConfigError.

    `signal` is the list in which the waiters of the other library block, if they do, and `signal_ms` how long an
    element lasts there.
    """
    checked, keys = keys_of(key, "", COMPANIONS)
    script = load("plain_key", "interlock.compat")
    if signal is None:
        return Resource("lock", checked, script, keys)
    return Resource("lock", checked, script, (*keys, signal), release_args=(str(signal_ms),))


@lru_cache(maxsize=256)
def options_of(ttl: float | None, what: str) -> AcquireOptions:
    """How a plain key is acquired. `ttl`: seconds, or None for none; `what`: its name in errors. Raises ConfigError."""
    if ttl is None:
        options = AcquireOptions(UNDO_FOR, polls=True)
        options.ttl_ms = NO_TTL_MS
        return options
    return AcquireOptions(duration(plain_number(ttl), what, minimum=MIN_TTL), polls=True)


def plain_number(value: Any) -> Any:
    """A number of another type (Decimal, of numpy) as a float; anything else as it is."""
    return value if isinstance(value, int | float) or not hasattr(value, "__float__") else float(value)


async def acquire(
    core: Core,
    resource: Resource,
    options: AcquireOptions,
    value: bytes,
    timeout: float | None,
    poll: float,
    *,
    is_unique: bool = False,
) -> bool:
    """Acquire the key with this value. Returns False if another has it after `timeout` seconds.

    `timeout`: None waits for ever, 0 does not wait. `poll`: seconds between two looks at a key that a client of the
    other library has. `is_unique`: nobody else acquires the key with this value. So the undo need not learn from the
    record that this attempt took the key: the record does not outlast a long silence of the server. Raises Unavailable
    or ConfigError.
    """
    poll_ms = str(max(1, int(duration(plain_number(poll), "sleep") * 1000)))
    try:
        mine = _valued(resource, value, poll_ms, BY_HOLDER if is_unique else BY_ATTEMPT)
        await _acquire(core, core.attempt(mine, options, timeout))
    except AcquireTimeout:
        return False
    except Unavailable:
        if not timeout or timeout >= core.try_for:
            raise
        # The timeout of the other library bounds its waiting, and not how late an answer may be.
        return await acquire(core, resource, options, value, 0.0, poll, is_unique=is_unique)
    return True


async def try_acquire(
    core: Core, resource: Resource, options: AcquireOptions, value: bytes, try_for: float | None = None
) -> str:
    """Acquire the key with this value, without waiting. Returns the token of the attempt, for `release`.

    `try_for`: seconds for which a server may stay away. Raises AcquireTimeout, Unavailable or ConfigError.
    """
    attempt = core.attempt(_valued(resource, value, "0"), options, 0.0, try_for=try_for)
    await _acquire(core, attempt)
    return attempt.token


def _valued(resource: Resource, value: bytes, poll_ms: str, whose: str = BY_ATTEMPT) -> Resource:
    release_args = (value, whose, *resource.release_args)
    return resource._replace(acquire_args=(value, poll_ms), release_args=release_args)


async def _acquire(core: Core, attempt: Attempt) -> None:
    await core.acquire(attempt)
    if attempt.in_doubt:
        await _settle(core, attempt)


async def _settle(core: Core, attempt: Attempt) -> None:
    """Make sure that a late copy of the acquire takes nothing. The key stays the attempt's."""
    call = ReleaseCall(attempt.token, tombstone_ms(attempt), ("", NONE, *attempt.resource.release_args[2:]))
    try:
        await core.requests.query(attempt.resource, *call.encode())
    except BaseException:
        core.undo.add(attempt)
        raise


async def release(
    core: Core,
    resource: Resource,
    value: bytes,
    *,
    whose: str = BY_VALUE,
    token: str | None = None,
) -> bool:
    """Release the key if it has this value, and wake the next waiter. Returns whether it had this value.

    `token`: of the attempt that acquired the key, if `whose` is BY_HOLDER: then a late copy of the release does not end
    a later section under the same value. Raises Unavailable or ConfigError.
    """
    token = token or f"release/{secrets.token_hex(16)}"
    args = encode_release(token, "0", (value, whose, *resource.release_args))
    asking = Question(resource)
    until = core.runtime.now() + core.patient_timeout
    was_ours, ask_again = False, 1
    while ask_again:  # one script call drops only a limited number of dead waiters
        raw, _ = await core.requests.ask_until_answered(asking, args, until)
        reply = ReleaseReply.parse(raw)
        was_ours |= bool(reply.was_ours)
        ask_again = reply.ask_again
    # A copy of the request that got no reply may have released the key before the copy that got this one.
    return was_ours or asking.in_doubt


def release_later(
    core: Core,
    resource: Resource,
    value: bytes,
    options: AcquireOptions = NO_LEASE,
    *,
    whose: str = BY_VALUE,
    token: str | None = None,
) -> None:
    """Release in the background, as long as a key with these options may last. No I/O.

    `whose` and `token` as for `release`. Without a token only for a value that nobody acquires again.
    """
    args = (value, whose, *resource.release_args)
    core.undo.add(Attempt(resource._replace(release_args=args), token or f"release/{value.hex()}", options))


async def extend(core: Core, resource: Resource, value: bytes, ttl: float, retry_for: float | None = None) -> int:
    """Set the key's ttl, in seconds, if the key has this value and a ttl.

    `retry_for`: seconds that a server may stay away. Returns GRANTED, NOT_FOUND or NO_EXPIRY. Raises Unavailable or
    ConfigError.
    """
    until = core.runtime.now() + (core.patient_timeout if retry_for is None else retry_for)
    ttl_ms = str(max(1, int(ttl * 1000)))
    reply, _ = await core.requests.ask_until_answered(Question(resource), ("extend", value, ttl_ms), until)
    code: int = reply[0]
    return code
