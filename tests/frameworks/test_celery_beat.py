"""Beats on several machines, each with a schedule file of its own: one ticks. Real kills, stops and cuts."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery

from frameworks.celery_worker import LONG, TASKS, beat, client_of
from harness.clock import machine_time
from harness.modes import wait_until
from harness.proxy import Proxy
from harness.servers import Node
from interlock import ConfigError
from interlock.contrib.celery import Beat, locks_of

NOTES = "{lock:beat:shop}{sent}"
LEADS = "this one sends the tasks from now on"
ENDS = "this one sends nothing any more"


def conf(due="at_most_once", ttl=2.0, **schedule):
    """Settings for beats: each entry is called by its interval in seconds, and marks its own name."""
    schedule = schedule or {"tick": 1.0}
    entries = {name: {"task": f"{TASKS}mark", "schedule": every, "args": [name]} for name, every in schedule.items()}
    return json.dumps({"beat_schedule": entries, "interlock_beat_due": due, "interlock_beat_ttl": ttl})


@pytest.fixture
def client(node):
    with node:
        made = client_of(node)
        yield made
        made.close()


def sent(client, name="tick") -> Counter:
    """How many messages of this entry each process has sent."""
    headers = [json.loads(message)["headers"] for message in client.witness.lrange("celery", 0, -1)]
    return Counter(int(each["origin"][3:].split("@")[0]) for each in headers if each["argsrepr"] == f"['{name}']")


def counted(client, name="tick") -> int:
    """How many runs of this entry the notes have."""
    return int(client.witness.hget(NOTES, name).split()[0])


def test_one_beat_ticks_and_the_next_takes_over_at_once_from_one_that_ends(client, node, tmp_path):
    env = {"CONF": conf(ttl=20), "TTL": "20"}
    with beat(node, tmp_path, "a", env) as one, beat(node, tmp_path, "b", env) as other:
        wait_until(lambda: sent(client).total() >= 4)
        assert len(sent(client)) == 1
        first = one if one.pid in sent(client) else other
        second = other if first is one else one
        assert first.end() == 0
        before = sent(client)
        second.says(LEADS, within=10)
        wait_until(lambda: sent(client)[second.pid] >= 3)
        assert sent(client)[first.pid] == before[first.pid]
        assert sent(client).total() <= counted(client) <= sent(client).total() + 1  # noted first, then sent


@pytest.mark.parametrize(
    ("due", "dies", "messages"),
    [
        ("at_most_once", "before", 0),
        ("at_most_once", "after", 1),
        ("at_least_once", "before", 1),
        ("at_least_once", "after", 2),
    ],
)
def test_an_entry_that_was_due_when_its_beat_died_is_sent_as_the_user_chose(
    client, node, tmp_path, due, dies, messages
):
    """The first beat is killed just before or just after the broker has the message; the ttl is 2 s."""
    yesterday = datetime.now(UTC) - timedelta(days=1)
    client.witness.hset(NOTES, "job", f"7 {yesterday.isoformat()}")
    env = {"CONF": conf(due, job=3600.0, tick=1.0)}
    with beat(node, tmp_path, "a", {**env, "DIE": f"{dies} {TASKS}mark"}) as one:
        assert one.ended(LONG) == -signal.SIGKILL
    with beat(node, tmp_path, "b", env) as other:
        other.says(LEADS)
        wait_until(lambda: sent(client)[other.pid] >= 2)  # it has looked at each entry
        assert sent(client, "job").total() == messages
        wait_until(lambda: counted(client, "job") == 8)  # at least once: noted after it was sent


@pytest.mark.parametrize("due", ["at_most_once", "at_least_once"])
def test_a_killed_beat_is_followed_within_its_ttl_and_a_second(client, node, tmp_path, due):
    env = {"CONF": conf(due)}
    with beat(node, tmp_path, "a", env) as one:
        one.says(LEADS)
        with beat(node, tmp_path, "b", env) as other:
            other.says("beat: Starting")
            wait_until(lambda: sent(client)[one.pid] >= 2)
            one.kill_all()
            killed = machine_time()
            other.says(LEADS, within=2 + 1 + 4)  # a busy machine
            assert machine_time() - killed < 2 + 1 + 4
            wait_until(lambda: sent(client)[other.pid] >= 2)
            runs, twice = counted(client), due == "at_least_once"
            assert runs - 1 <= sent(client).total() <= runs + 1 + twice


def more(client, pid, number):
    """Wait until this process has sent so many more."""
    seen = sent(client)[pid]
    wait_until(lambda: sent(client)[pid] >= seen + number)


def test_a_beat_that_was_stopped_sends_nothing_when_it_goes_on(client, node, tmp_path):
    env = {"CONF": conf(tick=0.5)}
    with beat(node, tmp_path, "a", env) as one:
        one.says(LEADS)
        with beat(node, tmp_path, "b", env) as other:
            for stopped, leads, times in ((one, other, 1), (other, one, 2)):
                more(client, stopped.pid, 3)
                stopped.send(signal.SIGSTOP)  # just after it has sent one
                leads.says(LEADS, times=times)
                before = sent(client)[stopped.pid]
                stopped.send(signal.SIGCONT)
                stopped.says(ENDS)
                more(client, leads.pid, 3)
                assert sent(client)[stopped.pid] == before
                assert sent(client).total() <= counted(client)  # each was noted once, and sent once at most
            assert counted(client) <= sent(client).total() + 3  # one that was stopped in between is not sent


def test_a_beat_that_is_cut_off_from_the_locks_sends_nothing_though_it_has_the_broker(client, node, tmp_path):
    env = {"CONF": conf(tick=0.2)}
    with Proxy(node.socket) as proxy, beat(node, tmp_path, "a", {**env, "LOCKS": proxy.url}) as one:
        one.says(LEADS)
        with beat(node, tmp_path, "b", env) as other:
            wait_until(lambda: sent(client)[one.pid] >= 5)
            proxy.hold = True
            other.says(LEADS)
            before = sent(client)[one.pid]
            wait_until(lambda: sent(client)[other.pid] >= 10)
            assert sent(client)[one.pid] == before
            proxy.hold = False
            one.says(ENDS)
            assert sent(client)[one.pid] == before
            assert sent(client).total() <= counted(client) <= sent(client).total() + 2


def test_beats_without_the_server_of_the_locks_send_nothing_and_say_so_once(client, node, tmp_path):
    with Node() as locks:
        locks.kill()
        env = {"CONF": conf(tick=0.2), "LOCKS": locks.url}
        with beat(node, tmp_path, "a", env) as one, beat(node, tmp_path, "b", env) as other:
            for each in (one, other):
                each.says("no server of the locks answers, so nothing is sent")
            started = time.monotonic()
            wait_until(lambda: time.monotonic() > started + 2)
            assert not sent(client)
            locks.restart()
            wait_until(lambda: sent(client).total() >= 5)
            assert len(sent(client)) == 1
            for each in (one, other):
                assert len(each.says("no server of the locks answers")) == 1


@pytest.mark.parametrize(("due", "messages"), [("at_most_once", 0), ("at_least_once", 1)])
def test_a_beat_whose_broker_is_away_sends_later_what_it_must_send_at_least_once(client, node, tmp_path, due, messages):
    retry = {"result_backend": "cache+memory://", "task_publish_retry": False}
    env = {"CONF": json.dumps({**json.loads(conf(due, job=3600.0, tick=1.0)), **retry})}
    with Node() as locks, client_of(locks).witness as notes:
        soon = datetime.now(UTC) - timedelta(seconds=3600 - 15)
        notes.hset(NOTES, "job", f"7 {soon.isoformat()}")
        with beat(node, tmp_path, "a", {**env, "LOCKS": locks.url}) as one:
            wait_until(lambda: sent(client).total() >= 1)
            assert not sent(client, "job")
            node.kill()
            one.says("Sending due task job")
            one.says("Message Error")
            node.restart()
            wait_until(lambda: sent(client).total() >= 3 and sent(client, "job").total() >= messages)
            assert sent(client, "job").total() == messages
            wait_until(lambda: int(notes.hget(NOTES, "job").split()[0]) == 8)


def test_an_entry_that_can_not_be_sent_is_tried_again_and_holds_no_other_back(client, node, tmp_path):
    settings = json.loads(conf("at_least_once", tick=1.0, bad=3600.0))
    settings["beat_schedule"]["bad"]["options"] = {"serializer": "unknown"}
    client.witness.hset(NOTES, "bad", f"7 {(datetime.now(UTC) - timedelta(days=1)).isoformat()}")
    with beat(node, tmp_path, "a", {"CONF": json.dumps(settings)}) as one:
        one.says("Couldn't apply scheduled task bad", times=2)
        wait_until(lambda: sent(client).total() >= 4)
    assert counted(client, "bad") == 7


def test_an_entry_that_a_killed_beat_has_not_sent_is_sent_by_it_at_its_next_start(client, node, tmp_path):
    """Celery has written into the schedule file that it was sent: the note of the locks' server knows better."""
    settings = json.loads(conf("at_least_once", job=3600.0))
    settings["beat_sync_every"] = 1
    bad = json.loads(json.dumps(settings))
    bad["beat_schedule"]["job"]["options"] = {"serializer": "unknown"}
    client.witness.hset(NOTES, "job", f"7 {(datetime.now(UTC) - timedelta(days=1)).isoformat()}")
    with beat(node, tmp_path, "a", {"CONF": json.dumps(bad)}) as one:
        one.says("Couldn't apply scheduled task job")
    with beat(node, tmp_path, "a", {"CONF": json.dumps(settings)}) as again:
        again.says(LEADS, times=2)  # the log is the same file
        again.says("Sending due task job", times=2)
        wait_until(lambda: counted(client, "job") == 8)
        assert sent(client, "job").total() == 1


@pytest.mark.parametrize("due", ["at_most_once", "at_least_once"])
def test_a_beat_that_is_ended_while_the_broker_hangs_ends(client, node, tmp_path, due):
    day, soon = timedelta(days=1), timedelta(seconds=3600 - 15)
    client.witness.hset(NOTES, "first", f"7 {(datetime.now(UTC) - day).isoformat()}")
    client.witness.hset(NOTES, "job", f"7 {(datetime.now(UTC) - soon).isoformat()}")
    with Proxy(node.socket) as proxy:
        settings = {**json.loads(conf(due, first=3600.0, job=3600.0)), "broker_url": f"redis+socket://{proxy.path}"}
        with beat(node, tmp_path, "a", {"CONF": json.dumps(settings)}) as one:
            wait_until(lambda: sent(client, "first").total() == 1)
            proxy.hold = True
            assert not sent(client, "job")
            one.says("Sending due task job", within=LONG)
            wait_until(lambda: counted(client, "job") == 7 + (due == "at_most_once"))
            assert one.end() == 0
            assert "Error" not in one.output
            assert client.locks.election("beat:shop").leader() is None  # it has given up the lead
            assert counted(client, "job") == 7 + (due == "at_most_once")


# In this process


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "does not say where its locks are"),
        ({"interlock_beat_due": "once"}, "interlock_beat_due must be 'at_most_once' or 'at_least_once', not 'once'"),
        ({"interlock_beat_ttl": 60}, "interlock_beat_name or interlock_beat_ttl: .* ttl must be at most max_ttl"),
        ({"interlock_beat_name": "a\nb"}, "interlock_beat_name or interlock_beat_ttl: .* control character"),
    ],
)
def test_a_wrong_setting_is_an_error_at_the_start(monkeypatch, tmp_path, settings, said):
    monkeypatch.delenv("INTERLOCK_URL", raising=False)
    app = Celery("shop", set_as_current=False)
    app.conf.update({"interlock_url": "redis://localhost" if settings else None, **settings})
    with pytest.raises(ConfigError, match=said):
        Beat(app=app, schedule_filename=str(tmp_path / "schedule"))


@pytest.mark.parametrize("due", ["at_most_once", "at_least_once"])
def test_a_beat_that_takes_over_after_the_locks_server_has_lost_its_notes(node, tmp_path, caplog, due):
    """Its own file is old. At most once: it does not send what was due while another beat led."""
    with node:
        beats = []
        for name in ("a", "b"):
            app = Celery("shop", set_as_current=False)
            app.conf.update(interlock_url=node.url, interlock_options={"max_ttl": 2}, interlock_beat_ttl=2)
            app.conf.update(beat_schedule={"job": {"task": "x", "schedule": 3600.0}}, interlock_beat_due=due)
            beats.append(Beat(app=app, schedule_filename=str(tmp_path / name)))
        one, other = beats
        old = other.schedule["job"]
        old.last_run_at, old.total_run_count = old.last_run_at - timedelta(days=20), 5
        assert one._leads()
        assert not other._leads()
        node.kill()
        node.restart()
        wait_until(other._leads)
        assert "has restarted without its notes" in caplog.text
        assert other.is_due(other.schedule["job"])[0] == (due == "at_least_once")
        for each in beats:
            each.close()
            locks_of(each.app).close()


def test_the_note_of_an_entry_that_is_gone_is_deleted_after_a_day(client, node, tmp_path):
    now = datetime.now(UTC)
    client.witness.hset(NOTES, "gone", f"7 {(now - timedelta(days=2)).isoformat()}")
    client.witness.hset(NOTES, "new", f"7 {(now - timedelta(hours=2)).isoformat()}")
    app = Celery("shop", set_as_current=False)
    app.conf.update(interlock_url=node.url, beat_schedule={"job": {"task": "x", "schedule": 3600.0}})
    one = Beat(app=app, schedule_filename=str(tmp_path / "schedule"))
    assert one._leads()
    assert {"job", "new"} <= client.witness.hgetall(NOTES).keys()
    assert not client.witness.hexists(NOTES, "gone")
    one.close()
    locks_of(app).close()


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", None])
def test_a_beat_goes_on_with_the_notes_of_another_one_in_whatever_time_zone(node, tmp_path, zone):
    """Also the notes of an entry that has never run: since when it waits. An entry that is gone is no error."""
    with node:
        beats = []
        for name in ("a", "b"):
            app = Celery("shop", set_as_current=False)
            schedule = {name: {"task": "x", "schedule": 3600.0} for name in ("job", "new")}
            app.conf.update(interlock_url=node.url, beat_schedule=schedule, interlock_beat_ttl=2)
            app.conf.update(timezone=zone) if zone else app.conf.update(enable_utc=False)
            if name == "a":
                app.conf.beat_schedule = {**schedule, "gone": {"task": "x", "schedule": 60.0}}
            beats.append(Beat(app=app, schedule_filename=str(tmp_path / name)))
        one, other = beats
        assert one._leads()
        assert not other._leads()
        assert one._may_send(one.schedule["job"])
        sent_at = one.reserve(one.schedule["job"]).last_run_at
        since = one.schedule["new"].last_run_at
        one.close()
        assert other._leads()
        assert abs(other.schedule["job"].last_run_at - sent_at) < timedelta(seconds=5)
        assert (other.schedule["job"].total_run_count, other.schedule["new"].total_run_count) == (1, 0)
        assert other.schedule["new"].last_run_at == since
        assert other.schedule["new"].last_run_at.tzinfo == since.tzinfo
        assert not other.is_due(other.schedule["job"])[0]
        other.close()
        for each in beats:
            locks_of(each.app).close()
