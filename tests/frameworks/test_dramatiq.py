"""dramatiq's actors under a lock: real workers on a real broker, which a test kills.

Each message counts itself in the broker's server: how many of its account run now, and how often it has run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Retries

from harness.commands import Command
from harness.modes import wait_until
from interlock import AcquireTimeout, ConfigError, Interlock, NotHeld
from interlock.contrib.dramatiq import Locks, current_lease, is_skipped, locked

EXAMPLE = Path(__file__).parents[2] / "examples" / "dramatiq"

BANK = """
import os, time
import dramatiq, redis
from dramatiq.brokers.redis import RedisBroker
from interlock.contrib.dramatiq import Locks, current_lease, locked

URL = os.environ["REDIS_URL"]
# Dead workers are found at once, so that the test need not wait for minutes: dramatiq looks seldom by default.
broker = RedisBroker(url=URL, heartbeat_timeout=2000, maintenance_chance=1_000_000)
broker.add_middleware(Locks(None if URL.startswith("redis") else URL))
dramatiq.set_broker(broker)
db = redis.Redis.from_url(URL, decode_responses=True)

def work(account, order, seconds):
    if db.incr(f"users:inside:{account}") > 1:
        db.incr("users:overlaps")
    balance = int(db.get(f"users:balance:{account}") or 0)
    time.sleep(seconds)
    db.set(f"users:balance:{account}", balance + 1)
    db.decr(f"users:inside:{account}")
    db.hincrby("users:done", order, 1)

FAST = {"min_backoff": 30, "max_backoff": 150, "max_retries": 10_000}

@dramatiq.actor(**FAST)
@locked("account:{account}")
def pay(account, order, seconds=0.02):
    work(account, order, seconds)

@dramatiq.actor(**FAST)
def pay_bare(account, order, seconds=0.02):
    work(account, order, seconds)

@dramatiq.actor(**FAST)
@locked("paper:{number}", ttl=2)
def hold(number):
    if db.incr("users:starts") == 1:
        db.set("users:pid", os.getpid())
        time.sleep(600)  # until the test kills it
    current_lease().ensure()
    db.incr("users:ends")

@dramatiq.actor(time_limit=300, max_retries=0)
@locked("endless", busy="skip")
def endless():
    db.incr("users:starts")
    while True:
        time.sleep(0.01)
"""


@pytest.fixture
def bank(tmp_path, node, monkeypatch):
    """The module of the actors, as a client of the workers has it."""
    (tmp_path / "bank.py").write_text(BANK)
    monkeypatch.setenv("REDIS_URL", node.tcp_url)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bank", raising=False)
    import bank

    yield bank
    bank.broker.close()
    bank.db.close()
    del sys.modules["bank"]


@pytest.fixture
def worker(start, bank):
    def started(processes=1, threads=4):
        made = start("-m", "dramatiq", "bank", "--processes", str(processes), "--threads", str(threads))
        made.says("Worker process is ready", times=processes)
        return made

    return started


def test_of_many_messages_each_runs_once_and_one_at_a_time(bank, worker):
    for order in range(40):
        bank.pay.send(order % 2, order)
    worker(processes=2)
    wait_until(lambda: bank.db.hlen("users:done") == 40, 60)
    assert set(bank.db.hvals("users:done")) == {"1"}
    assert bank.db.get("users:overlaps") is None
    assert [bank.db.get(f"users:balance:{account}") for account in (0, 1)] == ["20", "20"]


def test_without_the_lock_the_same_messages_overlap(bank, worker):
    for order in range(40):
        bank.pay_bare.send(order % 2, order)
    worker(processes=2)
    wait_until(lambda: bank.db.hlen("users:done") == 40, 60)
    assert int(bank.db.get("users:overlaps")) > 0
    assert int(bank.db.get("users:balance:0")) < 20


def test_a_killed_worker_frees_the_lock_within_its_ttl_and_the_message_runs_elsewhere(bank, worker):
    bank.hold.send(7)
    first = worker()
    wait_until(lambda: bank.db.get("users:pid"), 60)
    with Interlock(bank.URL) as locks:
        lock = locks.rlock("paper:7")
        time.sleep(2.5)  # longer than the ttl: the lease is renewed while the actor runs
        assert lock.try_acquire() is None
        first.kill_all()
        killed = time.monotonic()
        lock.acquire(timeout=30).release()
        assert time.monotonic() - killed < 2 + 1 + 5  # its ttl and a second, on a machine that is busy
    worker()
    wait_until(lambda: bank.db.get("users:ends"), 60)
    assert (bank.db.get("users:starts"), bank.db.get("users:ends")) == ("2", "1")


def test_a_time_limit_frees_the_lock_at_once(bank, worker):
    """Though its ttl is 30 s."""
    bank.endless.send()
    running = worker()
    running.says("TimeLimitExceeded")
    with Interlock(bank.URL) as locks:
        locks.rlock("endless").acquire(timeout=15).release()
    assert bank.db.get("users:starts") == "1"


def test_a_shutdown_finishes_what_runs_and_leaves_no_lock(bank, worker):
    bank.pay.send(0, 1, 2.0)
    running = worker()
    wait_until(lambda: bank.db.get("users:inside:0") == "1", 60)
    assert running.end() == 0
    assert bank.db.hget("users:done", "1") == "1"
    with Interlock(bank.URL) as locks:
        assert locks.rlock("account:0").try_acquire().release()


# A busy lock


@pytest.fixture
def broker(node):
    made = RedisBroker(url=node.tcp_url)
    made.add_middleware(Locks())
    dramatiq.set_broker(made)
    yield made
    made.middleware[-1].after_worker_shutdown(made, None)
    made.close()
    dramatiq.set_broker(StubBroker())


def test_what_a_busy_lock_does(broker, node):
    def function(number):
        return current_lease().name

    actors = {busy: dramatiq.actor(locked("n:{number}", busy=busy)(function), actor_name=str(busy)) for busy in
              ("retry", "skip", "raise", None)}  # fmt: skip
    actors["call"] = dramatiq.actor(
        locked("n:{number}", busy=lambda skipped: skipped.name)(function), actor_name="call"
    )
    with Interlock(node.tcp_url) as locks:
        assert [actor(7) for actor in actors.values()] == ["n:7"] * 5
        with locks.rlock("n:7"):
            with pytest.raises(dramatiq.Retry, match="'n:7'"):
                actors["retry"](7)
            with pytest.raises(AcquireTimeout):
                actors["raise"](7)
            assert is_skipped(actors["skip"](7)) and actors["skip"](7)["name"] == "n:7"
            assert (actors[None](7), actors["call"](7), actors["raise"](8)) == (None, "n:7", "n:8")
    with pytest.raises(NotHeld):
        current_lease()


def test_without_a_server_a_message_is_tried_again(broker, node):
    broker.middleware[-1].of(broker)
    node.kill()
    with pytest.raises(dramatiq.Retry):
        locked("n")(lambda: None)()


def test_a_worker_that_starts_again_locks_on_the_server_that_was_given(broker, node, server):
    locks = Locks(server.url)
    broker.middleware[-1] = locks
    with Interlock(server.url) as there, Interlock(node.tcp_url) as at_the_broker:
        for _ in range(2):
            worker = dramatiq.Worker(broker, worker_threads=1)
            worker.start()
            locked("n")(
                lambda: (
                    pytest.fail("it is free there") if there.rlock("n").try_acquire() else None,
                    at_the_broker.rlock("n").acquire(0).release(),
                )
            )()
            worker.stop()


# Bad input


def booted(broker):
    dramatiq.Worker(broker).start()


def without_retries(broker):
    broker.middleware[:] = [each for each in broker.middleware if not isinstance(each, Retries)]


def with_retries(broker, number):
    without_retries(broker)
    broker.add_middleware(Retries(max_retries=number))


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda _: None, "the broker is a StubBroker, which holds no locks"),
        (without_retries, "no Retries middleware, so dramatiq would drop"),
        (lambda broker: broker.actors["function"].options.update(max_retries=0), "max_retries is 0. Raise"),
        (lambda broker: with_retries(broker, 0), "max_retries is 0, as the Retries middleware says"),
    ],
)
def test_a_worker_that_would_lose_messages_does_not_boot(prepare, said, server):
    broker = StubBroker()
    broker.add_middleware(Locks() if "StubBroker" in said else Locks(server.url))
    dramatiq.actor(locked("n:{number}")(function), broker=broker)
    prepare(broker)
    with pytest.raises(ConfigError, match=said):
        booted(broker)


def function(number):
    pass


def test_options_that_the_locks_refuse_end_the_boot(server):
    broker = StubBroker()
    broker.add_middleware(Locks(server.url))
    dramatiq.actor(locked("n:{number}", ttl=3600)(function), broker=broker)
    with pytest.raises(ConfigError, match=r"actor 'function': locked\('n:\{number\}'\): .*ttl"):
        booted(broker)


def test_what_does_not_fit_is_refused_where_it_stands(broker):
    async def coroutine(number):
        pass

    for wrong, said in (
        (lambda: locked("n:{user}")(function), "user"),
        (lambda: locked("n", busy="wait")(function), "busy must be"),
        (lambda: locked("n", nosuch=1)(function), "no option 'nosuch'"),
        (lambda: locked("n")(coroutine), "async"),
        (lambda: locked("n")(dramatiq.actor(function)), "write @locked under @dramatiq.actor"),
        (lambda: Locks("http://localhost"), "http"),
    ):
        with pytest.raises(ConfigError, match=said):
            wrong()
    dramatiq.set_broker(StubBroker())
    with pytest.raises(ConfigError, match=r"the broker has no locks. Say broker.add_middleware\(Locks\(\)\)"):
        locked("n")(function)(1)


def test_the_module_needs_its_extra():
    code = "import sys; sys.modules['dramatiq'] = None; import interlock.contrib.dramatiq"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs dramatiq" in ran.stderr and ".[dramatiq]" in ran.stderr


# The example


def test_the_example_pays_one_order_of_an_account_at_a_time(tmp_path, node):
    env = {"REDIS_URL": node.tcp_url, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    example = Command(["sh", str(EXAMPLE / "run.sh")], cwd=tmp_path, log=tmp_path / "log", env=env)
    try:
        example.says("end ", times=10)
        events = re.findall(r"(begin|end) (\d) order (\d+)", example.output)
    finally:
        example.kill_all()
    for account in "01":
        of_account = [(what, order) for what, which, order in events if which == account]
        assert [what for what, _ in of_account] == ["begin", "end"] * 5
        assert all(begin[1] == end[1] for begin, end in zip(of_account[::2], of_account[1::2], strict=True))
