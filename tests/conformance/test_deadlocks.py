"""Deadlocks: what AcquireTimeout and the log say to callers that wait for each other, in one process and in several."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.modes import queued, real, until
from harness.processes import processes
from interlock import AcquireTimeout, LockError
from interlock._client import acquiring
from interlock._people import answers, deadlock_search, long_waits, looks, timeouts
from interlock.primitives import deadlocks

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Sessions of this process report several times a second."""
    from interlock._people import registry as client

    monkeypatch.setattr(client, "REPORT_INTERVAL", 0.1)
    monkeypatch.setattr(client, "REPORT_DELAY", 0.05)
    monkeypatch.setattr(answers, "REPORT_INTERVAL", 0.1)
    monkeypatch.setattr(looks, "REPORT_INTERVAL", 0.1)
    monkeypatch.setattr(deadlocks, "MIN_TOGETHER", 0.02)
    monkeypatch.setattr(timeouts, "MIN_WAIT_TO_ASK", 0.5)
    monkeypatch.setattr(acquiring, "UNDO_GRACE", 20.0)  # a busy machine may take long for an answer


def nested(first, second, ready, timeout):
    """Hold the first while waiting for the second; the error."""
    with first:
        ready.wait()
        try:
            second.acquire(timeout=timeout).release()
        except LockError as error:
            return error


async def async_nested(first, second, ready, timeout):
    async with first:
        await ready.wait()
        try:
            await (await second.acquire(timeout=timeout)).release()
        except LockError as error:
            return error


def start(mode, pairs, timeouts):
    """One thread or task for each pair: it holds the first, and waits for the second once all hold their first."""
    if mode.name == "asyncio":
        ready = asyncio.Barrier(len(pairs))
        return [
            asyncio.ensure_future(async_nested(*map(real, pair), ready, timeout))
            for pair, timeout in zip(pairs, timeouts, strict=True)
        ]
    ready, pool = threading.Barrier(len(pairs)), ThreadPoolExecutor(len(pairs))
    started = [
        asyncio.wrap_future(pool.submit(nested, *map(real, pair), ready, timeout))
        for pair, timeout in zip(pairs, timeouts, strict=True)
    ]
    pool.shutdown(wait=False)
    return started


def line(text):
    return next(i for i, each in enumerate(Path(__file__).read_text().splitlines(), 1) if text in each)


async def until_said(attempt):
    """The error of an attempt with a timeout, once it speaks of a deadlock: on a slow machine reports take longer."""
    for timeout in (1.5, 6.0, 20.0):
        error = await attempt(timeout)
        if error is not None and error.deadlock:
            break
    return error


async def is_known(locks):
    """Whether the reports of all callers together show a deadlock."""
    return deadlocks.find(await locks.ls(), min_wait=0)


async def end(locks, name, waits):
    """End the deadlock in which these callers wait, by taking away one of its locks."""
    await locks.lock(name).revoke("the test ends", force=True)
    await asyncio.gather(*waits, return_exceptions=True)


async def test_two_callers_of_one_process(mode):
    locks = mode.interlock()
    a, b = locks.lock("a"), locks.lock("b")

    async def attempt(timeout):
        one, other = await asyncio.gather(*start(mode, [(a, b), (b, a)], [timeout, 50]))
        assert other is None  # it got the lock that the first one gave back
        return one

    one = await until_said(attempt)
    assert isinstance(one, AcquireTimeout)
    caller, is_async = ("task", "async ") if mode.name == "asyncio" else ("thread", "")
    held = line(f"    {is_async}with first:")
    waited = line(
        "await second.acquire(timeout=timeout)" if is_async else "            second.acquire(timeout=timeout)"
    )
    this = rf"holds lock 'a' since \S+:{held} and waits for lock 'b' at \S+:{waited}"
    that = rf"holds lock 'b' since \S+:{held} and waits for lock 'a' at \S+:{waited}"
    text = str(one)
    assert re.search(rf" A deadlock of 2 callers: this {caller} {this}; \S+/\d+/\S+ {that}\. Acquire them in the", text)
    assert "multi()" in text
    assert re.fullmatch(rf"\S+/\d+/\S+ {this}", one.deadlock[0])
    assert re.fullmatch(rf"\S+/\d+/\S+ {that}", one.deadlock[1])
    assert one.place.endswith(f":{held}")


async def test_a_ring_over_several_interlocks_and_one_that_waits_behind_it(mode):
    made = [mode.interlock() for _ in range(4)]
    pairs = [(made[i].lock(f"l{i}"), made[(i + 1) % 3].lock(f"l{(i + 1) % 3}")) for i in range(3)]
    ring = start(mode, pairs, [50, 50, 50])
    await until(lambda: is_known(made[3]))

    async def wait_behind(timeout):
        return await start(mode, [(made[3].lock("own"), made[3].lock("l1"))], [timeout])[0]

    error = await until_said(wait_behind)
    assert " It waits behind a deadlock of 3 callers: " in str(error)
    assert len(error.deadlock) == 3
    await end(made[3], "l1", ring)

    async def wait_in_it(timeout):
        return (await asyncio.gather(*start(mode, pairs, [timeout, 50, 50])))[0]

    error = await until_said(wait_in_it)
    assert " A deadlock of 3 callers: this " in str(error)
    assert [re.findall(r"lock '(l\d)'", each) for each in error.deadlock] == [["l0", "l1"], ["l1", "l2"], ["l2", "l0"]]


async def test_holders_that_wait_for_one_that_goes_on_are_in_no_deadlock(mode):
    locks = mode.interlock()
    a, b, c = (locks.lock(name) for name in "abc")
    lease = await locks.lock("c").acquire()
    first, second = start(mode, [(a, b), (b, c)], [0.8, 20])
    error = await first
    assert isinstance(error, AcquireTimeout)
    assert error.deadlock == ()
    assert "Wait longer" in str(error)
    await lease.release()
    assert await second is None


async def two_processes(mode, process, timeout, ours="ours", theirs="theirs"):
    """A process that holds `theirs` and waits for `ours`. Returns the wait of a caller that does the opposite."""
    locks = mode.interlock()
    await process.do("acquire", theirs, {}, 5)
    (waiting,) = start(mode, [(locks.lock(ours), locks.lock(theirs))], [timeout])
    await until(lambda: waiting.done() or queued(locks, 1, theirs))
    await process.say("acquire", ours, {}, 60)

    async def said():
        return waiting.done() or any(waiter.place for each in await locks.ls(ours) for waiter in each.waiters)

    await until(said)
    return waiting


async def test_callers_of_two_processes(mode):
    pid = None

    async def attempt(timeout):
        nonlocal pid
        async with processes(mode, 1) as started:
            pid = started[0].process.pid
            error = await (await two_processes(mode, started[0], timeout + 2))  # it reports every two seconds
            await started[0].end()  # which releases what it holds
            return error

    error = await until_said(attempt)
    assert isinstance(error, AcquireTimeout)
    assert re.search(
        r" Probably a deadlock of 2 callers: this \w+ holds lock 'ours' since \S+test_deadlocks\.py:\d+ and waits "
        rf"for lock 'theirs' at \S+; \S+/{pid}/\S+ holds lock 'theirs' since (\S+lock_client\.py:\d+) and "
        r"waits for lock 'ours' at \1",
        str(error),
    )


@pytest.mark.asyncio_only  # what others say is read in one way
async def test_a_dead_process_is_in_no_deadlock(mode, monkeypatch):
    monkeypatch.setattr(deadlocks, "LATE", 0.5)
    for timeout in (3.5, 12.0, 30.0):  # on a slow machine it dies too late
        async with processes(mode, 1) as started:
            ours = await two_processes(mode, started[0], timeout, "ours", f"theirs {timeout}")
            await started[0].end(signal.SIGKILL)
            error = await ours
            assert isinstance(error, AcquireTimeout)
            if not error.deadlock:
                break
    assert error.deadlock == ()
    assert "lock_client.py" in error.place, str(error)


async def test_an_rwlock_whose_reader_waits_for_the_writer(mode):
    locks = mode.interlock()
    data, b = locks.rwlock("data"), locks.lock("b")
    reader = await locks.rwlock("data").read().acquire()  # one that would give it back, and is named as a holder

    async def attempt(timeout):
        one, other = await asyncio.gather(*start(mode, [(data.read(), b), (b, data.write())], [50, timeout]))
        assert one is None
        return other

    other = await until_said(attempt)
    assert "rwlock 'data'" in other.deadlock[0]
    assert len(other.deadlock) == 2
    await reader.release()


async def test_the_log_says_so_while_they_wait(mode, monkeypatch, caplog):
    monkeypatch.setattr(long_waits, "FIRST", 0.5)
    caplog.set_level(logging.INFO, "interlock")
    locks = mode.interlock()
    a, b = locks.lock("a"), locks.lock("b")
    waits = start(mode, [(a, b), (b, a)], [50, 50])
    await until(lambda: "A deadlock of 2 callers: " in caplog.text)
    await end(locks, "b", waits)


async def test_without_entries_nobody_speaks_of_a_deadlock(mode):
    locks = mode.interlock(registry=False)
    a, b = locks.lock("a"), locks.lock("b")
    one, _ = await asyncio.gather(*start(mode, [(a, b), (b, a)], [0.8, 4.0]))
    assert one.deadlock == ()


async def test_of_many_callers_few_read_the_entries(mode, monkeypatch):
    """All of a crowd behind a deadlock time out at once."""
    monkeypatch.setattr(answers, "REPORT_INTERVAL", 30)  # whatever "at once" is on a slow machine
    locks = mode.interlock()
    search = mode.session(locks).deadlocks
    reads = []
    read = search.registry.some_entries

    async def counted(*args):
        reads.append(1)
        return await read(*args)

    search.registry.some_entries = counted
    a, b = locks.lock("a"), locks.lock("b")
    pair = start(mode, [(a, b), (b, a)], [50, 50])
    others = mode.interlock()
    await until(lambda: is_known(others))
    crowd = start(mode, [(locks.lock(f"own {i}"), a) for i in range(20)], [1.0] * 20)
    errors = await asyncio.gather(*crowd)
    assert len(reads) < 15
    assert any("behind a deadlock" in str(error) for error in errors)
    await end(locks, "b", pair)


@pytest.mark.asyncio_only  # a search holds up all tasks of a loop
async def test_a_crowd_searches_with_what_its_callers_hold_only_now_and_then(mode, monkeypatch):
    monkeypatch.setattr(deadlock_search, "REST", 1e9)
    locks = mode.interlock()
    search, searches = mode.session(locks).deadlocks, []

    def counted(*args, search_with_own=search._search_with_own):
        searches.append(1)
        return search_with_own(*args)

    search._search_with_own = counted
    taken = await mode.interlock().semaphore("s", 1).acquire()
    crowd = start(mode, [(locks.lock(f"own {i}"), locks.semaphore("s", 1)) for i in range(10)], [0.6] * 10)
    assert all(isinstance(error, AcquireTimeout) for error in await asyncio.gather(*crowd))
    assert len(searches) <= 1  # none if the answer came too late
    await taken.release()
