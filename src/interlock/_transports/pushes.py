"""Subscriptions: what is said to hear a channel, and what is done with each push."""

from __future__ import annotations

from typing import Any

from interlock._protocol.log import log
from interlock._protocol.types import Disconnected, PushHandler, is_transient
from interlock._transports.resp import ReplyError, pack


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
