"""Waiters that are interrupted; waiters of a server that is gone, is out of memory, or loses heartbeats.

Not here: waiters that died or were stopped (test_dead_waiters.py, test_processes.py), a waiter whose connection is cut
(test_network.py: the server works; test_outages.py: its client can't connect again).
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools

import pytest

import interlock
import interlock.aio
from harness.modes import outcome, queued, subscribe, until
from harness.stubs import StubEvent, StubServer
from interlock import Unavailable
from interlock._client.grant import Attempt
from interlock._client.waiting import HEARTBEAT_GRAIN, HEARTBEAT_INTERVAL, LocalQueue, Waiters
from interlock._protocol.run_to_end import run
from interlock._protocol.server import Disconnected
from interlock.primitives.codes import QUEUED
from interlock.primitives.lock import lock_resource

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


@rule(4)
async def test_a_waiter_whose_clean_up_an_interrupt_cut_short_gets_no_heartbeat(mode):
    holder, locks = mode.interlock(), mode.interlock()
    lease = await holder.lock("a").acquire()
    session = mode.session(locks)
    leave, failed = session.waiters.unregister, []

    def interrupted(attempt):
        if not failed:
            failed.append(1)
            raise KeyboardInterrupt
        leave(attempt)

    session.waiters.unregister = interrupted
    with pytest.raises(KeyboardInterrupt):
        await _interrupted(mode, locks)
    await lease.release()
    mine = await holder.lock("a").acquire(timeout=10)
    await until(lambda: not session.waiters.queues)
    await mine.release()
    session.waiters.registered.clear()


async def _interrupted(mode, locks):
    """Acquire, and raise the KeyboardInterrupt outside the task in which it rose: there it would end the loop."""
    if mode.name == "threads":
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


@rule(8)
async def test_a_waiter_without_a_timeout_learns_that_the_server_is_gone(mode, clean, proxy):
    holder, locks = mode.interlock(), mode.interlock(proxy.url)
    lease = await holder.lock("a").acquire()
    waiting = asyncio.ensure_future(outcome(locks.lock("a").acquire()))
    await until(lambda: queued(holder, 1))
    proxy.refuse = True
    proxy.cut()
    assert isinstance(await asyncio.wait_for(waiting, 20), Unavailable)
    proxy.refuse = False
    await lease.release()


@rule(1)
async def test_no_newcomer_overtakes_while_the_server_is_out_of_memory(mode, clean):
    """The server refused the handover to the head of the queue; its DEL then let the newcomer's own grant through."""
    locks = mode.interlock()
    lease = await locks.lock("a", ttl=0.5, renew=False).acquire()
    waiting = asyncio.ensure_future(outcome(mode.interlock().lock("a").acquire(timeout=20)))
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


class SilentServer(StubServer):
    """Answers no heartbeat."""

    def ensure_subscribed(self, key): ...

    def subscription_of(self, _key):
        return "0", "channel"

    async def call_many(self, messages, _until):
        return [Disconnected("silence", sent=True)] * len(messages)


@rule(1, 3)
def test_a_crowd_whose_heartbeats_are_lost_does_not_ask_all_at_once_again_and_again():
    """One lost round woke more than a thousand waiters, and their requests kept the next round from an answer."""
    server, event, many = SilentServer(), StubEvent(), 2001
    waiters = Waiters(server, lambda _due: None, lambda _due: None)
    room = waiters.queues["a"] = LocalQueue(lock_resource("a", ""))
    for number in range(many):
        room.attempts[str(number)] = Attempt(room.resource, str(number), event=event)
    woken = []
    for second in range(30):
        server.runtime.time, room.due = float(second), 0.0
        run(waiters.tick())
        woken.append(event.count // many)
    assert woken[1] == 0  # one round, or two: that may be a pause
    assert woken[2] == 1  # they ask, retry, and can say that nobody is there
    assert woken[-1] <= 5  # each time after twice as long


class CountingServer(StubServer):
    """Has a channel for each lock, and answers heartbeats."""

    def __init__(self):
        super().__init__()
        self.searched = 0
        self.sent = []  # (when, key) of each heartbeat

    def ensure_subscribed(self, key): ...

    def subscription_of(self, key):
        self.searched += 1
        return "1", f"channel of {key}"

    async def call_many(self, messages, _until):
        now = self.runtime.now()
        self.sent += [(now, keys[0]) for _, keys, _ in messages]
        return [[20_000, b"", QUEUED]] * len(messages)


def crowd_of_locks(server, many):
    """A client that waits for so many locks, each with an event of its own."""
    due = []
    waiters = Waiters(server, due.append, due.append)
    for number in range(many):
        queue = waiters.queues[f"{number}"] = LocalQueue(lock_resource(f"{number}", ""))
        attempt = Attempt(queue.resource, str(number), event=StubEvent())
        queue.attempts[attempt.token] = waiters.registered[attempt.token] = attempt
        queue.due = number / many
    return waiters, due


@rule(4)
def test_heartbeats_for_many_locks_go_out_together():
    """With 10,000 locks the worker woke for nearly each heartbeat, and each time looked at all locks."""
    server, many = CountingServer(), 1000
    clock = server.runtime
    waiters, _ = crowd_of_locks(server, many)
    wakeups = 0
    while waiters.due() < 5:
        clock.time = max(clock.time, waiters.due())
        run(waiters.tick())
        wakeups += clock.time > 1  # the first second's are not due at multiples of the grain yet
    assert wakeups <= 4 / HEARTBEAT_GRAIN + 1
    for number in range(many):
        times = [when for when, key in server.sent if key == f"{number}"]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert max(gaps) <= HEARTBEAT_INTERVAL
        assert min(gaps) >= 0.7 * HEARTBEAT_INTERVAL - HEARTBEAT_GRAIN


@rule(3)
def test_new_subscriptions_of_many_channels_wake_their_waiters_in_one_search():
    """A client that waited for 4,000 locks of a cluster searched all its waiters for each of 4,000 channels."""
    server, many = CountingServer(), 1000
    waiters, due = crowd_of_locks(server, many)
    for number in range(0, many, 2):
        waiters.subscription_changed(f"channel of {number}")
    assert due == [server.runtime.now()] * (many // 2)  # the worker of ends is to wake at once
    waiters.wake_resubscribed()
    assert server.searched <= many
    assert [waiters.registered[f"{number}"].event.count for number in range(many)] == [1, 0] * (many // 2)
    waiters.wake_resubscribed()  # the channels are forgotten
    assert waiters.registered["0"].event.count == 1
    waiters.subscription_changed(None)
    assert all(each.event.count for each in waiters.registered.values())


async def subscribed(mode):
    """A client to which pushes arrive already."""
    locks = mode.interlock()
    lease = await locks.lock("other").acquire()
    await subscribe(mode.session(locks), "other")
    await lease.release()
    return locks


@rule(4)
async def test_a_lease_that_came_by_a_handover_is_as_long_as_any_other(mode):
    holder, locks = mode.interlock(), await subscribed(mode)
    lease = await holder.lock("a").acquire()
    waiting = asyncio.create_task(outcome(locks.lock("a").acquire(timeout=30)))
    await until(lambda: queued(holder, 1))
    await lease.release()
    following = await waiting
    assert following.remaining() > 20, "less than a ttl of 30 s"
    assert await following.release()


@rule(4, 6)
async def test_a_body_that_keeps_the_gil_after_a_handover_keeps_its_lease(mode):
    """Nothing else of its process runs meanwhile, as long as a handover lasts without its confirmation."""
    holder, locks = mode.interlock(), await subscribed(mode)
    lease = await holder.lock("a").acquire()

    async def section():
        async with locks.lock("a", timeout=30) as following:
            ctypes.PyDLL(None).usleep(3_200_000)
            following.ensure()

    waiting = asyncio.create_task(section())
    await until(lambda: queued(holder, 1))
    await lease.release()
    await waiting
