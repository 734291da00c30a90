"""A section ends with the `with` that entered it, in whichever thread or task, or when no code can leave it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import interlock
import interlock.aio
from harness.modes import until
from interlock import AcquireTimeout, ConfigError, Deadlock, LeaseLost

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")


@pytest.fixture
def locks(server, clean):
    with interlock.Interlock(server.url) as made:
        yield made


@contextlib.contextmanager
def inside(lockable):
    """A section as a dependency of a web framework: entered in one thread of a pool, left in another."""
    with lockable as lease:
        yield lease


def elsewhere(call, *args):
    """Call a function in a thread of its own; the thread has ended when this returns."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def names(client) -> list[str]:
    return sorted(key.decode()[5:] for key in client.scan_iter("lock:*") if not key.endswith(b"}"))


# Entered here, left there: threads


@rule(11)
@pytest.mark.parametrize("kind", ["lock", "rlock", "write", "multi", "election"])
def test_a_with_that_is_entered_in_one_thread_may_be_left_in_another(locks, clean, kind):
    made = {
        "lock": lambda: locks.lock("a"),
        "rlock": lambda: locks.rlock("a"),
        "write": lambda: locks.rwlock("a").write(),
        "multi": lambda: locks.multi(locks.lock("{a}1"), locks.lock("{a}2")),
        "election": lambda: locks.election("a"),
    }[kind]()
    section = inside(made)
    lease = elsewhere(section.__enter__)
    assert lease.state == "held"
    elsewhere(section.__exit__, None, None, None)
    assert lease.state == "released"
    assert not names(clean)
    with made:  # also for the thread that entered it
        pass


@rule(11)
def test_each_with_leaves_its_own_permit(locks):
    limited = locks.semaphore("a", 3)
    sections = [inside(limited) for _ in range(3)]
    leases = [elsewhere(section.__enter__) for section in sections]
    for i in (1, 0, 2):  # in another order, and in a thread that has entered none of them
        sections[i].__exit__(None, None, None)
        assert leases[i].state == "released"
        assert limited.available() == 3 - sum(lease.state == "held" for lease in leases)
    assert limited.available() == 3


@rule(11)
def test_a_thread_of_a_pool_that_entered_for_one_request_waits_in_the_next_request(locks):
    lock = locks.lock("a", timeout=0.2)
    with ThreadPoolExecutor(1) as pool:
        first, second = inside(lock), inside(lock)
        pool.submit(first.__enter__).result()
        with pytest.raises(AcquireTimeout):  # and not ConfigError: the same thread would leave it later
            pool.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        third = inside(lock)
        pool.submit(third.__enter__).result()
        pool.submit(third.__exit__, None, None, None).result()


@rule(11)
def test_a_thread_that_would_wait_for_itself_gets_an_error(locks):
    lock = locks.lock("a", timeout=0.2)
    with lock, pytest.raises(Deadlock, match="inside it already"), lock:
        pass
    with inside(lock), pytest.raises(Deadlock, match="inside it already"), inside(lock):
        pass
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock)
        with pytest.raises(Deadlock, match="inside it already"), lock:
            pass
    with lock:
        assert isinstance(elsewhere(_outcome, lock.acquire), AcquireTimeout)


def _outcome(call):
    try:
        return call()
    except Exception as error:
        return error


@rule(11)
def test_an_exit_stack_leaves_its_sections_in_whichever_thread(locks, clean):
    limited = locks.semaphore("a", 2)
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    mine = elsewhere(first.enter_context, limited)
    others = second.enter_context(limited)
    first.close()
    assert (mine.state, others.state) == ("released", "held")
    elsewhere(second.close)
    assert not names(clean)


@rule(6, 11)
async def test_a_section_that_no_code_can_leave_any_more_is_released(server, clean):
    with interlock.Interlock(server.url) as locks:
        lock = locks.lock("a")
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            stack = contextlib.ExitStack()
            stack.enter_context(lock)
            assert names(clean) == ["a"]
            del stack
            gc.collect()
            await until(lambda: not names(clean), within=5)  # and not when its ttl is over
        with lock:  # nor is this thread refused
            pass


@rule(6)
async def test_a_lease_that_is_lost_before_its_body_is_released(server, locks, clean, monkeypatch):
    acquire = interlock.aio.Lock._acquire

    async def revoked(lock, timeout):
        lease = await acquire(lock, timeout)
        assert locks.lock("a").revoke("a test")
        lease._core.ends.lose(lease._grant, "it was revoked")
        return lease

    async with interlock.aio.Interlock(server.url) as others:
        monkeypatch.setattr(interlock.aio.Lock, "_acquire", revoked)
        with pytest.raises(LeaseLost):
            async with others.lock("a"):
                pytest.fail("no body runs under a lease that is lost")
        monkeypatch.undo()
        lease = await others.lock("a").acquire(timeout=15)  # the ttl of the lost one is 30 s
        await lease.release()


# By hand: `__enter__` and `__exit__` without a `with`


@rule(11)
def test_without_a_with_a_lock_is_left_in_whichever_thread(locks, clean):
    lock = locks.lock("a")
    elsewhere(lock.__enter__)
    assert names(clean) == ["a"]
    lock.__exit__(None, None, None)
    assert not names(clean)
    lock.__enter__()
    with pytest.raises(Deadlock, match="inside it already"):
        lock.__enter__()
    lock.__exit__(None, None, None)
    with pytest.raises(ConfigError, match="no lease was entered"):
        lock.__exit__(None, None, None)


@rule(6, 11)
async def test_without_a_with_permits_that_cannot_be_told_apart_raise_an_error_with_the_way_out(server, clean):
    with interlock.Interlock(server.url) as locks:
        limited = locks.semaphore("a", 3, ttl=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            threads = [threading.Thread(target=limited.__enter__) for _ in range(2)]
            for thread in threads:
                thread.start()
                thread.join()
            with pytest.raises(ConfigError, match=r"2 leases .*lease = lock.acquire\(\).*with lease:"):
                limited.__exit__(None, None, None)
            limited.__enter__()
            limited.__exit__(None, None, None)  # one's own is clear
            del threads, thread
            await until(lambda: gc.collect() >= 0 and limited.available() == 3, within=8)  # renewed no more
        assert not names(clean)


@rule(6)
async def test_without_a_with_a_lease_is_renewed_as_long_as_some_code_can_leave_it(server, clean):
    with interlock.Interlock(server.url) as locks:
        lock = locks.lock("a", ttl=3)
        deadline = lock.__enter__()._grant.hold.deadline
        # Nothing but the lock has the lease.
        await until(lambda: locks._session.book.held()[0].hold.deadline > deadline + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del lock
            gc.collect()
            await until(lambda: not names(clean), within=8)


# Entered here, left there: asyncio


async def yielding(lockable):
    """An async generator that is suspended inside a section."""
    async with lockable as lease:
        yield lease
        yield lease


@rule(11)
@pytest.mark.parametrize("kind", ["lock", "rlock", "semaphore", "multi"])
async def test_a_break_out_of_an_async_generator_leaves_its_section(server, clean, kind):
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with interlock.aio.Interlock(server.url) as locks:
        made = {
            "lock": lambda: locks.lock("a"),
            "rlock": lambda: locks.rlock("a"),
            "semaphore": lambda: locks.semaphore("a", 1),
            "multi": lambda: locks.multi(locks.lock("{a}1"), locks.lock("{a}2")),
        }[kind]()
        async for lease in yielding(made):
            assert lease.state == "held"
            break
        await until(lambda: gc.collect() >= 0 and not names(clean))
        assert lease.state == "released"
        async with made:
            pass
    assert not failures


@rule(11)
async def test_each_async_with_leaves_its_own_permit_in_whichever_task(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        limited = locks.semaphore("a", 3)
        generators = [yielding(limited) for _ in range(3)]
        leases = [await asyncio.create_task(anext(each)) for each in generators]
        for i in (1, 0, 2):
            await asyncio.create_task(generators[i].aclose())
            assert leases[i].state == "released"
            assert await limited.available() == 3 - sum(lease.state == "held" for lease in leases)


@rule(11)
async def test_a_task_that_would_wait_for_itself_gets_an_error(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        await locks.ping()  # connecting is not what the timeout is for
        lock = locks.lock("a", timeout=0.2)
        async with lock:
            with pytest.raises(Deadlock, match="inside it already"):
                async with lock:
                    pass
            with pytest.raises(AcquireTimeout):
                await asyncio.create_task(lock.acquire())
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(lock)
            with pytest.raises(Deadlock, match="inside it already"):
                await lock.__aenter__()
        assert not names(clean)


@rule(11)
async def test_without_an_async_with_a_lock_is_left_in_whichever_task(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        lock, limited = locks.lock("a"), locks.semaphore("b", 2)
        await asyncio.create_task(_awaited(lock.__aenter__))
        assert names(clean) == ["a"]
        await lock.__aexit__(None, None, None)
        for _ in range(2):
            await asyncio.create_task(_awaited(limited.__aenter__))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            with pytest.raises(ConfigError, match="2 leases were entered"):
                await limited.__aexit__(None, None, None)
            await until(lambda: gc.collect() >= 0 and not locks._session.book.held())


async def _awaited(call):
    return await call()


# What a `with` looks up


def test_an_exit_that_is_read_and_not_called_changes_nothing(locks, clean):
    lock = locks.lock("a")
    kept = lock.__exit__  # as a decorator or a mock may
    with lock as lease:
        assert lease.state == "held"
    assert isinstance(lock, contextlib.AbstractContextManager)
    assert callable(type(lock).__exit__)
    lock.__enter__()
    lock.__exit__(*sys.exc_info())
    del kept
    assert not names(clean)
