"""Every synchronizer, once, on each server and by each way to it, also with the least rights."""

from __future__ import annotations

import asyncio

import pytest

from interlock import Ran, Skipped

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("each server and way", full="every combination")


@rule(1, 7, 9)
async def test_every_synchronizer_works_once(mode, clean):
    locks = mode.interlock()
    fences = []
    for lockable in (
        locks.lock("a"), locks.rlock("b"), locks.semaphore("c", 2), locks.rwlock("d").read(), locks.rwlock("d").write(),
        locks.election("e"), locks.multi(locks.lock("f"), locks.semaphore("g", 2)),
    ):  # fmt: skip
        for _ in range(2):
            lease = await lockable.acquire(timeout=20)
            fences.append(lease.fence)
            assert await lockable.inspect()
            assert await lease.release()
    latch = locks.latch("h", 2)
    waits = asyncio.ensure_future(latch.wait(timeout=20))
    assert [await latch.count_down(), await latch.count_down()] == [1, 0]
    await waits
    barrier = locks.barrier("i", 2)
    assert sorted(await asyncio.gather(barrier.wait(timeout=20), barrier.wait(timeout=20))) == [0, 1]
    await barrier.reset()
    await (await locks.election("e").campaign()).resign()
    assert await locks.election("e").leader() is None

    async def work(_lease):
        return 42

    results = [
        await locks.once("j", at_most=60, key="x").run((lambda _: 42) if mode.name == "threads" else work)
        for _ in range(2)
    ]
    assert list(map(type, results)) == [Ran, Skipped]
    for key in clean.keys("*"):
        assert clean.pttl(key) != -1 or key.startswith(b"users:"), key


@rule(3, 6)
async def test_every_synchronizer_can_be_revoked(mode):
    locks = mode.interlock()
    for lockable in (locks.lock("a"), locks.semaphore("c", 2), locks.rwlock("d").read(), locks.election("e")):
        lease = await lockable.acquire(timeout=20)
        assert await lockable.revoke("for the test", force=True)
        assert not await lease.release()
    waiting = locks.latch("h", 1)
    assert await waiting.count_down() == 0
    assert not await waiting.revoke("it is open")
