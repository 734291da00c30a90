"""A server does not answer, or says that somebody else has the lock: which error a caller gets, and when.

Not here: what becomes of a lease or of a place in the queue meanwhile (test_network.py, test_outages.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from typing import NamedTuple

import pytest

import interlock
import interlock.aio
from harness.clock import machine_time
from harness.modes import SLACK, outcome, queued, until
from harness.topology import Independents
from interlock import AcquireTimeout, ConfigError, Skipped, Unavailable
from interlock._client import cohort, grant, retries
from interlock._protocol.timing import RETRY_FOR

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", starts="a cluster, a quorum")

KINDS = {
    "lock": lambda locks, timeout: locks.lock("a").acquire(timeout=timeout),
    "rlock": lambda locks, timeout: locks.rlock("r").acquire(timeout=timeout),
    "semaphore": lambda locks, timeout: locks.semaphore("s", 1).acquire(timeout=timeout),
    "read": lambda locks, timeout: locks.rwlock("rw").read().acquire(timeout=timeout),
    "write": lambda locks, timeout: locks.rwlock("rw").write().acquire(timeout=timeout),
    "multi": lambda locks, timeout: locks.multi(locks.lock("m"), locks.semaphore("n", 1)).acquire(timeout=timeout),
    "latch": lambda locks, timeout: locks.latch("l", 1).wait(timeout=timeout),
    "barrier": lambda locks, timeout: locks.barrier("b", 2).wait(timeout=timeout),
    "election": lambda locks, timeout: locks.election("e").campaign(timeout=timeout),
}


async def timed(acquiring):
    """The result or error of a call, and after how many seconds at least, and at most on a machine that runs."""
    started, machine = time.monotonic(), machine_time()
    return await outcome(acquiring), Took(time.monotonic() - started, machine_time() - machine)


class Took(NamedTuple):
    least: float
    most: float


async def of_all_kinds(locks, timeout):
    """The result or error of each kind of call, and after how many seconds; all at the same time."""
    results = await asyncio.gather(*(timed(acquire(locks, timeout)) for acquire in KINDS.values()))
    return dict(zip(KINDS, results, strict=True))


@contextlib.contextmanager
def silenced(node, how):
    """A server that does not answer: it is stopped, or no process listens there."""
    if how == "hung":
        node.pause()
        yield
        node.resume()
    else:
        node.kill()
        yield


@rule(8)
@pytest.mark.parametrize("how", ["hung", "refused"])
@pytest.mark.parametrize("warm", [True, False], ids=["connected", "connecting"])
async def test_one_try_takes_try_for_at_most_however_the_server_is_silent(mode, node, how, warm):
    locks = mode.interlock(node.url, try_for=0.4)
    if warm:
        await (await locks.lock("warm").acquire()).release()
    with silenced(node, how):
        results = await of_all_kinds(locks, 0)
        tried = await timed(locks.lock("a").try_acquire())
    for kind, (error, took) in {**results, "try_acquire": tried}.items():
        assert isinstance(error, Unavailable), (kind, error)
        assert took.most < 0.4 + SLACK, kind


@rule(8)
@pytest.mark.parametrize("how", ["hung", "refused"])
async def test_a_silent_server_is_unavailable_and_the_error_says_which_and_how_long(mode, node, how):
    locks = mode.interlock(node.url)
    with silenced(node, how):
        results = await of_all_kinds(locks, 0.6)
    for kind, (error, took) in results.items():
        assert isinstance(error, Unavailable), (kind, error)
        assert not isinstance(error, TimeoutError)
        for word in ("no answer from", node.url, " for 0.", "Is the server up"):
            assert word in str(error), (kind, error)
        assert took.least > 0.5 and took.most < 0.6 + SLACK, kind  # a refused one, too, may use its time
    assert "lock 'a'" in str(results["lock"][0])


@rule(2, 8)
@pytest.mark.parametrize("how", ["hung", "refused"])
@pytest.mark.parametrize("timeout", [0.6, None])
async def test_callers_of_one_process_wait_no_longer_for_a_silent_server_than_one_does(mode, node, timeout, how):
    """One of them asks for all; the others share its silence, and do not ask one after another."""
    locks = mode.interlock(node.url)
    await (await locks.lock("warm").acquire()).release()
    longest = timeout or RETRY_FOR
    with silenced(node, how):
        began = machine_time()
        calls = [asyncio.ensure_future(outcome(locks.lock("a").acquire(timeout))) for _ in range(6)]
        errors = await asyncio.gather(*calls)
        assert machine_time() - began < longest + SLACK
    for error in errors:
        assert isinstance(error, Unavailable), error
        assert node.url in str(error)
    assert not locks._session.core.cohorts.by_key


@rule(2, 8)
async def test_a_short_silence_behind_another_caller_of_the_process_is_no_outage(mode, clean, proxy, monkeypatch):
    """A caller with a timeout of 3 ms read "no answer for 0.003 s. Is the server up?", of a server that was well."""
    for module, name in ((cohort, "SHORT_SILENCE"), (retries, "ANSWER_COUNTS_FOR"), (grant, "ANSWER_COUNTS_FOR")):
        monkeypatch.setattr(module, name, 600.0)  # on a busy machine, the silence may be long
    locks, unanswered = mode.interlock(proxy.url, try_for=0.2), mode.interlock(proxy.url)
    await (await locks.lock("warm").acquire()).release()
    proxy.hold = True
    first = asyncio.ensure_future(outcome(locks.lock("a").acquire(timeout=60)))
    other = asyncio.ensure_future(outcome(unanswered.lock("u").acquire(timeout=60)))
    await until(lambda: locks._session.core.cohorts.by_key and unanswered._session.core.cohorts.by_key)
    error = await outcome(locks.lock("a").acquire(timeout=0.02))
    assert isinstance(error, AcquireTimeout)
    assert "other waiters are before this one" in str(error)
    # One before whom nobody asks, and one whose client the server has never answered.
    assert isinstance(await outcome(locks.lock("b").acquire(timeout=0.02)), Unavailable)
    assert isinstance(await outcome(unanswered.lock("u").acquire(timeout=0.02)), Unavailable)
    # Who does not wait hears of holders only: who skips work must know that somebody has the lock.
    assert isinstance(await outcome(locks.lock("a").try_acquire()), Unavailable)
    proxy.hold = False
    for lease in await asyncio.gather(first, other):
        await lease.release()


@rule(2, 8)
async def test_a_lease_that_passes_on_while_the_server_is_silent_costs_its_callers_no_more_time(mode, node):
    """The first of them asks for fences, and its silence is theirs."""
    locks = mode.interlock(node.url)
    lease = await locks.lock("a").acquire()
    calls = [asyncio.ensure_future(outcome(locks.lock("a").acquire())) for _ in range(2)]
    await until(lambda: len(locks._session.core.cohorts.by_key["lock:a"].waiting) == 2)
    with silenced(node, "hung"):
        began = machine_time()
        await lease.release()
        errors = await asyncio.gather(*calls)
        assert machine_time() - began < RETRY_FOR + SLACK
    assert [type(error) for error in errors] == [Unavailable] * 2


@rule(8)
async def test_a_waiter_whose_server_fell_silent_for_good_raises_unavailable(mode, node):
    """The last answer of the server says nothing about the holder any more."""
    await _hold_all(mode, node)
    waiting = asyncio.ensure_future(of_all_kinds(mode.interlock(node.url), 5.0))
    await _until_all_wait(mode, node)
    node.pause()
    try:
        results = await waiting
    finally:
        node.resume()
    for kind, (error, took) in results.items():
        assert isinstance(error, Unavailable), (kind, error)
        assert node.url in str(error)
        assert took.most < 5 + SLACK


@rule(8)
async def test_a_waiter_whose_server_answered_lately_raises_acquire_timeout_with_the_holder(mode, node):
    await _hold_all(mode, node)
    locks, timeout = mode.interlock(node.url), 5.0
    ends = time.monotonic() + timeout
    waiting = asyncio.ensure_future(of_all_kinds(locks, timeout))
    await _until_all_wait(mode, node)
    await asyncio.sleep(max(0, ends - 0.7 - time.monotonic()))  # its silence is shorter than its answer counts
    node.pause()
    try:
        results = await waiting
    finally:
        node.resume()
    for kind, (error, _) in results.items():
        expected = interlock.BrokenBarrier if kind == "barrier" else AcquireTimeout
        assert isinstance(error, expected), (kind, error)
    assert results["lock"][0].holder


async def _hold_all(mode, node) -> None:
    """Another client holds each of them, and keeps it."""
    others = mode.interlock(node.url, max_ttl=60)
    for name in ("a", "m"):
        await mode.keep(others.lock(name, ttl=60).acquire())
    await mode.keep(others.rlock("r", ttl=60).acquire())
    await mode.keep(others.semaphore("s", 1, ttl=60).acquire())
    await mode.keep(others.semaphore("n", 1, ttl=60).acquire())
    await mode.keep(others.rwlock("rw", ttl=60).write().acquire())
    await mode.keep(others.election("e", ttl=60).campaign())


async def _until_all_wait(mode, node) -> None:
    """Wait until each of them has its waiter in the queue."""
    locks = mode.interlock(node.url)

    async def wait() -> bool:
        things = (
            locks.lock("a"), locks.rlock("r"), locks.semaphore("s", 1), locks.lock("m"), locks.latch("l", 1),
            locks.barrier("b", 2), locks.election("e"),
        )  # fmt: skip
        return (await locks.rwlock("rw").inspect()).waiting == 2 and all(
            [(await thing.inspect()).waiting == 1 for thing in things]
        )

    await until(wait)


@rule(8)
async def test_one_try_reconnects_and_sends_the_script_text_if_need_be(mode, clean, proxy):
    locks = mode.interlock(proxy.url, try_for=5.0)  # of a busy machine
    await (await locks.lock("warm").acquire()).release()
    proxy.cut()
    clean.script_flush()
    lease = await locks.lock("a").try_acquire()
    assert lease is not None
    await lease.release()


@rule(8)
async def test_a_silence_that_is_longer_than_a_try_costs_no_run_of_once(mode, clean, proxy):
    locks = mode.interlock(proxy.url, try_for=0.2)
    await (await locks.lock("warm").acquire()).release()
    proxy.hold = True
    work = (lambda _: "done") if mode.name == "threads" else _done
    running = asyncio.ensure_future(locks.once("nightly", at_most=60).run(work))
    assert isinstance(await outcome(locks.lock("a").try_acquire()), Unavailable)
    assert not running.done()
    proxy.hold = False
    ran = await running
    assert not isinstance(ran, Skipped)
    assert ran.value == "done"


async def _done(_lease) -> str:
    return "done"


@rule(8)
async def test_synchronized_skips_because_of_a_holder_and_not_because_of_an_outage(mode, node):
    locks = mode.interlock(node.url, try_for=0.3)
    call = interlock.Interlock.synchronized if mode.name == "threads" else interlock.aio.Interlock.synchronized
    real = locks._real if mode.name == "threads" else locks
    await locks.ping()  # connecting is not what `try_for` is for here

    if mode.name == "threads":

        @call(real, "job", busy="skip")
        def job() -> str:
            return "done"

        def run():
            return mode.in_thread(job)

    else:

        @call(real, "job", busy="skip")
        async def job() -> str:
            return "done"

        run = job

    await mode.keep(mode.interlock(node.url).lock("job").acquire())
    assert isinstance(await run(), Skipped)
    node.pause()
    try:
        assert isinstance(await outcome(run()), Unavailable)
    finally:
        node.resume()


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "1", True, None, 5000])
def test_a_bad_try_for_is_refused(value):
    for make in (interlock.Interlock, interlock.aio.Interlock):
        with pytest.raises(ConfigError, match="try_for"):
            make("redis://nowhere", try_for=value)
        with pytest.raises(ConfigError, match="try_for"):
            make.quorum(["redis://a", "redis://b", "redis://c"], try_for=value)


# Several servers


@pytest.fixture(scope="module")
def five():
    with Independents(number=5) as made:
        yield made


@pytest.fixture
def together(five):
    """Five servers of a quorum, all running and empty."""
    yield five
    for node in five.nodes:
        node.resume()


@rule(8)
async def test_a_quorum_without_a_majority_raises_unavailable_and_with_one_names_the_holder(mode, together):
    urls = [node.url for node in together.nodes]
    holder, locks = mode.interlock(urls, max_ttl=60), mode.interlock(urls, try_for=0.5)
    lease = await holder.lock("q", ttl=60).acquire()
    for node in together.nodes[:2]:
        node.pause()
    error = await outcome(locks.lock("q").acquire(timeout=1.0))
    assert isinstance(error, AcquireTimeout), error
    assert error.holder == lease.token
    together.nodes[2].pause()
    for timeout in (0, 0.8):
        error, took = await timed(locks.lock("q").acquire(timeout=timeout))
        assert isinstance(error, Unavailable), error
        assert re.search(r"only \d of 5 servers of the quorum answer", str(error))
        assert took.most < 0.8 + SLACK
    for node in together.nodes:
        node.resume()
    assert await lease.release()


@rule(8)
async def test_one_try_is_enough_for_a_majority_beside_stopped_servers(mode, together):
    """It is the first try, which has to connect to each server first."""
    for node in together.nodes[:2]:
        node.pause()
    locks = mode.interlock([node.url for node in together.nodes], try_for=1.0)
    lease = await locks.lock("first").try_acquire()
    assert lease is not None
    await lease.release()


@rule(8)
async def test_one_try_is_enough_for_a_cluster_whose_first_seed_is_silent(mode, server_pool):
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it takes connections, and says nothing
        cluster = server_pool.clean_cluster("valkey-9.1")
        seeds = cluster.url.partition("://")[2]
        locks = mode.interlock(f"redis+cluster://127.0.0.1:{mute.getsockname()[1]},{seeds}", try_for=1.0)
        lease = await locks.lock("first").try_acquire()
        assert lease is not None
        await lease.release()


# What a silent server must not hold up


@rule(6)
async def test_the_end_of_a_lease_is_reported_in_time_while_the_server_is_silent(mode, clean, proxy):
    """Renewals, heartbeats and undos wait for the server; the report that a lease has ended waits for nobody."""
    holder, locks = mode.interlock(max_ttl=60), mode.interlock(proxy.url)
    await mode.keep(holder.lock("held", ttl=60).acquire())
    leases = [await locks.lock(f"l{i}", ttl=3.2 + i / 5).acquire() for i in range(10)]
    leases += [await locks.lock(f"f{i}", ttl=3.3 + i / 5, renew=False).acquire() for i in range(10)]
    lost = [lease.lost for lease in leases]
    calls = [asyncio.ensure_future(outcome(locks.lock("held").acquire(timeout=4)))]
    await until(lambda: queued(holder, 1, "held"))
    proxy.hold = True
    calls += [asyncio.ensure_future(outcome(locks.lock(f"x{i}").acquire(timeout=0.2 + i / 5))) for i in range(15)]
    now, seen = mode.session(locks).runtime.now, {}

    async def told() -> bool:
        for i, event in enumerate(lost):
            if event.is_set():
                seen.setdefault(i, now() - leases[i]._grant.hold.deadline)
        await asyncio.sleep(0.01)
        return len(seen) == len(leases)

    await until(told)
    await asyncio.gather(*calls)
    proxy.hold = False
    assert min(seen.values()) >= 0
    assert max(seen.values()) < 2, sorted(seen.values())  # the server would have been waited for for 5 s
