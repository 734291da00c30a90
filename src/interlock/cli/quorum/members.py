"""The servers of a quorum, as an operator sees them: what each says of itself, and what it has under a prefix.

Theory. Whether a lease is alive that a server has forgotten, no server knows. So an operator states it, and these facts
are what may contradict: a lease that is alive there, a name that was granted there lately (its record lasts five
minutes), a process that is too young. A name that was only asked for while the server abstained has a record without a
fence, and a marker in place of a lease: programs that are waiting for a new quorum make these.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from redis.exceptions import NoPermissionError, RedisError

from interlock._connect.target import quorum_of
from interlock._doctor.facts import now_ms_of, stored_record, why_silent
from interlock._doctor.names_in_use import connected, names_in, replies, reply
from interlock._doctor.voters import Standing, State, judge, way_out
from interlock._protocol.info import parse_info
from interlock._quarantine.identity import NO_REPLID
from interlock._quarantine.voter import RECORD_TTL, voter_key, voter_stem
from interlock.primitives.codes import QUARANTINE
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._connect.address import Address

__all__ = ["Member", "look_at"]

SCAN_FOR: Final = 1.0  # seconds that the search for names may take at each server
SCRIPT: Final = load("state", "interlock.cli.quorum")
TTL_MS: Final = round(RECORD_TTL * 1000)
_BATCH: Final = 500  # names of one question
_NEVER_GRANTED: Final = re.compile(rb"1 [a-z]+ 0 ")  # how a record begins whose name has no fence yet


@dataclass
class Member:
    """One server of a quorum. If it does not answer, it has an error and nothing else."""

    CHANGED: ClassVar = (
        "has changed meanwhile: it was restarted, emptied or given other data, or a client has reached it"
    )

    address: Address
    prefix: str
    max_ttl: float
    """The longest of all programs, as the operator says it, in seconds."""
    error: str = ""
    advice: str = ""
    info: dict[str, str] = field(default_factory=dict[str, str])
    stored: str = ""
    """The voter record, as in `stored_record`."""
    now_ms: int = 0
    """Its clock just before it gave the record, ms."""
    names: int = 0
    """How many names with the prefix it knows."""
    granted: int = 0
    """How many of them were granted there lately."""
    leases: int = 0
    """How many of them are leased there now."""
    knows_all_names: bool = True
    """Whether the time was enough to look at all keys, and its user may look for them."""
    may_scan: bool = True

    @property
    def url(self) -> str:
        """Its address without the password."""
        return self.address.display_url

    @property
    def standing(self) -> Standing:
        """Whether it counts."""
        return judge(self.stored, self.info, self.now_ms, self.max_ttl)

    def is_as(self, seen: Member) -> bool:
        """Whether nothing was lost, and no client has begun an abstention, since somebody has seen it so."""
        return (self.stored, self.info.get("master_replid")) == (seen.stored, seen.info.get("master_replid"))

    @property
    def uptime(self) -> float:
        """Seconds since its process started, by its clock; a second too many at most."""
        return float(self.info.get("uptime_in_seconds", "0"))

    @property
    def was_replica(self) -> bool:
        """Whether its process has had the data of another server."""
        received = self.info.get("total_net_repl_input_bytes")  # from 7.0 on
        return self.info.get("master_replid2", NO_REPLID) != NO_REPLID if received is None else received != "0"

    @property
    def why_no_member(self) -> str:
        """Why it can't be a server of a quorum; "" if it can."""
        if not self.info:
            return "refuses INFO, and so can't judge itself. Give its user the right +info"
        for is_so, what in (
            (self.info.get("redis_mode") == "sentinel", "a sentinel"),
            (self.info.get("cluster_enabled") == "1", "a node of a cluster"),
            (self.info.get("role") == "slave", "a replica"),
        ):
            if is_so:
                return f"is {what}, but a quorum needs single servers that are independent of each other"
        is_unreadable = self.standing.state is State.UNREADABLE
        return f"{self.standing.sentence('')}. {way_out(self.prefix)}" if is_unreadable else ""

    def state_that_it_counts(self) -> str:
        """Write that this server has served for max_ttl. Returns why it was not written; "" if it was."""
        record = self.standing.record
        longest_ms = max(round(self.max_ttl * 1000), record.longest_ms if record else 0)
        args = (self.info["master_replid"], self.stored, *map(str, (self.now_ms, longest_ms, TTL_MS)))
        try:
            with connected(self.address) as connection:
                (written,) = reply(connection, "EVAL", SCRIPT.source, "1", voter_key(self.prefix), *args)
        except (RedisError, OSError) as error:
            return f"did not say whether it has written it: {why_silent(error, self.address)[0]}"
        return "" if written else self.CHANGED


def look_at(urls: Sequence[str], prefix: str, max_ttl: float) -> list[Member]:
    """Ask all of these servers. Raises ConfigError for URLs that can't be those of a quorum."""
    return [_ask(Member(address, prefix, max_ttl)) for address in quorum_of(list(urls), for_asyncio=False).servers]


def _ask(member: Member) -> Member:
    try:
        with connected(member.address) as connection:
            info = replies(connection, [("INFO",)])[0]
            member.info = parse_info(info) if isinstance(info, bytes) else {}
            if member.info.get("redis_mode") != "sentinel":
                _count_names(connection, member)
                member.now_ms = now_ms_of(connection)
                member.stored = stored_record(connection, member.prefix)
    except Exception as error:  # noqa: BLE001 (of each server the operator wants to know why)
        member.error, member.advice = why_silent(error, member.address)
    return member


def _count_names(connection: Any, member: Member) -> None:
    try:
        found, member.knows_all_names = names_in(connection, time.monotonic() + SCAN_FOR)
    except NoPermissionError:
        member.knows_all_names = member.may_scan = False
        return
    names = sorted(name for name in found if name.startswith(voter_stem(member.prefix)))
    member.names = len(names)
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        stored = replies(connection, [("GET", key) for name in batch for key in (name, _record_of(name))])
        for value, record in zip(stored[::2], stored[1::2], strict=True):
            member.leases += isinstance(value, bytes) and not value.startswith(QUARANTINE)
            member.granted += not (isinstance(record, bytes) and _NEVER_GRANTED.match(record))


def _record_of(name: str) -> str:
    """The key of a name's record: see `tagged` in `_protocol/names.py`, which refuses names of other programs."""
    return f"{name}:{{record}}" if "{" in name else f"{{{name}}}{{record}}"
