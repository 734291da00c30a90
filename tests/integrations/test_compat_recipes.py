"""interlock.compat.recipes, on clients and on a real Django: what they do where the recipes of these names fail."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import django.core.cache
import pytest
import redis
import redis.asyncio
import valkey
from django.conf import settings
from django.test import override_settings

import interlock
from harness.clock import machine_time
from harness.modes import wait_until as until
from interlock import AcquireTimeout, ConfigError, LeaseLost, Unavailable
from interlock.compat import recipes
from interlock.compat._targets import for_threads
from interlock.compat.recipes import GoZeroLock, RedisLock

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
VALUE = re.compile(r"[^/ ]+/\d+/[^/ ]+/[0-9a-f]{32}")


class Target:
    """What a recipe gets (a client, a cache), and how users of the plain recipe use the same object."""

    def __init__(self, given, spelled="{}".format) -> None:
        self.given = given
        self.spelled = spelled  # how the server's key is spelled

    def old(self, key: str, value: str, seconds: int) -> bool:
        """Get the lock as the plain recipe does."""
        if hasattr(self.given, "add"):
            return self.given.add(key, value, seconds)
        return bool(self.given.set(key, value, nx=True, ex=seconds))


def django_caches(server, **more) -> dict:
    own, third = "django.core.cache.backends.redis.RedisCache", "django_redis.cache.RedisCache"
    return {
        "default": {"BACKEND": own, "LOCATION": server.url, "KEY_PREFIX": "shop", "VERSION": 2},
        "own": {"BACKEND": own, "LOCATION": [server.tcp_url, f"{server.tcp_url[:-1]}1"]},  # a leader, and one to read
        "django-redis": {"BACKEND": third, "LOCATION": server.url, "KEY_PREFIX": "till"},
        "custom": {"BACKEND": own, "LOCATION": server.url, "KEY_FUNCTION": "test_compat_recipes.custom_key"},
        **more,
    }


def custom_key(key, prefix, version) -> str:
    return f"v{version}/{key}"


@pytest.fixture
def caches(server):
    """Django's caches, all of them on this server."""
    if not settings.configured:
        settings.configure()
    with override_settings(CACHES=django_caches(server)):
        yield django.core.cache.caches


@pytest.fixture(params=["redis-py", "decoding", "valkey-py", "default", "own", "django-redis", "custom"])
def target(request, server, clean, caches):
    """Each object that a recipe may get; the proxy that Django programs import is that of the default cache."""
    kind = request.param
    spelled = {"default": "shop:2:{}", "own": ":1:{}", "django-redis": "till:1:{}", "custom": "v1/{}"}.get(kind, "{}")
    if kind in {"redis-py", "decoding", "valkey-py"}:
        made = (valkey.Valkey if kind == "valkey-py" else redis.Redis).from_url(
            server.tcp_url, decode_responses=kind == "decoding"
        )
        with contextlib.closing(made):
            yield Target(made)
    else:
        yield Target(django.core.cache.cache if kind == "default" else caches[kind], spelled.format)


@pytest.fixture
def client(server, clean):
    with redis.Redis.from_url(server.url) as made:
        yield made


@pytest.fixture(autouse=True)
def _closed():
    yield
    recipes.close()


def waiting(clean, key: str, number: int = 1) -> bool:
    return clean.zcard(f"{{{key}}}{{queue}}") == number


# Get and delete


def test_get_lock_returns_the_value_of_the_key(target, clean):
    lock = RedisLock(target.given)
    value = lock.get_lock("stock", 20)
    key = target.spelled("stock")
    assert VALUE.fullmatch(value)
    assert clean.get(key).decode() == value
    assert 10_000 < clean.pttl(key) <= 20_000
    assert lock.get_lock("stock", 20, wait=0) is None
    assert lock.get_lock("stock", 20, wait=0.05) is None
    assert lock.get_lock("other", 20, wait=0)
    assert lock.del_lock("stock", value) is True
    assert not clean.exists(key)
    assert lock.del_lock("stock", value) is False
    assert lock.get_lock("stock", 20, wait=0) not in {None, value}


def test_old_code_and_new_code_exclude_each_other(target, clean):
    """In a rolling deploy some processes run the recipe, and others run interlock, on the same key."""
    lock = RedisLock(target.given)
    assert target.old("stock", uuid.uuid4().hex, 10)
    assert lock.get_lock("stock", 10, wait=0) is None
    clean.delete(target.spelled("stock"))
    value = lock.get_lock("stock", 10, wait=0)
    assert not target.old("stock", uuid.uuid4().hex, 10)
    assert lock.del_lock("stock", value)
    assert target.old("stock", uuid.uuid4().hex, 10)


def test_a_value_of_old_code_is_deleted_by_new_code_and_the_reverse(client):
    old = f"10.0.0.1-77-Thread-2 (work)-{time.time()}"
    lock = RedisLock(client)
    assert client.set("stock", old, nx=True, ex=10)
    assert lock.del_lock("stock", "10.0.0.1-77-another") is False
    assert lock.del_lock("stock", old) is True
    value = lock.get_lock("stock", 10)
    assert client.get("stock") == value.encode()
    client.delete("stock")
    assert lock.get_lock("stock", 10, wait=0)


def test_get_lock_waits_in_the_queue_without_a_limit(target, clean):
    lock = RedisLock(target.given)
    value, order = lock.get_lock("stock", 30), []

    def buy(number: int) -> None:
        mine = lock.get_lock("stock", 30)
        order.append(number)
        assert lock.del_lock("stock", mine)

    with ThreadPoolExecutor(3) as pool:
        bought = []
        for number in range(3):
            bought.append(pool.submit(buy, number))
            until(lambda number=number: waiting(clean, target.spelled("stock"), number + 1))
        assert not order
        assert lock.del_lock("stock", value)
        for each in bought:
            each.result(20)
    assert order == [0, 1, 2]
    assert not clean.exists(target.spelled("stock"))


def test_dead_waiters_are_skipped(client, clean):
    lock = RedisLock(client)
    value = lock.get_lock("stock", 30)
    clean.zadd("{stock}{queue}", {f"dead {number}": number for number in range(100)})
    clean.pexpire("{stock}{queue}", 10_000)
    assert lock.del_lock("stock", value) is True
    assert not clean.exists("stock", "{stock}{queue}")


def test_a_lock_without_an_expiry_is_reported_at_once(client):
    """SETNX, and a crash before EXPIRE: the recipe waits for ever."""
    client.setnx("stock", "dead")
    with pytest.raises(ConfigError, match="without an expiry.*'dead'.*'stock'"):
        RedisLock(client).get_lock("stock", 10)
    client.delete("stock")


def calls(clean) -> dict[str, int]:
    return {name: each["calls"] for name, each in clean.info("commandstats").items() if "eval" in name}


def test_get_lock_is_one_script_call(client, clean):
    """So no crash leaves a lock between SETNX and EXPIRE."""
    lock = RedisLock(client)
    lock.del_lock("stock", lock.get_lock("stock", 10))  # warm
    before = calls(clean)
    lock.get_lock("stock", 10)
    assert calls(clean) == before | {"cmdstat_evalsha": before["cmdstat_evalsha"] + 1}


# What the recipes forget


def test_a_late_delete_leaves_the_lock_of_the_next_holder(client):
    """DEL after the TTL deletes the next holder's lock, and so lets in a third."""
    lock = RedisLock(client)
    late = lock.get_lock("stock", 0.05)
    until(lambda: not client.exists("stock"))
    mine = lock.get_lock("stock", 30)
    assert lock.del_lock("stock", late) is False
    assert client.get("stock").decode() == mine
    assert lock.get_lock("stock", 30, wait=0) is None
    assert lock.del_lock("stock", mine) is True


def test_a_lock_that_expires_between_the_read_and_the_delete_leaves_the_next_lock(client, clean, monkeypatch):
    """GET, compare, DEL: the recipe deletes whatever is there by then. Here one script compares and deletes."""
    lock = RedisLock(client)
    late = lock.get_lock("stock", 30)
    real, theirs = recipes._renew, []

    def slow(*args):
        state = real(*args)
        clean.delete("stock")  # its time is over, and the next one has it
        theirs.append(RedisLock(client).get_lock("stock", 30))
        return state

    monkeypatch.setattr(recipes, "_renew", slow)
    assert lock.del_lock("stock", late) is False
    assert client.get("stock").decode() == theirs[0]


@pytest.mark.parametrize(
    "wrong", [None, "", "-", "x", b"x", "another/1/thread/0123", "!", " ", "*", "\x00", "\ud800", "ü" * 999]
)
def test_a_wrong_value_deletes_nothing(client, wrong):
    lock = RedisLock(client)
    assert lock.del_lock("stock", wrong) is False
    value = lock.get_lock("stock", 30)
    assert lock.del_lock("stock", wrong) is False
    assert lock.del_lock("other", value) is False
    assert client.get("stock").decode() == value


def test_a_value_that_is_read_back_as_bytes_still_deletes_the_lock(client):
    """b'1' == '1' is False: the recipe deletes nothing, and all wait for the TTL."""
    lock = RedisLock(client)
    client.set("users:order", lock.get_lock("stock", 30))
    assert lock.del_lock("stock", client.get("users:order")) is True
    client.delete("users:order")


def test_a_lease_that_is_revoked_ends_when_its_value_is_deleted(client, server):
    lock = RedisLock(client)
    value = lock.get_lock("stock", 30)
    with interlock.Interlock(server.url, prefix="") as locks:
        assert locks.lock("stock").revoke("closing time")
        assert lock.del_lock("stock", f"!{value}") is False
        assert lock.get_lock("stock", 30, wait=0) is None
        assert lock.del_lock("stock", value) is False  # it was taken away before
        assert lock.get_lock("stock", 30, wait=0)


# It belongs to nobody here


def test_a_lock_ends_after_its_timeout_and_the_next_waiter_gets_it(target, clean):
    lock = RedisLock(target.given)
    value = lock.get_lock("stock", 0.3)
    started = machine_time()
    following = lock.get_lock("stock", 30)
    assert machine_time() - started < 5
    assert following != value
    assert lock.del_lock("stock", value) is False
    assert lock.del_lock("stock", following) is True


def test_a_lock_of_get_lock_is_neither_renewed_nor_warned_of_nor_reported_lost(client, caplog):
    lock = RedisLock(client)
    lock.get_lock("stock", 0.3)
    recipes.acquire_semaphore(client, "api", 2, 0.3)
    go = GoZeroLock(client, "go")
    go.set_expire(0.3)
    assert go.acquire()
    del go
    gc.collect()  # a ResourceWarning would be an error
    assert not any(made._session.book.held() for _, made in for_threads.made)
    told = []
    for _, made in for_threads.made:  # when the end of a later lease has been told, those before it would have been
        lease = made.lock("real", ttl=0.4, renew=False, on_lost=told.append).acquire(0)
        until(lambda lease=lease: lease in told)
    assert not client.exists("stock", "go", "lock:api")
    until(lambda: len(caplog.records) >= len(for_threads.made))  # the log comes after `on_lost`
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(for_threads.made)
    assert all("'real'" in record.getMessage() for record in caplog.records)


CHILD = """
import sys, redis
from interlock.compat.recipes import *
client = redis.Redis.from_url(sys.argv[1])
lock = RedisLock(client)
"""


def child(server, code: str, *args: str) -> str:
    """Run code in another process; its output."""
    ran = subprocess.run(
        [sys.executable, "-c", CHILD + code, server.url, *args], capture_output=True, text=True, check=True, timeout=60
    )
    assert not ran.stderr
    return ran.stdout.strip()


def test_one_process_gets_a_lock_and_another_process_deletes_it(client, server):
    """A request gets the lock and ends; a worker deletes the lock when the work is done."""
    value = child(server, "print(lock.get_lock('stock', 30))")
    assert client.get("stock").decode() == value  # a normal exit gives back leases; this is none
    assert RedisLock(client).del_lock("stock", value) is True
    value = RedisLock(client).get_lock("stock", 30)
    assert child(server, "print(lock.del_lock('stock', 'wrong'), lock.del_lock('stock', sys.argv[2]))", value) == (
        "False True"
    )
    assert not client.exists("stock")


def test_a_delete_by_another_process_hands_over_to_a_waiter_here(client, clean, server):
    lock = RedisLock(client)
    value = lock.get_lock("stock", 30)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(lock.get_lock, "stock", 30)
        until(lambda: waiting(clean, "stock"))
        assert child(server, "print(lock.del_lock('stock', sys.argv[2]))", value) == "True"
        assert lock.del_lock("stock", waiter.result(5)) is True


def test_one_thread_gets_a_lock_and_another_thread_deletes_it(client):
    lock, got = RedisLock(client), []
    thread = threading.Thread(target=lambda: got.append(lock.get_lock("stock", 30)))
    thread.start()
    thread.join()
    assert lock.del_lock("stock", got[0]) is True


KILLED = {
    "lock": ("lock.get_lock('stock', 1)", lambda client: RedisLock(client).get_lock("stock", 30)),
    "decorator": (
        "lock.redis_lock('stock', 1)(lambda: (print('in', flush=True), sys.stdin.read()))()",
        lambda client: RedisLock(client).get_lock("stock", 30),
    ),
    "go-zero": (
        "go = GoZeroLock(client, 'stock'); go.set_expire(1); assert go.acquire()",
        lambda client: until(GoZeroLock(client, "stock").acquire) or "acquired",
    ),
    "semaphore": (
        "assert acquire_semaphore(client, 'stock', 1, 1)",
        lambda client: until(lambda: recipes.acquire_semaphore(client, "stock", 1)) or "acquired",
    ),
}


@pytest.mark.parametrize("kind", KILLED)
def test_the_lock_of_a_crashed_process_is_free_after_its_timeout(client, server, kind):
    code, following = KILLED[kind]
    process = subprocess.Popen(
        [sys.executable, "-c", f"{CHILD}{code}; print('got', flush=True); sys.stdin.read()", server.url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        started = machine_time()
        assert following(client)
        assert machine_time() - started < 5


def test_a_child_after_fork_uses_the_same_recipes(client):
    lock = RedisLock(client)
    value = lock.get_lock("stock", 30)
    pid = os.fork()
    if not pid:
        fine = lock.get_lock("stock", 30, wait=0) is None and lock.del_lock("stock", value)
        os._exit(0 if fine and lock.get_lock("child", 30, wait=0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lock.get_lock("stock", 30, wait=0)
    assert lock.get_lock("child", 30, wait=0) is None


@pytest.mark.parametrize("wait", [None, 20])
def test_a_lost_reply_is_not_a_lost_lock_and_a_late_copy_acquires_nothing(client, clean, proxy, wait):
    """The recipe sends SET NX again, finds the lock taken, and waits for itself."""
    slow = redis.Redis(unix_socket_path=proxy.path, socket_timeout=0.3)
    lock = RedisLock(slow)
    lock.get_lock("warm", 30)
    proxy.drop_replies = True
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(lock.get_lock, "stock", 30, wait=wait)
        until(lambda: clean.exists("stock"))
        first = clean.get("stock").decode()
        proxy.drop_replies = False
        proxy.cut()
        value = getting.result(20)
    slow.close()
    assert value != first
    assert RedisLock(client).del_lock("stock", value) is True  # also where nobody knows of the first one
    with interlock.Interlock(client, prefix="") as locks:
        primitive = locks.lock("stock")._primitive
    args = ("acquire", first, 30000, 3000, 0, "nowhere", 1, *primitive.acquire_args, "")
    late = clean.eval(primitive.script.source, 5, *primitive.keys, *args)
    assert late == [5]  # NOT_FOUND
    assert not clean.exists("stock")


def test_a_lost_reply_to_a_delete_is_one_delete(clean, proxy):
    slow = redis.Redis(unix_socket_path=proxy.path, socket_timeout=0.3)
    lock = RedisLock(slow)
    value = lock.get_lock("stock", 30)
    proxy.marked, proxy.cut_reply = b"release", 0
    assert lock.del_lock("stock", value) is True
    assert proxy.cut_reply is None
    assert not clean.exists("stock")
    slow.close()


def test_without_a_server_get_lock_raises_unavailable(tmp_path):
    nowhere = redis.Redis(unix_socket_path=f"{tmp_path}/nobody")
    with pytest.raises(Unavailable, match="'stock'"):
        RedisLock(nowhere).get_lock("stock", 10, wait=0.1)


# The decorator


def test_a_decorated_function_runs_under_the_lock(target, clean):
    lock, key = RedisLock(target.given), target.spelled("stock")

    @lock.redis_lock("stock", 20)
    def sell(number: int, *, price: int = 1) -> int:
        """Sells."""
        assert VALUE.fullmatch(clean.get(key).decode())
        assert lock.get_lock("stock", 20, wait=0) is None
        assert not target.old("stock", "theirs", 20)
        return number * price

    assert (sell(3, price=4), sell.__name__, sell.__doc__) == (12, "sell", "Sells.")
    assert not clean.exists(key)


def test_a_decorated_function_that_raises_or_returns_early_releases_the_lock(client):
    """Without `finally`, or with a return before `try`, the recipe keeps the lock until the TTL."""

    @RedisLock(client).redis_lock("stock", 30)
    def sell(left: int) -> str:
        if not left:
            return "sold out"
        raise KeyError("no such thing")

    assert sell(0) == "sold out"
    assert not client.exists("stock")
    with pytest.raises(KeyError, match="no such thing"):
        sell(1)
    assert not client.exists("stock")


def test_a_busy_function_waits_skips_or_raises(client, clean):
    lock, done = RedisLock(client), []
    waits, raises, skips = (
        lock.redis_lock("stock", 30, **options)(lambda: done.append("done") or "done")
        for options in ({}, {"wait": 0}, {"wait": 0.05, "skip": True})
    )
    value = lock.get_lock("stock", 30)
    with pytest.raises(AcquireTimeout, match="'stock'"):
        raises()
    assert skips() is None
    assert not done
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(waits)
        until(lambda: waiting(clean, "stock"))
        assert lock.del_lock("stock", value)
        assert called.result(5) == "done"
    assert skips() == raises() == "done"


def test_an_acquire_timeout_of_the_function_itself_is_no_skip(client):
    @RedisLock(client).redis_lock("stock", 30, wait=0, skip=True)
    def sell():
        RedisLock(client).redis_lock("busy", 30, wait=0)(lambda: None)()

    RedisLock(client).get_lock("busy", 30)
    with pytest.raises(AcquireTimeout, match="'busy'"):
        sell()


def test_the_name_may_be_made_from_the_arguments(client):
    lock = RedisLock(client)

    @lock.redis_lock("report:{0}:{kind}".format, 30)
    def report(user: int, kind: str) -> list[bytes]:
        return [key for key in client.keys("report:*") if b"{" not in key]

    assert report(7, kind="x") == [b"report:7:x"]
    with pytest.raises(KeyError):
        report(7)


def test_work_may_take_longer_than_the_timeout(client):
    """A recipe that is right but for the TTL ends its lock under the work. interlock renews the lock."""

    @RedisLock(client).redis_lock("stock", 2)
    def work() -> bool:
        left = [client.pttl("stock")]
        until(lambda: left.append(client.pttl("stock")) or left[-1] > min(left) + 200)
        return True

    assert work()
    assert not client.exists("stock")


def test_a_function_with_a_long_timeout_gets_a_ttl_of_max_ttl_at_most(client):
    @RedisLock(client).redis_lock("stock", 4 * 3600)
    def work() -> int:
        return client.pttl("stock")

    assert 50_000 < work() <= 60_000


def test_a_lock_that_is_lost_under_the_function_raises_lease_lost(client):
    @RedisLock(client).redis_lock("stock", 30)
    def work(error=None):
        client.delete("stock")
        if error:
            raise error

    with pytest.raises(LeaseLost, match="'stock'"):
        work()
    with pytest.raises(KeyError) as caught:  # what the work raised is never replaced
        work(KeyError("x"))
    assert isinstance(caught.value.__context__, LeaseLost)


def test_a_function_may_call_itself(client):
    """The recipe waits for itself until the TTL ends."""

    @RedisLock(client).redis_lock("stock", 30, wait=5)
    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n > 1 else 1

    assert factorial(5) == 120
    assert not client.exists("stock")


def test_a_coroutine_function_is_refused(client):
    async def work(): ...

    with pytest.raises(ConfigError, match=r"work is `async def`.*interlock\.aio"):
        RedisLock(client).redis_lock("stock", 30)(work)


# Where


def test_threads_caches_and_clients_share_one_interlock(server, clean, caches):
    """Django makes caches for each thread, and some programs make a client for each request."""
    lock = RedisLock(django.core.cache.cache)

    def work(number: int) -> bool:
        with redis.Redis.from_url(server.url) as mine:
            own = RedisLock(mine)
            fine = own.del_lock(f"mine:{number}", own.get_lock(f"mine:{number}", 30))
        return fine and lock.del_lock(f"a:{number}", lock.get_lock(f"a:{number}", 30))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(40)))
    used = [made for _, made in for_threads.made if made._session.workers[0].started]
    assert len(used) == 1
    assert sum(thread.name == "interlock-worker-ends" for thread in threading.enumerate()) == 1


def test_close_ends_threads_and_nothing_else(client):
    lock = RedisLock(client)
    value = lock.get_lock("stock", 30)
    recipes.close()
    assert not any(thread.name.startswith("interlock-") for thread in threading.enumerate())
    assert client.get("stock").decode() == value
    assert lock.get_lock("stock", 30, wait=0) is None
    assert lock.del_lock("stock", value) is True


def test_other_settings_are_followed(server, clean, caches):
    lock = RedisLock(django.core.cache.cache)
    assert lock.get_lock("stock", 30)
    with override_settings(CACHES=django_caches(server, default=django_caches(server)["django-redis"])):
        assert lock.get_lock("stock", 30, wait=0)
    assert clean.exists("shop:2:stock", "till:1:stock") == 2


def test_other_databases_are_other_locks(server, clean):
    with redis.Redis.from_url(server.url) as here, redis.Redis.from_url(f"{server.tcp_url[:-1]}5") as there:
        value = RedisLock(here).get_lock("stock", 30)
        assert RedisLock(there).get_lock("stock", 30, wait=0)
        assert RedisLock(there).del_lock("stock", value) is False
        assert there.exists("stock")
        assert here.exists("stock")


OTHERS = {
    "locmem": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    "dummy": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
    "files": {"BACKEND": "django.core.cache.backends.filebased.FileBasedCache", "LOCATION": "/nowhere"},
    "database": {"BACKEND": "django.core.cache.backends.db.DatabaseCache", "LOCATION": "cache"},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind_of_cache_is_refused(server, clean, caches, kind):
    with override_settings(CACHES=django_caches(server, default=OTHERS[kind])):
        for given in (django.core.cache.cache, django.core.cache.caches["default"]):
            for make in (RedisLock, lambda given: GoZeroLock(given, "stock")):
                backend = OTHERS[kind]["BACKEND"]
                with pytest.raises(ConfigError, match=f"{re.escape(backend)} does not keep its keys on Redis"):
                    make(given)
    assert not clean.keys()


def test_a_cache_over_several_servers_is_refused(server, clean, caches):
    shards = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": [server.url, f"{server.tcp_url[:-1]}1"],
        "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
    }
    with (
        override_settings(CACHES=django_caches(server, shards=shards)),
        pytest.raises(ConfigError, match=r"django_redis\.client\.sharded\.ShardClient spreads keys over several"),
    ):
        RedisLock(django.core.cache.caches["shards"])


@pytest.mark.parametrize(
    "given",
    [object(), 7, redis.Redis, b"redis://x", redis.asyncio.Redis(), "localhost"],
    ids=["object", "int", "class", "bytes", "asyncio", "text"],
)
def test_an_object_that_is_no_client_is_refused(given):
    for make in (
        RedisLock,
        lambda given: GoZeroLock(given, "stock"),
        lambda given: recipes.acquire_semaphore(given, "stock", 1),
    ):
        with pytest.raises(ConfigError):
            make(given)


def test_importing_the_recipes_imports_no_django():
    code = """
import sys, redis
for name in ("django", "django_redis", "valkey"):
    sys.modules[name] = None  # as if it was not installed
from interlock.compat import recipes
recipes.RedisLock(redis.Redis(port=1))
import interlock
print(*[name for name in sys.modules if name.startswith("django.")])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ran.stdout.strip()


# Bad input


@pytest.mark.parametrize("timeout", [0, -1, 0.009, 60.1, 3600, float("nan"), float("inf"), None, "10", True])
def test_a_bad_timeout_is_refused(client, timeout):
    lock = RedisLock(client)
    for wrong in (
        lambda: lock.get_lock("stock", timeout),
        lambda: recipes.acquire_semaphore(client, "stock", 1, timeout),
        lambda: recipes.refresh_semaphore(client, "stock", "x", timeout),
    ):
        with pytest.raises(ConfigError, match="timeout must be"):
            wrong()
    with pytest.raises(ConfigError, match="seconds must be"):
        GoZeroLock(client, "stock").set_expire(timeout)
    if not isinstance(timeout, int | float) or not timeout > 60:
        with pytest.raises(ConfigError, match="timeout must be"):
            lock.redis_lock("stock", timeout)
    assert not client.keys()


def test_a_timeout_above_max_ttl_names_the_setting(client):
    with pytest.raises(ConfigError, match="at most max_ttl.*renewed.*give RedisLock"):
        RedisLock(client).get_lock("stock", 100)
    value = RedisLock(client, max_ttl=3600).get_lock("stock", 3600)
    assert client.pttl("stock") > 3_500_000
    assert RedisLock(client).del_lock("stock", value)
    go = GoZeroLock(client, "go", max_ttl=3600)
    go.set_expire(3600)
    assert go.acquire()
    assert client.pttl("go") > 3_500_000
    assert GoZeroLock(client, "short", max_ttl=5).acquire()
    for wrong in (0, -1, "60", None, float("inf")):
        with pytest.raises(ConfigError, match="max_ttl"):
            RedisLock(client, max_ttl=wrong)


@pytest.mark.parametrize("key", ["", "x" * 513, "a\nb", "a}b", "a{}b", None, 7, b"stock"])
def test_a_bad_key_is_refused(target, clean, key):
    lock = RedisLock(target.given)
    for wrong in (
        lambda: lock.get_lock(key, 10),
        lambda: lock.del_lock(key, "x"),
        lambda: lock.redis_lock(key, 10),
        lock.redis_lock(lambda: key, 10)(str),
        lambda: GoZeroLock(target.given, key).acquire(),
        *(() if hasattr(target.given, "add") else (lambda: recipes.acquire_semaphore(target.given, key, 1),)),
    ):
        with pytest.raises(ConfigError):
            wrong()
    assert not clean.keys()


@pytest.mark.parametrize("wait", [-1, float("nan"), "1", True])
def test_a_bad_wait_is_refused(client, wait):
    lock = RedisLock(client)
    with pytest.raises(ConfigError, match="wait must be"):
        lock.get_lock("stock", 10, wait=wait)
    with pytest.raises(ConfigError, match="wait must be"):
        lock.redis_lock("stock", 10, wait=wait)
    assert not client.keys()


@pytest.mark.parametrize("value", [7, 1.5, ["x"], True])
def test_a_bad_value_is_refused(client, value):
    with pytest.raises(ConfigError, match="'stock': a value is the str"):
        RedisLock(client).del_lock("stock", value)
    with pytest.raises(ConfigError, match="'stock': a value is the str"):
        recipes.release_semaphore(client, "stock", value)
    assert not client.keys()


@pytest.mark.parametrize("limit", [0, -1, 1.5, "3", True, None])
def test_a_bad_limit_is_refused(client, limit):
    with pytest.raises(ConfigError, match="semaphore 'api': its limit must be a whole number from 1 to"):
        recipes.acquire_semaphore(client, "api", limit)
    assert not client.keys()


@pytest.mark.parametrize("wrong", ["", 7, b"x", True])
def test_a_bad_id_is_refused(client, wrong):
    with pytest.raises(ConfigError, match="'go': id must be a str"):
        GoZeroLock(client, "go", wrong)


def test_a_key_of_another_type_raises_a_clear_error(client):
    client.lpush("users:list", 1)
    with pytest.raises(ConfigError, match="holds something else"):
        RedisLock(client).get_lock("users:list", 10)
    with pytest.raises(ConfigError, match="holds something else"):
        RedisLock(client).del_lock("users:list", "x")
    client.delete("users:list")


def test_everything_public_says_what_it_is_and_never_any():
    for name in recipes.__all__:
        thing = getattr(recipes, name)
        members = dict(vars(thing)) if inspect.isclass(thing) else {name: thing}
        assert inspect.getdoc(thing), name
        for each, member in members.items():
            if inspect.isfunction(member) and (not each.startswith("_") or each == "__init__"):
                assert each == "__init__" or inspect.getdoc(member), each
                assert not re.search(r"\bAny\b", str(inspect.get_annotations(member)))


# go-zero's shape


def test_redis_lock_of_go_zero_acquires_and_releases(target, clean):
    lock, other = GoZeroLock(target.given, "stock"), GoZeroLock(target.given, "stock")
    key = target.spelled("stock")
    lock.set_expire(20)
    assert lock.acquire() is True
    assert 10_000 < clean.pttl(key) <= 20_000
    assert other.acquire() is False
    assert other.release() is False
    assert not target.old("stock", "theirs", 10)
    assert RedisLock(target.given).get_lock("stock", 10, wait=0) is None
    assert lock.release() is True
    assert lock.release() is False
    assert not clean.exists(key)
    assert other.acquire() is True
    assert lock.release() is False
    assert clean.exists(key)
    assert other.release() is True
    assert target.old("stock", "theirs", 10)
    assert lock.acquire() is False


def test_go_programs_exclude_it(client):
    """Their script: SET key id NX PX, with an id of sixteen letters."""
    lock = GoZeroLock(client, "stock")
    assert client.set("stock", "aBcDeFgHiJkLmNoP", nx=True, px=10_500)
    assert not lock.acquire()
    client.delete("stock")
    assert lock.acquire()
    assert not client.set("stock", "aBcDeFgHiJkLmNoP", nx=True, px=10_500)


def test_the_same_id_acquires_again_and_lengthens_the_lock(client, server):
    lock = GoZeroLock(client, "stock", "shop 7")
    lock.set_expire(1)
    assert lock.acquire()
    lock.set_expire(20)
    assert lock.acquire()
    assert client.pttl("stock") > 10_000
    lock.set_expire(1)
    assert lock.acquire()
    assert client.pttl("stock") > 10_000  # never shorter
    restarted = "go = GoZeroLock(client, 'stock', sys.argv[2]); print(go.acquire())"
    assert child(server, restarted, "shop 77") == "False"
    assert child(server, restarted, "shop 7") == "True"
    assert lock.release() is False  # the later one has it, and keeps it
    assert client.exists("stock")
    assert lock.acquire() is True
    assert lock.release() is True
    assert client.get("stock") == b"!taken-over"  # nobody's, until those who were taken over from have run out
    assert not GoZeroLock(client, "stock").acquire()


def test_two_locks_have_different_ids_by_default(client):
    locks = [GoZeroLock(client, "stock") for _ in range(50)]
    assert len({lock.id for lock in locks}) == 50
    assert [lock.acquire() for lock in locks] == [True] + [False] * 49


def test_a_lock_of_go_zero_ends_after_its_expiry_and_the_default_is_long(client):
    lock, other = GoZeroLock(client, "stock"), GoZeroLock(client, "stock")
    assert lock.acquire()
    assert client.pttl("stock") > 20_000
    assert lock.release()
    lock.set_expire(0.1)
    assert lock.acquire()
    until(other.acquire)
    assert lock.release() is False
    assert not lock.acquire()
    assert other.release()


# Semaphores

MODES = [
    (recipes.acquire_semaphore, recipes.release_semaphore),
    (recipes.acquire_fair_semaphore, recipes.release_fair_semaphore),
    (recipes.acquire_semaphore_with_lock, recipes.release_fair_semaphore),
]


@pytest.mark.parametrize(("acquire", "release"), MODES)
def test_acquire_semaphore_keeps_to_its_limit(client, acquire, release):
    one, two = acquire(client, "api", 2), acquire(client, "api", 2, timeout=20)
    assert VALUE.fullmatch(one)
    assert VALUE.fullmatch(two)
    assert acquire(client, "api", 2) is None
    assert acquire(client, "other", 2)
    assert release(client, "api", "wrong") is False
    assert release(client, "api", None) is False
    assert release(client, "api", one) is True
    assert release(client, "api", one) is False  # giving back twice is giving back once
    three = acquire(client, "api", 2)
    assert three
    assert acquire(client, "api", 2) is None
    assert release(client, "api", two.encode()) is True
    assert release(client, "api", three) is True


def test_a_permit_of_the_recipe_is_a_permit_of_interlock(client, server):
    identifier = recipes.acquire_semaphore(client, "api", 2)
    with interlock.Interlock(server.url) as locks:
        limited = locks.semaphore("api", 2)
        assert limited.available() == 1
        assert [holder.token for holder in limited.inspect().holders] == [identifier]
        with limited:
            assert recipes.acquire_semaphore(client, "api", 2) is None


def test_a_process_acquires_a_permit_and_another_one_releases_it(client, server):
    identifier = child(server, "print(acquire_semaphore(client, 'api', 1))")
    assert recipes.acquire_semaphore(client, "api", 1) is None
    assert recipes.release_semaphore(client, "api", identifier) is True
    identifier = recipes.acquire_semaphore(client, "api", 1)
    released = "print(release_semaphore(client, 'api', sys.argv[2]), release_semaphore(client, 'api', sys.argv[2]))"
    assert child(server, released, identifier) == "True False"
    assert recipes.acquire_semaphore(client, "api", 1)


def test_a_permit_ends_after_its_timeout_unless_it_is_refreshed(client):
    kept, left = recipes.acquire_fair_semaphore(client, "api", 2), recipes.acquire_semaphore(client, "api", 2, 0.2)
    assert client.pttl("lock:api") <= 10_000
    assert recipes.refresh_fair_semaphore(client, "api", kept, 60) is True
    assert recipes.refresh_fair_semaphore(client, "api", kept, 1) is True  # never shorter
    assert client.pttl("lock:api") > 30_000
    until(lambda: recipes.acquire_semaphore(client, "api", 2))
    assert recipes.refresh_fair_semaphore(client, "api", left) is False
    assert recipes.release_semaphore(client, "api", left) is False
    for wrong in (None, "", "wrong"):
        assert recipes.refresh_fair_semaphore(client, "api", wrong) is False
    assert recipes.acquire_semaphore(client, "api", 2) is None
    assert recipes.release_semaphore(client, "api", kept) is True


def test_another_limit_is_refused(client):
    assert recipes.acquire_semaphore(client, "api", 2)
    with pytest.raises(ConfigError, match=r"limit=2.*set_limit"):
        recipes.acquire_semaphore(client, "api", 3)


def book(conn, semname: str, limit: int, clock: float, timeout: float = 10) -> str | None:
    """The recipe: one sorted set, by each client's own clock."""
    identifier = str(uuid.uuid4())
    with conn.pipeline(transaction=True) as pipeline:
        pipeline.zremrangebyscore(semname, "-inf", clock - timeout)
        pipeline.zadd(semname, {identifier: clock})
        pipeline.zrank(semname, identifier)
        if pipeline.execute()[-1] < limit:
            return identifier
    conn.zrem(semname, identifier)
    return None


def test_the_clock_of_a_client_decides_nothing(client, monkeypatch):
    """In the recipe a client takes held permits if its clock is behind, and removes them if its clock is ahead."""
    now = time.time()
    assert [book(client, "users:api", 1, clock) is not None for clock in (now, now + 1, now - 1, now + 60)] == [
        True, False, True, True,
    ]  # fmt: skip
    client.delete("users:api")
    assert recipes.acquire_semaphore(client, "api", 1)
    for skew in (-3600, -1, 60, 3600):
        monkeypatch.setattr(time, "time", lambda skew=skew: now + skew)
        assert recipes.acquire_semaphore(client, "api", 1) is None


def test_the_last_permit_goes_to_one_client(server, clean):
    """In the fair recipe a client may come between the counter and the rank of another: both get the last permit."""

    def acquire(_) -> str | None:
        with redis.Redis.from_url(server.url) as mine:
            return recipes.acquire_fair_semaphore(mine, "api", 3)

    with ThreadPoolExecutor(8) as pool:
        assert sum(identifier is not None for identifier in pool.map(acquire, range(40))) == 3
