"""Bad input gets one clear error, raised before anything is sent where that can be known, and leaves nothing."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import threading

import pytest
import redis
import redis.asyncio
import redis.sentinel
from redis.exceptions import AuthenticationError, ResponseError

import interlock
import interlock.aio
from harness.matrix import BASE_CELLS, PASSWORD, USER, least_rights
from harness.modes import Mode, outcome, queued, until
from interlock import AcquireTimeout, ConfigError, LockError, Unavailable
from interlock._connect.refusals import connection_error
from interlock._connect.server_check import _warn_of_policy, check_server
from interlock._connect.target import address_of, quorum_of
from interlock._protocol.names import checked_name, tagged

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
INTERLOCKS = [interlock.Interlock, interlock.aio.Interlock]
NOWHERE = "redis://localhost:1/0"


@pytest.fixture(params=INTERLOCKS, ids=["threads", "asyncio"])
def make(request):
    return request.param


@pytest.mark.parametrize("name", ["a", "stock:42", "ünï", "a{b}c", "{b}", "x" * 512, "with space"])
def test_valid_names_are_accepted(make, name):
    assert make(NOWHERE).lock(name).name == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "1 to 512"), ("x" * 513, "1 to 512"), ("ü" * 257, "1 to 512"), ("a\nb", "control"), ("\x00", "control"),
        ("a\x7f", "control"), ("a}b", "hash tag"), ("a{b", "hash tag"), ("a{}b", "hash tag"), ("}a{", "hash tag"),
        ("{a}{b}", "hash tag"), ("\ud800", "UTF-8"), (b"bytes", "must be a str"), (None, "must be a str"),
        (7, "must be a str"),
    ],
)  # fmt: skip
def test_invalid_names_are_refused(make, name, says):
    with pytest.raises(ConfigError, match=says):
        make(NOWHERE).lock(name)


@rule(9)
def test_no_other_key_of_a_lock_is_a_valid_name_or_a_key_of_another_lock():
    names = ["x", "{x}", "{x}:", "a{x}", "{x}a", "x:queue", "{x}queue"]
    companions = {}
    for name in names:
        head, tail = tagged(name)
        for part in ("record", "queue"):
            key = f"{head}{part}{tail}"
            assert key not in companions
            companions[key] = name
            with pytest.raises(ConfigError):
                tagged(checked_name(key))


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": 0}, {"ttl": -1}, {"ttl": 0.009}, {"ttl": 61}, {"ttl": math.nan}, {"ttl": math.inf}, {"ttl": "30"},
        {"ttl": None}, {"ttl": True}, {"timeout": -0.1}, {"timeout": math.nan}, {"timeout": "1"}, {"max_hold": 0},
        {"max_hold": math.nan}, {"max_hold": math.inf}, {"on_lost": "print"},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options_are_refused(make, options):
    with pytest.raises(ConfigError, match=r"ttl|timeout|max_hold|on_lost"):
        make(NOWHERE).lock("a", **options)


def test_the_error_for_a_long_ttl_names_the_way_out_and_its_price(make):
    with pytest.raises(
        ConfigError, match=r"at most max_ttl \(30 s\), not 31: .*is renewed.*max_ttl=.*price: .*every free name waits"
    ):
        make(NOWHERE).lock("a", ttl=31)
    assert make(NOWHERE, max_ttl=3600).lock("a", ttl=3600)


async def test_a_bad_timeout_of_a_call_is_refused(mode):
    lock = mode.interlock().lock("a")
    for timeout in (-1, math.nan, "5"):
        assert isinstance(await outcome(lock.acquire(timeout)), ConfigError)
    await (await lock.acquire(math.inf)).release()


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379", "http://localhost", "redis:/localhost", "redis://localhost:port/0", "redis://localhost/x",
        "redis://localhost:6379/-1", "unix://", "", "redis://:secret@localhost:port", "embedded://elsewhere",
        "ftp://user:secret@host/", "redis://:secret/x@host", "redis://user:1234/secret@host:6379/0",
        "redis://h/x?password=secret", "http://host/0?password=secret", "redis://h:6379/0?db=x&password=secret",
        "redis+sentinel://a:26379/0", "redis+sentinel://a:x/0?service=m", "rediss://:secret@a:1?ssl_ca_cert=x",
        "redis+sentinel://:secret@a:1,:secret@b:1/0?service=m", "redis+cluster://:secret@a:1,:secret@b:1",
        "redis://:secret@a:1,b:1",
    ],
)  # fmt: skip
def test_the_error_for_a_bad_url_says_what_is_right_and_has_no_password(make, url, monkeypatch):
    monkeypatch.delenv("INTERLOCK_URL", raising=False)
    with pytest.raises(ConfigError) as caught:
        make(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("redis://a:1,b:2/0", r"more than one server: .*redis\+cluster://.*Interlock\.quorum"),
        (["redis://a", "redis://b", "redis://c"], r"Interlock\.quorum\(\["),
        (redis.sentinel.Sentinel([("a", 1)]), r"master_for\(service\)"),
        ("redis+cluster://me:secret@a:1,me:secret@b:1", "once, before the first host"),
        ("rediss://a?ssl_ca_cert=/x", "'ssl_ca_cert' is no option for TLS.*ssl_ca_certs"),
    ],
)
def test_the_errors_for_common_mistakes_name_the_way_out(make, target, says):
    with pytest.raises(ConfigError, match=says):
        make(target)


@pytest.mark.parametrize(
    ("hello", "what"),
    [
        ({b"mode": b"cluster"}, "a node of a cluster"),
        ({b"mode": b"sentinel"}, "a sentinel"),
        ({b"mode": b"standalone", b"role": b"replica"}, "a replica"),
    ],
)
def test_an_address_that_can_have_no_vote_in_a_quorum_is_refused(hello, what):
    (member,) = quorum_of([NOWHERE], for_asyncio=False).servers
    check_server({b"version": b"9.1.0", b"mode": b"standalone", b"role": b"master"}, None, member)
    with pytest.raises(ConfigError, match=f"localhost:1/0 is {what}, but a quorum needs single servers"):
        check_server({b"version": b"9.1.0", **hello}, None, member)


@pytest.mark.parametrize("wrong", ["no", 0, None, 30.0])
def test_quarantine_is_true_or_false(make, wrong):
    for made in (lambda: make(NOWHERE, quarantine=wrong), lambda: make.quorum([NOWHERE], quarantine=wrong)):
        with pytest.raises(ConfigError, match="quarantine must be True or False.*max_ttl"):
            made()


def test_no_url_names_both_ways_out(make, monkeypatch):
    monkeypatch.delenv("INTERLOCK_URL", raising=False)
    with pytest.raises(ConfigError, match=r"redis://.*INTERLOCK_URL.*embedded://"):
        make()
    monkeypatch.setenv("INTERLOCK_URL", "valkey://example:7/3")
    assert "redis://example:7/3" in repr(make())


def test_passwords_never_appear_in_errors_and_logs(make):
    locks = make("rediss://ann:s3cret@example:6380/2")
    assert "s3cret" not in repr(locks)
    assert "s3cret" not in repr(locks._address)
    assert "example:6380/2" in repr(locks)


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("redis://h", "tcp", "redis://h:6379/0"),
        ("valkey://h:1/2", "tcp", "redis://h:1/2"),
        ("valkeys://h:1/2", "tls", "rediss://h:1/2"),
        ("redis://[::1]:7/0", "tcp", "redis://[::1]:7/0"),
        ("unix:///tmp/s?db=3", "unix", "unix:///tmp/s?db=3"),
        ("unix://ann:pw@/tmp/s", "unix", "unix:///tmp/s"),
    ],
)
def test_urls_and_clients_become_addresses(url, kind, shown):
    found = address_of(url, for_asyncio=False)
    assert (found.kind, found.display_url) == (kind, shown)


@pytest.mark.parametrize(
    ("query", "checked"),
    [
        ("", True),
        ("?ssl_check_hostname=false", False),
        ("?ssl_cert_reqs=none", False),
        ("?ssl_cert_reqs=optional", True),
    ],
)
def test_the_host_is_compared_with_the_certificate_by_every_redis_py(query, checked):
    """redis-py 5 does so only if it is asked to, and from redis-py 6 on it is the default."""
    assert address_of(f"rediss://h{query}", for_asyncio=False).parameters["ssl_check_hostname"] is checked
    watched = address_of(f"rediss+sentinel://h/0?service=m&{query[1:]}", for_asyncio=False)
    for each in (watched, *watched.sentinels.addresses):
        assert each.parameters["ssl_check_hostname"] is checked


def test_a_tls_option_at_its_default_may_be_unknown_to_the_other_library():
    valkey = pytest.importorskip("valkey")
    client = valkey.Valkey(ssl=True, ssl_cert_reqs=None)
    parameters = address_of(client, for_asyncio=False).parameters
    assert [option for option, value in parameters.items() if value is None] == ["ssl_cert_reqs"]


def test_a_refusal_that_redis_py_wraps_is_the_same_refusal():
    """redis-py 5.0 wraps the server's error on a unix socket of asyncio."""
    found = address_of("unix:///tmp/s", for_asyncio=True)
    for refused, says in (
        (ResponseError("unknown command 'HELLO'"), "runs a version before 6.0"),
        (ResponseError("not today"), "refuses the connection"),
        (AuthenticationError("wrong"), "user name and password are missing"),
    ):
        wrapped = redis.ConnectionError(refused)
        wrapped.__cause__ = refused
        error = connection_error(wrapped, found)
        assert isinstance(error, ConfigError)
        assert says in str(error)


def test_the_error_for_a_client_of_the_other_mode_names_the_right_one(clean):
    with pytest.raises(ConfigError, match="interlock.aio"):
        interlock.Interlock(redis.asyncio.Redis())
    with pytest.raises(ConfigError, match="`from interlock import"):
        interlock.aio.Interlock(redis.Redis())
    for wrong in (object(), 7, redis.Redis, b"redis://x"):
        with pytest.raises(ConfigError):
            interlock.Interlock(wrong)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_client_of_any_flavour_is_an_address(mode, server, decode, protocol):
    library = redis if mode.name == "threads" else redis.asyncio
    client = library.Redis(unix_socket_path=str(server.socket), decode_responses=decode, protocol=protocol)
    lease = await mode.interlock(client).lock("a").acquire()
    assert await lease.execute("GET", "nothing") is None
    assert await lease.release()
    await getattr(client, "aclose", client.close)() if mode.name == "asyncio" else client.close()


async def test_a_prefix_separates_names_and_an_empty_prefix_shares_them(mode, clean):
    lease = await mode.interlock(prefix="").lock("bare").acquire()
    assert clean.get("bare").decode() == lease.token
    await lease.release()
    lease = await mode.interlock(prefix="app:").lock("x").acquire()
    assert clean.exists("app:x")
    await lease.release()


async def test_the_error_for_a_key_of_another_type_names_it_and_the_key_stays(mode, clean):
    clean.lpush("lock:a", 1)
    clean.expire("lock:a", 60)
    error = await outcome(mode.interlock().lock("a").acquire())
    assert isinstance(error, ConfigError)
    assert "'a'" in str(error)
    assert clean.llen("lock:a") == 1
    assert clean.keys() == [b"lock:a"]


async def test_the_error_for_a_name_of_another_kind_names_the_kind(mode, clean):
    clean.set("{lock:a}{record}", "1 semaphore 5 - 0 - 3", px=60_000)
    clean.set("{lock:b}{record}", "2 lock 5 - 0 - - -", px=60_000)
    for name, says in (("a", r"'a' is in use as a semaphore.*another name"), ("b", r"another version.*\('2 lock'\)")):
        error = await outcome(mode.interlock().lock(name).acquire())
        assert isinstance(error, ConfigError)
        assert re.search(says, str(error))
    assert len(clean.keys()) == 2


async def test_a_name_of_a_semaphore_that_is_held_is_no_name_of_a_lock_and_the_other_way_round(mode, clean):
    locks = mode.interlock()
    await mode.keep(locks.semaphore("q", 3).acquire())
    await mode.keep(locks.lock("l").acquire())
    await mode.keep(locks.rwlock("w").read().acquire())
    await locks.latch("c", 2).count_down()
    for acquiring, says in (
        (locks.lock("q").acquire(1), "'q' is in use as a semaphore"),
        (locks.rwlock("q").write().acquire(1), "'q' is in use as a semaphore"),
        (locks.election("q").campaign(1), "'q' is in use as a semaphore"),
        (locks.semaphore("l", 3).acquire(timeout=1), "'l' is in use as a lock"),
        (locks.latch("l", 3).wait(1), "'l' is in use as a lock"),
        (locks.lock("w").acquire(1), "'w' is in use as a read-write lock"),
        (locks.lock("c").acquire(1), "'c' is in use as a latch"),
        (locks.barrier("c", 2).wait(1), "'c' is in use as a latch"),
    ):
        error = await outcome(acquiring)
        assert isinstance(error, ConfigError)
        assert says in str(error)


@pytest.mark.parametrize(
    ("wrong", "says"), [(3, "a prefix must be a str, .*not int"), (None, "a prefix"), ("a\n", "the prefix")]
)
def test_an_error_about_a_prefix_says_prefix(make, wrong, says):
    with pytest.raises(ConfigError, match=says):
        make(NOWHERE, prefix=wrong)


async def test_the_error_for_a_server_that_is_down_reads_as_sentences(mode):
    error = await outcome(mode.interlock("redis://127.0.0.1:1/0", try_for=0.3).lock("a").try_acquire())
    assert isinstance(error, Unavailable)
    says = (
        r"lock 'a': no answer from redis://127\.0\.0\.1:1/0 for 0\.\d{1,2} s "
        r"\([^()]*(\([^()]*\))?[^().]*\)\. Is the server up"
    )
    assert re.match(says, str(error))


async def test_a_wrong_password_raises_config_error(mode, server, clean):
    clean.acl_setuser("ann", enabled=True, passwords=["+right"], keys=["*"], channels=["*"], categories=["+@all"])
    error = await outcome(mode.interlock(f"unix://ann:wrong@{server.socket}").lock("a").acquire())
    assert isinstance(error, ConfigError)
    assert "password" in str(error)
    assert "wrong@" not in str(error)
    lease = await mode.interlock(f"unix://ann:right@{server.socket}").lock("a").acquire()
    assert await lease.release()
    clean.acl_deluser("ann")


async def test_the_error_for_a_missing_right_names_the_right(mode, server, clean):
    clean.acl_setuser("bob", enabled=True, passwords=["+pw"], keys=["other*"], channels=["*"], categories=["+@all"])
    error = await outcome(mode.interlock(f"unix://bob:pw@{server.socket}").lock("a").acquire())
    assert isinstance(error, LockError)
    assert "'a'" in str(error)
    clean.acl_deluser("bob")


@pytest.mark.runs_on("each server in both modes")
async def test_the_least_rights_that_the_docs_name_are_enough(mode, server, clean):
    clean.execute_command("ACL SETUSER", *least_rights().split())
    clean.acl_log_reset()
    locks = mode.interlock(f"unix://{USER}:{PASSWORD}@{server.socket}")
    lease = await locks.lock("a", ttl=0.9).acquire()
    waiting = asyncio.ensure_future(locks.lock("a").acquire(timeout=20))
    await until(lambda: queued(locks, 1))
    await until(lambda: clean.pubsub_numsub(mode.session(locks).channel)[0][1] == 1)
    assert isinstance(await outcome(locks.lock("a").acquire(timeout=0.05)), AcquireTimeout)
    assert await locks.lock("a").revoke("test")
    await until(lease.lost.is_set)
    await lease.release()
    assert await (await waiting).release()
    await until(lambda: not clean.exists("lock:a"))
    denied = [entry for entry in clean.acl_log() if entry["username"] == USER]
    assert not denied
    clean.acl_deluser(USER)


async def test_a_server_that_may_evict_locks_is_logged(mode, server, clean, caplog):
    _warn_of_policy.cache_clear()
    clean.config_set("maxmemory", "1gb")
    clean.config_set("maxmemory-policy", "allkeys-lru")
    try:
        for _ in range(2):
            await (await mode.interlock().lock("a").acquire()).release()
    finally:
        clean.config_set("maxmemory", "0")
        clean.config_set("maxmemory-policy", "noeviction")
    (warning,) = [record.getMessage() for record in caplog.records if "evict" in record.getMessage()]
    assert "allkeys-lru" in warning
    assert "noeviction" in warning


@pytest.mark.runs_on("each server", full="each server in both modes")
@rule(3)
@pytest.mark.parametrize("missing", ["-publish", "-subscribe", "resetchannels", "-pubsub", "-info"])
async def test_without_the_right_to_subscribe_waiters_poll_and_a_warning_is_logged(
    mode, server, clean, caplog, missing
):
    clean.execute_command("ACL SETUSER", *least_rights().split(), missing)
    locks, others = (mode.interlock(f"unix://{USER}:{PASSWORD}@{server.socket}") for _ in range(2))
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(others.lock("a").acquire(timeout=30))
    await until(lambda: queued(locks, 1))
    if missing not in {"-info", "-pubsub"}:
        await until(lambda: "polling only" in caplog.text)
        assert "Give this user the rights &interlock:* +subscribe +publish" in caplog.text
    await lease.release()
    assert await (await waiting).release()
    clean.acl_deluser(USER)


async def test_a_read_only_replica_raises_unavailable_with_the_reason(mode, clean):
    from interlock.embedded import Server

    with Server() as replica:
        client = redis.Redis.from_url(replica.url)
        client.replicaof("127.0.0.1", 1)  # a primary that is nowhere: it is a replica all the same
        client.config_set("replica-serve-stale-data", "yes")
        error = await outcome(mode.interlock(replica.url).lock("a").acquire(2))
        assert isinstance(error, Unavailable)
        assert "replica" in str(error)
        client.close()


class OldServer:
    """Speaks as servers before 6.2 do; there is none to install."""

    def __init__(self, hello: bytes) -> None:
        self.hello = hello
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            with client:
                while data := client.recv(4096):
                    client.sendall(self.hello * data.count(b"*"))

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join()


@pytest.mark.parametrize(
    "hello",
    [
        b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n",
        b"%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n6.0.16\r\n$5\r\nproto\r\n:3\r\n",
    ],
    ids=["5.0", "6.0"],
)
async def test_a_server_before_6_2_is_refused(mode, hello):
    old = OldServer(hello)
    error = await outcome(mode.interlock(f"redis://127.0.0.1:{old.port}").lock("a").acquire(3))
    old.close()
    assert isinstance(error, ConfigError)
    assert "6.2" in str(error)


def test_a_function_of_the_other_mode_is_refused_by_the_decorator(make):
    lock = make(NOWHERE).lock("a")
    if make is interlock.Interlock:

        async def function():
            pass
    else:

        def function():
            pass

    with pytest.raises(ConfigError, match="async def"):
        lock(function)


async def test_both_modes_meet_on_the_embedded_server(mode, server, tmp_path, monkeypatch):
    """embedded:// is one server for each user."""
    from interlock import embedded

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    try:
        lease = await mode.interlock("embedded://").lock("a").acquire()
        other = Mode(BASE_CELLS[mode.name == "threads"], server)
        assert await other.interlock("embedded://").lock("a").try_acquire() is None
        await other.close()
        assert await lease.release()
    finally:
        await mode.close()
        await asyncio.to_thread(embedded.stop_shared)


async def test_a_default_ttl_is_at_most_max_ttl(mode):
    locks = mode.interlock(max_ttl=5)
    lease = await locks.lock("a").acquire()
    assert 3 < lease.remaining() <= 5
    await lease.release()
    lease = await locks.multi(locks.lock("a"), locks.rlock("b")).acquire()
    assert 3 < lease.remaining() <= 5
    await lease.release()
    with pytest.raises(ConfigError, match="max_ttl"):
        locks.lock("a", ttl=30.0)


async def test_locks_that_are_held_in_the_same_way_share_their_options(mode):
    """A process may hold 100,000 leases. What a cohort needs of an option is never taken from another lock."""
    locks = mode.interlock()
    plain = locks.lock("a")._options
    assert plain is locks.lock("b", ttl=30.0)._options is locks.rlock("c")._options
    others = [
        locks.lock("a", ttl=29)._options,
        locks.lock("a", timeout=0)._options,
        locks.lock("a", fair=True)._options,
        locks.lock("a", confirm=False)._options,
        locks.lock("a", on_lost=print)._options,
        locks.rlock("a", owner="me")._options,
    ]
    assert len({id(each) for each in [plain, *others]}) == 1 + len(others)
    assert [each.joins for each in others] == [True, True, False, True, True, False]
    assert plain.joins
