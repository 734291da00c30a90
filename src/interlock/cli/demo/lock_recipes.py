"""The recipes of the flash sale: how people exclude a second buyer, from no lock at all to interlock.

Each recipe is one attempt to buy, as it stands in code bases and tutorials: take the lock, sell, release. It returns
False if the tickets are sold out. Recipes wait with `buyer.wait`, sell with `buyer.sell`, and send `DEL` with
`buyer.delete`. They differ in the commands that they send, and in those that they forget.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from interlock.cli.demo.recipe import Recipes
from interlock.cli.demo.scenario import CLOSED_CHECK_INTERVAL
from interlock.errors import AcquireTimeout, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock import Lease
    from interlock.cli.demo.flash_sale import Buyer

__all__ = ["LOCK_RECIPES"]

LOCK_RECIPES: Recipes[Callable[[Buyer], bool]] = Recipes()


@LOCK_RECIPES.recipe(
    "no-lock",
    "read, then write",
    event="sold_twice",
    flaw="no buyer waits: a ticket was sold again ({sold_twice}x)",
)
def _no_lock(buyer: Buyer) -> bool:
    buyer.enter()
    return buyer.sell()


@LOCK_RECIPES.recipe(
    "process-lock",
    "threading.Lock",
    event="sold_twice",
    flaw="other processes do not wait: a ticket was sold again ({sold_twice}x)",
)
def _process_lock(buyer: Buyer) -> bool:
    buyer.wait(lambda: buyer.context.local_lock.acquire(blocking=False))
    try:
        return buyer.sell()
    finally:
        buyer.context.local_lock.release()


@LOCK_RECIPES.recipe(
    "setnx",
    "SETNX, DEL",
    event="no_ttl",
    flaw="the holder crashed, and its lock never expires: {gave_up} buyers gave up",
)
def _setnx(buyer: Buyer) -> bool:
    buyer.wait(lambda: buyer.execute("SETNX", buyer.lock, buyer.token))
    return _sell_and_delete(buyer)


@LOCK_RECIPES.recipe(
    "setnx-expire",
    "SETNX, EXPIRE, DEL",
    event="no_ttl",
    flaw="the holder crashed between the two, so the lock never expires: {gave_up} buyers gave up",
)
def _setnx_expire(buyer: Buyer) -> bool:
    buyer.wait(lambda: buyer.execute("SETNX", buyer.lock, buyer.token))
    buyer.execute("PEXPIRE", buyer.lock, buyer.ttl_ms)
    return _sell_and_delete(buyer)


@LOCK_RECIPES.recipe(
    "ttl-repair",
    "the same, and a waiter repairs: if not TTL, EXPIRE",
    event="no_ttl",
    flaw="a lock that never expires has TTL -1, which is true: no repair, {gave_up} buyers gave up",
)
def _ttl_repair(buyer: Buyer) -> bool:
    def take() -> bool:
        if buyer.execute("SETNX", buyer.lock, buyer.token):
            return True
        if not buyer.execute("PTTL", buyer.lock):
            buyer.execute("PEXPIRE", buyer.lock, buyer.ttl_ms)
        return False

    buyer.wait(take)
    buyer.execute("PEXPIRE", buyer.lock, buyer.ttl_ms)
    return _sell_and_delete(buyer)


@LOCK_RECIPES.recipe(
    "set-del",
    "SET NX EX, DEL",
    event="freed_other",
    flaw="DEL ran after the TTL and freed another buyer's lock ({freed_other}x)",
)
def _set_del(buyer: Buyer) -> bool:
    _take(buyer)
    return _sell_and_delete(buyer)


@LOCK_RECIPES.recipe(
    "get-del",
    "SET NX EX token; GET, compare, DEL",
    event="freed_other",
    flaw="the TTL ran out between GET and DEL: DEL freed another buyer's lock ({freed_other}x)",
)
def _get_del(buyer: Buyer) -> bool:
    _take(buyer)
    try:
        return buyer.sell()
    finally:
        if buyer.execute("GET", buyer.lock) == buyer.token:
            buyer.inject_at("releasing")
            buyer.delete()


@LOCK_RECIPES.recipe(
    "bytes-str",
    "the same, comparing bytes with str",
    event="not_released",
    flaw="b'1' == '1' is False: the lock was not released ({not_released}x), all waited for the TTL",
)
def _bytes_str(buyer: Buyer) -> bool:
    token = buyer.token.decode()
    _take(buyer)
    try:
        return buyer.sell()
    finally:
        if buyer.execute("GET", buyer.lock) == token:
            buyer.inject_at("releasing")
            buyer.delete()


@LOCK_RECIPES.recipe(
    "no-finally",
    "SET NX EX token, compare-and-DEL in Lua, in a decorator without finally",
    event="not_released",
    flaw="an exception skipped the release ({not_released}x), all waited for the TTL",
)
def _no_finally(buyer: Buyer) -> bool:
    _take(buyer)
    sold = buyer.sell()
    _compare_and_delete(buyer)
    return sold


@LOCK_RECIPES.recipe(
    "early-return",
    "the same with finally, but 'if sold out: return' comes before the try",
    event="not_released",
    flaw="sold out and still locked ({not_released}x): the next buyer waited for the TTL, {gave_up} gave up",
)
def _early_return(buyer: Buyer) -> bool:
    _take(buyer)
    if buyer.read_stock() <= 0:
        return False
    try:
        return buyer.sell()
    finally:
        _compare_and_delete(buyer)


@LOCK_RECIPES.recipe(
    "lua",
    "SET NX EX token, compare-and-DEL in Lua: right but for the TTL",
    event="past_ttl",
    flaw="freed only its own lock, but a late buyer wrote after the TTL all the same ({past_ttl}x)",
)
def _lua(buyer: Buyer) -> bool:
    _take(buyer)
    try:
        return buyer.sell()
    finally:
        _compare_and_delete(buyer)


@LOCK_RECIPES.recipe("interlock", "a lease that renews itself, and writes that the server checks")
def _interlock(buyer: Buyer) -> bool:
    lock = buyer.context.locks.lock("tickets", ttl=buyer.scenario.ttl)

    def take() -> Lease | None:
        try:
            return lock.acquire(timeout=CLOSED_CHECK_INTERVAL)
        except AcquireTimeout:
            return None

    sold = None
    try:
        with buyer.wait(take) as lease:
            # The server writes only if this lease still holds the lock: one atomic step, which no pause can divide.
            sold = buyer.sell(functools.partial(lease.execute, keys=[buyer.scenario.shop]))
            buyer.inject_at("releasing")
    except LeaseLost:
        if sold is None:
            buyer.count_event("refused")
    return sold is not False


def _take(buyer: Buyer) -> None:
    buyer.wait(lambda: buyer.execute("SET", buyer.lock, buyer.token, "NX", "PX", buyer.ttl_ms))


def _sell_and_delete(buyer: Buyer) -> bool:
    try:
        return buyer.sell()
    finally:
        buyer.inject_at("releasing")
        buyer.delete()


def _compare_and_delete(buyer: Buyer) -> None:
    buyer.inject_at("releasing")
    script = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0"
    buyer.execute("EVAL", script, 1, buyer.lock, buyer.token)
