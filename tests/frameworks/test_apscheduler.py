"""APScheduler under an election: real schedulers in real processes, which a test stops, kills and cuts off.

`RUNS` is what happened: a line for each run that ended, with the moment for which it was scheduled. So a test counts
exactly, however slow the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from apscheduler.events import (
    EVENT_ALL,
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MISSED,
    EVENT_JOB_SUBMITTED,
    EVENT_SCHEDULER_RESUMED,
)
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import STATE_PAUSED, STATE_RUNNING

import interlock.aio
from harness.modes import wait_until
from harness.processes import state_of
from harness.servers import free_ports
from interlock import AcquireTimeout, ConfigError, Interlock, LeaseLost, NotHeld
from interlock.contrib.apscheduler import Leading, current_lease

EXAMPLE = Path(__file__).parents[2] / "examples" / "apscheduler"
TTL = 4.0

TICKER = """
import logging, os, signal, sys, threading, time
from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_SCHEDULER_PAUSED, EVENT_SCHEDULER_RESUMED
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.blocking import BlockingScheduler
from interlock import Interlock
from interlock.contrib.apscheduler import Leading, current_lease

logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
runs = os.open("runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def tick():
    return current_lease().term

def slow():
    print("slow begins", flush=True)
    time.sleep(3)
    print("slow ends", flush=True)

def executed(event):
    if event.job_id == "tick":
        moment = int(event.scheduled_run_time.timestamp())
        os.write(runs, f"{moment} {os.getpid()} {event.retval}\\n".encode())

if __name__ == "__main__":
    url, kind, store, *more = sys.argv[1:]
    scheduler = {"background": BackgroundScheduler, "blocking": BlockingScheduler}[kind]()
    if store != "memory":
        scheduler.add_jobstore("sqlalchemy", url=store)
    scheduler.add_listener(executed, EVENT_JOB_EXECUTED)
    leading = Leading(scheduler, Interlock(url, max_ttl=4.0).election("schedule", ttl=4.0))
    if "follower" not in more:
        scheduler.add_job("ticker:tick", "cron", second="*", id="tick", coalesce=False, misfire_grace_time=120,
                          replace_existing=True, max_instances=50)
    if "slow" in more:
        scheduler.add_job(slow, "date")
    signal.signal(signal.SIGTERM, lambda *_: leading.stop())
    print("starts", flush=True)
    scheduler.start()
    while scheduler.running:
        time.sleep(0.05)
        if "adds" in more and os.path.exists("add"):
            more.remove("adds")
            scheduler.add_job("ticker:tick", "cron", second="*", id="tick", coalesce=False, misfire_grace_time=120)
    leading.stop()
    print("stopped", flush=True)
"""


class Run(NamedTuple):
    """A run of the job `tick` that has ended."""

    moment: int  # for which it was scheduled, in seconds
    pid: int
    term: int


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "ticker.py").write_text(TICKER)

    def read(*, pid: int | None = None) -> list[Run]:
        if not (tmp_path / "runs").exists():
            return []
        made = [Run(*map(int, line.split())) for line in (tmp_path / "runs").read_text().splitlines()]
        return [run for run in made if pid in {None, run.pid}]

    return read


@pytest.fixture
def ticker(start, node, runs):
    def started(kind="background", store="memory", *more):
        return start("ticker.py", node.url, kind, store, *more)

    return started


def leader_of(runs, *, other_than=0) -> int:
    """The process that runs the job now, other than this one: after it has run it twice."""
    wait_until(lambda: len([run for run in runs()[-2:] if run.pid != other_than]) == 2, 60)
    return runs()[-1].pid


def nothing_is_lost(made: list[Run]) -> None:
    moments = sorted({run.moment for run in made})
    assert moments == list(range(moments[0], moments[-1] + 1))


def twice(made: list[Run]) -> list[int]:
    return [moment for moment, times in Counter(run.moment for run in made).items() if times > 1]


# Who runs, and who takes over


@pytest.mark.parametrize("kind", ["background", "blocking"])
def test_a_shutdown_hands_the_schedule_on_and_each_moment_is_run_once(ticker, runs, kind):
    processes = [ticker(kind) for _ in range(3)]
    first = leader_of(runs)
    (leader,) = [each for each in processes if each.pid == first]
    assert leader.end() == 0
    second = leader_of(runs, other_than=first)
    (leader,) = [each for each in processes if each.pid == second]
    assert leader.end() == 0
    leader_of(runs, other_than=second)
    for each in processes:
        assert each.end() == 0
    nothing_is_lost(runs())
    assert not twice(runs())
    assert len({run.pid for run in runs()}) == 3
    assert [run.term for run in runs()] == sorted(run.term for run in runs())


@pytest.mark.parametrize("store", ["memory", "sqlite:///jobs.db"])
def test_a_killed_leader_is_followed_within_its_ttl_and_nothing_is_lost(ticker, runs, store):
    processes = [ticker("background", store)]
    first = leader_of(runs)  # alone, so that the other one's replace_existing changes no run that is due
    processes.append(ticker("background", store))
    processes[1].says("starts")
    wait_until(lambda: len(runs()) >= 4)
    killed = time.time()
    processes[0].kill_all()
    wait_until(lambda: runs(pid=processes[1].pid), 60)
    assert first == processes[0].pid
    leader_of(runs, other_than=first)
    nothing_is_lost(runs())
    # The job store knows what was submitted; for a memory store the leader's note is at most a second old.
    assert all(killed - 3 < moment < killed + 1 for moment in twice(runs()))
    assert len(twice(runs())) <= 2


def test_a_leader_that_was_stopped_runs_nothing_when_it_goes_on(ticker, runs):
    processes = [ticker(), ticker()]
    first = leader_of(runs)
    (leader,) = [each for each in processes if each.pid == first]
    for _ in range(3):
        leader.send(signal.SIGSTOP)
        wait_until(lambda leader=leader: state_of(leader.pid) == "T")
        second = leader_of(runs, other_than=leader.pid)
        term, before = runs()[-1].term, len(runs(pid=leader.pid))
        leader.send(signal.SIGCONT)  # a run is due at once: some seconds have passed
        count = len(runs(pid=second))
        wait_until(lambda second=second, count=count: len(runs(pid=second)) >= count + 3)
        late = runs(pid=leader.pid)[before:]
        assert all(run.term > term for run in late), "it ran a job under its old lease"
        assert not late
        (leader,) = [each for each in processes if each.pid == second]
    nothing_is_lost(runs())


def test_without_leading_the_same_processes_run_everything_twice(start, node, runs, tmp_path):
    """The control: so it is the election that lets one of them run."""
    program = (tmp_path / "ticker.py").read_text().replace("leading = Leading", "leading = Bare")
    program = program.replace("def tick", "class Bare:\n    def __init__(self, *_): pass\n\ndef tick")
    (tmp_path / "ticker.py").write_text(
        program.replace("current_lease().term", "0").replace("leading.stop()", "scheduler.shutdown()")
    )
    for _ in range(2):
        start("ticker.py", node.tcp_url, "background", "memory")
    wait_until(lambda: len({run.pid for run in runs()}) == 2 and len(twice(runs())) >= 2, 60)


def test_no_server_no_runs_and_all_goes_on_when_it_is_back(ticker, runs, node):
    node.stop()
    processes = [ticker(), ticker()]
    for each in processes:
        each.says("starts")
        each.says("The campaign goes on")
    assert not runs()
    node.start()
    leader_of(runs)
    count = len(runs())
    wait_until(lambda: len(runs()) >= count + 2)  # so it has led for a second, and has said what it has done
    node.pause()
    silent = time.time()
    pause = silent + TTL  # by then each lease is over, and nobody may run
    wait_until(lambda: time.time() > pause)
    count = len(runs())
    wait_until(lambda: time.time() > pause + 3)
    assert len(runs()) == count
    node.resume()
    wait_until(lambda: len(runs()) >= count + 3, 60)
    nothing_is_lost(runs())
    # While its lease lasted, the leader ran jobs of its memory store, and could tell nobody.
    assert all(silent - 2 < moment < pause + 1 for moment in twice(runs()))
    for each in processes:
        assert each.output.count("The campaign goes on") <= 2, "one warning for each outage"


def test_the_jobs_of_a_leader_have_ended_before_the_next_one_leads(ticker, runs):
    leader = ticker("background", "memory", "slow")
    leader.says("slow begins")
    follower = ticker()
    follower.says("starts")
    leader.send(signal.SIGTERM)
    leader.says("slow ends")
    assert leader.ended() == 0
    wait_until(lambda: runs(pid=follower.pid), 60)
    nothing_is_lost(runs())
    assert not twice(runs())


def test_a_leader_sees_a_job_that_another_process_adds_to_a_shared_store(ticker, runs, tmp_path):
    leader = ticker("background", "sqlite:///jobs.db", "follower")
    leader.says("the scheduler of this process runs now")
    other = ticker("background", "sqlite:///jobs.db", "follower", "adds")
    other.says("starts")
    (tmp_path / "add").touch()
    assert leader_of(runs) == leader.pid


# In one process


@pytest.fixture
def locks(node):
    with Interlock(node.url) as made:
        yield made


@pytest.fixture
def led(locks):
    """A background scheduler under an election, and its events; it is shut down at the end."""
    schedulers = []

    def made(**options):
        scheduler = BackgroundScheduler(job_defaults={"misfire_grace_time": None}, **options)
        scheduler.events = []
        scheduler.add_listener(scheduler.events.append, EVENT_ALL)
        leading = Leading(scheduler, locks.election("schedule"))
        schedulers.append(leading)
        return scheduler, leading

    yield made
    for leading in schedulers:
        leading.stop()


def codes(scheduler, code):
    return [event for event in scheduler.events if event.code == code]


def now():
    return dt.datetime.now(dt.UTC)


def test_a_job_has_the_lease_under_which_it_was_started(led, locks):
    scheduler, leading = led()
    seen, go_on = [], threading.Event()

    def job():
        lease = current_lease()
        seen.append(lease)
        go_on.wait(30)
        lease.ensure()

    with pytest.raises(NotHeld, match="jobs that a scheduler under Leading runs"):
        current_lease()
    scheduler.add_job(job)
    assert leading.lease is None
    scheduler.start()
    wait_until(lambda: seen)
    assert leading.lease is seen[0] is not None
    assert locks.election("schedule").leader().term == seen[0].fence
    # A revocation is a loss: this process pauses at once, the job goes on and learns of it, and the next term begins.
    locks.election("schedule").revoke("to see what happens")
    assert seen[0].lost.wait(30)
    wait_until(lambda: leading.lease is not None and leading.lease.term > seen[0].term, 30)
    go_on.set()
    wait_until(lambda: codes(scheduler, EVENT_JOB_ERROR))
    (error,) = codes(scheduler, EVENT_JOB_ERROR)
    assert isinstance(error.exception, LeaseLost)


def test_a_job_that_waits_in_its_executor_does_not_start_after_a_loss(led, locks):
    scheduler, _ = led(executors={"default": ThreadPoolExecutor(1)})
    began, go_on, started = threading.Event(), threading.Event(), []

    def first():
        began.set()
        lease = current_lease()
        go_on.wait(30)
        assert lease.lost

    scheduler.add_job(first)
    scheduler.add_job(started.append, args=["second"], id="second", next_run_time=now(), misfire_grace_time=None)
    scheduler.start()
    assert began.wait(30)
    wait_until(lambda: len(codes(scheduler, EVENT_JOB_SUBMITTED)) == 2)
    locks.election("schedule").revoke("a loss")
    wait_until(lambda: scheduler.state == STATE_PAUSED or len(started) > 0)
    go_on.set()
    wait_until(lambda: codes(scheduler, EVENT_JOB_ERROR))
    (error,) = codes(scheduler, EVENT_JOB_ERROR)
    assert (error.job_id, started) == ("second", [])
    assert isinstance(error.exception, LeaseLost)


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_a_round_that_a_loss_interrupts_starts_nothing_and_writes_nothing_into_the_store(led, pool, tmp_path):
    """As when the process is stopped there for longer than its ttl: the next leader's times must stay."""
    scheduler, leading = led(executors={"default": pool(1)})
    store = scheduler_store(scheduler)

    def due_and_lost(now, real=store.get_due_jobs):
        due = real(now)
        if due and (lease := leading.lease) is not None:
            lease.release()
            wait_until(lambda: leading._lease is None)
            leading._lease = lease  # as if the campaign's thread had not run yet
        return due

    store.get_due_jobs = due_and_lost
    at = now() + dt.timedelta(seconds=0.2)
    started = tmp_path / "started"
    scheduler.add_job(os.mkdir, "interval", seconds=3600, args=[str(started)], id="job", next_run_time=at)
    scheduler.start()
    wait_until(lambda: scheduler.state == STATE_PAUSED and not leading._campaign.is_alive())
    assert scheduler.get_job("job").next_run_time == at
    scheduler.shutdown()  # waits for what its executor has
    assert not started.exists()


def test_a_round_that_outlasts_its_lease_starts_nothing_under_the_next_one(led, locks, tmp_path):
    """A database hangs in the round, longer than the ttl. Another process leads meanwhile, then this one again."""
    scheduler, leading = led()

    class Hangs(SQLAlchemyJobStore):
        def update_job(self, job):
            super().update_job(job)
            if job.id == "first" and leading.lease is not None and leading.lease.term == terms[0]:
                locks.election("schedule").revoke("it hangs")
                wait_until(lambda: leading.lease is not None and leading.lease.term != terms[0], 60)
                other = self.lookup_job("second")  # another leader has run it
                other.next_run_time = later
                super().update_job(other)

    terms = []
    started, later = tmp_path / "started", now() + dt.timedelta(hours=1)
    scheduler.add_jobstore(Hangs(url=f"sqlite:///{tmp_path / 'jobs.db'}"), "default")
    scheduler.add_listener(lambda _: terms.append(leading.lease.term), EVENT_SCHEDULER_RESUMED)
    for number, (name, function, args) in enumerate((("first", int, []), ("second", os.mkdir, [str(started)]))):
        at = now() + dt.timedelta(milliseconds=number)
        scheduler.add_job(function, "interval", hours=2, args=args, id=name, next_run_time=at)
    scheduler.start()
    wait_until(lambda: len(terms) == 2, 60)
    assert scheduler.get_job("second").next_run_time == later  # after the round, whose lock it needs
    leading.stop()
    assert not started.exists()


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_a_shutdown_that_does_not_wait_resigns_after_the_jobs_of_the_pools(led, locks, tmp_path, pool):
    executor = pool(1)
    scheduler, leading = led(executors={"default": executor})
    go_on = tmp_path / "go on"
    wait = ["sh", "-c", f"until [ -e '{go_on}' ]; do sleep 0.05; done"]
    if pool is ThreadPoolExecutor:
        executor._pool.submit(subprocess.check_call, wait)  # so that the job waits in the pool, and has not begun
        scheduler.add_job(int)
    else:
        scheduler.add_job(subprocess.check_call, args=[wait])
    scheduler.start()
    wait_until(lambda: codes(scheduler, EVENT_JOB_SUBMITTED), 60)
    try:
        leading.stop(wait=False)
        with pytest.raises(AcquireTimeout):
            locks.election("schedule").campaign(1)
    finally:
        go_on.touch()
    locks.election("schedule").campaign(60).release()
    wait_until(lambda: codes(scheduler, EVENT_JOB_EXECUTED) or codes(scheduler, EVENT_JOB_ERROR), 60)
    assert not codes(scheduler, EVENT_JOB_ERROR)


HANDLER = """
import datetime as dt, os, signal, sys
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.blocking import BlockingScheduler
from interlock import Interlock
from interlock.contrib.apscheduler import Leading

class SignalsInTheRound(ThreadPoolExecutor):
    def submit_job(self, job, run_times):
        super().submit_job(job, run_times)
        if job.id == "first":
            signal.raise_signal(signal.SIGTERM)

url, store, call = sys.argv[1:]
scheduler = BlockingScheduler(executors={"default": SignalsInTheRound(2)})
if store != "memory":
    scheduler.add_jobstore("sqlalchemy", url=store)
leading = Leading(scheduler, Interlock(url).election("schedule"))
now = dt.datetime.now(dt.timezone.utc)
for each in ("first", "second"):
    scheduler.add_job(os.mkdir, "interval", hours=1, args=[each], id=each, next_run_time=now, misfire_grace_time=None)
signal.signal(signal.SIGTERM, lambda *_: eval(call))
scheduler.start()
leading.stop()
print("stopped", flush=True)
"""


@pytest.mark.parametrize("call", ["scheduler.shutdown()", "leading.stop()", "(scheduler.shutdown(), sys.exit(3))"])
@pytest.mark.parametrize("store", ["memory", "sqlite:///jobs.db"])
def test_a_signal_handler_that_shuts_down_in_the_middle_of_a_round_lets_it_end(start, node, tmp_path, store, call):
    (tmp_path / "handler.py").write_text(HANDLER)
    program = start("handler.py", node.url, store, call)
    assert program.ended() == 0
    assert program.output.split() == ["stopped"] or "exit" in call  # whose SystemExit APScheduler logs
    assert (tmp_path / "first").exists() and (tmp_path / "second").exists()
    if store != "memory":
        with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as db:
            ((least,),) = db.execute("SELECT MIN(next_run_time) FROM apscheduler_jobs")
        assert least > time.time() + 600


def scheduler_store(scheduler):
    from apscheduler.jobstores.memory import MemoryJobStore

    store = MemoryJobStore()
    scheduler.add_jobstore(store, "default")
    return store


@pytest.mark.parametrize(
    ("coalesce", "grace", "ran", "missed"), [(False, 60, 4, 0), (True, 60, 1, 0), (False, 1, 0, 4)]
)
def test_what_was_due_before_a_takeover_is_treated_as_the_job_says(led, locks, coalesce, grace, ran, missed):
    """Nobody has led meanwhile, so no run of the last ten seconds was done."""
    other = locks.election("schedule").campaign()
    scheduler, _ = led()
    begin = now() - dt.timedelta(seconds=10)
    trigger = {"seconds": 2, "start_date": begin, "end_date": begin + dt.timedelta(seconds=7)}
    scheduler.add_job(int, "interval", **trigger, coalesce=coalesce, misfire_grace_time=grace, next_run_time=begin)
    scheduler.start()
    other.release()
    wait_until(
        lambda: len(codes(scheduler, EVENT_JOB_EXECUTED)) + len(codes(scheduler, EVENT_JOB_MISSED)) == ran + missed
    )
    assert len(codes(scheduler, EVENT_JOB_EXECUTED)) == ran


def test_a_follower_skips_what_the_leader_before_it_has_done(led, locks):
    """Both have the same jobs in memory stores; the follower's clock of them has stood still."""
    begin = now() - dt.timedelta(seconds=10)

    def add_jobs(scheduler):
        scheduler.add_job(int, "interval", seconds=2, start_date=begin, next_run_time=begin, id="often",
                          misfire_grace_time=3600, coalesce=False)  # fmt: skip
        scheduler.add_job(int, "date", run_date=begin, id="once", misfire_grace_time=3600)

    first, leading = led()
    add_jobs(first)
    first.start()
    wait_until(lambda: len(codes(first, EVENT_JOB_EXECUTED)) >= 6)
    second, _ = led()
    add_jobs(second)
    second.start()
    leading.stop()
    wait_until(lambda: codes(second, EVENT_JOB_EXECUTED))
    done = [
        event.scheduled_run_time
        for each in (first, second)
        for event in codes(each, EVENT_JOB_EXECUTED)
        if event.job_id == "often"
    ]
    assert [event.job_id for event in codes(second, EVENT_JOB_EXECUTED)].count("once") == 0
    assert done == sorted(set(done))
    assert {(b - a).total_seconds() for a, b in pairwise(done)} == {2.0}


def test_a_follower_stays_paused_whoever_resumes_it(led, locks, caplog):
    other = locks.election("schedule").campaign()
    scheduler, leading = led()
    ran = []
    scheduler.add_job(ran.append, args=[1], misfire_grace_time=None)
    scheduler.start()
    assert scheduler.state == STATE_PAUSED
    scheduler.resume()  # by hand
    assert scheduler.state == STATE_RUNNING
    scheduler.wakeup()
    scheduler.add_job(ran.append, args=[2], misfire_grace_time=None)
    assert scheduler._process_jobs() is None  # the round that its thread makes, too
    assert not codes(scheduler, EVENT_JOB_SUBMITTED)
    assert "Error submitting" not in caplog.text
    assert not ran and leading.lease is None
    other.release()
    wait_until(lambda: sorted(ran) == [1, 2])


async def test_an_asyncio_scheduler_leads_within_an_async_with(node):
    with Interlock(node.url) as locks:
        scheduler, seen, order = AsyncIOScheduler(job_defaults={"misfire_grace_time": None}), [], []
        scheduler.add_executor(ThreadPoolExecutor(1), "threads")

        async def job():
            await asyncio.sleep(0)
            seen.append(current_lease().term)
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.3)  # it cleans up
                order.append("ended")

        def blocking():
            seen.append(current_lease().term)

        async with Leading(scheduler, locks.election("schedule")) as leading:
            scheduler.add_job(job)
            scheduler.add_job(blocking)
            scheduler.add_job(blocking, executor="threads")
            for _ in range(600):
                if len(seen) == 3:
                    break
                await asyncio.sleep(0.05)
            assert seen == [leading.lease.term] * 3
            waiting = asyncio.create_task(asyncio.to_thread(locks.election("schedule").campaign))
            waiting.add_done_callback(lambda _: order.append("next"))
        next_one = await waiting
        await asyncio.sleep(0)
        assert order == ["ended", "next"]
        assert not scheduler.running
        next_one.release()


def test_a_process_pool_runs_the_jobs_of_the_leader(led):
    scheduler, leading = led(executors={"default": ProcessPoolExecutor(1)})
    scheduler.add_job(os.getpid)
    scheduler.start()
    wait_until(lambda: codes(scheduler, EVENT_JOB_EXECUTED), 60)
    assert codes(scheduler, EVENT_JOB_EXECUTED)[0].retval != os.getpid()
    leading.stop()


def test_to_stop_twice_is_to_stop_once(led):
    scheduler, leading = led()
    leading.stop()  # it has not been started
    scheduler.start()
    wait_until(lambda: leading.lease)
    leading.stop()
    leading.stop()
    assert leading.lease is None and not scheduler.running


# Bad input


def test_what_does_not_fit_is_refused_at_once(locks):
    scheduler, election = BackgroundScheduler(), locks.election("schedule")
    for wrong, said in (
        (locks, "takes an election, such as .*election"),
        (locks.lock("schedule"), "takes an election"),
        ("schedule", "takes an election"),
        (
            interlock.aio.Interlock(locks._address if False else "redis://127.0.0.1:1").election("x"),
            "not of interlock.aio",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            Leading(scheduler, wrong)
    with pytest.raises(ConfigError, match="takes a scheduler of APScheduler 3"):
        Leading(locks, election)
    Leading(scheduler, election)
    with pytest.raises(ConfigError, match="has a Leading already"):
        Leading(scheduler, election)
    running = BackgroundScheduler()
    running.start()
    with pytest.raises(ConfigError, match="has been started already"):
        Leading(running, election)
    running.shutdown()


def test_the_module_needs_its_extra():
    code = """
import sys
sys.modules["apscheduler"] = None
try:
    import interlock.contrib.apscheduler
except ModuleNotFoundError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs APScheduler 3" in ran.stdout and ".[apscheduler]" in ran.stdout


# The example


def test_the_example_ticks_once_a_second_whichever_of_its_workers_dies(start, node):
    port = free_ports()[0]
    gunicorn = start(
        "-m", "gunicorn", "app:app", cwd=EXAMPLE, env={"INTERLOCK_URL": node.tcp_url, "BIND": f"127.0.0.1:{port}"}
    )
    gunicorn.says("Booting worker", times=3)
    gunicorn.says("tick", times=3)

    def workers_that_tick():
        return list(
            dict.fromkeys(
                int(line.split("process ")[1].split(",")[0])
                for line in gunicorn.output.splitlines()
                if line.startswith("tick")
            )
        )

    (first,) = workers_that_tick()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(workers_that_tick()) == 2, 60)
    gunicorn.says("Booting worker", times=4)
    count = gunicorn.output.count("tick at")
    gunicorn.says("tick at", times=count + 3)
    assert len(workers_that_tick()) == 2
    with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
        assert answer.read().decode().split()[2] in {"leads", "follows"}
    assert gunicorn.end() == 0
    assert "Traceback" not in gunicorn.output
    with Interlock(node.url) as locks:  # the last leader has resigned
        assert locks.election("schedule").campaign(5).release()
