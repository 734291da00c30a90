"""Which error a section raises: that of the body, of the release, or the loss of its lease."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import interlock
import interlock.aio
from harness.modes import until
from interlock import LeaseLost, LeaseState

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


async def test_no_body_runs_under_a_lease_that_has_ended(mode, clean):
    lease = await mode.interlock().lock("a").acquire()
    await lease.release()
    with pytest.raises(LeaseLost):
        async with lease:
            raise AssertionError
    lease = await mode.interlock().lock("a", ttl=0.2, renew=False).acquire()
    await until(lambda: lease.state is LeaseState.LOST)
    with pytest.raises(LeaseLost):
        async with lease:
            raise AssertionError


async def test_an_error_of_the_release_does_not_replace_that_of_the_body(mode, clean):
    with pytest.raises(KeyError):
        async with await mode.interlock().lock("a").acquire():
            clean.delete("lock:a")
            clean.lpush("lock:a", 1)
            clean.expire("lock:a", 60)
            raise KeyError
    clean.delete("lock:a")


async def test_the_loss_of_an_outer_section_is_not_swallowed_by_an_inner_one(mode, clean):
    lock = mode.interlock().lock("a", ttl=0.3, renew=False)
    if mode.name == "threads":

        def nested():
            with lock._real as outer:
                assert outer.lost.wait(5)
                with lock._real:
                    pass

        with pytest.raises(LeaseLost):
            await mode.in_thread(nested)
        return
    with pytest.raises(LeaseLost):
        async with lock as outer:
            with contextlib.suppress(asyncio.CancelledError):
                await outer.lost.wait()
                await asyncio.sleep(5)
            async with lock:
                pass
    assert asyncio.current_task().cancelling() == 0


async def test_a_loss_that_the_body_finds_itself_leaves_no_cancellation_behind(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        with pytest.raises(LeaseLost):
            async with locks.lock("a") as lease:
                clean.delete("lock:a")
                await lease.execute("GET", "x", keys=["x"])
        await asyncio.sleep(0.01)
        assert asyncio.current_task().cancelling() == 0
