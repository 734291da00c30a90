"""The server is away for longer than five seconds: who goes on waiting, who gives up, and when (ADR 57).

Most tests let a server allow 0.3 s in place of 5, so that a second is a long outage. Not here: what becomes of a lease
meanwhile (test_outages.py), which error a silence raises (test_silence.py), failovers (`topologies/`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from faults import test_silence
from harness.clock import machine_time
from harness.modes import SLACK, outcome, queued, until
from harness.proxy import Proxy
from interlock import AcquireTimeout, Unavailable
from interlock._protocol.timing import RETRY_FOR

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", starts="a quorum")
SHORT = 0.3  # seconds for which a server may be away, as these tests set it
DURABLE = {"appendonly": "yes", "appendfsync": "always"}

KINDS = {
    **test_silence.KINDS,
    "fair lock": lambda locks, timeout: locks.lock("fair", fair=True).acquire(timeout=timeout),
}


async def hold_all(locks) -> list:
    """Acquire what the calls of KINDS wait for."""
    return [
        await locks.lock("a").acquire(), await locks.lock("fair").acquire(), await locks.rlock("r").acquire(),
        await locks.semaphore("s", 1).acquire(), await locks.rwlock("rw").write().acquire(),
        await locks.lock("m").acquire(), await locks.election("e").campaign(),
    ]  # fmt: skip


async def acquire_and_release(call, locks, timeout: float | None):
    """The result or error of a call of KINDS."""
    result = await outcome(call(locks, timeout))
    if hasattr(result, "release"):
        await result.release()
    return result


def impatient(mode, locks):
    """Let the server of this Interlock be away for a moment only; returns the session."""
    session = mode.session(locks)
    session.core.server.retry_for = SHORT
    return session


def silent_for(session, seconds: float):
    """A condition: some attempt that waits has had no answer for so long."""

    def reached() -> bool:
        now = session.runtime.now()
        return any(now - each.unanswered_since >= seconds for each in list(session.waiters.registered.values()))

    return reached


@contextlib.asynccontextmanager
async def outage(how, node, proxy):
    """The server is away, in one of three ways, and comes back."""
    if how == "refused":
        proxy.refuse = True
        proxy.cut()
    elif how == "hung":
        node.pause()
    else:
        node.kill()
    try:
        yield
    finally:
        if how == "refused":
            proxy.refuse = False
        elif how == "hung":
            node.resume()
        elif how == "killed":
            node.restart()


@rule(8)
@pytest.mark.parametrize("how", ["refused", "hung", "killed"])
async def test_waiters_of_each_kind_with_time_left_outlive_the_outage(mode, server_pool, cell, how):
    """Each raised Unavailable after five seconds, however much time it had."""
    with server_pool.spare(cell.kind, config=DURABLE) as node, Proxy(node.socket) as proxy:
        others, locks = mode.interlock(node.url, max_ttl=3), mode.interlock(f"{proxy.url}?socket_timeout=1", max_ttl=3)
        held = await hold_all(others)
        session = impatient(mode, locks)
        await locks.ping()
        waiting = {kind: asyncio.ensure_future(acquire_and_release(call, locks, 90)) for kind, call in KINDS.items()}
        await until(lambda: len(session.waiters.registered) == len(KINDS))
        await until(lambda: all(attempt.is_queued for attempt in list(session.waiters.registered.values())))
        is_silent = silent_for(session, 4.0)
        async with outage(how, node, proxy):
            await until(lambda: is_silent() or any(task.done() for task in waiting.values()))
            assert not [kind for kind, task in waiting.items() if task.done()]
        await until(lambda: not silent_for(session, 0.0)())  # a barrier counts nobody of whom it does not hear
        for lease in held:
            await outcome(lease.release())  # it may have run out meanwhile
        opened = asyncio.ensure_future(outcome(others.barrier("b", 2).wait(timeout=60)))
        await others.latch("l", 1).count_down()
        await opened
        for kind, task in waiting.items():
            result = await task
            assert not isinstance(result, Exception), (kind, result)


@rule(8)
@pytest.mark.parametrize("how", ["refused", "hung"])
async def test_a_call_with_a_timeout_has_all_of_it_and_one_without_has_what_the_server_allows(mode, node, how):
    locks = mode.interlock(f"{node.url}?socket_timeout=0.5")
    await locks.ping()
    impatient(mode, locks)
    if how == "hung":
        node.pause()
    else:
        node.kill()
    calls = {(kind, timeout): timed(call(locks, timeout)) for kind, call in KINDS.items() for timeout in (3.0, None)}
    results = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
    if how == "hung":
        node.resume()
    for (kind, timeout), (error, least, most) in results.items():
        assert isinstance(error, Unavailable), (kind, timeout, error)
        assert most < (timeout or SHORT) + SLACK, (kind, timeout, most)
        if timeout and kind != "multi":  # whose first try may end
            assert least > timeout - 0.5, (kind, least)
    assert not mode.session(locks).core.cohorts.by_key


async def timed(calling):
    """The result or error of a call; after how many seconds at least, and at most on a machine that runs."""
    started, machine = time.monotonic(), machine_time()
    return await outcome(calling), time.monotonic() - started, machine_time() - machine


@rule(8)
async def test_a_server_that_has_never_answered_is_given_up_early(mode, tmp_path):
    """A mistyped host must not be silent for a minute, nor for ever."""
    for options in ({}, {"retry_for": None}):
        locks = mode.interlock(f"unix://{tmp_path}/nobody", **options)
        # Of two names: a caller who comes late into a cohort may ask once more after the one before it.
        calls = [timed(locks.lock(name).acquire(timeout=timeout)) for name, timeout in (("a", 60), ("b", None))]
        for error, least, most in await asyncio.gather(*calls):
            assert isinstance(error, Unavailable)
            assert least > RETRY_FOR - 1 and most < RETRY_FOR + SLACK


@rule(8)
async def test_retry_for_bounds_each_call_and_one_to_a_server_that_never_answered(mode, node, tmp_path):
    locks, nobody = (
        mode.interlock(node.url, retry_for=0.5),
        mode.interlock(f"unix://{tmp_path}/nobody", retry_for=0.5),
    )
    assert locks.retry_for == 0.5
    await locks.ping()
    lease = await locks.lock("held").acquire()
    node.kill()
    calls = [
        locks.lock("a").acquire(timeout=60), locks.lock("b").acquire(timeout=None), lease.release(),
        locks.lock("c").inspect(), locks.latch("l", 1).count_down(), locks.lock("d").try_acquire(),
        nobody.lock("a").acquire(timeout=60), nobody.lock("b").acquire(timeout=None),
    ]  # fmt: skip
    for error, _, most in await asyncio.gather(*map(timed, calls)):
        assert isinstance(error, Unavailable), error
        assert most < 0.5 + SLACK


@rule(8)
async def test_without_a_bound_a_call_without_a_timeout_outlives_the_outage(mode, proxy):
    locks = mode.interlock(proxy.url, retry_for=None)
    assert locks.retry_for is None
    await locks.ping()
    session = impatient(mode, locks)
    async with outage("refused", None, proxy):
        acquiring = asyncio.ensure_future(outcome(locks.lock("a").acquire()))
        with_time = asyncio.ensure_future(outcome(locks.lock("b").acquire(timeout=2)))
        await until(silent_for(session, 4.0))
        assert isinstance(await with_time, Unavailable)
        assert not acquiring.done()
    lease = await acquiring
    await lease.release()


@rule(8)
async def test_a_release_waits_no_longer_than_its_lease_lasts_even_without_a_bound(mode, proxy):
    locks = mode.interlock(proxy.url, retry_for=None)
    lease = await locks.lock("a", ttl=1).acquire()
    async with outage("refused", None, proxy):
        error, _, most = await timed(lease.release())
        assert isinstance(error, Unavailable)
        assert most < 1 + SLACK


@rule(2, 8)
async def test_the_callers_behind_one_that_gives_up_go_on_for_their_own_time(mode, proxy):
    """They share the silence of the caller that asks, and not its end."""
    locks = mode.interlock(proxy.url)
    await locks.ping()
    session = impatient(mode, locks)
    async with outage("refused", None, proxy):
        first = asyncio.ensure_future(outcome(locks.lock("a").acquire(timeout=2)))
        await until(lambda: session.core.cohorts.by_key)
        behind = [asyncio.ensure_future(acquire_and_release(KINDS["lock"], locks, time)) for time in (60, 60, 60, None)]
        await until(lambda: len(session.core.cohorts.by_key["lock:a"].waiting) == 4)
        assert isinstance(await first, Unavailable)
        await until(silent_for(session, 4.0))
        assert not any(task.done() for task in behind)
    for result in await asyncio.gather(*behind):  # the last one has asked no server by itself
        assert not isinstance(result, Exception), result


@rule(8)
async def test_a_waiter_whose_server_answers_again_at_its_end_raises_acquire_timeout(mode, proxy):
    others, locks = mode.interlock(), mode.interlock(proxy.url)
    lease = await mode.keep(others.lock("a").acquire())
    await locks.ping()
    session = impatient(mode, locks)
    waiting = asyncio.ensure_future(outcome(locks.lock("a").acquire(timeout=8)))
    await until(lambda: queued(others, 1))
    async with outage("refused", None, proxy):
        await until(silent_for(session, 3.0))
    error = await waiting
    assert isinstance(error, AcquireTimeout), error
    assert error.holder == lease.token


@rule(8, 10)
async def test_a_waiter_of_a_server_that_comes_back_empty_waits_for_the_quarantine(mode, node):
    others, locks = mode.interlock(node.url, max_ttl=3), mode.interlock(node.url, max_ttl=3)
    lease = await others.lock("a").acquire()
    session = impatient(mode, locks)
    waiting = asyncio.ensure_future(outcome(locks.lock("a").acquire(timeout=60)))
    await until(lambda: queued(others, 1))
    async with outage("killed", node, None):
        await until(silent_for(session, 2.0))
    back = time.monotonic()
    mine = await waiting
    assert time.monotonic() - back > 1  # the rest of the quarantine, which began with the server's start
    assert mine.fence > lease.fence
    await mine.release()


@rule(8)
async def test_an_outage_costs_two_lines_of_the_log_however_many_wait(mode, proxy, caplog):
    others, locks = mode.interlock(), mode.interlock(proxy.url)
    lease = await others.lock("fair").acquire()
    await locks.ping()
    session = mode.session(locks)
    caplog.clear()
    waiting = [asyncio.ensure_future(acquire_and_release(KINDS["fair lock"], locks, 60)) for _ in range(30)]
    async with outage("refused", None, proxy):
        await until(silent_for(session, 3.0))
    await lease.release()
    for result in await asyncio.gather(*waiting):
        assert not isinstance(result, Exception), result
    said = [record.getMessage() for record in caplog.records if "call" in record.getMessage()]
    assert len(said) == 2, said
    assert f"{proxy.url} has served no call for" in said[0]
    assert "Calls with a timeout go on until its end, all others for 5 s" in said[0]
    assert f"{proxy.url} serves calls again, after" in said[1]
