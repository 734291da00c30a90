"""One list of all wrong uses: those of the two trials and more that newcomers make; and the share that is clear.

A wrong use is clear if its error or warning names what it is about (the lock, the argument, the method, the URL), the
cause, and the way out. Each entry here says these three; each of the trials says its words, which its own test checks.
`UNCLEAR` names those whose text is Python's own, without a way out. `pytest -rP` on this module prints the share.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import inspect
import logging
import re
from typing import TYPE_CHECKING

import pytest
import test_trial_of_wrong_uses as trial
from test_trial_of_wrong_uses import (
    MAKERS,
    NOWHERE,
    decorated,
    is_for_threads,
    job,
    lock,
    made,
    once,
    quorum,
    synchronized,
)

from conformance import test_trial as trial_on_servers
from harness.trial import cases, title, wrong
from interlock import ConfigError, NotHeld
from interlock._api import misuse_warnings

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST = 0.95  # of all wrong uses must be clear


class Warned(Exception):
    """Stands for a warning in the log, whose text it has."""


def called(name: str, *args, **kwargs):
    """A call of this method of the Interlock."""
    return lambda locks: getattr(locks, name)(*args, **kwargs)


def then(make: Callable, name: str, *args, **kwargs):
    """A call of this method of something that the Interlock makes; of a coroutine, what it raises at once."""

    def use(locks):
        result = getattr(make(locks), name)(*args, **kwargs)
        if inspect.iscoroutine(result):
            asyncio.run(result)

    return use


def attribute(make: Callable, name: str):
    return lambda locks: getattr(make(locks), name)


def a_lock(locks):
    return locks.lock("a")


def a_semaphore(locks):
    return locks.semaphore("a", 3)


def a_latch(locks):
    return locks.latch("a", 3)


def a_barrier(locks):
    return locks.barrier("a", 3)


def an_election(locks):
    return locks.election("a")


def an_rwlock(locks):
    return locks.rwlock("a")


def warned(use: Callable):
    """A wrong use that is logged: the text of the warning as an error."""

    def with_warning(locks):
        texts: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: texts.append(record.getMessage())
        log = logging.getLogger("interlock")
        misuse_warnings._warned_lines.clear()
        log.addHandler(handler)
        try:
            use(locks)
        finally:
            log.removeHandler(handler)
        if texts:
            raise Warned(texts[0])

    return with_warning


def forgets_the_f(locks):
    user = "ann"
    locks.lock("cart:{user}")
    return user


def gives_none(locks):
    function = locks.synchronized("cart:{x}")(job(locks))
    if is_for_threads(locks):
        locks.close()
    else:
        asyncio.run(locks.close())
    with contextlib.suppress(ConfigError):
        result = function(None)
        if inspect.iscoroutine(result):
            asyncio.run(result)


NEW = [
    # Where to connect
    wrong(
        "a URL in quotes",
        made("'redis://localhost'"),
        ConfigError,
        "'redis://localhost'",
        "no server's URL",
        "Remove the quotes",
    ),
    wrong("a variable of the shell", made("$REDIS_URL"), ConfigError, "$REDIS_URL", "is no server's URL", "redis://"),
    wrong("tcp://", made("tcp://h:6379"), ConfigError, "'tcp://h:6379'", "is no server's URL", "redis://"),
    wrong("a word for the db", made("redis://h?db=main"), ConfigError, "the database a number", "Write redis://"),
    wrong("ttl in the URL", made("redis://h?ttl=5"), ConfigError, "'ttl' is no option", "Remove it"),
    wrong("True for a target", made(True), ConfigError, "bool is neither a URL nor a client", 'Interlock("redis://'),
    wrong(
        "host and port in a tuple",
        made(("localhost", 6379)),
        ConfigError,
        "tuple is neither",
        "Give a URL: 'redis://localhost:6379'",
    ),
    wrong("a function for a target", made(lambda: None), ConfigError, "function is neither", "redis://"),
    wrong("bytes for a prefix", made(NOWHERE, prefix=b"app:"), ConfigError, "a prefix", "must be a str", "'app:'"),
    wrong(
        "max_ttl as a timedelta",
        made(NOWHERE, max_ttl=dt.timedelta(1)),
        ConfigError,
        "max_ttl",
        "a number of seconds",
        ".total_seconds()",
    ),
    wrong("try_for as a text", made(NOWHERE, try_for="1s"), ConfigError, "try_for", "must be a number of seconds"),
    wrong(
        "confirm as a text", made(NOWHERE, confirm="no"), ConfigError, "confirm", "must be True or False", "not 'no'"
    ),
    wrong("registry=None", made(NOWHERE, registry=None), ConfigError, "registry", "must be True or False", "not None"),
    wrong(
        "max_connections as a text",
        made(NOWHERE, max_connections="9"),
        ConfigError,
        "max_connections",
        "a whole number from 1 to",
    ),
    wrong(
        "socket_timeout=",
        made(NOWHERE, socket_timeout=5),
        TypeError,
        "'socket_timeout'",
        "belongs to the server",
        "put it into the URL",
    ),
    wrong(
        "a quorum of hosts",
        quorum(["h1", "h2", "h3"]),
        ConfigError,
        "'h1'",
        "is no server's URL",
        "Did you mean 'redis://h1'?",
    ),
    wrong(
        "a quorum of a dict",
        quorum({"a": NOWHERE}),
        ConfigError,
        "a list of servers",
        "Interlock.quorum([url, url, url])",
    ),
    # Makers
    wrong("a ttl by position", called("lock", "a", 30), TypeError, "Interlock.lock()", "positional", "ttl=10"),
    wrong(
        "a limit as a text",
        called("semaphore", "a", "3"),
        ConfigError,
        "semaphore 'a'",
        "its limit must be a whole number",
        "'3'",
    ),
    wrong("a limit of 0", called("semaphore", "a", 0), ConfigError, "semaphore 'a'", "its limit", "from 1 to"),
    wrong("half a permit", called("semaphore", "a", 2.5), ConfigError, "semaphore 'a'", "a whole number", "2.5"),
    wrong(
        "name and limit swapped",
        called("semaphore", 3, "a"),
        ConfigError,
        "a name must be a str",
        "not int",
        "'stock:42'",
    ),
    wrong(
        "a semaphore without a limit",
        called("semaphore", "a"),
        TypeError,
        "Interlock.semaphore() missing",
        "'limit'",
        "semaphore(name, 3)",
    ),
    wrong(
        "value= of a semaphore",
        called("semaphore", "a", value=3),
        TypeError,
        "Interlock.semaphore() missing",
        "'limit'",
        "semaphore(name, 3)",
    ),
    wrong("a negative count", called("latch", "a", -1), ConfigError, "latch 'a'", "its count", "from 1 to"),
    wrong("half a party", called("barrier", "a", 1.5), ConfigError, "barrier 'a'", "a whole number", "1.5"),
    wrong(
        "a barrier without parties",
        called("barrier", "a"),
        TypeError,
        "Interlock.barrier() missing",
        "'parties'",
        "barrier(name, 3)",
    ),
    wrong(
        "confirm=False of an election",
        called("election", "a", confirm=False),
        ConfigError,
        "election('a')",
        "takes no confirm=False",
        "resign()",
    ),
    wrong(
        "at_most as a timedelta", once(at_most=dt.timedelta(1)), ConfigError, "once('a')", "at_most", ".total_seconds()"
    ),
    wrong(
        "a once without a name", called("once", at_most=60), TypeError, "Interlock.once() missing", "'name'", "stock:42"
    ),
    wrong("a number for a key", once(at_most=60, key=7), ConfigError, "once('a')", "key must be a str", "'2026-01-31'"),
    wrong("a ttl in milliseconds", lock(ttl=30_000), ConfigError, "lock('a')", "at most max_ttl (30 s)", "is renewed"),
    wrong("px=", lock(px=30_000), TypeError, "Interlock.lock()", "'px'", "in seconds: ttl="),
    wrong("a timeout in words", lock(timeout="never"), ConfigError, "lock('a')", "a number of seconds", "'never'"),
    wrong("renew as a text", lock(renew="yes"), ConfigError, "lock('a')", "renew must be True or False"),
    wrong("retries of a lock", lock(retries=3), TypeError, "'retries'", "does not poll", "timeout="),
    wrong("Redisson's leaseTime", lock(leaseTime=3), TypeError, "'leaseTime'", "ttl="),
    wrong(
        "max_waiters as a text", lock(max_waiters="3"), ConfigError, "lock('a')", "max_waiters must be a whole number"
    ),
    wrong(
        "the Interlock in a multi",
        lambda locks: locks.multi(locks),
        ConfigError,
        "multi() takes locks",
        "not <interlock",
    ),
    wrong(
        "an election in a multi",
        lambda locks: locks.multi(locks.election("b")),
        ConfigError,
        "multi() takes locks",
        "Election 'b'",
    ),
    wrong(
        "a once in a multi",
        lambda locks: locks.multi(locks.once("b", at_most=1)),
        ConfigError,
        "multi() takes locks",
        "Once 'b'",
    ),
    wrong(
        "busy in words of its own",
        synchronized("a", busy="ignore"),
        ConfigError,
        "synchronized('a')",
        "busy must be 'wait', 'raise', 'skip'",
        "lambda skipped: 'ignore'",
    ),
    wrong(
        "raise with a timeout",
        synchronized("a", busy="raise", timeout=3),
        ConfigError,
        "synchronized('a')",
        "does not wait",
        "leave out timeout",
    ),
    # The Interlock itself
    wrong(
        "acquiring an Interlock",
        called("acquire", "a"),
        AttributeError,
        "'acquire'",
        "Make a lock",
        "`with locks.lock(name):`",
    ),
    wrong("releasing by an Interlock", called("release", "a"), AttributeError, "'release'", "lease.release()"),
    wrong(
        "a fence of an Interlock",
        attribute(lambda locks: locks, "fence"),
        AttributeError,
        "'fence'",
        "holds nothing",
        "`with locks.lock(name) as lease:`",
    ),
    wrong("get_lock", called("get_lock", "a"), AttributeError, "'get_lock'", "Make a lock"),
    wrong(
        "assert_held without a name",
        called("assert_held"),
        TypeError,
        "Interlock.assert_held() missing",
        "'name'",
        "stock:42",
    ),
    wrong(
        "assert_held of a lock",
        lambda locks: locks.assert_held(locks.lock("a")),
        ConfigError,
        "a name must be a str",
        "'stock:42'",
        "not Lock",
    ),
    wrong(
        "assert_held outside",
        called("assert_held", "a"),
        NotHeld,
        "assert_held('a')",
        "is not inside",
        "locks.lock('a'):`",
        only="threads",
    ),
    wrong(
        "a number for a pattern",
        then(lambda locks: locks, "ls", 7),
        ConfigError,
        "ls()",
        "the pattern must be a str",
        "'stock:*'",
    ),
    # What it makes
    wrong(
        "releasing a lock",
        attribute(a_lock, "release"),
        AttributeError,
        "'release'",
        "a method of the lease",
        "`with lock as lease:`",
    ),
    wrong(
        "a lock's fence", attribute(a_lock, "fence"), AttributeError, "'fence'", "of the lease", "`with lock as lease:`"
    ),
    wrong("locked()", attribute(a_lock, "locked"), AttributeError, "'locked'", "inspect().held"),
    wrong("unlock()", attribute(a_lock, "unlock"), AttributeError, "'unlock'", "lease.release()"),
    wrong(
        "a semaphore's bare number",
        then(a_semaphore, "acquire", 3),
        TypeError,
        "semaphore 'a'",
        "does not say what the number is",
        "acquire(permits=3)",
    ),
    wrong(
        "a semaphore's bare number, tried",
        then(a_semaphore, "try_acquire", 3),
        TypeError,
        "semaphore 'a'",
        "does not say",
        "try_acquire(permits=3)",
    ),
    wrong(
        "more permits than the limit",
        then(a_semaphore, "acquire", permits=4),
        ConfigError,
        "semaphore 'a'",
        "from 1 to 3",
        "not 4",
    ),
    wrong(
        "releasing a semaphore", attribute(a_semaphore, "release"), AttributeError, "'release'", "a method of the lease"
    ),
    wrong("an rwlock's reader", attribute(an_rwlock, "reader"), AttributeError, "'reader'", "Did you mean 'read'?"),
    wrong("an rwlock's read_lock", attribute(an_rwlock, "read_lock"), AttributeError, "'read_lock'", "It is .read()"),
    wrong("acquiring a latch", attribute(a_latch, "acquire"), AttributeError, "'acquire'", "wait()"),
    wrong("countdown", attribute(a_latch, "countdown"), AttributeError, "'countdown'", "Did you mean 'count"),
    wrong("acquiring a barrier", attribute(a_barrier, "acquire"), AttributeError, "'acquire'", "wait()"),
    wrong("a barrier's abort", attribute(a_barrier, "abort"), AttributeError, "'abort'", "revoke(reason)"),
    wrong("is_leader", attribute(an_election, "is_leader"), AttributeError, "'is_leader'", "leader"),
    wrong("lead()", attribute(an_election, "lead"), AttributeError, "'lead'", "leader"),
    wrong(
        "a text for work",
        then(lambda locks: locks.once("a", at_most=1), "run", "work"),
        ConfigError,
        "once 'a'",
        "run() takes a function",
        "'work'",
    ),
    wrong(
        "an election's work as a text",
        then(an_election, "run", "work"),
        ConfigError,
        "election 'a'",
        "run() takes a function",
        "'work'",
    ),
    wrong(
        "a lock over a static class",
        decorated(type("Job", (), {})),
        ConfigError,
        "lock 'a'",
        "is a class",
        "Decorate its methods",
    ),
    # What is only logged
    wrong(
        "a name without the f",
        warned(forgets_the_f),
        Warned,
        "lock 'cart:{user}'",
        "all calls share one name",
        'Write f"cart:{user}"',
    ),
    wrong(
        "None in a name",
        warned(gives_none),
        Warned,
        "'x' is None",
        "they share one lock",
        "refuse None before the call",
    ),
]
# Python's own text, which has no way out, and for which interlock could only give one at the price of each right call:
# by name, and why.
UNCLEAR = {
    "acquire(blocking=False)-asyncio": "a wrapper would make acquire() no coroutine function",
    "an rlock's acquire(blocking=False)-asyncio": "the same",
    "acquire(True, 5)-asyncio": "the same",
    "revoke without a reason-asyncio": "the same",
    "execute()-asyncio": "the same",
    "calling a lock-threads": "the call decorates: Python says only which argument is missing",
    "calling a lock-asyncio": "the same",
    "a forgotten await-asyncio": "what acquire() returns is a coroutine of Python",
    "an await of what threads hold-threads": "Python awaits nothing that has no __await__",
    "no event loop-asyncio": "Python says that no loop runs",
}


@pytest.mark.parametrize("case", cases(NEW), ids=title)
def test_a_wrong_use_of_a_newcomer_is_clear(case):
    use, mode = case
    error = None
    try:
        use.use(MAKERS[mode](NOWHERE))
    except Exception as raised:
        error = raised
    use.check(error)


def test_the_share_that_is_clear_is_large_enough():
    listed = [title(case) for uses in (trial.USES, trial_on_servers.USES, NEW) for case in cases(uses)]
    listed += [f"{use.name}-{mode}" for use in trial_on_servers.SERVERS for mode in MAKERS]
    assert {*UNCLEAR} <= {*listed}, {*UNCLEAR} - {*listed}
    kinds = len({re.sub(r"-\w+$", "", each) for each in listed})
    share = 1 - len(UNCLEAR) / len(listed)
    print(f"{len(listed)} wrong uses of {kinds} kinds, {len(NEW)} of them new: {share:.1%} are clear")
    assert len(NEW) >= 60
    assert share >= LEAST
