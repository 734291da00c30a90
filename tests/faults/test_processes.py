"""Several processes on one server: killed, stopped, forked, and ended in the ordinary way.

Not here: fork with Sentinel, a cluster or a quorum (`topologies/test_fork_with_topologies.py`), a process that is
restored twice (test_snapshots.py), thousands of dead waiters (test_dead_waiters.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time

import pytest

import interlock
import interlock.aio
from harness.clock import machine_time
from harness.modes import queued, until
from harness.processes import PROGRAMS, processes
from harness.proxy import Proxy
from harness.unseen import HOW

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


@rule(3)
async def test_a_killed_holder_is_followed_within_its_ttl_and_a_second(mode):
    locks = mode.interlock()
    async with processes(mode, 1) as (holder,):
        await holder.do("acquire", "a", {"ttl": 1.5}, 5)
        waiting = asyncio.ensure_future(locks.lock("a").acquire(20))
        await until(lambda: queued(locks, 1))
        killed = machine_time()
        await holder.end(signal.SIGKILL)
        lease = await waiting
        assert machine_time() - killed < 1.5 + 1 + 1  # and a second for a busy machine
        await lease.release()


@rule(3)
async def test_a_holder_that_is_killed_while_it_releases_leaves_a_free_lock(mode, clean, server):
    """Its request was sent, or not; nobody read the reply."""
    locks = mode.interlock()
    for applied in (True, False):
        with Proxy(server.socket) as proxy:
            async with processes(mode, 1, proxy.url) as (holder,):
                await holder.do("acquire", "a", {"ttl": 1.5}, 5)
                waiting = asyncio.ensure_future(locks.lock("a").acquire(20))
                await until(lambda: queued(locks, 1))
                requests = proxy.requests
                proxy.drop_replies = applied
                proxy.hold = not applied
                await holder.say("release", "a")
                if applied:
                    await until(lambda: proxy.requests > requests)
                killed = machine_time()
                await holder.end(signal.SIGKILL)
                lease = await waiting
                assert machine_time() - killed < 1.5 + 1 + 1
                await lease.release()
                proxy.hold = False
        assert await queued(locks, 0)


@rule(3, 8)
async def test_a_process_that_is_killed_while_it_acquires_leaves_a_free_lock(mode, clean, server):
    """The server granted, and the reply was lost: the grant runs out."""
    locks = mode.interlock()
    with Proxy(server.socket) as proxy:
        async with processes(mode, 1, proxy.url) as (dying,):
            await dying.do("acquire", "warm", {}, 5)
            proxy.drop_replies = True
            await dying.say("acquire", "a", {"ttl": 1.5}, 30)
            await until(lambda: clean.exists("lock:a"))
            killed = machine_time()
            await dying.end(signal.SIGKILL)
            lease = await locks.lock("a").acquire(20)
            assert machine_time() - killed < 1.5 + 1 + 1
            await lease.release()


@rule(3)
async def test_a_holder_that_sigterm_ended_is_followed_within_its_ttl_and_a_second(mode):
    """Python ends at once then, without exit handlers, unless the program says otherwise."""
    locks = mode.interlock()
    async with processes(mode, 1) as (holder,):
        await holder.do("acquire", "a", {"ttl": 1.5}, 5)
        waiting = asyncio.ensure_future(locks.lock("a").acquire(20))
        await until(lambda: queued(locks, 1))
        ended = machine_time()
        assert await holder.end(signal.SIGTERM) == -signal.SIGTERM
        lease = await waiting
        assert machine_time() - ended < 1.5 + 1 + 1
        await lease.release()


async def test_a_service_that_exits_on_sigterm_releases_what_it_holds(mode):
    locks = mode.interlock()
    async with processes(mode, 1) as (holder,):
        await holder.do("on_sigterm")
        await holder.do("acquire", "a", {}, 5)
        waiting = asyncio.ensure_future(locks.lock("a").acquire(20))
        await until(lambda: queued(locks, 1))
        assert await holder.end(signal.SIGTERM) == 0
        lease = await waiting  # not after its ttl of 30 s
        await lease.release()


@rule(4)
async def test_a_killed_waiter_is_skipped(mode):
    locks = mode.interlock()
    async with processes(mode, 1) as (dying,):
        lease = await locks.lock("a").acquire()
        await dying.say("acquire", "a", {}, 60)
        await until(lambda: queued(locks, 1))
        waiting = asyncio.ensure_future(mode.interlock().lock("a").acquire(20))
        await until(lambda: queued(locks, 2))
        await dying.end(signal.SIGKILL)
        released = machine_time()
        await lease.release()
        mine = await waiting
        assert machine_time() - released < 7
        await mine.release()


@rule(5)
async def test_a_holder_that_was_stopped_for_longer_than_its_ttl_knows_of_the_loss_at_once(mode):
    locks = mode.interlock()
    async with processes(mode, 1) as (holder,):
        old = await holder.do("acquire", "a", {"ttl": 1}, 5)
        assert await holder.do("state", "a") == "held"
        await holder.stopped()
        lease = await locks.lock("a").acquire(20)
        holder.signal(signal.SIGCONT)
        # The answer to the very first question after it woke up is right, whatever its timers did.
        assert await holder.do("state", "a") == "lost"
        lost = await holder.do("ensure", "a")
        assert lost["error"] == "LeaseLost"
        assert (
            "its ttl passed without a renewal, since this process (or its event loop) stood still for" in lost["text"]
        )
        assert await holder.do("release", "a") is False
        assert lease.fence > old["fence"]
        lease.ensure()
        assert await lease.release()


@rule(6)
async def test_a_holder_that_was_stopped_for_less_than_its_ttl_goes_on(mode):
    locks = mode.interlock()
    async with processes(mode, 1) as (holder,):
        await holder.do("acquire", "a", {"ttl": 6}, 5)
        await holder.stopped()
        stopped = time.monotonic()
        await until(lambda: time.monotonic() - stopped > 2.5)
        holder.signal(signal.SIGCONT)
        assert await holder.do("ensure", "a") is None
        await until(lambda: _remaining(locks, 5))
        assert await holder.do("release", "a") is True


async def _remaining(locks, least: float, most: float = 60.0) -> bool:
    return least < ((await locks.lock("a").inspect()).remaining or 0) <= most


@rule(3)
async def test_a_waiter_that_was_stopped_gets_the_lock_later(mode):
    locks = mode.interlock()
    async with processes(mode, 1) as (waiter,):
        lease = await locks.lock("a").acquire()
        await waiter.say("acquire", "a", {"ttl": 2}, 60)
        await until(lambda: queued(locks, 1))
        await waiter.stopped()
        await lease.release()
        mine = await locks.lock("a").acquire(20)  # the grant of the stopped one lapses
        waiter.signal(signal.SIGCONT)
        await mine.release()
        assert (await waiter.answer())["fence"] > mine.fence
        assert await waiter.do("release", "a") is True


@rule(11)
@pytest.mark.parametrize("how", HOW)
async def test_a_child_after_fork_holds_nothing_and_has_connections_of_its_own(mode, clean, how):
    locks = mode.interlock()
    async with processes(mode, 1, None, how) as (parent,):
        await parent.do("acquire", "a", {"ttl": 4}, 5)
        child = await parent.do("fork", "a")
        assert child == {
            "state": "lost", "remaining": 0.0, "lost": True, "ended": True, "ensure": "LeaseLost",
            "execute": "LeaseLost", "extend": "LeaseLost", "exit": "LeaseLost", "release": False, "busy": True,
            "own": True,
        }  # fmt: skip
        assert not clean.exists("written")
        # The parent goes on: held, renewed, released.
        await until(lambda: _remaining(locks, 0, 3.2))
        await until(lambda: _remaining(locks, 3.2))
        assert await parent.do("ensure", "a") is None
        assert await locks.lock("a").try_acquire() is None
        assert await parent.do("release", "a") is True


async def test_a_normal_exit_releases_all_leases(mode, clean):
    async with processes(mode, 1) as (holder,):
        for name in ("a", "b", "c"):
            await holder.do("acquire", name, {}, 5)
        assert clean.exists("lock:a", "lock:b", "lock:c") == 3
        await holder.say("exit")
        assert await holder.end() == 0
        assert clean.exists("lock:a", "lock:b", "lock:c") == 0


@rule(1)
async def test_many_processes_count_without_a_mistake(mode, clean):
    """Mutual exclusion between processes, each with many threads or tasks."""
    code = """
import asyncio, sys, threading
import interlock, interlock.aio, redis
url, mode = sys.argv[1:]
client = redis.Redis.from_url(url)
def step():
    seen = int(client.get("users:count"))
    client.set("users:count", seen + 1)
if mode == "threads":
    locks = interlock.Interlock(url)
    def work():
        for _ in range(20):
            with locks.lock("count", ttl=20):
                step()
    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]; [t.join() for t in threads]
else:
    async def main():
        async with interlock.aio.Interlock(url) as locks:
            async def work():
                for _ in range(20):
                    async with locks.lock("count", ttl=20):
                        step()
            await asyncio.gather(*(work() for _ in range(4)))
    asyncio.run(main())
"""
    clean.set("users:count", 0)
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", code, mode.url, mode.name) for _ in range(4)
    ]
    try:
        codes = [await process.wait() for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    assert codes == [0] * 4
    assert int(clean.get("users:count")) == 4 * 4 * 20
    clean.delete("users:count")


@rule(1, 11)
@pytest.mark.parametrize("how", HOW)
async def test_a_parent_that_holds_locks_may_fork_workers(mode, clean, how):
    clean.set("users:count", 0)
    process = await python("prefork.py", mode.url, mode.name, "4", "20", how)
    assert await process.wait() == 0
    assert int(clean.get("users:count")) == 4 * 20 + (20 if mode.name == "asyncio" else 0)
    clean.delete("users:count")
    assert not clean.exists("lock:count", "lock:parent")


@rule(1, 6, 8)
async def test_greenlets_of_gevent_exclude_each_other_as_threads_do(server, clean, tmp_path):
    """gevent patches the sockets, locks and threads that interlock uses."""
    pytest.importorskip("gevent")
    hold = tmp_path / "hold"
    with Proxy(server.socket) as proxy:
        process = await python("greenlets.py", server.url, proxy.url, str(hold), stdout=asyncio.subprocess.PIPE)
        try:
            for silent in (True, False):
                await until(lambda: hold.exists() or process.returncode is not None, within=40)
                proxy.hold = silent
                hold.unlink(missing_ok=True)
            said, _ = await process.communicate()
        finally:
            proxy.hold = False
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        process._transport.close()
    assert said == b"OK\n"


async def python(script: str, *args: str, **options):
    """A Python process that runs one of harness/programs."""
    path = str(PROGRAMS / script)
    return await asyncio.create_subprocess_exec(sys.executable, path, *args, **options)


async def test_a_process_can_leave_by_sys_exit_while_others_wait(mode, clean):
    locks = mode.interlock()
    async with processes(mode, 1) as (holder,):
        await holder.do("acquire", "a", {}, 5)
        waiting = asyncio.ensure_future(locks.lock("a").acquire(20))
        await until(lambda: queued(locks, 1))
        await holder.say("exit")
        lease = await waiting
        await lease.release()


ENDING = {
    "threads": """
import select, signal, sys
from interlock import Interlock
silent, healthy = sys.argv[1:3]
made = [Interlock(silent) for _ in range(10)] + [Interlock(healthy)]
leases = [each.lock(f"end{i}").acquire(timeout=10) for i, each in enumerate(made)]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("held", flush=True)
while not select.select([0], [], [], 0.02)[0]:  # a signal just before a read that blocks would wait for its end
    pass
""",
    "asyncio": """
import asyncio, signal, sys
from interlock.aio import Interlock
silent, healthy = sys.argv[1:3]
async def main():
    global made, leases
    made = [Interlock(silent) for _ in range(10)] + [Interlock(healthy)]
    leases = [await each.lock(f"end{i}").acquire(timeout=10) for i, each in enumerate(made)]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    print("held", flush=True)
    done = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, done.set)
    await done.wait()
try:
    asyncio.run(main())
except asyncio.CancelledError:
    sys.exit(5)
""",
}


@rule(8)
@pytest.mark.parametrize("how", ["end", "SIGINT", "SIGTERM"])
async def test_a_process_with_many_interlocks_on_a_silent_server_ends_within_about_a_second(mode, node, clean, how):
    """All Interlocks share one second; leases on another server are released there."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDING[mode.name], node.url, mode.server.url,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert await process.stdout.readline() == b"held\n"
        assert clean.exists("lock:end10")
        node.pause()
        started = machine_time()
        if how == "end":
            process.stdin.write(b"\n")
        else:
            process.send_signal(getattr(signal, how))
        await asyncio.wait_for(process.wait(), 30)
        assert machine_time() - started < 1 + 2  # and two for a busy machine
        assert not clean.exists("lock:end10")
    finally:
        node.resume()
        if process.returncode is None:
            process.kill()
            await process.wait()


WORKING = """
import signal, sys, threading, time
from interlock import Interlock
locks = Interlock(sys.argv[1])
def work():
    with locks.lock("a", ttl=3) as lease:
        print("held", flush=True)
        sys.stdin.readline()
        lease.ensure()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
threading.Thread(target=work).start()
while True:
    time.sleep(0.02)
"""


async def test_a_thread_keeps_its_lease_after_sigterm_until_its_work_has_ended(server, clean):
    """`sys.exit` ends the main thread only; Python waits for the others."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKING, server.url, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert await process.stdout.readline() == b"held\n"
        process.terminate()
        await until(lambda: clean.pttl("lock:a") < 2500)
        await until(lambda: clean.pttl("lock:a") > 2500)  # it is renewed
        await process.communicate(b"\n")
        assert process.returncode == 0
        assert not clean.exists("lock:a")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_child_of_multiprocessing_releases_its_leases(server, clean):
    import multiprocessing

    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=hold, args=(server.url,))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert not clean.exists("lock:a")


kept: list = []


def hold(url: str) -> None:
    kept.append(interlock.Interlock(url).lock("a").acquire())
