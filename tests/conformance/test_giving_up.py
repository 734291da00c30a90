"""A caller that stops waiting stands in no queue any more: nobody counts it, and the next release hands over to nobody.

Each test looks once, as soon as the client has undone what the caller left: a waiter that stays is dead for the server
after 3 s, and then nobody sees it either.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import NamedTuple

import pytest

from harness.modes import Mode, outcome, real, until, wait_until, waiting
from interlock import AcquireTimeout

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


class Kind(NamedTuple):
    """What one client holds, and another one waits for. The state of the `seen` says how many wait."""

    held: object
    wanted: object
    seen: object


def alike(make):
    return Kind(make, make, make)


KINDS = {
    "lock": alike(lambda locks: locks.lock("a")),
    "fair lock": alike(lambda locks: locks.lock("a", fair=True)),
    "rlock": alike(lambda locks: locks.rlock("a")),
    "election": alike(lambda locks: locks.election("a")),
    "several locks": Kind(
        lambda locks: locks.lock("a"),
        lambda locks: locks.multi(locks.lock("a"), locks.lock("b")),
        lambda locks: locks.lock("a"),
    ),
    "semaphore": alike(lambda locks: locks.semaphore("a", 1)),
    "reader": Kind(lambda locks: locks.rwlock("a").write(), *[lambda locks: locks.rwlock("a").read()] * 2),
    "a writer behind readers": Kind(
        lambda locks: locks.rwlock("a").read(), *[lambda locks: locks.rwlock("a").write()] * 2
    ),
}


class Scene:
    """One client holds, and another one waits."""

    def __init__(self, mode: Mode, kind: str) -> None:
        self.kind = KINDS[kind]
        self.holder, self.waiter = mode.interlock(), mode.interlock()
        self.wanted, self.seen = self.kind.wanted(self.waiter), self.kind.seen(self.holder)

    async def __aenter__(self):
        self.lease = await self.kind.held(self.holder).acquire()
        return self

    async def has_waiter(self) -> None:
        await until(lambda: waiting(self.seen, 1))

    async def __aexit__(self, *error) -> None:
        """The waiter has left. Nobody waits, and the release of the holder frees the lock at once."""
        undo = self.waiter._session.core.undo
        await until(lambda: not undo.jobs)
        assert (await self.seen.inspect()).waiting == 0
        assert await self.lease.release()
        lease = await self.kind.held(self.holder).try_acquire()
        assert lease is not None
        await lease.release()


@rule(8)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_waiter_whose_time_is_over_leaves_the_queue(mode, kind):
    async with Scene(mode, kind) as scene:
        call = asyncio.ensure_future(outcome(scene.wanted.acquire(timeout=2)))
        await scene.has_waiter()
        assert isinstance(await call, AcquireTimeout)


@rule(8)
@pytest.mark.asyncio_only
@pytest.mark.parametrize("kind", KINDS)
async def test_a_waiter_that_is_cancelled_leaves_the_queue(mode, kind):
    async with Scene(mode, kind) as scene:
        call = asyncio.ensure_future(scene.wanted.acquire())
        await scene.has_waiter()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


@rule(8)
@pytest.mark.parametrize("kind", KINDS)
def test_a_waiter_that_ctrl_c_interrupts_leaves_the_queue(cell, server, clean, kind):
    mode = Mode(cell, server)
    scene = Scene(mode, kind)

    def interrupt():
        wait_until(lambda: real(scene.seen).inspect().waiting == 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    try:
        asyncio.run(scene.__aenter__())
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            real(scene.wanted).acquire(timeout=60)
        thread.join()
        asyncio.run(scene.__aexit__())
    finally:
        asyncio.run(mode.close())


@rule(8)
async def test_a_candidate_that_is_to_stop_leaves_the_queue(mode):
    async with Scene(mode, "election") as scene:
        stop = threading.Event() if mode.name == "threads" else asyncio.Event()
        call = asyncio.ensure_future(scene.wanted.run(lambda _leadership: None, stop=stop))
        await scene.has_waiter()
        stop.set()
        assert await call is None
