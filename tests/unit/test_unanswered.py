"""Since when a server is silent about an attempt: what counts as its answer, and what does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.stubs import StubServer
from interlock._client.core import Core
from interlock._client.grant import AcquireOptions, Attempt, last_answer_counts
from interlock._client.waiting import LocalQueue, Waiters
from interlock._protocol.run import run
from interlock._protocol.timing import FOREVER, RETRY_FOR
from interlock._protocol.types import Disconnected, ServerError, TokenSpent
from interlock.errors import LockError, Unavailable
from interlock.primitives.codes import GRANTED, QUEUED
from interlock.primitives.lock import lock_resource

RESOURCE = lock_resource("a", "lock:")
OPTIONS = AcquireOptions(30.0)


class Server(StubServer):
    """Answers each heartbeat; `answer(clock)` says what becomes of a request."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.waiters = Waiters(self, lambda _due: None, lambda _due: None)
        undo = SimpleNamespace(add=lambda _: None)
        ends = SimpleNamespace(book=SimpleNamespace(runtime=self.runtime), cohorts=None, undo=undo, runtime=self.runtime)
        self.core = Core(self, self.waiters, ends, None, "p", lambda _: ("", None), 30.0)

    def ensure_subscribed(self, key): ...

    def subscription_of(self, _key):
        return "0", "channel"

    async def call_many(self, messages, _until):
        return [[20_000, b"", QUEUED]] * len(messages)

    async def call(self, _script, _keys, _args, _until):
        return await self.answer(self.runtime)


def test_a_heartbeat_that_is_answered_does_not_hide_that_a_request_is_not():
    """The error said "no answer for 0 s", and counted as the answer that another holder has the lock."""

    async def heartbeat_and_silence(clock):
        queue.due = clock.time
        await server.waiters.tick()  # of the worker, whose connection is another one
        clock.time += 2
        raise Disconnected("timed out", sent=True, timed_out=True)

    server = Server(heartbeat_and_silence)
    attempt = Attempt(RESOURCE, "t", OPTIONS)
    queue = server.waiters.queues["lock:a"] = LocalQueue(RESOURCE)
    queue.attempts["t"] = attempt
    with pytest.raises(Unavailable) as caught:
        run(server.core.requests.ask(attempt, ("acquire", "t"), server.runtime.time + 2))
    assert caught.value.waited == pytest.approx(2)
    assert not last_answer_counts(attempt, server.runtime.time)


def test_an_error_reply_ends_the_silence():
    """Else the callers of a cohort, each of which got an error, counted as one silence of the server."""

    async def refuse(clock):
        clock.time += 0.2
        raise ServerError("NOPERM no rights")

    server = Server(refuse)
    attempt = Attempt(RESOURCE, "t", OPTIONS)
    with pytest.raises(LockError):
        run(server.core.requests.ask(attempt, ("acquire", "t"), FOREVER))
    following = Attempt(RESOURCE, "u", OPTIONS)
    following.go_on_for(attempt)
    assert last_answer_counts(following, server.runtime.time + RETRY_FOR)


def test_a_split_vote_that_costs_the_token_is_an_answer():
    silences = []

    async def split_then_grant(clock):
        silences.append(clock.time - attempt.unanswered_since)
        clock.time += 1
        if len(silences) == 1:
            raise TokenSpent
        return [GRANTED, 7]

    server = Server(split_then_grant)
    attempt = Attempt(RESOURCE, "t", OPTIONS)
    assert run(server.core.acquire(attempt)) == 7
    assert silences == [0, 0]
