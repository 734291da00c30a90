"""RQ's jobs under a lock: real workers and work-horses on a real Redis, which a test kills.

Each job counts itself in the server: how many of its account run now, and how often it has run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from rq import Queue, Retry
from rq.command import send_stop_job_command
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry

from harness.commands import Command
from harness.modes import wait_until
from harness.processes import lives
from harness.servers import Node
from interlock import AcquireTimeout, ConfigError, Interlock, NotHeld
from interlock.contrib.rq import current_lease, is_skipped, locked

EXAMPLE = Path(__file__).parents[2] / "examples" / "rq"

BANK = """
import os, time
from rq import Retry, get_current_job
from interlock.contrib.rq import current_lease, locked

def db():
    return get_current_job().connection

def work(account, order, seconds):
    if db().incr(f"users:inside:{account}") > 1:
        db().incr("users:overlaps")
    balance = int(db().get(f"users:balance:{account}") or 0)
    time.sleep(seconds)
    db().set(f"users:balance:{account}", balance + 1)
    db().decr(f"users:inside:{account}")
    db().hincrby("users:done", order, 1)

@locked("account:{account}")
def pay(account, order, seconds=0.02):
    work(account, order, seconds)

def pay_bare(account, order, seconds=0.02):
    work(account, order, seconds)

@locked("paper:{number}", ttl=2)
def hold(number):
    if db().incr("users:starts") == 1:
        db().set("users:pid", os.getpid())
        time.sleep(600)  # until the test kills it
    current_lease().ensure()
    db().incr("users:ends")

@locked("endless")
def endless():
    db().set("users:pid", os.getpid())
    while True:
        time.sleep(0.01)

@locked("busy", timeout=1)
def goes_round():
    db().incr("users:ends")

@locked("busy", busy="skip")
def skips():
    raise AssertionError

@locked("busy", busy="raise")
def raises():
    raise AssertionError

@locked("busy", busy=Retry(max=2))
def twice():
    raise AssertionError

@locked("{name}", timeout=1)
def calls(name, inner):
    calls("busy", "") if inner == "calls" else globals()[inner]()
    db().incr("users:went on")

def calls_bare(inner):
    globals()[inner]()
    db().incr("users:went on")
"""


@pytest.fixture
def bank(tmp_path, node, monkeypatch):
    """The module of the jobs, as a client of the workers has it."""
    (tmp_path / "bank.py").write_text(BANK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bank", raising=False)
    import bank

    yield bank
    del sys.modules["bank"]


@pytest.fixture
def db(node):
    with redis.Redis.from_url(node.tcp_url) as made:
        yield made


@pytest.fixture
def queue(bank, db):
    return Queue(connection=db)


@pytest.fixture
def locks(node):
    with Interlock(node.tcp_url) as made:
        yield made


@pytest.fixture
def worker(start, bank, node):
    def started(*options):
        made = start("-m", "rq.cli", "worker", "--url", node.tcp_url, "--path", ".", *options, "default")
        made.says("Listening on default")
        return made

    return started


def number(db, key):
    return int(db.get(f"users:{key}") or 0)


def test_of_many_jobs_each_runs_once_and_one_at_a_time(bank, queue, db, worker):
    for order in range(16):
        queue.enqueue(bank.pay, order % 2, order)
    for _ in range(3):
        worker("--burst")
    wait_until(lambda: db.hlen("users:done") == 16, 60)
    assert set(db.hvals("users:done")) == {b"1"}
    assert [number(db, key) for key in ("overlaps", "balance:0", "balance:1")] == [0, 8, 8]


def test_without_the_lock_the_same_jobs_overlap(bank, queue, db, worker):
    for order in range(4):
        queue.enqueue(bank.pay_bare, 0, order, 3.0)
    for _ in range(2):
        worker("--burst")
    wait_until(lambda: db.hlen("users:done") == 4, 60)
    assert number(db, "overlaps") > 0
    assert number(db, "balance:0") < 4


def test_a_killed_work_horse_frees_the_lock_within_its_ttl_and_its_retry_gets_it(bank, queue, db, worker, locks):
    job = queue.enqueue(bank.hold, 7, retry=Retry(max=3))
    worker()
    wait_until(lambda: number(db, "pid"), 60)
    lock = locks.rlock("paper:7")
    time.sleep(2.5)  # longer than the ttl: the lease is renewed while the job runs
    assert lock.try_acquire() is None
    os.kill(number(db, "pid"), signal.SIGKILL)
    wait_until(lambda: job.get_status() == JobStatus.FINISHED, 60)
    assert (number(db, "starts"), number(db, "ends")) == (2, 1)


def test_a_killed_worker_leaves_a_work_horse_and_the_job_that_runs_again_waits_for_it(bank, queue, db, worker, locks):
    """RQ gives the job to another worker while the first one's work-horse is at work. The lock keeps them apart."""
    job = queue.enqueue(bank.hold, 7, retry=Retry(max=3))
    first = worker()
    wait_until(lambda: number(db, "pid"), 60)
    horse = number(db, "pid")
    first.process.kill()
    first.process.wait()
    assert lives(horse)
    StartedJobRegistry(queue=queue).cleanup(timestamp=time.time() + 3600)  # as RQ does some minutes after the kill
    assert job.get_status(refresh=True) == JobStatus.QUEUED
    worker()
    wait_until(lambda: locks.rlock("paper:7").inspect().waiting == 1, 60)
    assert lives(horse) and (number(db, "starts"), number(db, "ends")) == (1, 0)
    os.kill(horse, signal.SIGKILL)
    wait_until(lambda: number(db, "ends"), 60)
    assert (number(db, "starts"), number(db, "ends")) == (2, 1)


def test_a_job_timeout_frees_the_lock_at_once(bank, queue, db, worker, locks):
    """Though its ttl is 30 s."""
    job = queue.enqueue(bank.endless, job_timeout=1)
    running = worker()
    running.says("JobTimeoutException")
    locks.rlock("endless").acquire(timeout=15).release()
    wait_until(lambda: job.get_status(refresh=True) == JobStatus.FAILED)


def test_a_job_that_is_stopped_frees_the_lock_within_its_ttl(bank, queue, db, worker, locks):
    """RQ stops a job by SIGKILL."""
    job = queue.enqueue(bank.hold, 7)
    worker()
    wait_until(lambda: number(db, "pid"), 60)
    send_stop_job_command(db, job.id)
    wait_until(lambda: not lives(number(db, "pid")), 60)
    locks.rlock("paper:7").acquire(timeout=2 + 1 + 5).release()
    wait_until(lambda: job.get_status(refresh=True) == JobStatus.STOPPED)


def test_what_a_busy_lock_does(bank, queue, db, worker, locks):
    lease = locks.rlock("busy").acquire()
    jobs = {each: queue.enqueue(getattr(bank, each)) for each in ("skips", "raises", "twice", "goes_round")}
    running = worker()  # without a scheduler
    wait_until(lambda: jobs["goes_round"].number_of_retries or jobs["goes_round"].refresh(), 60)
    wait_until(lambda: jobs["twice"].get_status() == JobStatus.FAILED, 60)
    assert jobs["skips"].get_status() == JobStatus.FINISHED
    assert is_skipped(jobs["skips"].return_value()) and jobs["skips"].return_value()["name"] == "busy"
    assert jobs["raises"].get_status() == JobStatus.FAILED
    assert "AcquireTimeout" in jobs["raises"].latest_result().exc_string
    assert jobs["goes_round"].get_status() in {JobStatus.QUEUED, JobStatus.STARTED}
    lease.release()
    wait_until(lambda: jobs["goes_round"].get_status() == JobStatus.FINISHED, 60)
    assert number(db, "ends") == 1
    assert running.end() == 0


@pytest.mark.parametrize(
    ("outer", "args"),
    [
        ("calls", ("free", "goes_round")),
        ("calls", ("free", "twice")),
        ("calls", ("free", "calls")),
        ("calls_bare", ("goes_round",)),
    ],
)
def test_a_call_inside_of_a_job_whose_lock_is_busy_raises_there(bank, queue, db, worker, locks, outer, args):
    """A Retry that it returned would go to the job's function, not to RQ: nobody would do the work, or know."""
    with locks.rlock("busy"):
        job = queue.enqueue(getattr(bank, outer), *args)
        worker("--burst")
        wait_until(lambda: job.get_status() in {JobStatus.FAILED, JobStatus.FINISHED}, 60)
    assert job.get_status() == JobStatus.FAILED
    assert "AcquireTimeout" in job.latest_result().exc_string
    assert number(db, "went on") == 0


# Outside of a worker, and bad input


def function(user_id):
    return current_lease().name


def test_outside_of_a_worker_a_call_needs_locks(locks):
    assert locked("pay:{user_id}", locks=locks)(function)(7) == "pay:7"
    with locks.rlock("pay:7", owner="another"), pytest.raises(AcquireTimeout):
        locked("pay:{user_id}", locks=locks, timeout=1)(function)(7)
    with pytest.raises(ConfigError, match=r"outside of a worker.*Give locks="):
        locked("pay:{user_id}")(function)(7)
    with pytest.raises(NotHeld):
        current_lease()


def test_no_work_is_skipped_in_the_quarantine_after_a_restart_of_the_locks_server(db, monkeypatch):
    with Node() as server, Interlock(server.url, max_ttl=20) as locks:
        later = Retry(max=1)
        skips, retries = (locked("a", busy=busy, locks=locks)(print) for busy in ("skip", later))
        with locks.lock("a", ttl=2):
            assert is_skipped(skips())
        server.kill()
        server.restart()
        with pytest.raises(AcquireTimeout):
            skips()
        with pytest.raises(AcquireTimeout):
            retries()
        monkeypatch.setattr(sys.modules[__name__], "retries", retries, raising=False)
        assert Job.create(f"{__name__}.retries", connection=db).perform() is later


def test_what_does_not_fit_is_refused_where_it_stands():
    async def coroutine():
        pass

    for wrong, said in (
        (lambda: locked("n:{user}")(function), "user"),
        (lambda: locked("n", busy="wait")(function), "busy must be"),
        (lambda: locked("n", nosuch=1)(function), "no option 'nosuch'"),
        (lambda: locked("n", timeout=0)(function), "without a pause.* timeout of 1 s or more"),
        (lambda: locked("n", timeout=-1)(function), "timeout"),
        (lambda: locked("n")(coroutine), "async"),
    ):
        with pytest.raises(ConfigError, match=said):
            wrong()


def test_the_module_needs_its_extra():
    code = "import sys; sys.modules['rq'] = None; import interlock.contrib.rq"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs RQ" in ran.stderr and ".[rq]" in ran.stderr


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
