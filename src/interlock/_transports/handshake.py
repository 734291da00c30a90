"""The handshake: the first commands on a connection, and what their replies say about the server."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from interlock._connect.refusals import connection_error
from interlock._connect.server_check import check_server
from interlock._people import grant_log
from interlock._protocol.info import parse_info
from interlock._protocol.log import log
from interlock._protocol.server import Disconnected, is_transient
from interlock._quarantine.identity import (
    IDENTITY_COMMANDS,
    IDENTITY_LENGTH,
    PAST_COMMANDS,
    is_loading,
    parse_facts,
)
from interlock._transports.resp import ReplyError, pack

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from interlock._connect.address import Address
    from interlock._quarantine.server_history import ServerHistory
    from interlock._quarantine.stamp import IdentityStamp
    from interlock._transports.connections import Command


def handshake_commands(address: Address) -> list[Command]:
    """Return the first commands on a connection."""
    commands = [
        *address.setup_commands,
        ("HELLO",),
        ("INFO", "memory"),
        *IDENTITY_COMMANDS,
        *PAST_COMMANDS,
        *address.isolation_commands,
    ]
    return list(map(pack, commands))


def complete_handshake(
    replies: list[Any],
    address: Address,
    history: ServerHistory,
    epoch: int | None,
    mutex: AbstractContextManager[object],
    sent_at: float,
) -> IdentityStamp:
    """Compute the identity stamp of the server from its replies to the handshake commands.

    `epoch`: the configuration epoch under which the sentinels named the server; None if no sentinel named it. `mutex`:
    two connections may meet a new server at once, and must agree which server was there before. `sent_at`: just
    before the client sent the commands.

    Raises LockError if interlock can't use the server, and Disconnected if a later try may succeed.
    """
    grant_log.look()  # here and not with each acquire: a program sets the level before it first connects
    number = len(replies) - len(address.isolation_commands)
    replies, isolation_replies = replies[:number], replies[number:]
    *settings, hello, limits, server, replication, time = replies[: -len(PAST_COMMANDS)]
    past = replies[-len(PAST_COMMANDS) :]
    for command, reply in zip((*address.setup_commands, ("HELLO",)), (*settings, hello), strict=True):
        if type(reply) is ReplyError:
            if command[0] != "CLIENT" or is_transient(str(reply)):
                raise connection_error(ResponseError(str(reply)), address)
            _warn_of_name(address.display_url, str(reply))
    check_server(hello, limits, address)
    for reply in (server, replication, time, *past):
        if type(reply) is ReplyError and is_transient(str(reply)):  # without these replies there would be no quarantine
            raise Disconnected(str(reply), sent=False)
    # INFO works while the server loads, but does not say yet that the server began with keys. The stamp of this
    # connection would outlast the loading, and take the server for one that began empty.
    if is_loading(past[0]):
        raise Disconnected("the server is loading its keys from its disk", sent=False)
    facts = parse_facts(server, replication, time, *past)
    with mutex:
        stamp = history.identify(
            facts and facts._replace(sent_at=sent_at), address, address.isolation_grace(isolation_replies), epoch
        )
    history.log_warnings()
    return stamp


@lru_cache(maxsize=256)  # one warning for each server
def _warn_of_name(display_url: str, refusal: str) -> None:
    log.warning(
        "interlock: %s refuses the name of this client [%s], so its CLIENT LIST will not show it. Give this user the "
        "right +client|setname, or no client_name",
        display_url,
        refusal,
    )


def is_same_primary(reply: Any, stamp: IdentityStamp) -> bool:
    """Whether the server is still the same primary, by its reply to `REPLICATION`."""
    if not stamp.identity:
        return type(reply) is not bytes or parse_info(reply).get("role") == "master"
    info = parse_info(reply)
    return info.get("role") == "master" and stamp.identity.endswith(
        ":" + info.get("master_replid", "")[:IDENTITY_LENGTH]
    )
