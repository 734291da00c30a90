"""Tasks that are queued once: whatever becomes of the message, the worker, or the process that queues it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import TaskRevokedError, TimeLimitExceeded
from celery.signals import task_failure
from kombu.exceptions import OperationalError

from frameworks.celery_worker import LONG, project, worker
from harness.modes import wait_until
from harness.servers import Node
from interlock import ConfigError, Interlock, Unavailable
from interlock.contrib.celery import Unique, is_skipped, locks_of
from interlock.contrib.celery.unique import Claim


@pytest.fixture
def shop(node, monkeypatch):
    """The user's tasks, on a server of this test alone. No worker runs yet."""
    with node:
        made = project(monkeypatch, node)
        yield made
        locks_of(made.app).close()
        made.witness.close()
        made.app.close()


def waiting(shop) -> int:
    """How many messages wait in the queue."""
    return shop.witness.llen("celery")


def began(shop, day="monday", times=1):
    wait_until(lambda: shop.witness.llen(f"reports:{day}") >= times)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"at_most": 60}, "has no unique=, the name of which only one is queued"),
        ({"unique": "report:{day}"}, "has no at_most=: the seconds after which"),
        ({"unique": "report:{week}", "at_most": 60}, "needs 'week', but .* has no such argument. It has day"),
        ({"unique": "report:{day}", "at_most": 0}, "at_most must be at least 0.01"),
        ({"unique": "report:{day}", "at_most": timedelta(hours=1)}, "give its .total_seconds"),
        ({"unique": "report:{day}", "at_most": 60, "time_limit": 90}, "may run for 90 s .* unique for 60 s only"),
    ],
)
def test_a_wrong_option_is_an_error_when_the_app_is_finalized(options, said):
    app = Celery("shop", set_as_current=False)

    @app.task(base=Unique, shared=False, **options)
    def report(day):
        """A task."""

    with pytest.raises(ConfigError, match=f"the unique task .*{said}"):
        app.finalize()


def test_a_second_one_is_the_first_while_it_waits_and_while_it_runs(shop, node, tmp_path):
    shop.witness.set("hold", 1)
    first = shop.report.delay("monday", -1)
    assert shop.report.delay("monday") == first
    assert shop.report.apply_async(("monday",), countdown=5) == first
    assert waiting(shop) == 1
    assert shop.report.delay("sunday").id != first.id
    with worker(node, tmp_path, "-c", "2"):
        began(shop)
        assert shop.report.delay("monday") == first
        shop.witness.delete("hold")
        assert first.get(timeout=LONG) == "monday"
        second = shop.report.delay("monday")
        assert second.id != first.id
        assert second.get(timeout=LONG) == "monday"
    assert shop.witness.llen("reports:monday") == 2


def test_however_a_task_ends_the_next_one_is_queued(shop, node, tmp_path):
    with worker(node, tmp_path, "-c", "2"):
        for end in ("well", "badly", "ignored", "rejected"):
            done = shop.report.delay(end, 0, end)
            began(shop, end)
            wait_until(lambda end=end, done=done: shop.report.delay(end, 0, end).id != done.id)

        limited = shop.report.apply_async(("limited", 60), time_limit=1)
        with pytest.raises(TimeLimitExceeded):
            limited.get(timeout=LONG)
        wait_until(lambda: shop.report.delay("limited").id != limited.id)

        terminated = shop.report.delay("terminated", 60)
        began(shop, "terminated")
        terminated.revoke(terminate=True)
        with pytest.raises(TaskRevokedError):
            terminated.get(timeout=LONG)
        wait_until(lambda: shop.report.delay("terminated").id != terminated.id)


def test_a_task_that_is_retried_or_redelivered_stays_the_first(shop, node, tmp_path):
    with worker(node, tmp_path, "-c", "2"):
        retried = shop.report.delay("tuesday", 0, "retried")
        for times in (1, 2, 3):
            began(shop, "tuesday", times)
            assert times == 3 or shop.report.delay("tuesday") == retried
        assert retried.get(timeout=LONG) == "tuesday"

        shop.witness.set("hold", 1)
        killed = shop.report.delay("friday", -1)
        began(shop, "friday")
        os.kill(int(shop.witness.get("pid:friday")), signal.SIGKILL)
        began(shop, "friday", 2)
        assert shop.report.delay("friday") == killed
        shop.witness.delete("hold")
        assert killed.get(timeout=LONG) == "friday"
        assert shop.report.delay("friday").id != killed.id


def test_a_task_that_calls_itself_as_a_function_keeps_its_claim(shop, node, tmp_path):
    with worker(node, tmp_path, "-c", "1"):
        shop.witness.set("hold", 1)
        first = shop.parts.delay("monday")
        wait_until(lambda: shop.witness.llen("parts:monday"))
        assert shop.parts.delay("monday") == first
        shop.witness.delete("hold")
        assert first.get(timeout=LONG) == 1


def test_a_task_whose_message_is_requeued_after_its_time_limit_keeps_its_claim(shop):
    """Celery's worker says that it has failed, and runs it again."""
    for task, is_kept in ((shop.slow, True), (shop.report, False)):
        first = task.delay("monday")
        limit = TimeLimitExceeded(1)
        task_failure.send(sender=task, task_id=first.id, exception=limit, args=("monday",), kwargs={})
        assert (task.delay("monday") == first) is is_kept


def test_a_found_first_one_is_returned_though_the_lock_of_its_claim_is_lost(shop, node, monkeypatch):
    first = shop.report.delay("monday")
    held = Claim.held

    @contextlib.contextmanager
    def revoked(claim):
        with held(claim) as found, Interlock(node.tcp_url, max_ttl=3) as locks:
            assert locks.lock("unique:report:monday").revoke("as wanted", force=True)
            yield found

    monkeypatch.setattr(Claim, "held", revoked)
    assert shop.report.delay("monday") == first


def test_a_waiting_task_that_is_revoked_or_expires_ends_its_claim_when_its_worker_drops_it(shop, node, tmp_path):
    expired = shop.report.apply_async(("sunday",), expires=0.01)
    with worker(node, tmp_path, "-c", "1"):
        with pytest.raises(TaskRevokedError):
            expired.get(timeout=LONG)
        wait_until(lambda: shop.report.delay("sunday").id != expired.id)
        shop.witness.set("hold", 1)
        busy = shop.report.delay("busy", -1)
        began(shop, "busy")
        revoked = shop.report.delay("saturday")
        revoked.revoke()
        assert shop.report.delay("saturday") == revoked
        shop.witness.delete("hold")
        assert busy.get(timeout=LONG) == "busy"
        with pytest.raises(TaskRevokedError):
            revoked.get(timeout=LONG)
        wait_until(lambda: shop.report.delay("saturday").id != revoked.id)
        began(shop, "saturday")
    assert expired.id not in shop.witness.lrange("reports:sunday", 0, -1)
    assert revoked.id not in shop.witness.lrange("reports:saturday", 0, -1)


def test_a_lost_message_keeps_others_back_for_at_most_its_time(shop):
    lost = shop.brief.delay("monday")
    shop.app.control.purge()
    assert not waiting(shop)
    assert shop.brief.delay("monday") == lost
    started = time.monotonic()
    wait_until(lambda: shop.brief.delay("monday").id != lost.id)
    assert time.monotonic() - started < 2 + 1
    assert waiting(shop) == 1


def test_forget_lets_the_next_one_be_queued_at_once(shop):
    lost = shop.report.delay("monday")
    shop.app.control.purge()
    assert shop.report.forget("monday")
    assert not shop.report.forget("monday")
    assert shop.report.delay("monday").id != lost.id


def test_a_late_task_does_not_end_the_claim_of_its_successor(shop, node, tmp_path):
    with worker(node, tmp_path, "-c", "1"):
        shop.witness.set("hold", 1)
        first = shop.report.delay("monday", -1)
        began(shop)
        assert shop.report.forget("monday")  # as if its time were over
        second = shop.report.delay("monday", 60)
        assert second.id != first.id
        shop.witness.delete("hold")
        assert first.get(timeout=LONG) == "monday"
        assert shop.report.delay("monday") == second


def test_a_start_after_the_end_of_the_claim_is_refused(shop):
    for late in ({"countdown": 31}, {"eta": datetime.now(UTC) + timedelta(seconds=60)}):
        with pytest.raises(ConfigError, match=r"would begin in \d+ s, and is unique for 30 s \(at_most\)"):
            shop.report.apply_async(("monday",), **late)
    assert shop.report.apply_async(("monday",), countdown=29) == shop.report.delay("monday")
    assert shop.report.forget("monday")


def test_second_ones_in_a_canvas_are_skipped_and_nobody_waits_for_ever(shop, node, tmp_path):
    with worker(node, tmp_path, "-c", "2"):
        shop.witness.set("hold", 1)
        first = shop.report.delay("monday", -1)
        began(shop)
        same = shop.report.s("monday")
        grouped = group(same, shop.report.s("sunday")).apply_async()
        counted = chord([same, same], shop.total.s()).apply_async()
        chained = chain(same, shop.told.s()).apply_async()
        linked = same.apply_async(link=shop.told.s())
        mine = same.apply_async(task_id="mine")
        skipped = [grouped.get(timeout=LONG)[0], *counted.get(timeout=LONG), chained.get(timeout=LONG)[1]]
        skipped += [linked.get(timeout=LONG), mine.get(timeout=LONG)]
        assert [each["by"] for each in skipped if is_skipped(each)] == [first.id] * 6
        shop.witness.delete("hold")
        assert first.get(timeout=LONG) == "monday"
    assert shop.witness.llen("reports:monday") == 1


def test_a_task_that_was_not_sent_keeps_nobody_back(node, monkeypatch):
    with node, Node() as locks:
        conf = json.dumps({"result_backend": "cache+memory://"})
        broken = project(monkeypatch, node, LOCKS=locks.url, CONF=conf)
        node.kill()
        with pytest.raises((OperationalError, OSError)):
            broken.report.apply_async(("monday",), retry=False)
        node.restart()
        sent = broken.report.delay("monday")
        assert waiting(broken) == 1
        locks.kill()
        with pytest.raises(Unavailable):
            broken.report.delay("sunday")
        assert waiting(broken) == 1
        assert sent.id
        locks_of(broken.app).close()
        broken.witness.close()
        broken.app.close()


def test_a_retry_and_the_next_of_a_chain_are_sent_though_the_server_of_the_locks_is_away(node, tmp_path, monkeypatch):
    with node, Node() as locks:
        shop = project(monkeypatch, node, LOCKS=locks.url)
        with worker(node, tmp_path, "-c", "1", env={"LOCKS": locks.url}) as one:
            shop.witness.set("hold", 1)
            retried = shop.report.delay("monday", -1, "retried once")
            chained = chain(shop.pause.s(), shop.report.si("sunday")).apply_async()
            began(shop)
            locks.kill()
            shop.witness.delete("hold")
            assert retried.get(timeout=LONG) == "monday"
            assert chained.get(timeout=LONG) == "sunday"
            one.says("is queued without a claim, since its message must not be lost", times=2)
        assert shop.witness.lrange("reports:monday", 0, -1) == [retried.id] * 2
        locks_of(shop.app).close()
        shop.witness.close()
        shop.app.close()


def test_a_retry_whose_claim_has_run_out_and_belongs_to_another_one_does_its_work(shop, node, tmp_path):
    with worker(node, tmp_path, "-c", "1"):
        shop.witness.set("hold", 1)
        first = shop.report.delay("monday", -1, "retried once")
        began(shop)
        assert shop.report.forget("monday")  # as if its time were over
        second = shop.report.apply_async(("monday",), countdown=25)
        shop.witness.delete("hold")
        assert first.get(timeout=LONG) == "monday"
        assert shop.report.delay("monday") == second


QUEUE_ONE = "from frameworks.celery_app import report; print('sent', report.delay('monday').id)"


@pytest.mark.parametrize(("when", "messages"), [("before", 0), ("after", 1)])
def test_a_process_that_dies_while_it_queues_loses_nothing_and_keeps_nobody_back(shop, node, start, when, messages):
    """Before the message is sent, nothing is there. After it, another one may be queued beside the message."""
    dying = start("-c", QUEUE_ONE, env={"BROKER": node.tcp_url, "DIE": f"{when} frameworks.celery_app.report"})
    assert dying.ended() == -signal.SIGKILL
    assert waiting(shop) == messages
    started = time.monotonic()
    sent = shop.report.delay("monday")
    assert time.monotonic() - started < 2 + 1 + 4  # the ttl of the lock of a claim, and a second; a busy machine
    assert shop.report.delay("monday") == sent
    assert waiting(shop) == messages + 1


def test_many_processes_that_queue_at_once_queue_one(shop, node, start):
    several = [start("-c", QUEUE_ONE, env={"BROKER": node.tcp_url}) for _ in range(6)]
    ids = {each.says("sent .*")[0] for each in several}
    assert len(ids) == waiting(shop) == 1


def test_a_unique_task_leaves_no_key_without_a_ttl(shop, node):
    shop.report.delay("monday")
    ours = list(shop.witness.scan_iter("*lock:*"))
    assert ours
    assert not [key for key in ours if shop.witness.ttl(key) == -1]
    with Interlock(node.tcp_url) as locks:
        assert locks.lock("unique:report:monday").inspect().holder is None
