"""What a script answers to a message that comes late or twice, or about a lease that is gone: of each kind, by itself.

The tests send the messages themselves, so that no client hides a wrong answer: it sends no message about a lease that
it knows to be lost, and it looks at its own clock. Walks of such messages at random: model/test_scripts.py.
"""

from __future__ import annotations

import time

import pytest

import interlock
from harness.modes import wait_until
from interlock.primitives.codes import BUSY, GRANTED, NOT_FOUND, QUEUED

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("each server", modes="threads")

KINDS = {
    "lock": lambda locks: locks.lock("a"),
    "rlock": lambda locks: locks.rlock("a"),
    "election": lambda locks: locks.election("a"),
    "once": lambda locks: locks.once("a", at_most=60),
    "semaphore": lambda locks: locks.semaphore("a", 1),
    "writer": lambda locks: locks.rwlock("a").write(),
}
TTL_MS, HANDOVER_MS = 30_000, 3_000
A, B, C = (f"host/1/main/{each}" for each in "abc")


class Server:
    """Sends messages about one resource to a server."""

    def __init__(self, client, resource) -> None:
        self.client = client
        self.resource = resource

    def send(self, keys, *args):
        return self.client.eval(self.resource.script.source, len(keys), *keys, *args, "")

    def acquire(self, token, *, ttl=TTL_MS, max_waiters="inf", channel="-"):
        subscribed = int(channel != "-")
        args = (ttl, min(ttl, HANDOVER_MS), subscribed, channel, max_waiters, *self.resource.acquire_args)
        self.reply = self.send(self.resource.keys, "acquire", token, *args)
        return self.reply[0]

    def fence_of(self, token) -> int:
        assert self.acquire(token) == GRANTED
        return self.reply[1]

    def release(self, token, *, tombstone=0) -> bool:
        return self.send(self.resource.keys, "release", token, tombstone, *self.resource.release_args)[0] == 1

    def renew(self, token, ttl=TTL_MS):
        return self.send(self.resource.renew_keys, "renew", token, ttl)[0]

    def left(self, token) -> float:
        """For how many ms the lease of this token lasts; 0 if it has none."""
        key = self.resource.keys[0]
        if self.client.type(key) == b"zset":
            return max(0.0, (self.client.zscore(key, token) or 0.0) - time.time() * 1000)
        return max(1, self.client.pttl(key)) if self.client.get(key) == token.encode() else 0


@pytest.fixture(params=KINDS)
def at(request, server, clean):
    with interlock.Interlock(server.url) as locks:
        yield Server(clean, KINDS[request.param](locks)._primitive)


@rule(8)
def test_a_release_frees_nothing_of_anybody_else(at):
    assert at.acquire(A) == GRANTED
    assert not at.release(B)
    assert at.left(A) > 0
    assert at.acquire(C, max_waiters="0") == BUSY
    assert at.release(A)
    assert at.acquire(C) == GRANTED
    at.release(A)  # a second copy, late
    assert at.left(C) > 0
    assert at.release(C)


@rule(6)
def test_a_renewal_creates_no_lease(at):
    assert at.acquire(A) == GRANTED
    assert at.release(A)
    assert at.renew(A) == NOT_FOUND
    assert at.left(A) == 0
    assert at.acquire(B, ttl=50) == GRANTED
    wait_until(lambda: at.left(B) == 0)
    assert at.renew(B) == NOT_FOUND
    assert at.left(B) == 0
    assert at.acquire(C) == GRANTED
    assert at.renew(A) == at.renew(B) == NOT_FOUND
    assert at.left(A) == at.left(B) == 0 < at.left(C)


@rule(8)
def test_a_renewal_and_a_second_acquire_shorten_no_lease(at):
    assert at.acquire(A) == GRANTED
    assert at.renew(A, 60_000) == GRANTED
    assert at.left(A) > TTL_MS
    assert at.renew(A, 1_000) == GRANTED
    assert at.acquire(A) == GRANTED
    assert at.left(A) > TTL_MS


@rule(8)
def test_an_acquire_of_a_token_that_is_spent_takes_nothing(at):
    assert at.acquire(A) == GRANTED
    assert at.release(A, tombstone=60_000)
    assert at.acquire(A) == NOT_FOUND
    assert at.left(A) == 0
    assert not at.release(B, tombstone=60_000)  # the undo overtakes the acquire
    assert at.acquire(B) == NOT_FOUND
    assert at.acquire(C) == GRANTED
    assert at.acquire(A) == at.acquire(B) == NOT_FOUND  # they don't queue either
    assert at.release(C)
    assert at.acquire(C, max_waiters="0") == GRANTED


@rule(1, 4)
def test_the_oldest_waiter_gets_a_short_lease_until_it_confirms(at):
    assert at.acquire(A) == GRANTED
    if at.acquire(B) == BUSY:
        pytest.skip("nobody waits for a run")
    assert at.acquire(C) == QUEUED
    assert at.release(A)
    assert 0 < at.left(B) < 2 * HANDOVER_MS
    assert at.acquire(C) == QUEUED
    assert at.acquire(B) == GRANTED
    assert at.left(B) > TTL_MS / 2
    assert at.release(B)
    assert 0 < at.left(C) < 2 * HANDOVER_MS


@rule(3)
def test_a_handover_wakes_its_waiter(at):
    with at.client.pubsub() as pubsub:
        pubsub.subscribe("waiters")
        assert pubsub.get_message(timeout=30)["type"] == "subscribe"
        assert at.acquire(A) == GRANTED
        if at.acquire(B, channel="waiters") == BUSY:
            pytest.skip("nobody waits for a run")
        assert at.release(A)
        assert pubsub.get_message(timeout=30)["data"] == f"granted {B}".encode()


@rule(7)
@pytest.mark.parametrize("at", ["lock", "rlock"], indirect=True)
def test_a_fence_that_is_reserved_is_nobody_elses(at):
    seconds_of_fences = 10_000_000
    assert at.acquire(A) == GRANTED
    firsts = [at.send(at.resource.keys, "reserve", A, TTL_MS, seconds_of_fences)[1] for _ in range(2)]
    assert firsts[1] >= firsts[0] + seconds_of_fences
    assert at.release(A)
    assert at.fence_of(B) >= firsts[1] + seconds_of_fences
