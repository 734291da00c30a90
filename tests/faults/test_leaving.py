"""Leaving a `with` without waiting for the reply to its release (`confirm=False`): what becomes of that release?

The reply is late or lost, the server restarts, the process is killed or forks, the caller is cancelled, the client is
closed. Not here: Ctrl-C at any step of a section (test_interrupts.py).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import redis

import interlock
import interlock.aio
from harness.clock import machine_time
from harness.modes import SLACK, outcome, real, until, wait_until
from interlock import ConfigError, LeaseLost, LeaseState
from interlock._client import unread_releases
from interlock._client.unread_releases import LOOK_AFTER, LOST_AFTER
from interlock._session import session

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


def left(mode, locks):
    """The releases of this client at whose replies nobody has looked."""
    return mode.session(locks).unread_releases.left


def settled(mode, locks) -> bool:
    """Whether the client waits for no reply, and undoes nothing."""
    session = mode.session(locks)
    return not session.unread_releases.left and not session.undo.jobs and not session.owed


async def in_one_thread(mode, made, blocking, not_blocking):
    """What one of the two returns: in threads all of `blocking` runs in one thread."""
    return await (mode.in_thread(blocking, real(made)) if mode.name == "threads" else not_blocking(made))


def make_lock(locks):
    return locks.lock("a", confirm=False)


def make_rlock(locks):
    return locks.rlock("a", confirm=False)


def make_permit(locks):
    return locks.semaphore("a", 2, confirm=False)


def make_reader(locks):
    return locks.rwlock("a", confirm=False).read()


def make_multi(locks):
    return locks.multi(locks.lock("{a}1", confirm=False), locks.lock("{a}2", confirm=False))


# A network that works


@pytest.mark.parametrize("make", [make_lock, make_rlock, make_permit, make_reader, make_multi])
async def test_a_with_ends_before_the_reply_to_its_release(mode, clean, proxy, make):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=30")
    thing = make(locks)
    async with thing:
        pass
    await until(lambda: settled(mode, locks))
    async with thing as lease:
        proxy.hold = True
        began = machine_time()
    assert machine_time() - began < SLACK
    assert lease.state is LeaseState.RELEASED
    assert left(mode, locks)
    proxy.hold = False
    await until(lambda: settled(mode, locks))
    assert await (await thing.try_acquire()).release()


async def test_a_decorated_call_ends_before_the_reply_to_its_release(mode, clean, proxy):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=30", confirm=False)

    def blocking() -> None:
        proxy.hold = True

    async def not_blocking() -> None:
        proxy.hold = True

    await (await locks.lock("warm").acquire()).release()
    await in_one_thread(
        mode,
        locks,
        lambda locks: locks.synchronized("a")(blocking)(),
        lambda locks: locks.synchronized("a")(not_blocking)(),
    )
    assert left(mode, locks)
    proxy.hold = False
    await until(lambda: settled(mode, locks))


async def test_the_worker_reads_a_reply_that_nobody_else_reads(mode, clean):
    locks = mode.interlock(confirm=False)
    async with locks.lock("a"):
        pass
    await until(lambda: not left(mode, locks), within=2 * LOOK_AFTER + SLACK)
    assert not clean.exists("lock:a")


@rule(8)
async def test_a_try_right_after_the_section_succeeds(mode, clean):
    """The same connection brings both to the server, if no other thread uses the Interlock."""
    locks = mode.interlock(confirm=False)

    def blocking(locks) -> int:
        lock, misses = locks.lock("a"), 0
        for _ in range(150):
            with lock:
                pass
            lease = lock.try_acquire()
            misses += lease is None
            if lease is not None:
                lease.release()
        return misses

    async def not_blocking(locks) -> int:
        lock, misses = locks.lock("a"), 0
        for _ in range(150):
            async with lock:
                pass
            lease = await lock.try_acquire()
            misses += lease is None
            if lease is not None:
                await lease.release()
        return misses

    assert await in_one_thread(mode, locks, blocking, not_blocking) == 0


@rule(8)
async def test_a_call_right_after_the_section_waits_for_the_release_at_most(mode, clean):
    """Other threads use the connections meanwhile, so the release and the acquire travel over two of them."""
    locks, over = mode.interlock(confirm=False, max_connections=3), threading.Event()

    def busy(locks) -> None:
        other = locks.lock(f"other {threading.get_ident()}")
        while not over.is_set():
            with other:
                pass

    def blocking(locks) -> None:
        for _ in range(150):
            with locks.lock("a", timeout=30):
                pass

    async def not_blocking(locks) -> None:
        for _ in range(150):
            async with locks.lock("a", timeout=30):
                pass

    others = [mode.in_thread(busy, real(locks)) for _ in range(4 if mode.name == "threads" else 0)]
    others = [asyncio.ensure_future(each) for each in others]
    try:
        await in_one_thread(mode, locks, blocking, not_blocking)
    finally:
        over.set()
        await asyncio.gather(*others)
    await until(lambda: settled(mode, locks) and not clean.exists("lock:a"))


async def test_a_body_without_an_await_does_not_keep_the_lock_of_the_section_before(mode, clean):
    """The release is written before the `with` ends: the loop, or the process, may stand still right after it."""
    locks = mode.interlock(confirm=False)
    async with locks.lock("a"):
        pass
    end = machine_time() + 30  # the loop does not run meanwhile
    while clean.exists("lock:a"):
        assert machine_time() < end
    assert left(mode, locks)


@pytest.mark.runs_on("valkey-9.1", modes="threads")
def test_the_pool_does_not_grow(server, clean):
    with interlock.Interlock(server.url, confirm=False) as locks:
        pool = locks._session.server.pool
        for _ in range(300):
            with locks.lock("a"), locks.lock("b"):
                pass
        # One; and another if a worker had something to say while this thread used the first.
        assert pool._open_number == len(pool.idle) <= 2


@pytest.mark.runs_on("valkey-9.1", modes="threads")
def test_many_threads_on_one_lock_lose_no_wake_up(server, clean):
    """Each waits for a connection, too, and gives one back that has an unread reply."""
    count, most = [0], 4
    with interlock.Interlock(server.url, confirm=False, max_connections=most) as locks:
        pool = locks._session.server.pool

        def work() -> None:
            for _ in range(10):
                with locks.lock("a", timeout=50):
                    count[0] += 1

        threads = [threading.Thread(target=work) for _ in range(32)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(55)
        assert count == [320]
        assert pool._open_number <= most + len(locks._session.workers)
        assert not pool.waiting


async def test_a_body_that_raises_leaves_so_too(mode, clean, proxy):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=30", confirm=False)
    with pytest.raises(ZeroDivisionError):
        async with locks.lock("a"):
            proxy.hold = True
            raise ZeroDivisionError
    assert left(mode, locks)
    proxy.hold = False
    await until(lambda: settled(mode, locks) and not clean.exists("lock:a"))


@rule(8)
async def test_a_release_whose_script_the_server_forgot_keeps_nobody_out(mode, clean):
    locks = mode.interlock(confirm=False)

    def blocking(locks) -> bool:
        with locks.lock("a"):
            clean.script_flush()
        return locks.lock("a").acquire(timeout=20).release()

    async def not_blocking(locks) -> bool:
        async with locks.lock("a"):
            clean.script_flush()
        return await (await locks.lock("a").acquire(timeout=20)).release()

    assert await in_one_thread(mode, locks, blocking, not_blocking)
    await until(lambda: settled(mode, locks))


async def test_a_script_that_the_server_forgot_is_sent_by_the_worker(mode, clean):
    locks = mode.interlock(confirm=False)
    async with locks.lock("a"):
        clean.script_flush()
    await until(lambda: settled(mode, locks))
    assert not clean.exists("lock:a")


# Lost leases


@rule(6)
async def test_a_loss_that_only_the_reply_tells_is_reported(mode, clean, caplog):
    locks, told = mode.interlock(confirm=False), []
    async with locks.lock("a", on_lost=told.append) as lease:
        clean.delete("lock:a")
    await until(lambda: told and settled(mode, locks))
    assert lease.lost.is_set()
    assert lease.state is LeaseState.LOST
    with pytest.raises(LeaseLost, match="had ended in the server before it was released"):
        lease.ensure()
    await until(lambda: "is lost" in caplog.text)
    assert [each for each in caplog.records if "is lost" in each.message and each.levelno == logging.WARNING]


@rule(6)
async def test_a_loss_is_reported_though_nobody_kept_the_lease(mode, clean):
    locks, told = mode.interlock(confirm=False), []
    async with locks.lock("a", on_lost=lambda lease: told.append(lease.fence)):
        clean.delete("lock:a")
    await until(lambda: told)


@rule(6)
async def test_a_lease_with_less_than_half_of_its_ttl_waits_for_the_reply(mode, clean):
    locks = mode.interlock(confirm=False)
    with pytest.raises(LeaseLost):
        async with locks.lock("a", ttl=1.0, renew=False) as lease:
            await until(lambda: lease.remaining() < 0.5)
            clean.delete("lock:a")


@rule(6)
async def test_a_lease_whose_renewal_fails_waits_for_the_reply(mode, clean):
    locks = mode.interlock(confirm=False)
    with pytest.raises(LeaseLost):
        async with locks.lock("a") as lease:
            real(lease)._grant.hold.renewal_failing = True
            clean.delete("lock:a")


async def test_release_waits_for_the_reply(mode, clean):
    lease = await mode.interlock(confirm=False).lock("a").acquire()
    clean.delete("lock:a")
    assert await lease.release() is False


@rule(6)
@pytest.mark.runs_on("valkey-9.1", modes="threads")
@pytest.mark.parametrize("closes", [False, True])
def test_a_loss_is_reported_though_a_thread_keeps_the_connection_of_an_earlier_release(server, clean, closes):
    told = []
    with interlock.Interlock(server.url, confirm=False) as locks:
        unread, pool = locks._session.unread_releases, locks._session.server.pool
        with locks.lock("b", on_lost=told.append):
            other = pool.take()
            with locks.lock("a"):
                pass
            busy = pool.take()  # another thread uses it, and is slow
            other.checkin()
            clean.delete("lock:b")
        assert [each.sent.connection is busy for each in unread.left] == [True, False]
        if closes:
            locks.close()
        else:
            wait_until(lambda: told)
            assert [each.sent.connection is busy for each in unread.left] == [True]
        wait_until(lambda: told)
        busy.checkin()


@pytest.mark.runs_on("valkey-9.1", modes="threads")
def test_an_error_in_place_of_the_reply_drops_the_connections_once(server_pool, cell):
    with (
        server_pool.spare(cell.kind) as node,
        redis.Redis.from_url(node.url) as client,
        interlock.Interlock(node.url, confirm=False) as locks,
    ):
        drops, pool = [], locks._session.server.pool
        drop_all = pool.drop_all
        with locks.lock("a"):
            client.replicaof("127.0.0.1", "1")
        (left,) = locks._session.unread_releases.left
        pool.drop_all = lambda: drops.append(drop_all())
        wait_until(lambda: left.sent.reply is not None)
        assert "READONLY" in str(left.sent.reply)
        assert len(drops) == 1
        client.replicaof("no", "one")
        wait_until(lambda: not client.exists("lock:a"))


# The reply is lost


@rule(8)
async def test_a_connection_that_breaks_before_the_reply_costs_one_more_release(mode, clean, proxy):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=30", confirm=False)
    await (await locks.lock("warm").acquire()).release()
    async with locks.lock("a") as lease:
        proxy.drop_replies = True
    await until(lambda: not clean.exists("lock:a"))
    proxy.cut()
    proxy.drop_replies = False
    await until(lambda: settled(mode, locks))
    assert lease.state is LeaseState.RELEASED
    assert await (await locks.lock("a").try_acquire()).release()


@rule(8)
async def test_a_release_that_never_arrived_is_repeated_long_before_the_ttl(mode, clean, proxy):
    """The connection is dead without a sign, as when a firewall forgot it."""
    locks = mode.interlock(f"{proxy.url}?socket_timeout=0.5", confirm=False)
    async with locks.lock("a"):
        proxy.freeze()
    began = machine_time()
    await until(lambda: not clean.exists("lock:a"))
    assert machine_time() - began < LOST_AFTER + 2 + SLACK
    await until(lambda: settled(mode, locks))


@rule(6)
@pytest.mark.runs_on("valkey-9.1", modes="threads")
def test_a_reply_is_not_lost_while_a_thread_that_stands_still_keeps_its_connection(server, clean, caplog):
    """As when the process was stopped for a while: the reply is there, and may tell of a loss."""
    told = []
    with interlock.Interlock(server.url, confirm=False) as locks:
        unread = locks._session.unread_releases
        with locks.lock("a", on_lost=told.append):
            clean.delete("lock:a")
        busy = locks._session.server.pool.take()
        sent_at = unread.left[0].sent_at
        wait_until(lambda: unread.next_look > sent_at + LOST_AFTER + 2 * LOOK_AFTER)  # the worker has looked by then
        assert unread.left
        busy.checkin()
        wait_until(lambda: told)
    assert "no reply" not in caplog.text


@rule(8)
async def test_the_next_request_on_a_connection_that_broke_goes_on(mode, clean, proxy):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=30", confirm=False)

    def blocking(locks) -> bool:
        with locks.lock("a"):
            proxy.cut()
        with locks.lock("a", timeout=20):
            return True

    async def not_blocking(locks) -> bool:
        async with locks.lock("a"):
            proxy.cut()
        async with locks.lock("a", timeout=20):
            return True

    assert await in_one_thread(mode, locks, blocking, not_blocking)
    await until(lambda: settled(mode, locks) and not clean.exists("lock:a"))


@rule(8)
async def test_a_server_that_is_away_when_a_section_ends_is_told_later(mode, server_pool, cell, caplog):
    with server_pool.spare(cell.kind, config=DURABLE) as node, redis.Redis.from_url(node.url) as client:
        locks = mode.interlock(node.url, confirm=False)
        async with locks.lock("a"):
            node.kill()
        await until(lambda: mode.session(locks).undo.jobs)
        node.restart()
        await until(lambda: settled(mode, locks))
        assert not client.exists("lock:a")
        assert "The release goes on in the background" in caplog.text
        await locks.close()


# The client ends


@rule(8)
async def test_close_looks_at_the_replies(mode, clean, caplog):
    locks, told = mode.interlock(confirm=False), []
    async with locks.lock("a"):
        pass
    async with locks.lock("b", on_lost=told.append):
        clean.delete("lock:b")
    await locks.close()
    assert not clean.exists("lock:a")
    assert "lock 'b'" in caplog.text
    assert not left(mode, locks) if mode.name == "threads" else True


@rule(8)
async def test_close_is_bounded_if_the_reply_does_not_come(mode, clean, proxy):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=30", confirm=False)
    async with locks.lock("a"):
        proxy.freeze()
    began = machine_time()
    await locks.close()
    assert machine_time() - began < 1 + 2  # and two seconds for a busy machine


@rule(8)
async def test_close_and_the_worker_do_not_wait_for_one_reply_at_once(mode, clean, proxy, monkeypatch):
    monkeypatch.setattr(session, "CLOSE_TIMEOUT", 40.0)
    monkeypatch.setattr(unread_releases, "LOST_AFTER", 40.0)
    locks = mode.interlock(f"{proxy.url}?socket_timeout=50", confirm=False)
    async with locks.lock("a"):
        proxy.hold = True
    assert left(mode, locks)
    began, closing = machine_time(), asyncio.ensure_future(locks.close())
    await until(lambda: machine_time() > began + 3 * LOOK_AFTER)  # by then the worker would have looked
    proxy.hold = False
    async with asyncio.timeout(SLACK):
        await closing


@rule(8)
@pytest.mark.runs_on("valkey-9.1", modes="threads")
def test_after_close_the_worker_says_nothing_of_a_release_that_close_has_repeated(server, clean, proxy, caplog):
    locks = interlock.Interlock(f"{proxy.url}?socket_timeout=30", confirm=False)
    worker = locks._session.unread_releases
    with locks.lock("a"):
        proxy.freeze()
    wait_until(lambda: worker.left[0].sent.connection not in worker.server.pool.idle)  # the worker waits for the reply
    locks.close()
    assert not clean.exists("lock:a")
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "interlock-worker-undo"])
    assert "no reply" not in caplog.text


CODE = {
    "threads": """
        import interlock, os, signal, sys
        locks = interlock.Interlock(sys.argv[1], confirm=False)
        with locks.lock("warm"):
            pass
        with locks.lock("a", ttl=1.5):
            pass
        END
    """,
    "asyncio": """
        import asyncio, interlock.aio, os, signal, sys
        async def main():
            global locks
            locks = interlock.aio.Interlock(sys.argv[1], confirm=False)
            async with locks.lock("warm"):
                pass
            async with locks.lock("a", ttl=1.5):
                pass
            END
        asyncio.run(main())
    """,
}


async def run_to_the_end(mode, end: str, ttl: float = 1.5) -> int:
    """The return code of a process that does this right after a section."""
    code = textwrap.dedent(CODE[mode.name]).replace("END", end).replace("ttl=1.5", f"ttl={ttl}")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, mode.url)
    return await process.wait()


@rule(3)
async def test_a_process_killed_right_after_a_section_keeps_nobody_out_for_longer_than_the_ttl(mode, clean):
    """Its release was written, or not."""
    code = await run_to_the_end(mode, "os.kill(os.getpid(), signal.SIGKILL)")
    killed = machine_time()
    assert code == -signal.SIGKILL
    async with mode.interlock().lock("a", timeout=20):
        assert machine_time() - killed < 1.5 + 1 + SLACK


@rule(3)
async def test_a_process_that_ends_without_its_exit_hooks_has_sent_its_release(mode, clean):
    assert await run_to_the_end(mode, "os._exit(3)", ttl=30) == 3
    await until(lambda: not clean.exists("lock:a"), within=15)


async def test_a_process_that_exits_right_after_a_section_leaves_nothing(mode, clean):
    assert await run_to_the_end(mode, "pass") == 0
    assert not clean.exists("lock:a", "lock:warm")


@rule(11)
@pytest.mark.runs_on("valkey-9.1", modes="threads")
def test_a_child_after_fork_expects_no_reply_to_a_release_of_its_parent(server, clean):
    code = textwrap.dedent(CODE["threads"]).replace(
        "END",
        textwrap.dedent("""
        child = os.fork()
        session = locks._session
        if not child:
            assert not session.unread_releases.left and not session.undo.jobs
            with locks.lock("b", timeout=5):
                pass
            os._exit(7)
        assert os.waitpid(child, 0)[1] >> 8 == 7
        lease = locks.lock("a").try_acquire()
        assert lease and lease.release()
        assert not session.undo.jobs
        """),
    )
    subprocess.run([sys.executable, "-c", code, server.url], check=True, timeout=50)
    assert not clean.exists("lock:a", "lock:b")


# The caller ends


async def test_a_task_that_is_cancelled_as_it_leaves_has_left(server, clean):
    inside = asyncio.Event()

    async def work(*, at_the_end: bool) -> None:
        async with locks.lock("a"):
            inside.set()
            if at_the_end:
                asyncio.current_task().cancel()  # it arrives at the next await: in __aexit__, if there is one there
            else:
                await asyncio.Event().wait()
        await asyncio.sleep(0)

    async with interlock.aio.Interlock(server.url, confirm=False) as locks:
        for at_the_end in (True, False):
            task = asyncio.ensure_future(work(at_the_end=at_the_end))
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            inside.clear()
            await until(lambda: not locks._session.unread_releases.left and not clean.exists("lock:a"))
        assert not locks._session.undo.jobs


# What does not go together


async def test_what_has_to_wait_refuses_it(mode):
    locks = mode.interlock()
    for refused, words in (
        (lambda: locks.lock("a", confirm=False, acks=1), "confirm=False and acks=1"),
        (lambda: locks.lock("a", confirm=False, fsync=True), "confirm=False and fsync=True"),
        (lambda: locks.election("a", confirm=False), "election takes no confirm=False"),
        (lambda: locks.lock("a", confirm=0), "confirm must be True or False, not 0"),
        (lambda: mode.interlock(confirm=None), "confirm must be True or False, not None"),
    ):
        with pytest.raises(ConfigError, match=words):
            refused()


async def test_the_default_of_an_interlock_is_for_what_may_leave_so(mode):
    locks = mode.interlock(confirm=False)
    assert not real(locks.lock("a"))._options.confirm
    assert real(locks.lock("a", confirm=True))._options.confirm
    assert real(locks.lock("a", acks=1))._options.confirm
    assert real(locks.election("a"))._options.confirm
    assert real(locks.once("a", at_most=5))._options.confirm
    assert real(mode.interlock().lock("a"))._options.confirm


async def test_a_quorum_refuses_it(mode):
    locks = mode.interlock(["redis://h1", "redis://h2", "redis://h3"])
    error = await outcome(as_coroutine(lambda: locks.lock("a", confirm=False)))
    assert "quorum takes no confirm=False" in str(error)


async def as_coroutine(function):
    return function()
