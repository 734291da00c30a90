"""The Celery app of the tests, as a user would write it: workers, beats and tests import it. $BROKER is its broker.

Its tasks write into the broker's server what a test counts: who is inside of which lock, and how often each has run.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time

import redis
from celery import Celery
from celery.exceptions import Ignore, Reject
from celery.signals import after_task_publish, before_task_publish

from harness.processes import lives
from interlock.contrib.celery import Unique, current_lease, locked

BROKER = os.environ["BROKER"]
LOCKS = os.environ.get("LOCKS", BROKER)
TTL = float(os.environ.get("TTL", "2"))  # seconds

app = Celery("shop", broker=BROKER, backend=BROKER)
app.conf.update(
    interlock_url=LOCKS or None,
    interlock_options={"max_ttl": max(3.0, TTL)},
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_transport_options={"visibility_timeout": 60},
)
app.conf.update(json.loads(os.environ.get("CONF", "{}")))
task = functools.partial(app.task, shared=False)  # a test process makes this app again for each test
witness = redis.Redis.from_url(BROKER, decode_responses=True)


class Inside:
    """Who is inside: two that live at once are an overlap. Who was killed inside has left."""

    def __init__(self, name: str) -> None:
        self.key = f"inside:{name}"

    def __enter__(self) -> None:
        mine = f"{os.getpid()}:{time.monotonic_ns()}"
        with witness.pipeline() as both:  # at once: a test kills who is inside
            both.set(self.key, mine, get=True)
            both.rpush(f"began:{self.key}", mine)
            other, _ = both.execute()
        if other is not None and lives(int(other.split(":")[0])):
            witness.rpush("overlaps", f"{self.key} {other} {mine}")

    def __exit__(self, *_: object) -> None:
        witness.delete(self.key)


@task(bind=True)
@locked("pay:{user_id}", busy="retry", ttl=TTL)
def pay(self, user_id, seconds=0.0, fails=False):
    """Runs for so many seconds, or as long as the key `hold` exists if they are negative."""
    with Inside(f"pay:{user_id}"):
        end = time.monotonic() + seconds
        while time.monotonic() < end or (seconds < 0 and witness.exists("hold")):
            time.sleep(0.01)
        current_lease().ensure()
        if fails:
            raise ZeroDivisionError("as wanted")
    witness.rpush("paid", f"{user_id} {self.request.id}")
    return {"user": user_id, "fence": current_lease().fence, "retries": self.request.retries}


@task(max_retries=1, retry_backoff=1, retry_jitter=False)
@locked("pay:{user_id}", busy="retry", ttl=TTL)
def pay_soon(user_id):
    return user_id


@task(max_retries=None)
@locked("pay:{user_id}", busy="retry", ttl=TTL)
def pay_at_last(user_id):
    with Inside(f"pay:{user_id}"):
        time.sleep(0.02)
    return user_id


@task()
@locked("pay:{user_id}", busy="skip", ttl=TTL)
def pay_or_skip(user_id):
    return user_id


@task()
@locked("pay:{user_id}", busy="raise", ttl=TTL)
def pay_or_raise(user_id):
    return user_id


@task()
@locked("pay:{user_id}", busy="raise", timeout=20, ttl=TTL)
def pay_after_a_wait(user_id):
    return user_id


@task()
@locked("pay:{user_id}", busy=-1, ttl=TTL)
def pay_or_minus_one(user_id):
    return user_id


@task()
@locked(lambda user_id: f"pay:{user_id}", busy=lambda skipped: f"no {skipped.name}", ttl=TTL)
def pay_or_say(user_id):
    return user_id


@task()
def pause():
    """What a test lets run before the next one of a chain."""


@task()
def told(result):
    return ["told", result]


@task()
def total(results):
    return results


@task(base=Unique, unique="report:{day}", at_most=30, bind=True)
def report(self, day, seconds=0.0, ends="well"):
    witness.set(f"pid:{day}", os.getpid())
    witness.rpush(f"reports:{day}", self.request.id)
    end = time.monotonic() + seconds
    while time.monotonic() < end or (seconds < 0 and witness.exists("hold")):
        time.sleep(0.01)
    if ends == "badly":
        raise ZeroDivisionError("as wanted")
    if ends == "ignored":
        raise Ignore
    if ends == "rejected":
        raise Reject("as wanted", requeue=False)
    if ends == "retried" and self.request.retries < 2:
        raise self.retry(countdown=1)
    if ends == "retried once" and not self.request.retries:
        raise self.retry(countdown=0)
    return day


@task(base=Unique, unique="parts:{day}", at_most=30)
def parts(day, depth=1):
    """Calls itself as a function, and then runs on."""
    if depth:
        parts(day, depth - 1)
        witness.rpush(f"parts:{day}", parts.request.id)
        while witness.exists("hold"):
            time.sleep(0.01)
    return depth


@task(base=Unique, unique="slow:{day}", at_most=30, acks_on_failure_or_timeout=False)
def slow(day):
    return day


@task(base=Unique, unique="brief:{day}", at_most=2)
def brief(day, seconds=0.0):
    time.sleep(seconds)
    return day


@task(ignore_result=True)
def mark(what):
    return what


# A process that dies while it sends: $DIE is "before" or "after" and the name of the task whose message is sent.
when, _, whose = os.environ.get("DIE", "").partition(" ")


def die(sender=None, **_):
    if sender == whose and witness.set("died", os.getpid(), nx=True):  # once
        os.kill(os.getpid(), signal.SIGKILL)


if when:
    {"before": before_task_publish, "after": after_task_publish}[when].connect(die)
