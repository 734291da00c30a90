"""What type checkers say of users' code: never run, checked by mypy and pyright in `scripts/check`."""

from __future__ import annotations

import asyncio
import threading
from typing import assert_type

from interlock import Interlock, Leader, Leadership, Lease, MultiLease, Ran, Skipped
from interlock import aio as ilock

locks = Interlock("redis://localhost:6379/0")


@locks.lock("report")
def plain(x: int) -> str:
    """Under a lock."""
    return str(x)


@locks.synchronized("report:{x}")
def waiting(x: int) -> str:
    """Under the lock of its argument."""
    return str(x)


@locks.synchronized("report:{x}", busy="skip")
def skipping(x: int) -> str:
    """Skipped when busy."""
    return str(x)


@locks.once("nightly", at_most=60)
def nightly(x: int) -> str:
    """On one machine only."""
    return str(x)


assert_type(plain(1), str)
assert_type(waiting(1), str)
assert_type(skipping(1), str | Skipped)
assert_type(nightly(1), Ran[str] | Skipped)
if result := nightly(1):
    assert_type(result, Ran[str])

with locks.lock("a", ttl=5, timeout=None) as lease:
    assert_type(lease, Lease)
    assert_type(lease.lost, threading.Event)
    assert_type(lease.ended, threading.Event)
with locks.multi(locks.lock("a"), locks.semaphore("b", 2), locks.rwlock("c").read()) as several:
    assert_type(several, MultiLease)
    assert_type(several.ended, threading.Event)
    assert_type(several.fence["a"], int)
with locks.election("a") as leading:
    assert_type(leading, Leadership)
    assert_type(leading.term, int)
assert_type(locks.election("a").run(lambda led: led.term, stop=threading.Event()), int | None)
for leader in locks.election("a").observe():
    assert_type(leader, Leader | None)
assert_type(locks.lock("a").try_acquire(), Lease | None)
assert_type(locks.barrier("a", 2).wait(), int)
locks.rlock("a", ttl="5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
locks.multi(locks.latch("a", 1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def use() -> None:
    """The same for asyncio."""
    others = ilock.Interlock("redis://localhost:6379/0")

    @others.synchronized("report:{x}")
    async def report(x: int) -> str:
        return str(x)

    @others.once("nightly", at_most=60)
    async def once(x: int) -> str:
        return str(x)

    assert_type(await report(1), str)
    assert_type(await asyncio.create_task(report(1)), str)
    assert_type(await once(1), Ran[str] | Skipped)
    async with others.election("a") as led:
        assert_type(led, ilock.Leadership)
        assert_type(led.ended, asyncio.Event)

    async def lead(led: ilock.Leadership) -> int:
        return led.term

    assert_type(await others.election("a").run(lead, stop=asyncio.Event()), int | None)
    async for seen in others.election("a").observe():
        assert_type(seen, Leader | None)
