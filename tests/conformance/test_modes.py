"""Where threads and asyncio differ: `with`, decorators, cancellation, threads, loops."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import interlock
import interlock.aio
from harness.clock import machine_time
from harness.modes import Residue, queued, until, wait_until
from interlock import AcquireTimeout, Deadlock, LeaseLost, LeaseState

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")


# Threads


@pytest.fixture
def locks(server, clean):
    with interlock.Interlock(server.url) as made:
        yield made
    assert not Residue.threads()


def test_a_with_holds_the_lock_and_gives_the_lease(locks, clean):
    lock = locks.lock("a")
    with lock as lease:
        assert clean.get("lock:a").decode() == lease.token
        assert "MainThread" in lease.token
    assert not clean.exists("lock:a")
    assert lease.state is LeaseState.RELEASED


@rule(11)
def test_one_lock_object_serves_many_threads_each_with_its_own_lease(locks):
    lock = locks.lock("a")
    fences, counter = [], [0]

    def work():
        for _ in range(10):
            with lock as lease:
                fences.append(lease.fence)
                seen = counter[0]
                time.sleep(0)
                counter[0] = seen + 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter == [80]
    assert fences == sorted(set(fences))


def test_a_with_inside_a_with_of_the_same_lock_raises_instead_of_waiting_for_ever(locks):
    lock = locks.lock("a")
    with lock:
        with pytest.raises(Deadlock, match="inside it already"), lock:
            pass
        assert locks.lock("a").try_acquire() is None


def test_a_decorated_function_runs_under_the_lock(locks, clean):
    @locks.lock("a")
    def add(x: int, y: int = 2) -> int:
        """Adds."""
        assert clean.exists("lock:a")
        return x + y

    assert add(1, y=3) == 4
    assert add.__doc__ == "Adds."
    assert not clean.exists("lock:a")


def test_a_stop_iteration_of_the_body_leaves_the_section_unchanged(locks, clean):
    """The body runs inside a coroutine, where Python turns StopIteration into RuntimeError."""

    def ends() -> None:
        raise StopIteration(7)

    once, election = locks.once("b", at_most=5), locks.election("c")
    for run in (
        locks.lock("a")(ends),
        locks.synchronized("a")(ends),
        once(ends),
        lambda: election.run(lambda _: ends()),
    ):
        with pytest.raises(StopIteration) as raised:
            run()
        assert raised.value.value == 7
    assert not clean.exists("lock:a")

    def fails() -> None:
        raise RuntimeError("of the user") from KeyError("a")

    with pytest.raises(RuntimeError, match="of the user") as error:
        locks.lock("a")(fails)()
    assert isinstance(error.value.__cause__, KeyError)


def test_a_decorated_function_that_calls_itself_raises_instead_of_waiting_for_ever(locks, clean):
    @locks.lock("a")
    def deep(left: int) -> int:
        return deep(left - 1) if left else 0

    with pytest.raises(Deadlock, match="inside it already"):
        deep(1)
    assert deep(0) == 0
    assert locks.rlock("a")(lambda: locks.rlock("a").acquire().release())()


def test_try_acquire_in_a_walrus_as_in_the_readme(locks):
    if lease := locks.lock("nightly").try_acquire():
        with lease:
            assert locks.lock("nightly").try_acquire() is None
    with pytest.raises(AcquireTimeout), locks.lock("b"), locks.lock("b", timeout=0):
        pass


@rule(6)
def test_on_lost_is_called_in_a_thread_of_its_own_and_may_fail(locks, clean, caplog):
    where = []

    def told(lease):
        where.append((threading.current_thread().name, lease.name))
        raise RuntimeError("mine")

    lease = locks.lock("a", ttl=0.3, renew=False, on_lost=told).acquire()
    assert lease.lost.wait(30)
    wait_until(lambda: "failed" in caplog.text)
    assert where == [("interlock-callback", "a")]
    with locks.lock("b", ttl=6):  # the workers live on
        pass


@rule(11)
def test_a_lease_can_be_released_by_another_thread(locks):
    lease = locks.lock("a").acquire()
    answer = []
    thread = threading.Thread(target=lambda: answer.append(lease.release()))
    thread.start()
    thread.join()
    assert answer == [True]


def test_an_idle_interlock_has_no_thread_and_no_connection(server):
    before = Residue.sockets()
    made = interlock.Interlock(server.url)
    made.lock("a")
    assert not Residue.threads()
    assert Residue.sockets() == before
    made.close()


def test_the_connections_of_many_threads_are_closed(server, clean):
    before = Residue.sockets()
    with interlock.Interlock(server.url) as made:
        threads = [threading.Thread(target=lambda i=i: made.lock(f"{i}").acquire().release()) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert Residue.sockets() == before


# asyncio


async def test_an_async_with_and_a_decorated_coroutine_function_hold_the_lock(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        lock = locks.lock("a")
        async with lock as lease:
            assert clean.get("lock:a").decode() == lease.token
            with pytest.raises(Deadlock, match="inside it already"):
                async with lock:
                    pass
        assert not clean.exists("lock:a")

        @lock
        async def add(x: int, y: int) -> int:
            assert clean.exists("lock:a")
            return x + y

        assert await add(1, 2) == 3
        assert not clean.exists("lock:a")

        @lock
        async def deep() -> None:
            await deep()

        with pytest.raises(Deadlock, match="inside it already"):
            await deep()
        assert not clean.exists("lock:a")


@rule(6)
async def test_the_body_is_cancelled_at_once_when_the_lease_is_lost(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        started = machine_time()
        with pytest.raises(LeaseLost, match="'a'"):
            async with locks.lock("a", ttl=0.9):
                clean.delete("lock:a")
                await asyncio.sleep(30)
        assert machine_time() - started < 5
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)  # no cancellation is left over


@rule(6)
async def test_a_body_that_ends_in_the_moment_of_the_loss_leaves_no_cancellation_behind(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        with pytest.raises(LeaseLost):
            async with locks.lock("a") as lease:
                locks._session.ends.lose(lease._grant, "test")  # and no await follows in the body
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0.01)


@rule(6)
async def test_an_exception_of_a_cancelled_body_is_kept(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        with pytest.raises(KeyError) as caught:
            async with locks.lock("a", ttl=0.6):
                clean.delete("lock:a")
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    raise KeyError("while cleaning up") from None
        assert isinstance(caught.value.__context__, asyncio.CancelledError)
        error = caught.value
        while error.__context__ is not None:
            error = error.__context__
        assert isinstance(error, LeaseLost)
        await asyncio.sleep(0)


@rule(8)
async def test_a_cancellation_from_outside_stays_a_cancellation(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:

        async def body():
            async with locks.lock("a"):
                await asyncio.sleep(30)

        task = asyncio.ensure_future(body())
        await until(lambda: clean.exists("lock:a"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not clean.exists("lock:a"))


@rule(8)
async def test_asyncio_timeout_around_a_section_raises_timeout_error(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), locks.lock("a"):
                await asyncio.sleep(30)
        await until(lambda: not clean.exists("lock:a"))
        async with await locks.lock("a").acquire():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await locks.lock("a").acquire()
        await until(lambda: not clean.exists("lock:a", "{lock:a}{queue}"))


@rule(6)
async def test_on_lost_may_be_async(server, clean):
    told = asyncio.Event()

    async def tell(lease):
        assert lease.name == "a"
        told.set()

    async with interlock.aio.Interlock(server.url) as locks:
        lease = await locks.lock("a", ttl=0.2, renew=False, on_lost=tell).acquire()
        await asyncio.wait_for(told.wait(), 5)
        assert lease.lost.is_set()
        await asyncio.wait_for(lease.lost.wait(), 1)


@rule(11)
def test_one_interlock_serves_several_loops_one_after_the_other(server, clean):
    locks = interlock.aio.Interlock(server.url)

    async def once() -> int:
        async with locks.lock("a") as lease:
            await asyncio.sleep(0)
        session = locks._sessions.pop(asyncio.get_running_loop())
        await session.close()
        await session.server.close()
        return lease.fence

    fences = [asyncio.run(once()) for _ in range(3)]
    assert fences == sorted(set(fences))


@rule(11)
def test_one_interlock_serves_several_loops_at_once(server, clean):
    locks = interlock.aio.Interlock(server.url)
    counter = [0]

    async def work():
        for _ in range(20):
            async with locks.lock("a"):
                seen = counter[0]
                await asyncio.sleep(0)
                counter[0] = seen + 1
        session = locks._sessions.pop(asyncio.get_running_loop())
        await session.close()
        await session.server.close()

    threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter == [80]


async def test_the_commands_of_many_tasks_share_one_connection(server, clean):
    before = clean.info("clients")["connected_clients"]
    async with interlock.aio.Interlock(server.url) as locks:
        leases = await asyncio.gather(*(locks.lock(f"{i}").acquire() for i in range(100)))
        assert clean.info("clients")["connected_clients"] - before <= 1
        await asyncio.gather(*(lease.release() for lease in leases))


async def test_a_waiter_gets_the_lock_on_uvloop(server, clean):
    uvloop = pytest.importorskip("uvloop")

    async def main():
        async with interlock.aio.Interlock(server.url) as locks:
            lease = await locks.lock("a").acquire()
            waiting = asyncio.ensure_future(locks.lock("a").acquire())
            await until(lambda: queued(locks, 1))
            await lease.release()
            await (await waiting).release()

    def run():
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    await asyncio.to_thread(run)
