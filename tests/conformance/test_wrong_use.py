"""Wrong uses get an error that names the public method or the lock, the cause and the way out."""

from __future__ import annotations

import copy
import decimal
import enum
import pickle
import uuid

import pytest
import redis
import redis.asyncio

import interlock
import interlock.aio
from harness.modes import outcome, real
from interlock import ConfigError

pytestmark = pytest.mark.runs_on("valkey-9.1")
NOWHERE = "redis://localhost:1/0"


@pytest.fixture(params=[interlock.Interlock, interlock.aio.Interlock], ids=["threads", "asyncio"])
def make(request):
    return request.param


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda locks: locks.lock("a", blocking=False), r"Interlock\.lock\(\) got an unexpected .*'blocking'"),
        (lambda locks: locks.rlock("a", blocking=False), r"Interlock\.rlock\(\) got an unexpected .*'blocking'"),
        (lambda locks: locks.semaphore("a", 1, ttk=3), r"Interlock\.semaphore\(\) got an unexpected .*'ttk'"),
        (lambda locks: locks.synchronized("a", ttk=3), r"Interlock\.synchronized\(\) got an unexpected .*'ttk'"),
        (lambda locks: locks.semaphore("a"), r"Interlock\.semaphore\(\) missing .*'limit'"),
        (lambda locks: locks.lock("a").acquire(blocking=False), r" ?Lock\.acquire\(\) got an unexpected"),
        (lambda locks: locks.rlock("a").acquire(blocking=False), r"Lock\.acquire\(\) got an unexpected"),
        (lambda locks: locks.rwlock("a").read().acquire(blocking=False), r"ReadLock\.acquire\(\) got an unexpected"),
        (lambda locks: locks.lock("a").inspect(1), r"^Lock\.inspect\(\) takes 1 positional"),
        (lambda locks: locks.rwlock("a").revoke(), r"^RWLock\.revoke\(\) missing .*'reason'"),
        (lambda locks: locks.election("a").run(), r"^Election\.run\(\) missing .*'work'"),
        (lambda locks: type(locks)(NOWHERE, prefx=""), r"^Interlock\.__init__\(\) got an unexpected .*'prefx'"),
        (lambda locks: locks.rwlock("a").write(timeout=3), r"RWLock\.write\(\) .*'timeout'\. Give .* to rwlock\("),
        (lambda locks: locks.rwlock("a").read(5), r"RWLock\.read\(\) .*Give .* to rwlock\("),
    ],
)
def test_a_type_error_names_the_public_method(make, use, says):
    with pytest.raises(TypeError, match=says):
        use(make(NOWHERE))


@pytest.mark.parametrize(
    "option",
    [{"ttl": 10**400}, {"timeout": 10**400}, {"max_hold": 10**400}, {"timeout": 10**5000}],
    ids=lambda each: next(iter(each)),
)
def test_an_int_that_is_no_float_is_refused(make, option):
    with pytest.raises(ConfigError, match="must be a number of seconds, not an int of"):
        make(NOWHERE).lock("a", **option)
    with pytest.raises(ConfigError, match="limit must be a whole number .* not one of"):
        make(NOWHERE).semaphore("a", 10**5000)


def test_what_belongs_to_this_process_is_not_pickled_and_a_copy_is_the_same(make):
    locks = make(NOWHERE)
    for thing, says in (
        (locks, "make it in each process, of the same URL"),
        (locks.lock("a"), "send its name, and make it in each process"),
        (locks.rwlock("a"), "send its name, and make it in each process"),
        (locks.latch("a", 1), "send its name, and make it in each process"),
    ):
        with pytest.raises(TypeError, match=f"can't be pickled, .*{says}"):
            pickle.dumps(thing)
        assert copy.copy(thing) is copy.deepcopy(thing) is thing


async def test_a_lease_is_not_pickled_and_its_repr_says_what_its_seconds_are(mode):
    lease = await mode.interlock().lock("a").acquire()
    with pytest.raises(TypeError, match="can't be pickled, .*acquire another one there, or send its fence"):
        pickle.dumps(real(lease))
    assert " held, ends in 29." in repr(real(lease))
    assert repr(real(lease)).endswith(" s unless renewed>")
    await lease.release()
    assert repr(real(lease)).endswith(" released>")
    lease = await mode.interlock().lock("a", renew=False).acquire()
    assert repr(real(lease)).endswith(" s>")
    await lease.release()
    locks = mode.interlock()
    lease = await locks.multi(locks.lock("a"), locks.lock("b")).acquire()
    assert "held, ends in" in repr(real(lease))
    await lease.release()


class Number(enum.IntEnum):
    ONE = 1


async def test_execute_refuses_what_redis_py_refuses(mode, clean):
    lease = await mode.interlock().lock("a").acquire()
    for wrong in (None, decimal.Decimal(1), uuid.uuid4(), True, [1], {}, object()):
        error = await outcome(lease.execute("SET", "x", wrong, keys=["x"]))
        assert isinstance(error, ConfigError)
        assert f"not {type(wrong).__name__}. Convert it first" in str(error)
    assert not clean.exists("x")
    for given, stored in ((1, b"1"), (1.5, b"1.5"), (b"\xff", b"\xff"), (bytearray(b"y"), b"y"), (Number.ONE, b"1")):
        await lease.execute("SET", "x", given, keys=["x"])
        assert clean.get("x") == stored
    await lease.execute("DEL", "x", keys=["x"])
    await lease.release()


def test_a_with_of_a_read_write_lock_asks_for_a_side():
    with (
        pytest.raises(TypeError, match=r"rwlock 'a': say which side: `with rwlock\.read\(\):`"),
        interlock.Interlock(NOWHERE).rwlock("a"),
    ):
        pass


async def test_an_async_with_of_a_read_write_lock_asks_for_a_side():
    with pytest.raises(TypeError, match=r"rwlock 'a': say which side: `async with rwlock\.read\(\):`"):
        async with interlock.aio.Interlock(NOWHERE).rwlock("a"):
            pass


def test_a_client_of_fakeredis_is_refused(make):
    library = redis if make is interlock.Interlock else redis.asyncio
    fake = type("FakeConnection", (library.Connection,), {"__module__": "fakeredis._connection"})
    client = library.Redis(connection_pool=library.ConnectionPool(connection_class=fake))
    with pytest.raises(ConfigError, match="has no server, .*embedded://"):
        make(client)
