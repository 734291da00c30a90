"""A signal handler, or a finalizer, that takes the lock which the code that it interrupts just acquires or releases.

That code can't go on before the handler has ended, so a handler that waits for it would wait for ever, or until the ttl
is over. Not here: handlers that raise (test_interrupts.py), a `with` inside a `with` (test_self_wait.py).
"""

from __future__ import annotations

import inspect
import sys
import threading

import pytest

import interlock
import interlock.aio
from faults.test_interrupts import Interruption
from harness.modes import wait_until
from interlock import Deadlock, LockError

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")
PATIENCE = 20  # seconds that a handler waits, at most; no lease here ends so early


class Handler(Interruption):
    """A handler that makes this call at the n-th place in our code; `outcome` is the call's result or its error.

    The profiling hook itself makes the call, and sends no signal: what is interrupted goes on afterwards, and on
    CPython 3.11 it does not survive every signal that a hook has flagged.
    """

    def __init__(self, at: int, call, **options) -> None:
        super().__init__(at, **options)
        self.call, self.outcome = call, None

    def __enter__(self):
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *_) -> None:
        sys.setprofile(None)

    def _hook(self, frame, event, _) -> None:
        if event in {"call", "c_return"} and self.within(frame) and self.mine(frame, event):
            self.count += 1
            if self.count == self.at:
                try:
                    self.outcome = self.call()
                except LockError as error:
                    self.outcome = error


def take(lockable) -> str:
    lockable.acquire(timeout=PATIENCE).release()
    return "acquired"


def is_told(outcome: object) -> bool:
    """Whether the handler got the lock, or an error at once."""
    return outcome == "acquired" or isinstance(outcome, Deadlock) or "would wait for itself for ever" in str(outcome)


WAYS = {
    "lock": lambda locks, name: locks.lock(name),
    "unconfirmed": lambda locks, name: locks.lock(name, confirm=False),
    "fair": lambda locks, name: locks.lock(name, fair=True),
    "rlock": lambda locks, name: locks.rlock(name),
    "semaphore": lambda locks, name: locks.semaphore(name, 1),
    "write": lambda locks, name: locks.rwlock(name).write(),
    "multi": lambda locks, name: locks.multi(locks.lock(f"{{{name}}}1"), locks.lock(f"{{{name}}}2")),
    "election": lambda locks, name: locks.election(name),
}


@rule(2, 8, 11)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["with", "acquire"])
def test_a_handler_at_any_step_of_a_section_gets_the_lock_or_a_deadlock(server, clean, way, how):
    with interlock.Interlock(server.url) as locks:
        WAYS[way](locks, "warm").acquire().release()
        at, done, outcomes = 0, False, set()
        while not done:
            at += 1 if way != "multi" else 3
            name = f"a{at}"
            lockable = WAYS[way](locks, name)
            with Handler(at, lambda name=name: take(WAYS[way](locks, name))) as handler:
                if how == "acquire":
                    lockable.acquire().release()
                else:
                    with lockable:
                        pass
            done = handler.done
            assert done or is_told(handler.outcome), (at, handler.outcome)
            outcomes.add(type(handler.outcome))
        assert outcomes >= {str, Deadlock}


@rule(2, 11)
def test_a_handler_at_any_step_of_a_wait_in_a_cohort_gets_a_deadlock_or_the_lock(server, clean):
    """The interrupted caller stands behind the section of another thread, which ends meanwhile or not."""
    with interlock.Interlock(server.url) as locks:
        at, done = 0, False
        while not done:
            at += 1
            name = f"a{at}"
            lease = locks.lock(name).acquire()

            def leave(lease=lease, name=name) -> None:
                while not locks._session.core.cohorts.waiting() and not over.wait(0.001):
                    pass
                lease.release()

            over = threading.Event()
            leaving = threading.Thread(target=leave)
            leaving.start()
            with Handler(at, lambda name=name: take(locks.lock(name))) as handler, locks.lock(name):
                pass
            over.set()
            leaving.join()
            done = handler.done
            assert done or is_told(handler.outcome), (at, handler.outcome)
        assert at > 30


def in_request(frame, event) -> bool:
    """Whether the driver is just about to ask the server."""
    return event == "call" and frame.f_code.co_name == "ask_until_answered"


def after_the_reply(frame, event) -> bool:
    """Whether the server has just granted the lock."""
    return event == "call" and frame.f_code.co_name == "lease_from_grant"


@rule(11)
@pytest.mark.parametrize("fair", [False, True], ids=["cohort", "server"])
def test_the_deadlock_of_a_handler_names_both_lines_and_leaves_nothing(server, clean, fair):
    def handle() -> None:
        locks.lock("a", fair=fair).acquire()

    with interlock.Interlock(server.url) as locks:
        with Handler(1, handle, mine=after_the_reply if fair else in_request) as handler:
            acquiring = inspect.currentframe().f_lineno + 1
            lease = locks.lock("a", fair=fair).acquire()
        error = handler.outcome
        assert isinstance(error, Deadlock)
        assert error.name == "a"
        handling = handle.__code__.co_firstlineno + 1
        assert f"acquiring or releasing it, at {__file__}:{acquiring}. " in str(error)
        assert f"at {__file__}:{handling}. Let another thread" in str(error)
        assert locks.lock("a").inspect().waiting == 0
        assert lease.release()


@rule(11)
def test_a_finalizer_gets_the_deadlock_too(server, clean):
    raised = []

    class Late:
        def __del__(self) -> None:
            try:
                locks.lock("a").acquire(timeout=PATIENCE)
            except LockError as error:
                raised.append(error)

    with interlock.Interlock(server.url) as locks:
        kept = [Late()]
        with Handler(1, kept.clear, mine=in_request), locks.lock("a"):
            pass
    assert isinstance(raised[0], Deadlock)


@rule(11)
def test_a_handler_takes_another_lock(server, clean):
    with (
        interlock.Interlock(server.url) as locks,
        Handler(1, lambda: take(locks.lock("b")), mine=in_request) as handler,
        locks.lock("a"),
    ):
        pass
    assert handler.outcome == "acquired"


@rule(11)
def test_a_handler_waits_for_another_thread(server, clean):
    """It interrupts a call for another lock."""
    with interlock.Interlock(server.url) as locks:
        lease = locks.lock("b").acquire()

        def release() -> None:
            wait_until(locks._session.core.cohorts.waiting)
            lease.release()

        releasing = threading.Thread(target=release)
        with Handler(1, lambda: take(locks.lock("b")), mine=in_request) as handler:
            releasing.start()
            locks.lock("a").acquire().release()
        releasing.join()
    assert handler.outcome == "acquired"


@rule(11)
async def test_a_handler_that_interrupts_a_task_gets_the_deadlock_too(server, clean):
    """An Interlock for threads, on the same server: the loop can't go on before the handler has ended."""
    async with interlock.aio.Interlock(server.url) as locks:
        with interlock.Interlock(server.url) as blocking:
            with Handler(1, lambda: take(blocking.lock("a")), mine=after_the_reply) as handler:
                lease = await locks.lock("a").acquire()
            assert await lease.release()
    assert isinstance(handler.outcome, Deadlock)
