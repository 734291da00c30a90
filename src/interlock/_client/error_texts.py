"""The errors for users who do not get a lease: each error names the lock, the cause and the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final, TypeVar

from interlock._protocol.names import printable
from interlock._protocol.resource import Resource
from interlock._protocol.server import TRANSIENT, Disconnected, ServerError
from interlock._protocol.timing import SHORT_SILENCE
from interlock.errors import AcquireTimeout, BrokenBarrier, ConfigError, LeaseLost, LockError, Unavailable
from interlock.primitives.codes import BROKEN, CROWDED, LIMIT_MISMATCH, NO_EXPIRY, REVOKED, WRONG_KIND
from interlock.primitives.kinds import KINDS, kind_named
from interlock.primitives.lock import RECORD_VERSION
from interlock.primitives.messages import ABSTENTION, Busy, Queued, Refused, lost_identity

ENDED_BEFORE_RELEASE: Final = "it had ended in the server before it was released"
HEARTBEATS_UNANSWERED: Final = "the heartbeats of this waiter were not answered"
DRIVER_UNANSWERED: Final = "the request of another caller in this process was not answered"
OLD_PRIMARY_MAY_GRANT: Final = "it has just become the primary, and the one before may still grant beside it"
WAIT_ADVICE: Final = "Wait longer, or see .inspect()"
_ON_THIS_MACHINE: Final = re.compile(r"(redis|valkey)://(localhost|127\.|\[::1\])")
_EMBEDDED_ADVICE: Final = (
    'For this machine alone, Interlock("embedded://") or `interlock server start` starts one, with interlock[embedded]'
)
E = TypeVar("E", bound=LockError)
# Makes the error for a refusal, from the resource, the timeout in seconds, and the reply.
BusyError = Callable[[Resource, float, "Queued | Busy"], LockError]


def unavailable_error(
    resource: Resource, unanswered_since: float, url: str, now: float, cause: Exception
) -> Unavailable:
    """The error for a server that has been away, or not ready, for too long. `url` is its display_url."""
    waited_for = max(0.0, now - unanswered_since)
    waited, reason = seconds_text(waited_for), str(cause).rstrip(". ")
    if isinstance(cause, ServerError):
        text = f"{resource}: {url} can't serve it for {waited} ({reason}). Try again, or wait longer"
    elif isinstance(cause, Disconnected) and cause.timed_out and waited_for < SHORT_SILENCE:
        text = f"{resource}: its time was over after {waited}, before {url} could answer ({reason}). Give it more time"
    else:
        text = f"{resource}: no answer from {url} for {waited} ({reason}). {silence_question(url, reason)}"
    error = about(resource, Unavailable(text))
    error.waited, error._unanswered = waited_for, True
    return error


def seconds_text(seconds: float) -> str:
    """A duration as a reader takes it in: no more than two digits of a fraction."""
    if seconds < 0.001:
        return "less than 1 ms"
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def visible_cause(error: BaseException) -> BaseException | None:
    """What a traceback shows as the cause, in place of this internal error of interlock.

    That is the error which the user's own code raised, if any. INTERLOCK_DEBUG=1 in the environment shows this error.
    """
    return error if os.environ.get("INTERLOCK_DEBUG") == "1" else error.__cause__


def silence_question(url: str, reason: str) -> str:
    """What a user should look at if no answer came."""
    if "Protocol error" in reason:
        return "Something else than Redis or Valkey listens there: are host and port right?"
    tls = ", and does that port speak TLS" if "rediss" in url else ""
    question = f"Is the server up and reachable from here{tls}?"
    if _ON_THIS_MACHINE.match(url) and ("refused" in reason or "Connect call failed" in reason):
        return f"{question} {_EMBEDDED_ADVICE}"
    return question


def about(subject: object, error: E) -> E:
    """This error, with the name of what it is about."""
    error.name = subject.name if isinstance(subject, Resource) else None
    return error


def name_lock(error: BaseException, resource: Resource) -> None:
    """Give an error of a connection, which knows no lock, the name of the lock that it is about."""
    if isinstance(error, LockError) and error.name is None:
        error.name = resource.name


def busy_error(resource: Resource, timeout: float, reply: Queued | Busy) -> AcquireTimeout:
    """The error for a caller that did not get the resource: it is held, others wait first, or it is in quarantine."""
    error = about(resource, AcquireTimeout(_busy_text(resource, timeout, reply)))
    error.waited = timeout
    error.quarantined = lost_identity(reply) is not None
    if reply.holder and reply.pttl_ms >= 0:
        error.remaining = reply.pttl_ms / 1000
    if not error.quarantined:
        error.holder = reply.holder.decode(errors="replace").removeprefix("!") or None
    return error


def _busy_text(resource: Resource, timeout: float, reply: Queued | Busy) -> str:
    holder, left = printable(reply.holder.decode(errors="replace")), f"{max(0, reply.pttl_ms) / 1000:.3g} s"
    tried = f"was not acquired within {round(timeout, 3):g} s" if timeout else "is not free"
    if not holder:
        return f"{resource} {tried}: other waiters are before this one in the queue"
    if (identity := lost_identity(reply)) == ABSTENTION:
        return (
            f"{resource} {tried}: most servers of its quorum grant nothing for {left} more, since they were started, "
            "emptied or given other data, and may have lost a lease that is alive. Wait; or, if the whole quorum is "
            "new, end it: `interlock quorum new` with its URLs. A smaller max_ttl makes this shorter"
        )
    if identity is not None:
        cause = "started with the keys of a snapshot or a log" if identity == "?" else "restarted or replaced"
        return (
            f"{resource} {tried}: it is in quarantine for {left} more, since its server was {cause}, and may have lost "
            "a lease of this name that is alive. Wait; or, if nothing is at work under this name, end the quarantine: "
            '.revoke("I know", force=True). A smaller max_ttl makes quarantines shorter'
        )
    revoked = "is revoked and " if holder.startswith("!") else ""
    holder = holder.removeprefix("!")
    return (
        f"{resource} {tried}: it is held by {holder}, whose lease {revoked}had {left} left when last asked. "
        f"{WAIT_ADVICE}"
    )


def reply_error(resource: Resource, refusal: Refused) -> LockError:
    """The error for a final refusal: asking again would change nothing."""
    if refusal.code == CROWDED:
        return _crowded_error(resource, int(refusal.detail))
    return about(resource, _reply_error(resource, refusal))


def _crowded_error(resource: Resource, waiting: int) -> AcquireTimeout:
    """The error for a caller that would have to wait behind as many others as its max_waiters."""
    error = AcquireTimeout(
        f"{resource} is not free, and {waiting} callers wait for it already, as many as max_waiters allows. Try again "
        "later, or raise max_waiters"
    )
    error.waiting = waiting
    return about(resource, error)


def _reply_error(resource: Resource, refusal: Refused) -> LockError:
    code, detail = refusal
    text = detail.decode(errors="replace") if isinstance(detail, bytes) else ""
    if code == NO_EXPIRY:
        return ConfigError(
            f"{resource} is held without an expiry, which interlock never does, by {text!r} in the key "
            f"{resource.keys[0]!r}. If nobody is at work there, DEL that key. interlock has changed nothing"
        )
    if code == WRONG_KIND:
        return _wrong_kind_error(resource, text)
    if code == LIMIT_MISMATCH:
        what, way = kind_named(resource.kind).mismatch
        return ConfigError(f"{resource} is in use with {what}={detail!r}. {way}")
    if code == BROKEN:
        return BrokenBarrier(f"{resource} is broken ({text}). {kind_named(resource.kind).broken_advice}")
    if code == REVOKED:
        return LeaseLost(f"{resource} was revoked ({text}) at the moment of its handover. Acquire it again")
    return AcquireTimeout(
        f"{resource}: interlock has given up this attempt, so the server grants it no more. Acquire it again"
    )


def is_of_another_kind(resource: Resource, record: bytes) -> bool:
    """Whether a record is that of another kind of synchronizer."""
    version, kind = [*record.decode(errors="replace").split(), "", ""][:2]
    return version == RECORD_VERSION and kind in KINDS and kind != resource.kind


def _wrong_kind_error(resource: Resource, record: str) -> ConfigError:
    """The error for a name whose record belongs to another kind of primitive, or to another version."""
    version, kind = [*record.split(), "", ""][:2]
    if not record:
        deleter = kind_named(resource.kind).phrase
        return ConfigError(
            f"{resource}: its key {resource.keys[0]!r} holds something else, which {deleter} would delete. Use another "
            "name or prefix"
        )
    if is_of_another_kind(resource, record.encode()):
        return ConfigError(
            f"{resource}: {resource.name!r} is in use as {KINDS[kind].phrase}, and one name can't be both. Use another "
            "name"
        )
    stored = f"{version} {kind}"
    return ConfigError(
        f"{resource}: the name is in use by another version ({stored!r}) of interlock. Use another name, or one version"
    )


# The rules of docs/acl.md, which installed packages do not contain.
LEAST_RIGHTS: Final = (
    "~lock:* ~{lock:* ~{interlock:processes}* ~{interlock:audit} &interlock:* +hello +ping +select +client|setname "
    "+info +subscribe +evalsha +eval +get +set +del +exists +pttl +pexpire +time +publish +zadd +zrem +zrange +zscore "
    "+zcard +zremrangebyscore +hset +hget +hdel +pubsub|numsub +zrangebyscore +hincrby +hmget +hgetall +hlen +xadd "
    "+xrevrange"
)
CLUSTER_RIGHTS: Final = "+cluster|slots +cluster|info +asking +config|get"
SHARDED_CHANNEL_RIGHTS: Final = "+ssubscribe +spublish +pubsub|shardnumsub"
# Where in the text of a script an error arose: at the end; before Redis 7 at the beginning.
_IN_SCRIPT: Final = re.compile(
    r",? script: (\w+, )?on @\w+:\d+\.?$|^ERR Error running script \(call to \w+\): (@user_script: ?\d+: )*"
)
_ACL_ADVICE: Final = (
    f"the server's ACL forbids it. Give this user the rights {LEAST_RIGHTS} (with your prefix in place of lock:); on a "
    f"cluster also {CLUSTER_RIGHTS}, and from version 7 on {SHARDED_CHANNEL_RIGHTS}"
)


_NO_COMMAND: Final = (
    "it lacks a command that interlock needs, or its configuration renames that command. Enable the command; of these "
    "only COMMAND may be missing, if lease.execute() gets keys="
)


# What servers answer that run no scripts: Valkey without its Lua module, Garnet without --lua, a service without EVAL.
_RUNS_NO_LUA: Final = (
    "Could not find scripting engine", "Lua scripting support disabled",
    "nknown command 'EVAL", "nknown command `EVAL",
)  # fmt: skip
_LUA_ADVICE: Final = (
    "the server runs no Lua scripts, and each decision of interlock is one. Give it its Lua engine (Valkey 9.1 and "
    "later: a module, which MODULE LIST must show; Garnet: --lua; a managed service: its setting for EVAL), or use "
    "another server"
)


_NO_SUCH_COMMAND: Final = "the server has no such command. Correct its name"
# What a user's own command may cause, in execute().
_EXECUTE_ADVICE: Final = (
    ("nknown command", _NO_SUCH_COMMAND),
    ("nknown Redis command", _NO_SUCH_COMMAND),
    ("rong number of arg", "the command takes another number of arguments"),
    (
        "not allowed from script",
        "execute() runs in a script, which can't use this command. Send it with a client of your own",
    ),
)


def execute_error(resource: Resource, url: str, command: object, text: str) -> LockError:
    """The error for an error reply to the user's own command, in execute()."""
    for word, advice in _EXECUTE_ADVICE:
        if word in text:
            shown = _IN_SCRIPT.sub("", text)
            return about(resource, ConfigError(f"{resource} at {url}: execute({command!r}): {advice} [{shown}]"))
    return server_error(resource, url, text)


def server_error(subject: object, url: str, text: str) -> LockError:
    """The error for an error reply of the server, with the way out. `url` is its display_url."""
    record, shown = text.removeprefix("WRONGTYPE ").encode(), _IN_SCRIPT.sub("", text)
    if isinstance(subject, Resource) and is_of_another_kind(subject, record):
        return reply_error(subject, Refused(WRONG_KIND, record))
    for word, error, advice in (
        ("WRONGTYPE", ConfigError, "one of its keys holds something else. Use another name or prefix"),
        ("READONLY", Unavailable, "that is a read-only replica. Connect to its primary"),
        ("NOPERM", ConfigError, _ACL_ADVICE),
        ("ACL failure in script", ConfigError, _ACL_ADVICE),
        ("user executing the script can't", ConfigError, _ACL_ADVICE),
        *((words, ConfigError, _LUA_ADVICE) for words in _RUNS_NO_LUA),
        ("non deterministic", ConfigError, "its lua-replicate-commands is off. Set it to yes (its default)"),
        ("NOAUTH", Unavailable, "the server has ended the login of that connection. Try again: the next one logs in"),
        ("WAITAOF", ConfigError, "fsync=True needs appendonly yes there, and Redis 7.2 or Valkey"),
        ("nknown command", ConfigError, _NO_COMMAND),
        ("nknown Redis command", ConfigError, _NO_COMMAND),
        ("OOM", Unavailable, "the server has no memory left. Raise maxmemory or remove data"),
        (
            "MISCONF",
            Unavailable,
            "the server can't write its snapshots to its disk, and so refuses writes. See its log, and free that disk",
        ),
        ("MOVED", ConfigError, "that is one node of a cluster. Use a URL redis+cluster://"),
        ("nvalid command specified", ConfigError, _NO_SUCH_COMMAND),
        ("nvalid number of arg", ConfigError, "the command takes another number of arguments"),
        ("rong number of arg", ConfigError, "the command has no keys, or lacks an argument. Say which keys: keys=[]"),
        ("no key arguments", ConfigError, "the command has no keys. Say so: keys=[]"),
        ("CROSSSLOT", ConfigError, "the keys are in different slots. Give them the same hash tag"),
        *((beginning, Unavailable, "the server is not ready. Try again") for beginning in TRANSIENT),
    ):
        if word in text:
            return about(subject, error(f"{subject} at {url}: {advice} [{shown}]"))
    return about(subject, LockError(f"{subject} at {url}: the server refused [{shown}]"))


def outer_error(resource: Resource, lost: LeaseLost) -> LeaseLost:
    """The error for a thread that waits no more, since the lease around its wait was revoked."""
    error = LeaseLost(
        f"{resource}: this thread has stopped waiting for it, since the lease around its wait is lost: {lost}"
    )
    error.token, error.name = lost.token, lost.name
    return error
