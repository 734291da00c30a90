"""What a child does after a fork, with and without Python's hooks; one case a run.

    python forked.py [by-id] CASE os.fork|unseen URL

Prints OK if the case holds in the parent and in the child. With by-id, the kernel clears no page for the client.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import mmap
import os
import signal
import sys
import threading
import time
import traceback
import warnings

if sys.argv[1] == "by-id":
    del sys.argv[1]
    mmap.mmap = lambda *_args, **_options: (_ for _ in ()).throw(OSError("none here"))

from harness.unseen import fork_in_c, hide_forks

hide_forks()

import interlock  # noqa: E402
import interlock.aio  # noqa: E402
from interlock import embedded  # noqa: E402
from interlock._protocol import forks  # noqa: E402
from interlock._transports.asyncio.connection import AsyncioConnection  # noqa: E402
from interlock._transports.blocking.connection import BlockingConnection  # noqa: E402
from interlock.errors import ConfigError, LeaseLost  # noqa: E402

case, how, url = sys.argv[1:]
fork = os.fork


def in_child(work, *, exits: bool = False) -> None:
    """Run this in a child; it must succeed within 20 s. `exits`: the child ends in the ordinary way."""
    pid = fork()
    if not pid:
        signal.alarm(20)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        if exits:
            sys.exit(0)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, code


def many_threads() -> None:
    """Several threads of the child arrive together: the client begins anew once."""
    with interlock.Interlock(url) as locks:
        locks.lock("used").acquire().release()

        def child() -> None:
            start, channels, tokens = threading.Barrier(8), set(), []

            def thread(number: int) -> None:
                start.wait()
                with locks.lock(f"mine:{number}") as lease:
                    channels.add(locks._session.channel)
                    tokens.append(lease.token)
                with locks.lock("shared"):
                    pass

            threads = [threading.Thread(target=thread, args=(number,)) for number in range(8)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert len(channels) == 1 and forks.count == 1, (channels, forks.count)
            assert {token.split("/")[1] for token in tokens} == {str(os.getpid())}, tokens

        in_child(child)
        assert forks.count == 0


def at_exit() -> None:
    """A child that ends in the ordinary way gives back nothing of its parent, whose lease goes on."""
    locks = interlock.Interlock(url)
    lease = locks.lock("a", ttl=1.5).acquire()
    kept = []
    in_child(lambda: None, exits=True)
    in_child(lambda: kept.append(locks.lock("b").acquire()), exits=True)
    with locks.lock("b", timeout=0):  # the child gave back its own
        pass
    before = lease.remaining()
    while lease.remaining() <= before:
        before = lease.remaining()
        lease.ensure()
    assert lease.release()


def finalized() -> None:
    """A child that drops the lease of its parent, or the `with`, says nothing and gives back nothing."""
    warnings.simplefilter("error")
    locks = interlock.Interlock(url)
    lease = locks.lock("a").acquire()
    section = locks.lock("b").__exit__  # as a `with` loads it
    section.lockable.__enter__()

    def child() -> None:
        nonlocal lease, section
        del lease, section
        gc.collect()
        assert locks.lock("a").try_acquire() is None
        assert locks.lock("b").try_acquire() is None

    in_child(child)
    lease.ensure()
    assert lease.release()


def kinds() -> None:
    """Each kind that is held by the parent is not held by the child, and the child can acquire others of it."""
    locks = interlock.Interlock(url)
    pool, both = locks.semaphore("pool", 2), locks.rwlock("both")
    rlock, multi, leads = locks.rlock("rlock"), locks.multi(locks.lock("m1"), locks.lock("m2")), locks.election("leads")
    latch, barrier = locks.latch("latch", 1), locks.barrier("barrier", 1)
    leases = [each.acquire(timeout=5) for each in (rlock, pool, both.read(), multi)] + [leads.campaign(5)]

    @locks.synchronized("call")
    def call() -> str:
        return locks.assert_held("call").token

    def child() -> None:
        for lease in leases:
            assert lease.state == "lost" and lease.lost.is_set() and lease.ended.is_set(), lease
            assert not lease.release()
        for busy in (rlock, both.write(), multi):
            assert busy.try_acquire() is None, busy
        pid = str(os.getpid())
        with pool as permit, both.read() as read:
            assert permit.token.split("/")[1] == read.token.split("/")[1] == pid
        assert call().split("/")[1] == pid
        assert str(os.getppid()) in leads.leader().token
        assert locks.once("run", at_most=5).run(lambda _: "ran").value == "ran"
        latch.count_down()
        latch.wait(5)
        barrier.wait(5)

    in_child(child)
    for lease in leases:
        assert lease.release()


def in_handler() -> None:
    """A signal handler forks while its thread waits for a lock: the wait goes on in the parent alone."""
    locks, others = interlock.Interlock(url), interlock.Interlock(url)
    held, child = others.lock("a", ttl=3).acquire(), []
    signal.signal(signal.SIGUSR1, lambda *_: child.append(fork()))

    def later() -> None:
        while not locks.lock("a").inspect().waiting:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not child:
            time.sleep(0.01)
        held.release()

    threading.Thread(target=later, daemon=True).start()
    try:
        lease = locks.lock("a").acquire(timeout=15)
    except ConfigError as error:
        os._exit(0 if child == [0] and "began in the parent process" in str(error) else 2)
    if child == [0]:
        os._exit(3)
    lease.ensure()
    assert lease.token.split("/")[1] == str(os.getpid())
    assert os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]) == 0
    assert lease.release()


def same_loop() -> None:
    """A child can't go on in an event loop of its parent, whose connections that loop watches; the parent goes on."""
    loop, locks = asyncio.new_event_loop(), interlock.aio.Interlock(url)

    async def use(times: int) -> None:
        for _ in range(times):
            async with locks.lock("a"):
                pass

    loop.run_until_complete(use(1))

    def child() -> None:
        try:
            loop.run_until_complete(use(1))
        except ConfigError as error:
            assert "before a fork" in str(error), error
        else:
            raise AssertionError("it shares a connection")
        asyncio.run(use(20))
        loop.run_until_complete(locks.close())

    in_child(child)
    loop.run_until_complete(asyncio.wait_for(use(50), 5))
    loop.run_until_complete(locks.close())
    loop.close()


def tasks_at_exit() -> None:
    """As at-exit, with a lease of asyncio, whose loop runs at the fork."""

    async def main() -> None:
        locks = interlock.aio.Interlock(url)
        async with locks.lock("a", ttl=1.5) as lease:

            def child() -> None:
                assert lease.state == "lost"
                asyncio._set_running_loop(None)
                atexit._run_exitfuncs()

            in_child(child)
            before = lease.remaining()
            while lease.remaining() <= before:
                before = lease.remaining()
                await asyncio.sleep(0.01)
            lease.ensure()
        await locks.close()

    asyncio.run(main())


def servers() -> None:
    """A child neither ends the private server of its parent, nor thinks that it owns one."""
    with embedded.Server() as server, interlock.Interlock(server.url) as locks:
        in_child(lambda: None, exits=True)
        in_child(server.stop)
        locks.lock("a").acquire().release()


def drop_ins() -> None:
    """The drop-ins of a child use connections of the child."""
    import redis

    from interlock.compat import redis_lock, redis_py

    client = redis.Redis.from_url(url)
    mine, other = redis_py.Lock(client, "r", timeout=20), redis_lock.Lock(client, "l", expire=20)
    assert mine.acquire() and other.acquire()

    def child() -> None:
        with redis.Redis.from_url(url) as client:
            assert not redis_py.Lock(client, "r", timeout=20).acquire(blocking=False)
            assert not redis_lock.Lock(client, "l", expire=20).acquire(blocking=False)
            for number in range(30):
                with redis_py.Lock(client, "mine", timeout=20), redis_lock.Lock(client, f"mine:{number}", expire=20):
                    pass

    in_child(child)
    mine.release()
    other.release()


def closing() -> None:
    """Another thread closes the Interlock at the fork: the child begins anew all the same."""
    locks = interlock.Interlock(url)
    lock, session = locks.lock("a"), locks._session
    lock.acquire().release()
    settles, goes_on, settle = threading.Event(), threading.Event(), session.unread_releases.settle

    async def slow(*args) -> None:
        settles.set()
        goes_on.wait()
        await settle(*args)

    session.unread_releases.settle = slow
    thread = threading.Thread(target=locks.close)
    thread.start()
    settles.wait()

    def child() -> None:
        with lock as lease:
            assert lease.token.split("/")[1] == str(os.getpid()), lease.token

    in_child(child)
    goes_on.set()
    thread.join()


def before_write() -> None:
    """A signal handler forks just before a request is written: the child does not write it to the parent's server."""
    locks = interlock.Interlock(url)
    other = interlock.Interlock(url)
    held, child = other.lock("y").acquire(), []
    locks.lock("x").acquire().release()
    limits = BlockingConnection._set_timeout

    def handler(connection, until) -> None:
        if not child:
            child.append(fork())
            if child == [0]:
                BlockingConnection.read = lambda *_: os._exit(4)  # it has written, and leaves the reply to the parent
        limits(connection, until)

    BlockingConnection._set_timeout = handler
    try:
        lease = locks.lock("x").acquire(timeout=4)
    except ConfigError:
        os._exit(0 if child == [0] else 2)
    if child == [0]:
        os._exit(3)
    BlockingConnection._set_timeout = limits
    assert os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]) == 0
    assert locks.lock("y").try_acquire() is None
    assert locks.lock("x").inspect().holder == lease.token
    assert lease.release()
    assert held.release()


def election() -> None:
    """A child that returns from the work of a leader does not campaign."""
    locks, ran = interlock.Interlock(url), []

    def work(lease) -> None:
        ran.append(os.getpid())
        if not (pid := fork()):
            signal.alarm(20)
            return
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        lease.ensure()

    try:
        locks.election("leads").run(work)
    except LeaseLost as error:
        os._exit(0 if len(ran) == 1 and ran != [os.getpid()] and "child" in str(error) else 2)
    assert ran == [os.getpid()]


def goes_on_in_loop() -> None:
    """A child that goes on in the running loop of its parent takes no reply from the parent."""

    async def main() -> None:
        locks = interlock.aio.Interlock(url)
        async with locks.lock("a", ttl=3) as lease:
            if not (pid := fork()):
                signal.alarm(20)
                received, calls = AsyncioConnection.data_received, []

                def receives(connection, data) -> None:
                    calls.append(len(data))
                    if how == "os.fork" or len(calls) > 1:  # in C it notices the fork by the first
                        os._exit(4)
                    received(connection, data)

                AsyncioConnection.data_received = receives
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    await asyncio.sleep(0)
                os._exit(0)
            for number in range(300):
                async with asyncio.timeout(4), locks.lock(f"b:{number % 7}"):
                    pass
                await asyncio.sleep(0.004)
            assert lease.state == "held"
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        await locks.close()

    asyncio.run(main())


def renewed_drop_in() -> None:
    """A child that releases a lock with `auto_renewal` waits for no thread of its parent."""
    import redis

    from interlock.compat import redis_lock

    global fork  # noqa: PLW0603
    mine = redis_lock.Lock(redis.Redis.from_url(url), "l", expire=20, auto_renewal=True)
    assert mine.acquire()
    if how != "os.fork":  # Python's own part of a fork would mark the thread as ended
        fork = fork_in_c

    def child() -> None:
        with contextlib.suppress(RuntimeError):
            mine.release()

    in_child(child)
    with contextlib.suppress(RuntimeError):  # as with the original, whoever knows the id releases the lock
        mine.release()


def finds_out() -> None:
    """Each child of a fork in C finds out by itself, and its parent is not disturbed, with either kind of `KNOWN`."""
    for known in (forks.KNOWN, forks.KnownById()):
        known[0] = 1

        def child(known=known) -> int:
            if known[0] or exit_of(lambda: 9 if known[0] else 7) != 7:
                return 2
            known[0] = 1
            return 3 if known[0] and exit_of(lambda: 9 if known[0] else 8) == 8 and known[0] else 4

        assert exit_of(child) == 3
        assert known[0]


def same_id() -> None:
    """A child with the process id of its parent finds out, too: each is the first of a pid namespace of its own."""
    newpid = 0x20000000  # CLONE_NEWPID
    libc = ctypes.CDLL(None)

    def grandchild() -> int:
        return 7 if os.getpid() == 1 and not forks.KNOWN[0] else 2

    def child() -> int:
        forks.KNOWN[0] = 1
        return 3 if os.getpid() == 1 and libc.unshare(newpid) == 0 and exit_of(grandchild) == 7 else 2

    code = exit_of(lambda: 9 if libc.unshare(newpid) else exit_of(child))
    if code == 9:
        sys.exit("this user may make no pid namespaces")
    assert code == 3


def exit_of(work) -> int:
    """The exit status of a child that runs this."""
    if not (pid := fork_in_c()):
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def created_only() -> None:
    """An Interlock that was not used before the fork names the child in its tokens and in the registry."""
    locks = interlock.Interlock(url)

    def child() -> None:
        with locks.lock("a") as lease:
            assert lease.token.split("/")[1] == str(os.getpid())
            while not any(str(os.getpid()) in repr(each) for each in locks.ls()):
                time.sleep(0.05)

    in_child(child)


CASES = {
    "many-threads": many_threads, "at-exit": at_exit, "finalized": finalized, "kinds": kinds, "in-handler": in_handler,
    "same-loop": same_loop, "tasks-at-exit": tasks_at_exit, "servers": servers, "drop-ins": drop_ins,
    "created-only": created_only, "closing": closing, "before-write": before_write, "election": election,
    "goes-on-in-loop": goes_on_in_loop, "renewed-drop-in": renewed_drop_in,
    "finds-out": finds_out, "same-id": same_id,
}  # fmt: skip
CASES[case]()
print("OK", flush=True)
