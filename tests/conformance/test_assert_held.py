"""`assert_held`: a function says that it must run under a lock, and gets the lease of its caller."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from harness.modes import real
from interlock import ConfigError, LeaseLost, NotHeld

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


async def inside(mode, thing, body):
    """Call the plain function `body` inside of a `with` of this thing, in one thread or task; returns its result."""
    thing = real(thing)
    if mode.name == "asyncio":
        async with thing:
            return body()

    def enter():
        with thing:
            return body()

    return await mode.in_thread(enter)


def function(mode, body):
    async def coroutine(*_):
        return body()

    return coroutine if mode.name == "asyncio" else lambda *_: body()


async def call(mode, made):
    return await (mode.in_thread(made) if mode.name == "threads" else made())


HELD = {
    "lock": lambda locks: locks.lock("a"),
    "rlock": lambda locks: locks.rlock("a"),
    "semaphore": lambda locks: locks.semaphore("a", 2),
    "reader": lambda locks: locks.rwlock("a").read(),
    "writer": lambda locks: locks.rwlock("a").write(),
    "election": lambda locks: locks.election("a"),
    "multi": lambda locks: locks.multi(locks.lock("b"), locks.lock("a")),
}


@pytest.mark.parametrize("kind", HELD)
async def test_inside_of_a_with_it_gives_the_lease(mode, kind):
    locks = real(mode.interlock())
    lease = await inside(mode, HELD[kind](locks), lambda: locks.assert_held("a"))
    assert lease.name == "a"
    assert lease.fence > 0
    with pytest.raises(NotHeld):
        await inside(mode, HELD[kind](locks), lambda: locks.assert_held("c"))


async def test_a_decorated_call_and_a_with_of_a_lease_count_and_so_does_the_work_of_once_and_of_a_leader(mode):
    locks = real(mode.interlock())

    def held(name):
        return function(mode, lambda: locks.assert_held(name).name)

    assert await call(mode, locks.lock("a")(held("a"))) == "a"
    assert await call(mode, locks.synchronized("a")(held("a"))) == "a"
    assert (await call(mode, locks.once("b", at_most=60)(held("b")))).value == "b"
    assert await call(mode, lambda: locks.election("c").run(held("c"))) == "c"
    lease = real(await mode.interlock().lock("d").acquire())
    others = real(mode.made[-1])
    assert real(await inside(mode, lease, lambda: others.assert_held("d"))) is lease


async def test_who_is_in_no_with_of_it_is_refused(mode, clean):
    locks = real(mode.interlock())
    word, article = ("task", "an `async with`") if mode.name == "asyncio" else ("thread", "a `with`")
    with pytest.raises(NotHeld) as refused:
        await call(mode, function(mode, lambda: locks.assert_held("nightly")))
    said = str(refused.value)
    assert refused.value.name == "nightly"
    assert f"this {word} is not inside {article} of 'nightly'" in said
    assert "with locks.lock('nightly'):`" in said
    assert isinstance(refused.value, RuntimeError)
    assert not clean.keys(), "it has asked the server"
    await inside(mode, locks.lock("a"), lambda: None)
    with pytest.raises(NotHeld):  # after the with
        await call(mode, function(mode, lambda: locks.assert_held("a")))
    kept = await mode.keep(
        locks.lock("a").acquire() if mode.name == "asyncio" else mode.in_thread(locks.lock("a").acquire)
    )
    with pytest.raises(NotHeld):  # it is held, and this is no section of it
        locks.assert_held("a")
    with pytest.raises(NotHeld):  # by another Interlock
        await inside(mode, kept, lambda: real(mode.interlock()).assert_held("a"))
    with pytest.raises(ConfigError):
        locks.assert_held(7)


async def test_a_lost_lease_is_named(mode):
    locks = real(mode.interlock())
    lock = locks.lock("a", ttl=0.2, renew=False)

    def lost():
        while not ended():
            pass
        locks.assert_held("a")

    def ended():
        try:
            locks.assert_held("a")
        except LeaseLost:
            return True
        return False

    with pytest.raises(LeaseLost, match="its ttl passed"):
        await inside(mode, lock, lost)


async def test_a_nested_section_of_an_rlock_leaves_the_outer_one(mode):
    locks = real(mode.interlock())
    lock = locks.rlock("a")
    seen = []
    if mode.name == "asyncio":
        async with lock:
            async with lock:
                seen.append(locks.assert_held("a"))
            seen.append(locks.assert_held("a"))
    else:

        def nested():
            with lock:
                with lock:
                    seen.append(locks.assert_held("a"))
                seen.append(locks.assert_held("a"))

        await mode.in_thread(nested)
    assert len({*seen}) == 1


async def test_another_thread_or_task_is_not_inside(mode):
    locks, seen = real(mode.interlock()), []

    def look():
        try:
            seen.append(locks.assert_held("a"))
        except NotHeld as error:
            seen.append(error)

    if mode.name == "asyncio":
        async with locks.lock("a"):

            async def child():
                look()

            await asyncio.create_task(child())
    else:

        def outer():
            with locks.lock("a"):
                thread = threading.Thread(target=look)
                thread.start()
                thread.join()

        await mode.in_thread(outer)
    assert [type(each) for each in seen] == [NotHeld]


async def test_an_exit_stack_counts(mode):
    locks = real(mode.interlock())
    if mode.name == "asyncio":
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(locks.lock("a"))
            assert locks.assert_held("a").name == "a"
    else:

        def stacked():
            with contextlib.ExitStack() as stack:
                stack.enter_context(locks.lock("a"))
                return locks.assert_held("a").name

        assert await mode.in_thread(stacked) == "a"
    with pytest.raises(NotHeld):
        locks.assert_held("a")
