"""asyncio's loops: all tasks cancelled, a loop that ended, eager tasks, and a close that fails half way.

Not here: one task that is cancelled (test_cancellation.py, test_network.py), an interrupt in a loop
(test_interrupts.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import interlock
import interlock.aio
from harness.clock import machine_time
from harness.modes import outcome, queued, subscribe, until
from harness.proxy import Proxy
from interlock import LeaseLost, LockError

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


@rule(6, 8)
async def test_leases_are_renewed_after_a_program_cancelled_all_tasks_of_the_loop(server, clean):
    """The usual recipe of a graceful shutdown cancels the background tasks of interlock, too."""
    async with interlock.aio.Interlock(server.url) as locks:
        first = await locks.lock("a", ttl=3).acquire()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        second = await locks.lock("b", ttl=3).acquire()
        deadlines = [lease._grant.hold.deadline for lease in (first, second)]
        await until(lambda: all(x._grant.hold.deadline > y for x, y in zip((first, second), deadlines, strict=True)))
        waiting = asyncio.ensure_future(locks.lock("b").acquire())
        await until(lambda: queued(locks, 1, "b"))
        waiting.cancel()
        await until(lambda: queued(locks, 0, "b"))
        clean.delete("lock:b")
        await until(second.lost.is_set)
        assert await first.release()


STOOD_STILL = r"its ttl passed without a renewal, since this process \(or its event loop\) stood still for \d"


def seconds_still(error: LeaseLost) -> float:
    """For how long the process stood still, as the error says it."""
    return float(str(error).partition("still for ")[2].split()[0])


@rule(6)
@pytest.mark.parametrize("warm", [True, False], ids=["workers run", "workers have not begun"])
@pytest.mark.parametrize("asks", ["ensure", "extend", "leave", "await"])
async def test_a_lease_that_a_standstill_of_the_loop_has_cost_says_so(server, clean, asks, warm):
    """The body blocked the loop, and read only that the ttl had passed, as if the server had been away."""
    async with interlock.aio.Interlock(server.url) as locks:
        if warm:
            lease = await locks.lock("w", ttl=0.5).acquire()
            deadline = lease._grant.hold.deadline
            await until(lambda: lease._grant.hold.deadline > deadline)
            await lease.release()
        with pytest.raises(LeaseLost, match=STOOD_STILL) as caught:
            async with locks.lock("a", ttl=0.5) as lease:
                time.sleep(0.7)
                if asks == "ensure":
                    lease.ensure()
                elif asks == "extend":
                    await lease.extend(0.5)
                elif asks == "await":
                    await asyncio.sleep(60)
        assert seconds_still(caught.value) >= 0.5  # less than it was, and by no more than the worker may sleep


@rule(6)
async def test_no_standstill_is_longer_than_its_lease_is_old(server, clean):
    """A client that has just subscribed looks at once at a new lease; "at once" is not the start of the machine."""
    async with interlock.aio.Interlock(server.url) as locks:
        await subscribe(locks._session, "a")
        with pytest.raises(LeaseLost, match=STOOD_STILL) as caught:
            async with locks.lock("a", ttl=0.5) as lease:
                acquired = machine_time()
                time.sleep(0.7)
                lease.ensure()
        age = machine_time() - acquired
        assert 0.5 <= seconds_still(caught.value) <= age + 1  # the request is older than the lease


@rule(8)
def test_an_undo_that_a_closed_loop_left_goes_on_in_the_next_loop(server, clean):
    with Proxy(server.socket) as proxy:
        through = interlock.aio.Interlock(proxy.url)

        async def cut_short():
            await (await through.lock("warm").acquire()).release()
            proxy.drop_replies = True
            acquiring = asyncio.ensure_future(through.lock("a").acquire())
            await until(lambda: clean.exists("lock:a"))
            proxy.refuse = True
            proxy.cut()
            acquiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await acquiring

        asyncio.run(cut_short())
        proxy.drop_replies = proxy.refuse = False
        assert clean.exists("lock:a")

        async def again():
            async with through:
                lease = await through.lock("a").acquire(timeout=5)
                assert await lease.release()

        asyncio.run(again())
    assert not clean.exists("lock:a")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_eager_tasks_survive_a_first_connection_that_fails(tmp_path, server):
    path = tmp_path / "s"

    async def main():
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        async with interlock.aio.Interlock(f"unix://{path}") as locks:
            assert isinstance(await outcome(locks.lock("a").acquire(timeout=0.3)), LockError)
            path.symlink_to(server.socket)
            assert await (await locks.lock("a").acquire(timeout=5)).release()

    asyncio.run(main())


def test_close_closes_everything_even_if_the_release_of_leases_fails(server, clean, monkeypatch):
    locks = interlock.Interlock(server.url)
    lease = locks.lock("a").acquire()

    async def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(locks._session, "release_all", broken)
    with pytest.raises(ZeroDivisionError):
        locks.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("interlock-worker")]
    lease._grant.end_reason = "test"
    clean.delete("lock:a")


@rule(8)
@pytest.mark.parametrize("how", ["dropped", "left by a finalizer"])
def test_an_exit_releases_all_leases_though_a_task_of_a_closed_loop_waits_for_one(server, clean, how):
    """The exit tried to wake that task, and the error cost the releases of all Interlocks of the process."""
    program = f"""
        import asyncio, gc, interlock, interlock.aio

        async def main():
            locks = interlock.aio.Interlock({server.url!r})
            leases.append(await locks.lock("a").acquire())
            waits = asyncio.ensure_future(locks.lock("a").acquire())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return locks, waits, await locks.lock("b").acquire()

        leases, loop = [], asyncio.new_event_loop()
        kept = loop.run_until_complete(main())
        blocking = interlock.Interlock({server.url!r})
        lease = blocking.lock("c").acquire()
        loop.close()
        if {how!r} == "left by a finalizer":
            leases[0]._mark_in_with()
        del leases[0]
        gc.collect()
        assert kept[0]._sessions[loop].ends.orphans
        assert kept[0]._sessions[loop].core.cohorts.waiting()
        """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert "Traceback" not in ended.stderr
    assert not clean.keys("lock:[abc]")
