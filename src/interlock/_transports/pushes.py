"""Subscriptions: the commands that subscribe to a channel, and what the client does with each push."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.log import log
from interlock._protocol.server import Disconnected, PushHandler, is_transient
from interlock._transports.resp import ReplyError, pack

if TYPE_CHECKING:
    from interlock._transports.connections import Command

STEADY_AFTER: Final = 1.0  # seconds that a subscription must last for the next one to start nearly at once
MAX_PAUSE: Final = 1.0  # seconds before a broken subscription starts again
RECONNECT_SPREAD: Final = 0.05  # seconds over which the clients of a server that failed connect again


def next_pause(pause: float, lasted: float) -> float:
    """The pause before a broken subscription starts again, by the pause before and by the seconds that it lasted."""
    return 0.0 if lasted > STEADY_AFTER else min(MAX_PAUSE, pause * 2 or 0.02)


def spread(pause: float) -> float:
    """A random pause of about this length: otherwise all clients of a server that failed would connect at once."""
    return pause * random.uniform(0.5, 1.0) + random.uniform(0.0, RECONNECT_SPREAD)


def is_sharded(channel: str) -> bool:
    """Whether the channel belongs to a slot, and so to one node of a cluster."""
    return "{" in channel


def subscribe_commands(channel: str) -> tuple[Command, Command]:
    """Return SUBSCRIBE, and a PUBLISH of an empty message: its reply shows early whether this user may publish."""
    s = "S" if is_sharded(channel) else ""
    return pack((f"{s}SUBSCRIBE", channel)), pack((f"{s}PUBLISH", channel, ""))


def check_subscribe_reply(reply: Any, channel: str, wanted: dict[str, None]) -> None:
    """Log a refused SUBSCRIBE or PUBLISH as a warning. Raises Disconnected if a new connection may succeed."""
    if type(reply) is ReplyError:
        if is_sharded(channel) and (is_transient(str(reply)) or str(reply).startswith("MOVED")):
            wanted.pop(channel, None)  # a later `ensure_subscribed` looks for the node of the slot
            return
        if is_transient(str(reply)):
            raise Disconnected(str(reply), sent=True)
        s = "s" if is_sharded(channel) else ""
        log.warning(
            "interlock: waiters are woken by polling only, since %s. Give this user the rights &interlock:* "
            "+%ssubscribe +%spublish",
            reply,
            s,
            s,
        )


def take_push(push: Any, handler: PushHandler, wanted: dict[str, None], subscribed_channels: set[str]) -> bool:
    """Give a message to the push handler, or note the start or end of a subscription in `subscribed_channels`.

    Returns whether the push is the reply to a command.
    """
    kind = push[0]
    if kind in (b"message", b"smessage"):
        handler.dispatch_push(push[2])
    elif kind == b"subscribe":
        subscribed_channels.add(push[1].decode())
        handler.subscribed()
        return True
    elif kind in (b"ssubscribe", b"sunsubscribe"):
        channel = push[1].decode()
        if kind == b"ssubscribe":
            subscribed_channels.add(channel)
        else:  # the cluster moved the slot to another node
            subscribed_channels.discard(channel)
            wanted.pop(channel, None)
        handler.subscribed(channel)
        return bool(kind == b"ssubscribe")
    return False
