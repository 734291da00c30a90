"""The trial of wrong uses that need no server: targets, options, names, numbers, decorators, other libraries' words."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime as dt
import decimal
import functools
import inspect
import logging
import math
import pathlib
import pickle
import time
import traceback
import types
import uuid

import pytest
import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.sentinel
import redis.cluster
import redis.sentinel

import interlock
import interlock.aio
from harness.trial import cases, title, wrong
from interlock import ConfigError
from interlock._api import misuse_warnings

NOWHERE = "redis://localhost:1/0"
MAKERS = {"threads": interlock.Interlock, "asyncio": interlock.aio.Interlock}


def is_for_threads(locks) -> bool:
    return isinstance(locks, interlock.Interlock)


def library(locks):
    """The client library of this mode."""
    return redis if is_for_threads(locks) else redis.asyncio


def other(locks):
    """The same for the other mode."""
    return redis.asyncio if is_for_threads(locks) else redis


def made(*args, **options):
    """Makes an Interlock."""
    return lambda locks: type(locks)(*args, **options)


def quorum(*args, **options):
    return lambda locks: type(locks).quorum(*args, **options)


def on_a_quorum(method, *args, **options):
    servers = ["redis://h1", "redis://h2", "redis://h3"]
    return lambda locks: getattr(type(locks).quorum(servers), method)(*args, **options)


def lock(**options):
    return lambda locks: locks.lock("a", **options)


def named(name):
    return lambda locks: locks.lock(name)


def plain(x=1):
    return x


async def coroutine(x=1):
    return x


def job(locks):
    """A function of this mode."""
    return plain if is_for_threads(locks) else coroutine


def generator():
    yield


async def async_generator():
    yield


class Work:
    """A class, and objects that are called."""

    def __call__(self):
        yield


def decorated(function, by=lambda locks: locks.lock("a")):
    return lambda locks: by(locks)(function)


def called(*args):
    """A call of what @locks.synchronized has made of a function, without a name."""
    return lambda locks: locks.synchronized(job(locks))(*args)


def module(locks):
    return interlock if is_for_threads(locks) else interlock.aio


def synchronized(*args, **options):
    return lambda locks: locks.synchronized(*args, **options)(job(locks))


def once(*args, **options):
    return lambda locks: locks.once("a", *args, **options)


def fake(locks):
    """A client of fakeredis."""
    connection = type("FakeConnection", (library(locks).Connection,), {"__module__": "fakeredis._connection"})
    return library(locks).Redis(connection_pool=library(locks).ConnectionPool(connection_class=connection))


def entered(make):
    """An `async with` of what threads hold, or a `with` of what tasks hold."""

    def use(locks):
        thing = make(locks)
        if not is_for_threads(locks):
            with thing:
                return

        async def enter():
            async with thing:
                pass

        asyncio.run(enter())

    return use


def entered_rightly(make):
    """The `with` of this mode."""

    def use(locks):
        thing = make(locks)
        if is_for_threads(locks):
            with thing:
                return

        async def enter():
            async with thing:
                pass

        asyncio.run(enter())

    return use


class User:
    """Has no repr of its own."""


SEVERAL = "redis+sentinel://h1:26379,h2:26379/0?service=mymaster"
USES = [
    # Where to connect
    wrong("a web server's URL", made("http://localhost:6379"), ConfigError, "'http://localhost:6379'", "redis://"),
    wrong("a URL without a scheme", made("localhost:6379"), ConfigError, "Did you mean 'redis://localhost:6379'?"),
    wrong("a host for a URL", made("localhost"), ConfigError, "Did you mean 'redis://localhost'?"),
    wrong("an empty URL", made(""), ConfigError, "'' is no server's URL", "redis://"),
    wrong(
        "a word for a port", made("redis://h:port/0"), ConfigError, "the port must be a number", "redis://user:password"
    ),
    wrong("a port above 65535", made("redis://h:99999/0"), ConfigError, "a number up to 65535"),
    wrong("a word for a database", made("redis://h/mydb"), ConfigError, "the database must be a number from 0"),
    wrong("a negative database", made("redis://h/-1"), ConfigError, "the database must be a number from 0"),
    wrong("two hosts in one URL", made("redis://h1:1,h2:2/0"), ConfigError, "names more than one server", SEVERAL),
    wrong("a slash in a password", made("redis://u:s3/cr3@h:1/0"), ConfigError, "Percent-encode the special"),
    wrong(
        "a hash sign in a password", made("redis://:s3#cr3@h/0"), ConfigError, "stands after a '#'", "percent-encoded"
    ),
    wrong("sentinels without a service", made("redis+sentinel://h:1/0"), ConfigError, "names no service", "?service="),
    wrong("sentinels with a comma too many", made("redis+sentinel://h,,i?service=m"), ConfigError, "two commas"),
    wrong("a cluster without a host", made("redis+cluster://"), ConfigError, "a host is missing", "host1:7000"),
    wrong("a database of a cluster", made("redis+cluster://h:1/3"), ConfigError, "only the database 0"),
    wrong("a socket without a path", made("unix://"), ConfigError, "needs the path of a socket", "unix:///run"),
    wrong("a socket with two slashes", made("unix://run/redis.sock"), ConfigError, "Write three slashes"),
    wrong("a host of the embedded server", made("embedded://h"), ConfigError, "embedded:// has no host"),
    wrong("a scheme with a typing error", made("reddis://h"), ConfigError, "Did you mean redis://?"),
    wrong("a scheme in capitals", made("REDIS://h"), ConfigError, "Did you mean redis://?"),
    wrong("Celery's sentinel://", made("sentinel://h:26379/0"), ConfigError, "Did you mean redis+sentinel://?"),
    wrong("redis-sentinel://", made("redis-sentinel://h"), ConfigError, "Did you mean redis+sentinel://?"),
    wrong("rediscluster://", made("rediscluster://h"), ConfigError, "Did you mean redis+cluster://?"),
    wrong("redis+socket://", made("redis+socket:///x.sock"), ConfigError, "Did you mean unix:///path.sock?"),
    wrong("another kind of server", made("memcached://h"), ConfigError, "'memcached://h' is no server's URL"),
    wrong("a URL with one slash", made("redis:/localhost"), ConfigError, "is no server's URL. It starts with redis://"),
    wrong("white space before a URL", made(" redis://h"), ConfigError, "Remove the white space"),
    wrong("an unknown option in a URL", made("redis://h?nonsense=1"), ConfigError, "'nonsense' is no option"),
    wrong(
        "a misspelt option in a URL", made("redis://h?socket_timout=1"), ConfigError, "Did you mean 'socket_timeout'"
    ),
    wrong("an option for TLS without TLS", made("redis://h?ssl_ca_certs=/x"), ConfigError, "Use rediss://"),
    wrong("a port for a target", made(6379), ConfigError, "int is neither a URL nor a client", 'Interlock("redis://'),
    wrong("a list for a target", made(["redis://h"]), ConfigError, "For several servers, give", "Interlock.quorum("),
    wrong("a dict for a target", made({"host": "h"}), ConfigError, "dict is neither", 'Interlock("redis://'),
    wrong("bytes for a target", made(b"redis://h"), ConfigError, "bytes is neither", "decode it"),
    wrong("a path for a target", made(pathlib.Path("/x.sock")), ConfigError, "For a socket give unix:///path.sock"),
    wrong("a module for a target", made(redis), ConfigError, "module is neither a URL nor a client"),
    wrong("a class for a target", made(redis.Redis), ConfigError, "It is a class: give Redis(...)"),
    wrong("an Interlock for a target", lambda locks: type(locks)(locks), ConfigError, "neither a URL nor a client"),
    wrong("host and port", made("localhost", 6379), TypeError, "Give one URL or client", 'Interlock("redis://host'),
    wrong(
        "a client of the other mode",
        lambda locks: type(locks)(other(locks).Redis()),
        ConfigError,
        "use it with `from interlock",
        "its own URL",
    ),
    wrong(
        "sentinels of redis-py",
        lambda locks: type(locks)(library(locks).sentinel.Sentinel([("h", 1)])),
        ConfigError,
        "Sentinel is neither",
        "master_for(service) returns",
    ),
    wrong(
        "a client of replicas",
        lambda locks: type(locks)(library(locks).sentinel.Sentinel([("h", 1)]).slave_for("m")),
        ConfigError,
        "reads from replicas",
        "master_for(service) returns",
    ),
    wrong("a client of fakeredis", lambda locks: type(locks)(fake(locks)), ConfigError, "has no server", "embedded://"),
    wrong(
        "a pool for a client",
        lambda locks: type(locks)(library(locks).ConnectionPool()),
        ConfigError,
        "ConnectionPool is neither",
        "Give a client that uses it",
    ),
    wrong(
        "redis-py's lock for a client",
        lambda locks: type(locks)(library(locks).Redis().lock("x")),
        ConfigError,
        "Lock is neither a URL nor a client",
    ),
    wrong("host= of an Interlock", made(host="h"), TypeError, "Interlock.__init__()", "'host'", "put it into the URL"),
    wrong("password= of an Interlock", made(NOWHERE, password="x"), TypeError, "'password'", "put it into the URL"),
    wrong("decode_responses=", made(NOWHERE, decode_responses=True), TypeError, "'decode_responses'", "to the server"),
    wrong("ttl= of an Interlock", made(NOWHERE, ttl=1), TypeError, "'ttl'", "locks.lock(name, ttl=10"),
    wrong("namespace=", made(NOWHERE, namespace="app"), TypeError, "'namespace'", 'Interlock(prefix="app:")'),
    wrong("a misspelt option", made(NOWHERE, prefx="a"), TypeError, "Interlock.__init__()", "Did you mean prefix=?"),
    wrong("url=", made(url=NOWHERE), TypeError, "'url'", "Interlock(url)"),
    # A quorum
    wrong(
        "a quorum of one text", quorum(NOWHERE), ConfigError, "a list of servers", "Interlock.quorum([url, url, url])"
    ),
    wrong("a quorum of nobody", quorum([]), ConfigError, "a quorum needs servers. Name 3 or 5"),
    wrong("a quorum of arguments", quorum("redis://a", "redis://b"), TypeError, "Interlock.quorum()", "as one list"),
    wrong("a quorum without servers", quorum(), TypeError, "Interlock.quorum() missing", "quorum([url"),
    wrong("a quorum of None", quorum([NOWHERE, None]), ConfigError, "single servers", "not None"),
    wrong("a server twice in a quorum", quorum([NOWHERE, NOWHERE, "redis://h"]), ConfigError, "twice", "Name it once"),
    wrong("sentinels in a quorum", quorum(["redis+sentinel://a/0?service=m"]), ConfigError, "a quorum needs single"),
    wrong("a cluster in a quorum", quorum(["redis+cluster://a"]), ConfigError, "a quorum needs single servers"),
    wrong("an unknown option of a quorum", quorum([NOWHERE], foo=1), TypeError, "Interlock.quorum()", "'foo'"),
    wrong(
        "a semaphore on a quorum", on_a_quorum("semaphore", "a", 1), ConfigError, "has no semaphore", "use one server"
    ),
    wrong("an rwlock on a quorum", on_a_quorum("rwlock", "a"), ConfigError, "a quorum has no rwlock", "It has lock,"),
    wrong("a latch on a quorum", on_a_quorum("latch", "a", 1), ConfigError, "a quorum has no latch", "use one server"),
    wrong("acks on a quorum", on_a_quorum("lock", "a", acks=1), ConfigError, "lock('a')", "a quorum takes no acks="),
    # Options of an Interlock
    wrong("prefix=None", made(NOWHERE, prefix=None), ConfigError, "a prefix must be a str", "not NoneType"),
    wrong(
        "a prefix with a line break",
        made(NOWHERE, prefix="a\n"),
        ConfigError,
        "the prefix 'a\\n' has a control character",
    ),
    wrong("a brace in a prefix", made(NOWHERE, prefix="a}"), ConfigError, "'a}'", "one pair of braces"),
    wrong("max_ttl=0", made(NOWHERE, max_ttl=0), ConfigError, "max_ttl must be at least 0.01 seconds, not 0"),
    wrong("max_ttl as a text", made(NOWHERE, max_ttl="60"), ConfigError, "max_ttl must be a number of seconds"),
    wrong("a misspelt option of a quorum", quorum([NOWHERE], prefx="a"), TypeError, "'prefx'", "Did you mean prefix=?"),
    wrong("max_ttl=None", made(NOWHERE, max_ttl=None), ConfigError, "max_ttl must be a number", "None"),
    wrong("an endless max_ttl", made(NOWHERE, max_ttl=math.inf), ConfigError, "max_ttl must be a finite number"),
    wrong("quarantine in seconds", made(NOWHERE, quarantine=30), ConfigError, "True or False", "its length is max_ttl"),
    wrong("try_for=0", made(NOWHERE, try_for=0), ConfigError, "try_for must be at least 0.01"),
    wrong(
        "label=7", made(NOWHERE, label=7), ConfigError, "label must be a str with at least one letter or digit, not 7"
    ),
    wrong(
        "an empty label",
        made(NOWHERE, label=""),
        ConfigError,
        "label must be a str with at least one letter or digit, not ''",
    ),
    wrong("max_connections=0", made(NOWHERE, max_connections=0), ConfigError, "max_connections", "from 1 to"),
    # Names
    wrong("no name", lambda locks: locks.lock(), TypeError, "Interlock.lock() missing", "'name'", "stock:42"),
    wrong("an empty name", named(""), ConfigError, "a name must have 1 to 512 bytes", "has 0"),
    wrong("None for a name", named(None), ConfigError, "a name must be a str, such as 'stock:42', not NoneType"),
    wrong("a number for a name", named(42), ConfigError, "a name must be a str", "not int"),
    wrong("bytes for a name", named(b"a"), ConfigError, "a name must be a str", "not bytes"),
    wrong("a UUID for a name", named(uuid.UUID(int=1)), ConfigError, "a name must be a str", "not UUID"),
    wrong("a list of names", named(["a", "b"]), ConfigError, "a name must be a str", "not list"),
    wrong("a name that is too long", named("x" * 600), ConfigError, "1 to 512 bytes", "this one has 600"),
    wrong("a line break in a name", named("a\nb"), ConfigError, "the name 'a\\nb' has a control character", "quote()"),
    wrong("half a brace in a name", named("a{"), ConfigError, "one pair of braces", "'stock:{42}'"),
    wrong("an empty hash tag", named("a{}b"), ConfigError, "one pair of braces, with a text between them"),
    wrong("two hash tags", named("{a}{b}"), ConfigError, "one pair of braces"),
    wrong("a format for a name", named("cart:{user}:{item}"), ConfigError, "Only synchronized() puts arguments"),
    wrong("half a surrogate in a name", named("\ud800"), ConfigError, "half a surrogate pair"),
    wrong("an object's address in a name", named(f"user:{User()}"), ConfigError, "the address of an object", "user.id"),
    wrong(
        "two names",
        lambda locks: locks.lock("a", "b"),
        TypeError,
        "Interlock.lock()",
        "Give options by their names",
        "multi()",
    ),
    wrong("the name twice", lock(name="b"), TypeError, "Interlock.lock() got multiple values", "'name'"),
    # Numbers of a lock
    wrong("ttl=0", lock(ttl=0), ConfigError, "lock('a')", "ttl must be at least 0.01 seconds, not 0"),
    wrong("a negative ttl", lock(ttl=-1), ConfigError, "lock('a')", "ttl must be at least", "-1"),
    wrong("ttl as a text", lock(ttl="30"), ConfigError, "lock('a')", "ttl must be a number of seconds, not '30'"),
    wrong("ttl=None", lock(ttl=None), ConfigError, "lock('a')", "ttl must be a number of seconds, not None"),
    wrong("ttl is no number", lock(ttl=math.nan), ConfigError, "lock('a')", "not nan"),
    wrong("an endless ttl", lock(ttl=math.inf), ConfigError, "lock('a')", "ttl", "inf"),
    wrong("ttl as a timedelta", lock(ttl=dt.timedelta(seconds=3)), ConfigError, "lock('a')", ".total_seconds()"),
    wrong("ttl as a Decimal", lock(ttl=decimal.Decimal(3)), ConfigError, "lock('a')", "a number of seconds"),
    wrong("a ttl of an hour", lock(ttl=3600), ConfigError, "lock('a')", "at most max_ttl (30 s)", "is renewed"),
    wrong("a ttl that is no float", lock(ttl=10**400), ConfigError, "lock('a')", "ttl must be a number of seconds"),
    wrong(
        "a negative timeout",
        lock(timeout=-1),
        ConfigError,
        "lock('a')",
        "at least 0 seconds, not -1. To wait for ever: None",
    ),
    wrong("timeout as a text", lock(timeout="5"), ConfigError, "lock('a')", "timeout must be a number of seconds"),
    wrong("timeout=False", lock(timeout=False), ConfigError, "lock('a')", "not False", "try_acquire()", "None"),
    wrong("a complex timeout", lock(timeout=5j), ConfigError, "lock('a')", "timeout must be a number of seconds"),
    wrong("a timeout that is no float", lock(timeout=10**5000), ConfigError, "lock('a')", "not an int of"),
    wrong("max_hold=0", lock(max_hold=0), ConfigError, "lock('a')", "max_hold must be at least 0.01 seconds"),
    wrong("renew in seconds", lock(renew=30), ConfigError, "lock('a')", "renew must be True or False, not 30"),
    wrong("renew=None", lock(renew=None), ConfigError, "lock('a')", "renew must be True or False, not None"),
    wrong("fair as a text", lock(fair="yes"), ConfigError, "lock('a')", "fair must be True or False, not 'yes'"),
    wrong("on_lost is no function", lock(on_lost="stop"), ConfigError, "lock('a')", "on_lost must be callable"),
    wrong("an async on_lost in threads", lock(on_lost=coroutine), ConfigError, "lock('a')", "plain", only="threads"),
    wrong("negative acks", lock(acks=-1), ConfigError, "lock('a')", '"majority" or "all", not -1'),
    wrong("acks as a word", lock(acks="most"), ConfigError, "lock('a')", '"majority" or "all", not \'most\''),
    wrong("fsync=1", lock(fsync=1), ConfigError, "lock('a')", "fsync must be True or False, not 1"),
    # Words of other libraries
    wrong("redis-py's blocking", lock(blocking=False), TypeError, "Interlock.lock()", "'blocking'", "try_acquire()"),
    wrong(
        "redis-py's blocking_timeout",
        lock(blocking_timeout=5, timeout=30),
        TypeError,
        "Interlock.lock()",
        "'blocking_timeout'",
        "How long to wait is timeout=",
        "How long the lock lasts, which is timeout= in redis-py, is ttl= here",
    ),
    wrong(
        "redis-py's lock_class",
        lock(lock_class=int, timeout=30),
        TypeError,
        "'lock_class'",
        "interlock.compat.redis_py.Lock",
        "timeout= is ttl=",
    ),
    wrong("redis-py's raise_on_release_error", lock(raise_on_release_error=False), TypeError, "Catch LeaseLost"),
    wrong("redis-py's token", lock(token="x"), TypeError, "'token'", "lease.token"),
    wrong("python-redis-lock's strict", lock(strict=False), TypeError, "'strict'", "Leave it out"),
    wrong("python-redis-lock's signal_expire", lock(signal_expire=9), TypeError, "'signal_expire'", "Leave it out"),
    wrong("python-redis-lock's redis_client", lock(redis_client=1), TypeError, "is the first argument: Interlock(url)"),
    wrong("django-redis' version", lock(version=2), TypeError, "'version'", "Put it into the name"),
    wrong("a lock's local", lambda locks: locks.lock("a").local, AttributeError, "'local'", "lease.token"),
    wrong("a lock's reset_all", lambda locks: locks.lock("a").reset_all, AttributeError, "'reset_all'", "revoke("),
    wrong(
        "redis-py's blocking_timeout, for once",
        lambda locks: locks.once("a", at_most=5, blocking_timeout=5),
        TypeError,
        "once() does not wait",
    ),
    wrong("expire, for once", lambda locks: locks.once("a", expire=5), TypeError, "at_most="),
    wrong("expire, for multi", lambda locks: locks.multi(expire=5), TypeError, "Give this option to each lock"),
    *(
        wrong(
            f"{option}, for a {kind}",
            lambda locks, kind=kind, option=option: getattr(locks, kind)("a", 2, **{option: 5}),
            TypeError,
            f"Interlock.{kind}()",
            "wait(timeout=...)",
        )
        for kind in ("latch", "barrier")
        for option in ("timeout", "blocking_timeout")
    ),
    *(
        wrong(f"blocking_timeout, for {kind}", make, TypeError, f"Interlock.{kind}()", "timeout=", "ttl= here")
        for kind, make in (
            ("rlock", lambda locks: locks.rlock("a", blocking_timeout=5)),
            ("semaphore", lambda locks: locks.semaphore("a", 2, blocking_timeout=5)),
            ("rwlock", lambda locks: locks.rwlock("a", blocking_timeout=5)),
            ("election", lambda locks: locks.election("a", blocking_timeout=5)),
            ("synchronized", lambda locks: locks.synchronized("a", blocking_timeout=5)),
        )
    ),
    wrong("redis-py's sleep", lock(sleep=0.1), TypeError, "'sleep'", "A waiter does not poll"),
    wrong("redis-py's thread_local", lock(thread_local=False), TypeError, "'thread_local'", "may release it"),
    wrong("python-redis-lock's expire", lock(expire=30), TypeError, "'expire'", "ttl="),
    wrong("python-redis-lock's auto_renewal", lock(auto_renewal=True), TypeError, "'auto_renewal'", "renew=False"),
    wrong("python-redis-lock's id", lock(id="x"), TypeError, "'id'", "lease.token"),
    wrong("Redisson's leaseTime", lock(leaseTime=30), TypeError, "'leaseTime'", "ttl="),
    wrong("Redisson's waitTime", lock(waitTime=30), TypeError, "'waitTime'", "timeout="),
    wrong("pottery's auto_release_time", lock(auto_release_time=3), TypeError, "'auto_release_time'", "ttl="),
    wrong("redlock-py's retry_count", lock(retry_count=3), TypeError, "'retry_count'", "timeout="),
    wrong("aioredlock's lock_timeout", lock(lock_timeout=3), TypeError, "'lock_timeout'", "ttl="),
    wrong("milliseconds", lock(ttl_ms=3000), TypeError, "'ttl_ms'", "in seconds"),
    wrong("SET's nx", lock(ex=3), TypeError, "'ex'", "ttl="),
    wrong("an owner of a lock", lock(owner="x"), TypeError, "'owner'", "rlock(name, owner=...)"),
    wrong("a limit of a lock", lock(limit=3), TypeError, "'limit'", "semaphore(name, limit)"),
    wrong("a key of a lock", lock(key="x"), TypeError, "'key'", "once(name, key=..."),
    wrong("reentrant=", lock(reentrant=True), TypeError, "'reentrant'", "rlock(name)"),
    wrong("a prefix of a lock", lock(prefix="x:"), TypeError, "'prefix'", "an option of Interlock(...)"),
    wrong(
        "blocking of an rlock", lambda locks: locks.rlock("a", blocking=False), TypeError, "Interlock.rlock()", "try_"
    ),
    wrong("a misspelt option of a lock", lock(ttk=3), TypeError, "Interlock.lock()", "'ttk'", "Did you mean ttl=?"),
    wrong(
        "lock_class=interlock.Lock",
        lambda locks: library(locks).Redis().lock("a", lock_class=module(locks).Lock),
        TypeError,
        "Lock.__init__()",
        "as lock_class= is Lock or AsyncLock of interlock.compat.redis_py",
    ),
    wrong("Lock(name)", lambda locks: module(locks).Lock("a"), TypeError, "Lock.__init__()", "An Interlock makes it"),
    wrong(
        "Semaphore(name, limit)", lambda locks: module(locks).Semaphore("a", 3), TypeError, ".semaphore(name, limit)"
    ),
    wrong("RLock()", lambda locks: module(locks).RLock(), TypeError, "RLock.__init__()", ".rlock(name)"),
    wrong("Once(name)", lambda locks: module(locks).Once("a"), TypeError, "Once.__init__()", ".once(name, at_most="),
    wrong("a lock's release()", lambda locks: locks.lock("a").release(), AttributeError, "'release'", "of the lease"),
    wrong("a lock's locked()", lambda locks: locks.lock("a").locked(), AttributeError, "'locked'", "inspect().held"),
    wrong("a lock's extend()", lambda locks: locks.lock("a").extend(3), AttributeError, "'extend'", "of the lease"),
    wrong("a lock's fence", lambda locks: locks.lock("a").fence, AttributeError, "'fence'", "of the lease"),
    wrong("a lock's unlock()", lambda locks: locks.lock("a").unlock(), AttributeError, "'unlock'", "lease.release()"),
    wrong("a semaphore's release()", lambda locks: locks.semaphore("a", 1).release(), AttributeError, "of the lease"),
    wrong("an Interlock's acquire()", lambda locks: locks.acquire("a"), AttributeError, "'acquire'", "lock(name)"),
    wrong("an Interlock's Lock", lambda locks: locks.Lock("a"), AttributeError, "'Lock'", "lock(name)"),
    wrong("an Interlock's get()", lambda locks: locks.get("a"), AttributeError, "'get'", "no client"),
    # The other synchronizers
    wrong(
        "a semaphore without a limit",
        lambda locks: locks.semaphore("a"),
        TypeError,
        "Interlock.semaphore()",
        "semaphore(name, 3)",
    ),
    wrong(
        "a semaphore of 0", lambda locks: locks.semaphore("a", 0), ConfigError, "semaphore 'a'", "its limit", "not 0"
    ),
    wrong("a limit as a text", lambda locks: locks.semaphore("a", "3"), ConfigError, "semaphore 'a'", "a whole number"),
    wrong("a limit that is no int", lambda locks: locks.semaphore("a", 1.5), ConfigError, "semaphore 'a'", "not 1.5"),
    wrong(
        "a limit of 5,000 digits", lambda locks: locks.semaphore("a", 10**5000), ConfigError, "semaphore 'a'", "bits"
    ),
    wrong(
        "permits of a semaphore",
        lambda locks: locks.semaphore("a", 3, permits=2),
        TypeError,
        "is limit",
        "acquire(permits=2)",
    ),
    wrong(
        "options of a side", lambda locks: locks.rwlock("a").write(timeout=3), TypeError, "RWLock.write()", "to rwlock("
    ),
    wrong("a timeout for a side", lambda locks: locks.rwlock("a").read(5), TypeError, "RWLock.read()", "to rwlock("),
    wrong("acquiring no side", lambda locks: locks.rwlock("a").acquire(), AttributeError, "'acquire'", ".read()"),
    wrong(
        "decorating with no side", lambda locks: locks.rwlock("a")(job(locks)), TypeError, "rwlock 'a'", "which side"
    ),
    wrong("a multi of nothing", lambda locks: locks.multi(), ConfigError, "multi() takes 1 to 1000 locks, not 0"),
    wrong("max_waiters=0", lock(max_waiters=0), ConfigError, "lock('a'): max_waiters must be a whole number"),
    wrong("a question mark in a password", made("redis://:s3?cr3@h/0"), ConfigError, "stands after a '?'"),
    wrong("a multi of names", lambda locks: locks.multi("a", "b"), ConfigError, "multi() takes locks", "not 'a'"),
    wrong(
        "a multi of a list", lambda locks: locks.multi([locks.lock("b")]), ConfigError, "multi() takes locks", "not ["
    ),
    wrong("a multi of an rwlock", lambda locks: locks.multi(locks.rwlock("b")), ConfigError, ".read() or .write()"),
    wrong("a multi of a latch", lambda locks: locks.multi(locks.latch("b", 1)), ConfigError, "multi() takes locks"),
    wrong(
        "a multi over two Interlocks",
        lambda locks: locks.multi(locks.lock("b"), type(locks)(NOWHERE).lock("c")),
        ConfigError,
        "'c'",
        "belongs to another Interlock",
    ),
    wrong(
        "a lock twice in a multi",
        lambda locks: locks.multi(locks.lock("b"), locks.rlock("b")),
        ConfigError,
        "multi()",
        "'b' is there twice",
        "Name it once",
    ),
    wrong("an owner in a multi", lambda locks: locks.multi(locks.rlock("b", owner="x")), ConfigError, "Acquire it by"),
    wrong(
        "ttl of a multi",
        lambda locks: locks.multi(locks.lock("b"), ttl=3),
        TypeError,
        "Interlock.multi()",
        "to each lock",
    ),
    wrong(
        "a latch without a count",
        lambda locks: locks.latch("a"),
        TypeError,
        "Interlock.latch() missing",
        "latch(name, 3)",
    ),
    wrong("a latch of 0", lambda locks: locks.latch("a", 0), ConfigError, "latch 'a'", "its count", "not 0"),
    wrong("a latch for a second", lambda locks: locks.latch("a", 1, ttl=1), ConfigError, "latch('a')", "at least 10"),
    wrong("a barrier of 0", lambda locks: locks.barrier("a", 0), ConfigError, "barrier 'a'", "its parties", "not 0"),
    wrong("a barrier's action", lambda locks: locks.barrier("a", 2, action=print), TypeError, "call it after wait()"),
    wrong("an empty owner", lambda locks: locks.rlock("a", owner=""), ConfigError, "rlock('a')", "owner must be a str"),
    wrong("a number for an owner", lambda locks: locks.rlock("a", owner=7), ConfigError, "rlock('a')", "not 7"),
    # Work that runs once
    wrong("once without at_most", once(), TypeError, "Interlock.once() missing", "at_most=600"),
    wrong("at_most=0", once(at_most=0), ConfigError, "once('a')", "at_most must be at least", "not 0"),
    wrong("at_most as a text", once(at_most="1h"), ConfigError, "once('a')", "at_most must be a number of seconds"),
    wrong("at_least above at_most", once(at_most=1, at_least=2), ConfigError, "once('a')", "at_least (2 s)", "(1 s)"),
    wrong("a date for a key", once(at_most=1, key=dt.date(2026, 1, 1)), ConfigError, "once('a')", "must be a str"),
    wrong("an empty key", once(at_most=1, key=""), ConfigError, "once('a')", "key must be a str", "not ''"),
    wrong("keep without a key", once(at_most=1, keep=60), ConfigError, "once('a')", "keep", "give a key="),
    wrong("ttl of once", once(at_most=1, ttl=3), TypeError, "Interlock.once()", "is at_most="),
    wrong("acquiring a once", lambda locks: once(at_most=1)(locks).acquire(), AttributeError, "'acquire'", "run(work)"),
    wrong(
        "once with a field that nobody has",
        lambda locks: locks.once("a:{y}", at_most=1)(job(locks)),
        ConfigError,
        "the name needs 'y'",
        "It has x",
    ),
    wrong(
        "a key with a field that nobody has",
        lambda locks: locks.once("a", at_most=1, key="{y}")(job(locks)),
        ConfigError,
        "the key needs 'y'",
        "It has x",
    ),
    # Decorators
    wrong("@locks.lock without a name", lambda locks: locks.lock(job(locks)), ConfigError, '@locks.lock("stock")'),
    wrong("@locks.synchronized without a name", called(7), ConfigError, "not 7", '@locks.synchronized("report")'),
    wrong("@locks.synchronized without a name or an argument", called(), ConfigError, '@locks.synchronized("report")'),
    wrong("@locks.once without options", lambda locks: locks.once(job(locks)), TypeError, "Interlock.once()"),
    wrong("calling a lock", lambda locks: locks.lock("a")(), TypeError, "Lock.__call__() missing", "'function'"),
    wrong("a decorated generator", decorated(generator), ConfigError, "lock 'a'", "generator()", "in a `with`"),
    wrong("a decorated async generator", decorated(async_generator), ConfigError, "lock 'a'", "an async generator"),
    wrong(
        "a decorated context manager",
        decorated(contextlib.contextmanager(generator)),
        ConfigError,
        "lock 'a'",
        "after the release",
        "Hold the lock inside it",
    ),
    wrong("a decorated class", decorated(Work), ConfigError, "lock 'a'", "is a class. Decorate its methods"),
    wrong("a decorated object", decorated(Work()), ConfigError, "lock 'a'", "a generator"),
    wrong("a decorated number", decorated(7), ConfigError, "lock 'a' decorates functions, not 7"),
    wrong("over @classmethod", decorated(classmethod(plain)), ConfigError, "lock 'a'", "under @classmethod"),
    wrong(
        "over @property",
        decorated(property(plain)),
        ConfigError,
        "lock 'a' decorates functions. Put it under @property",
    ),
    wrong("a partial generator", decorated(functools.partial(generator)), ConfigError, "lock 'a'", "a generator"),
    wrong("async def, by threads", decorated(coroutine), ConfigError, "lock 'a'", "use interlock.aio", only="threads"),
    wrong("def, by asyncio", decorated(plain), ConfigError, "lock 'a'", "use interlock (for threads)", only="asyncio"),
    wrong(
        "a hash tag for a field",
        lambda locks: locks.lock("a:{x}")(job(locks)),
        ConfigError,
        "lock 'a:{x}'",
        "has an argument 'x'",
        "synchronized()",
    ),
    wrong("a field that nobody has", synchronized("a:{y}"), ConfigError, "synchronized('a:{y}')", "'y'", "It has x"),
    wrong("a field without a name", synchronized("a:{}"), ConfigError, "synchronized('a:{}')", "write {user_id}"),
    wrong("a field with a number", synchronized("a:{0}"), ConfigError, "synchronized('a:{0}')", "write {user_id}"),
    wrong(
        "half a field",
        synchronized("a:{x"),
        ConfigError,
        "synchronized('a:{x')",
        "is no valid format",
        "write {{ or }}",
    ),
    wrong("a number for a template", synchronized(7), ConfigError, "the name must be a str or a function", "not 7"),
    wrong("no template", synchronized(), TypeError, "Interlock.synchronized() missing", "'name'"),
    wrong(
        "an unknown busy",
        synchronized("a", busy="no"),
        ConfigError,
        "synchronized('a')",
        "'wait'",
        "lambda skipped: 'no'",
    ),
    wrong(
        "an exception for busy", synchronized("a", busy=ValueError), ConfigError, "synchronized('a')", 'busy="raise"'
    ),
    wrong("skip with a timeout", synchronized("a", busy="skip", timeout=3), ConfigError, "leave out timeout"),
    wrong("a misspelt option of a decorator", synchronized("a", ttk=3), TypeError, "Interlock.synchronized()", "'ttk'"),
    # The `with` of the other mode, and of what has none
    *(
        wrong(
            f"the wrong with of {kind}",
            entered(make),
            TypeError,
            f"{kind.removeprefix('an ').removeprefix('a ')} ",
            f"is for {mode}",
            f"`from interlock{module} import Interlock`",
            only=mode,
        )
        for mode, module in (("threads", ".aio"), ("asyncio", ""))
        for kind, make in (
            ("a lock", lambda locks: locks.lock("a")),
            ("a semaphore", lambda locks: locks.semaphore("a", 1)),
            ("an election", lambda locks: locks.election("a")),
            ("a multi", lambda locks: locks.multi(locks.lock("a"))),
            ("a rwlock", lambda locks: locks.rwlock("a").read()),
        )
    ),
    wrong("the wrong with of an Interlock", entered(lambda locks: locks), TypeError, "import Interlock`", NOWHERE),
    wrong("the with of a latch", entered_rightly(lambda locks: locks.latch("a", 1)), TypeError, "latch 'a'", "wait()"),
    wrong("the with of a barrier", entered_rightly(lambda locks: locks.barrier("a", 1)), TypeError, "barrier 'a'"),
    wrong("the with of a once", entered_rightly(once(at_most=1)), TypeError, "once 'a'", "run(work)"),
    wrong("the wrong with of a once", entered(once(at_most=1)), TypeError, "once 'a'", "run(work)"),
    wrong("the with of an rwlock", entered_rightly(lambda locks: locks.rwlock("a")), TypeError, "rwlock 'a'", "side"),
    wrong("the wrong with of an rwlock", entered(lambda locks: locks.rwlock("a")), TypeError, "rwlock 'a'", "side"),
    # An Interlock as a lock
    *(
        wrong(
            f"an Interlock's {word}",
            lambda locks, word=word: getattr(locks, word),
            AttributeError,
            f"'Interlock' object has no attribute '{word}'",
            "An Interlock is no lock",
            "`with locks.lock(name) as lease:`",
        )
        for word in ("fence", "token", "state", "lost", "ended", "ensure", "remaining", "extend")
    ),
    wrong(
        "a misspelt method",
        lambda locks: locks.semaphor("a", 1),
        AttributeError,
        "'semaphor'. Did you mean 'semaphore'?",
    ),
    # What belongs to this process
    wrong("a pickled lock", lambda locks: pickle.dumps(locks.lock("a")), TypeError, "Lock 'a'", "send its name"),
    wrong("a pickled rwlock", lambda locks: pickle.dumps(locks.rwlock("a")), TypeError, "RWLock 'a'", "send its name"),
    wrong("a pickled Interlock", pickle.dumps, TypeError, NOWHERE, "make it in each process, of the same URL"),
]


@pytest.mark.parametrize("case", cases(USES), ids=title)
def test_a_wrong_use_is_named(case, record_property):
    use, mode = case
    error = None
    try:
        use.use(MAKERS[mode](NOWHERE))
    except Exception as raised:
        error = raised
    record_property("message", use.check(error))


@pytest.mark.parametrize(
    ("url", "says"), [(None, "or set INTERLOCK_URL"), ("garbage", "Did you mean 'redis://garbage'?")], ids=str
)
@pytest.mark.parametrize("mode", MAKERS)
def test_an_environment_that_names_no_server_is_refused(monkeypatch, mode, url, says):
    monkeypatch.delenv("INTERLOCK_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("INTERLOCK_URL", url)
    with pytest.raises(ConfigError, match=says):
        MAKERS[mode]()


@pytest.mark.parametrize("mode", MAKERS)
def test_a_traceback_suggests_no_private_name(mode):
    locks = MAKERS[mode](NOWHERE)
    for thing, word in ((locks, "fence"), (locks, "nonce"), (locks.lock("a"), "encoded"), (locks.lock("a"), "option")):
        try:
            getattr(thing, word)
        except AttributeError as error:
            shown = "".join(traceback.format_exception(error))
            assert f"has no attribute {word!r}" in shown
            assert "'_" not in shown.rpartition("AttributeError")[2]


@pytest.mark.parametrize("mode", MAKERS)
def test_a_copy_is_the_same(mode):
    locks = MAKERS[mode](NOWHERE)
    for thing in (locks, locks.lock("a"), locks.rwlock("a"), locks.latch("a", 1)):
        assert copy.copy(thing) is copy.deepcopy(thing) is thing


TODAY = dt.datetime.now().astimezone()


class Today(dt.datetime):
    """A clock at which it is not midnight between the making of a key and the look at it."""

    @classmethod
    def now(cls, tz=None):
        return TODAY if tz is None else TODAY.astimezone(tz)


async def call(function):
    """Call a decorated function of a closed Interlock, of either mode."""
    with contextlib.suppress(ConfigError):
        result = await asyncio.to_thread(function)
        if inspect.isawaitable(result):
            await result


class Tomorrow(Today):
    """The same, a day later."""

    @classmethod
    def now(cls, tz=None):
        return Today.now(tz) + dt.timedelta(days=1)


def warnings_of_frozen_texts(caplog) -> list[str]:
    return [said for record in caplog.records if "the decorator of" in (said := record.getMessage())]


@pytest.mark.parametrize(
    "text",
    [
        str(TODAY.date()), TODAY.isoformat(), f"day {TODAY:%Y%m%d}", f"{TODAY:%d.%m.%Y}", f"{TODAY:%Y-%m}",
        f"{TODAY:%G-W%V}", str(int(TODAY.timestamp())), str(TODAY.timestamp()),
    ],
    ids=["date", "moment", "compact", "German", "month", "week", "seconds", "fraction"],
)  # fmt: skip
@pytest.mark.parametrize("mode", MAKERS)
async def test_a_key_of_the_moment_of_the_decorator_is_warned_about_in_a_program_that_stays(
    mode, text, caplog, monkeypatch
):
    monkeypatch.setattr(misuse_warnings, "datetime", Today)
    clock = types.SimpleNamespace(time=time.time)
    monkeypatch.setattr(misuse_warnings, "time", clock)
    locks = MAKERS[mode](NOWHERE)
    functions = [
        make(job(locks)) for make in (locks.once("a", key=text, at_most=60), locks.once(f"a:{text}", at_most=60))
    ]
    await (asyncio.to_thread(locks.close) if is_for_threads(locks) else locks.close())
    for function in functions:  # a program that runs once and ends
        await call(function)
    assert not warnings_of_frozen_texts(caplog)
    clock.time = lambda: time.time() + 3700
    for function in functions:
        caplog.clear()
        for _ in range(2):
            await call(function)
        (said,) = warnings_of_frozen_texts(caplog)
        assert "once 'a" in said
        assert text in said
        assert f"{job(locks).__name__}()" in said
        assert "key=lambda: str(date.today())" in said


@pytest.mark.parametrize("mode", MAKERS)
async def test_a_key_of_today_is_warned_about_tomorrow(mode, caplog, monkeypatch):
    monkeypatch.setattr(misuse_warnings, "datetime", Today)
    locks = MAKERS[mode](NOWHERE)
    function = locks.once("a", key=str(TODAY.date()), at_most=60)(job(locks))
    await (asyncio.to_thread(locks.close) if is_for_threads(locks) else locks.close())
    await call(function)
    assert not warnings_of_frozen_texts(caplog)
    monkeypatch.setattr(misuse_warnings, "datetime", Tomorrow)
    await call(function)
    assert len(warnings_of_frozen_texts(caplog)) == 1


@pytest.mark.parametrize(
    "text",
    ["v42", "1", "2024-02-29", "20240229", "1.2026.3", "1a2b3c4d5e6f", "1700000000", "2024-11", "2026", "backfill"],
)
@pytest.mark.parametrize("mode", MAKERS)
def test_a_key_that_is_meant_to_stay_is_not(mode, text, caplog):
    locks = MAKERS[mode](NOWHERE)
    with caplog.at_level(logging.WARNING, "interlock"):
        locks.once("a", key=text, at_most=60)(job(locks))
        locks.once("a", key=lambda: str(TODAY.date()), at_most=60)(job(locks))
        locks.once("a", key="{x}", at_most=60)(job(locks))
        locks.once("a", key=str(TODAY.date()), at_most=60)  # to run at once, or to look at: not decorated
    assert not caplog.records


def methods():
    """Each public method of each public class, in both modes."""
    for mode, public in (("threads", interlock), ("asyncio", interlock.aio)):
        for name in public.__all__:
            cls = getattr(public, name)
            if (
                name != "Options"
                and inspect.isclass(cls)
                and cls.__module__ == f"interlock.{'aio' if mode == 'asyncio' else mode}"
            ):
                for each, member in inspect.getmembers(cls, inspect.isroutine):
                    if each[0] != "_" or (each == "__call__" and name != "RWLock"):
                        yield pytest.param(mode, cls, each, member, id=f"{mode}-{name}.{each}")


@pytest.mark.parametrize(("mode", "cls", "name", "member"), list(methods()))
def test_a_type_error_names_the_class_and_the_method_that_users_know(mode, cls, name, member):
    made = MAKERS[mode](NOWHERE) if cls is MAKERS[mode] else cls.__new__(cls)
    required = {"synchronized": ("a",), "rlock": ("a",), "rwlock": ("a",), "semaphore": ("a", 1), "election": ("a",)}
    function = member if inspect.ismethod(member) else functools.partial(member, made)  # quorum() is a classmethod
    with pytest.raises(TypeError) as caught:
        result = function(*(required.get(name, ()) if cls is MAKERS[mode] else ()), nonsense=1)
        next(result)  # a generator begins at its first step
    assert str(caught.value).startswith(f"{cls.__name__}.{name}() "), caught.value


def words_of_others():
    """The arguments of redis-py's Lock and of its methods, in both modes, and those of python-redis-lock."""
    for lock in (redis.lock.Lock, redis.asyncio.lock.Lock):
        for function in (lock.__init__, lock.acquire, lock.extend, redis.Redis.lock):
            yield from inspect.signature(function).parameters
    yield from ("redis_client", "expire", "id", "auto_renewal", "strict", "signal_expire", "blocking")


@pytest.mark.parametrize("word", sorted({*words_of_others()} - {"self", "name", "timeout"}))
@pytest.mark.parametrize("mode", MAKERS)
def test_each_word_of_another_librarys_lock_has_an_answer(mode, word):
    with pytest.raises(TypeError) as caught:
        MAKERS[mode](NOWHERE).lock("a", **{word: 1})
    asked, _, advice = str(caught.value).partition(". ")
    assert asked.endswith(f"'{word}'")
    assert advice
