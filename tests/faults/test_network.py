"""The network loses, delays and cuts messages; callers cancel, interrupt and time out at any step.

A proxy stands between client and server, which works: what becomes of an acquire, a waiter, a lease, a release?

Not here: connections in a pool and handshakes (test_connections.py), a server that is stopped or restarts
(test_outages.py), which error a silence raises and when (test_silence.py), Ctrl-C at any step of Python
(test_interrupts.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace

import pytest

from harness.clock import machine_time
from harness.modes import outcome, queued, until
from interlock import AcquireTimeout, ConfigError, LeaseLost, LeaseState, Unavailable

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


def nothing_of(clean, name: str = "a") -> bool:
    """Whether this lock has no holder, no queue and no waiter."""
    return not clean.exists(f"lock:{name}", f"{{lock:{name}}}{{queue}}", f"{{lock:{name}}}{{waiters}}")


@rule(8)
async def test_an_acquire_whose_reply_is_lost_gets_the_same_grant(mode, clean, proxy):
    """A recipe that sends SET NX again would wait for itself."""
    locks = mode.interlock(f"{proxy.url}?socket_timeout=0.3")
    await (await locks.lock("warm").acquire()).release()
    proxy.drop_replies = True
    acquiring = asyncio.ensure_future(locks.lock("a").acquire(timeout=10))
    await until(lambda: clean.exists("lock:a"))
    proxy.cut()
    proxy.drop_replies = False
    lease = await acquiring
    assert clean.get("lock:a").decode() == lease.token
    assert await lease.release()
    assert nothing_of(clean)


@rule(8)
async def test_a_release_whose_reply_is_lost_is_one_release(mode, clean, proxy):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=0.3")
    lease = await locks.lock("a").acquire()
    proxy.drop_replies = True
    releasing = asyncio.ensure_future(lease.release())
    await until(lambda: not clean.exists("lock:a"))
    proxy.cut()
    proxy.drop_replies = False
    assert await releasing is True


@rule(8)
async def test_a_late_copy_of_an_acquire_acquires_nothing(mode, clean, proxy):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=0.2")
    await (await locks.lock("warm").acquire()).release()
    proxy.drop_replies = True
    error = await outcome(locks.lock("a").acquire(timeout=0.4))
    assert isinstance(error, AcquireTimeout | Unavailable)
    token = clean.get("lock:a").decode()
    proxy.cut()
    proxy.drop_replies = False
    await until(lambda: not clean.exists("lock:a"))
    lock = locks.lock("a")
    primitive = (lock._real if mode.name == "threads" else lock)._primitive
    args = ("acquire", token, 30000, 3000, 0, "nowhere", "inf", *primitive.acquire_args, "")
    late = clean.eval(primitive.script.source, 5, *primitive.keys, *args)
    assert late == [5]  # NOT_FOUND
    assert not clean.exists("lock:a")


@rule(8)
async def test_a_timeout_bounds_the_whole_call_even_if_the_server_is_silent(mode, clean, proxy):
    locks = mode.interlock(proxy.url)
    await (await locks.lock("warm").acquire()).release()
    proxy.hold = True
    started = machine_time()
    error = await outcome(locks.lock("a").acquire(timeout=0.5))
    assert isinstance(error, Unavailable)
    assert machine_time() - started < 2
    assert "no answer" in str(error)
    proxy.hold = False
    await until(lambda: nothing_of(clean))


@rule(8)
async def test_a_timeout_bounds_the_connection_too(mode, proxy):
    proxy.hold = True
    started = machine_time()
    error = await outcome(mode.interlock(proxy.url).lock("a").acquire(timeout=0.5))
    assert isinstance(error, Unavailable)
    assert machine_time() - started < 2
    proxy.hold = False


@rule(8)
async def test_a_server_that_refuses_connections_raises_unavailable_in_bounded_time(mode, tmp_path):
    locks = mode.interlock(f"unix://{tmp_path}/nobody")
    started = machine_time()
    error = await outcome(locks.lock("a").acquire())
    assert isinstance(error, Unavailable)
    assert isinstance(error, ConnectionError)
    assert "'a'" in str(error)
    assert "nobody" in str(error)
    assert machine_time() - started < 8
    assert isinstance(await outcome(locks.lock("a").try_acquire()), Unavailable)


CUTS = [0, 1, 40, 10_000]  # bytes that still go through: none, one, some, all


@rule(8)
@pytest.mark.parametrize("size", CUTS)
@pytest.mark.parametrize("which", ["cut_request", "cut_reply"])
@pytest.mark.parametrize("contended", [False, True], ids=["free", "queued"])
async def test_a_connection_that_is_cut_after_any_byte_of_an_acquire_changes_nothing(
    mode, clean, proxy, which, size, contended
):
    holder, locks = mode.interlock(), mode.interlock(proxy.url)
    await (await locks.lock("warm").acquire()).release()
    held = await holder.lock("a").acquire() if contended else None
    proxy.marked = b"\r\nacquire\r\n"
    setattr(proxy, which, size)
    acquiring = asyncio.ensure_future(locks.lock("a").acquire(timeout=20))
    if held:
        await until(lambda: queued(holder, 1))
        await until(lambda: getattr(proxy, which) is None)
        await held.release()
    lease = await acquiring
    assert getattr(proxy, which) is None
    assert not proxy.doomed
    assert clean.get("lock:a").decode() == lease.token
    assert await lease.release()
    assert nothing_of(clean)


@rule(8)
@pytest.mark.parametrize("size", CUTS)
@pytest.mark.parametrize("which", ["cut_request", "cut_reply"])
@pytest.mark.parametrize("contended", [False, True], ids=["free", "queued"])
async def test_a_connection_that_is_cut_after_any_byte_of_a_release_changes_nothing(
    mode, clean, proxy, which, size, contended
):
    locks = mode.interlock(proxy.url)
    lease = await locks.lock("a").acquire()
    waiting = []
    if contended:
        waiting.append(asyncio.ensure_future(mode.interlock().lock("a").acquire(timeout=20)))
        await until(lambda: queued(locks, 1))
    proxy.marked = b"\r\nrelease\r\n"
    setattr(proxy, which, size)
    assert await lease.release()
    assert getattr(proxy, which) is None
    assert not proxy.doomed
    for task in waiting:
        mine = await task
        assert mine.fence > lease.fence
        assert await mine.release()
    assert nothing_of(clean)


@rule(3)
async def test_a_waiter_whose_connection_is_cut_keeps_its_place_in_the_queue(mode, clean, proxy):
    locks, others = mode.interlock(), mode.interlock(proxy.url)
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(others.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    token = (await locks.lock("a").inspect()).waiters[0]
    proxy.cut()
    await until(lambda: clean.pubsub_numsub(mode.session(others).channel)[0][1] == 1)
    assert (await locks.lock("a").inspect()).waiters == (token,)
    await lease.release()
    mine = await waiting
    assert mine.token == token
    assert await mine.release()


@rule(6)
async def test_a_lease_is_in_jeopardy_while_the_server_is_silent_and_held_again_afterwards(mode, clean, proxy):
    lease = await mode.interlock(proxy.url).lock("a", ttl=3).acquire()
    proxy.hold = True
    await until(lambda: lease.state is LeaseState.JEOPARDY)
    lease.ensure()
    proxy.hold = False
    await until(lambda: lease.state is LeaseState.HELD)
    assert await lease.release()


@rule(5)
@pytest.mark.parametrize("what", ["acquire", "extend", "renewal"])
async def test_a_deadline_counts_from_before_the_request_however_late_the_reply_is(mode, clean, proxy, what):
    """So the client never relies on its lease for longer than the server keeps it."""
    locks = mode.interlock(proxy.url, max_ttl=60)
    await locks.ping()
    proxy.delay = 0.3 if what == "acquire" else 0.0
    lease = await locks.lock("a", ttl=3 if what == "renewal" else 30).acquire()
    hold = lease._grant.hold
    granted, proxy.delay = hold.deadline, 0.3
    if what == "extend":
        await lease.extend(60)
    await until(lambda: hold.deadline > granted or what == "acquire")
    deadline = hold.deadline
    left = clean.pttl("lock:a") / 1000
    assert deadline <= lease._core.runtime.now() + left + 0.001
    proxy.delay = 0.0
    assert await lease.release()


@rule(6)
async def test_a_partition_that_lasts_longer_than_the_ttl_is_reported_as_a_loss(mode, clean, proxy):
    locks = mode.interlock(proxy.url)
    lease = await locks.lock("a", ttl=0.9).acquire()
    proxy.hold = True
    await until(lease.lost.is_set)
    assert lease.state is LeaseState.LOST
    mine = await mode.interlock().lock("a").acquire(timeout=5)
    proxy.hold = False
    with pytest.raises(LeaseLost):
        lease.ensure()
    assert await lease.release() is False
    mine.ensure()
    assert await mine.release()


async def test_leaving_a_section_while_the_server_is_away_raises_nothing(mode, clean, proxy):
    locks = mode.interlock(proxy.url)
    async with await locks.lock("a", ttl=2).acquire():
        proxy.refuse = True
        proxy.cut()
    proxy.refuse = False
    await until(lambda: nothing_of(clean))


@rule(8)
async def test_execute_is_never_sent_twice(mode, clean, proxy):
    lease = await mode.interlock(f"{proxy.url}?socket_timeout=0.3").lock("a").acquire()
    proxy.drop_replies = True
    error = await outcome(lease.execute("INCR", "users:n", keys=["users:n"]))
    assert isinstance(error, Unavailable)
    assert "may have run" in str(error)
    proxy.cut()
    proxy.drop_replies = False
    assert clean.get("users:n") == b"1"
    clean.delete("users:n")
    await lease.release()


@rule(9)
async def test_scripts_are_sent_again_when_the_server_forgot_them(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    clean.script_flush()
    assert await lease.release()
    clean.script_flush()
    lease = await locks.lock("a", ttl=3).acquire()
    clean.script_flush()
    deadline = lease._grant.hold.deadline
    await until(lambda: lease._grant.hold.deadline > deadline)
    lease.ensure()
    assert await lease.release()


async def test_a_server_that_is_out_of_memory_still_releases(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(outcome(locks.lock("a").acquire()))
    await until(lambda: queued(locks, 1))
    clean.config_set("maxmemory", "1")
    try:
        assert await lease.release()
        mine = await waiting  # handed over, or told that it can't be
        if not isinstance(mine, Unavailable):
            assert await mine.release()
        await until(lambda: not clean.exists("lock:a"))
        error = await outcome(locks.lock("b").acquire())
        assert isinstance(error, Unavailable)
        assert "memory" in str(error)
    finally:
        clean.config_set("maxmemory", "0")
    await until(lambda: nothing_of(clean))


# Cancelled or interrupted at every await


class Stopped(BaseException):
    """Like KeyboardInterrupt: not an Exception, and raised anywhere."""


class Tripwire:
    """Wraps a server: its n-th call or wait raises before or after, as an interrupt there would."""

    def __init__(self, server, at: int, after: bool) -> None:
        self.server, self.at, self.after, self.count = server, at, after, 0

    def __enter__(self):
        server, runtime = self.server, self.server.runtime
        self.make_event = runtime.event

        def event():
            made = self.make_event()
            return SimpleNamespace(set=made.set, wait=self._wrapped(made.wait))

        server.call, runtime.sleep_until = self._wrapped(server.call), self._wrapped(runtime.sleep_until)
        runtime.event = event
        return self

    def __exit__(self, *_):
        del self.server.call, self.server.runtime.sleep_until
        self.server.runtime.event = self.make_event

    def _wrapped(self, real):
        async def wrapped(*args):
            if threading.current_thread().name.startswith("interlock-") or "worker" in _task_name():
                return await real(*args)
            self.count += 1
            trip = self.count == self.at
            if trip and not self.after:
                raise Stopped
            result = await real(*args)
            if trip:
                raise Stopped
            return result

        return wrapped


def _task_name() -> str:
    try:
        return asyncio.current_task().get_name()
    except RuntimeError:
        return ""


@rule(8)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("contended", [False, True])
async def test_an_interrupt_at_any_step_leaves_nothing(mode, clean, contended, after):
    holder, locks = mode.interlock(), mode.interlock()
    await (await locks.lock("warm").acquire()).release()
    port = mode.session(locks).server
    for at in range(1, 9):
        held = await holder.lock("a").acquire() if contended else None
        with Tripwire(port, at, after) as wire:
            trying = asyncio.ensure_future(_section(locks))
            if held:
                await until(lambda: trying.done() or wire.count >= 2)
                await held.release()
            with contextlib.suppress(Stopped):
                await trying
        await until(lambda: nothing_of(clean))
        if wire.count < at:
            break
    assert at > 2


async def _section(locks):
    lease = await locks.lock("a").acquire()
    await lease.release()


@rule(8)
@pytest.mark.parametrize("contended", [False, True])
async def test_a_cancellation_at_any_await_leaves_nothing(mode, clean, contended):
    if mode.name == "threads":
        pytest.skip("threads are interrupted, not cancelled")
    holder, locks = mode.interlock(), mode.interlock()
    await (await locks.lock("warm").acquire()).release()
    for at in range(1, 20):
        held = await holder.lock("a").acquire() if contended else None
        wrapped = CancelAt(_section(locks), at)
        trying = asyncio.ensure_future(wrapped.run())
        if held:
            await until(lambda: trying.done() or wrapped.count >= 2)
            await held.release()
        with contextlib.suppress(asyncio.CancelledError):
            await trying
        await until(lambda: nothing_of(clean))
        if wrapped.count < at:
            break
    assert at > 2


class CancelAt:
    """Cancels its task at its n-th suspension."""

    def __init__(self, coroutine, at: int) -> None:
        self.coroutine, self.at, self.count = coroutine, at, 0

    async def run(self):
        return await self

    def __await__(self):
        inner = self.coroutine.__await__()
        value = None
        while True:
            try:
                yielded = inner.send(value)
            except StopIteration as finished:
                return finished.value
            self.count += 1
            if self.count == self.at:
                asyncio.current_task().cancel()
            try:
                value = yield yielded
            except BaseException as error:
                try:
                    yielded = inner.throw(error)
                except StopIteration as finished:
                    return finished.value
                value = yield yielded


@rule(8)
async def test_a_timeout_at_any_message_leaves_nothing(mode, clean, proxy):
    """The network goes silent after the n-th request."""
    holder = mode.interlock()
    for at in range(1, 6):
        locks = mode.interlock(proxy.url)
        await (await locks.lock("warm").acquire()).release()
        held = await holder.lock("a").acquire()
        before = proxy.requests
        watching = asyncio.ensure_future(_hold_after(proxy, before + at))
        error = await outcome(locks.lock("a").acquire(timeout=0.6))
        assert isinstance(error, AcquireTimeout | Unavailable), error
        watching.cancel()
        proxy.hold = False
        await until(lambda: not clean.exists("{lock:a}{queue}"))
        await held.release()
        await until(lambda: nothing_of(clean))
        await locks.close()
        mode.made.remove(locks)


async def _hold_after(proxy, requests: int) -> None:
    while proxy.requests < requests:
        await asyncio.sleep(0.001)
    proxy.hold = True


async def test_close_takes_bounded_time_while_the_server_is_silent(mode, proxy, clean):
    locks = mode.interlock(proxy.url)
    lease = await locks.lock("a", ttl=2).acquire()
    proxy.hold = True
    started = machine_time()
    await locks.close()
    assert machine_time() - started < 5
    proxy.hold = False
    assert lease.state is LeaseState.RELEASED
    assert isinstance(await outcome(lease.extend(1)), LeaseLost | ConfigError)
    await until(lambda: not clean.exists("lock:a"))


@rule(8)
async def test_a_release_whose_reply_is_lost_is_no_loss_even_if_others_released_since(mode, clean, proxy):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=0.5")
    lease = await locks.lock("a").acquire()
    proxy.drop_replies = True
    releasing = asyncio.ensure_future(lease.release())
    await until(lambda: not clean.exists("lock:a"))
    for _ in range(3):
        await (await mode.interlock().lock("a").acquire()).release()
    proxy.cut()
    proxy.drop_replies = False
    assert await releasing is True
