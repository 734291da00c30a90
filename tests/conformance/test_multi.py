"""Several locks at once, all or none, without deadlock."""

from __future__ import annotations

import asyncio
import signal

import pytest

import interlock
from harness.clock import machine_time
from harness.modes import outcome, queued, real, until, waiting
from harness.processes import processes
from interlock import AcquireTimeout, ConfigError, LeaseLost, LeaseState, Unavailable
from interlock._client.multi import MAX_TOGETHER

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("each server", full="every combination", quorum=True)


def some(locks, names: str = "ab", **options):
    return locks.multi(*(locks.lock(name) for name in names), **options)


async def free(locks, names: str) -> bool:
    return not any([(await locks.lock(name).inspect()).held for name in names])


async def held(locks, names: str) -> bool:
    return all([(await locks.lock(name).inspect()).held for name in names])


@rule(1)
async def test_a_multi_lock_holds_all_of_its_locks_or_none(mode, clean):
    locks, others = mode.interlock(), mode.interlock()
    async with await some(locks).acquire() as lease:
        assert lease.fence["a"] == lease["a"].fence
        assert set(lease.fence) == {"a", "b"}
        assert lease.state is LeaseState.HELD
        assert lease.remaining() > 20
        lease.ensure()
        for name in "ab":
            assert await others.lock(name).try_acquire() is None
    assert await free(others, "ab")
    held = await others.lock("b").acquire()
    assert await some(locks).try_acquire() is None
    assert await free(others, "a")
    for timeout in (0.2, 0):
        refused = await outcome(some(locks).acquire(timeout=timeout))
        assert isinstance(refused, AcquireTimeout)
        assert "multi 'a, b'" in str(refused)
        assert "lock 'b'" in str(refused)
        assert (refused.name, refused.holder, refused.waited) == ("a, b", held.token, timeout)
    assert await free(others, "a")
    await held.release()
    assert not clean.keys("*{queue}*")


@rule(7)
async def test_fences_grow_for_each_name(mode):
    locks = mode.interlock()
    before = {}
    for _ in range(3):
        async with await some(locks).acquire() as lease:
            assert all(lease.fence[name] > before.get(name, 0) for name in "ab")
            before = dict(lease.fence)


@rule(1, 3)
async def test_a_multi_lock_renews_the_locks_that_it_has_while_it_waits_for_a_busy_one(mode):
    locks, others = mode.interlock(), mode.interlock()
    held = await others.lock("b").acquire()
    together = locks.multi(locks.lock("a", ttl=3), locks.lock("b"))
    task = asyncio.ensure_future(together.acquire(timeout=30))
    await until(lambda: queued(others, 1, "b"))
    before = await others.lock("a").inspect()
    assert before.held

    async def is_old():
        return (await others.lock("a").inspect()).remaining < 2.5

    async def is_renewed():
        return not await is_old()

    await until(is_old)
    await until(is_renewed)
    assert (await others.lock("a").inspect()).holder == before.holder
    await held.release()
    lease = await task
    assert lease["a"].token == before.holder
    assert await lease.release()
    assert not await lease.release()


@rule(3)
async def test_two_multi_locks_with_another_order_of_names_never_deadlock(mode):
    inside, most = 0, 0

    async def work(names: str) -> None:
        nonlocal inside, most
        locks = mode.interlock()
        for _ in range(5):
            async with await some(locks, names, timeout=50).acquire():
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

    await asyncio.gather(work("abc"), work("cba"), work("bca"), work("ba"))
    assert most == 1


@rule(1)
@pytest.mark.not_on_a_quorum
async def test_a_multi_lock_takes_locks_permits_and_readers_together(mode):
    locks, others = mode.interlock(), mode.interlock()
    mixed = locks.multi(locks.semaphore("s", 2), locks.rwlock("rw").read(), locks.lock("a"), locks.rlock("r"))
    async with await mixed.acquire() as lease:
        assert set(lease.fence) == {"s", "rw", "a", "r"}
        assert await others.semaphore("s", 2).available() == 1
        reader = await others.rwlock("rw").read().try_acquire()
        assert reader is not None
        assert await mode.interlock().rwlock("rw").write().try_acquire() is None
        await reader.release()
    assert await others.semaphore("s", 2).available() == 2
    writer = await others.rwlock("rw").write().acquire(timeout=5)
    assert await mixed.try_acquire() is None
    assert await others.semaphore("s", 2).available() == 2
    await writer.release()


@rule(1)
@pytest.mark.asyncio_only
async def test_a_multi_lock_enters_an_rlock_of_its_task_once_more(mode):
    locks = mode.interlock()
    outer = await locks.rlock("r").acquire()
    async with locks.multi(locks.rlock("r"), locks.lock("a")) as lease:
        assert lease.fence["r"] == outer.fence
    assert await locks.rlock("r").acquire() is outer
    assert await outer.release()
    assert await outer.release()


@rule(1)
def test_a_multi_lock_enters_an_rlock_of_its_thread_once_more(server, clean):
    with interlock.Interlock(server.url) as locks:
        outer = locks.rlock("r").acquire()
        with locks.multi(locks.rlock("r"), locks.lock("a")) as lease:
            assert lease.fence["r"] == outer.fence
        held = locks.lock("a").acquire()
        assert locks.multi(locks.rlock("r"), locks.lock("a")).try_acquire() is None
        held.release()
        assert outer.release()
        assert not locks.lock("r").inspect().held


@rule(6)
async def test_a_multi_lock_is_lost_when_any_of_its_leases_is_lost(mode):
    told = []
    locks = mode.interlock(max_ttl=3)  # a revocation in the first second is told by the renewal, at a third of the ttl
    lease = await some(locks, on_lost=told.append).acquire()
    assert not lease.lost.is_set()
    assert await mode.interlock().lock("b").revoke("for the test")
    await until(lease.lost.is_set)
    await until(lambda: told)
    assert lease.state is LeaseState.LOST
    with pytest.raises(LeaseLost):
        lease.ensure()
    lease["a"].ensure()
    assert not await lease.release()
    looking = mode.interlock()
    await until(lambda: free(looking, "ab"))  # what was lost is given back in the background


@rule(6)
async def test_after_the_loss_of_one_lease_the_section_raises_and_the_others_are_released(mode):
    others = mode.interlock()

    async def body() -> None:
        locks = mode.interlock(max_ttl=3)
        async with await some(locks, "abc").acquire() as lease:
            assert await others.lock("b").revoke("for the test")
            await until(lease.lost.is_set)
            await asyncio.sleep(0.01)

    with pytest.raises(LeaseLost, match="lock 'b'"):
        await body()
    await until(lambda: free(others, "abc"))


@rule(8)
async def test_a_multi_lock_that_is_cancelled_or_times_out_leaves_nothing(mode):
    locks, others = mode.interlock(), mode.interlock()
    held = await others.lock("b").acquire()
    await locks.ping()  # connecting is not what the timeout is for
    if mode.name == "asyncio":
        task = asyncio.ensure_future(some(locks, "abc").acquire(timeout=30))
        await until(lambda: queued(others, 1, "b"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert isinstance(await outcome(some(locks, "abc").acquire(timeout=0.3)), AcquireTimeout)
    await until(lambda: free(others, "ac"))
    await until(lambda: queued(others, 0, "b"))
    await held.release()


@rule(8)
@pytest.mark.asyncio_only
async def test_a_release_that_is_cancelled_before_it_began_still_releases_all(mode):
    locks = mode.interlock()
    lease = await some(locks).acquire()
    releasing = asyncio.ensure_future(lease.release())
    await asyncio.sleep(0)  # it has asked for both, and neither has begun
    releasing.cancel()
    await asyncio.wait([releasing])
    await until(lambda: free(locks, "ab"))


@rule(8)
async def test_an_acquire_whose_reply_is_lost_is_sent_again(mode, proxy):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=0.3")
    await (await some(locks).acquire()).release()  # the server knows the script
    proxy.drop_replies = True
    task = asyncio.ensure_future(some(locks).acquire(timeout=30))
    looking = mode.interlock()
    await until(lambda: held(looking, "ab"))
    proxy.cut()
    proxy.drop_replies = False
    lease = await task
    assert await lease.release()
    assert await free(mode.interlock(), "ab")


@rule(8)
async def test_an_acquire_in_doubt_that_is_then_refused_leaves_nothing(mode, clean, proxy):
    """The first request ran and its reply was lost; before the second request another holder took one of the locks."""
    locks = mode.interlock(f"{proxy.url}?socket_timeout=0.3")
    await (await some(locks).acquire()).release()  # the server knows the script
    proxy.drop_replies = True
    task = asyncio.ensure_future(outcome(some(locks, "abc").acquire(timeout=0)))
    looking = mode.interlock()
    await until(lambda: held(looking, "abc"))
    clean.set("lock:b", "another", px=60_000)
    proxy.cut()
    proxy.drop_replies = False
    assert isinstance(await task, AcquireTimeout)
    await until(lambda: free(looking, "ac"))


@rule(8)
async def test_closing_an_interlock_gives_back_an_acquire_in_doubt(mode, proxy):
    """The server may have granted the multi lock already, though the client does not know."""
    locks = mode.interlock(f"{proxy.url}?socket_timeout=2")
    await (await some(locks).acquire()).release()  # the server knows the script
    proxy.drop_replies = True
    task = asyncio.ensure_future(outcome(some(locks).acquire()))
    looking = mode.interlock()
    await until(lambda: held(looking, "ab"))
    proxy.drop_replies = mode.name == "asyncio"  # for threads closing makes a connection of its own
    await locks.close()
    assert isinstance(await task, ConfigError)
    await until(lambda: free(looking, "ab"))


@rule(8)
async def test_the_timeout_bounds_the_call_while_the_server_is_silent(mode, proxy):
    locks = mode.interlock(proxy.url)
    await (await some(locks).acquire()).release()  # the server knows the script
    proxy.drop_replies = True
    started = machine_time()
    refused = await outcome(some(locks).acquire(timeout=0.5))
    assert machine_time() - started < 3  # and not the 5 s that a server may stay away
    assert isinstance(refused, Unavailable)
    proxy.drop_replies = False
    proxy.cut()


@rule(8)
async def test_a_caller_waits_for_the_undos_of_many_locks_together(mode):
    """The server is gone: the caller waits once for all undos, not once for each."""
    locks, others = mode.interlock(), mode.interlock()
    blocker = await others.lock("z").acquire()
    undo = mode.session(locks).undo
    add, port = undo.add, undo.server
    undo.add = lambda attempt: (add(attempt), port.runtime.event())[1]  # nobody hears when it is done
    started = machine_time()
    refused = await outcome(
        locks.multi(*(locks.lock(f"a{i:02}") for i in range(40)), locks.lock("z")).acquire(timeout=1)
    )
    assert isinstance(refused, AcquireTimeout | Unavailable)  # a busy machine may leave its last request no time
    assert machine_time() - started < 5  # forty times 0.2 s are 8
    await blocker.release()


@rule(6)
async def test_a_lease_that_is_lost_before_the_multi_lease_exists_is_reported(mode):
    locks, told = mode.interlock(max_ttl=3), []
    leases = {name: await locks.lock(name).acquire() for name in "ab"}
    assert await mode.interlock().lock("b").revoke("for the test")
    await until(leases["b"].lost.is_set)
    whole = real(some(locks))
    lease = whole._lease_type(whole._session, told.append, "a, b", {name: real(each) for name, each in leases.items()})
    await until(lambda: told)
    assert told == [lease]
    assert lease.lost.is_set()
    await leases["a"].release()


@rule(3, 4)
async def test_the_locks_of_a_process_that_is_killed_while_it_waits_for_others_are_free_again(mode):
    async with processes(mode, 1) as (dying,):
        locks = mode.interlock()
        held = await locks.lock("b").acquire()
        await dying.say("together", ["a", "b"], {"ttl": 1.5}, 60)
        await until(lambda: queued(locks, 1, "b"))
        assert (await locks.lock("a").inspect()).held
        dying.signal(signal.SIGKILL)
        lease = await locks.lock("a").acquire(timeout=10)
        await held.release()
        again = await locks.lock("b").acquire(timeout=10)
        assert await lease.release()
        assert await again.release()


@rule(1)
async def test_a_multi_lock_overtakes_no_waiter(mode):
    """A free lock with a waiter at the head of its queue goes to that waiter."""
    locks, others = mode.interlock(), mode.interlock()
    held = await mode.interlock().lock("a").acquire()  # a third client: its own callers would wait in its cohort
    task = asyncio.ensure_future(others.lock("a").acquire(timeout=30))
    await until(lambda: queued(others, 1))
    mine = asyncio.ensure_future(some(locks).acquire(timeout=30))
    await until(lambda: queued(others, 2))
    await held.release()
    first = await task
    assert not mine.done()
    await first.release()
    lease = await mine
    assert lease.fence["a"] > first.fence
    await lease.release()


async def test_inspect_revoke_and_extend_work_on_all_locks(mode):
    locks = mode.interlock(max_ttl=9)
    together = some(locks)
    lease = await together.acquire()
    await lease.extend(9)
    assert lease.remaining() > 6
    states = await together.inspect()
    assert states["a"].holder == lease["a"].token
    assert await together.revoke("enough")
    await until(lease.lost.is_set)
    assert not await lease.release()
    await until(lambda: free(locks, "ab"))


def test_bad_members_of_a_multi_lock_are_refused(mode):
    locks, other = mode.interlock(), mode.interlock()
    for wrong in (
        locks.multi,
        lambda: locks.multi(locks.lock("a"), locks.lock("a")),
        lambda: locks.multi(locks.lock("a"), locks.rlock("a")),
        lambda: locks.multi(locks.rwlock("a").read(), locks.rwlock("a").write()),
        lambda: locks.multi("a", "b"),
        lambda: locks.multi(locks.lock("a"), other.lock("b")),
        lambda: locks.multi(locks.rwlock("a")),
        lambda: locks.multi(locks.election("a")),
        lambda: locks.multi(locks.rlock("a", owner="me")),
        lambda: locks.multi(locks.lock("a"), timeout=-1),
        lambda: locks.multi(*(locks.lock(str(i)) for i in range(1001))),
    ):
        with pytest.raises(ConfigError):
            wrong()


async def test_a_name_of_another_kind_is_refused(mode, clean):
    locks = mode.interlock()
    held = await locks.semaphore("b", 2).acquire()
    assert isinstance(await outcome(some(locks).acquire()), ConfigError)
    assert await free(locks, "a")
    assert await waiting(locks.semaphore("b", 2), 0)
    await held.release()


async def test_a_function_decorated_with_a_multi_lock_runs_under_all_locks(mode):
    locks = mode.interlock()
    if mode.name == "asyncio":

        @some(locks)
        async def work() -> bool:
            return await free(locks, "ab")

        assert not await work()
    else:

        @some(locks)._real
        def blocking() -> bool:
            return locks._real.lock("a").inspect().held

        assert await mode.in_thread(blocking)
    assert await free(locks, "ab")


@pytest.mark.runs_on("valkey-9.1")
async def test_more_locks_than_one_step_takes_are_all_held_or_none(mode, clean):
    locks, others = mode.interlock(), mode.interlock()
    names = [f"{{m}}{number:03}" for number in range(2 * MAX_TOGETHER + 7)]
    many = locks.multi(*(locks.lock(name) for name in names))
    lease = await many.acquire(timeout=20)
    assert list(lease.fence) == names
    assert len(clean.keys("lock:{m}???")) == len(names)
    assert await lease.release()
    held = await others.lock(names[-1]).acquire()
    assert await many.try_acquire() is None
    assert clean.keys("lock:{m}???") == [f"lock:{names[-1]}".encode()]
    waits = asyncio.ensure_future(many.acquire(timeout=20))
    await until(lambda: waiting(others.lock(names[-1]), 1))
    await held.release()
    lease = await waits
    lease.ensure()
    assert await lease.release()
