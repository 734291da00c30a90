"""What a program hands on to the outside: answers as JSON, and errors without host, process or token."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from datetime import datetime

import pytest

from harness.modes import outcome, until
from interlock import (
    AcquireTimeout,
    BrokenBarrier,
    ConfigError,
    Deadlock,
    LeaseLost,
    LockError,
    Ran,
    Skipped,
    Unavailable,
)

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


def job(mode):
    async def work(_):
        return {"rows": 3}

    return work if mode.name == "asyncio" else lambda _: {"rows": 3}


class LikeCelery(json.JSONEncoder):
    """As kombu's, with which Celery serializes what a task returns."""

    def default(self, o):
        return o.__json__()


async def test_what_once_returns_is_json(mode):
    once = mode.interlock().once("a", key="1", at_most=60)
    ran, skipped = await once.run(job(mode)), await once.run(job(mode))
    assert isinstance(ran, Ran)
    assert isinstance(skipped, Skipped)
    assert json.loads(json.dumps(ran.as_dict())) == {
        "name": ran.name, "value": {"rows": 3}, "by": ran.by, "started": ran.started.isoformat(),
    }  # fmt: skip
    read = json.loads(json.dumps(skipped.as_dict()))
    assert datetime.fromisoformat(read["ended"]) == skipped.ended
    assert json.loads(json.dumps([ran, skipped], cls=LikeCelery)) == [ran.as_dict(), read]


async def test_each_state_is_json(mode):
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    await mode.keep(locks.semaphore("b", 2).acquire())
    await mode.keep(locks.election("c").campaign())
    await locks.once("d", at_most=60, key="1").run(job(mode))
    await locks.latch("e", 2).count_down()
    waiting = asyncio.ensure_future(outcome(mode.interlock().lock("a").acquire(timeout=30)))
    await until(lambda: is_waited_for(locks))
    await until(locks.ls)
    made = [await each.inspect() for each in (locks.lock("a"), locks.semaphore("b", 2), locks.election("c"))]
    made.append(await locks.once("d", at_most=60, key="1").inspect())
    made += [await each.inspect() for each in (locks.latch("e", 2), locks.barrier("f", 2))]
    made += [await locks.election("c").leader(), *await locks.ls()]
    read = [json.loads(json.dumps(each.as_dict())) for each in made]
    assert read[0]["waiters"] == [*made[0].waiters]
    assert read[0]["waiting"] == 1
    assert read[1]["holders"][0]["token"] == made[1].holders[0].token
    assert read[3]["last"]["ended"] == made[3].last.ended.isoformat()
    await locks.close()
    await (await waiting).release()


async def is_waited_for(locks) -> bool:
    return (await locks.lock("a").inspect()).waiting == 1


async def test_a_timeout_says_for_how_long_the_lease_of_the_holder_lasts_at_most(mode, clean):
    locks = mode.interlock()
    await mode.keep(mode.interlock().lock("a", ttl=20).acquire())
    for error in (
        await outcome(locks.lock("a").acquire(timeout=0)),
        await outcome(locks.lock("a").acquire(timeout=0.1)),
        await outcome(locks.multi(locks.lock("a"), locks.lock("b")).acquire(timeout=0)),
    ):
        assert isinstance(error, AcquireTimeout)
        assert 0 < error.remaining <= 20
    clean.set("lock:c", "somebody", px=5000)  # of another library
    error = await outcome(locks.lock("c").acquire(timeout=0))
    assert 0 < error.remaining <= 5
    error = await outcome(locks.latch("d", 1).wait(timeout=0))  # which nobody holds
    assert isinstance(error, AcquireTimeout)
    assert error.remaining is None


async def test_the_public_text_of_a_timeout_names_the_lock_and_nothing_else(mode):
    lease = await mode.keep(mode.interlock(label="web 7").lock("stock:42").acquire())
    error = await outcome(mode.interlock().lock("stock:42").acquire(timeout=1.2))
    assert error.public_text == "'stock:42' is busy. Try again later"
    private = (socket.gethostname(), str(os.getpid()), "web", lease.token, *lease.token.split("/"), __file__)
    assert any(each in str(error) for each in private)
    assert not any(each in error.public_text for each in private)


@pytest.mark.parametrize(
    "kind", [LockError, AcquireTimeout, LeaseLost, BrokenBarrier, Unavailable, Deadlock, ConfigError]
)
def test_each_error_has_a_public_text(kind):
    error = kind("redis://10.0.0.7:6379/0 and host/812/MainThread")
    assert error.public_text.startswith(("a lock ", "the work under a lock "))
    error.name = "{x}"
    assert "'{x}'" in error.public_text
    assert not any(each in error.public_text for each in ("10.0.0.7", "host", "812", "MainThread"))
