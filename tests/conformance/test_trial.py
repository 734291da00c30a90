"""The trial of wrong uses that only a server can tell: states, other kinds, wrong servers, after close."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import decimal
import json
import pickle
import socket
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.modes import outcome, real, subscribe, until
from harness.servers import Node, free_ports
from harness.topology.group import ask
from harness.topology.sentinels import _Sentinel as Sentinel
from harness.trial import wrong
from interlock import AcquireTimeout, BrokenBarrier, ConfigError, Deadlock, LeaseLost, Unavailable

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


def job(mode, value=1):
    """A function of this mode that takes anything."""

    async def coroutine(*_):
        return value

    return coroutine if mode.name == "asyncio" else lambda *_: value


async def call(mode, function, *args):
    return await (mode.in_thread(function, *args) if mode.name == "threads" else function(*args))


def on(make):
    """A wrong use of `make(locks)`, in one call."""

    async def use(mode, locks, _):
        return await make(locks)

    return use


def lease(use):
    """A wrong use of a lease of the lock "a"."""

    async def held(mode, locks, _):
        acquired = await locks.lock("a").acquire()
        try:
            used = use(acquired)
            return await used if asyncio.iscoroutine(used) else used
        finally:
            await acquired.release()

    return held


def ended(use):
    """A wrong use of a lease that was released."""

    async def released(mode, locks, _):
        acquired = await locks.lock("a").acquire()
        await acquired.release()
        used = use(acquired)
        return await used if asyncio.iscoroutine(used) else used

    return released


def closed(use):
    """A use after close()."""

    async def after(mode, locks, _):
        lock = locks.lock("a")
        await (await lock.acquire()).release()
        await locks.close()
        used = use(locks, lock)
        return await used if asyncio.iscoroutine(used) else used

    return after


async def enter(thing):
    async with thing:
        pass


def by_one_thread(use):
    """This use, with all its calls in one thread: a pool of several may take another thread for the second call."""

    async def by_one(mode, locks, clean):
        mode.pool.shutdown()
        mode.pool = ThreadPoolExecutor(1)
        await use(mode, locks, clean)

    return by_one


def beside(use):
    """A use while another Interlock holds the lock "a"."""

    async def busy(mode, locks, _):
        # By another task: the same one would wait for itself.
        held = await asyncio.create_task(mode.interlock().lock("a").acquire())
        try:
            return await use(mode, locks)
        finally:
            await held.release()

    return busy


def multi(use):
    async def held(mode, locks, _):
        acquired = await locks.multi(locks.lock("a"), locks.lock("b")).acquire()
        try:
            return use(acquired)
        finally:
            await acquired.release()

    return held


def on_data(setup, use):
    """A use of a name whose key holds something else."""

    async def occupied(mode, locks, client):
        setup(client)
        client.pexpire("lock:a", 60_000)
        return await use(mode, locks)

    return occupied


def on_a_hash(kind: str, called: str):
    """A use of a name whose key is a hash of the user: it must not be deleted."""

    async def occupied(mode, locks, client):
        client.hset("lock:a", mapping={"user": "ann"})
        client.expire("lock:a", 60)
        try:
            await getattr(KINDS[kind](locks), called)(*["it is stuck"] * (called == "revoke"))
        finally:
            assert client.hgetall("lock:a") == {b"user": b"ann"}

    return occupied


KINDS = {
    "lock": lambda locks: locks.lock("a"),
    "semaphore": lambda locks: locks.semaphore("a", 2),
    "rwlock": lambda locks: locks.rwlock("a").read(),
    "election": lambda locks: locks.election("a"),
    "once": lambda locks: locks.once("a", at_most=60),
    "latch": lambda locks: locks.latch("a", 2),
    "barrier": lambda locks: locks.barrier("a", 2),
}
CALLED = {
    "lock": "a lock", "semaphore": "a semaphore", "rwlock": "a read-write lock", "election": "an election",
    "once": "a once()", "latch": "a latch", "barrier": "a barrier",
}  # fmt: skip
ASKING = {
    "semaphore": ["available"], "election": ["leader"], "once": ["forget"], "latch": ["count", "count_down", "wait"],
    "barrier": ["reset", "wait"],
}  # fmt: skip


async def occupy(mode, locks, kind: str) -> None:
    """Let this kind use the name "a", until the Interlocks of the test are closed."""
    thing = KINDS[kind](locks)
    if kind == "latch":
        await thing.count_down()
    elif kind == "barrier":
        await outcome(thing.wait(0))
    elif kind == "once":
        await thing.run(job(mode))
    else:
        await mode.keep(thing.acquire())


def of_another_kind(kind: str, other: str):
    """All ways to look at, take or revoke a name of this kind as if it were of the other one: each is refused."""

    async def use(mode, locks, client):
        holder = mode.interlock()
        await subscribe(mode.session(holder), "b")  # no renewal may come between the two dumps
        await occupy(mode, holder, kind)
        thing = KINDS[other](locks)
        before = client.dump("lock:a")
        calls = [
            thing.inspect,
            lambda: thing.revoke("it is stuck"),
            *(getattr(thing, each) for each in ASKING.get(other, ())),
        ]
        if other not in {"latch", "barrier", "once"}:
            calls.append(thing.try_acquire)
            calls.append(lambda: thing.revoke("it is stuck", force=True))
        errors = [await outcome(ask()) for ask in calls]
        # The undo of the party that made the barrier goes on meanwhile.
        assert kind == "barrier" or client.dump("lock:a") == before, "an error, and something was done"
        assert len({str(error) for error in errors}) == 1, errors
        raise errors[0]

    return use


async def nest(mode, outer, inner):
    """A `with` inside a `with`, in one thread or task."""
    if mode.name == "asyncio":
        async with outer, inner:
            return

    def nested():
        with outer, inner:
            pass

    await mode.in_thread(nested)


async def entered_twice(mode, locks, _):
    lock = real(locks).lock("a", timeout=1)
    await nest(mode, lock, lock)


async def upgraded(mode, locks, _):
    rwlock = real(locks).rwlock("a")
    await nest(mode, rwlock.read(), rwlock.write())


async def expired(mode, locks, _):
    acquired = await locks.lock("a", ttl=0.1, renew=False).acquire()
    await until(acquired.lost.is_set)
    acquired.ensure()


async def held_for_too_long(mode, locks, _):
    async with locks.lock("a", max_hold=0.05) as acquired:
        await until(acquired.lost.is_set)


async def another_limit(mode, locks, _):
    await mode.keep(mode.interlock().semaphore("a", 3).acquire())
    await locks.semaphore("a", 4).acquire()


async def another_count(mode, locks, _):
    await mode.interlock().latch("a", 3).count_down()
    await locks.latch("a", 4).wait()


async def other_parties(mode, locks, _):
    waits = asyncio.ensure_future(outcome(mode.interlock().barrier("a", 3).wait(30)))
    await until(lambda: arrived(locks))
    try:
        await locks.barrier("a", 2).wait(1)
    finally:
        await locks.barrier("a", 3).reset()
        await waits


async def arrived(locks) -> bool:
    return (await locks.barrier("a", 3).inspect()).arrived == 1


async def broken_barrier(mode, locks, _):
    await outcome(locks.barrier("a", 2).wait(0.3))  # long enough to arrive on a busy machine
    await locks.barrier("a", 2).wait(1)


async def run_of_nothing(mode, locks, _):
    """What the work returns, in place of the work."""
    await locks.once("a", at_most=60).run(await call(mode, job(mode)))


async def run_of_a_coroutine(mode, locks, _):
    await locks.once("a", at_most=60).run(job(mode)())


async def run_without_an_argument(mode, locks, _):
    async def coroutine():
        raise AssertionError

    def plain():
        raise AssertionError

    await locks.once("a", at_most=60).run(coroutine if mode.name == "asyncio" else plain)


async def campaign_without_an_argument(mode, locks, _):
    await locks.election("a").run(lambda: 1)


async def work_of_the_other_mode(mode, locks, _):
    async def coroutine(_):
        raise AssertionError

    await locks.once("a", at_most=60).run((lambda _: 7) if mode.name == "asyncio" else coroutine)


async def stop_of_the_other_mode(mode, locks, _):
    stop = threading.Event() if mode.name == "asyncio" else asyncio.Event()
    await locks.election("a").run(job(mode), stop=stop)


def decorated(name, *args):
    async def use(mode, locks, _):
        async def coroutine(x):
            raise AssertionError

        def plain(x):
            raise AssertionError

        function = coroutine if mode.name == "asyncio" else plain
        await call(mode, real(locks).synchronized(name)(function), *args)

    return use


async def busy_decorator(mode, locks):
    await call(mode, real(locks).synchronized("a", busy="raise")(job(mode)))


async def not_awaited(mode, locks, _):
    acquiring = locks.lock("a").acquire()
    with contextlib.closing(acquiring):
        return acquiring.fence


async def awaited_in_threads(mode, locks, _):
    acquired = await locks.lock("a").acquire()
    try:
        await real(acquired)
    finally:
        await acquired.release()


def in_another_loop(use):
    """A lease of one event loop in the event loop of another thread."""

    async def elsewhere(mode, locks, _):
        acquired = await locks.lock("a").acquire()
        await asyncio.to_thread(asyncio.run, use(acquired))

    return elsewhere


async def without_a_loop(mode, locks, _):
    with contextlib.closing(locks.lock("a").acquire()) as acquiring:
        await asyncio.to_thread(acquiring.send, None)


async def left_elsewhere(mode, locks, _):
    await locks.lock("a").__aexit__(None, None, None)


async def pickled(mode, locks, _):
    acquired = await locks.lock("a").acquire()
    try:
        pickle.dumps(real(acquired))
    finally:
        await acquired.release()


async def wrong_with(mode, locks, _):
    acquired = await locks.lock("a").acquire()
    try:
        if mode.name == "asyncio":
            with acquired:
                pass
        async with real(acquired):
            pass
    finally:
        await acquired.release()


HOLDER = "it is held by "
USES = [
    # Words of other libraries, and wrong arguments
    wrong(
        "acquire(blocking=False)",
        on(lambda locks: locks.lock("a").acquire(blocking=False)),
        TypeError,
        "Lock.acquire()",
        "'blocking'",
        "try_acquire()",
        only="threads",
    ),
    wrong(
        "acquire(blocking=False)",
        on(lambda locks: locks.lock("a").acquire(blocking=False)),
        TypeError,
        "Lock.acquire()",
        "'blocking'",
        only="asyncio",
    ),
    wrong(
        "acquire(blocking_timeout=5)",
        on(lambda locks: locks.lock("a").acquire(blocking_timeout=5)),
        TypeError,
        "Lock.acquire()",
        "timeout=",
        only="threads",
    ),
    wrong(
        "acquire(ttl=5)",
        on(lambda locks: locks.lock("a").acquire(ttl=5)),
        TypeError,
        "Lock.acquire()",
        "locks.lock(name, ttl=10",
        only="threads",
    ),
    wrong(
        "an rlock's acquire(blocking=False)",
        on(lambda locks: locks.rlock("a").acquire(blocking=False)),
        TypeError,
        "RLock.acquire()",
        "'blocking'",
    ),
    wrong(
        "acquire(False)",
        on(lambda locks: locks.lock("a").acquire(False)),
        ConfigError,
        "lock 'a'",
        "not False",
        "try_acquire()",
    ),
    wrong("acquire(True, 5)", on(lambda locks: locks.lock("a").acquire(True, 5)), TypeError, "Lock.acquire() takes"),
    wrong(
        "acquire(True, 5, 6)",
        on(lambda locks: locks.lock("a").acquire(True, 5, 6)),
        TypeError,
        "Give only the time to wait by position: acquire(5)",
        only="threads",
    ),
    wrong(
        "acquire with a text",
        on(lambda locks: locks.lock("a").acquire("5")),
        ConfigError,
        "lock 'a'",
        "timeout must be a number of seconds, not '5'",
    ),
    wrong(
        "acquire with a negative timeout",
        on(lambda locks: locks.lock("a").acquire(-1)),
        ConfigError,
        "lock 'a'",
        "timeout must be at least 0 seconds, not -1. To wait for ever: None",
    ),
    wrong(
        "acquire with a timedelta",
        on(lambda locks: locks.lock("a").acquire(dt.timedelta(1))),
        ConfigError,
        "lock 'a'",
        ".total_seconds()",
    ),
    wrong(
        "try_acquire(timeout=5)",
        on(lambda locks: locks.lock("a").try_acquire(timeout=5)),
        TypeError,
        "Lock.try_acquire()",
        "acquire(timeout=...)",
        only="threads",
    ),
    wrong(
        "no permits",
        on(lambda locks: locks.semaphore("a", 3).acquire(permits=0)),
        ConfigError,
        "semaphore 'a'",
        "from 1 to 3, not 0",
    ),
    wrong(
        "more permits than there are",
        on(lambda locks: locks.semaphore("a", 3).acquire(permits=4)),
        ConfigError,
        "semaphore 'a'",
        "from 1 to 3, not 4",
    ),
    wrong(
        "permits as a text",
        on(lambda locks: locks.semaphore("a", 3).acquire(permits="2")),
        ConfigError,
        "semaphore 'a'",
        "a whole number",
        "'2'",
    ),
    wrong(
        "set_limit(0)",
        on(lambda locks: locks.semaphore("a", 3).set_limit(0)),
        ConfigError,
        "semaphore 'a'",
        "its limit",
        "not 0",
    ),
    wrong(
        "count_down(0)",
        on(lambda locks: locks.latch("a", 3).count_down(0)),
        ConfigError,
        "latch 'a'",
        "n of count_down()",
        "not 0",
    ),
    wrong("count_down(-1)", on(lambda locks: locks.latch("a", 3).count_down(-1)), ConfigError, "latch 'a'", "not -1"),
    wrong(
        "a latch's wait with a text",
        on(lambda locks: locks.latch("a", 3).wait("5")),
        ConfigError,
        "latch 'a'",
        "timeout must be a number",
    ),
    wrong(
        "a barrier's wait with a text",
        on(lambda locks: locks.barrier("a", 3).wait("5")),
        ConfigError,
        "barrier 'a'",
        "timeout must be a number",
    ),
    wrong(
        "revoke without a reason",
        on(lambda locks: locks.lock("a").revoke()),
        TypeError,
        "Lock.revoke() missing",
        "'reason'",
    ),
    wrong(
        "revoke with an empty reason",
        on(lambda locks: locks.lock("a").revoke("")),
        ConfigError,
        "lock 'a'",
        "needs a reason",
    ),
    wrong(
        "revoke(None)",
        on(lambda locks: locks.lock("a").revoke(None)),
        ConfigError,
        "lock 'a'",
        "needs a reason",
        "None",
    ),
    wrong(
        "force of a latch",
        on(lambda locks: locks.latch("a", 1).revoke("x", force=True)),
        TypeError,
        "Latch.revoke()",
        "'force'",
    ),
    wrong(
        "once.run(None)",
        on(lambda locks: locks.once("a", at_most=60).run(None)),
        ConfigError,
        "once 'a'",
        "run() takes a function",
    ),
    wrong("once.run of a result", run_of_nothing, ConfigError, "once 'a'", "run() takes a function", "not 1"),
    wrong(
        "once.run of a coroutine",
        run_of_a_coroutine,
        ConfigError,
        "once 'a'",
        "run() takes a function",
        "coroutine",
        only="asyncio",
    ),
    wrong("work without an argument", run_without_an_argument, ConfigError, "once 'a'", "Give the function one"),
    wrong("work of the other mode", work_of_the_other_mode, ConfigError, "once 'a'", "returned"),
    wrong(
        "election.run(None)",
        on(lambda locks: locks.election("a").run(None)),
        ConfigError,
        "election 'a'",
        "run() takes a function",
    ),
    wrong(
        "a campaign without an argument",
        campaign_without_an_argument,
        ConfigError,
        "election 'a'",
        "one argument, the lease",
    ),
    wrong("a stop of the other mode", stop_of_the_other_mode, ConfigError, "election 'a'", "stop must be a", "Event"),
    wrong(
        "a stop that is no event",
        on(lambda locks: locks.election("a").run(lambda _: 1, stop=7)),
        ConfigError,
        "election 'a'",
        "stop must be",
        "not 7",
    ),
    wrong(
        "a call without the name's attribute",
        decorated("a:{x.id}", 7),
        ConfigError,
        "synchronized('a:{x.id}')",
        "can't make the name",
        "'id'",
    ),
    wrong(
        "an object in a name",
        decorated("a:{x}", object()),
        ConfigError,
        "synchronized('a:{x}')",
        "the address of an object",
        "{user.id}",
    ),
    wrong("a call without an argument", decorated("a:{x}"), TypeError, "(): missing a required argument: 'x'"),
    wrong(
        "a name that a function does not return",
        decorated(lambda: None, 1),
        ConfigError,
        "must return the name, not None",
    ),
    # Leases
    wrong(
        "extend(0)", lease(lambda held: held.extend(0)), ConfigError, "lock 'a'", "ttl must be at least 0.01", "not 0"
    ),
    wrong(
        "extend with a text",
        lease(lambda held: held.extend("10")),
        ConfigError,
        "lock 'a'",
        "ttl must be a number",
        "'10'",
    ),
    wrong(
        "extend for an hour",
        lease(lambda held: held.extend(3600)),
        ConfigError,
        "lock 'a'",
        "at most max_ttl (30 s), not 3600",
    ),
    wrong("extend()", lease(lambda held: held.extend()), TypeError, "Lease.extend() missing", "'ttl'"),
    wrong(
        "redis-py's additional_time",
        lease(lambda held: held.extend(additional_time=3)),
        TypeError,
        "Lease.extend()",
        "'additional_time'",
    ),
    wrong(
        "redis-py's additional_time in threads",
        lease(lambda held: held.extend(additional_time=3)),
        TypeError,
        "extend(ttl) makes the lease last at least ttl seconds from now",
        only="threads",
    ),
    wrong(
        "execute of one text",
        lease(lambda held: held.execute("SET x 1")),
        ConfigError,
        "lock 'a'",
        "execute('SET x 1')",
        'execute("SET", "x", 1',
    ),
    wrong(
        "execute of a list",
        lease(lambda held: held.execute(["SET", "x", 1])),
        ConfigError,
        "lock 'a'",
        "the command must be a str",
        'execute("SET"',
    ),
    wrong("execute()", lease(lambda held: held.execute()), TypeError, "Lease.execute() missing", "'command'"),
    wrong("execute of nothing", lease(lambda held: held.execute("")), ConfigError, "lock 'a'", "one by one"),
    wrong(
        "execute with a text for keys",
        lease(lambda held: held.execute("SET", "key", 1, keys="key")),
        ConfigError,
        "lock 'a'",
        "keys must be a list",
        "not 'key'",
    ),
    wrong(
        "execute with another key",
        lease(lambda held: held.execute("SET", "x", 1, keys=["y"])),
        ConfigError,
        "lock 'a'",
        "'y' is in keys, but not among the arguments",
    ),
    *(
        wrong(
            f"execute with a {type(value).__name__}",
            lease(lambda held, value=value: held.execute("SET", "x", value, keys=["x"])),
            ConfigError,
            "lock 'a'",
            "execute('SET')",
            f"not {type(value).__name__}. Convert it first",
        )
        for value in (None, decimal.Decimal(1), uuid.UUID(int=1), True, [1], {}, object())
    ),
    wrong(
        "execute of an unknown command",
        lease(lambda held: held.execute("SETT", "x", 1, keys=["x"])),
        ConfigError,
        "lock 'a'",
        "execute('SETT')",
        "no such command",
    ),
    wrong(
        "execute with too few arguments",
        lease(lambda held: held.execute("SET", "x", keys=["x"])),
        ConfigError,
        "lock 'a'",
        "execute('SET')",
        "another number of arguments",
    ),
    wrong(
        "execute of MULTI",
        lease(lambda held: held.execute("MULTI", keys=[])),
        ConfigError,
        "lock 'a'",
        "execute('MULTI')",
        "runs in a script, which can't use this command",
    ),
    wrong("execute without keys", lease(lambda held: held.execute("PING")), ConfigError, "lock 'a'", "keys=[]"),
    wrong("a lease's acquire()", lease(lambda held: held.acquire()), AttributeError, "'acquire'", "Acquire the lock"),
    wrong("a lease's locked()", lease(lambda held: held.locked()), AttributeError, "'locked'", "lease.state"),
    wrong("a lease's renew()", lease(lambda held: held.renew()), AttributeError, "'renew'", "extend(ttl)"),
    wrong(
        "a lease's fencing_token",
        lease(lambda held: held.fencing_token),
        AttributeError,
        "'fencing_token'",
        "lease.fence",
    ),
    wrong("a lease's ttl", lease(lambda held: held.ttl), AttributeError, "'ttl'", "lease.remaining()"),
    wrong(
        "a multi's wrong name",
        multi(lambda held: real(held)["zzz"]),
        KeyError,
        "multi 'a, b' has no lock 'zzz'",
        "'a', 'b'",
    ),
    wrong(
        "a multi's execute()",
        multi(lambda held: real(held).execute("GET", "x")),
        AttributeError,
        "'execute'",
        "lease[name]",
    ),
    wrong("a multi's token", multi(lambda held: real(held).token), AttributeError, "'token'", "lease[name]"),
    wrong("a pickled lease", pickled, TypeError, "Lease 'a'", "can't be pickled", "this lease's fence"),
    wrong("the wrong with of a lease", wrong_with, TypeError, "Lease 'a'", "`from interlock"),
    # States
    wrong(
        "ensure() after the release",
        ended(lambda held: held.ensure()),
        LeaseLost,
        "the lease on lock 'a' has ended: it was released",
        "Acquire it again",
    ),
    wrong(
        "extend() after the release",
        ended(lambda held: held.extend(3)),
        LeaseLost,
        "the lease on lock 'a' has ended",
        "Acquire it again",
    ),
    wrong(
        "execute() after the release",
        ended(lambda held: held.execute("SET", "x", 1, keys=["x"])),
        LeaseLost,
        "the lease on lock 'a' has ended",
        "Acquire it again",
    ),
    wrong("a with after the release", ended(enter), LeaseLost, "the lease on lock 'a' has ended", "Acquire it again"),
    wrong(
        "a lease that was not renewed", expired, LeaseLost, "the lease on lock 'a'", "its ttl passed", "Stop writing"
    ),
    wrong(
        "work beyond max_hold",
        held_for_too_long,
        LeaseLost,
        "the lease on lock 'a'",
        "its max_hold is over",
        "Stop writing",
    ),
    wrong(
        "__exit__ without __enter__",
        left_elsewhere,
        ConfigError,
        "lock 'a'",
        "no lease was entered",
        "Keep the lease",
    ),
    wrong(
        "a with inside itself",
        entered_twice,
        Deadlock,
        "lock 'a'",
        "would wait for itself for ever",
        "rlock()",
    ),
    wrong(
        "reader and writer at once",
        upgraded,
        ConfigError,
        "rwlock 'a'",
        "can't begin to write",
        "Release the read lease first",
    ),
    wrong(
        "a busy lock",
        by_one_thread(beside(lambda _, locks: locks.lock("a").acquire(0.2))),
        AcquireTimeout,
        "lock 'a'",
        "within 0.2 s",
        HOLDER,
        "whose lease had",
        "when last asked. This very thread holds it",
        only="threads",
    ),
    wrong(
        "a busy lock",
        beside(lambda _, locks: locks.lock("a").acquire(0.2)),
        AcquireTimeout,
        "lock 'a'",
        "within 0.2 s",
        HOLDER,
        "whose lease had",
        "Wait longer, or see .inspect()",
        only="asyncio",
    ),
    wrong(
        "a busy lock, without waiting",
        beside(lambda _, locks: locks.lock("a").acquire(0)),
        AcquireTimeout,
        "lock 'a' is not free",
        HOLDER,
        "when last asked. ",
    ),
    wrong(
        "a busy lock in a with",
        beside(lambda _, locks: enter(locks.lock("a", timeout=0))),
        AcquireTimeout,
        "lock 'a' is not free",
        HOLDER,
    ),
    wrong(
        "a busy lock in a multi",
        beside(lambda _, locks: locks.multi(locks.lock("a"), locks.lock("b")).acquire(0.2)),
        AcquireTimeout,
        "multi 'a, b'",
        ": lock 'a' was not",
        HOLDER,
    ),
    wrong("a busy decorator", beside(busy_decorator), AcquireTimeout, "lock 'a' is not free", HOLDER),
    wrong("another limit", another_limit, ConfigError, "semaphore 'a'", "in use with limit=3", "set_limit()"),
    wrong("another count", another_count, ConfigError, "latch 'a'", "in use with count=3", "another name"),
    wrong("other parties", other_parties, ConfigError, "barrier 'a'", "in use with parties=3", "Give the same number"),
    wrong(
        "a latch that does not open",
        on(lambda locks: locks.latch("a", 3).wait(0.2)),
        AcquireTimeout,
        "latch 'a'",
        "within 0.2 s",
        "3 have yet to count down",
    ),
    wrong(
        "a barrier to which nobody comes",
        on(lambda locks: locks.barrier("a", 3).wait(0.2)),
        BrokenBarrier,
        "barrier 'a'",
        "1 of 3 parties",
        "reset()",
    ),
    wrong("a broken barrier", broken_barrier, BrokenBarrier, "barrier 'a'", "is broken", "reset()"),
    wrong(
        "more acks than replicas",
        on(lambda locks: locks.lock("a", acks=1, ttl=0.3).acquire(2)),
        Unavailable,
        "lock 'a'",
        "replicas",
    ),
    wrong(
        "fsync without a disk",
        on(lambda locks: locks.lock("a", fsync=True).acquire(2)),
        ConfigError,
        "lock 'a'",
        "fsync=True needs appendonly yes",
    ),
    # After close
    wrong(
        "a lock of a closed Interlock",
        closed(lambda locks, _: locks.lock("a")),
        ConfigError,
        "lock('a')",
        "is closed. Make a new one",
    ),
    wrong(
        "acquire after close",
        closed(lambda _, lock: lock.acquire()),
        ConfigError,
        "lock 'a'",
        "is closed. Make a new one",
    ),
    wrong(
        "a with after close", closed(lambda _, lock: enter(lock)), ConfigError, "lock 'a'", "is closed. Make a new one"
    ),
    wrong(
        "inspect after close",
        closed(lambda _, lock: lock.inspect()),
        ConfigError,
        "lock 'a'",
        "is closed. Make a new one",
    ),
    wrong(
        "revoke after close",
        closed(lambda _, lock: lock.revoke("x")),
        ConfigError,
        "lock 'a'",
        "is closed. Make a new one",
    ),
    wrong("a latch after close", closed(lambda locks, _: locks.latch("a", 1)), ConfigError, "latch('a')", "is closed"),
    # Tasks and loops
    wrong(
        "a forgotten await", not_awaited, AttributeError, "'coroutine' object has no attribute 'fence'", only="asyncio"
    ),
    wrong(
        "an await of what threads hold",
        awaited_in_threads,
        TypeError,
        "Lease",  # "'Lease' object can't be awaited"; before 3.14 "object Lease can't be used in 'await' expression"
        "await",
        only="threads",
    ),
    wrong("no event loop", without_a_loop, RuntimeError, "no running event loop", only="asyncio"),
    wrong(
        "release() in another loop",
        in_another_loop(lambda held: held.release()),
        RuntimeError,
        "Lease 'a'",
        "belongs to the event loop",
        "in its own loop",
        only="asyncio",
    ),
    wrong(
        "extend() in another loop",
        in_another_loop(lambda held: held.extend(3)),
        RuntimeError,
        "Lease 'a'",
        "belongs to the event loop",
        only="asyncio",
    ),
    wrong(
        "execute() in another loop",
        in_another_loop(lambda held: held.execute("GET", "x", keys=["x"])),
        RuntimeError,
        "Lease 'a'",
        "belongs to the event loop",
        only="asyncio",
    ),
    wrong(
        "a with in another loop",
        in_another_loop(enter),
        RuntimeError,
        "Lease 'a'",
        "belongs to the event loop",
        only="asyncio",
    ),
    # What somebody else has put there
    wrong(
        "a list in the key",
        on_data(lambda client: client.lpush("lock:a", 1), lambda _, locks: locks.lock("a").acquire()),
        ConfigError,
        "lock 'a'",
        "holds something else",
        "Use another name or prefix",
    ),
    wrong(
        "a list in the key of an inspect",
        on_data(lambda client: client.lpush("lock:a", 1), lambda _, locks: locks.lock("a").inspect()),
        ConfigError,
        "lock 'a'",
        "holds something else",
    ),
    wrong(
        "a text in the key of a semaphore",
        on_data(lambda client: client.set("lock:a", "me"), lambda _, locks: locks.semaphore("a", 2).acquire()),
        ConfigError,
        "semaphore 'a'",
        "holds something else",
    ),
    wrong(
        "a lock of another library",
        on_data(lambda client: client.set("lock:a", "me"), lambda _, locks: locks.lock("a").acquire(0)),
        AcquireTimeout,
        "lock 'a' is not free: it is held by me",
    ),
    *(
        wrong(
            f"{CALLED[kind]} over the hash of somebody else, by {called}()",
            on_a_hash(kind, called),
            ConfigError,
            f"{kind} 'a'",
            "holds something else",
            "Use another name or prefix",
        )
        for kind, calls in (
            ("latch", ("wait", "count_down", "count", "inspect", "revoke")),
            ("barrier", ("wait", "reset", "inspect", "revoke")),
        )
        for called in calls
    ),
    *(
        wrong(
            f"{CALLED[kind]} as {CALLED[other]}",
            of_another_kind(kind, other),
            ConfigError,
            f"{other} 'a'",
            f"is in use as {CALLED[kind]}",
            "Use another name",
        )
        for kind in KINDS
        for other in KINDS
        if kind != other
    ),
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.name)
async def test_a_wrong_use_is_named(mode, clean, use, record_property):
    if mode.name not in use.modes:
        pytest.skip(f"a wrong use in {use.modes[0]}")
    locks, error = mode.interlock(try_for=2.0), None
    await locks.ping()  # so that a short timeout is not over before its client has connected
    try:
        await use.use(mode, locks, clean)
    except Exception as raised:
        error = raised
    clean.delete("lock:a")  # a test leaves no key without an expiry
    record_property("message", use.check(error))


# Wrong servers


def answering(data: bytes):
    """A server of another protocol, on a port of its own; its socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, contextlib.suppress(OSError):
                    client.recv(4096)
                    client.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return listener


@pytest.fixture(scope="module")
def places():
    """Servers that are not what a URL says; for each the place of a URL."""
    with contextlib.ExitStack() as stack:
        server, sentinel = stack.enter_context(Node()), stack.enter_context(Sentinel())
        cluster = stack.enter_context(Node(config={"cluster-enabled": "yes", "cluster-port": str(free_ports()[0])}))
        replica = stack.enter_context(Node(config={"replicaof": f"127.0.0.1 {server.port}"}))
        ask(server, "ACL", "SETUSER", "someone", "on", ">password", "~*", "&*", "+@all")
        ask(server, "ACL", "SETUSER", "reader", "on", ">password", "~*", "&*", "+@read", "+@connection")
        web = stack.enter_context(answering(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        nodes = {"server": server, "sentinel": sentinel, "cluster": cluster, "replica": replica}
        yield {
            **{name: f"127.0.0.1:{node.port}" for name, node in nodes.items()},
            "web": f"127.0.0.1:{web.getsockname()[1]}", "silent": f"127.0.0.1:{silent.getsockname()[1]}",
        }  # fmt: skip


TRIED = "lock 'a': no answer from "
SERVERS = [
    wrong(
        "a sentinel as redis://",
        lambda at: f"redis://{at['sentinel']}",
        ConfigError,
        "is a sentinel",
        "redis+sentinel://",
    ),
    wrong(
        "a sentinel as redis+cluster://",
        lambda at: f"redis+cluster://{at['sentinel']}",
        ConfigError,
        "no node of a cluster",
        "redis+sentinel://",
    ),
    wrong(
        "a node of a cluster as redis://",
        lambda at: f"redis://{at['cluster']}",
        ConfigError,
        "is one node of a cluster",
        "redis+cluster://",
    ),
    wrong(
        "a server as redis+cluster://",
        lambda at: f"redis+cluster://{at['server']}",
        ConfigError,
        "is no node of a cluster",
        "redis://",
    ),
    wrong(
        "a server as redis+sentinel://",
        lambda at: f"redis+sentinel://{at['server']}/0?service=m",
        ConfigError,
        "is no sentinel, but a server",
        "redis://",
    ),
    wrong(
        "an unknown service",
        lambda at: f"redis+sentinel://{at['sentinel']}/0?service=m",
        ConfigError,
        "knows the service 'm'",
        "They watch:",
    ),
    wrong(
        "a replica",
        lambda at: f"redis://{at['replica']}",
        Unavailable,
        "is a read-only replica",
        "Connect to its primary",
    ),
    wrong(
        "a wrong password",
        lambda at: f"redis://someone:wrong@{at['server']}",
        ConfigError,
        "password of 'someone' is wrong",
    ),
    wrong(
        "a wrong user",
        lambda at: f"redis://nobody:password@{at['server']}",
        ConfigError,
        "the user name or password of 'nobody' is wrong",
    ),
    wrong("a user without rights", lambda at: f"redis://reader:password@{at['server']}", ConfigError, "ACL"),
    wrong(
        "a database that there is not",
        lambda at: f"redis://{at['server']}/99",
        ConfigError,
        "/99",
        "no database of this number. Correct it in the URL",
    ),
    wrong(
        "TLS with a server without TLS",
        lambda at: f"rediss://{at['server']}",
        Unavailable,
        TRIED,
        "does that port speak TLS",
    ),
    wrong(
        "TLS with a web server",
        lambda at: f"rediss://{at['web']}",
        ConfigError,
        "no TLS connection",
        "Does that port speak TLS",
    ),
    wrong(
        "a web server as redis://",
        lambda at: f"redis://{at['web']}",
        Unavailable,
        TRIED,
        "Something else than Redis or Valkey",
        "host and port",
    ),
    wrong(
        "a silent server", lambda at: f"redis://{at['silent']}", Unavailable, TRIED, "Is the server up and reachable"
    ),
    wrong(
        "a port where nobody listens",
        lambda _: "redis://127.0.0.1:1",
        Unavailable,
        TRIED,
        "Is the server up and reachable",
        'Interlock("embedded://") or `interlock server start`',
    ),
    wrong(
        "a host that nobody knows", lambda _: "redis://no-such-host.invalid", Unavailable, TRIED, "no-such-host.invalid"
    ),
    wrong("a socket that there is not", lambda _: "unix:///no/such.sock", Unavailable, TRIED, "No such file"),
    wrong("a socket that is a file", lambda _: f"unix://{__file__}", Unavailable, TRIED, "Is the server up"),
    wrong(
        "a certificate that there is not",
        lambda at: f"rediss://{at['server']}?ssl_ca_certs=/no.pem",
        ConfigError,
        "a file of ssl_ca_certs",
    ),
    wrong(
        "a server in a quorum that is a replica",
        lambda at: [f"redis://{at['replica']}"],
        ConfigError,
        "is a replica",
        "a quorum needs single servers",
    ),
]


@pytest.mark.xdist_group("servers of the trial")
@pytest.mark.parametrize("use", SERVERS, ids=lambda use: use.name)
async def test_a_wrong_server_is_named(mode, places, use, record_property):
    waits = TRIED in use.says  # for as long as one try takes; the other errors come at once
    try_for = 5.0 if not waits else 0.5 if "web" in use.name else 0.15
    locks = mode.interlock(use.use(places), try_for=try_for)
    error = await outcome(locks.lock("a").acquire(0))
    assert "password@" not in str(error)
    assert error.name == "a"
    record_property("message", use.check(error))
    if isinstance(error, Unavailable) and TRIED in str(error):
        assert 0 < error.waited < 5
    await locks.close()


# Another process

IN_A_CHILD = """
import json, os, sys
import interlock

locks = interlock.Interlock(sys.argv[1])
lease = locks.lock("a").acquire()
said = {}

def enter():
    with lease:
        pass

uses = {
    "ensure": lease.ensure, "extend": lambda: lease.extend(3), "enter": enter,
    "execute": lambda: lease.execute("GET", "x", keys=["x"]),
}
if os.fork() == 0:
    for name, use in uses.items():
        try:
            use()
        except BaseException as error:
            said[name] = [type(error).__name__, str(error)]
    said["release"] = lease.release()
    said["state"] = lease.state
    print(json.dumps(said), flush=True)
    os._exit(0)
os.wait()
lease.ensure()
print(lease.release())
"""


async def test_a_lease_of_the_parent_is_none_of_a_child(server, clean, record_property):
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IN_A_CHILD, server.url, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await program.communicate()
    child, parent = output.decode().splitlines()
    said = json.loads(child)
    assert parent == "True", "the child took it from its parent"
    assert said.pop("release") is False
    assert said.pop("state") == "lost"
    for name, (kind, text) in said.items():
        assert kind == "LeaseLost", name
        assert "lock 'a'" in text
        assert "fork" in text
        assert "Stop writing, and acquire it in the child" in text
        record_property("message", f"{name}() in a child: {kind}: {text}")
