"""Searches for a proof that the current server has every lease that an earlier server granted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._protocol.info import parse_info
from interlock._protocol.log import log
from interlock._protocol.timing import DRIFT, HANDOVER_TTL, PROOF_TIMEOUT, now
from interlock._quarantine.identity import IDENTITY_COMMANDS, IDENTITY_LENGTH, NO_REPLID

if TYPE_CHECKING:
    from interlock._connect.address import Address
    from interlock._quarantine.stamp import IdentityStamp

PROOF_STEP_TIMEOUT: Final = PROOF_TIMEOUT / 3  # seconds that one of the three steps of a search may take
CLOCK_READINGS: Final = 8  # readings of a server's clock; the reading that took the shortest time counts
# Seconds: half of the margin by which the shortest lease ends sooner for its holder than for the server.
CLOCK_TOLERANCE: Final = 0.0005


def least_lossless_ttl(address: Address, evidence: str, stamp: IdentityStamp) -> float | None:
    """The ttl (seconds) from which on no lease was lost between the server `evidence` and the server of the stamp.

    math.inf: leases of any ttl may have been lost. None: not known yet. A planned failover loses no lease if the
    demoted primary now follows the new primary's history of writes, and the clocks of both agree (see `least_ttl`). A
    restart proves nothing: which writes were on the disk when the process ended depends on the settings of that time
    (CONFIG SET appendfsync, no-appendfsync-on-rewrite), and the new process reports only its own settings. Blocks, for
    `PROOF_STEP_TIMEOUT` at most in each step. Called only in a quarantine.
    """
    new = read_server(address, PROOF_STEP_TIMEOUT)
    if new is None or new.info.get("run_id", "")[:IDENTITY_LENGTH] != stamp.identity[:IDENTITY_LENGTH]:
        return None  # no answer; or another server by now than the server of the stamp
    process, _, history = evidence.partition(":")
    second_replid = new.info.get("master_replid2", NO_REPLID)
    if second_replid == NO_REPLID or second_replid[:IDENTITY_LENGTH] != history:
        return math.inf
    for key, value in new.info.items():
        if key.startswith("slave") and "ip=" in value:
            replica = dict(part.split("=", 1) for part in value.split(",") if "=" in part)
            old = read_server(address.at(replica["ip"], int(replica["port"])), PROOF_STEP_TIMEOUT)
            if old is not None and old.info.get("run_id", "")[:IDENTITY_LENGTH] == process:
                follows = old.info.get("role") == "slave" and old.info.get("master_replid2") == second_replid
                return least_ttl(new, old, address.display_url, stamp.quarantine_seconds) if follows else None
    return None


class Reading(NamedTuple):
    """The INFO and the clock of a server, read over one connection."""

    info: dict[str, str]
    clock: float
    """The server's clock (seconds), read between `before` and `after` by the client's clock."""
    before: float
    after: float


def read_server(address: Address, timeout: float) -> Reading | None:
    """Read the INFO and the clock of a server; None if that fails. Blocks."""
    times: list[tuple[float, float]] = []
    try:
        server, replication, *clocks = ask_server(
            address, timeout, *IDENTITY_COMMANDS[:2], *CLOCK_READINGS * IDENTITY_COMMANDS[2:], times=times
        )
        readings = zip(times[2:], clocks, strict=True)
        (before, after), (seconds, micros) = min(readings, key=lambda reading: reading[0][1] - reading[0][0])
        return Reading(parse_info(server) | parse_info(replication), int(seconds) + int(micros) / 1e6, before, after)
    except Exception:  # noqa: BLE001 (then there is no proof)
        return None


def least_ttl(new: Reading, old: Reading, display_url: str, quarantine_seconds: float | None) -> float:
    """The ttl (seconds) from which on a lease that the old primary granted does not end too soon at the new primary.

    A lease is copied with the time at which it ends. If the clock of the new primary is ahead, the new primary ends
    leases too soon, while their holders still rely on them. But a holder stops DRIFT * ttl before that time (see
    `margin`): half of that allows for clocks that differ, the other half for clocks that run at different speeds.
    """
    ahead = new.clock - old.clock + old.after - new.before  # seconds, at most
    if ahead <= CLOCK_TOLERANCE:
        return 0.0
    ttl = 2 * ahead / DRIFT
    if quarantine_seconds is not None and ttl > quarantine_seconds:
        ttl = math.inf
    if ttl > HANDOVER_TTL:
        log.warning(
            "interlock: %s took over without loss, but its clock may be %.3g s ahead of the clock of the old primary, "
            "so leases that the old primary granted end too soon: %s in quarantine. NTP on both machines avoids that",
            display_url,
            ahead,
            "every name that it has not granted since then is"
            if ttl == math.inf
            else f"names that the old primary granted with a ttl below {ttl:.3g} s are",
        )
    return ttl


def ask_server(
    address: Address, timeout: float, *commands: tuple[str, ...], times: list[tuple[float, float]] | None = None
) -> list[Any]:
    """The replies of a server (a primary or a replica) to these commands, over a connection of redis-py. Blocks.

    `times` gets the client's clock before and after each command. A refused command has its ResponseError as reply; any
    other error of redis-py is raised.
    """
    from redis.exceptions import ResponseError  # noqa: PLC0415 (rarely needed)

    connection = address.connection(timeout)
    replies: list[Any] = []
    try:
        connection.connect()
        for command in commands:
            before = now()
            connection.send_command(*command)
            try:
                reply: Any = connection.read_response()
            except ResponseError as error:
                reply = error
            if times is not None:
                times.append((before, now()))
            if hasattr(reply, "items"):  # RESP3
                reply = [part for pair in reply.items() for part in pair]
            replies.append(reply)
    finally:
        connection.disconnect()
    return replies
