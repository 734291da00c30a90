"""The semaphore's ladder: the recipes people write to let five in at a time, from none at all to interlock.

Each is one try to take a permit. It returns the permit, with what gives it back, or None when there is none. The sets
are those of "Redis in Action" (6.3 and 11.2.3), and live on in many code bases: an identifier for each permit, with
the time at which it was taken, and whoever comes drops those that are older than the timeout.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.cli.demo.recipe import Ladder
from interlock.errors import AcquireTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.cli.demo.api_limit import Caller
    from interlock.cli.demo.connection import Ask

__all__ = ["SEMAPHORES", "Permit"]


@dataclass(frozen=True, slots=True)
class Permit:
    """A permit that was taken."""

    give: Callable[[], object]
    """Gives it back."""
    say: Ask | None = None
    """Says a command under this permit only, where that can be had."""
    cut: bool = False
    """Whether the set was full, and it was taken all the same, as its rank was low."""


SEMAPHORES: Ladder[Callable[[Caller], Permit | None]] = Ladder()


@SEMAPHORES.rung(
    "no-limit",
    "just call",
    sign="over",
    flaw="nobody waits: in when it was full ({over}x)",
)
def _no_limit(_: Caller) -> Permit:
    return Permit(lambda: None)


@SEMAPHORES.rung(
    "process-limit",
    "threading.Semaphore",
    sign="over",
    flaw="each process counts alone: in when it was full ({over}x)",
)
def _process_limit(caller: Caller) -> Permit | None:
    local = caller.scene.local
    return Permit(local.release) if local.acquire(blocking=False) else None


@SEMAPHORES.rung(
    "incr-decr",
    "INCR; above the limit, and when done, DECR",
    sign="leaked",
    flaw="crashed before DECR: permits gone for good ({leaked}x)",
)
def _incr_decr(caller: Caller) -> Permit | None:
    give = functools.partial(caller.ask, "DECR", caller.lock)
    if caller.ask("INCR", caller.lock) <= caller.limit:
        return Permit(give)
    give()
    return None


@SEMAPHORES.rung(
    "token-list",
    "a list of tokens: BLPOP, RPUSH",
    sign="leaked",
    flaw="crashed with a token: permits gone for good ({leaked}x)",
)
def _token_list(caller: Caller) -> Permit | None:
    tokens = f"{caller.lock}:tokens"
    if caller.ask("SET", caller.lock, "made", "NX"):
        caller.ask("RPUSH", tokens, *range(caller.limit))
    if caller.patience:
        got = caller.ask("BLPOP", tokens, caller.patience)
        token = got and got[1]
    else:
        token = caller.ask("LPOP", tokens)
    return token and Permit(functools.partial(caller.ask, "RPUSH", tokens, token))


@SEMAPHORES.rung(
    "one-set",
    "a sorted set by the client's time, ZRANK < limit",
    sign="cut",
    flaw="the earlier clock goes first: in when it was full ({cut}x)",
)
def _one_set(caller: Caller) -> Permit | None:
    since, now = time.monotonic(), caller.now()
    caller.point("taking")
    _, _, rank, size = caller.wire.together(
        ("ZREMRANGEBYSCORE", caller.lock, "-inf", now - caller.trial.ttl),
        ("ZADD", caller.lock, now, caller.token),
        ("ZRANK", caller.lock, caller.token),
        ("ZCARD", caller.lock),  # for the books
    )
    if rank < caller.limit:
        return Permit(functools.partial(_leave, caller, since, caller.lock), cut=size > caller.limit)
    caller.ask("ZREM", caller.lock, caller.token)
    return None


@SEMAPHORES.rung(
    "two-sets",
    "the same, ranked by a counter (INCR) in a second set",
    sign="cut",
    flaw="INCR early, ZADD late: in when it was full ({cut}x)",
)
def _two_sets(caller: Caller) -> Permit | None:
    owners, counter = f"{caller.lock}:owner", f"{caller.lock}:counter"
    since, now = time.monotonic(), caller.now()
    _, _, number = caller.wire.together(
        ("ZREMRANGEBYSCORE", caller.lock, "-inf", now - caller.trial.ttl),
        ("ZINTERSTORE", owners, 2, owners, caller.lock, "WEIGHTS", 1, 0),
        ("INCR", counter),
    )
    caller.point("taking")
    _, _, rank, size = caller.wire.together(
        ("ZADD", caller.lock, now, caller.token),
        ("ZADD", owners, number, caller.token),
        ("ZRANK", owners, caller.token),
        ("ZCARD", owners),  # for the books
    )
    if rank < caller.limit:
        return Permit(functools.partial(_leave, caller, since, caller.lock, owners), cut=size > caller.limit)
    caller.wire.together(("ZREM", caller.lock, caller.token), ("ZREM", owners, caller.token))
    return None


@SEMAPHORES.rung(
    "lua",
    "one set, ZCARD < limit in Lua, by the client's time",
    sign="stolen",
    flaw="a clock ahead dropped permits that were in use ({stolen}x)",
)
def _lua(caller: Caller) -> Permit | None:
    since, now = time.monotonic(), caller.now()
    caller.point("taking")
    return _by_script(caller, since, now, "")


@SEMAPHORES.rung(
    "lua-time",
    "the same by the server's TIME: right but for the TTL",
    sign="late",
    flaw="calls outlasted it, others came in beside them ({late}x)",
)
def _lua_time(caller: Caller) -> Permit | None:
    return _by_script(caller, time.monotonic(), 0, "local t = redis.call('TIME'); now = t[1] + t[2] / 1e6 ")


@SEMAPHORES.rung("interlock", "permits that renew themselves, requests under a lease")
def _interlock(caller: Caller) -> Permit | None:
    permits = caller.scene.locks.semaphore("permits", caller.limit, ttl=caller.trial.ttl)
    try:
        lease = permits.acquire(timeout=caller.patience)
    except AcquireTimeout:
        return None
    # The server notes a request only if the permit is still ours: no clock, and no pause, comes between.
    return Permit(lease.release, functools.partial(lease.execute, keys=[caller.trial.api]))


def _by_script(caller: Caller, since: float, now: float, clock: str) -> Permit | None:
    script = f"""
        local now = tonumber(ARGV[1]) {clock}
        redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
        return redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[3]) and redis.call('ZADD', KEYS[1], now, ARGV[4])"""
    if caller.ask("EVAL", script, 1, caller.lock, now, caller.trial.ttl, caller.limit, caller.token):
        return Permit(functools.partial(_leave, caller, since, caller.lock))
    return None


def _leave(caller: Caller, since: float, *sets: str) -> None:
    """ZREM; it tells whether the permit was still there, and if not, the books know why."""
    if not caller.wire.together(*[("ZREM", each, caller.token) for each in sets])[0]:
        caller.note("late" if time.monotonic() - since > caller.trial.ttl else "stolen")
