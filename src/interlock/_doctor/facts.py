"""What the doctor asks the servers: facts, without a judgement. A question that a server refuses is a fact, too."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from interlock._client.error_texts import silence_question
from interlock._connect.address import Quorum
from interlock._connect.clusters import Cluster
from interlock._connect.refusals import connection_error
from interlock._connect.server_check import pairs_of
from interlock._connect.target import address_of, quorum_of
from interlock._doctor.names_in_use import SCAN_FOR, connected, names_in, primaries, reply
from interlock._doctor.voters import UNREADABLE
from interlock._protocol.info import parse_info
from interlock._quarantine.voter import voter_key
from interlock.errors import LockError
from interlock.primitives.audit import AUDIT_KEY
from interlock.primitives.registry import INDEX, entries_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._connect.address import Address
    from interlock._connect.sentinels import Sentinels

__all__ = ["Facts", "ServerFacts", "ask", "ask_at", "now_ms_of", "stored_record", "why_silent"]

PINGS: Final = 20  # for the latency
START_IT: Final = "Start it, or correct the URL"
SETTINGS: Final = (
    "maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save", "min-replicas-to-write",
    "min-replicas-max-lag", "cluster-node-timeout",
)  # fmt: skip
_ENTRY: Final = entries_key("interlock-doctor")  # of no process
# What the scripts call, by what needs it. None of these writes: each reads, or finds nothing to delete, or the server
# refuses it after it has checked the rights, for an id of 0-0 or a word that is no number. ACL DRYRUN says the same
# only to users who may use it.
TRIED: Final[dict[str, tuple[str, Sequence[tuple[str, ...]]]]] = {
    "registry": (f"~{INDEX}*", (
        ("ZADD", INDEX, "x", "x"), ("ZREM", INDEX, "x"), ("ZRANGEBYSCORE", INDEX, "x", "x"),
        ("ZREMRANGEBYSCORE", INDEX, "x", "x"), ("HSET", _ENTRY, "x", "x", "x"), ("HGET", _ENTRY, "x"),
        ("HGETALL", _ENTRY), ("HLEN", _ENTRY), ("HDEL", _ENTRY, "x"), ("EXISTS", _ENTRY), ("PEXPIRE", _ENTRY, "x"),
    )),
    "audit": (f"~{AUDIT_KEY}", (
        ("XADD", AUDIT_KEY, "0-0", "x", "x"), ("XREVRANGE", AUDIT_KEY, "x", "x"), ("PEXPIRE", AUDIT_KEY, "x"),
    )),
}  # fmt: skip


@dataclass
class ServerFacts:
    """What one server says of itself."""

    url: str
    error: str = ""
    """Why it did not answer; then there is nothing else."""
    advice: str = START_IT
    """What to do about the error; "" if the error says it itself."""
    info: dict[str, str] = field(default_factory=dict[str, str])
    """INFO, every section; empty if it is refused."""
    settings: dict[str, str] = field(default_factory=dict[str, str])
    """CONFIG GET of SETTINGS; empty if it is refused."""
    user: str = ""
    """ACL WHOAMI; "" if it is refused."""
    missing: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The rights that its user lacks, by what needs them: the registry, the audit."""
    latency: float = 0.0
    """The median of PINGS round trips, in seconds."""
    clock: float = 0.0
    """How many seconds its clock is ahead of this machine's."""
    voter_record: str = ""
    """Of a server of a quorum: as in `stored_record`."""
    now_ms: int = 0
    """Its clock, ms."""
    database: int = 0
    """The number of the database that its URL names."""
    names: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    """How many names of interlock each database has, by what they begin with: "lock:", as far as a colon."""
    knows_all_names: bool = True
    """Whether the time was enough to look at all keys."""


@dataclass
class Facts:
    """What the servers of one target say."""

    kind: str
    """server, sentinel, cluster or quorum"""
    servers: list[ServerFacts]
    """Each server that grants locks."""
    sentinels: list[ServerFacts] = field(default_factory=list[ServerFacts])
    masters: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """What each sentinel says about the service."""
    hosts: list[str] = field(default_factory=list[str])
    """Where the servers of a quorum are."""


def ask(urls: Sequence[str], prefix: str) -> Facts:
    """Ask the servers of this URL, or those of a quorum; of none, $INTERLOCK_URL. Raises ConfigError."""
    if len(urls) > 1:
        return ask_at(quorum_of(list(urls), for_asyncio=False), prefix)
    return ask_at(address_of(urls[0] if urls else None, for_asyncio=False), prefix)


def ask_at(address: Address | Cluster | Quorum, prefix: str) -> Facts:
    """As `ask`, of the servers at this address. `prefix`: that of the programs about which the person asks."""
    if isinstance(address, Quorum):
        hosts = [str(each.parameters.get("host") or each.parameters.get("path", "")) for each in address.servers]
        return Facts("quorum", [_ask_server(each, prefix) for each in address.servers], hosts=hosts)
    if isinstance(address, Cluster):
        return Facts("cluster", [_ask_server(node) for node in primaries(address)])
    if address.sentinels is None:
        return Facts("server", [_ask_server(address)])
    sentinels: Any = address.sentinels
    facts = Facts("sentinel", [_ask_server(address)])
    for each in sentinels.addresses:
        about, master = _ask_sentinel(each, sentinels)
        facts.sentinels.append(about)
        if master:
            facts.masters.append(master)
    return facts


def _ask_server(address: Address, prefix: str = "") -> ServerFacts:
    facts = ServerFacts(address.display_url)
    try:
        with connected(address) as connection:
            facts.info = parse_info(_or_none(connection, "INFO"))
            found = dict[str, str]()
            for setting in SETTINGS:
                found |= _pairs(_or_none(connection, "CONFIG", "GET", setting))
            facts.settings = found
            facts.user = _text(_or_none(connection, "ACL", "WHOAMI"))
            for what, (keys, commands) in TRIED.items():
                if missing := _missing(connection, keys, commands):
                    facts.missing[what] = missing
            facts.latency = _latency(connection)
            if address.votes:
                facts.voter_record = stored_record(connection, prefix)
            asked = time.time()
            facts.now_ms = now_ms_of(connection)
            facts.clock = facts.now_ms / 1000 - (asked + time.time()) / 2
            facts.database = int(address.parameters.get("db") or 0)
            with contextlib.suppress(RedisError):  # a user may have no right to that
                _look_at_names(connection, facts)
    except Exception as error:  # noqa: BLE001 (one server that does not answer is a finding)
        facts.error, facts.advice = why_silent(error, address)
    return facts


def why_silent(error: Exception, address: Address) -> tuple[str, str]:
    """Why a question to this server failed, and what to do about it; "" if the first text says that itself."""
    cause, url = connection_error(error, address), address.display_url
    text = (str(cause) or type(error).__name__).removeprefix(f"{url}: ")
    if isinstance(cause, LockError):
        return text, ""
    is_other = "rediss" in url or "Protocol error" in text
    return text, silence_question(url, text) if is_other else START_IT


def stored_record(connection: Any, prefix: str) -> str:
    """The voter record for this prefix as it is stored; "" if there is none, UNREADABLE if it is no text."""
    try:
        stored = reply(connection, "GET", voter_key(prefix))
    except ResponseError:
        return UNREADABLE
    return "" if stored is None else stored.decode(errors="replace") or UNREADABLE


def now_ms_of(connection: Any) -> int:
    """The server's clock, ms."""
    seconds, micros = reply(connection, "TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def _ask_sentinel(address: Address, sentinels: Sentinels) -> tuple[ServerFacts, dict[str, str]]:
    facts = ServerFacts(address.display_url)
    try:
        with connected(address) as connection:
            facts.info = parse_info(_or_none(connection, "INFO"))
            return facts, _pairs(reply(connection, "SENTINEL", "MASTER", sentinels.service))
    except Exception as error:  # noqa: BLE001 (as above)
        facts.error = str(error) or type(error).__name__
    return facts, {}


def _or_none(connection: Any, *words: str) -> Any:
    """The reply, or None if the server refuses the command."""
    with contextlib.suppress(ResponseError):
        return reply(connection, *words)
    return None


def _missing(connection: Any, keys: str, commands: Sequence[tuple[str, ...]]) -> list[str]:
    """The rights that the server's ACL lacks for these commands on these keys."""
    found = list[str]()
    for words in commands:
        try:
            reply(connection, *words)
        except NoPermissionError as refused:  # the server names the command, or says that it is about a key
            right = f"+{words[0].lower()}" if "the '" in str(refused) and " command" in str(refused) else keys
            found += [right] if right not in found else []
        except ResponseError:  # it knows the command, and the user may use it
            pass
    return found


def _look_at_names(connection: Any, facts: ServerFacts) -> None:
    """Note which names each database has. The connection is in another database afterwards."""
    until = time.monotonic() + SCAN_FOR
    databases = {int(each[2:]) for each in facts.info if each.startswith("db") and each[2:].isdecimal()}
    for number in sorted(databases | {facts.database}, key=lambda each: (each != facts.database, each)):
        if number != facts.database:
            reply(connection, "SELECT", str(number))
        names, is_all = names_in(connection, until)
        facts.knows_all_names &= is_all
        if names:
            beginnings = (name[: name.index(":") + 1] if ":" in name else "" for name in names)
            facts.names[number] = dict(Counter(beginnings).most_common())


def _latency(connection: Any) -> float:
    times = list[float]()
    for _ in range(PINGS):
        began = time.perf_counter()
        _or_none(connection, "PING")
        times.append(time.perf_counter() - began)
    return sorted(times)[PINGS // 2]


def _text(reply: Any) -> str:
    return reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply or "")


def _pairs(reply: Any) -> dict[str, str]:
    """A reply of names and values: a map of RESP3, or a list of RESP2."""
    return {_text(name): _text(value) for name, value in pairs_of(reply or ()).items()}
