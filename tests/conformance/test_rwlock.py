"""The read-write lock: many readers or one writer, in order of arrival."""

from __future__ import annotations

import asyncio
import signal

import pytest

import interlock
import interlock.aio
from harness.clock import machine_time
from harness.modes import outcome, until, waiting
from harness.processes import processes
from interlock import ConfigError, LeaseLost

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("each server", full="every combination")


@rule(1)
async def test_many_readers_or_one_writer_hold_the_lock(mode, clean):
    first, second, third = (mode.interlock().rwlock("a") for _ in range(3))
    readers = [await first.read().acquire(), await second.read().acquire()]
    assert await third.write().try_acquire() is None
    for lease in readers:
        assert await lease.release()
    writer = await third.write().acquire()
    assert await first.read().try_acquire() is None
    assert await second.write().try_acquire() is None
    assert writer.fence > max(lease.fence for lease in readers)
    assert await writer.release()
    assert not clean.exists("lock:a", "{lock:a}{shares}")


@rule(1)
async def test_a_waiting_writer_stops_new_readers_and_neighbouring_readers_enter_together(mode):
    """Arrival order: reader | writer | reader, reader | writer | reader."""
    locks = [mode.interlock().rwlock("a") for _ in range(6)]
    held = await locks[0].read().acquire()
    order, inside, tasks = [], set(), []

    async def enter(number: int, kind: str) -> None:
        side = getattr(locks[number], kind)()
        lease = await side.acquire(timeout=40)
        inside.add(number)
        order.append((number, frozenset(inside)))
        if kind == "read" and number in {2, 3}:
            await until(lambda: {2, 3} <= {n for n, _ in order})  # both are inside at once
        inside.discard(number)
        await lease.release()

    for number, kind in enumerate(("write", "read", "read", "write", "read"), 1):
        tasks.append(asyncio.ensure_future(enter(number, kind)))
        await until(lambda number=number: waiting(locks[0].read(), number))
    assert await mode.interlock().rwlock("a").read().try_acquire() is None  # a writer is before it
    await held.release()
    await asyncio.gather(*tasks)
    arrived = [number for number, _ in order]
    assert arrived[0] == 1
    assert set(arrived[1:3]) == {2, 3}
    assert arrived[3:] == [4, 5]
    assert order[0][1] == {1}
    assert order[3][1] == {4}


@rule(3, 6)
async def test_the_share_of_a_dead_reader_ends_alone(mode, clean):
    locks = mode.interlock()
    alive = await locks.rwlock("a").read().acquire()
    async with processes(mode, 1) as (dying,):
        await dying.do("reader", "a", {"ttl": 2}, 5)
        assert (await locks.rwlock("a").read().inspect()).holding == 2
        await dying.end(signal.SIGKILL)
        await until(lambda: _holding(locks, 1))
    alive.ensure()
    other = mode.interlock()
    assert await other.rwlock("a").write().try_acquire() is None
    assert await alive.release()
    writer = await other.rwlock("a").write().acquire(timeout=5)
    assert await writer.release()


async def _holding(locks, number: int) -> bool:
    return (await locks.rwlock("a").read().inspect()).holding == number


@rule(3)
async def test_a_dead_writer_is_followed_within_its_ttl_and_a_second(mode):
    locks = mode.interlock()
    dead = await locks.rwlock("a", ttl=1, renew=False).write().acquire()
    started = machine_time()
    lease = await mode.interlock().rwlock("a").read().acquire(timeout=10)
    assert machine_time() - started < 2.5
    assert lease.fence > dead.fence
    assert not await dead.release()
    assert await lease.release()


async def test_a_revocation_ends_the_lease_of_every_holder(mode):
    locks = [mode.interlock() for _ in range(3)]
    leases = [await each.rwlock("a").read().acquire() for each in locks]
    assert await locks[0].rwlock("a").write().revoke("shop closes")
    for lease in leases:
        assert isinstance(await outcome(lease.extend(5)), LeaseLost)
        assert not await lease.release()
    assert await (await locks[0].rwlock("a").write().acquire(timeout=5)).release()


async def test_inspect_shows_the_readers_and_the_waiting_writers(mode):
    locks = mode.interlock()
    lease = await locks.rwlock("a").read().acquire()
    writing = asyncio.ensure_future(mode.interlock().rwlock("a").write().acquire(timeout=20))
    side = locks.rwlock("a").read()
    await until(lambda: waiting(side, 1))
    state = await side.inspect()
    assert [(holder.token, holder.permits) for holder in state.holders] == [(lease.token, 1)]
    ((_, wanted),) = state.waiters
    assert wanted == state.limit
    assert await lease.release()
    assert await (await writing).release()


# What looks at the current thread or task


@rule(1)
def test_a_writer_may_read_and_downgrade(server, clean):
    with interlock.Interlock(server.url) as locks, interlock.Interlock(server.url) as others:
        lock, other = locks.rwlock("a"), others.rwlock("a")
        with lock.write() as writing:
            reading = lock.read().acquire(timeout=5)
            assert reading.fence > writing.fence
            assert other.read().try_acquire() is None  # there is a writer still
            assert writing.release()
            beside = other.read().acquire(timeout=5)  # and now only readers
            with pytest.raises(ConfigError, match="can't begin to write"):
                other.write().acquire()
            assert beside.release()
        reading.ensure()
        assert other.write().try_acquire() is None
        assert reading.release()
        with other.write():
            pass


def test_releasing_the_read_lease_first_keeps_the_write_lease(server, clean):
    with interlock.Interlock(server.url) as locks, interlock.Interlock(server.url) as others:
        lock = locks.rwlock("a")
        with lock.write():
            with lock.read():
                pass
            assert others.rwlock("a").read().try_acquire() is None
        assert not clean.exists("lock:a")


def test_upgrading_is_refused_instead_of_a_deadlock(server, clean):
    with interlock.Interlock(server.url) as locks:
        lock = locks.rwlock("a")
        with lock.read():
            with pytest.raises(ConfigError, match="can't begin to write"):
                lock.write().acquire()
            with lock.read():  # reading again is no matter
                pass
        with lock.write(), pytest.raises(ConfigError, match="writes already"):
            lock.write().acquire()
        with lock.write():
            pass


async def test_tasks_may_downgrade_and_not_upgrade(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        lock = locks.rwlock("a")
        async with lock.read():
            with pytest.raises(ConfigError, match="can't begin to write"):
                await lock.write().acquire()

            async def another() -> None:  # another task waits in the ordinary way
                async with lock.write():
                    pass

            writing = asyncio.ensure_future(another())
            await until(lambda: waiting(lock.read(), 1))
            async with lock.read():  # beside its own lease, though a writer waits: else both would wait for ever
                pass
        await writing
        async with lock.write() as lease:
            reading = await lock.read().acquire(timeout=5)
            assert await lease.release()
            assert await reading.release()


@rule(1)
async def test_a_crowd_of_readers_and_writers_excludes_as_it_should(mode):
    readers = writers = done = 0

    async def work(number: int) -> None:
        nonlocal readers, writers, done
        lock = mode.interlock().rwlock("a")
        for turn in range(8):
            if (number + turn) % 3:
                async with await lock.read().acquire(timeout=40):
                    readers += 1
                    assert not writers
                    await asyncio.sleep(0.001)
                    readers -= 1
            else:
                async with await lock.write().acquire(timeout=40):
                    writers += 1
                    assert writers == 1
                    assert not readers
                    await asyncio.sleep(0.001)
                    writers -= 1
            done += 1

    await asyncio.gather(*(work(number) for number in range(8)))
    assert done == 64
