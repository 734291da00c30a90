"""The workers that renew and that report ends: a renewal without a good reply, a report or a start that fails.

Not here: a silence of the server as a holder sees it (test_network.py, test_outages.py, test_silence.py).
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from harness.modes import until
from interlock import LeaseLost, LeaseState
from interlock._protocol.server import Disconnected

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


def patched(thing, **changes):
    """Replace some methods of an object for the duration of a `with`."""

    @contextlib.contextmanager
    def whole():
        for name, value in changes.items():
            setattr(thing, name, value)
        try:
            yield
        finally:
            for name in changes:
                delattr(thing, name)

    return whole()


@rule(11)
async def test_leases_whose_renewal_is_in_flight_count_as_held(mode):
    locks = mode.interlock()
    leases = await asyncio.gather(*(locks.lock(f"a{i}", ttl=3).acquire() for i in range(40)))
    session = mode.session(locks)
    real, seen = session.server.call_many, []

    async def watching(messages, until):
        if any(args[0] == "renew" for _, _, args in messages):
            seen.append(len(session.book.held()))
        return await real(messages, until)

    with patched(session.server, call_many=watching):
        await until(lambda: seen)
    assert set(seen) == {40}
    await asyncio.gather(*(lease.release() for lease in leases))


@rule(6)
async def test_an_error_of_any_kind_is_no_answer_to_a_renewal(mode):
    """An error of a credential provider, say."""
    locks = mode.interlock()
    lease = await locks.lock("a", ttl=3).acquire()
    failed = []

    def failing(_until):
        failed.append(1)
        raise ZeroDivisionError("not ours")

    pool = mode.session(locks).server.pool
    with patched(pool, take=lambda: None, checkout=failing):
        if mode.name == "asyncio":
            pool._connection.fail(Disconnected("cut", sent=False))
        await until(lambda: lease.state is LeaseState.JEOPARDY)
    await until(lambda: lease.state is LeaseState.HELD)
    assert failed
    assert await lease.release()


@rule(6)
async def test_a_lease_whose_loss_cannot_be_reported_does_not_keep_others_from_their_reports(mode, clean):
    locks = mode.interlock()
    first = await locks.lock("a", ttl=0.9).acquire()
    second = await locks.lock("b", ttl=0.9).acquire()
    first_real = first._real if mode.name == "threads" else first
    event = second.lost
    object.__setattr__(first_real, "_lost_event", object())  # setting it fails
    clean.flushall()
    await until(event.is_set)


async def test_a_worker_that_could_not_start_starts_the_next_time(mode, clean):
    locks = mode.interlock()
    runtime = mode.session(locks).runtime

    def failing(*_):
        raise RuntimeError("can't start new thread")

    with patched(runtime, spawn=failing), pytest.raises(RuntimeError):
        await locks.lock("a", ttl=3).acquire()
    lease = await locks.lock("b", ttl=3).acquire()
    deadline = lease._grant.hold.deadline
    await until(lambda: lease._grant.hold.deadline > deadline)
    lease.ensure()
    await lease.release()
    await until(lambda: not clean.exists("lock:a"))


@rule(6)
async def test_a_lease_that_a_silent_server_has_cost_blames_no_standstill(mode, clean, proxy):
    lease = await mode.interlock(proxy.url).lock("a", ttl=2).acquire()
    proxy.hold = True
    await until(lambda: lease.state is LeaseState.JEOPARDY and lease._grant.hold.renewal_failing)
    await until(lease.lost.is_set)
    proxy.hold = False
    with pytest.raises(LeaseLost) as caught:
        lease.ensure()
    assert "its ttl passed without a renewal. Stop writing" in str(caught.value)
