"""Faults that were found by attack, each kept as a test. The simulator holds more of them, by its seeds."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

import interlock
import interlock.aio
from harness.modes import outcome, queued, until
from interlock import LeaseLost, LeaseState, Unavailable
from interlock._client.grant import Attempt
from interlock._client.waiting import LocalQueue, Waiters
from interlock._protocol.run import run
from interlock._protocol.types import Disconnected
from interlock.primitives.lock import lock_resource

rule = pytest.mark.rule
pytestmark = pytest.mark.matrix("servers")


def patched(port, **changes):
    """The port with some of its methods replaced, for a while."""

    @contextlib.contextmanager
    def whole():
        for name, value in changes.items():
            setattr(port, name, value)
        try:
            yield
        finally:
            for name in changes:
                delattr(port, name)

    return whole()


@rule(11)
async def test_leases_that_are_being_renewed_are_seen_by_fork_close_and_revoke(kit):
    locks = kit.interlock()
    leases = await asyncio.gather(*(locks.lock(f"a{i}", ttl=1).acquire() for i in range(40)))
    session = kit.session(locks)
    real, seen = session.port.calls, []

    async def watching(messages, until):
        if any(args[0] == "renew" for _, _, args in messages):
            seen.append(len(session.renewal.held()))
        return await real(messages, until)

    with patched(session.port, calls=watching):
        await until(lambda: seen)
    assert set(seen) == {40}
    await asyncio.gather(*(lease.release() for lease in leases))


@rule(6)
async def test_an_error_of_any_kind_is_no_answer_to_a_renewal(kit):
    """Of a credential provider, say."""
    locks = kit.interlock()
    lease = await locks.lock("a", ttl=3).acquire()
    failed = []

    def failing(_until):
        failed.append(1)
        raise ZeroDivisionError("not ours")

    port = kit.session(locks).port
    with patched(port, _checkout=failing):
        if kit.mode == "asyncio":
            port._connection.fail(Disconnected("cut", sent=False))
        await until(lambda: lease.state is LeaseState.JEOPARDY)
    await until(lambda: lease.state is LeaseState.HELD)
    assert failed
    assert await lease.release()


@rule(6)
async def test_one_that_can_not_be_told_does_not_keep_others_from_it(kit, clean):
    locks = kit.interlock()
    first = await locks.lock("a", ttl=0.9).acquire()
    second = await locks.lock("b", ttl=0.9).acquire()
    first_real = first._real if kit.mode == "threads" else first
    event = second.lost
    object.__setattr__(first_real, "_lost_event", object())  # setting it fails
    clean.flushall()
    await until(event.is_set)


@rule(4)
async def test_a_waiter_that_an_interrupt_kept_from_leaving_is_not_vouched_for(kit):
    holder, locks = kit.interlock(), kit.interlock()
    lease = await holder.lock("a").acquire()
    session = kit.session(locks)
    leave, failed = session.waiters.unregister, []

    def interrupted(attempt):
        if not failed:
            failed.append(1)
            raise KeyboardInterrupt
        leave(attempt)

    session.waiters.unregister = interrupted
    with pytest.raises(KeyboardInterrupt):
        await _interrupted(kit, locks)
    await lease.release()
    mine = await holder.lock("a").acquire(timeout=10)
    assert not session.waiters.queues
    await mine.release()
    session.waiters.registered.clear()


async def _interrupted(kit, locks):
    """A KeyboardInterrupt would end a loop: so it is caught where it comes out of acquire."""
    if kit.mode == "threads":
        return await locks.lock("a").acquire(timeout=0.2)
    coroutine = locks.lock("a").acquire(timeout=0.2)
    caught = []

    async def body():
        try:
            return await coroutine
        except KeyboardInterrupt as error:
            caught.append(error)

    await asyncio.ensure_future(body())
    raise caught[0]


@rule(6)
async def test_idle_connections_that_died_together_cost_no_lease(kit, clean):
    locks = kit.interlock()
    many = await asyncio.gather(*(locks.lock(f"a{i}").acquire() for i in range(20)))
    await asyncio.gather(*(lease.release() for lease in many))
    lease = await locks.lock("a", ttl=3).acquire()
    clean.client_kill_filter(_type="normal", skipme=True)
    overdue = lease._grant.jeopardy_after
    await until(lambda: lease._grant.jeopardy_after > overdue)  # it was renewed
    lease.ensure()
    assert await lease.release()


@rule(8)
async def test_a_lost_reply_to_release_is_no_loss_even_if_others_released_since(kit, clean, proxy):
    locks = kit.interlock(f"{proxy.url}?socket_timeout=0.5")
    lease = await locks.lock("a").acquire()
    proxy.drop_replies = True
    releasing = asyncio.ensure_future(lease.release())
    await until(lambda: not clean.exists("lock:a"))
    for _ in range(3):
        await (await kit.interlock().lock("a").acquire()).release()
    proxy.cut()
    proxy.drop_replies = False
    assert await releasing is True


async def test_no_body_runs_under_a_lease_that_has_ended(kit, clean):
    lease = await kit.interlock().lock("a").acquire()
    await lease.release()
    with pytest.raises(LeaseLost):
        async with lease:
            raise AssertionError
    lease = await kit.interlock().lock("a", ttl=0.2, renew=False).acquire()
    await until(lambda: lease.state is LeaseState.LOST)
    with pytest.raises(LeaseLost):
        async with lease:
            raise AssertionError


async def test_a_keeper_that_could_not_start_starts_the_next_time(kit, clean):
    locks = kit.interlock()
    port = kit.session(locks).port

    def failing(*_):
        raise RuntimeError("can't start new thread")

    with patched(port, spawn=failing), pytest.raises(RuntimeError):
        await locks.lock("a", ttl=0.6).acquire()
    lease = await locks.lock("b", ttl=0.6).acquire()
    started = time.monotonic()
    await until(lambda: time.monotonic() - started > 1)
    lease.ensure()
    await lease.release()
    await until(lambda: not clean.exists("lock:a"))


@rule(8)
async def test_a_waiter_without_a_timeout_hears_that_the_server_is_gone(kit, clean, proxy):
    holder, locks = kit.interlock(), kit.interlock(proxy.url)
    lease = await holder.lock("a").acquire()
    waiting = asyncio.ensure_future(outcome(locks.lock("a").acquire()))
    await until(lambda: queued(holder, 1))
    proxy.refuse = True
    proxy.cut()
    assert isinstance(await asyncio.wait_for(waiting, 20), Unavailable)
    proxy.refuse = False
    await lease.release()


async def test_an_error_of_the_release_does_not_replace_that_of_the_body(kit, clean):
    with pytest.raises(KeyError):
        async with await kit.interlock().lock("a").acquire():
            clean.delete("lock:a")
            clean.lpush("lock:a", 1)
            clean.expire("lock:a", 60)
            raise KeyError
    clean.delete("lock:a")


async def test_the_loss_of_an_outer_section_is_not_swallowed_by_an_inner_one(kit, clean):
    lock = kit.interlock().lock("a", ttl=0.3, renew=False)
    if kit.mode == "threads":

        def nested():
            with lock._real as outer:
                assert outer.lost.wait(5)
                with lock._real:
                    pass

        with pytest.raises(LeaseLost):
            await kit.in_thread(nested)
        return
    with pytest.raises(LeaseLost):
        async with lock as outer:
            with contextlib.suppress(asyncio.CancelledError):
                await outer.lost.wait()
                await asyncio.sleep(5)
            async with lock:
                pass
    assert asyncio.current_task().cancelling() == 0


async def test_a_loss_found_by_the_body_itself_leaves_no_cancellation_behind(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        with pytest.raises(LeaseLost):
            async with locks.lock("a") as lease:
                clean.delete("lock:a")
                await lease.execute("GET", "x", keys=["x"])
        await asyncio.sleep(0.01)
        assert asyncio.current_task().cancelling() == 0


def test_a_child_of_multiprocessing_gives_back_what_it_held(server, clean):
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


@rule(1)
async def test_nobody_overtakes_because_the_server_is_out_of_memory(kit, clean):
    """The handover to the head was refused; its DEL then let the newcomer's own grant through."""
    locks = kit.interlock()
    lease = await locks.lock("a", ttl=0.5, renew=False).acquire()
    waiting = asyncio.ensure_future(outcome(kit.interlock().lock("a").acquire(timeout=20)))
    await until(lambda: queued(locks, 1))
    clean.config_set("maxmemory", "1")
    try:
        await until(lambda: not clean.exists("lock:a"))
        for _ in range(20):
            assert isinstance(await outcome(locks.lock("a").acquire(0)), Unavailable)
            assert not clean.exists("lock:a")
    finally:
        clean.config_set("maxmemory", "0")
    mine = await waiting
    if isinstance(mine, interlock.LockError):
        assert isinstance(mine, Unavailable)
    else:
        assert await mine.release()
    assert not await lease.release()


@rule(6)
async def test_a_release_that_comes_again_for_dead_waiters_is_no_loss_if_others_release_meanwhile(kit, clean):
    """More dead waiters than one step drops: the server forgets who released first before the last answer."""
    locks = kit.interlock()
    lease = await locks.lock("a").acquire()
    _, _, queue, waiters, _ = lease._grant.resource.keys
    clean.zadd(queue, {f"dead/{i}": i for i in range(600)})
    clean.hset(waiters, mapping={f"dead/{i}": f"{i} 3000 0 nowhere" for i in range(600)})
    clean.pexpire(queue, 9000)
    clean.pexpire(waiters, 9000)
    core = kit.session(locks).core
    ask, answers = core.request, []

    async def slow(attempt, args, until):
        answer = await ask(attempt, args, until)
        if args[0] == "release":
            answers.append(answer[0])
            clean.set("{lock:a}{record}", "1 lock 9 - 0 somebody - -", px=60_000)  # who has had it meanwhile
        return answer

    core.request = slow
    try:
        assert await lease.release()
    finally:
        del core.request
    assert answers == [[1, 1], [0, 0]]


class SilentPort:
    """A clock, and a server that answers nothing."""

    def __init__(self) -> None:
        self.time = 0.0
        self.woken = 0
        self.mutex = contextlib.nullcontext()
        self.runtime = self

    def now(self) -> float:
        return self.time

    def ensure_subscribed(self, key: str) -> None: ...

    def set(self) -> None:
        self.woken += 1

    def subscription_of(self, _key):
        return "0", "channel"

    async def calls(self, messages, _until):
        return [Disconnected("silence", sent=True)] * len(messages)


@rule(1, 3)
def test_a_crowd_whose_vouches_are_lost_does_not_ask_all_at_once_again_and_again():
    """One lost round woke more than a thousand, and their questions kept the next round from an answer."""
    port, many = SilentPort(), 2001
    waiters = Waiters(port, lambda _due: None)
    room = waiters.queues["a"] = LocalQueue(lock_resource("a", ""))
    for number in range(many):
        room.attempts[str(number)] = Attempt(room.resource, str(number), 30, port)
    woken = []
    for second in range(30):
        port.time, room.due = float(second), 0.0
        run(waiters.tick())
        woken.append(port.woken // many)
    assert woken[1] == 0  # one round, or two: that may be a pause
    assert woken[2] == 1  # they ask, retry, and can say that nobody is there
    assert woken[-1] <= 5  # each time after twice as long
