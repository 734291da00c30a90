"""What both ports say on a wire, and how they read what comes back: written once, without any I/O."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Final, Protocol

import hiredis
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import TimeoutError as Silence

from interlock._core import Disconnected, ServerError, is_transient, log
from interlock.connect import check_server, too_old
from interlock.errors import ConfigError, LockError

from . import _memory
from ._memory import IDENTITY_COMMANDS, IDENTITY_LENGTH, PAST_COMMANDS, parse_facts, parse_info

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._core import Argument, Script
    from interlock.connect import Address

    from ._memory import IdentityStamp, ServerHistory

_hiredis: Any = hiredis
# It must get nothing but str and bytes: to turn a number into text it calls back into Python, where a signal handler
# may run and raise, and hiredis 3.5 does not look whether it did: Ctrl-C ended the process with a segmentation fault.
pack: Callable[[tuple[str | bytes, ...]], bytes] = _hiredis.pack_command
ReplyError: Final = hiredis.ReplyError
Push: Final = hiredis.PushNotification
WAITING: Final = object()  # what a reader gives while a reply is not complete

now: Final = _memory.now

PING: Final = pack(("PING",))
REPLICATION: Final = pack(("INFO", "replication"))
ASKING: Final = pack(("ASKING",))


class PushHandler(Protocol):
    """Whom a port tells what it hears."""

    channel: str

    def pushed(self, payload: bytes) -> None: ...
    def subscribed(self, channel: str | None = None) -> None: ...


def reader() -> Any:
    """A parser of replies. Errors come as values, bytes stay bytes."""
    return hiredis.Reader(notEnoughData=WAITING)


def evalsha(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], epoch: str) -> bytes:
    """A script call, for a server that knows the script."""
    return pack(("EVALSHA", script.sha, str(len(keys)), *keys, *args, epoch))


def eval_text(script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], epoch: str) -> bytes:
    """The same for a server that does not (after a restart, a failover, an eviction): it learns it."""
    return pack(("EVAL", script.source, str(len(keys)), *keys, *args, epoch))


def is_noscript(reply: Any) -> bool:
    """Whether the server did not know the script. Then nothing was run."""
    return type(reply) is ReplyError and str(reply).startswith("NOSCRIPT")


def raise_if_error(reply: Any) -> Any:
    """The reply, or a ServerError raised."""
    if type(reply) is ReplyError:
        raise ServerError(str(reply))
    return reply


def handshake_commands(address: Address) -> list[tuple[str, ...]]:
    """What is said first on a connection."""
    return [
        *address.setup_commands,
        ("HELLO",),
        ("INFO", "memory"),
        *IDENTITY_COMMANDS,
        *PAST_COMMANDS,
        *address.isolation_commands,
    ]


def complete_handshake(replies: list[Any], address: Address, memory: ServerHistory) -> IdentityStamp:
    """Who the server is, by the replies to the greeting. Raises LockError if it is not what it should be."""
    replies, more = (
        replies[: len(replies) - len(address.isolation_commands)],
        replies[len(replies) - len(address.isolation_commands) :],
    )
    *settings, hello, limits, server, replication, time = replies[: -len(PAST_COMMANDS)]
    past = replies[-len(PAST_COMMANDS) :]
    for reply in (*settings, hello):
        if type(reply) is ReplyError:
            raise connection_error(ResponseError(str(reply)), address)
    check_server(hello, limits, address)
    for reply in (server, replication, time, *past):
        if type(reply) is ReplyError and is_transient(str(reply)):  # not who it is: that would be no quarantine
            raise Disconnected(str(reply), sent=False)
    return memory.meet(parse_facts(server, replication, time, *past), address, address.isolation_grace(more))


def is_sharded(channel: str) -> bool:
    """Whether it belongs to a slot, and so to a node of a cluster."""
    return "{" in channel


def subscribe_commands(channel: str) -> tuple[bytes, bytes]:
    """SUBSCRIBE, and an empty message to ourselves: whether this user may publish is best known before it matters."""
    s = "S" if is_sharded(channel) else ""
    return pack((f"{s}SUBSCRIBE", channel)), pack((f"{s}PUBLISH", channel, ""))


def check_subscribe_reply(reply: Any, channel: str, wanted: dict[str, None]) -> None:
    """Tell the user of a refused SUBSCRIBE or PUBLISH. Raises Disconnected if it is worth to try again."""
    if type(reply) is ReplyError:
        if is_sharded(channel) and (is_transient(str(reply)) or str(reply).startswith("MOVED")):
            wanted.pop(channel, None)  # who wants it looks where its slot is
            return
        if is_transient(str(reply)):
            raise Disconnected(str(reply), sent=True)
        log.warning("interlock: waiters are woken by polling only, since %s. See docs/acl.md", reply)


def is_readonly(reply: Any) -> bool:
    """Whether the server is a replica by now, or was left by its replicas. A new connection may lead to the primary."""
    return type(reply) is ReplyError and ("READONLY" in str(reply) or "NOREPLICAS" in str(reply))


def is_same_primary(reply: Any, epoch: IdentityStamp) -> bool:
    """By the reply to `REPLICATION`: whether the server says that it is still the primary that it was."""
    if not epoch.identity:
        return type(reply) is not bytes or parse_info(reply).get("role") == "master"
    info = parse_info(reply)
    return info.get("role") == "master" and epoch.identity.endswith(
        ":" + info.get("master_replid", "")[:IDENTITY_LENGTH]
    )


def dispatch_push(push: Any, sink: PushHandler, wanted: dict[str, None], heard: set[str]) -> bool:
    """A push: a message, or which channel is heard from now on, or not any more. Whether it answers a command."""
    kind = push[0]
    if kind in (b"message", b"smessage"):
        sink.pushed(push[2])
    elif kind == b"subscribe":
        heard.add(push[1].decode())
        sink.subscribed()
        return True
    elif kind in (b"ssubscribe", b"sunsubscribe"):
        channel = push[1].decode()
        if kind == b"ssubscribe":
            heard.add(channel)
        else:  # its slot has gone to another node
            heard.discard(channel)
            wanted.pop(channel, None)
        sink.subscribed(channel)
        return bool(kind == b"ssubscribe")
    return False


def connection_error(error: Exception, address: Address) -> Exception:
    """Why there is no connection."""
    if isinstance(error, LockError | Disconnected):  # from who looked for the address
        return error
    text, shown = str(error), address.display_url
    if isinstance(error, AuthenticationError) or text.startswith(("WRONGPASS", "NOAUTH", "invalid username")):
        return ConfigError(f"{shown}: the user name or password is wrong or missing [{text}]")
    if isinstance(error, ResponseError) and "unknown command" in text.lower() and "HELLO" in text.upper():
        return too_old(shown, "before 6.0")
    if isinstance(error, ResponseError) and not is_transient(text):
        return ConfigError(f"{shown}: the server refuses the connection [{text}]")
    if address.kind == "tls" and (advice := _tls_advice(error)):
        return ConfigError(f"{shown}: {advice}")
    cause = text if isinstance(error, RedisError | OSError) and text else f"{type(error).__name__}: {text}"
    return Disconnected(cause, sent=False, timed_out=isinstance(error, TimeoutError | Silence))


# The line was cut, or the handshake was at work when something else went wrong: that passes by itself.
_TLS_TRANSIENT: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _tls_advice(error: BaseException | None) -> str | None:
    """What is wrong with the certificates: that does not mend itself."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the server's certificate is not trusted [{error.verify_message}]. Name the authority that signed it: "
                "?ssl_ca_certs=/path/ca.pem; the host must be one of the certificate's names"
            )
        if isinstance(error, FileNotFoundError | IsADirectoryError | PermissionError):
            return f"a file of ssl_ca_certs, ssl_certfile or ssl_keyfile can't be read [{error}]"
        if isinstance(error, ssl.SSLError) and not isinstance(error, _TLS_TRANSIENT):
            return f"no TLS connection [{error}]. Does that port speak TLS, and are the ssl_ files what they should be?"
        error = error.__cause__ or error.__context__
    return None
