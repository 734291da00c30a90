"""interlock.compat.redis_lock beside python-redis-lock, on one key. Its own tests run in test_originals.py."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

import interlock
from harness.clock import machine_time
from harness.matrix import required
from harness.modes import SLACK, wait_until
from interlock import ConfigError
from interlock._protocol.run_to_end import run
from interlock.compat import _plain_key, _signals, redis_lock
from interlock.compat.redis_lock import Lock

pytestmark = pytest.mark.runs_on(
    "valkey-9.1", full="each server", modes="threads", starts="servers and a cluster of valkey-9.1"
)
rule = pytest.mark.rule
NEVER = 3600.0  # seconds


def original_path() -> Path:
    for folder in Path(sys.prefix, "originals").glob("python_redis_lock-*"):
        return folder / "src"
    required("the sdist of python-redis-lock could not be downloaded; scripts/test tries it")
    raise AssertionError


@pytest.fixture
def original(monkeypatch):
    """The class of python-redis-lock."""
    monkeypatch.syspath_prepend(str(original_path()))
    return pytest.importorskip("redis_lock").Lock


@pytest.fixture
def kinds(original):
    """Both classes, by name."""
    return {"old": original, "new": Lock}


@pytest.fixture
def user(server, clean):
    """A client as a user has it."""
    with redis.Redis.from_url(server.url) as made:
        yield made


@pytest.fixture(autouse=True)
def _closed():
    yield
    redis_lock.close()
    wait_until(
        lambda: not [each for each in threading.enumerate() if "interlock" in each.name or "renewal" in each.name]
    )


@pytest.fixture
def no_looks(monkeypatch):
    """No worker pushes a signal that is missing."""
    monkeypatch.setattr(_signals, "FIRST_LOOK", NEVER)


@contextlib.contextmanager
def waiting(lock, client, number=1, **options):
    """A thread that acquires the lock; waits until so many clients block. Yields what it gets."""
    got = []
    thread = threading.Thread(target=lambda: got.append((lock.acquire(**options), machine_time())))
    thread.start()
    wait_until(lambda: blocked(client) == number)
    yield got
    thread.join(60)
    assert got, "the waiter never returned"


def blocked(client) -> int:
    return client.info("clients")["blocked_clients"]


PROGRAM = """
import os, signal, sys, time
import redis
kind, url, what = sys.argv[1:]
if kind == "new":
    from interlock.compat.redis_lock import Lock
else:
    from redis_lock import Lock
client = redis.Redis.from_url(url)
lock = Lock(client, "a", expire=0.5 if what == "hold" else 30)
if what == "die woken":  # between BLPOP and the next request
    blpop = client.blpop
    def killing(*args):
        blpop(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    client.blpop = killing
print("asks", flush=True)
lock.acquire()
print("holds", flush=True)
time.sleep(3600)
"""


@contextlib.contextmanager
def process(kind, server, what):
    """A process that acquires the lock."""
    environment = os.environ | {"PYTHONPATH": str(original_path())}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind, server.url, what], stdout=subprocess.PIPE, text=True, env=environment
    ) as started:
        try:
            assert started.stdout.readline() == "asks\n"
            yield started
        finally:
            started.kill()


# Beside the original


@rule(1, 3)
@pytest.mark.parametrize(("holder", "waiter"), [("old", "new"), ("new", "old"), ("new", "new")])
@pytest.mark.parametrize("end", ["release", "reset", "reset_all"])
def test_the_end_of_a_holder_wakes_a_waiter_of_either_library(kinds, user, clean, no_looks, holder, waiter, end):
    first, second = (kinds[each](user, "a", expire=30) for each in (holder, waiter))
    assert first.acquire() and not second.acquire(blocking=False)
    with waiting(second, clean) as got:
        if end == "reset_all":
            redis_lock.reset_all(user)
        else:
            getattr(first, end)()
        wait_until(lambda: got, within=SLACK)
    assert got[0][0] is True
    assert clean.get("lock:a").decode() == second.id == first.get_owner_id() and first.locked()
    second.release()
    assert clean.get("lock:a") is None


@rule(1)
def test_a_waiter_keeps_its_place_among_waiters_that_block_for_long(kinds, user, clean, monkeypatch):
    monkeypatch.setattr(_signals, "FIRST_LOOK", 0.01)
    monkeypatch.setattr(_signals, "LOOK_INTERVAL", 0.01)
    holder, new, old = Lock(user, "a", expire=30), Lock(user, "a", expire=30), kinds["old"](user, "a", expire=30)
    holder.acquire()
    with waiting(new, clean) as first, waiting(old, clean, 2) as second:
        looks = clean.info("commandstats")["cmdstat_evalsha"]["calls"]
        wait_until(lambda: clean.info("commandstats")["cmdstat_evalsha"]["calls"] > looks + 1)
        holder.release()
        wait_until(lambda: first)
        assert not second
        new.release()
    old.release()


@rule(4)
@pytest.mark.parametrize("other", ["old", "new"])
def test_a_waiter_that_dies_with_the_signal_delays_the_next_one_by_a_second_at_most(kinds, user, clean, server, other):
    holder, next_one = Lock(user, "a", expire=60), Lock(user, "a", expire=60)
    holder.acquire()
    with process(other, server, "die woken") as dying:
        wait_until(lambda: blocked(clean) == 1)
        with waiting(next_one, clean, 2) as got:
            released = machine_time()
            holder.release()
            assert dying.wait(60) == -signal.SIGKILL
            wait_until(lambda: got)
            assert got[0][1] - released < 1 + SLACK
    next_one.release()


@rule(4)
def test_waiters_of_the_original_are_woken_after_such_a_death_too(kinds, user, clean, server):
    holder, old, new = (kinds[each](user, "a", expire=60) for each in ("new", "old", "new"))
    holder.acquire()
    with process("old", server, "die woken"):
        wait_until(lambda: blocked(clean) == 1)
        with waiting(old, clean, 2) as got, waiting(new, clean, 3):
            holder.release()
            wait_until(lambda: got, within=1 + SLACK)
            old.release()
    new.release()


@rule(4)
def test_a_killed_holder_is_followed_when_its_lock_expires(user, clean, server):
    with process("new", server, "hold") as holder:
        assert holder.stdout.readline() == "holds\n"
        holder.send_signal(signal.SIGKILL)
        begin = machine_time()
        with Lock(user, "a", expire=30) as mine:
            assert machine_time() - begin < 1 + 1 + SLACK
            assert clean.get("lock:a").decode() == mine.id


@rule(4)
def test_a_waiter_that_is_interrupted_after_it_was_woken_passes_the_signal_on(kinds, server, user, clean, no_looks):
    holder, old, ended = Lock(user, "a", expire=60), kinds["old"](user, "a", expire=60), []
    with NoBlpop.from_url(server.url) as client:
        client.error, client.wakes_first = KeyboardInterrupt(), True
        holder.acquire()

        def interrupted() -> None:
            with pytest.raises(KeyboardInterrupt):
                Lock(client, "a", expire=60).acquire()
            ended.append(True)

        thread = threading.Thread(target=interrupted)
        thread.start()
        wait_until(lambda: blocked(clean) == 1)
        with waiting(old, clean, 2) as got:
            holder.release()
            wait_until(lambda: got, within=SLACK)
        thread.join()
    assert ended
    old.release()


def test_errors_are_those_of_the_original_if_it_is_installed(original):
    program = "from interlock.compat import redis_lock as r; print(r.NotAcquired.__module__, *r.NotAcquired.__bases__)"
    missing = "import sys; sys.modules['redis_lock'] = None; "  # although this environment may have it
    for first, module in (("", "redis_lock"), (missing, "interlock.compat._redis_lock_errors")):
        ran = subprocess.run(
            [sys.executable, "-c", first + program], env=os.environ | {"PYTHONPATH": str(original_path())},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert ran.stdout.split() == [module, "<class", "'RuntimeError'>"]
    theirs = sys.modules[original.__module__]
    for name in [each for each in redis_lock.__all__ if each not in {"Lock", "close"}]:
        assert hasattr(theirs, name)


# Timeouts and arguments


@pytest.mark.parametrize("timeout", [0.2, "0.2"])
def test_a_timeout_may_have_fractions(user, clean, timeout):
    holder, mine = Lock(user, "a", expire=30), Lock(user, "a", expire=30)
    holder.acquire()
    begin, machine = time.monotonic(), machine_time()
    assert mine.acquire(timeout=timeout) is False
    assert time.monotonic() - begin >= float(timeout) and machine_time() - machine < float(timeout) + SLACK
    holder.release()


@pytest.mark.parametrize("timeout", [0, None])
def test_no_timeout_waits_for_ever_as_in_the_original(user, clean, timeout):
    holder, mine = Lock(user, "a", expire=30), Lock(user, "a", expire=30)
    holder.acquire()
    with waiting(mine, clean, timeout=timeout) as got:
        time.sleep(0.1)
        assert not got
        holder.release()
    mine.release()


def test_expire_may_have_fractions_and_none_lasts_for_ever(user, clean):
    mine = Lock(user, "a", expire=0.4)
    mine.acquire()
    assert 0 < clean.pttl("lock:a") <= 400
    mine.extend(0.9)
    assert 400 < clean.pttl("lock:a") <= 900
    mine.extend()
    assert 0 < clean.pttl("lock:a") <= 400
    mine.release()
    eternal = Lock(user, "a")
    eternal.acquire()
    assert clean.pttl("lock:a") == -1
    with pytest.raises(redis_lock.NotExpirable, match="lock:a"):
        eternal.extend(1)
    with pytest.raises(TypeError, match="expire"):
        eternal.extend()
    eternal.release()
    with pytest.raises(redis_lock.NotAcquired, match="lock:a"):
        mine.extend(1)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"signal_expire": 0}, ConfigError, "signal_expire must be a whole number"),
        ({"name": "a\n"}, ConfigError, "control character"),
        ({"name": "{a}{b}"}, ConfigError, "one pair of braces"),
        ({"expire": -0.5}, ValueError, "must not be negative"),
        ({"expire": float("nan")}, ValueError, "finite"),
        ({"auto_renewal": True}, ValueError, "needs an expire"),
        ({"id": 7}, TypeError, "bytes or str, not int"),
        ({"redis_client": object()}, ValueError, "strict=False"),
    ],
)
def test_an_option_that_cannot_be_kept_raises_at_once(user, options, error, says):
    with pytest.raises(error, match=says):
        Lock(**{"redis_client": user, "name": "a", **options})


def test_a_call_that_cannot_be_kept_raises_and_says_why(user, clean):
    fakeredis = pytest.importorskip("fakeredis")
    with pytest.raises(ConfigError, match="has no server"):
        Lock(fakeredis.FakeStrictRedis(), "a").acquire()
    with pytest.raises(ConfigError, match=r"builtins\.object|object is neither"):
        Lock(object(), "a", strict=False).acquire()
    mine = Lock(user, "a", expire=1)
    for error, arguments in (
        (redis_lock.InvalidTimeout, {"timeout": -0.5}),
        (redis_lock.TimeoutTooLarge, {"timeout": 1.5}),
        (redis_lock.TimeoutNotUsable, {"timeout": 1, "blocking": False}),
    ):
        with pytest.raises(error, match="lock:a"):
            mine.acquire(**arguments)


@pytest.mark.parametrize("decode_responses", [True, False])
def test_an_id_of_the_users_own(server, clean, decode_responses):
    with redis.Redis.from_url(server.url, decode_responses=decode_responses) as client:
        mine, same, other = (Lock(client, "a", expire=30, id=each) for each in ("host-1", b"host-1", b"\xff"))
        assert other.id == "/w==" and mine.get_owner_id() is None
        assert mine.acquire() and mine.get_owner_id() == "host-1"
        with pytest.raises(redis_lock.AlreadyAcquired, match="host-1"):
            same.acquire(blocking=False)
        assert other.acquire(blocking=False) is False
        with pytest.raises(redis_lock.NotAcquired):
            other.release()
        same.extend(60)
        assert clean.ttl("lock:a") > 30
        same.release()
        with pytest.raises(redis_lock.NotAcquired):
            mine.release()


# The network


@rule(8)
def test_the_reply_to_an_acquire_is_lost_and_the_lock_is_held_once(proxy, clean):
    with redis.Redis.from_url(proxy.url) as client:
        mine, got = Lock(client, "a", expire=30), []
        with mine:
            pass
        proxy.drop_replies = True
        thread = threading.Thread(target=lambda: got.append(mine.acquire(timeout=20)))
        thread.start()
        wait_until(lambda: clean.get("lock:a"))
        proxy.drop_replies = False
        proxy.cut()
        thread.join()
        assert got == [True] and clean.get("lock:a").decode() == mine.id
        mine.release()


@rule(8)
def test_an_acquire_that_ends_with_an_error_is_undone_and_wakes_the_next_waiter(proxy, user, clean, no_looks):
    with redis.Redis.from_url(proxy.url) as client:
        mine = Lock(client, "a", expire=60)
        with mine:
            pass
        redis_lock.for_threads.plain(client).core.try_for = 0.2
        proxy.drop_replies = True
        with pytest.raises(redis.ConnectionError, match="lock:a"):
            mine.acquire(blocking=False)
        assert clean.get("lock:a").decode() == mine.id
        clean.delete("lock-signal:a")
        with waiting(Lock(user, "a", expire=30), clean) as got:
            proxy.drop_replies = False
            wait_until(lambda: got, within=2 + SLACK)
        clean.delete("lock:a")
        with mine:
            pass


@rule(8)
def test_the_reply_to_a_release_is_lost_and_the_release_is_no_error(proxy, clean):
    with redis.Redis.from_url(proxy.url) as client:
        mine = Lock(client, "a", expire=30)
        mine.acquire()
        proxy.drop_replies = True
        thread = threading.Thread(target=mine.release)
        thread.start()
        wait_until(lambda: not clean.get("lock:a"))
        proxy.drop_replies = False
        proxy.cut()
        thread.join()
        assert mine._token is None


@rule(8)
def test_a_late_copy_of_a_release_does_not_end_a_later_section_of_the_same_lock(user, clean):
    mine = Lock(user, "a", expire=30)
    mine.acquire()
    earlier = mine._token
    mine.release()
    mine.acquire()
    core, value = redis_lock.for_threads.plain(user).core, mine.id.encode()
    release = _plain_key.release(core, mine._resource, value, whose=_plain_key.BY_HOLDER, token=earlier)
    assert run(release) is False
    assert clean.get("lock:a") == value
    clean.delete("{lock:a}{plain-record}")  # it lasts for 5 minutes more than the ttl at the acquire
    mine.release()


def test_a_release_after_the_lock_expired_does_not_end_the_section_of_another_with_that_id(user, clean):
    mine, later = (Lock(user, "a", expire=30, id="host-1") for _ in range(2))
    mine.acquire()
    clean.delete("lock:a")
    later.acquire()
    with pytest.raises(redis_lock.NotAcquired):
        mine.release()
    assert later.locked()
    later.release()


@rule(8)
def test_a_with_that_finds_no_server_is_released_when_the_server_is_back(proxy, clean, monkeypatch, caplog):
    monkeypatch.setattr("interlock._client.acquiring.RETRY_FOR", 0.1)
    with redis.Redis.from_url(proxy.url) as client:
        mine = Lock(client, "a", expire=60)
        core = redis_lock.for_threads.plain(client).core
        core.try_for = 0.2
        with pytest.raises(redis.ConnectionError, match="lock:a"), mine:
            proxy.refuse = True
            proxy.cut()
        assert clean.get("lock:a").decode() == mine.id
        proxy.refuse = False
        assert mine.acquire(timeout=20), "it takes its own earlier section for AlreadyAcquired"
        with pytest.raises(ZeroDivisionError), contextlib.ExitStack() as stack:
            stack.push(mine)
            proxy.refuse = True
            proxy.cut()
            1 / 0  # noqa: B018
        assert "the release failed" in caplog.text
        proxy.refuse = False
        wait_until(lambda: not clean.get("lock:a"))


def test_an_error_of_the_release_does_not_hide_the_error_of_the_body(user, clean, caplog):
    mine = Lock(user, "a", expire=30)
    with pytest.raises(redis_lock.NotAcquired), mine:
        clean.delete("lock:a")
    with pytest.raises(ZeroDivisionError), mine:
        clean.delete("lock:a")
        1 / 0  # noqa: B018
    assert "lock:a" in caplog.text
    with mine, pytest.raises(redis_lock.NotAcquired, match="blocking=False"), Lock(user, "a", blocking=False):
        pass


class NoBlpop(redis.Redis):
    """A client whose BLPOP fails."""

    error: BaseException
    wakes_first = False

    def blpop(self, *args):
        if self.wakes_first:
            super().blpop(*args)
        raise self.error


@pytest.mark.parametrize("error", [redis.ConnectionError("gone"), redis.ResponseError("UNBLOCKED force unblock")])
def test_a_waiter_whose_blpop_fails_asks_again(server, user, clean, error):
    with NoBlpop.from_url(server.url) as client:
        client.error = error
        holder, mine = Lock(user, "a", expire=0.5), Lock(client, "a", expire=30)
        holder.acquire()
        assert mine.acquire(timeout=20)
        mine.release()


def test_a_waiter_whose_blpop_is_refused_raises_the_error(server, user, clean):
    with NoBlpop.from_url(server.url) as client, Lock(user, "a", expire=30):
        for error in (redis.AuthenticationError("no"), redis.exceptions.NoPermissionError("no")):
            client.error = error
            with pytest.raises(type(error)):
                Lock(client, "a", expire=30).acquire()


def test_one_blpop_ends_before_the_socket_timeout_of_the_client(server, user, clean):
    with redis.Redis.from_url(server.url, socket_timeout=0.3, retry=None) as client:
        holder, mine = Lock(user, "a", expire=30), Lock(client, "a", expire=30)
        holder.acquire()
        with waiting(mine, clean) as got:
            time.sleep(0.5)
            holder.release()
        assert got[0][0]
        mine.release()
    assert redis_lock._longest_block(redis.Redis(socket_timeout=None)) == redis_lock.MAX_BLOCK
    assert redis_lock._longest_block(redis.Redis(socket_timeout=5)) == 4.75
    assert redis_lock._longest_block(object()) in {redis_lock.MAX_BLOCK, 4.75}


# Renewal


class OftenRenewed(Lock):
    """As python-redis-lock's docs say how to renew more often."""

    def __init__(self, *args, **options):
        super().__init__(*args, auto_renewal=True, **options)
        self._lock_renewal_interval = 0.05


def test_a_lock_is_renewed_until_its_release(user, clean):
    assert Lock(user, "a", expire=3, auto_renewal=True)._lock_renewal_interval == 2
    with OftenRenewed(user, "a", expire=5) as mine:
        thread = mine._lock_renewal_thread
        clean.pexpire("lock:a", 1000)
        wait_until(lambda: clean.pttl("lock:a") > 4000)
    assert mine._lock_renewal_thread is None and not thread.is_alive()
    with mine:
        assert mine._lock_renewal_thread.is_alive()


@rule(6)
def test_a_renewal_of_what_is_lost_extends_nothing_and_is_logged(user, clean, caplog):
    mine = OftenRenewed(user, "a", expire=5)
    mine.acquire()
    clean.set("lock:a", "theirs", px=1500)
    wait_until(lambda: "is lost: its key expired" in caplog.text)
    assert [each.levelno for each in caplog.records] == [logging.ERROR]
    assert 0 < clean.pttl("lock:a") <= 1500
    clean.delete("lock:a")
    assert mine.acquire(), "an acquire after the loss"
    mine.release()


@rule(6)
def test_a_renewal_outlives_a_restart_of_the_server(server_pool, caplog):
    with server_pool.spare("valkey-9.1", config={"appendonly": "yes", "appendfsync": "always"}) as node:
        node.start()
        with redis.Redis.from_url(node.url) as client:
            mine, waiter = OftenRenewed(client, "a", expire=8), Lock(client, "a", expire=30)
            mine.acquire()
            with waiting(waiter, client) as got:
                node.kill()
                wait_until(lambda: "interlock tries again" in caplog.text)
                node.restart()
                client.pexpire("lock:a", 4000)
                wait_until(lambda: client.pttl("lock:a") > 5000)
                mine.release()
            assert got[0][0] and not [each for each in caplog.records if each.levelno > logging.WARNING]
            waiter.release()
            redis_lock.close()


@rule(6)
def test_a_renewal_that_fails_for_the_whole_expire_is_logged_as_a_loss(proxy, clean, caplog):
    with redis.Redis.from_url(proxy.url) as client:
        mine = OftenRenewed(client, "a", expire=1)
        mine.acquire()
        proxy.refuse = True
        proxy.cut()
        wait_until(lambda: "no renewal has succeeded" in caplog.text)
        assert [each.levelno for each in caplog.records if "renew" in each.message] == [logging.WARNING, logging.ERROR]
        proxy.refuse = False


@rule(6)
def test_the_renewal_ends_when_the_lock_is_collected(user, clean):
    mine = Lock(user, "a", expire=30, auto_renewal=True)
    mine.acquire()
    thread = mine._lock_renewal_thread
    del mine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@rule(11)
def test_a_child_after_a_fork_renews_nothing_and_waits_by_itself(user, clean, server):
    mine, held = OftenRenewed(user, "a", expire=30), Lock(user, "b", expire=30)
    mine.acquire()
    held.acquire()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with redis.Redis.from_url(server.url) as other:
                code = 0 if threading.active_count() == 1 and Lock(other, "b", expire=30).acquire(timeout=20) else 2
        finally:
            os._exit(code)
    wait_until(lambda: blocked(clean) == 1)
    held.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    clean.pexpire("lock:a", 1000)
    wait_until(lambda: clean.pttl("lock:a") > 10_000)
    mine.release()


# Everything at once


def test_reset_all_deletes_each_lock_and_nothing_else(kinds, server, user, clean, monkeypatch):
    monkeypatch.setattr(redis_lock, "SCAN_BATCH", 2)
    names = ["a", "b:{1}", "c", "{d}", "{e}{f}", "g\t"]
    for name in names:
        assert kinds["old"](user, name, expire=30).acquire()
    assert Lock(user, "new", expire=30).acquire()
    clean.hset("lock:hash", "x", 1)
    with interlock.Interlock(server.url) as locks:
        lease = locks.lock("lease:{1}").acquire()
        marked = clean.set("lock:marked", "!quarantine:x")
        before = {*clean.scan_iter()}
        redis_lock.reset_all(user)
        gone = before - {*clean.scan_iter()}
        assert gone == {f"lock:{name}".encode() for name in [*names, "new"]} and marked
        for name in [*names, "new"]:
            assert clean.llen(f"lock-signal:{name}") == 1 and 0 < clean.pttl(f"lock-signal:{name}") <= 1000
        lease.ensure()
        assert lease.release()
    clean.delete("lock:hash", "lock:marked")


@pytest.mark.runs_on("its own servers", modes="threads", starts="a cluster of valkey-9.1")
def test_in_a_cluster_the_name_needs_a_hash_tag(server_pool):
    cluster = server_pool.cluster("valkey-9.1")
    with redis.RedisCluster.from_url("redis://" + cluster.url.rpartition(",")[2]) as client:
        with pytest.raises(ConfigError, match=r"lock:stock:1.*hash tag"):
            Lock(client, "stock:1", expire=30, strict=False).acquire()
        mine, other = (Lock(client, "{stock}:1", expire=30, strict=False) for _ in range(2))
        with mine:
            assert other.acquire(blocking=False) is False and other.locked()
            with pytest.raises(redis_lock.AlreadyAcquired):
                mine.acquire()
            thread = threading.Thread(target=other.acquire)
            thread.start()
        thread.join()
        assert client.get("lock:{stock}:1").decode() == other.id
        client.set("lock:untagged", "old", ex=30)
        redis_lock.reset_all(client)
        assert not client.exists("lock:{stock}:1") and not client.exists("lock:untagged")


@pytest.mark.runs_on("its own servers", modes="threads", starts="sentinels and a server of valkey-9.1")
@pytest.mark.parametrize("way", ["sentinel", "valkey-py"])
def test_each_kind_of_client_will_do(server_pool, way):
    if way == "sentinel":
        node = server_pool.primary("valkey-9.1")
        host, _, port = node.watched.partition("://")[2].partition("/0?")[0].partition(",")[0].partition(":")
        client = redis.Sentinel([(host, int(port))]).master_for(node.watched.rpartition("=")[2])
    else:
        node = server_pool.node("valkey-9.1")
        client = pytest.importorskip("valkey").Valkey.from_url(node.url)
    with client:
        mine, other = (Lock(client, "stock:1", expire=30, strict=way == "sentinel") for _ in range(2))
        mine.acquire()
        with waiting(other, client) as got:
            mine.release()
        assert got[0][0]
        other.release()
