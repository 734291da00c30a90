"""The flash sale's ladder: the recipes people write to keep two buyers apart, from none at all to interlock.

Each is one attempt to buy, as one meets it in code bases and tutorials: take the lock, sell, release. It returns False
when the tickets are sold out. All of them wait by `buyer.wait`, sell by `buyer.sell` and free by `buyer.delete`, which
does what `DEL` does; what differs is what they say to the server, and where they forget to.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from interlock.cli.demo.recipe import Ladder
from interlock.cli.demo.scenario import LOOK_UP
from interlock.errors import AcquireTimeout, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock import Lease
    from interlock.cli.demo.flash_sale import Buyer

__all__ = ["RECIPES"]

RECIPES: Ladder[Callable[[Buyer], bool]] = Ladder()


@RECIPES.rung(
    "no-lock",
    "read, then write",
    sign="twice",
    flaw="nobody waits: a ticket was sold again ({twice}x)",
)
def _no_lock(buyer: Buyer) -> bool:
    buyer.enter()
    return buyer.sell()


@RECIPES.rung(
    "process-lock",
    "threading.Lock",
    sign="twice",
    flaw="other processes do not wait: a ticket was sold again ({twice}x)",
)
def _process_lock(buyer: Buyer) -> bool:
    buyer.wait(lambda: buyer.scene.local.acquire(blocking=False))
    try:
        return buyer.sell()
    finally:
        buyer.scene.local.release()


@RECIPES.rung(
    "setnx",
    "SETNX, DEL",
    sign="endless",
    flaw="the holder crashed, its lock never ends: {left} buyers gave up",
)
def _setnx(buyer: Buyer) -> bool:
    buyer.wait(lambda: buyer.ask("SETNX", buyer.lock, buyer.token))
    return _sell_and_delete(buyer)


@RECIPES.rung(
    "setnx-expire",
    "SETNX, EXPIRE, DEL",
    sign="endless",
    flaw="crashed between the two, so the lock never ends: {left} buyers gave up",
)
def _setnx_expire(buyer: Buyer) -> bool:
    buyer.wait(lambda: buyer.ask("SETNX", buyer.lock, buyer.token))
    buyer.ask("PEXPIRE", buyer.lock, buyer.ttl_ms)
    return _sell_and_delete(buyer)


@RECIPES.rung(
    "ttl-repair",
    "the same, and who waits repairs: if not TTL, EXPIRE",
    sign="endless",
    flaw="a lock without end has TTL -1, which is true: no repair, {left} buyers gave up",
)
def _ttl_repair(buyer: Buyer) -> bool:
    def take() -> bool:
        if buyer.ask("SETNX", buyer.lock, buyer.token):
            return True
        if not buyer.ask("PTTL", buyer.lock):
            buyer.ask("PEXPIRE", buyer.lock, buyer.ttl_ms)
        return False

    buyer.wait(take)
    buyer.ask("PEXPIRE", buyer.lock, buyer.ttl_ms)
    return _sell_and_delete(buyer)


@RECIPES.rung(
    "set-del",
    "SET NX EX, DEL",
    sign="freed",
    flaw="DEL came after the TTL and freed another's lock ({freed}x)",
)
def _set_del(buyer: Buyer) -> bool:
    _take(buyer)
    return _sell_and_delete(buyer)


@RECIPES.rung(
    "get-del",
    "SET NX EX token; GET, compare, DEL",
    sign="freed",
    flaw="the TTL ran out between GET and DEL: another's lock was freed ({freed}x)",
)
def _get_del(buyer: Buyer) -> bool:
    _take(buyer)
    try:
        return buyer.sell()
    finally:
        if buyer.ask("GET", buyer.lock) == buyer.token:
            buyer.point("releasing")
            buyer.delete()


@RECIPES.rung(
    "bytes-str",
    "the same, comparing bytes with str",
    sign="kept",
    flaw="b'1' == '1' is False: nothing was released ({kept}x), all waited for the TTL",
)
def _bytes_str(buyer: Buyer) -> bool:
    token = buyer.token.decode()
    _take(buyer)
    try:
        return buyer.sell()
    finally:
        if buyer.ask("GET", buyer.lock) == token:
            buyer.point("releasing")
            buyer.delete()


@RECIPES.rung(
    "no-finally",
    "SET NX EX token, compare-and-DEL in Lua, in a decorator without finally",
    sign="kept",
    flaw="an exception skipped the release ({kept}x), all waited for the TTL",
)
def _no_finally(buyer: Buyer) -> bool:
    _take(buyer)
    sold = buyer.sell()
    _compare_and_delete(buyer)
    return sold


@RECIPES.rung(
    "early-return",
    "the same with finally, but 'if sold out: return' comes before the try",
    sign="kept",
    flaw="sold out, and still locked ({kept}x): the next waited for the TTL, {left} gave up",
)
def _early_return(buyer: Buyer) -> bool:
    _take(buyer)
    if buyer.stock() <= 0:
        return False
    try:
        return buyer.sell()
    finally:
        _compare_and_delete(buyer)


@RECIPES.rung(
    "lua",
    "SET NX EX token, compare-and-DEL in Lua: right but for the TTL",
    sign="late",
    flaw="freed only its own, but work outlasted the TTL and was written all the same ({late}x)",
)
def _lua(buyer: Buyer) -> bool:
    _take(buyer)
    try:
        return buyer.sell()
    finally:
        _compare_and_delete(buyer)


@RECIPES.rung("interlock", "a lease that renews itself, and writes that the server checks")
def _interlock(buyer: Buyer) -> bool:
    lock = buyer.scene.locks.lock("tickets", ttl=buyer.trial.ttl)

    def take() -> Lease | None:
        try:
            return lock.acquire(timeout=LOOK_UP)
        except AcquireTimeout:
            return None

    sold = None
    try:
        with buyer.wait(take) as lease:
            # The server writes only if the lease is still ours: no clock, and no pause, comes between.
            sold = buyer.sell(functools.partial(lease.execute, keys=[buyer.trial.shop]))
            buyer.point("releasing")
    except LeaseLost:
        if sold is None:
            buyer.note("refused")
    return sold is not False


def _take(buyer: Buyer) -> None:
    buyer.wait(lambda: buyer.ask("SET", buyer.lock, buyer.token, "NX", "PX", buyer.ttl_ms))


def _sell_and_delete(buyer: Buyer) -> bool:
    try:
        return buyer.sell()
    finally:
        buyer.point("releasing")
        buyer.delete()


def _compare_and_delete(buyer: Buyer) -> None:
    buyer.point("releasing")
    script = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0"
    buyer.ask("EVAL", script, 1, buyer.lock, buyer.token)
