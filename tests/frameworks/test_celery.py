"""Tasks under a lock: real workers of each pool, a real broker, real kills."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

from frameworks.celery_worker import LONG, client_of, lives_of, project, worker
from harness.modes import wait_until
from harness.servers import Node
from interlock import AcquireTimeout, ConfigError, Interlock, LeaseLost, NotHeld
from interlock.contrib.celery import current_lease, is_skipped, locked, locks_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# Without a worker


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "pay:{user}"}, r"needs 'user', but .*task\(\) has no such argument. It has user_id"),
        ({"name": "pay:{}"}, "write {user_id}, not {}"),
        ({"name": "pay:{user_id}", "busy": "wait"}, "To wait in the worker: timeout= in seconds"),
        ({"name": "pay:{user_id}", "busy": "ignore"}, "busy must be 'retry', 'skip', 'raise'"),
        ({"name": "pay:{user_id}", "busy": ValueError}, "would be returned, not raised"),
        ({"name": "pay:{user_id}", "timeout": None}, "a task that waits for ever takes its worker"),
        ({"name": "pay:{user_id}", "timeout": -1}, "timeout must be at least 0"),
        ({"name": "pay:{user_id}", "lease": 3}, "there is no option 'lease'. It has busy, timeout, locks, ttl"),
        ({"name": "pay:{user_id}", "ttl": 60, "locks": Interlock("redis://localhost")}, "ttl must be at most max_ttl"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_an_error_when_the_task_is_defined(options, said):
    def task(user_id):
        """A task."""

    with pytest.raises(ConfigError, match=said):
        locked(**options)(task)


def test_locked_over_the_task_says_where_it_belongs():
    app = Celery("shop", set_as_current=False)
    with pytest.raises(ConfigError, match=r"locked\('pay'\) decorates the function .* put @locked below @app.task"):

        @locked("pay")
        @app.task(shared=False)
        def pay():
            """A task."""


def test_an_async_def_is_no_task():
    with pytest.raises(ConfigError, match="is an `async def`"):

        @locked("pay")
        async def pay():
            """No task."""


@pytest.mark.parametrize(
    ("broker", "said"),
    [
        ("amqp://guest:secret@localhost//", r"'shop' does not say .* broker \(amqp://guest:\*\*@localhost.*can't have"),
        ("redis://:secret@localhost/0", r"broker is \(redis://:\*\*@localhost.*interlock_url = app.conf.broker_url"),
    ],
)
def test_an_app_that_does_not_say_where_its_locks_are_has_none(monkeypatch, broker, said):
    monkeypatch.delenv("INTERLOCK_URL", raising=False)
    with pytest.raises(ConfigError, match=said) as error:
        locks_of(Celery("shop", broker=broker, set_as_current=False))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"interlock_url": "amqp://localhost"}, "interlock_url of the Celery app 'shop': "),
        ({"interlock_url": "redis://localhost", "interlock_options": 3}, "interlock_options must be a dict"),
        ({"interlock_url": "redis://localhost", "interlock_options": {"prefx": ""}}, "interlock_options of .* 'prefx'"),
        ({"interlock_url": "redis://localhost", "interlock_options": {"max_ttl": 0}}, "max_ttl must be at least"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(settings, said):
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    with pytest.raises(ConfigError, match=said):
        locks_of(app)


def test_settings_have_the_namespace_of_the_app(monkeypatch):
    class Settings:
        CELERY_INTERLOCK_URL = "redis://localhost:6390/0"
        CELERY_INTERLOCK_OPTIONS = {"prefix": "shop:"}  # noqa: RUF012

    app = Celery("shop", set_as_current=False)
    app.config_from_object(Settings, namespace="CELERY")
    assert locks_of(app).prefix == "shop:"
    assert "6390" in repr(locks_of(app))
    assert locks_of(app) is locks_of(app)
    monkeypatch.setenv("INTERLOCK_URL", "redis://localhost:6391/0")
    assert "6391" in repr(locks_of(Celery("other", set_as_current=False)))


def test_an_eager_task_and_a_direct_call_hold_the_lock(server):
    app = Celery("shop", set_as_current=False)
    app.conf.update(interlock_url=server.url, task_always_eager=True)

    @app.task(max_retries=1, shared=False)
    @locked("eager:{user_id}", busy="retry")
    def pay(user_id):
        return current_lease().name

    with Interlock(server.url) as others:
        assert pay.delay(7).get() == pay(7) == "eager:7"
        with pytest.raises(TypeError, match="user_id"):
            pay.delay()
        with others.lock("eager:7"):
            with pytest.raises(AcquireTimeout, match="eager:7"):
                pay(7)
            assert isinstance(pay.delay(7).result, AcquireTimeout)
    with pytest.raises(NotHeld, match="no task with @locked runs here"):
        current_lease()
    locks_of(app).close()


def test_a_worker_whose_tasks_have_no_locks_ends_at_its_start_and_says_why(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "INTERLOCK_URL"}
    ended = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "frameworks.celery_app", "worker", "-P", "solo"], cwd=tmp_path,
        env=environment | {"BROKER": "redis://127.0.0.1:1/0", "LOCKS": ""},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(
        "interlock.contrib.celery: the Celery app 'shop' does not say where"
    )


# One worker of processes, which one process of pytest starts

shared = pytest.mark.xdist_group("a Celery worker")


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A worker with three processes, and a client of it."""
    with Node() as node, worker(node, tmp_path_factory.mktemp("shop"), "-c", "3", env={"TTL": "20"}) as command:
        yield client_of(node), command


@pytest.fixture
def tasks(shop):
    client, _ = shop
    client.witness.flushall()
    return client


@contextmanager
def paying(tasks, user_id):
    """A task holds the lock of this user as long as this lasts."""
    tasks.witness.set("hold", 1)
    result = tasks.send("pay", user_id, -1)
    wait_until(lambda: tasks.witness.exists(f"inside:pay:{user_id}"))
    yield result
    tasks.witness.delete("hold")
    assert result.get(timeout=LONG)["user"] == user_id


@shared
def test_a_busy_task_is_retried_until_it_gets_the_lock(tasks):
    with paying(tasks, 1) as first:
        second = tasks.send("pay", 1)
        wait_until(lambda: second.state == "RETRY")
        assert isinstance(second.result, AcquireTimeout)  # through JSON
    got = second.get(timeout=LONG)
    assert got["retries"] > 0
    assert got["fence"] > first.get()["fence"]
    assert not tasks.overlaps()


@shared
def test_a_task_that_is_busy_for_too_long_fails_after_its_max_retries(tasks):
    with paying(tasks, 1):
        failed = tasks.send("pay_soon", 1)
        with pytest.raises(AcquireTimeout, match="'pay:1' is not free"):
            failed.get(timeout=LONG)
        assert failed.state == "FAILURE"


@shared
def test_a_busy_task_is_skipped_raises_or_returns_a_value(tasks):
    with paying(tasks, 1):
        names = ("pay_or_skip", "pay_or_minus_one", "pay_or_say", "pay_or_raise")
        skipped, minus_one, said, raised = (tasks.send(name, 1) for name in names)
        assert minus_one.get(timeout=LONG) == -1
        assert said.get(timeout=LONG) == "no pay:1"
        with pytest.raises(AcquireTimeout):
            raised.get(timeout=LONG)
        assert is_skipped(skipped.get(timeout=LONG))
        assert skipped.get()["name"] == "pay:1"
        assert tasks.send("pay_or_skip", 2).get(timeout=LONG) == 2
        assert not is_skipped(2)
        waits = tasks.send("pay_after_a_wait", 1)
        wait_until(lambda: tasks.locks.lock("pay:1").inspect().waiters)
    assert waits.get(timeout=LONG) == 1


def test_no_work_is_skipped_in_the_quarantine_after_a_restart_of_the_locks_server(node, monkeypatch):
    with node, Node() as locks:
        shop = project(monkeypatch, node, LOCKS=locks.url, CONF='{"task_always_eager": true}')
        monkeypatch.setattr(shop.app.conf, "interlock_options", {"max_ttl": 20})
        with locks_of(shop.app).lock("pay:1", ttl=2):
            assert is_skipped(shop.pay_or_skip.delay(1).get())
        locks.kill()
        locks.restart()
        for task in (shop.pay_or_skip, shop.pay_or_minus_one, shop.pay_or_say):
            with pytest.raises(AcquireTimeout) as error:
                task.delay(1).get()
            assert error.value.quarantined
        locks_of(shop.app).close()
        shop.witness.close()
        shop.app.close()


@shared
def test_a_skipped_task_breaks_no_chain_group_or_chord(tasks):
    with paying(tasks, 1):
        one, other = tasks.signature("pay_or_skip", 1), tasks.signature("pay_or_skip", 2)
        told, total = tasks.signature("told"), tasks.signature("total")
        chained, grouped = chain(one, told).apply_async(), group(one, other).apply_async()
        counted = chord([one, other], total).apply_async()
        word, result = chained.get(timeout=LONG)
        assert word == "told"
        assert is_skipped(result)
        for results in (grouped.get(timeout=LONG), counted.get(timeout=LONG)):
            assert is_skipped(results[0])
            assert results[1] == 2


ENDS = {
    "success": (dict, {}),
    "failure": (ZeroDivisionError, {}),
    "soft time limit": (SoftTimeLimitExceeded, {"soft_time_limit": 1}),
    "hard time limit": (TimeLimitExceeded, {"time_limit": 1}),
    "terminated": (TaskRevokedError, {}),
}


@shared
@pytest.mark.parametrize("end", ENDS)
def test_however_a_task_ends_its_lock_is_free_long_before_its_ttl(tasks, end):
    """The ttl is 20 s. A time limit, too, ends a process by SIGTERM, as long as it reacts."""
    kind, options = ENDS[end]
    tasks.witness.set("hold", 1)
    result = tasks.signature("pay", 3, -1, fails=end == "failure").apply_async(**options)
    wait_until(lambda: tasks.witness.exists("inside:pay:3"))
    if end == "terminated":
        result.revoke(terminate=True)
    elif not options:
        tasks.witness.delete("hold")
    if kind is dict:
        assert result.get(timeout=LONG)
    else:
        with pytest.raises(kind):
            result.get(timeout=LONG)
    tasks.witness.delete("hold")
    started = time.monotonic()
    assert tasks.send("pay_after_a_wait", 3).get(timeout=LONG) == 3
    assert time.monotonic() - started < 10
    assert not tasks.overlaps()


@shared
def test_a_task_that_is_revoked_while_it_waits_takes_no_lock(tasks):
    with paying(tasks, 1):
        waits = tasks.send("pay", 1)
        wait_until(lambda: waits.state == "RETRY")
        waits.revoke()
        with pytest.raises(TaskRevokedError):
            waits.get(timeout=LONG)
    assert tasks.send("pay_or_skip", 1).get(timeout=LONG) == 1
    assert len(tasks.witness.lrange("paid", 0, -1)) == 1


@shared
def test_a_task_whose_lease_was_taken_fails_and_is_not_taken_for_done(tasks):
    tasks.witness.set("hold", 1)
    result = tasks.send("pay", 4, -1)
    wait_until(lambda: tasks.witness.exists("inside:pay:4"))
    assert tasks.locks.lock("pay:4").revoke("a test", force=True)
    wait_until(lambda: tasks.locks.lock("pay:4").inspect().holder is None)
    tasks.witness.delete("hold")
    with pytest.raises(LeaseLost, match="'pay:4' .* is lost"):
        result.get(timeout=LONG)
    assert result.state == "FAILURE"


# Workers that are killed


@pytest.fixture
def client(node):
    with node:
        yield client_of(node)


def test_a_killed_process_frees_its_lock_within_its_ttl_and_the_redelivered_task_gets_it(client, node, tmp_path):
    with worker(node, tmp_path, "-c", "2") as command:
        client.witness.set("hold", 1)
        first = client.send("pay", 1, -1)
        wait_until(lambda: client.witness.exists("inside:pay:1"))
        killed = int(client.witness.get("inside:pay:1").split(":")[0])
        assert killed in command.children()
        os.kill(killed, signal.SIGKILL)
        client.witness.delete("hold")
        assert first.get(timeout=LONG)["user"] == 1  # redelivered, and retried until the lease of the dead had run out
        assert len(client.witness.lrange("began:inside:pay:1", 0, -1)) == 2
        assert client.witness.llen("paid") == 1
    assert not client.overlaps()


@pytest.mark.parametrize("shutdown", [signal.SIGTERM, signal.SIGQUIT], ids=["warm", "cold"])
def test_a_worker_that_is_shut_down_leaves_no_lock(client, node, tmp_path, shutdown):
    """A warm shutdown lets the task end; a cold one ends it, and another worker gets it and its lock at once."""
    with worker(node, tmp_path, "-c", "1", env={"TTL": "20"}) as command:
        client.witness.set("hold", 1)
        result = client.send("pay", 1, -1)
        wait_until(lambda: client.witness.exists("inside:pay:1"))
        command.send(shutdown)
        if shutdown == signal.SIGTERM:
            command.says("Warm shutdown")
            client.witness.delete("hold")
        command.ended()
    client.witness.delete("hold")
    assert client.locks.lock("pay:1").inspect().holder is None
    with worker(node, tmp_path, "-c", "1"):
        assert result.get(timeout=LONG)["user"] == 1
        assert client.witness.llen("paid") == 1
    assert not client.overlaps()


def test_a_fleet_that_is_killed_again_and_again_does_each_task_once_and_none_twice_at_a_time(client, node, tmp_path):
    with worker(node, tmp_path, "-c", "2", name="a") as one, worker(node, tmp_path, "-c", "2", name="b") as other:
        results = [client.send("pay_at_last", number % 3) for number in range(30)]
        for round_ in range(6):
            wait_until(lambda round_=round_: lives_of(client) > 3 * round_)
            pool = (one, other)[round_ % 2]
            wait_until(lambda pool=pool: len(pool.children()) == 2)
            os.kill(pool.children()[0], signal.SIGKILL)
        assert [result.get(timeout=LONG) for result in results] == [number % 3 for number in range(30)]
    assert not client.overlaps()
    assert client.locks.ls() == []


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_tasks_of_threads_and_of_greenlets_exclude_each_other(client, node, tmp_path, pool):
    with worker(node, tmp_path, "-P", pool, "-c", "6") as command:
        results = [client.send("pay_at_last", number % 2) for number in range(20)]
        assert [result.get(timeout=LONG) for result in results] == [number % 2 for number in range(20)]
        client.witness.set("hold", 1)
        held = client.send("pay", 5, -1)
        wait_until(lambda: client.witness.exists("inside:pay:5"))
        assert is_skipped(client.send("pay_or_skip", 5).get(timeout=LONG))
        if pool == "gevent":  # a thread can't be ended
            held.revoke(terminate=True)
            with pytest.raises(TaskRevokedError):
                held.get(timeout=LONG)
            wait_until(lambda: client.locks.lock("pay:5").inspect().holder is None)
        else:
            client.witness.delete("hold")
            assert held.get(timeout=LONG)["user"] == 5
            command.send(signal.SIGQUIT)
            command.ended()
    assert not client.overlaps()


def test_a_worker_starts_without_the_server_of_its_locks_and_says_so_once(client, node, tmp_path):
    with Node() as locks:
        locks.kill()
        with worker(node, tmp_path, "-c", "2", env={"LOCKS": locks.url}) as command:
            waits = [client.send("pay_at_last", number) for number in range(2)]
            wait_until(lambda: all(each.state == "RETRY" for each in waits))
            locks.restart()
            assert [each.get(timeout=LONG) for each in waits] == [0, 1]
            assert len(command.says("The server of the locks is away")) == 1


def test_the_example_runs_and_counts_each_payment_once(start):
    example = start(Path(__file__).parents[2] / "examples" / "celery" / "main.py")
    assert example.ended(within=180) == 0, example.output
    for said in ("1 report is queued, of 3", "one process is killed", "ann has paid 500", "bob has paid 500"):
        assert said in example.output


def test_the_examples_of_the_page_run(server, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "frameworks" / "celery.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        code = block.replace("redis://localhost:6379/0", server.url) + "\napp.finalize()\n"
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
