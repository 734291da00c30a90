"""Ctrl-C at every step of a caller whose process has other callers of the same lock: none of them waits for ever.

The caller that is interrupted is the driver of the cohort, waits in it, or passes its lease on. Not here: a caller that
is alone (test_interrupts.py), the orders in which callers come and go (test_cohort.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from functools import partial

import pytest

import interlock
import interlock.aio
from faults.test_interrupts import Interruption, Stop, is_current, quiet  # noqa: F401 (a fixture)
from harness.modes import until
from interlock._client import cohorts

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")

OTHERS = 2  # callers beside the one that is interrupted


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A caller whose wake-up an interrupt has cost looks soon again."""
    monkeypatch.setattr(cohorts, "LOOK_INTERVAL", 0.1)


class Inside:
    """Counts who is inside of a lock, and fails if two are."""

    def __init__(self):
        self.now, self.ever, self.fences = 0, 0, [0]

    def __call__(self, lease):
        fence = lease.fence  # code of interlock, which may be interrupted
        self.now += 1
        assert self.now == 1, "two callers inside"
        assert fence > self.fences[-1]
        self.fences.append(fence)
        self.ever += 1
        self.now -= 1


def callers(locks, name, inside):
    """Other threads that each want the lock once."""

    def run():
        with locks.lock(name) as lease:
            inside(lease)

    threads = [threading.Thread(target=run) for _ in range(OTHERS)]
    for thread in threads:
        thread.start()
    return threads


def waiting(locks, name):
    cohort = locks._session.core.cohorts.by_key.get(f"lock:{name}")
    return len(cohort.waiting) if cohort is not None else 0


def end(threads):
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "it waits for ever"


@rule(2, 8, 11)
async def test_an_interrupt_at_any_step_of_passing_on_neither_loses_the_lease_nor_gives_it_to_two(server, clean):
    with interlock.Interlock(server.url) as locks:
        at, done = 0, False
        while not done:
            at += 1
            inside, name, interruption = Inside(), f"a{at}", Interruption(at)
            with contextlib.suppress(Stop), locks.lock(name) as lease:
                inside(lease)
                threads = callers(locks, name, inside)
                await until(lambda n=name: waiting(locks, n) == OTHERS)
                interruption.__enter__()
            interruption.__exit__(None)
            done = interruption.done
            end(threads)
            assert inside.ever == OTHERS + 1
        assert at > 15
        await until(lambda: not locks._session.core.cohorts.by_key)


@rule(2, 8, 11)
async def test_an_interrupt_at_any_step_of_a_caller_that_waits_keeps_nobody_waiting(server, clean):
    with interlock.Interlock(server.url) as locks:
        at, done = 0, False
        while not done:
            at += 1
            inside, name, go = Inside(), f"b{at}", threading.Event()
            lease = locks.lock(name).acquire()

            def leave(lease=lease, go=go):
                go.wait()
                lease.release()

            threads = [threading.Thread(target=leave), *callers(locks, name, inside)]
            threads[0].start()
            await until(lambda n=name: waiting(locks, n) == OTHERS)
            with Interruption(at) as interruption:
                go.set()
                with locks.lock(name) as mine:
                    inside(mine)
            done = interruption.done
            end(threads)
            assert inside.ever >= OTHERS
        assert at > 30
        await until(lambda: not locks._session.core.cohorts.by_key)


@rule(2, 8, 11)
async def test_an_interrupt_at_any_step_of_the_driver_lets_the_next_caller_drive(server, clean):
    with interlock.Interlock(server.url) as locks, interlock.Interlock(server.url) as elsewhere:
        at, done = 0, False
        while not done:
            at += 1
            inside, name, threads = Inside(), f"c{at}", []
            lease = elsewhere.lock(name).acquire()

            def follow(name=name, inside=inside, threads=threads, lease=lease):
                while not locks._session.waiters.registered and not inside.ever:
                    threading.Event().wait(0.001)
                threads += callers(locks, name, inside)
                lease.release()

            following = threading.Thread(target=follow)
            with Interruption(at) as interruption:
                following.start()
                with locks.lock(name) as mine:
                    inside(mine)
            done = interruption.done
            inside.ever += 1  # if the interrupt came before the first request
            end([following])
            end(threads)
            assert inside.ever >= OTHERS + 1
        assert at > 30
        await until(lambda: not locks._session.core.cohorts.by_key)


@rule(2, 8, 11)
async def test_an_interrupt_of_a_task_that_passes_on_keeps_no_other_task_waiting(server, clean):
    async def one(locks, name, inside, go=None):
        async with locks.lock(name) as lease:
            inside(lease)
            if go is not None:
                await go.wait()

    async with interlock.aio.Interlock(server.url) as locks:
        at, done = 0, False
        while not done:
            at += 1
            inside, name = Inside(), f"d{at}"
            go = asyncio.Event()
            passing = asyncio.create_task(one(locks, name, inside, go))
            await until(lambda i=inside: i.ever == 1)
            others = [asyncio.create_task(one(locks, name, inside)) for _ in range(OTHERS)]
            await until(lambda n=name: waiting(locks, n) == OTHERS)
            go.set()
            with Interruption(at, mine=partial(is_current, passing)) as interruption:
                await asyncio.wait([passing])
            done = interruption.done
            assert isinstance(passing.exception(), Stop | None)
            passing = interruption = None  # its error keeps its frames, and so its section, alive
            gc.collect()  # the hook stands among the frames from Python 3.12 on, and they refer to each other
            await asyncio.wait_for(asyncio.gather(*others), 20)
        assert at > 8
        await until(lambda: not locks._session.core.cohorts.by_key)
