"""Ctrl-C, or any exception of a signal handler, at every step of a section: no lease stays held, or is renewed.

Python runs signal handlers when a function begins and after a call of a function in C. A profiling hook is called at
the same places: so it interrupts each of them in turn. `scripts/fuzz_signals` does the same by chance, with signals.

Not here: an exception at each message or `await` of a call (test_network.py), cancellations (test_cancellation.py).
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest

import interlock
import interlock.aio
from harness.modes import until, wait_until
from harness.processes import PROGRAMS
from interlock._api.section import Section
from interlock._client.grant import Grant
from interlock._client.lease_ends import DROPPED
from interlock._people.observer import Observer, observe, stop_observing
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import FOREVER
from interlock._transports.asyncio.runtime import AutoResetEvent
from interlock.compat import threading as compat

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")


@pytest.fixture(autouse=True)
def litter():
    """An interrupt while redis-py connects leaves a half-made connection: collect it here, not in a later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


SOURCE = str(Path(interlock.__file__).parent)
ASYNCIO = str(Path(asyncio.__file__).parent)
SHORT = 1.2  # seconds: the ttl of what may have to run out


class Stop(BaseException):
    """Like KeyboardInterrupt: not an Exception, and raised anywhere."""


def in_source(frame) -> bool:
    """Whether this is code of interlock."""
    return frame.f_code.co_filename.startswith(SOURCE)


def in_asyncio_for_source(frame) -> bool:
    """Whether this is code of interlock, or code of asyncio that interlock calls, and not only a loop that runs it."""
    while frame is not None and frame.f_code.co_filename.startswith(ASYNCIO):
        frame = frame.f_back
    return frame is not None and in_source(frame)


class Interruption:
    """A signal whose handler raises Stop, at the n-th place where one could be handled, in our code and for the caller.

    The hook raises nothing itself, for which CPython 3.11 is not made: it flags the signal as its last act, by an
    iterator of C, so that the next place where Python looks is the one where the hook was called.
    """

    def __init__(self, at: int, *, mine=lambda *_: True, within=in_source) -> None:
        self.at, self.mine, self.within, self.count = at, mine, within, 0
        self.flag = itertools.starmap(_thread.interrupt_main, [(signal.SIGUSR1,)])

    def __enter__(self):
        self.before = signal.signal(signal.SIGUSR1, self._stop)
        sys.setprofile(self._hook)
        return self

    def __exit__(self, kind, *_) -> bool:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR1, self.before)
        return kind is Stop

    @staticmethod
    def _stop(*_) -> None:
        raise Stop

    def _hook(self, frame, event, _) -> None:
        if event in {"call", "c_return"} and self.within(frame) and self.mine(frame, event):
            self.count += 1
            if self.count == self.at:
                if sys.version_info >= (3, 12):  # which looks nowhere when the hook returns, and takes an error there
                    raise Stop
                for _ in self.flag:
                    return

    @property
    def done(self) -> bool:
        """Whether the section ended before the n-th place."""
        return self.count < self.at


def tagged(name: str) -> tuple[str, str]:
    return f"{{{name}}}1", f"{{{name}}}2"


def lock(locks, name):
    return locks.lock(name)


def unconfirmed(locks, name):
    return locks.lock(name, confirm=False)


def nested(locks, name):
    return locks.rlock(name)


def permit(locks, name):
    return locks.semaphore(name, 2)


def writer(locks, name):
    return locks.rwlock(name).write()


def several(locks, name):
    first, second = tagged(name)
    return locks.multi(locks.lock(first), locks.rlock(second))


def apart(locks, name):
    return locks.multi(locks.lock(name), locks.semaphore(f"{name}-s", 1, acks=0))  # one after another


def leader(locks, name):
    return locks.election(name)


LOCKABLES = [lock, unconfirmed, nested, permit, writer, several, apart, leader]


def decorated(locks, name):
    return locks.synchronized(name)


def job(locks, name):
    return locks.once(name, at_most=20)


def reign(locks, name):
    return locks.election(name)


def drop_in(locks, name):
    return compat.Lock(name, locks=locks)


def nested_drop_in(locks, name):
    return compat.RLock(name, locks=locks)


def held(client) -> set[bytes]:
    """The names that are held, of any kind of lock."""
    return {
        key for key in client.scan_iter("lock:*") if not key.endswith(b"}") and client.type(key) in {b"string", b"zset"}
    }


def nothing_renewed(locks) -> bool:
    gc.collect()
    return not locks._session.book.held()


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Silence two expected warnings: an interrupt in a finalizer, and a lease that is dropped."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@rule(8, 11)
@pytest.mark.parametrize(
    "make", [*LOCKABLES, decorated, job, reign, drop_in, nested_drop_in], ids=lambda make: make.__name__
)
async def test_an_interrupt_at_any_step_of_a_section_leaves_nothing_held(server, clean, make):
    made = []  # a lockable that lives on must not keep its lease alive

    def section(thing, *, once_more: bool) -> None:
        if make is decorated:
            thing(lambda: None)()
        elif make in {job, reign}:
            thing.run(lambda _: None)
        else:
            with thing:
                if once_more and make in {nested, nested_drop_in}:
                    section(thing, once_more=False)

    with interlock.Interlock(server.url) as locks:
        section(make(locks, "warm"), once_more=True)
        at, done = 0, False
        while not done:
            at += 1
            made.append(make(locks, f"a{at}"))
            with Interruption(at) as interruption:
                section(made[-1], once_more=True)
            done = interruption.done
        assert at > 100
        await until(lambda: nothing_renewed(locks) and not held(clean))


@pytest.fixture(params=[False, True], ids=["", "observed"])
def observed(request):
    """Without an observer, and with one."""
    observer = Observer()
    if request.param:
        observe(observer)
    yield
    stop_observing(observer)


@rule(8, 11)
@pytest.mark.usefixtures("observed")
def test_an_interrupt_at_any_step_neither_holds_the_lock_nor_keeps_its_own_thread_out(server, clean):
    with interlock.Interlock(server.url) as locks:
        one = locks.lock("a", timeout=5)
        at, done = 0, False
        while not done:
            at += 1
            with Interruption(at) as interruption, one:
                pass
            done = interruption.done
            with one:  # at once: it is given back in the background
                pass
        assert at > 100


@rule(6, 8)
async def test_a_lease_that_an_interrupt_left_unreachable_is_not_renewed(server, clean):
    """Between the return of `acquire()` and the `with`, or the `try`, only Python's finalizers can release it."""
    with interlock.Interlock(server.url) as locks:
        locks.lock("warm").acquire().release()
        at, done = 0, False
        while not done:
            at += 1
            with Interruption(at) as interruption, locks.lock(f"a{at}", ttl=SHORT).acquire():
                pass
            with Interruption(at) as other:
                lease = locks.lock(f"b{at}", ttl=SHORT).acquire()
                lease.release()
            lease = None
            done = interruption.done and other.done
        assert at > 80
        await until(lambda: nothing_renewed(locks) and not held(clean))


@rule(8, 11)
@pytest.mark.parametrize("make", [*LOCKABLES, decorated, job, reign], ids=lambda make: make.__name__)
async def test_an_interrupt_at_any_step_of_an_async_section_leaves_nothing_held(server, clean, make):
    made = []

    async def section(thing, *, once_more: bool) -> None:
        if make is decorated:
            await thing(_nothing)()
        elif make in {job, reign}:
            await thing.run(_nothing)
        else:
            async with thing:
                if once_more and make is nested:
                    await section(thing, once_more=False)

    async with interlock.aio.Interlock(server.url) as locks:
        await section(make(locks, "warm"), once_more=True)
        at, done = 0, False
        while not done:
            at += 1
            made.append(make(locks, f"a{at}"))
            running = asyncio.create_task(section(made[-1], once_more=True))
            with Interruption(at, mine=lambda *_: asyncio.current_task() is running) as interruption:
                await asyncio.wait([running])
            done = interruption.done
            assert isinstance(running.exception(), Stop | None), at
            running = None
        assert at > 80
        await until(lambda: nothing_renewed(locks) and not held(clean))


async def _nothing(*_) -> None: ...


async def test_asyncio_forgets_a_task_if_an_interrupt_comes_between_a_result_and_the_wake_up():
    """Why interlock sets no result for another task in a task of the user (ADR 17). Nothing of interlock is here."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    waiting = asyncio.create_task(wait_for(future))
    await asyncio.sleep(0)
    call_soon = loop.call_soon

    def interrupted(*_, **__) -> None:
        loop.call_soon = call_soon
        raise Stop

    loop.call_soon = interrupted
    with contextlib.suppress(Stop):
        future.set_result(None)
    waiting.cancel()
    ended = bool((await asyncio.wait([waiting], timeout=0.2))[0])
    waiting = None  # what nothing can end would keep the loop from ending
    assert not ended, "asyncio has mended this: ADR 17 may go"


async def wait_for(future) -> None:
    await future


@rule(8, 11)
async def test_an_interrupt_of_a_task_that_sets_an_event_leaves_the_waiting_task_to_be_woken():
    """A handler that raises while a task of the user wakes a worker must not end that worker."""
    at, done, lost = 0, False, []
    while not done:
        at += 1
        event = AutoResetEvent()
        waiting = asyncio.create_task(event.wait(FOREVER))
        await asyncio.sleep(0)
        running = asyncio.create_task(call(event.set))
        mine = partial(is_current, running)
        with Interruption(at, mine=mine, within=in_asyncio_for_source) as interruption:
            await asyncio.wait([running])
        done = interruption.done
        assert isinstance(running.exception(), Stop | None), at
        event.set()  # the interrupt may have come before its first step
        if not (await asyncio.wait([waiting], timeout=10))[0]:
            lost.append(at)
        event = waiting = running = mine = interruption = None  # what nothing can end would keep the loop from ending
    assert at > 5
    assert not lost, f"at these steps asyncio has lost the wake-up: {lost}"


@rule(8, 11)
async def test_an_interrupt_of_a_task_that_ends_the_connection_leaves_no_other_task_to_wait(server, clean):
    """`Connection.fail` fails the calls of all tasks: a handler that raises in its midst keeps none of them waiting."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    at, done, lost = 0, False, []
    async with interlock.aio.Interlock(server.url) as locks:
        while not done and len(lost) < 3:
            at += 1
            await locks.lock("a").inspect()  # connects
            connection = locks._session.server.pool._connection
            waiting = [asyncio.create_task(locks.lock("a").inspect()) for _ in range(3)]
            running = asyncio.create_task(call(partial(connection.fail, Disconnected("ended by a test", sent=True))))
            mine = partial(is_current, running)
            with Interruption(at, mine=mine, within=in_asyncio_for_source) as interruption:
                await asyncio.wait([running])
            done = interruption.done
            assert isinstance(running.exception(), Stop | None), at
            if (await asyncio.wait(waiting, timeout=10))[1]:
                lost.append(at)
            waiting = running = mine = interruption = None
    assert not lost, f"after an interrupt at these steps a call has no end: {lost}"
    assert at > 2  # more with asyncio's debug mode


def is_current(task, *_) -> bool:
    return asyncio.current_task() is task


async def call(function) -> None:
    function()


@rule(8)
async def test_a_section_that_an_interrupt_left_is_released_before_any_garbage_collection(server, clean):
    """The task has ended, and its error refers to its frames: the lease must not refer to the task."""
    leaving = Section.leave.__code__

    async def section(locks) -> None:
        async with locks.lock("a"):
            pass

    async with interlock.aio.Interlock(server.url) as locks:
        gc.disable()
        try:
            running = asyncio.create_task(section(locks))
            with Interruption(1, mine=lambda frame, event: event == "call" and frame.f_code is leaving):
                await asyncio.wait([running])
            assert isinstance(running.exception(), Stop)
            running = None
            await until(lambda: not locks._session.book.held() and not held(clean))
        finally:
            gc.enable()


@rule(6, 8)
@pytest.mark.parametrize("kind", ["lock", "rlock", "multi"])
@pytest.mark.parametrize("in_with", [True, False], ids=["with", "acquire"])
async def test_an_interrupt_at_any_step_of_a_finalizer_leaves_no_lease_renewed(server, clean, in_with, kind):
    """Python drops what a handler raises there, and calls the finalizer never again."""
    async with interlock.aio.Interlock(server.url) as locks:
        at, done, grants = 0, False, []
        while not done:
            at += 1
            lockable = locks.multi(locks.lock(f"{{{at}}}a", ttl=SHORT), locks.rlock(f"{{{at}}}b", ttl=SHORT))
            lockable = lockable if kind == "multi" else getattr(locks, kind)(f"a{at}", ttl=SHORT)
            lease = await lockable.acquire()
            if in_with:  # as that of an `async with` which nobody can leave any more
                lease._mark_in_with()
            grants += lease._lasting_grants()
            with Interruption(at) as interruption:
                lease = None
            done = interruption.done
        assert at > 5
        await until(lambda: nothing_renewed(locks) and not held(clean))
        reasons = {grant.end_reason for grant in grants}
        assert reasons == {Grant.RELEASED if in_with else DROPPED}


@rule(6, 8)
@pytest.mark.parametrize("in_with", [True, False], ids=["with", "acquire"])
def test_an_interrupt_at_any_step_of_a_finalizer_leaves_no_lease_of_a_thread_renewed(server, clean, in_with):
    with interlock.Interlock(server.url) as locks:
        at, done, grants = 0, False, []
        while not done:
            at += 1
            lease = locks.lock(f"a{at}", ttl=SHORT).acquire()
            if in_with:
                lease._mark_in_with()
            grants.append(lease._grant)
            with Interruption(at) as interruption:
                lease = None
            done = interruption.done
        assert at > 5
        wait_until(lambda: nothing_renewed(locks) and not held(clean))
        assert {grant.end_reason for grant in grants} == {Grant.RELEASED if in_with else DROPPED}


@rule(6, 8)
async def test_an_interrupt_of_a_section_in_whose_midst_garbage_is_collected_leaves_nothing_renewed(server, clean):
    """So it may come in the finalizer of another section, which an earlier interrupt has left."""

    async def section(thing, *, once_more: bool) -> None:
        async with thing:
            if once_more:
                await section(thing, once_more=False)

    async with interlock.aio.Interlock(server.url) as locks:
        await section(locks.rlock("warm", ttl=SHORT), once_more=True)
        at, done, usual = 0, False, gc.get_threshold()
        gc.set_threshold(20, 2, 2)
        try:
            while not done:
                at += 1
                running = asyncio.create_task(section(locks.rlock(f"a{at}", ttl=SHORT), once_more=True))
                with Interruption(at, mine=lambda *_: asyncio.current_task() is running) as interruption:
                    await asyncio.wait([running])
                done = interruption.done
                assert isinstance(running.exception(), Stop | None), at
                running = None
        finally:
            gc.set_threshold(*usual)
        assert at > 80
        await until(lambda: nothing_renewed(locks) and not held(clean))


@rule(8)
async def test_a_lease_that_passed_to_a_caller_whose_end_was_interrupted_is_given_back(server, clean, monkeypatch):
    """Ctrl-C twice: the second comes where the first gives back what has passed to its caller."""
    passed = []

    def interrupted(attempt):
        passed.append(leave(attempt))
        raise Stop

    async def waits() -> None:
        async with locks.lock("a", ttl=SHORT):
            pytest.fail("it was cancelled")

    async with interlock.aio.Interlock(server.url) as locks:
        cohorts = locks._session.core.cohorts
        leave = cohorts.leave
        async with locks.lock("a", ttl=SHORT):
            waiting = asyncio.create_task(waits())
            await until(cohorts.waiting)
            monkeypatch.setattr(cohorts, "leave", interrupted)
        waiting.cancel()
        with pytest.raises(Stop):
            await waiting
        monkeypatch.undo()
        assert passed[0].end_reason is None
        async with locks.lock("a", timeout=30):
            pass
        await until(lambda: nothing_renewed(locks) and not held(clean))


@rule(8)
@pytest.mark.parametrize("mode_name", ["threads", "asyncio"])
async def test_an_interrupt_at_any_step_of_an_inner_section_does_not_keep_the_outer_one(server, clean, mode_name):
    """Also if somebody keeps the lease: the inner section leaves its share of it."""
    kept, at, done = [], 0, False

    async def inside(locks, name) -> bool:
        async with locks.rlock(name) as lease:
            kept.append(lease)
            with Interruption(at) as interruption:
                async with locks.rlock(name):
                    pass
            gc.collect()  # of the section, which stands in the traceback
            return interruption.done

    def inside_in_thread(locks, name) -> bool:
        with locks.rlock(name) as lease:
            kept.append(lease)
            with Interruption(at) as interruption, locks.rlock(name):
                pass
            gc.collect()
            return interruption.done

    async with interlock.aio.Interlock(server.url) as locks:
        with interlock.Interlock(server.url) as blocking:
            while not done:
                at += 1
                if mode_name == "asyncio":
                    done = await inside(locks, f"a{at}")
                else:
                    done = inside_in_thread(blocking, f"a{at}")
                assert kept[-1].state == "released", at
    assert at > 30


@rule(8)
async def test_a_lease_that_becomes_unreachable_during_a_renewal_is_released(server, clean):
    """Finalizers do not wake the worker that takes up the leases which they leave."""
    async with interlock.aio.Interlock(server.url) as locks:
        port, asked, answer = locks._session.server, asyncio.Event(), asyncio.Event()
        calls = port.call_many

        async def slow(messages, patience):
            if messages[0][2][0] == "renew":
                asked.set()
                await answer.wait()
            return await calls(messages, patience)

        port.call_many = slow
        lease = await locks.lock("a").acquire()
        lease._mark_in_with()  # as that of an `async with` which nobody can leave any more
        await asyncio.wait_for(asked.wait(), 30)
        await asyncio.sleep(0.1)  # the worker of ends has gone to sleep
        lease = None
        answer.set()
        await until(lambda: not held(clean))


@rule(8)
def test_ctrl_c_ends_a_wait_even_if_another_thread_gets_the_signal(server):
    """The kernel may choose any thread; an untimed wait for a lock in the main thread then never woke."""

    def signal_this_thread():
        while not holder.lock("a").inspect().waiting or not is_asleep(threading.main_thread()):
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with interlock.Interlock(server.url) as holder, interlock.Interlock(server.url) as locks:
        lease = holder.lock("a").acquire()
        late = threading.Timer(60, lease.release)  # a wait that nothing else ends, ends here
        late.start()
        threading.Thread(target=signal_this_thread, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            locks.lock("a").acquire()
        late.cancel()
        assert lease.release()


@rule(8)
async def test_after_an_interrupt_in_a_connection_no_command_gets_the_reply_to_another(server, clean):
    """Replies are matched to commands by their order, so a signal handler that raises there ends the connection."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with interlock.aio.Interlock(server.url) as locks:
        at, done = 0, False
        while not done:
            at += 1
            running = asyncio.create_task(locks.lock("a", ttl=SHORT).acquire())
            with Interruption(at, mine=half_way) as interruption:
                await asyncio.wait([running])
            done = interruption.done
            lease = await asyncio.wait_for(locks.lock("b").acquire(), 30)
            assert clean.get("lock:b").decode() == lease.token
            assert await lease.release()
            if not running.exception():
                await running.result().release()
            running = None
        assert at > 5
        await until(lambda: nothing_renewed(locks) and not held(clean))


def is_asleep(thread) -> bool:
    """Whether the thread waits for an event, and does so still a moment later."""
    frames = []
    for _ in range(2):
        frame = sys._current_frames()[thread.ident]
        frames.append((frame.f_code.co_name, frame.f_lasti))
        time.sleep(0.2)
    return frames[0] == frames[1] and frames[0][0] == "wait"


def half_way(frame, event) -> bool:
    """Whether a profiling event stands inside a step of the connection that has to be done as a whole."""
    return event == "c_return" and frame.f_code.co_name in {"_send", "flush", "data_received"}


@rule(8)
async def test_an_interrupt_of_a_waiter_leaves_no_waiter_and_no_grant(server, clean):
    """At the steps after a handover: the test releases the lock as soon as somebody waits."""
    with interlock.Interlock(server.url) as holder, interlock.Interlock(server.url) as locks:
        at, done = 0, False
        while not done:
            at += 13  # steps are many, and each takes two clients
            name = f"a{at}"
            lease = holder.lock(name).acquire()

            def release(name=name, lease=lease) -> None:
                while not holder.lock(name).inspect().waiting and not over.is_set():
                    pass
                lease.release()

            over = threading.Event()
            releasing = threading.Thread(target=release)
            releasing.start()
            with Interruption(at) as interruption, locks.lock(name):
                pass
            over.set()
            releasing.join()
            done = interruption.done
        await until(lambda: nothing_renewed(locks) and not held(clean))


@rule(8, 11)
@pytest.mark.parametrize("mode_name", ["threads", "asyncio"])
def test_signals_at_random_moments_leave_nothing_held(server, clean, mode_name):
    """A few of them; `scripts/fuzz_signals` sends thousands."""
    command = [sys.executable, str(PROGRAMS / "interrupted.py"), server.url]
    command += ["--mode", mode_name, "--interrupts", "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-1000:]


@rule(8, 11)
@pytest.mark.parametrize("started", [False, True], ids=["before it begins", "after it began"])
@pytest.mark.parametrize("name", ["interlock-worker-ends", "interlock-listener"])
async def test_an_interrupt_while_a_background_thread_starts_leaves_exactly_one(
    server, clean, monkeypatch, name, started
):
    start, interrupted = threading.Thread.start, []

    def interrupt(thread) -> None:
        if thread.name == name and not interrupted:
            interrupted.append(thread)
            if started:
                start(thread)
            raise Stop
        start(thread)

    def running() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == name]

    with interlock.Interlock(server.url) as locks:
        monkeypatch.setattr(threading.Thread, "start", interrupt)
        port = locks._session.server
        with pytest.raises(Stop):
            port.ensure_subscribed("lock:a") if name == "interlock-listener" else locks.lock("a").acquire()
        if name == "interlock-listener":
            port.ensure_subscribed("lock:a")
            await until(lambda: port.pool.subscribed)
        with locks.lock("b", ttl=SHORT) as lease:
            await until(lambda: len(running()) == 1)
            before = lease._grant.hold.deadline
            await until(lambda: lease._grant.hold.deadline > before)
        assert len(running()) == 1
        await until(lambda: not held(clean))


@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
def test_a_signal_handler_that_raises_does_not_crash_the_interpreter(server, clean):
    """hiredis calls back into Python to pack a number; a handler that raised there was a segmentation fault."""
    code = """
import signal, sys, interlock
class Stop(Exception): pass
def stop(*_): raise Stop
signal.signal(signal.SIGALRM, stop)
locks = interlock.Interlock(sys.argv[1])
for number in range(1500):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + number % 40 * 0.00002)
        try:
            for _ in range(50):
                with locks.lock(f"users:{number}", ttl=2):
                    pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Stop:
        pass
locks.close()
print("OK")
"""
    import subprocess

    command = [sys.executable, "-W", "ignore", "-c", code, server.url]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"OK\n"), done.stderr[-500:]


@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
@rule(8)
def test_the_packer_of_hiredis_gets_nothing_but_text(kit_less_interlock, monkeypatch):
    from interlock._servers import single
    from interlock._transports import pushes, resp

    real, seen = resp.pack, []
    for sender in (resp, pushes, single):
        monkeypatch.setattr(sender, "pack", lambda words: seen.extend(words) or real(words))
    with kit_less_interlock as locks:
        lease = locks.lock("a").acquire()
        lease.extend(10)
        lease.execute("SET", "users:1", 1.5)
        lease.execute("INCRBY", "users:n", 2)
        locks.lock("a").inspect()
        locks.lock("a").revoke("test")
        lease.release()
        locks._session.core.server.ensure_subscribed("a")
    assert seen
    assert all(type(word) in {str, bytes} for word in seen)


@pytest.fixture
def kit_less_interlock(server, clean):
    yield interlock.Interlock(server.url)
    clean.delete("users:1", "users:n")


@rule(6, 11)
def test_an_interrupt_at_any_step_of_connecting_leaves_nothing_that_a_child_could_not_close(server):
    """What a child after a fork does with each of its parent's connections is done here with those that are left."""
    at, done = 0, False
    while not done:
        at += 1
        locks = interlock.Interlock(server.url, registry=False)
        with Interruption(at) as interruption:
            locks.lock("a").inspect()
        done = interruption.done
        pool = locks._session.server.pool
        for connection in list(pool.open_connections):
            connection.close_copy()
        assert not pool.open_connections
        locks.close()
    assert at > 100
