"""Since when a server is silent about an attempt: what counts as its answer, and what does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.stubs import StubServer
from interlock._client.acquiring import Core
from interlock._client.cohort import OTHERS_WAIT, Cohort
from interlock._client.error_texts import unavailable_error
from interlock._client.grant import AcquireOptions, Attempt, last_answer_counts
from interlock._client.retries import Requests
from interlock._client.waiting import LocalQueue, Waiters
from interlock._protocol.run_to_end import run
from interlock._protocol.server import ONLY_ROUTE, Disconnected, ServerError, TokenSpent
from interlock._protocol.timing import ANSWER_COUNTS_FOR, COUNTS_ONCE_FOR, FOREVER, RETRY_FOR, SHORT_SILENCE
from interlock.errors import LockError, Unavailable
from interlock.primitives.barrier import barrier_resource
from interlock.primitives.codes import GRANTED, QUEUED
from interlock.primitives.lock import lock_resource
from interlock.primitives.messages import Queued

RESOURCE = lock_resource("a", "lock:")
OPTIONS = AcquireOptions(30.0)


class Server(StubServer):
    """Answers each heartbeat; `answer(clock)` says what becomes of a request."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.waiters = Waiters(self, lambda _due: None, lambda _due: None)
        undo = SimpleNamespace(add=lambda _: None, owed={})
        ends = SimpleNamespace(
            book=SimpleNamespace(runtime=self.runtime), cohorts=None, undo=undo, runtime=self.runtime
        )
        self.core = Core(Requests(self), self.waiters, ends, None, "p", lambda _: ("", None), 30.0)

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
        run(server.core.requests.ask_until_answered(attempt, ("acquire", "t"), server.runtime.time + 2))
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
        run(server.core.requests.ask_until_answered(attempt, ("acquire", "t"), FOREVER))
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


@pytest.mark.parametrize(
    ("waited", "unanswered", "answered", "told", "says"),
    [
        (0.005, 0.002, 1.0, False, True),
        (0.005, 0.003, 1.0, False, False),  # for most of its time nobody was before it
        (0.005, 0.002, ANSWER_COUNTS_FOR, False, False),  # the server may be away
        (5.0, SHORT_SILENCE, 1.0, False, False),
        (5.0, 1.0, 9.0, True, True),  # the server said that another holder has it
        (5.0, ANSWER_COUNTS_FOR, 9.0, True, False),
        (-FOREVER, 0.002, 1.0, False, False),  # it waited for nobody
    ],
)
def test_what_kept_a_caller_out_whose_time_is_over(waited, unanswered, answered, told, says):
    server = Server(None)
    now = server.runtime.time
    attempt = Attempt(RESOURCE, "t", OPTIONS)
    attempt.waits_since, attempt.unanswered_since = now - waited, now - unanswered
    server.core.requests.answered[ONLY_ROUTE.node] = now - answered
    attempt.last_queued = Queued(b"h", 5000, False) if told else None
    blocking = server.core._blocking(attempt, now)
    assert (blocking is not None) == says
    if says:
        assert blocking.holder == (b"h" if told else b"")


def test_a_driver_that_has_asked_nothing_for_long_is_no_reason_to_skip_work():
    """It is its turn, but a signal handler runs in its thread, say: nobody has the lock, and nobody asks for it."""
    driver, attempt = Attempt(RESOURCE, "d", OPTIONS), Attempt(RESOURCE, "t", OPTIONS)
    cohort = Cohort(driver)
    cohort.arrive(attempt, 1.0)
    assert cohort.blocking(1.09, 1.085, answered=True) is OTHERS_WAIT
    assert cohort.blocking(1.11, 1.105, answered=True) is None


def test_each_request_with_a_reply_is_noted_and_no_other():
    async def answer(clock):
        if clock.time > 0:
            raise Disconnected("timed out", sent=True, timed_out=True)
        return [GRANTED, 7]

    server = Server(answer)
    requests = server.core.requests
    assert not requests.has_answered(RESOURCE, server.runtime.time)
    run(requests.ask_until_answered(Attempt(RESOURCE, "t", OPTIONS), ("acquire", "t"), FOREVER))
    server.runtime.time += 1
    assert requests.has_answered(RESOURCE, server.runtime.time)
    with pytest.raises(Unavailable):
        run(requests.ask_until_answered(Attempt(RESOURCE, "t", OPTIONS), ("acquire", "t"), server.runtime.time))
    server.runtime.time += 1
    assert not requests.has_answered(RESOURCE, server.runtime.time)


@pytest.mark.parametrize(
    ("seconds", "says"), [(1.3e-05, "less than 1 ms"), (0.0031, "3 ms"), (0.12, "0.12 s"), (5.0, "5 s"), (61.2, "61 s")]
)
def test_a_timeout_that_was_too_short_says_so(seconds, says):
    cause = Disconnected("Timeout reading from socket", sent=True, timed_out=True)
    text = str(unavailable_error(RESOURCE, 1000 - seconds, "redis://there", 1000, cause))
    assert says in text
    assert ("Give it more time" in text) == (seconds < SHORT_SILENCE)
    assert ("Is the server up" in text) == (seconds >= SHORT_SILENCE)
    refused = str(unavailable_error(RESOURCE, 1000 - seconds, "redis://there", 1000, Disconnected("no", sent=False)))
    assert f"no answer from redis://there for {says} (no). Is the server up" in refused


def test_an_arrival_at_a_barrier_is_sent_again_for_as_long_as_the_server_knows_it():
    """Sent after that, it would count as another party: the server remembers an arrival for 60 s."""
    asked = []

    async def lost(clock):
        asked.append(clock.time)
        clock.time += 1
        raise Disconnected("timed out", sent=True, timed_out=True)

    server = Server(lost)
    server.has_answered = True
    first = Attempt(barrier_resource("b", "lock:", 2), "t", until=1000.0)
    with pytest.raises(Unavailable):
        run(server.core.requests.ask_until_answered(first, (), first.until))
    assert 10 < asked[-1] - asked[0] <= COUNTS_ONCE_FOR
    asked.clear()
    queued = Attempt(barrier_resource("b", "lock:", 2), "t", until=1000.0)
    queued.generation = "1"  # it asks what became of it
    with pytest.raises(Unavailable):
        run(server.core.requests.ask_until_answered(queued, (), queued.until))
    assert asked[-1] - asked[0] > 100
