"""What the doctor asks the servers: facts, without a judgement. A question that a server refuses is a fact, too."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from interlock._client.error_texts import silence_question
from interlock._connect.clusters import Cluster
from interlock._connect.refusals import connection_error
from interlock._connect.server_check import pairs_of
from interlock._connect.target import address_of, quorum_of
from interlock._protocol.info import parse_info
from interlock._servers.slot_map import address_in_map
from interlock.errors import LockError
from interlock.primitives.audit import AUDIT_KEY
from interlock.primitives.registry import INDEX, entries_key

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from interlock._connect.address import Address, Quorum
    from interlock._connect.sentinels import Sentinels

__all__ = ["Facts", "ServerFacts", "ask"]

TIMEOUT: Final = 3.0  # seconds that one server may take for a question
PINGS: Final = 20  # for the latency
SETTINGS: Final = (
    "maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save", "min-replicas-to-write",
    "min-replicas-max-lag", "cluster-node-timeout",
)  # fmt: skip
_ENTRY: Final = entries_key("interlock-doctor")  # of no process
# What the scripts call, by what needs it. Each of these reads, or the server refuses it when it has checked the rights:
# for an id of 0-0, or a word that is no number. ACL DRYRUN says the same only to users who may use it.
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
    advice: str = "Start it, or correct the URL"
    """What to do about the error; "" if the error says it, since the server refuses this client."""
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


def ask(urls: Sequence[str]) -> Facts:
    """Ask the servers of this URL, or those of a quorum; of none, $INTERLOCK_URL. Raises ConfigError."""
    if len(urls) > 1:
        quorum: Quorum = quorum_of(list(urls), for_asyncio=False)
        hosts = [str(each.parameters.get("host") or each.parameters.get("path", "")) for each in quorum.servers]
        return Facts("quorum", [_ask_server(each) for each in quorum.servers], hosts=hosts)
    address = address_of(urls[0] if urls else None, for_asyncio=False)
    if isinstance(address, Cluster):
        return Facts("cluster", [_ask_server(node) for node in _primaries(address)])
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


def _primaries(cluster: Cluster) -> list[Address]:
    """The primaries of a cluster, by the first seed that answers; the seeds themselves if none does."""
    for seed in cluster.seeds:
        with contextlib.suppress(RedisError, OSError), _connected(seed) as connection:
            slots = _reply(connection, "CLUSTER", "SLOTS")
            nodes = {address.display_url: address for entry in slots for address in (address_in_map(seed, entry[2]),)}
            return list(nodes.values())
    return list(cluster.seeds)


def _ask_server(address: Address) -> ServerFacts:
    facts = ServerFacts(address.display_url)
    try:
        with _connected(address) as connection:
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
            asked = time.time()
            seconds, micros = _reply(connection, "TIME")
            facts.clock = int(seconds) + int(micros) / 1e6 - (asked + time.time()) / 2
    except Exception as error:  # noqa: BLE001 (one server that does not answer is a finding)
        cause = connection_error(error, address)
        facts.error = (str(cause) or type(error).__name__).removeprefix(f"{facts.url}: ")
        if isinstance(cause, LockError):
            facts.advice = ""
        elif "rediss" in facts.url or "Protocol error" in facts.error:
            facts.advice = silence_question(facts.url, facts.error)
    return facts


def _ask_sentinel(address: Address, sentinels: Sentinels) -> tuple[ServerFacts, dict[str, str]]:
    facts = ServerFacts(address.display_url)
    try:
        with _connected(address) as connection:
            facts.info = parse_info(_or_none(connection, "INFO"))
            return facts, _pairs(_reply(connection, "SENTINEL", "MASTER", sentinels.service))
    except Exception as error:  # noqa: BLE001 (as above)
        facts.error = str(error) or type(error).__name__
    return facts, {}


@contextlib.contextmanager
def _connected(address: Address) -> Generator[Any, None, None]:
    connection = address.connection(TIMEOUT)
    try:
        connection.connect()
        for command in address.setup_commands:
            _or_none(connection, *command)
        yield connection
    finally:
        connection.disconnect()


def _reply(connection: Any, *words: str) -> Any:
    connection.send_command(*words)
    return connection.read_response()


def _or_none(connection: Any, *words: str) -> Any:
    """The reply, or None if the server refuses the command."""
    with contextlib.suppress(ResponseError):
        return _reply(connection, *words)
    return None


def _missing(connection: Any, keys: str, commands: Sequence[tuple[str, ...]]) -> list[str]:
    """The rights that the server's ACL lacks for these commands on these keys."""
    found = list[str]()
    for words in commands:
        try:
            _reply(connection, *words)
        except NoPermissionError as refused:  # the server names the command, or says that it is about a key
            right = f"+{words[0].lower()}" if "the '" in str(refused) and " command" in str(refused) else keys
            found += [right] if right not in found else []
        except ResponseError:  # it knows the command, and the user may use it
            pass
    return found


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
