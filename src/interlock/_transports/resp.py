"""The commands that both transports send, packed, and the parser of replies: written once, without I/O.

Theory. Two acquires of one lock differ in their token only, and so do two releases. So the rest of such a message is
packed once, for the `TEMPLATES` messages that were sent last.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import hiredis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._protocol.resource import Argument, Script
    from interlock._transports.connections import Command

_hiredis: Any = hiredis
# Pass only str and bytes to `pack`. To convert a number into text, hiredis calls Python code, in which a signal handler
# may run and raise; hiredis 3.5 does not check for that error, so Ctrl-C ended the process with a segmentation fault.
pack: Callable[[tuple[str | bytes, ...]], bytes] = _hiredis.pack_command
ReplyError: Final = hiredis.ReplyError
Push: Final = hiredis.PushNotification
WAITING: Final = object()  # what a reader returns while the reply is incomplete
PING: Final = pack(("PING",))
REPLICATION: Final = pack(("INFO", "replication"))
CLIENTS: Final = pack(("INFO", "clients"))
ASKING: Final = pack(("ASKING",))
TEMPLATES: Final = 1024  # messages without their tokens that are kept: about half a KB each
_FOR_ONE_TOKEN: Final = frozenset({"acquire", "release"})  # verbs whose first argument is a token; not those of a multi
_PLACEHOLDER: Final = "\0"


def reader() -> Any:
    """Return a parser of replies. The parser returns error replies as values, and leaves bytes undecoded."""
    return hiredis.Reader(notEnoughData=WAITING)


def evalsha(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], stamp: str) -> Command:
    """The command of a script call, for a server that knows the script."""
    words: Any = args
    if words[0] in _FOR_ONE_TOKEN and script.name != "multi":
        before, after = _template(script.sha, keys, words[0], words[2:], stamp)
        token = words[1] if isinstance(words[1], bytes) else words[1].encode()  # bytes: from a reply
        return b"%b$%d\r\n%b%b" % (before, len(token), token, after)
    return pack(("EVALSHA", script.sha, str(len(keys)), *keys, *args, stamp))


def unstamped(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument]) -> bytes:
    """The command of a script call up to the stamp: what all servers of a quorum get."""
    return evalsha(script, keys, args, "").removesuffix(b"$0\r\n\r\n")


def stamped(command: bytes, stamp: str) -> Command:
    """The whole command, for the server of this stamp."""
    word = stamp.encode()
    return b"%b$%d\r\n%b\r\n" % (command, len(word), word)


@lru_cache(TEMPLATES)
def _template(
    sha: str, keys: Sequence[str | bytes], verb: str, rest: Sequence[Argument], stamp: str
) -> tuple[bytes, bytes]:
    """What stands before and after the token in this message. `keys` and `rest` are tuples."""
    whole = pack(("EVALSHA", sha, str(len(keys)), *keys, verb, _PLACEHOLDER, *rest, stamp))
    before, _, after = whole.partition(b"$1\r\n\0")
    return before, after


def eval_text(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], stamp: str) -> Command:
    """The command of a script call with the text of the script, for a server that lost the script.

    A server loses its scripts by a restart, a failover or an eviction. After this command the server has the script.
    """
    return pack(("EVAL", script.source, str(len(keys)), *keys, *args, stamp))


def is_noscript(reply: object) -> bool:
    """Whether the server did not know the script, and so ran nothing."""
    return type(reply) is ReplyError and str(reply).startswith("NOSCRIPT")


def is_logged_out(reply: object) -> bool:
    """Whether the server has ended the login of this connection. It ran nothing; a new connection logs in again."""
    return type(reply) is ReplyError and str(reply).startswith("NOAUTH")


def is_readonly(reply: object) -> bool:
    """Whether the server is a replica by now, or has lost its replicas. A new connection may lead to the primary."""
    return type(reply) is ReplyError and ("READONLY" in str(reply) or "NOREPLICAS" in str(reply))
