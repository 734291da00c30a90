"""A user's code that takes long (an observer, a handler of the log, `on_lost`) delays no lease, and no other report.

Not here: what is reported (conformance/test_observers.py), an observer that raises (there, too).
"""

from __future__ import annotations

import contextlib
import logging
import threading

import pytest

import interlock
from harness.modes import until, wait_until
from interlock._people import observer as observing
from interlock._people.observed import BY_CALLERS
from interlock._people.observer import Observer

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


class Slow(Observer, logging.Handler):
    """Spends in each call of `lost`, and in each record about a loss, all the time until the test lets it go on."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self.began, self.may_go_on = threading.Event(), threading.Event()
        self.told: list[str] = []

    def __hash__(self):
        return id(self)

    def lost(self, grant, loss, why, held):
        self.take_long(grant.resource.name)

    def emit(self, record):
        if "is lost" in record.getMessage():
            self.take_long(record.lock)

    def take_long(self, name):
        self.began.set()
        self.may_go_on.wait(30)
        self.told.append(name)


@contextlib.contextmanager
def slow(way):
    """A slow observer or a slow handler of the log, for the duration of a `with`."""
    made, log = Slow(), logging.getLogger("interlock")
    if way == "an observer":
        observing.observe(made)
        try:
            yield made
        finally:
            made.may_go_on.set()
            observing.stop_observing(made)
    else:
        log.addHandler(made)
        try:
            yield made
        finally:
            made.may_go_on.set()
            log.removeHandler(made)


@rule(6)
@pytest.mark.runs_on("valkey-9.1", modes="threads")
@pytest.mark.parametrize("way", ["an observer", "a handler"])
def test_the_report_of_one_loss_delays_no_other_holder_and_no_renewal(server, clean, way):
    told: list[str] = []
    with slow(way) as code, interlock.Interlock(server.url) as locks, interlock.Interlock(server.url) as others:
        options = {"on_lost": lambda lease: told.append(lease.name)}
        first = locks.lock("first", ttl=0.3, renew=False, **options).acquire()
        assert code.began.wait(30)  # and it goes on for as long as this test
        kept = locks.lock("kept", ttl=1.5, **options).acquire()
        gone = locks.lock("gone", ttl=3, **options).acquire()
        expired = locks.lock("expired", ttl=0.3, renew=False, **options).acquire()
        revoked = locks.lock("revoked", **options).acquire()
        clean.delete("lock:gone")
        others.lock("revoked").revoke("for the test")
        lost = [first, gone, expired, revoked]
        wait_until(lambda: all(lease.lost.is_set() for lease in lost))
        for _ in range(2):
            deadline = kept._grant.hold.deadline
            wait_until(lambda: kept._grant.hold.deadline > deadline)
        wait_until(lambda: len(told) == len(lost))
        assert not code.told
        code.may_go_on.set()
        wait_until(lambda: len(code.told) == len(lost))
        assert sorted(code.told) == sorted(told) == ["expired", "first", "gone", "revoked"]
        assert kept.release()


@rule(6)
@pytest.mark.asyncio_only
async def test_all_that_ended_together_know_it_before_a_user_hears_of_one(mode, clean):
    """A slow observer stops the loop: then no other loss may be left to be reported behind it."""
    locks, heard = mode.interlock(), []

    class Asking(Observer):
        def lost(self, grant, loss, why, held):
            heard.append([event.is_set() for event in events])

    leases = [await mode.keep(locks.lock(f"a{i}").acquire()) for i in range(5)]
    events, session = [lease.lost for lease in leases], mode.session(locks)
    asking = Asking()
    observing.observe(asking)
    try:
        clean.flushall()
        for lease in leases:  # so that one reply is about all of them
            session.book.put_aside(lease._grant.hold)
        session.ends.wake_renewer_at(session.runtime.now())
        await until(lambda: len(heard) == len(leases))
    finally:
        observing.stop_observing(asking)
    assert heard == [[True] * len(leases)] * len(leases)


async def test_a_close_releases_before_a_user_hears_of_the_releases(mode, clean):
    locks = mode.interlock()
    leases = [await mode.keep(locks.lock(f"a{i}").acquire()) for i in range(5)]
    heard = []

    class Asking(Observer):
        def released(self, grant, held):
            heard.append(clean.exists(*(f"lock:a{i}" for i in range(len(leases)))))

    asking = Asking()
    observing.observe(asking)
    for lease in leases:
        BY_CALLERS.acquired(lease._grant, 0.0)
    try:
        await locks.close()
    finally:
        observing.stop_observing(asking)
    assert heard == [0] * len(leases)


@pytest.mark.runs_on("valkey-9.1", modes="threads")
def test_a_warning_about_the_server_is_logged_with_no_lock_of_the_client(server, clean):
    """A restart is when leases are at risk: nobody may have to wait until the warning about it was written."""
    heard = []

    class Asking(logging.Handler):
        def emit(self, record):
            thread = threading.Thread(target=self.ask)
            thread.start()
            thread.join(30)

        @staticmethod
        def ask():
            mutex = locks._session.runtime.mutex
            heard.append(mutex.acquire(timeout=5))
            if heard[-1]:
                mutex.release()

    asking, log = Asking(), logging.getLogger("interlock")
    # max_ttl is longer than the server of the tests has run: with --full, that is hours.
    with interlock.Interlock(server.url, max_ttl=7 * 24 * 3600) as locks:
        locks.lock("a").acquire().release()
        history = locks._session.server.history
        history.forget("0" * 80)  # as if another server had answered before
        log.addHandler(asking)
        try:
            locks._session.server.pool.drop_all()
            locks.lock("b").inspect()
        finally:
            log.removeHandler(asking)
    assert heard == [True]
