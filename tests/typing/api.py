"""What type checkers say of users' code: never run, checked by mypy and pyright in `scripts/check`."""
# mypy: enable-error-code="truthy-bool"
# With that option mypy refuses `if event:` for an event that is always true.

from __future__ import annotations

import asyncio
import threading
from typing import Literal, assert_type

from interlock import (
    BarrierState,
    Interlock,
    LatchState,
    Leader,
    Leadership,
    Lease,
    LockState,
    MultiLease,
    OnceState,
    Options,
    Ran,
    ReadLock,
    SemaphoreState,
    Skipped,
    WriteLock,
)
from interlock import aio as ilock
from interlock._api import scopes
from interlock._api.threads import LeaseEvent
from interlock.testing import BreakableServer, lose_lease, pause_renewal, restart_server, server_down, server_paused

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


def name_of(x: int) -> str:
    """The name of a call."""
    return f"report:{x}"


@locks.once(name_of, at_most=60, key=lambda: "today")
def naming(x: int) -> str:
    """Each call makes its name and its key."""
    return str(x)


@locks.synchronized(name_of)
def named(x: int) -> str:
    """Under the lock that a function names."""
    return str(x)


def refused(skipped: Skipped) -> int:
    """What a busy call returns."""
    return len(skipped.name)


@locks.synchronized("report:{x}", busy=refused)
def answering(x: int) -> str:
    """A number when busy."""
    return str(x)


@locks.synchronized("report:{x}", busy=None)
def nothing(x: int) -> str:
    """None when busy."""
    return str(x)


assert_type(answering(1), str | int)
assert_type(nothing(1), str | None)
assert_type(naming(1), Ran[str] | Skipped)
assert_type(named(1), str)
assert_type(plain(1), str)
assert_type(waiting(1), str)
assert_type(skipping(1), str | Skipped)
assert_type(nightly(1), Ran[str] | Skipped)
if result := nightly(1):
    assert_type(result, Ran[str])

with locks.lock("a", ttl=5, timeout=None) as lease:
    assert_type(lease, Lease)
    assert_type(lease.lost, LeaseEvent)
    event: threading.Event = lease.ended
    if lease.lost or not lease.ended:
        assert_type(lease.lost.wait(1), bool)
with locks.multi(locks.lock("a"), locks.semaphore("b", 2), locks.rwlock("c").read()) as several:
    assert_type(several, MultiLease)
    assert_type(several.ended, LeaseEvent)
    assert_type(several.fence["a"], int)
with locks.election("a") as leading:
    assert_type(leading, Leadership)
    assert_type(leading.term, int)
assert_type(locks.election("a").run(lambda led: led.term, stop=threading.Event()), int | None)
for leader in locks.election("a").observe():
    assert_type(leader, Leader | None)
assert_type(locks.lock("a").try_acquire(), Lease | None)
assert_type(locks.barrier("a", 2).wait(), int)
assert_type(Interlock.quorum(["redis://a", "redis://b", "redis://c"]), Interlock)
assert_type(locks.lock("a").acquire(2.5), Lease)
assert_type(locks.rlock("a", owner="me", ttl=5).acquire(timeout=None).release(), bool)
assert_type(locks.semaphore("a", 3).acquire(permits=2), Lease)
locks.semaphore("a", 3).acquire(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
assert_type(locks.semaphore("a", 3).try_acquire(permits=2), Lease | None)
assert_type(locks.semaphore("a", 3).available(), int)
assert_type(locks.rwlock("a").read(), ReadLock)
assert_type(locks.rwlock("a").write(), WriteLock)
assert_type(locks.rwlock("a").write().acquire(), Lease)
assert_type(locks.multi(locks.lock("a")).acquire(0)["a"], Lease)
assert_type(locks.latch("a", 1).count_down(), int)
assert_type(locks.lock("a").inspect(), LockState)
assert_type(locks.semaphore("a", 2).inspect(), SemaphoreState)
assert_type(locks.rwlock("a").inspect(), SemaphoreState)
assert_type(locks.multi(locks.lock("a")).inspect(), dict[str, LockState | SemaphoreState])
assert_type(locks.latch("a", 1).inspect(), LatchState)
assert_type(locks.barrier("a", 2).inspect(), BarrierState)
assert_type(locks.once("a", at_most=1).inspect(), OnceState)
assert_type(locks.election("a").inspect(), LockState)
assert_type(locks.lock("a").revoke("gone", force=True), bool)
options: Options = {"ttl": 5, "on_lost": lambda lost: lost.ended.set()}
locks.rlock("a", **options)
locks.lock("a", on_lost=lambda lost: lost.ended.set())


def lost_elsewhere(lost: ilock.Lease) -> None:
    """Of the other mode."""
    lost.ended.set()


locks.lock("a", on_lost=lost_elsewhere)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
locks.lock("a").acquire("5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
locks.lock("a").acquire(permits=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
locks.semaphore("a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
locks.multi(locks.election("a"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
locks.barrier("a", 2).wait(within=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
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

    async def arefused(skipped: Skipped) -> int:
        return len(skipped.name)

    @others.synchronized("report:{x}", busy=arefused)
    async def answer(x: int) -> str:
        return str(x)

    assert_type(await answer(1), str | int)
    assert_type(await report(1), str)
    assert_type(await asyncio.create_task(report(1)), str)
    assert_type(await once(1), Ran[str] | Skipped)
    assert_type(await others.lock("a").acquire(2.5), ilock.Lease)
    assert_type(await others.lock("a").try_acquire(), ilock.Lease | None)
    assert_type(await others.semaphore("a", 3).acquire(permits=2), ilock.Lease)
    assert_type(await (await others.multi(others.lock("a")).acquire()).release(), bool)
    assert_type(await others.lock("a").inspect(), LockState)
    assert_type(await others.rwlock("a").read().inspect(), SemaphoreState)
    assert_type(await others.election("a").campaign(), ilock.Leadership)
    assert_type(await others.barrier("a", 2).wait(), int)
    await others.lock("a").acquire("5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await others.lock("a").acquire(permits=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    others.multi(locks.lock("a"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    others.rlock("a", tll=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    async with others.lock("a") as lease:
        assert_type(lease, ilock.Lease)
        await lease.extend("5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    async with others.election("a") as led:
        assert_type(led, ilock.Leadership)
        assert_type(led.ended, scopes.LeaseEvent)
        ended: asyncio.Event = led.ended
        if not led.lost:
            assert_type(await ended.wait(), Literal[True])

    async def lead(led: ilock.Leadership) -> int:
        return led.term

    assert_type(await others.election("a").run(lead, stop=asyncio.Event()), int | None)
    async for seen in others.election("a").observe():
        assert_type(seen, Leader | None)


def faults(lease: Lease, several: MultiLease, other: ilock.Lease, server: BreakableServer) -> None:
    """What a user's tests call."""
    lose_lease(lease)
    lose_lease(several, "revoked")
    lose_lease(other, how="forgotten")
    lose_lease("stock:42", "gone")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    lose_lease(locks.lock("a"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pause_renewal("stock:42", remaining=0.5), server_paused(server), server_down(server):
        assert_type(restart_server(server, keep_data=True), None)
    assert_type(server.url, str)
