"""interlock.compat.redis_py: redis-py's Lock beside the drop-in, on one key. Its own tests run in test_originals.py."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal

import pytest
import redis
import redis.asyncio

import interlock
from harness.clock import machine_time
from harness.modes import SLACK, until, wait_until
from interlock import ConfigError
from interlock._protocol.timing import RETRY_FOR
from interlock.compat import redis_py
from interlock.compat.redis_py import AsyncLock, Lock, LockError, LockNotOwnedError

pytestmark = pytest.mark.runs_on(
    "valkey-9.1", full="each server in both modes", starts="sentinels and a cluster of valkey-9.1"
)
rule = pytest.mark.rule
NEVER = 3600.0  # seconds of `sleep`: a waiter that gets the lock was not woken by a poll


class Drop:
    """A drop-in lock of this mode, or redis-py's own, with awaitable methods."""

    def __init__(self, mode, client, name, original, **options) -> None:
        kinds = (Lock, redis.lock.Lock) if mode.name == "threads" else (AsyncLock, redis.asyncio.lock.Lock)
        self.mode = mode
        self.real = client.lock(name, thread_local=False, lock_class=kinds[original], **options)
        self.local = self.real.local

    def __getattr__(self, name):
        method = getattr(self.real, name)
        if self.mode.name == "threads":
            return lambda *args, **kwargs: self.mode.in_thread(method, *args, **kwargs)
        return method


class Clients:
    """The clients of a test, by URL, and what the drop-in has made for them."""

    def __init__(self, kind) -> None:
        self.kind = kind
        self.made = {}

    def at(self, url):
        if url not in self.made:
            self.made[url] = self.kind.from_url(url)
        return self.made[url]

    async def close(self) -> None:
        redis_py.close()
        await redis_py.aclose()
        for client in self.made.values():
            if isinstance(client, redis.asyncio.Redis):
                await getattr(client, "aclose", client.close)()  # redis-py 5.0.0 has no aclose()
            else:
                client.close()


@pytest.fixture
def lock(mode, server, clean):
    """Makes a lock of this mode: `lock(name, **options)`; `original=True`: redis-py's own; `url` of another way."""
    clients = Clients(redis.Redis if mode.name == "threads" else redis.asyncio.Redis)
    mode.made.append(clients)  # the end of the test closes them

    def make(name="a", *, original=False, url=None, **options):
        return Drop(mode, clients.at(url or server.url), name, original, **options)

    return make


@pytest.fixture(autouse=True)
def _closed():
    yield
    redis_py.close()


def waiting(clean, number, name="a") -> bool:
    return clean.zcard(f"{{{name}}}{{plain-queue}}") == number


@pytest.mark.runs_on("each server", full="each server in both modes")
@rule(3)
async def test_a_release_wakes_the_waiter_whose_poll_is_far_away(lock, clean):
    first, second = lock(), lock(sleep=NEVER)
    assert await first.acquire()
    assert clean.get("a") == first.local.token and clean.ttl("a") == -1
    waiter = asyncio.create_task(second.acquire())
    await until(lambda: waiting(clean, 1))
    await first.release()
    assert await asyncio.wait_for(waiter, 0.5 + SLACK) is True
    await second.release()
    assert clean.get("a") is None


@pytest.mark.runs_on("each server", full="each server in both modes")
@rule(1)
async def test_waiters_are_served_in_order_of_arrival(lock, clean):
    first, served = lock(), []
    await first.acquire()

    async def wait(number):
        mine = lock(timeout=30)
        await mine.acquire()
        served.append(number)
        await mine.release()

    tasks = []
    for number in range(5):
        tasks.append(asyncio.create_task(wait(number)))
        await until(lambda number=number: waiting(clean, number + 1))
    await first.release()
    await asyncio.gather(*tasks)
    assert served == [0, 1, 2, 3, 4]


@pytest.mark.runs_on("each server", full="each server in both modes")
@rule(1, 3)
@pytest.mark.parametrize("ttl", [None, 30])
async def test_old_and_new_exclude_each_other_and_a_waiter_polls_for_a_foreign_holder(lock, clean, ttl):
    old, new = lock(original=True, timeout=ttl), lock(timeout=ttl, sleep=0.02)
    await old.acquire()
    assert await new.acquire(blocking=False) is False
    waiter = asyncio.create_task(new.acquire())
    await until(lambda: waiting(clean, 1))
    assert await old.owned() and not await new.owned() and await new.locked()
    await old.release()
    assert await waiter is True
    assert await old.acquire(blocking=False) is False
    await new.release()
    assert await old.acquire(blocking=False) is True
    await old.release()


@rule(1, 3)
@pytest.mark.parametrize("ttl", [None, 600])
async def test_the_head_polls_by_asking_for_the_lock(lock, clean, ttl, monkeypatch):
    """A heartbeat that found the lock free would only be the reason to ask: too late beside clients that just ask."""

    async def no_heartbeat(waiters) -> None:
        for queue in waiters.queues.values():
            queue.due = math.inf

    monkeypatch.setattr("interlock._client.waiting.Waiters.tick", no_heartbeat)
    clean.set("a", "foreign", px=ttl)
    mine = lock(timeout=10, sleep=0.02 if ttl is None else NEVER)
    waiter = asyncio.create_task(mine.acquire())
    await until(lambda: waiting(clean, 1))
    if ttl is None:
        clean.delete("a")
    assert await waiter is True
    await mine.release()


@rule(4)
async def test_a_holder_that_died_is_followed_when_its_timeout_is_over(lock, clean):
    clean.set("a", "of the dead", px=700)
    mine, begin = lock(timeout=10, sleep=NEVER), machine_time()
    assert await mine.acquire() is True
    assert machine_time() - begin < 0.7 + 1 + SLACK
    await mine.release()


async def test_a_waiter_gives_up_after_its_blocking_timeout_and_leaves_the_queue(lock, clean):
    holder, waiter = lock(), lock(blocking_timeout=0.2)
    await holder.acquire()
    begin, machine = time.monotonic(), machine_time()
    assert await waiter.acquire() is False
    assert time.monotonic() - begin >= 0.2 and machine_time() - machine < 0.2 + SLACK
    assert await lock(blocking=False).acquire() is False
    await until(lambda: waiting(clean, 0))
    await holder.release()


@rule(8)
async def test_the_reply_to_an_acquire_is_lost_and_the_lock_is_held_once(lock, proxy, clean, mode):
    mine = lock(url=proxy.url)
    await mine.acquire()
    await mine.release()
    proxy.drop_replies = True
    acquiring = asyncio.create_task(mine.acquire(blocking_timeout=20))
    await until(lambda: clean.get("a"))
    proxy.drop_replies = False
    proxy.cut()
    assert await acquiring is True
    assert clean.get("a") == mine.local.token
    await mine.release()
    assert clean.get("a") is None
    assert clean.exists("{a}{plain-gone}"), "nothing refuses a late copy of the acquire"


@rule(8)
async def test_the_undo_of_a_lock_without_a_timeout_outlasts_the_record(lock, proxy, clean):
    """The record of a lock lasts for 5 minutes, and the server may be away for longer."""
    mine = lock(url=proxy.url)
    await mine.acquire()
    await mine.release()
    proxy.drop_replies = True
    acquiring = asyncio.create_task(mine.acquire(blocking=False))
    await until(lambda: clean.get("a"))
    clean.delete("{a}{plain-record}")
    with pytest.raises(redis.exceptions.ConnectionError):
        await acquiring
    proxy.drop_replies = False
    proxy.cut()
    await until(lambda: not clean.get("a"))


@rule(8)
async def test_the_reply_to_a_release_is_lost_and_the_release_is_no_error(lock, proxy, clean):
    mine = lock(url=proxy.url)
    await mine.acquire()
    proxy.drop_replies = True
    releasing = asyncio.create_task(mine.release())
    await until(lambda: not clean.get("a"))
    proxy.drop_replies = False
    proxy.cut()
    await releasing


@rule(8)
async def test_a_release_that_finds_no_server_goes_on_when_the_server_is_back(lock, proxy, clean, monkeypatch):
    monkeypatch.setattr("interlock._client.acquiring.RETRY_FOR", 0.1)
    mine = lock(url=proxy.url)
    await mine.acquire()
    redis_client = mine.real.redis
    core = redis_py._core(mine.real, redis_py.for_threads if mine.mode.name == "threads" else redis_py.for_asyncio)
    core.try_for = 0.2
    proxy.refuse = True
    proxy.cut()
    with pytest.raises(redis.exceptions.ConnectionError, match="'a'"):
        await mine.release()
    assert clean.get("a"), "the test has released it itself"
    proxy.refuse = False
    await until(lambda: not clean.get("a"))
    assert redis_client is mine.real.redis


@rule(8)
async def test_an_outage_is_an_error_within_seconds_whatever_the_timeout(lock, proxy, clean):
    """As in redis-py, whose callers have code for that error, and may have set a timeout of an hour."""
    mine = lock(url=proxy.url, blocking_timeout=60)
    await mine.acquire()
    await mine.release()
    proxy.refuse = True
    proxy.cut()
    began = machine_time()
    with pytest.raises(redis.exceptions.ConnectionError):
        await mine.acquire()
    assert machine_time() - began < RETRY_FOR + SLACK


@rule(8)
@pytest.mark.asyncio_only
async def test_a_cancelled_waiter_leaves_nothing_and_the_next_one_goes_on(lock, clean):
    holder, first, second = lock(), lock(sleep=NEVER), lock(sleep=NEVER)
    await holder.acquire()
    cancelled = asyncio.create_task(first.acquire())
    await until(lambda: waiting(clean, 1))
    waiter = asyncio.create_task(second.acquire())
    await until(lambda: waiting(clean, 2))
    cancelled.cancel()
    await until(lambda: waiting(clean, 1))
    await holder.release()
    assert await waiter is True
    await second.release()


async def test_a_short_blocking_timeout_waits_for_a_late_answer(lock, proxy, clean):
    mine, other = lock(url=proxy.url, blocking_timeout=0.02), lock()
    for is_free in (True, False):
        proxy.hold = True
        acquiring = asyncio.create_task(mine.acquire())
        await asyncio.sleep(0.2)
        assert not acquiring.done()
        proxy.hold = False
        assert await acquiring is is_free
        if is_free:
            await mine.release()
            await other.acquire()
    await other.release()
    assert clean.get("a") is None


@rule(8)
@pytest.mark.parametrize("where", ["after the grant", "before the release"])
def test_ctrl_c_leaves_nothing_held(server, clean, monkeypatch, where):
    name = "acquire" if where == "after the grant" else "release"
    original = getattr(redis_py.plain_key, name)

    async def interrupted(*args, **options):
        if name == "acquire":
            await original(*args, **options)
            assert clean.get("a")
        raise KeyboardInterrupt

    with redis.Redis.from_url(server.url) as client:
        mine = client.lock("a", lock_class=Lock)
        monkeypatch.setattr(redis_py.plain_key, name, interrupted)
        with pytest.raises(KeyboardInterrupt), mine:
            assert clean.get("a")
        assert mine.local.token is None
        wait_until(lambda: not clean.get("a"), within=SLACK)


@pytest.mark.asyncio_only
async def test_a_late_reply_to_a_release_does_not_forget_the_token_of_the_next_task(lock, clean, monkeypatch):
    shared = lock().real
    original = shared.do_release

    async def late(token):
        await original(token)
        await shared.acquire()  # as another task may do meanwhile

    monkeypatch.setattr(shared, "do_release", late)
    await shared.acquire()
    await shared.release()
    assert await shared.owned()
    monkeypatch.undo()
    await shared.release()


@rule(8)
@pytest.mark.asyncio_only
async def test_a_release_that_is_cancelled_on_its_way_goes_on(lock, proxy, clean):
    mine = lock(url=proxy.url)
    await mine.acquire()
    proxy.hold = True
    releasing = asyncio.create_task(mine.release())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    releasing.cancel()
    await asyncio.wait([releasing])
    assert releasing.cancelled() and mine.local.token is None
    proxy.hold = False
    await until(lambda: not clean.get("a"))


async def test_the_token_may_be_chosen_and_another_process_may_release_with_it(lock, clean):
    mine, other = lock(), lock()
    assert await mine.acquire(token="of the job") is True
    assert clean.get("a") == b"of the job"
    assert await other.acquire(token="of the job", blocking=False) is False
    other.local.token = b"of the job"
    await other.release()
    with pytest.raises(LockNotOwnedError) as raised:
        await mine.release()
    assert raised.value.lock_name == "a"


@pytest.mark.runs_on("each server", full="each server in both modes")
async def test_errors_are_those_of_redis_py(lock, clean):
    mine = lock(timeout=10)
    with pytest.raises(LockError, match=r"not owned|unlocked"):
        await mine.release()
    with pytest.raises(LockError, match="unlocked"):
        await mine.extend(1)
    await mine.acquire()
    assert await mine.extend(10) is True
    assert 15_000 < clean.pttl("a") <= 20_000
    assert await mine.reacquire() is True
    assert clean.pttl("a") <= 10_000
    clean.set("a", "another's")
    with pytest.raises(LockNotOwnedError):
        await mine.release()
    clean.delete("a")


@pytest.mark.parametrize(
    ("name", "options", "call", "says"),
    [
        ("a{b}{c}", {}, {}, "one pair of braces"),
        ("a\n", {}, {}, "control character"),
        (b"\xff", {}, {}, "not UTF-8"),
        ("a", {"timeout": 0.0001}, {}, "timeout must be at least 0.001"),
        ("a", {"timeout": -1}, {}, "timeout must be at least 0.001"),
        ("a", {"timeout": "5"}, {}, "timeout must be a number of seconds"),
        ("a", {"sleep": "5"}, {}, "sleep must be a number of seconds"),
        ("a", {}, {"blocking_timeout": "5"}, "blocking_timeout must be a number of seconds"),
    ],
)
async def test_what_cannot_be_kept_raises_at_the_call_and_says_why(lock, clean, name, options, call, says):
    with pytest.raises(ConfigError, match=says):
        await lock(name, **options).acquire(**call)
    assert not clean.keys()


@pytest.mark.parametrize(
    ("name", "options", "call"),
    [
        (b"a", {}, {}),
        (memoryview(b"a"), {}, {}),
        (5, {}, {}),
        ("a", {"timeout": Decimal("1.25"), "sleep": Decimal("0.5")}, {}),
        ("a", {"blocking_timeout": math.inf}, {}),
        ("a", {}, {"token": ""}),
        ("a", {}, {"token": memoryview(b"x")}),
    ],
)
async def test_what_redis_py_takes_the_drop_in_takes(lock, clean, name, options, call):
    mine = lock(name, **options)
    assert await mine.acquire(**call) is True
    key = str(name) if isinstance(name, int) else "a"
    assert clean.get(key) == mine.local.token == bytes(clean.get(key))
    assert mine.local.made == (None if call else mine.local.token)
    assert 0 < clean.pttl(key) <= 1250 if "timeout" in options else clean.pttl(key) == -1
    token = mine.local.token
    await mine.release()
    assert not clean.exists(key)
    mine.local.token = token
    with pytest.raises(LockNotOwnedError) as raised:
        await mine.release()
    assert raised.value.lock_name is name


async def test_what_the_server_refuses_raises_the_error_of_redis_py(lock):
    with pytest.raises(redis.exceptions.ResponseError, match="lock 'a'.*out of range"):
        await lock(timeout=1e300).acquire(blocking=False)


async def test_a_login_or_a_right_that_is_missing_raises_the_error_of_redis_py(lock, server, clean):
    clean.acl_setuser("amy", enabled=True, passwords="+pw", keys=["a"], channels=["*"], commands=["+@all"])
    try:
        scheme, _, path = server.url.partition("://")
        with pytest.raises(redis.exceptions.AuthenticationError, match="user name or password"):
            await lock(url=f"{scheme}://amy:wrong@{path}").acquire(blocking=False)
        with pytest.raises(redis.exceptions.ResponseError, match="lock 'a'.*ACL"):
            await lock(url=f"{scheme}://amy:pw@{path}").acquire(blocking=False)
    finally:
        clean.acl_deluser("amy")


async def test_close_ends_a_wait_with_the_error_of_redis_py(mode, lock, clean):
    clean.set("a", "foreign")
    waiter = asyncio.create_task(lock().acquire())
    await until(lambda: waiting(clean, 1))
    redis_py.close()
    await redis_py.aclose()
    with pytest.raises(redis.exceptions.ConnectionError, match="lock 'a': its connections were closed"):
        await waiter
    clean.delete("a")


@pytest.mark.parametrize("original", [Lock, AsyncLock])
@pytest.mark.parametrize("name", ["do_acquire", "LUA_RELEASE_SCRIPT"])
def test_a_subclass_that_replaces_what_is_not_used_is_refused(original, name):
    with pytest.raises(ConfigError, match=f"Mine replaces {name}, which"):
        type("Mine", (original,), {name: "mine"})
    assert type("Mine", (original,), {"acquire": original.acquire}) is not None


async def test_a_server_that_is_not_there_raises_the_error_of_redis_py(mode, lock):
    nobody = lock(url="redis://127.0.0.1:1/0")
    with pytest.raises(redis.exceptions.ConnectionError, match=r"lock 'a'.*127\.0\.0\.1"):
        await nobody.acquire(blocking=False)


@rule(1)
async def test_interlocks_own_lock_under_the_same_key_excludes_the_drop_in(mode, lock, clean):
    locks, mine = mode.interlock(prefix=""), lock(timeout=30, sleep=0.02)
    async with locks.lock("a", ttl=5):
        assert await mine.acquire(blocking=False) is False
        waiter = asyncio.create_task(mine.acquire())
        await until(lambda: waiting(clean, 1))
    assert await waiter is True
    assert await locks.lock("a").try_acquire() is None
    await mine.release()
    async with locks.lock("a", timeout=10):
        pass


@rule(1)
async def test_a_process_with_the_original_gets_its_turn_beside_a_crowd_of_new_ones(lock, clean):
    done, sections = False, []

    async def contend(number):
        mine = lock(timeout=30)
        while not done:
            await mine.acquire()
            sections.append(number)
            await mine.release()

    crowd = [asyncio.create_task(contend(number)) for number in range(3)]
    await until(lambda: len(sections) > 10)
    old = lock(original=True, timeout=30)
    for _ in range(2):
        assert await old.acquire(blocking_timeout=60) is True
        await old.release()
    done = True
    await asyncio.gather(*crowd)


PROGRAM = """
import sys, time, redis
from interlock.compat.redis_py import Lock
lock = redis.Redis.from_url(sys.argv[1]).lock("a", timeout=float(sys.argv[2]), lock_class=Lock)
print("asks", flush=True)
lock.acquire()
print("holds", flush=True)
time.sleep(3600)
"""


@rule(4)
@pytest.mark.parametrize("what", ["holder", "waiter"])
async def test_a_killed_process_stops_nobody(lock, clean, server, what):
    first = lock(timeout=60)
    if what == "waiter":
        await first.acquire()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, server.url, "1.0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "asks\n"
        if what == "holder":
            assert process.stdout.readline() == "holds\n"
        else:
            await until(lambda: waiting(clean, 1))
        mine = lock(timeout=60, sleep=NEVER)
        waiter = asyncio.create_task(mine.acquire())
        await until(lambda: waiting(clean, 2 if what == "waiter" else 1))
        process.send_signal(signal.SIGKILL)
    if what == "waiter":
        await first.release()
    begin = machine_time()
    assert await waiter is True
    assert machine_time() - begin < 4 + SLACK
    await mine.release()


def test_a_child_after_a_fork_uses_connections_of_its_own(server, clean):
    client = redis.Redis.from_url(server.url)
    mine = client.lock("a", timeout=30, lock_class=Lock)
    with mine:
        pass
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with client.lock("b", timeout=30, lock_class=Lock):
                code = 0
        finally:
            os._exit(code)
    for _ in range(50):
        with mine:
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.close()


def test_a_thread_sees_its_own_token_only(server, clean):
    client = redis.Redis.from_url(server.url)
    mine, errors = client.lock("a", timeout=30, lock_class=Lock), []
    mine.acquire()

    def release() -> None:
        try:
            mine.release()
        except (LockError, AttributeError) as error:  # as redis-py's: a thread that never acquired has no token
            errors.append(error)

    thread = threading.Thread(target=release)
    thread.start()
    thread.join()
    assert errors and clean.get("a")
    mine.release()
    client.close()


@pytest.mark.runs_on("its own servers", modes="threads", starts="sentinels and a cluster of valkey-9.1")
@pytest.mark.parametrize("way", ["sentinel", "cluster", "decoding"])
def test_each_kind_of_client_will_do(server_pool, way):
    if way == "sentinel":
        hosts, _, service = server_pool.primary("valkey-9.1").watched.partition("://")[2].partition("/0?service=")
        sentinels = [(host, int(port)) for host, _, port in (each.partition(":") for each in hosts.split(","))]
        client = redis.Sentinel(sentinels).master_for(service)
    elif way == "cluster":
        client = redis.RedisCluster.from_url("redis://" + server_pool.cluster("valkey-9.1").url.rpartition(",")[2])
    else:
        client = redis.Redis.from_url(server_pool.node("valkey-9.1").url, decode_responses=True)
    with client.lock("stock:1", timeout=30, lock_class=Lock) as mine:  # a name of its own among the tests
        assert mine.owned()
        assert client.lock("stock:1", lock_class=Lock).acquire(blocking=False) is False
        assert client.lock("stock:1").acquire(blocking=False) is False
    assert not client.exists("stock:1")
    client.close()


def test_a_drop_in_is_what_redis_py_calls_a_lock(server, clean):
    assert issubclass(Lock, redis.lock.Lock) and issubclass(AsyncLock, redis.asyncio.lock.Lock)
    assert issubclass(interlock.Unavailable, ConnectionError)


ASYNC_PROGRAM = """
import asyncio, sys, redis.asyncio
from interlock.compat.redis_py import AsyncLock

async def main():
    async with redis.asyncio.Redis.from_url(sys.argv[1]) as client:
        async with client.lock("a", timeout=30, lock_class=AsyncLock):
            pass

asyncio.run(main())
asyncio.run(main())
"""


def test_a_program_that_knows_nothing_of_aclose_ends_without_a_warning(server, clean):
    command = [sys.executable, "-W", "error", "-c", ASYNC_PROGRAM, server.url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_end_of_one_loop_leaves_another_its_connections(server, clean):
    waits = threading.Event()

    async def waiter():
        async with redis.asyncio.Redis.from_url(server.url) as client:
            mine = client.lock("a", timeout=30, sleep=NEVER, lock_class=AsyncLock)
            acquiring = asyncio.create_task(mine.acquire())
            await until(lambda: waiting(clean, 1))
            waits.set()
            assert await acquiring is True
            await mine.release()

    async def holder():
        async with redis.asyncio.Redis.from_url(server.url) as client:
            mine = client.lock("a", timeout=30, lock_class=AsyncLock)
            await mine.acquire()
            thread.start()
            await until(waits.is_set)
            await redis_py.aclose()
            await mine.release()

    thread = threading.Thread(target=asyncio.run, args=(waiter(),))
    asyncio.run(holder())
    thread.join(10)
    assert not thread.is_alive() and not clean.get("a")
    (_, locks) = redis_py.for_asyncio.made[-1]
    assert not locks._sessions, "a loop has left a session"
