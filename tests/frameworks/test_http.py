"""The answer to a request whose lock is busy, lost or unavailable, which all web frameworks share."""

from __future__ import annotations

import json
import os

import pytest

from interlock import Interlock
from interlock.contrib.http import ANSWERED, answer_to, retry_after
from interlock.errors import AcquireTimeout, BrokenBarrier, ConfigError, Deadlock, LeaseLost, NotHeld, Unavailable


def named(kind, **fields):
    error = kind("cart:7 is held by web-3/4711/worker/0af1 on 10.0.0.3:6379, at /srv/shop/cart.py:12")
    error.name = "cart:7"
    for name, value in fields.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("error", "status", "title"),
    [
        (named(AcquireTimeout), 423, "Locked"),
        (named(Unavailable), 503, "Service Unavailable"),
        (named(LeaseLost), 503, "Service Unavailable"),
        (named(BrokenBarrier), 503, "Service Unavailable"),
        (named(ConfigError), 500, "Internal Server Error"),
        (named(Deadlock), 500, "Internal Server Error"),
        (named(NotHeld), 500, "Internal Server Error"),
    ],
)
def test_each_error_has_a_status_and_a_problem_that_names_the_lock_only(error, status, title):
    answer = answer_to(error)
    problem = json.loads(answer.body)
    assert (answer.status, problem["status"], problem["title"]) == (status, status, title)
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert problem["detail"] == error.public_text
    assert problem["lock"] == "cart:7"
    assert isinstance(error, ANSWERED) == (status != 500)
    for secret in ("web-3", "4711", "0af1", "10.0.0.3", "/srv"):
        assert secret.encode() not in answer.body


def test_busy_can_be_a_conflict():
    assert answer_to(named(AcquireTimeout), busy=409).status == 409
    assert answer_to(named(Unavailable), busy=409).status == 503


def test_an_error_about_no_lock_has_no_name():
    assert "lock" not in json.loads(answer_to(Unavailable("redis://10.0.0.3 does not answer")).body)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (named(AcquireTimeout, waited=0.0, remaining=29.0), 1),  # did not wait: the holder may be done in a moment
        (named(AcquireTimeout, waited=2.0, remaining=29.0), 2),
        (named(AcquireTimeout, waited=2.4, remaining=None), 3),
        (named(AcquireTimeout, waited=10.0, remaining=3.2), 4),  # a dead holder has lost it by then
        (named(AcquireTimeout, waited=600.0, remaining=3600.0), 60),
        (named(AcquireTimeout, waited=0.0, remaining=12.1, quarantined=True), 13),
        (named(Unavailable, waited=0.0), 1),
        (named(Unavailable, waited=1e9), 60),
        (named(LeaseLost), None),  # what it did is half done
        (named(BrokenBarrier), None),
        (named(ConfigError), None),
    ],
)
def test_a_client_may_try_again_after_a_whole_number_of_seconds_if_nothing_was_done(error, seconds):
    assert retry_after(error) == seconds
    assert answer_to(error).headers.get("Retry-After") == (None if seconds is None else str(seconds))


def test_a_real_holder_is_not_in_the_answer(server):
    with Interlock(server.url) as locks:
        lease = locks.lock("cart:7").acquire()
        with pytest.raises(AcquireTimeout) as busy:
            locks.lock("cart:7", timeout=1.2).acquire()
        answer = answer_to(busy.value)
        lease.release()
    assert lease.token in str(busy.value)  # so that this test can fail
    assert (answer.status, answer.headers["Retry-After"]) == (423, "2")
    for secret in (lease.token, os.uname().nodename, str(os.getpid()), server.url, __file__):
        assert secret not in answer.body.decode()
