"""The commands that both transports send, and the parser of replies: written once, without I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import hiredis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._protocol.types import Argument, Script
    from interlock._transports.connections import Command

_hiredis: Any = hiredis
# Pass only str and bytes to `pack`. To convert a number into text, hiredis calls Python code, in which a signal handler
# may run and raise; hiredis 3.5 does not check for that error, so Ctrl-C ended the process with a segmentation fault.
pack: Callable[[tuple[str | bytes, ...]], bytes] = _hiredis.pack_command
ReplyError: Final = hiredis.ReplyError
Push: Final = hiredis.PushNotification
WAITING: Final = object()  # what a reader returns while the reply is incomplete
PING: Final = ("PING",)
REPLICATION: Final = ("INFO", "replication")
ASKING: Final = ("ASKING",)


def reader() -> Any:
    """Return a parser of replies. The parser returns error replies as values, and leaves bytes undecoded."""
    return hiredis.Reader(notEnoughData=WAITING)


def evalsha(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], stamp: str) -> Command:
    """The command of a script call, for a server that knows the script."""
    return ("EVALSHA", script.sha, str(len(keys)), *keys, *args, stamp)


def eval_text(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], stamp: str) -> Command:
    """The command of a script call with the text of the script, for a server that lost the script.

    A server loses its scripts by a restart, a failover or an eviction. After this command the server has the script.
    """
    return ("EVAL", script.source, str(len(keys)), *keys, *args, stamp)


def is_noscript(reply: object) -> bool:
    """Whether the server did not know the script, and so ran nothing."""
    return type(reply) is ReplyError and str(reply).startswith("NOSCRIPT")


def is_logged_out(reply: object) -> bool:
    """Whether the server has ended the login of this connection. It ran nothing; a new connection logs in again."""
    return type(reply) is ReplyError and str(reply).startswith("NOAUTH")


def is_readonly(reply: object) -> bool:
    """Whether the server is a replica by now, or has lost its replicas. A new connection may lead to the primary."""
    return type(reply) is ReplyError and ("READONLY" in str(reply) or "NOREPLICAS" in str(reply))
