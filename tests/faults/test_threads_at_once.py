"""Threads at the same place at once. Most of these fail without the GIL only, and then without what they are about."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

import interlock
from harness.modes import wait_until
from interlock._protocol.run_to_end import run
from interlock._protocol.timing import FOREVER
from interlock._quarantine import server_history
from interlock._quarantine.identity import Facts
from interlock._quarantine.stamp import IdentityStamp, SlotHistory
from interlock.primitives.messages import encode_release

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", modes="threads")
THREADS = 8


def at_once(work) -> None:
    start = threading.Barrier(THREADS)

    def begin(_) -> None:
        start.wait()
        work()

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(begin, range(THREADS)))


@rule(10)
def test_two_connections_that_meet_a_server_first_agree_who_was_there_before(server, clean, monkeypatch):
    both = threading.Barrier(2)

    class Slow(IdentityStamp):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            if threading.current_thread() is not threading.main_thread() and args[0] is not None:
                with contextlib.suppress(threading.BrokenBarrierError):
                    both.wait(0.5)

    with interlock.Interlock(server.url) as locks:
        monkeypatch.setattr(server_history, "IdentityStamp", Slow)
        with ThreadPoolExecutor(2) as threads:
            leases = list(threads.map(lambda name: locks.lock(name).acquire(), ["a", "b"]))
        assert len({id(connection.stamp) for connection in locks._session.server.pool.idle}) == 1
        for lease in leases:
            lease.release()


@rule(11)
def test_threads_that_re_enter_a_lease_at_once_are_counted(server, clean):
    with interlock.Interlock(server.url) as locks:
        lease = locks.rlock("a", owner="shop").acquire()

        def enter_and_leave() -> None:
            for _ in range(500):
                lease._reenter()
                lease._leaves_inner()

        at_once(enter_and_leave)
        assert lease._depth == 1
        assert lease.release()


@rule(2)
def test_requests_of_several_threads_about_one_lease_are_counted(server, clean):
    with interlock.Interlock(server.url) as locks, locks.lock("a") as lease:
        at_once(lambda: [lease.execute("PING", keys=[]) for _ in range(20)])
        count = lease._core.holding._count_unanswered
        at_once(lambda: [count(lease._grant.hold, by) for by in (1, -1) * 500])
        assert lease._grant.hold.unanswered == 0


@rule(6)
def test_a_thread_that_enters_what_another_thread_of_its_owner_leaves_gets_a_lease_of_its_own(
    server, clean, monkeypatch
):
    with interlock.Interlock(server.url) as locks:
        lock = locks.rlock("a", owner="ann")
        left = lock.acquire()
        ensure = type(left)._ensure

        def ensure_and_then_the_other_leaves(lease):
            ensure(lease)
            monkeypatch.undo()
            left.release()

        monkeypatch.setattr(type(left), "_ensure", ensure_and_then_the_other_leaves)
        entered = lock.acquire()
        assert entered.fence > left.fence
        entered.ensure()
        assert entered.release()


@rule(8)
def test_a_thread_that_leaves_tolerates_another_that_forgets_what_it_looks_at(server, clean):
    """Without the GIL, another thread may come between any two steps of Python."""

    class Raced(deque):
        def __bool__(self) -> bool:
            has_one = len(self) > 0
            self.clear()  # by another thread, at once
            return has_one

    with interlock.Interlock(server.url, confirm=False) as locks:
        unread = locks._session.unread_releases
        unread.left = Raced()
        for _ in range(3):
            with locks.lock("a"):
                pass
            unread.due()
            run(unread.settle(FOREVER, unread.runtime.now() + 1))


@rule(8)
def test_extend_tolerates_the_worker_that_takes_its_bucket(server, clean):
    class Raced(dict):
        def __contains__(self, key) -> bool:
            return self.pop(key, None) is not None  # the worker of ends takes it just then

    with interlock.Interlock(server.url) as locks:
        lease, book = locks.lock("a", renew=False).acquire(), locks._session.book
        book.buckets, before = Raced(book.buckets), lease._grant.hold.due
        wait_until(lambda: lease.extend(30) or lease._grant.hold.due != before)
        assert lease.release()


@rule(6)
def test_replies_that_nobody_waits_for_are_read_while_threads_take_connections(server, clean):
    with interlock.Interlock(server.url) as locks:
        at_once(locks.lock("a").acquire().release)
        reached, over = locks._session.server, threading.Event()
        resource = locks.lock("a")._to_request()
        message = resource.script, resource.keys, encode_release("nobody", "0", ())

        def take_and_give() -> None:
            while not over.is_set():
                if (connection := reached.pool.take()) is not None:
                    connection.checkin()

        def send() -> bool:
            sent.extend(call for _ in range(100) if (call := reached.send(message)) is not None)
            return len(sent) > 500

        sent, taking = [], threading.Thread(target=take_and_give)
        taking.start()
        try:
            wait_until(send)  # else the other thread stood still with the connection in its hand
            for call in sent:
                wait_until(lambda call=call: run(call.read(reached.runtime.now() + 5)) or call.reply == [0, 0])
        finally:
            over.set()
            taking.join()


@rule(10)
def test_a_text_for_a_slot_that_was_made_during_a_change_is_not_kept(monkeypatch):
    facts = Facts("a" * 40, "b" * 40, "0" * 40, uptime=1000, now_ms=10**6, replicas=0)
    stamp = IdentityStamp(facts, 60.0, "-")
    older, newer = SlotHistory("older", 0.0, ()), SlotHistory("newer", 0.0, ())
    stamp.set_slot_history(1, older)
    real = IdentityStamp._format

    def during_a_change(self, *args):
        monkeypatch.setattr(IdentityStamp, "_format", real)
        self.set_slot_history(1, newer)
        return real(self, *args)

    monkeypatch.setattr(IdentityStamp, "_format", during_a_change)
    assert "older" in stamp.text_for(1)
    assert "newer" in stamp.text_for(1)


@rule(11)
def test_threads_that_enter_and_leave_one_lease_at_once_are_all_counted(server, clean):
    """One of them once read what another had just emptied, and got an IndexError out of its `with`."""
    with interlock.Interlock(server.url) as locks:
        lease = locks.rlock("a", owner="shop").acquire()
        lease._depth = 1_000_000  # no exit is the last one

        def enter_and_leave() -> None:
            for _ in range(2000):
                lease._begin()
                run(lease._exit(None, None, None))

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            at_once(enter_and_leave)
        finally:
            sys.setswitchinterval(before)
        assert lease._bodies == ()
        lease._depth = 1
        assert lease.release()
