"""What both ports say on a wire, and how they read what comes back: written once, without any I/O."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import hiredis
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import TimeoutError as Silence

from interlock._core import Disconnected, ServerError, log
from interlock.connect import too_old
from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._core import Argument, Script

_hiredis: Any = hiredis
pack: Callable[[tuple[Any, ...]], bytes] = _hiredis.pack_command
ReplyError: Final = hiredis.ReplyError
Push: Final = hiredis.PushNotification
WAITING: Final = object()  # what a reader gives while a reply is not complete

HELLO: Final = pack(("HELLO",))
MEMORY: Final = pack(("INFO", "memory"))
PING: Final = pack(("PING",))


class Sink(Protocol):
    """Whom a port tells what it hears."""

    def pushed(self, payload: bytes) -> None: ...
    def subscribed(self) -> None: ...
    def unsubscribed(self) -> None: ...


def now() -> float:
    """Seconds on the clock that nobody sets and that runs on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def reader() -> Any:
    """A parser of replies. Errors come as values, bytes stay bytes."""
    return hiredis.Reader(notEnoughData=WAITING)


def by_sha(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument]) -> bytes:
    """A script call, for a server that knows the script."""
    return pack(("EVALSHA", script.sha, len(keys), *keys, *args))


def by_text(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument]) -> bytes:
    """The same for a server that does not (after a restart, a failover, an eviction): it learns it."""
    return pack(("EVAL", script.source, len(keys), *keys, *args))


def unknown(reply: Any) -> bool:
    """Whether the server did not know the script. Then nothing was run."""
    return type(reply) is ReplyError and str(reply).startswith("NOSCRIPT")


def checked(reply: Any) -> Any:
    """The reply, or a ServerError raised."""
    if type(reply) is ReplyError:
        raise ServerError(str(reply))
    return reply


def greeting(channel: str) -> tuple[bytes, bytes]:
    """SUBSCRIBE, and an empty message to ourselves: whether this user may publish is best known before it matters."""
    return pack(("SUBSCRIBE", channel)), pack(("PUBLISH", channel, ""))


def heed(reply: Any) -> None:
    """Tell the user of a refused SUBSCRIBE or PUBLISH."""
    if type(reply) is ReplyError:
        log.warning("interlock: waiters are woken by polling only, since %s. See docs/acl.md", reply)


def hear(push: Any, sink: Sink) -> None:
    """A message of the subscription."""
    if push[0] == b"message":
        sink.pushed(push[2])
    elif push[0] == b"subscribe":
        sink.subscribed()


def refused(error: RedisError | OSError, shown: str) -> Exception:
    """Why there is no connection."""
    text = str(error)
    if isinstance(error, AuthenticationError) or text.startswith(("WRONGPASS", "NOAUTH", "invalid username")):
        return ConfigError(f"{shown}: the user name or password is wrong or missing [{text}]")
    if isinstance(error, ResponseError) and "unknown command" in text.lower() and "HELLO" in text.upper():
        return too_old(shown, "before 6.0")
    if isinstance(error, ResponseError) and not text.startswith(("LOADING", "MASTERDOWN", "BUSY")):
        return ConfigError(f"{shown}: the server refuses the connection [{text}]")
    return Disconnected(text or type(error).__name__, sent=False, timed_out=isinstance(error, TimeoutError | Silence))
