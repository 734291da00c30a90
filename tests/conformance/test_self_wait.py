"""A caller that waits for what it holds itself; a lease that is dropped; a call for threads inside an event loop.

Each case is written once, for asyncio. For threads the same source is compiled without `async` and `await`, so that
each mode runs its own `with`.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import gc
import inspect
import os
import re
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import interlock
import interlock.aio
from harness.clock import machine_time
from harness.modes import until
from interlock import AcquireTimeout, BrokenBarrier, Deadlock, LeaseLost, LockError
from interlock._api import misuse_warnings
from interlock._client import acquiring, self_wait, turns

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")


class Tools:
    """What a case needs beside its Interlock."""

    def __init__(self, made, caplog):
        self._made, self.caplog = made, caplog
        self.exit_stack = contextlib.ExitStack if made is interlock.Interlock else contextlib.AsyncExitStack
        self.caller = "thread" if made is interlock.Interlock else "task"

    def another(self, **options):
        """Another Interlock in this process, on the same server."""
        return self._made(self.url, **options)

    @property
    def warned(self) -> bool:
        return f"this very {self.caller} holds it" in self.caplog.text


class ToolsForThreads(Tools):
    def beside(self, call, *args):
        """Begin a call in another thread; the result waits for it."""
        return ThreadPoolExecutor(1).submit(call, *args).result

    def enter(self, stack, lockable):
        return stack.enter_context(lockable)

    def step(self, generator):
        return next(generator)

    def until(self, condition):
        asyncio.run(until(condition))

    def begin(self, lockable):
        lockable.__enter__()

    def end(self, lockable):
        lockable.__exit__(None, None, None)


class ToolsForAsyncio(Tools):
    def beside(self, call, *args):
        """Begin a call in another task; the result waits for it."""
        task = asyncio.ensure_future(call(*args))

        async def result():
            return await task

        return result

    async def enter(self, stack, lockable):
        return await stack.enter_async_context(lockable)

    async def step(self, generator):
        return await anext(generator)

    until = staticmethod(until)

    async def begin(self, lockable):
        await lockable.__aenter__()

    async def end(self, lockable):
        await lockable.__aexit__(None, None, None)


def for_threads(function):
    """The function without `async` and `await`, at the same lines."""
    lines, first = inspect.getsourcelines(function)
    text = textwrap.dedent("".join(lines))
    text = re.sub(r"^@case\n", "\n", text)
    text = re.sub(r"\bawait ", "", re.sub(r"\basync (?=def|with|for)", "", text))
    made: dict = {}
    exec(compile("\n" * (first - 1) + text, __file__, "exec"), globals(), made)
    return made[function.__name__]


def case(function):
    """A test of this function in both modes."""

    @pytest.mark.parametrize("mode_name", ["threads", "asyncio"])
    def test(mode_name, server, clean, caplog):
        if mode_name == "threads":
            tools = ToolsForThreads(interlock.Interlock, caplog)
            tools.url = server.url
            with interlock.Interlock(server.url) as locks:
                for_threads(function)(locks, tools)
            return

        async def main():
            tools = ToolsForAsyncio(interlock.aio.Interlock, caplog)
            tools.url = server.url
            async with interlock.aio.Interlock(server.url) as locks:
                await function(locks, tools)

        asyncio.run(main())

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


@pytest.fixture
def soon(monkeypatch):
    """Let a waiter look soon whether it waits for itself."""
    for module in (acquiring, turns):
        monkeypatch.setattr(module, "LOOK_AFTER", 0.1)


pytestmark = [pytestmark, pytest.mark.usefixtures("soon")]


def line() -> int:
    return inspect.currentframe().f_back.f_lineno


# Deadlock


@case
async def test_a_with_inside_a_with_of_the_same_name_raises_and_names_both_lines(locks, tools):
    async with locks.lock("a"):
        outer, started = line() - 1, machine_time()
        with pytest.raises(Deadlock) as caught:
            async with locks.lock("a"):
                pytest.fail("nobody gets it")
        inner = line() - 2
    assert machine_time() - started < 10  # and not for ever
    error = caught.value
    assert isinstance(error, LockError) and isinstance(error, RuntimeError)
    assert error.name == "a"
    text = f"lock 'a': this {tools.caller} is inside it already, since {__file__}:{outer}, and would wait for itself"
    assert str(error).startswith(text)
    assert f"at {__file__}:{inner}. " in str(error)
    lease = await locks.lock("a").try_acquire()  # and nothing stays queued
    assert await lease.release()
    assert not tools.warned


@case
async def test_the_same_object_raises_without_a_request_and_names_both_lines(locks, tools):
    lock = locks.lock("a")
    async with lock:
        outer = line() - 1
        with pytest.raises(Deadlock) as caught:
            async with lock:
                pytest.fail("nobody gets it")
        inner = line() - 2
        assert f"since {__file__}:{outer}, and" in str(caught.value)
        assert f"at {__file__}:{inner}. " in str(caught.value)
        assert (await lock.inspect()).waiting == 0


@case
async def test_an_acquire_inside_a_with_raises_also_with_a_timeout(locks, tools):
    async with locks.lock("a"):
        with pytest.raises(Deadlock, match="rlock"):
            await locks.lock("a").acquire()
        with pytest.raises(Deadlock):
            await locks.lock("a").acquire(timeout=60)

        async def deep(left):
            if left:
                await deep(left - 1)
            else:
                await locks.lock("a").acquire()

        with pytest.raises(Deadlock):
            await deep(3)


@case
async def test_decorated_calls_hold_what_their_bodies_wait_for(locks, tools):
    @locks.lock("a")
    async def decorated():
        await locks.lock("a").acquire()

    @locks.synchronized("b")
    async def synchronized():
        await locks.lock("b").acquire()

    @locks.synchronized("c")
    async def inside():
        pytest.fail("nobody gets it")

    @locks.multi(locks.lock("{d}1"), locks.lock("{d}2"))
    async def several():
        await locks.lock("{d}2").acquire()

    for call in (decorated, synchronized, several):
        with pytest.raises(Deadlock, match=f"since {__file__}:{line() + 1}, and"):
            await call()
    async with locks.lock("c"):
        with pytest.raises(Deadlock):
            await inside()
    for name in ("a", "b", "c", "{d}1", "{d}2"):
        assert not (await locks.lock(name).inspect()).held


@case
async def test_a_multi_and_its_parts(locks, tools):
    async with locks.lock("b"):
        with pytest.raises(Deadlock, match="lock 'b'"):
            await locks.multi(locks.lock("a"), locks.lock("b")).acquire()
    async with locks.multi(locks.lock("a"), locks.lock("b")):
        with pytest.raises(Deadlock, match="lock 'a'"):
            async with locks.lock("a"):
                pass
    assert await (await locks.multi(locks.lock("a"), locks.lock("b")).acquire(0)).release()


@case
async def test_a_semaphore_whose_permits_are_all_ours(locks, tools):
    limited = locks.semaphore("a", 3)
    async with limited, limited:
        with pytest.raises(Deadlock, match=r"permits=\.\.\."):
            await limited.acquire(permits=2)
        async with limited:
            with pytest.raises(Deadlock, match="semaphore 'a'"):
                async with limited:
                    pass
            with pytest.raises(Deadlock):
                await locks.semaphore("a", 3).acquire()
    assert await limited.available() == 3


@case
async def test_a_read_write_lock_of_another_interlock(locks, tools):
    async with tools.another() as other:
        async with other.rwlock("a").read():
            with pytest.raises(Deadlock, match="rwlock 'a'"):
                await locks.rwlock("a").write().acquire()
        async with other.rwlock("a").write():
            with pytest.raises(Deadlock):
                await locks.rwlock("a").read().acquire()


@case
async def test_another_interlock_of_this_process(locks, tools):
    async with tools.another() as other, tools.another(label="shop") as labelled:
        for each in (other, labelled):  # the holder's token begins otherwise: the waiter looks later
            async with each.lock("a"):
                with pytest.raises(Deadlock):
                    await locks.lock("a").acquire()


@case
async def test_an_rlock_and_a_lock(locks, tools):
    async with locks.rlock("a"), locks.rlock("a"):
        with pytest.raises(Deadlock):
            await locks.lock("a").acquire()
    async with locks.lock("a"):
        with pytest.raises(Deadlock):
            await locks.rlock("a").acquire()
        with pytest.raises(Deadlock):
            await locks.rlock("a", owner="shop").acquire()
    async with locks.rlock("a", owner="shop"), locks.rlock("a", owner="shop"):
        with pytest.raises(Deadlock):
            await locks.lock("a").acquire()


@case
async def test_an_election_that_its_own_leader_campaigns_in(locks, tools):
    async with locks.election("a"):
        with pytest.raises(Deadlock, match="resign"):
            await locks.election("a").campaign()

    async def work(_):
        await locks.election("a").acquire()

    with pytest.raises(Deadlock):
        await locks.election("a").run(work)


# No Deadlock: the call does not wait, or the wait may end


@case
async def test_a_call_that_does_not_wait_is_told_in_its_error(locks, tools):
    lock = locks.lock("a", timeout=0)
    async with lock:
        outer = line() - 1
        for each in (lock, locks.lock("a"), locks.rlock("a")):
            assert await each.try_acquire() is None
        for call in (lock.acquire, locks.lock("a", timeout=0).acquire):
            with pytest.raises(AcquireTimeout, match=f"This very {tools.caller} holds it, since {__file__}:{outer}"):
                await call()
        with pytest.raises(AcquireTimeout):
            async with lock:
                pass
    limited = locks.semaphore("b", 1)
    async with limited:
        assert await limited.try_acquire() is None


@case
async def test_an_acquire_without_a_with_is_logged_and_is_told_in_the_error(locks, tools):
    lease = await locks.lock("a").acquire()
    outer = line() - 1
    for _ in range(2):
        with pytest.raises(AcquireTimeout) as caught:
            await locks.lock("a").acquire(timeout=0.4)
        inner = line() - 1
        assert f"This very {tools.caller} holds it, since {__file__}:{outer}. " in str(caught.value)
        assert tools.warned
        assert f"since {__file__}:{outer}, and waits for it at {__file__}:{inner}, for ever" in tools.caplog.text
        assert len(tools.caplog.records) == 1  # once a call
        tools.caplog.clear()
    with pytest.raises(AcquireTimeout, match="This very"):
        await locks.lock("a").acquire(timeout=0.02)  # too short to be logged
    assert not tools.warned
    async with lease:  # the caller may still give it to another one
        with pytest.raises(AcquireTimeout, match="This very"):
            await locks.lock("a").acquire(timeout=0.4)


@case
async def test_a_lease_that_another_one_releases(locks, tools):
    lease = await locks.lock("a").acquire()

    async def release():
        await tools.until(lambda: tools.warned)
        await lease.release()

    released = tools.beside(release)
    assert await (await locks.lock("a").acquire(timeout=30)).release()
    await released()


@case
async def test_a_lease_that_ends_by_itself(locks, tools):
    for options in ({"ttl": 0.5, "renew": False}, {"max_hold": 0.5}):
        lock = locks.lock("a", timeout=30, **options)
        with pytest.raises(LeaseLost):
            async with lock:
                await (await locks.lock("a").acquire(timeout=30)).release()
        assert tools.warned
        assert "until that lease ends" in tools.caplog.text
        with pytest.raises(LeaseLost):
            async with lock, lock:
                pass
        tools.caplog.clear()


@case
async def test_a_lease_that_was_revoked(locks, tools):
    with pytest.raises(LeaseLost):
        async with locks.lock("a", ttl=1):
            assert await locks.lock("a").revoke("a test")
            await (await locks.lock("a").acquire(timeout=30)).release()


@case
async def test_a_suspended_generator(locks, tools):
    async def inside(name):
        async with locks.lock(name, timeout=0.3):
            yield

    await locks.ping()  # connecting is not what the timeouts are for
    first, second = inside("a"), inside("a")
    await tools.step(first)
    with pytest.raises(AcquireTimeout, match="This very"):  # another one may drive the generator
        await tools.step(second)
    with pytest.raises(AcquireTimeout, match="This very"):
        await locks.lock("a").acquire(timeout=0.3)
    del first, second
    await tools.until(lambda: gc.collect() >= 0 and not locks._session.book.held())


@case
async def test_an_exit_stack_and_a_section_without_a_with(locks, tools):
    async with tools.exit_stack() as stack:
        await tools.enter(stack, locks.lock("a"))
        with pytest.raises(AcquireTimeout, match="This very"):
            await locks.lock("a").acquire(timeout=0.3)
    lock = locks.lock("a")
    await tools.begin(lock)
    with pytest.raises(AcquireTimeout, match="This very"):
        await locks.lock("a").acquire(timeout=0.3)
    await tools.end(lock)


@case
async def test_another_holder(locks, tools):
    async with locks.lock("a"):
        with pytest.raises(AcquireTimeout) as caught:
            await tools.beside(locks.lock("a").acquire, 0.3)()
        assert "This very" not in str(caught.value)
    assert not tools.warned


@case
async def test_permits_that_another_one_may_release(locks, tools):
    limited = locks.semaphore("a", 2)
    others = await tools.beside(limited.acquire)()
    async with limited:
        with pytest.raises(AcquireTimeout) as caught:
            await limited.acquire(timeout=0.3)
        assert "This very" not in str(caught.value)
        assert not tools.warned
        await others.release()
        assert await (await limited.acquire(timeout=30)).release()


@case
async def test_a_client_with_many_leases_does_not_look_for_permits(locks, tools):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_wait, "MAX_SEARCHED", 0)
        async with locks.semaphore("a", 1):
            with pytest.raises(AcquireTimeout) as caught:
                await locks.semaphore("a", 1).acquire(timeout=0.3)
    assert "This very" not in str(caught.value)


@case
async def test_an_rlock_that_a_call_has_entered_and_its_body_keeps(locks, tools):
    lock, kept = locks.rlock("a"), []

    @lock
    async def keep():
        kept.append(await lock.acquire())

    await keep()
    with pytest.raises(AcquireTimeout, match="This very"):
        await locks.lock("a").acquire(timeout=0.3)
    assert await kept[0].release()


@case
async def test_a_reader_that_reads_again(locks, tools):
    async with locks.rwlock("a").write(), locks.rwlock("a").read(), locks.rwlock("a").read():
        pass


@case
async def test_a_latch_and_a_barrier(locks, tools):
    async with locks.lock("a"):
        await locks.latch("b", 2).count_down()
        with pytest.raises(AcquireTimeout):
            await locks.latch("b", 2).wait(0.3)
        with pytest.raises(BrokenBarrier):
            await locks.barrier("c", 2).wait(0.3)
    assert not tools.warned


def test_a_thread_of_a_pool_that_entered_for_one_request_gets_no_deadlock_in_the_next_one(server, clean):
    def inside(locks):
        with locks.lock("a", timeout=0.3):
            yield

    with interlock.Interlock(server.url) as locks, ThreadPoolExecutor(1) as pool:
        entered, by_hand = inside(locks), locks.lock("b", timeout=0.3)
        pool.submit(next, entered).result()
        pool.submit(by_hand.__enter__).result()
        for lock in (locks.lock("a"), locks.lock("b"), by_hand):
            with pytest.raises(AcquireTimeout):
                pool.submit(lock.acquire, 0.3).result()
        with pytest.raises(AcquireTimeout):
            pool.submit(by_hand.__enter__).result()
        entered.close()
        by_hand.__exit__(None, None, None)
        assert locks.multi(locks.lock("a"), locks.lock("b")).try_acquire().release()


def test_a_with_that_is_not_on_the_stack_of_the_waiter(server, clean):
    """A coroutine that is suspended in a `with` for threads: its body does not make the call that waits."""

    class Suspended:
        def __await__(self):
            yield

    async def inside(lock):
        with lock:
            await Suspended()

    with interlock.Interlock(server.url) as locks:
        coroutine = inside(locks.lock("a"))
        coroutine.send(None)
        with pytest.raises(AcquireTimeout, match="This very thread"):
            locks.lock("a").acquire(timeout=0.3)
        with pytest.raises(AcquireTimeout, match="This very thread"):  # as two requests that one function handles
            inside(locks.lock("a", timeout=0.3)).send(None)
        with pytest.raises(StopIteration):
            coroutine.send(None)
        assert locks.lock("a").try_acquire().release()


def test_a_with_of_another_frame_of_the_same_function(server, clean):
    """The frame that waits stands behind the `with` in which another frame of its function is suspended."""

    class Suspended:
        def __await__(self):
            yield

    async def both(locks, *, enters):
        if enters:
            with locks.lock("a"):
                await Suspended()
        else:
            locks.lock("a").acquire(timeout=0.3)

    with interlock.Interlock(server.url) as locks:
        coroutine = both(locks, enters=True)
        coroutine.send(None)
        with pytest.raises(AcquireTimeout, match="This very thread"):
            both(locks, enters=False).send(None)
        with pytest.raises(StopIteration):
            coroutine.send(None)


def test_an_exit_that_the_user_has_loaded_is_no_with(server, clean):
    """Whoever has that exit may call it."""

    class Kept:
        """Its frame is gone when the lock is held: the frame of the next one may have the same identity."""

        def __init__(self, lock):
            self.lock = lock

        def enter(self):
            self.exit = self.lock.__exit__
            self.lock.__enter__()

    with interlock.Interlock(server.url) as locks:
        kept = Kept(locks.lock("a", timeout=0.3))
        kept.enter()
        for _ in range(3):
            with pytest.raises(AcquireTimeout, match="This very thread"):
                Kept(locks.lock("a", timeout=0.3)).enter()
        kept.exit(None, None, None)
        lock = locks.lock("a")
        leave, _ = lock.__exit__, lock.__enter__()
        with pytest.raises(AcquireTimeout, match="This very thread"):
            locks.lock("a").acquire(timeout=0.3)
        leave(None, None, None)
        assert locks.lock("a").try_acquire().release()


@case
async def test_an_rlock_whose_with_was_left_and_whose_body_keeps_it(locks, tools):
    async def inside(kept):
        async with locks.rlock("a"):
            kept.append(await locks.rlock("a").acquire())
            with pytest.raises(Deadlock):
                await locks.lock("a").acquire()

    kept = []
    await inside(kept)
    with pytest.raises(AcquireTimeout, match="This very"):
        await locks.lock("a").acquire(timeout=0.3)
    assert await kept[0].release()


def test_a_function_that_calls_itself_inside_its_with(server, clean):
    def again(depth):
        with locks.lock("a", timeout=30):
            again(depth + 1)

    with interlock.Interlock(server.url) as locks, pytest.raises(Deadlock):
        again(1)


def test_a_child_after_a_fork_waits_for_its_parent(server, clean):
    with interlock.Interlock(server.url) as locks, locks.lock("a"):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                locks.lock("a").acquire(timeout=0.4)
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
    assert told.startswith("AcquireTimeout")
    assert "This very" not in told


def test_a_caller_without_a_line_of_python_acquires(server, clean, caplog):
    with interlock.Interlock(server.url) as locks:
        lock, leases = locks.lock("a"), []
        threading.Thread(target=lambda: leases.append(lock.acquire())).start()
        asyncio.run(until(lambda: leases))
        leases.pop().release()
        _thread.start_new_thread(lock.acquire, ())  # C code calls: no frame is below that of acquire
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            asyncio.run(until(lambda: "was acquired at a line that is not known" in caplog.text))


# A lease that is dropped


@case
async def test_a_lease_that_is_dropped_is_logged_with_the_line_of_its_acquire(locks, tools):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        await locks.lock("a", ttl=3).acquire()
        dropped = line() - 1
        gc.collect()
        await tools.until(lambda: "dropped without release" in tools.caplog.text)
    text = f"lock 'a': a lease was dropped without release; it was acquired at {__file__}:{dropped}. It is"
    for told in (tools.caplog.text, str(next(each for each in caught if each.category is ResourceWarning).message)):
        assert text in told
        assert "`with`" in told
    assert len(tools.caplog.records) == 1
    with pytest.raises(AcquireTimeout):
        await locks.lock("a").acquire(0)
    assert await (await locks.lock("a").acquire(30)).release()


@case
async def test_a_lease_that_is_dropped_before_the_close_is_logged_by_the_close(locks, tools):
    async with tools.another() as other:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            await other.lock("a").acquire()
            gc.collect()
    assert "dropped without release" in tools.caplog.text
    assert len(tools.caplog.records) == 1


# Threads in an event loop


def test_a_call_for_threads_inside_an_event_loop_is_logged_once(server, clean, caplog, monkeypatch):
    monkeypatch.setattr(misuse_warnings, "_has_warned_of_loop", threading.Event())

    async def main(locks):
        await asyncio.to_thread(locks.lock("a").acquire(0).release)
        return line() - 1

    with interlock.Interlock(server.url) as locks:
        with locks.lock("a"):
            pass
        asyncio.run(asyncio.to_thread(lambda: locks.lock("a").acquire().release()))
        assert not caplog.records
        where = asyncio.run(main(locks))
        asyncio.run(main(locks))
        assert f"lock 'a': a call for threads runs inside an event loop, at {__file__}:{where}. " in caplog.text
        assert len(caplog.records) == 1
