"""What an error says to somebody who knows another library: which option or method of interlock does what they want.

What may be meant, and is no error, gets a warning: see `misuse_warnings`.

The decorators `advising` and `making` stand on the public methods, `made_by_interlock` on constructors: they add the
way out to an error of the call. Nearly all else here runs only if a call has failed already.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

from interlock._client.places import line_of
from interlock._protocol.greenlets import library_of_greenlets
from interlock._protocol.names import has_address
from interlock.errors import ConfigError, NotHeld

from .misuse_warnings import warn_of_missing_f

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from interlock._client.places import Place

F = TypeVar("F", bound="Callable[..., Any]")
MAX_SHOWN: Final = 100  # characters of a name, in an error that is about something else
_TRY: Final = "To try without waiting: try_acquire(), or acquire(0)"
_TTL: Final = "The ttl of a lease is ttl=, in seconds; a living holder's lease is renewed"
_NO_WAIT: Final = "It does not wait. Use acquire(timeout=...)"
_WAIT: Final = "How long to wait is timeout=, in seconds"
_WAIT_OF_REDIS_PY: Final = f"{_WAIT}. How long the lock lasts, which is timeout= in redis-py, is ttl= here"
_WOKEN: Final = "A waiter does not poll: the server wakes it. How long to wait is timeout=, in seconds"
_TOKEN: Final = "Each lease has a token of its own: lease.token"  # noqa: S105 (no password)
_SERVER: Final = 'This belongs to the server: put it into the URL, as in Interlock("redis://user:password@host:6379/0")'
_INTERLOCK: Final = "This is an option of Interlock(...), the same for all of its locks"

_EXTEND: Final = "extend(ttl) makes the lease last at least ttl seconds from now"
_WAITS: Final = ("waitTime", "wait_time", "wait_timeout", "acquire_timeout", "max_wait", "time_out", "blocking_timeout")
_TTLS: Final = ("expire", "ex", "lock_timeout", "leaseTime", "lease_time", "auto_release_time", "duration")

# Our own options
OF_INTERLOCK: Final = (
    "prefix",
    "max_ttl",
    "quarantine",
    "try_for",
    "retry_for",
    "label",
    "max_connections",
    "registry",
)
OF_EACH_LOCK: Final = (  # also of an Interlock: confirm
    "ttl", "timeout", "renew", "max_hold", "fair", "confirm", "max_waiters", "on_lost", "acks", "fsync",
)  # fmt: skip
_OWN_OPTIONS: Final = (
    *OF_INTERLOCK, *OF_EACH_LOCK, "owner", "limit", "permits", "count", "parties", "at_most", "at_least", "key", "keep",
    "busy", "reason", "force", "stop", "keys",
)  # fmt: skip
# Options of redis-py, python-redis-lock, Redisson, pottery, redlock-py, threading and others.
_OPTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("blocking", "block", "wait", "non_blocking"), _TRY),
    **dict.fromkeys(_WAITS, _WAIT),
    "blocking_timeout": _WAIT_OF_REDIS_PY,
    "lock_class": "Give interlock.compat.redis_py.Lock to redis-py's client.lock(). Here its timeout= is ttl=",
    "raise_on_release_error": "Catch LeaseLost, which the end of a `with` raises if its lease was lost",
    "strict": "Leave it out: Interlock(client) takes any client of redis-py or valkey-py",
    "signal_expire": "Leave it out: the server wakes the next waiter, and keeps no list of signals",
    "version": 'Put it into the name, as in lock("1:stock:42")',
    **dict.fromkeys(
        ("retry_count", "retry_times", "retry_delay", "retry_interval", "retries", "sleep", "delay"), _WOKEN
    ),
    **dict.fromkeys(("poll_interval", "check_interval", "interval"), _WOKEN),
    **dict.fromkeys(_TTLS, _TTL),
    **dict.fromkeys(("px", "ttl_ms", "expire_ms", "timeout_ms"), "All durations are in seconds: ttl=, timeout="),
    **dict.fromkeys(("auto_renewal", "auto_renew", "keepalive", "heartbeat"), "renew=False turns the renewal off"),
    **dict.fromkeys(("id", "token", "value", "identifier"), _TOKEN),
    "thread_local": "Leave it out: any thread that has the lease may release it",
    "reentrant": "rlock(name) makes a reentrant lock",
    "owner": "rlock(name, owner=...) has an owner",
    "limit": "semaphore(name, limit) has a limit",
    "permits": "Say how many of a semaphore's permits: acquire(permits=2)",
    "key": "once(name, key=..., at_most=...) has keys; a lock has a name",
    **dict.fromkeys(("host", "port", "db", "username", "password", "ssl", "path", "decode_responses"), _SERVER),
    **dict.fromkeys(("socket_timeout", "socket_connect_timeout", "client_name"), _SERVER),
    **dict.fromkeys(
        ("url", "client", "redis", "redis_client", "connection"),
        "The URL or client is the first argument: Interlock(url)",
    ),
    **dict.fromkeys(("additional_time", "replace_ttl"), _EXTEND),
    "namespace": 'Interlock(prefix="app:") sets what stands before each name',
    **dict.fromkeys(OF_INTERLOCK, _INTERLOCK),
}
# What a constructor of an Interlock, and acquire(), say of an option of each lock
_OF_LOCKS: Final = "This is an option of each lock: locks.lock(name, ttl=10, timeout=5)"
_INTERLOCK_OPTIONS: Final[Mapping[str, str]] = dict.fromkeys(OF_EACH_LOCK, _OF_LOCKS)
# What one method alone says of an option, by the beginning of Python's text.
_EACH_LOCK: Final = "Give this option to each lock: locks.multi(locks.lock(name, ttl=10), ...)"
_EACH_WAIT: Final = "How long to wait is said by each call: wait(timeout=...)"
_OF_METHOD: Final[Mapping[str, Mapping[str, str]]] = {
    "Interlock.multi()": dict.fromkeys((*OF_EACH_LOCK, *_TTLS), _EACH_LOCK),
    "Interlock.once()": {
        **dict.fromkeys(("ttl", *_TTLS, "max_hold"), "How long one run may last is at_most=, in seconds"),
        **dict.fromkeys(("timeout", *_WAITS), "once() does not wait: it runs the work, or skips it"),
    },
    "Interlock.latch()": dict.fromkeys(("timeout", *_WAITS), _EACH_WAIT),
    "Interlock.semaphore()": dict.fromkeys(
        ("permits", "value", "count"),
        "The number of a semaphore's permits is limit; how many one call takes: acquire(permits=2)",
    ),
    "Interlock.barrier()": {
        "action": "A barrier runs no action: call it after wait()",
        **dict.fromkeys(("timeout", *_WAITS), _EACH_WAIT),
    },
    "Lease.extend()": dict.fromkeys(_TTLS, _EXTEND),
    "Latch.revoke()": {"force": "A latch has no holder to wait for: leave force= out"},
}
_ADDRESS_ADVICE: Final = (
    "this name has the address of an object, which is another one in each process. Name an attribute of the object, as "
    "in f'user:{user.id}'"
)
_SIDE: Final = (
    "Give the options to rwlock(name, timeout=...), and the timeout of one call to .acquire(timeout) of that side"
)
_UNEXPECTED: Final = re.compile(r"unexpected keyword argument '(\w+)'")
_MISSING: Final = re.compile(r"missing .*: '(\w+)'$")
_REQUIRED: Final[Mapping[str, str]] = {
    "name": 'Give a name, such as "stock:42"',
    "limit": "Say how many permits there are: semaphore(name, 3)",
    "count": "Say from which number it counts down: latch(name, 3)",
    "parties": "Say how many parties meet: barrier(name, 3)",
    "at_most": "Say how many seconds the work may take: once(name, at_most=600)",
    "reason": "Say why, for its holder: revoke(reason)",
    "servers": "Give a list: Interlock.quorum([url, url, url])",
}
_TOO_MANY: Final = re.compile(r"takes (from \d+ to )?\d+ positional arguments? but")


def advising(method: F) -> F:
    """A method whose TypeError for arguments that do not fit says the way out."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except TypeError as error:
            if _is_of_this_call(error):
                raise advised(error) from None
            raise

    return cast("F", call)


def check_threads_run() -> None:
    """Raise ConfigError if this is a process of uWSGI in which no thread runs between two requests.

    There uWSGI keeps Python's own lock, the GIL. The module `uwsgi` is what uWSGI itself puts there.
    """
    if getattr(sys.modules.get("uwsgi"), "has_threads", True) or library_of_greenlets() is not None:
        return
    raise ConfigError(
        "uWSGI runs no threads here: between two requests nothing would renew a lease or wake a waiter. Start uWSGI "
        "with --enable-threads (in a file: enable-threads = true), or with --threads"
    )


def patched_too_late(library: str, first_use: Place | None) -> ConfigError:
    """The error for an Interlock whose threads began before this library replaced `threading`."""
    patch = "gevent.monkey.patch_all()" if library == "gevent" else "eventlet.monkey_patch()"
    return ConfigError(
        f"{library} has replaced `threading` after this Interlock was first used, at {line_of(first_use)}: its threads "
        "are threads of the system, and a greenlet that waits for one of these stops all others. Call "
        f"{patch} before that line, best as the first line of the program; or use no lock before it. A child of a fork "
        "begins anew"
    )


def check_not_shutting_down() -> None:
    """Raise ConfigError if Python is past its exit handlers, and imports nothing any more: a first use imports."""
    if sys.meta_path is None:  # pyright: ignore[reportUnnecessaryComparison]  # whatever its type says
        raise ConfigError(
            "Python is shutting down, and interlock begins nothing any more, as from this __del__. What needs a lock "
            "has to run before: in the program, in a `with`, or in a function for atexit"
        )


def making(method: F) -> F:
    """A method of the Interlock that makes what has a name: its errors say that name, and the way out."""

    @functools.wraps(method)
    def make(*args: Any, **kwargs: Any) -> Any:
        name = args[1] if len(args) > 1 else kwargs.get("name")
        try:
            if isinstance(name, str) and has_address(name):
                raise ConfigError(_ADDRESS_ADVICE)
            check_not_shutting_down()
            made = method(*args, **kwargs)
        except TypeError as error:
            if _is_of_this_call(error):
                raise advised(error) from None
            raise
        except ConfigError as error:
            raise named(error, f"{method.__name__}({name!r})", name) from error.__cause__
        if isinstance(name, str) and "{" in name and not made._name_may_be_format:
            warn_of_missing_f(made._primitive, name)
        return made

    return cast("F", make)


def made_by_interlock(init: F) -> F:
    """A constructor that only an Interlock calls: its TypeError says which method of the Interlock does."""

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            if _is_of_this_call(error):
                unfit = str(error).partition("()")[2]
                raise TypeError(f"{type(self).__name__}.__init__(){unfit}. {self._init_advice}") from None
            raise

    return cast("F", call)


def advised(error: TypeError) -> TypeError:
    """The error of Python for arguments that do not fit, with the way out."""
    text = str(error)
    advice = _advice(text)
    return TypeError(f"{text}. {advice}") if advice else error


def _advice(text: str) -> str:
    if text.startswith(("RWLock.read()", "RWLock.write()")):
        return _SIDE
    if unexpected := _UNEXPECTED.search(text):
        return _advice_on_option(unexpected[1], text)
    if missing := _MISSING.search(text):
        return _REQUIRED.get(missing[1], "")
    return _advice_on_positions(text) if _TOO_MANY.search(text) else ""


def _advice_on_option(option: str, text: str) -> str:
    if "try_acquire()" in text and option == "timeout":
        return _NO_WAIT
    is_whole = text.startswith(("Interlock.__init__()", "Interlock.quorum()"))
    options = {**_OPTIONS, **_INTERLOCK_OPTIONS} if is_whole or "acquire()" in text else _OPTIONS
    for method, advice in _OF_METHOD.items():
        if text.startswith(method) and option in advice:
            return advice[option]
    likely = difflib.get_close_matches(option, _OWN_OPTIONS, 1, cutoff=0.65)
    likely = [each for each in likely if each != option]  # the same word is an option of another method
    return options.get(option, f"Did you mean {likely[0]}=?" if likely else "")


def _advice_on_positions(text: str) -> str:
    if "quorum()" in text:
        return "Give the servers as one list: Interlock.quorum([url, url, url])"
    if "__init__()" in text:
        return 'Give one URL or client, and options by their names: Interlock("redis://host:6379/0", prefix="app:")'
    if "acquire()" in text:
        return _NO_WAIT if "try_acquire()" in text else "Give only the time to wait by position: acquire(5)"
    several = "; for several locks at once use multi()" if re.match(r"Interlock\.r?lock\(\)", text) else ""
    return f"Give options by their names, as in ttl=10, timeout=5{several}"


def refuse_bare(numbers: tuple[object, ...], subject: object, method: str) -> None:
    """Refuse a number that could be the permits or the seconds. Raises TypeError."""
    if numbers:
        given = ", ".join(map(repr, numbers))
        raise TypeError(
            f"{subject}: {method}({given}) does not say what the number is. Permits are {method}(permits=3), and the "
            "seconds to wait acquire(timeout=3)"
        )


def _is_of_this_call(error: TypeError) -> bool:
    """Whether the arguments of the call itself did not fit, in the function that catches this error."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def named(error: ConfigError, subject: str, name: object) -> ConfigError:
    """This error, with the name of the lock: as an attribute, and in the text unless it is there already.

    `subject` is what the text says of it, as "lock 'a'".
    """
    if error.name is None and isinstance(name, str):
        error.name = name
        if repr(name)[1:] not in str(error) and len(name) <= MAX_SHOWN:
            error.args = (f"{subject}: {error}",)
    return error


# Methods of the locks of other libraries, and of the lease instead of the lock.
_OF_THE_LEASE: Final = "It is a method of the lease, which acquire() returns and `with` gives: `with lock as lease:`"
LOCK_HINTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("release", "extend", "execute", "ensure", "remaining"), _OF_THE_LEASE),
    **dict.fromkeys(("fence", "token", "lost", "ended", "state"), _OF_THE_LEASE.replace("a method", "an attribute")),
    **dict.fromkeys(("local", "id"), _TOKEN),
    **dict.fromkeys(("unlock", "__exit_"), "Release the lease: lease.release(), or a `with`"),
    **dict.fromkeys(("locked", "is_locked", "owned", "is_locked_by_me"), "See inspect().held; of a lease: lease.state"),
    **dict.fromkeys(("get_owner_id", "owner", "holder"), "See inspect().holder"),
    **dict.fromkeys(("reacquire", "renew", "refresh"), "A living holder's lease is renewed; else lease.extend(ttl)"),
    **dict.fromkeys(
        ("reset", "reset_all", "force_unlock", "force_release"), "To take it from its holder: revoke(reason)"
    ),
    **dict.fromkeys(("lock", "obtain", "try_lock", "tryLock"), "acquire() waits, try_acquire() does not"),
    **dict.fromkeys(("ttl", "timeout"), "Give it to the method that makes the lock: locks.lock(name, ttl=10)"),
}
ONCE_HINTS: Final[Mapping[str, str]] = dict.fromkeys(
    ("acquire", "try_acquire", "release"), "It runs a function: run(work), or as a decorator"
)
RWLOCK_HINTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("acquire", "try_acquire", "release", "__enter__"), "Say which side: .read().acquire(), .write().acquire()"
    ),
    "read_lock": "It is .read()",
    "write_lock": "It is .write()",
}
BREAKABLE_HINTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("acquire", "try_acquire", "release"), "Nobody holds it. Call wait()"),
    **dict.fromkeys(("abort", "break_", "cancel"), "To break it for all that wait: revoke(reason)"),
    **dict.fromkeys(("n_waiting", "waiting", "parties", "broken", "left"), "See inspect()"),
}
LEASE_HINTS: Final[Mapping[str, str]] = {
    "acquire": "A lease is acquired already. Acquire the lock: lock.acquire()",
    **dict.fromkeys(("local", "id"), "It is lease.token"),
    **dict.fromkeys(("unlock", "close", "free"), "Give it back: release(), or a `with`"),
    **dict.fromkeys(("locked", "owned", "is_locked", "is_lost", "held", "valid"), "See lease.state, or lease.ensure()"),
    **dict.fromkeys(("renew", "reacquire", "refresh"), "interlock renews it. To make it longer: extend(ttl)"),
    **dict.fromkeys(("fencing_token", "fence_token", "version"), "It is lease.fence"),
    **dict.fromkeys(("ttl", "expires", "expire"), "See lease.remaining()"),
}
MULTI_LEASE_HINTS: Final[Mapping[str, str]] = {
    **LEASE_HINTS,
    **dict.fromkeys(
        ("execute", "token", "assurance", "lease"), "Each of its locks has a lease of its own: lease[name]"
    ),
}
_NO_LEASE: Final = "An Interlock is no lock, and holds nothing. Hold a lock of it: `with locks.lock(name) as lease:`"
INTERLOCK_HINTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("fence", "token", "state", "lost", "ended", "ensure", "remaining", "extend"), _NO_LEASE),
    **dict.fromkeys(
        ("Lock", "mutex", "acquire", "get_lock", "create_lock"),
        "Make a lock, and acquire that one: `with locks.lock(name):`",
    ),
    **dict.fromkeys(("release", "unlock"), "Release the lease that acquire() returned: lease.release()"),
    **dict.fromkeys(("Semaphore", "Event", "Condition"), "See semaphore(), latch() and barrier()"),
    **dict.fromkeys(
        ("get", "set", "delete", "execute", "eval", "ping", "keys"), "It is no client. Use one of redis-py"
    ),
    "from_url": "Interlock(url) takes a URL",
}


def no_attribute(thing: object, name: str, hints: Mapping[str, str]) -> NoReturn:
    """Raise the AttributeError of Python, with the way out if there is a hint, else with a similar public name."""
    text = f"{type(thing).__name__!r} object has no attribute {name!r}"
    if name in hints:
        text = f"{text}. {hints[name]}"
    elif not name.startswith("_"):
        public = [each for each in dir(type(thing)) if not each.startswith("_")]
        text += "".join(f". Did you mean {each!r}?" for each in difflib.get_close_matches(name, public, 1))
    # Without the object: a traceback would suggest a private name of it, such as '_once' for 'fence'.
    raise AttributeError(text, name=name, obj=None)


def not_held(name: str, caller: str, *, for_asyncio: bool) -> NotHeld:
    """The error of assert_held() in a `caller`, a thread or a task, that does not hold this."""
    article, a_with = ("an", "async with") if for_asyncio else ("a", "with")
    error = NotHeld(
        f"assert_held({name!r}): this {caller} is not inside {article} `{a_with}` of {name!r}, or a function that it "
        f"decorates, whose lease is alive. Call this function inside `{a_with} locks.lock({name!r}):`; in another "
        f"{caller} give it the lease"
    )
    error.name = name
    return error


# The `with` of the other mode


class OnlyWith:
    """What threads hold by `with`. Refuses an `async with`, which would block the event loop."""

    __slots__ = ()
    if not TYPE_CHECKING:  # a type checker refuses these without them

        def __aenter__(self) -> NoReturn:
            """Refuse an `async with`."""
            raise TypeError(
                f"{_subject(self)} is for threads, and has a `with`. For an `async with` make it with "
                "`from interlock.aio import Interlock`"
            )

        def __aexit__(self, *_: object) -> None: ...


class OnlyAsyncWith:
    """What tasks hold by `async with`. Refuses a `with`."""

    __slots__ = ()
    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            """Refuse a `with`."""
            raise TypeError(
                f"{_subject(self)} is for asyncio, and has an `async with`. For a `with` in threads make it with "
                "`from interlock import Interlock`"
            )

        def __exit__(self, *_: object) -> None: ...


class NoWith:
    """What has no `with` at all: a latch, a barrier, a once. `_instead_of_with` is the way out."""

    __slots__ = ()
    _instead_of_with: str
    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            """Refuse a `with`."""
            raise TypeError(f"{_subject(self)} has no `with`: {self._instead_of_with}")

        def __exit__(self, *_: object) -> None: ...

        def __aenter__(self) -> NoReturn:
            """Refuse an `async with`."""
            raise TypeError(f"{_subject(self)} has no `async with`: {self._instead_of_with}")

        def __aexit__(self, *_: object) -> None: ...


def _subject(thing: Any) -> str:
    """How an error names a lockable, a lease or an Interlock."""
    primitive = getattr(thing, "_primitive", None)
    return str(primitive) if primitive is not None else repr(thing)
