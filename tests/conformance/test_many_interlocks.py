"""A program that makes an Interlock for each call, and closes none: a warning, once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from harness.modes import until
from interlock._api import live, misuse_warnings

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch):
    monkeypatch.setattr(misuse_warnings, "_warned_lines", set())


def said(caplog) -> list[str]:
    return [text for record in caplog.records if "Interlocks of this process" in (text := record.getMessage())]


async def use(mode):
    locks = mode.interlock()
    await (await locks.lock("a").acquire()).release()
    await until(lambda: any(worker.started for worker in mode.session(locks).workers))
    return locks


async def test_the_twelfth_interlock_in_use_is_warned_about_with_its_line_and_no_later_one(mode, caplog):
    for _ in range(live.MANY - 1):
        await use(mode)
    assert not said(caplog)
    await use(mode)
    (text,) = said(caplog)
    assert text.startswith("12 Interlocks of this process use ")
    assert mode.session(mode.made[0]).server.display_url in text
    assert "modes.py:" in text, "the line that makes it"
    assert "Make one for the program" in text
    await use(mode)
    assert len(said(caplog)) == 1


async def test_those_that_are_closed_or_unused_do_not_count(mode, caplog):
    for _ in range(live.MANY + 2):
        await (await use(mode)).close()
        mode.interlock()
    assert not said(caplog)


@pytest.mark.asyncio_only
async def test_one_interlock_in_many_loops_counts_once(mode, caplog):
    locks = mode.interlock()

    def run(entered, go):
        async def both():
            lease = await locks.lock("a").acquire()
            await lease.release()
            entered.set()
            await asyncio.to_thread(go.wait, 30)
            await locks.close()

        asyncio.run(both())

    go, threads = threading.Event(), []
    for _ in range(live.MANY):
        entered = threading.Event()
        threads.append(threading.Thread(target=run, args=(entered, go)))
        threads[-1].start()
        assert await asyncio.to_thread(entered.wait, 30)
    mode.interlock()
    go.set()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert not said(caplog)
