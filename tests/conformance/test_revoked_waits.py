"""A revocation ends what its holder waits for inside of the `with`: so it ends a deadlock of two processes at once.

Not here: how fast a holder learns of a revocation (test_revocation.py), deadlocks that are found (test_deadlocks.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import interlock
from harness.modes import outcome, until, wait_until
from interlock import AcquireTimeout, LeaseLost
from interlock._session.open_sessions import waiting

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", modes="threads")

WAITS = {
    "lock": lambda locks: locks.lock("b").acquire(),
    "with": lambda locks: locks.lock("b").__enter__(),
    "fair lock": lambda locks: locks.lock("b", fair=True).acquire(),
    "with a timeout": lambda locks: locks.lock("b").acquire(timeout=60),
    "rlock": lambda locks: locks.rlock("b").acquire(),
    "semaphore": lambda locks: locks.semaphore("s", 1).acquire(),
    "reader": lambda locks: locks.rwlock("rw").read().acquire(),
    "writer": lambda locks: locks.rwlock("rw").write().acquire(),
    "multi": lambda locks: locks.multi(locks.lock("b"), locks.lock("c")).acquire(),
    "election": lambda locks: locks.election("e").campaign(),
    "election's run": lambda locks: locks.election("e").run(lambda _: None),
    "latch": lambda locks: locks.latch("l", 1).wait(),
    "barrier": lambda locks: locks.barrier("t", 2).wait(60),
}


def work_inside(make):
    """Run the work inside of a `with` of what this makes."""

    def inside(locks, work):
        with make(locks):
            work()

    return inside


def by_a_decorator(locks, work):
    locks.lock("a")(work)()


def by_a_lease(locks, work):
    with locks.lock("a").acquire():
        work()


def by_an_exit_stack(locks, work):
    with contextlib.ExitStack() as stack:
        stack.enter_context(locks.lock("a"))
        work()


def by_a_generator(locks, work):
    @contextlib.contextmanager
    def held():
        with locks.lock("a"):
            yield

    with held():
        work()


def by_an_election(locks, work):
    stop, lost = threading.Event(), []

    def lead(_):
        try:
            work()
        except LeaseLost as error:
            lost.append(error)
            stop.set()  # else it would campaign again
            raise

    locks.election("a").run(lead, stop=stop)
    raise lost[0]


def outermost(locks, work):
    with locks.lock("a"), locks.lock("inner"), locks.rlock("more"):
        work()


def entered_twice(locks, work):
    lock = locks.rlock("a")
    with lock:
        with lock:
            pass
        work()


SECTIONS = {
    "with": work_inside(lambda locks: locks.lock("a")),
    "with of a multi": work_inside(lambda locks: locks.multi(locks.lock("a"), locks.lock("z"))),
    "election": by_an_election,
    "once": lambda locks, work: locks.once("a", at_most=30).run(lambda _: work()),
    "synchronized": lambda locks, work: locks.synchronized("a")(work)(),
    "decorator": by_a_decorator,
    "with of a lease": by_a_lease,
    "exit stack": by_an_exit_stack,
    "generator": by_a_generator,
    "outermost of three": outermost,
    "rlock, entered twice": entered_twice,
}


@contextlib.contextmanager
def processes(server, number=3):
    """So many Interlocks, as of so many processes, and threads."""
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(8))  # ends last: the end of an Interlock ends all waits
        made = [stack.enter_context(interlock.Interlock(server.url)) for _ in range(number)]
        yield *made, threads


def waits(number=1):
    """Whether so many callers wait."""
    return sum(waiting().values()) >= number


def take_all(locks):
    """Hold what each of WAITS waits for. The latch and the barrier need nobody."""
    return [
        each.acquire()
        for each in (locks.lock("b"), locks.semaphore("s", 1), locks.rwlock("rw").write(), locks.election("e"))
    ]


def revoke(locks, name="a"):
    """Revoke what is held under this name, whatever it is."""
    assert locks.lock(name).revoke("for the test")


@rule(6)
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_revocation_ends_each_kind_of_wait_inside_of_the_with(server, clean, wait):
    with processes(server) as (locks, others, person, threads):
        held = take_all(others)

        def work():
            with locks.lock("a") as lease:
                tokens.append(lease.token)
                wait(locks)

        tokens: list[str] = []
        working = threads.submit(work)
        wait_until(waits)
        revoke(person)
        with pytest.raises(LeaseLost, match="has stopped waiting for it.* 'a'.*it was revoked: for the test") as caught:
            working.result(20)
        assert caught.value.token == tokens[0]
        for lease in held:
            assert lease.release()
        for name in "be":
            wait_until(lambda: not clean.exists(f"lock:{name}"))


@rule(6)
@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_a_revocation_ends_a_wait_inside_of_each_kind_of_section(server, clean, section):
    with processes(server) as (locks, others, person, threads):
        held = others.lock("b").acquire()
        working = threads.submit(section, locks, lambda: locks.lock("b").acquire())
        wait_until(waits)
        for lockable in (person.lock("a"), person.election("a"), person.once("a", at_most=30)):
            with contextlib.suppress(interlock.ConfigError):  # it is of another kind
                lockable.revoke("for the test")
        with pytest.raises(LeaseLost, match="lock 'b': this thread has stopped waiting for it"):
            working.result(20)
        assert held.release()


@rule(6)
def test_a_revocation_ends_a_deadlock_of_two_processes(server, clean):
    with processes(server) as (one, two, person, threads):
        both = threading.Barrier(2)

        def work(locks, first, second):
            with locks.lock(first):
                both.wait(20)
                with locks.lock(second, timeout=60):
                    return "done"

        ones, twos = threads.submit(work, one, "a", "b"), threads.submit(work, two, "b", "a")
        wait_until(lambda: waits(2))
        revoke(person)
        assert isinstance(ones.exception(20), LeaseLost)
        assert twos.result(20) == "done"


@rule(6)
def test_a_revocation_ends_a_wait_behind_callers_of_the_same_process(server, clean):
    with processes(server) as (locks, _, person, threads):
        held, behind = locks.lock("b").acquire(), threading.Barrier(2)

        def work():
            with locks.lock("a"):
                behind.wait(20)
                locks.lock("b").acquire()

        working = threads.submit(work)
        behind.wait(20)
        wait_until(locks._session.core.cohorts.waiting)
        wait_until(waits)
        revoke(person)
        with pytest.raises(LeaseLost, match="lock 'b': this thread has stopped waiting for it"):
            working.result(20)
        assert held.release()
        assert locks.lock("b").acquire(timeout=20).release()


@rule(6)
def test_what_a_thread_acquires_after_the_revocation_waits_as_ever(server, clean):
    with processes(server) as (locks, others, person, _):
        held = others.lock("b").acquire()
        with pytest.raises(LeaseLost, match="the lease on lock 'a'"), locks.lock("a") as lease:
            revoke(person)
            assert lease.lost.wait(20)
            with pytest.raises(AcquireTimeout):
                locks.lock("b").acquire(timeout=0.3)
            assert held.release()
            assert locks.lock("b").acquire(timeout=20).release()


@rule(6)
def test_a_lease_that_expires_ends_no_wait(server, clean):
    with processes(server) as (locks, others, _, threads):
        held, told = others.lock("b").acquire(), threading.Event()

        def work():
            with locks.lock("a", ttl=0.5, renew=False, on_lost=lambda _: told.set()):
                locks.lock("b").acquire().release()
                told.set()

        working = threads.submit(work)
        assert told.wait(20)
        wait_until(waits)
        assert held.release()
        with pytest.raises(LeaseLost, match="the lease on lock 'a' .* is lost: its ttl passed"):
            working.result(20)


@rule(6)
@pytest.mark.parametrize("where", ["without a with", "left", "in another thread", "in the with of another thread"])
def test_a_revocation_ends_no_wait_outside_of_the_with(server, clean, where):
    with processes(server) as (locks, others, person, threads):
        held, lost = others.lock("b").acquire(), threading.Event()
        go_on, lock = threading.Event(), locks.rlock("a", on_lost=lambda _: lost.set())
        kept = []

        def work():
            if where == "without a with":
                kept.append(lock.acquire())
            elif where == "left":
                kept.append(lock.acquire())
                with lock:
                    pass
            elif where == "in another thread":
                threads.submit(hold).result()
            else:
                kept.append(lock.acquire())
                threads.submit(lambda: threads.submit(enter, kept[0]) and None).result()
            locks.lock("b").acquire().release()
            return "done"

        def hold():
            entered = threading.Event()
            kept.append(threads.submit(enter_lock, entered))
            assert entered.wait(20)

        def enter_lock(entered):
            with contextlib.suppress(LeaseLost), lock:
                entered.set()
                go_on.wait(20)

        def enter(lease):
            with contextlib.suppress(LeaseLost), lease:
                go_on.wait(20)

        working = threads.submit(work)
        wait_until(waits)
        revoke(person)
        assert lost.wait(20)
        assert held.release()
        assert working.result(20) == "done"
        go_on.set()
        with contextlib.suppress(AttributeError):
            kept[0].release()


@pytest.mark.runs_on("valkey-9.1", modes="threads, asyncio")
@rule(6)
@pytest.mark.parametrize("name", ["lock", "fair lock", "semaphore", "writer", "multi", "election", "latch"])
async def test_in_asyncio_a_revocation_cancels_the_wait(cell, server, clean, name):
    with interlock.Interlock(server.url) as others:
        held = take_all(others)
        async with interlock.aio.Interlock(server.url) as locks:

            async def work():
                async with locks.lock("a"):
                    await WAITS[name](locks)

            working = asyncio.ensure_future(work())
            await until(waits)
            assert await asyncio.to_thread(others.lock("a").revoke, "for the test")
            error = await asyncio.wait_for(outcome(working), 20)
            assert isinstance(error, LeaseLost)
            assert "the lease on lock 'a'" in str(error)
            assert "it was revoked: for the test" in str(error)
        for lease in held:
            assert lease.release()
