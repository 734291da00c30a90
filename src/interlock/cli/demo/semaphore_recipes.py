"""The recipes of the API limit: how people let five in at a time, from no limit at all to interlock.

Each recipe tries once to take a permit, and may wait in the server for it. It returns the permit, or None if it got
none. The sorted sets are those of "Redis in Action" (6.3 and 11.2.3), which many code bases still use: the set has an
identifier for each permit, with the time at which the caller took it, and each new caller removes the identifiers that
are older than the timeout.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from interlock.cli.demo.api_limit import Permit
from interlock.cli.demo.recipe import Recipes
from interlock.errors import AcquireTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.cli.demo.api_limit import Caller

__all__ = ["SEMAPHORE_RECIPES"]


SEMAPHORE_RECIPES: Recipes[Callable[[Caller], Permit | None]] = Recipes()


@SEMAPHORE_RECIPES.recipe(
    "no-limit",
    "just call",
    event="too_many",
    flaw="no caller waits: called a full API ({too_many}x)",
)
def _no_limit(_: Caller) -> Permit:
    return Permit(lambda: None)


@SEMAPHORE_RECIPES.recipe(
    "process-limit",
    "threading.Semaphore",
    event="too_many",
    flaw="each process counts only itself: called a full API ({too_many}x)",
)
def _process_limit(caller: Caller) -> Permit | None:
    local = caller.context.local_lock
    return Permit(local.release) if local.acquire(blocking=False) else None


@SEMAPHORE_RECIPES.recipe(
    "incr-decr",
    "INCR; above the limit, and when done, DECR",
    event="leaked",
    flaw="a caller crashed before DECR: permits lost for good ({leaked}x)",
)
def _incr_decr(caller: Caller) -> Permit | None:
    release = functools.partial(caller.execute, "DECR", caller.lock)
    if caller.execute("INCR", caller.lock) <= caller.limit:
        return Permit(release)
    release()
    return None


@SEMAPHORE_RECIPES.recipe(
    "token-list",
    "a list of tokens: BLPOP, RPUSH",
    event="leaked",
    flaw="a caller crashed with a token: permits lost for good ({leaked}x)",
)
def _token_list(caller: Caller) -> Permit | None:
    tokens = f"{caller.lock}:tokens"
    if caller.execute("SET", caller.lock, "made", "NX"):
        caller.execute("RPUSH", tokens, *range(caller.limit))
    if caller.timeout:
        popped = caller.execute("BLPOP", tokens, caller.timeout)
        token = popped and popped[1]
    else:
        token = caller.execute("LPOP", tokens)
    return token and Permit(functools.partial(caller.execute, "RPUSH", tokens, token))


@SEMAPHORE_RECIPES.recipe(
    "one-set",
    "a sorted set by the client's time, ZRANK < limit",
    event="by_rank",
    flaw="a slow clock ranks first: called a full API ({by_rank}x)",
)
def _one_set(caller: Caller) -> Permit | None:
    since, now = time.monotonic(), caller.now()
    caller.inject_at("taking")
    _, _, rank, size = caller.connection.transaction(
        ("ZREMRANGEBYSCORE", caller.lock, "-inf", now - caller.scenario.ttl),
        ("ZADD", caller.lock, now, caller.token),
        ("ZRANK", caller.lock, caller.token),
        ("ZCARD", caller.lock),  # only for the result
    )
    if rank < caller.limit:
        return Permit(functools.partial(_remove, caller, since, caller.lock), by_rank=size > caller.limit)
    caller.execute("ZREM", caller.lock, caller.token)
    return None


@SEMAPHORE_RECIPES.recipe(
    "two-sets",
    "the same, ranked by a counter (INCR) in a second set",
    event="by_rank",
    flaw="INCR early, ZADD late: called a full API ({by_rank}x)",
)
def _two_sets(caller: Caller) -> Permit | None:
    owners, counter = f"{caller.lock}:owner", f"{caller.lock}:counter"
    since, now = time.monotonic(), caller.now()
    _, _, number = caller.connection.transaction(
        ("ZREMRANGEBYSCORE", caller.lock, "-inf", now - caller.scenario.ttl),
        ("ZINTERSTORE", owners, 2, owners, caller.lock, "WEIGHTS", 1, 0),
        ("INCR", counter),
    )
    caller.inject_at("taking")
    _, _, rank, size = caller.connection.transaction(
        ("ZADD", caller.lock, now, caller.token),
        ("ZADD", owners, number, caller.token),
        ("ZRANK", owners, caller.token),
        ("ZCARD", owners),  # only for the result
    )
    if rank < caller.limit:
        return Permit(functools.partial(_remove, caller, since, caller.lock, owners), by_rank=size > caller.limit)
    caller.connection.transaction(("ZREM", caller.lock, caller.token), ("ZREM", owners, caller.token))
    return None


@SEMAPHORE_RECIPES.recipe(
    "lua",
    "one set, ZCARD < limit in Lua, by the client's time",
    event="stolen",
    flaw="a fast clock removed permits that were in use ({stolen}x)",
)
def _lua(caller: Caller) -> Permit | None:
    since, now = time.monotonic(), caller.now()
    caller.inject_at("taking")
    return _take_by_script(caller, since, now, "")


@SEMAPHORE_RECIPES.recipe(
    "lua-time",
    "the same by the server's TIME: right but for the TTL",
    event="past_ttl",
    flaw="calls outlasted the TTL, and others got their permits ({past_ttl}x)",
)
def _lua_time(caller: Caller) -> Permit | None:
    return _take_by_script(caller, time.monotonic(), 0, "local t = redis.call('TIME'); now = t[1] + t[2] / 1e6 ")


@SEMAPHORE_RECIPES.recipe("interlock", "permits that renew themselves, requests under a lease")
def _interlock(caller: Caller) -> Permit | None:
    permits = caller.context.locks.semaphore("permits", caller.limit, ttl=caller.scenario.ttl)
    try:
        lease = permits.acquire(timeout=caller.timeout)
    except AcquireTimeout:
        return None
    # The server logs a request only if this lease still holds its permit: one atomic step, which no pause can divide.
    return Permit(lease.release, functools.partial(lease.execute, keys=[caller.scenario.api]))


def _take_by_script(caller: Caller, since: float, now: float, server_time: str) -> Permit | None:
    script = f"""
        local now = tonumber(ARGV[1]) {server_time}
        redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
        return redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[3]) and redis.call('ZADD', KEYS[1], now, ARGV[4])"""
    if caller.execute("EVAL", script, 1, caller.lock, now, caller.scenario.ttl, caller.limit, caller.token):
        return Permit(functools.partial(_remove, caller, since, caller.lock))
    return None


def _remove(caller: Caller, since: float, *sets: str) -> None:
    """Remove the permit with ZREM; if it was no longer in the set, count why."""
    if not caller.connection.transaction(*[("ZREM", each, caller.token) for each in sets])[0]:
        caller.count_event("past_ttl" if time.monotonic() - since > caller.scenario.ttl else "stolen")
