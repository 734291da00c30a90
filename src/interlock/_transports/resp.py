"""What both ports say on a wire, and how they read what comes back: written once, without any I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import hiredis

from interlock._protocol.types import Argument, Script, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_hiredis: Any = hiredis
# It must get nothing but str and bytes: to turn a number into text it calls back into Python, where a signal handler
# may run and raise, and hiredis 3.5 does not look whether it did: Ctrl-C ended the process with a segmentation fault.
pack: Callable[[tuple[str | bytes, ...]], bytes] = _hiredis.pack_command
ReplyError: Final = hiredis.ReplyError
Push: Final = hiredis.PushNotification
WAITING: Final = object()  # what a reader gives while a reply is not complete
PING: Final = pack(("PING",))
REPLICATION: Final = pack(("INFO", "replication"))
ASKING: Final = pack(("ASKING",))


def reader() -> Any:
    """A parser of replies. Errors come as values, bytes stay bytes."""
    return hiredis.Reader(notEnoughData=WAITING)


def evalsha(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], stamp: str) -> bytes:
    """A script call, for a server that knows the script."""
    return pack(("EVALSHA", script.sha, str(len(keys)), *keys, *args, stamp))


def eval_text(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], stamp: str) -> bytes:
    """The same for a server that does not (after a restart, a failover, an eviction): it learns it."""
    return pack(("EVAL", script.source, str(len(keys)), *keys, *args, stamp))


def is_noscript(reply: Any) -> bool:
    """Whether the server did not know the script. Then nothing was run."""
    return type(reply) is ReplyError and str(reply).startswith("NOSCRIPT")


def raise_if_error(reply: Any) -> Any:
    """The reply, or a ServerError raised."""
    if type(reply) is ReplyError:
        raise ServerError(str(reply))
    return reply


def is_readonly(reply: Any) -> bool:
    """Whether the server is a replica by now, or was left by its replicas. A new connection may lead to the primary."""
    return type(reply) is ReplyError and ("READONLY" in str(reply) or "NOREPLICAS" in str(reply))
