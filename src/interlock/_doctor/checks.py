"""What endangers locks, by the facts: each check returns findings, and says what to set."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from interlock._connect.server_check import OLDEST_VERSION, parse_version
from interlock._doctor.voters import State, judge, way_out
from interlock._protocol.timing import MAX_TTL
from interlock._quarantine.identity import NO_REPLID
from interlock.primitives.deadlocks import WAY_OUT, find

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from interlock._doctor.facts import Facts, ServerFacts
    from interlock.primitives.registry import Listed, Party

__all__ = ["Finding", "Level", "by_level", "findings", "of_callers"]

MAX_LATENCY: Final = 0.05  # seconds
MAX_PREFIXES: Final = 8  # that a finding names
MAX_CLOCK_DIFFERENCE: Final = 5.0  # seconds
MAY_BE: Final = "it is dead, stopped or cut off"
LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"  # good to know
    WARNING = "warning"  # a promise is weaker, or a wait longer
    DANGER = "danger"  # two holders at once, or no lock at all


@dataclass(frozen=True)
class Finding:
    """One finding, about one server or about all of them."""

    level: Level
    subject: str
    text: str
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        """The finding for --json."""
        return {name: str(value) for name, value in asdict(self).items()}


def findings(facts: Facts, *, max_ttl: float = MAX_TTL, prefix: str = "lock:") -> list[Finding]:
    """All findings, the worst first. `prefix`: that of the programs about which the person asks."""
    found = list[Finding]()
    for server in facts.servers:
        found += _of_server(server, max_ttl, judges_itself=facts.kind == "quorum")
        found += _of_names(server, prefix)
    if facts.kind == "quorum":
        found += _of_voters(facts, max_ttl, prefix)
    if facts.kind != "server":
        found += {"quorum": _of_quorum, "sentinel": _of_sentinels, "cluster": _of_cluster}[facts.kind](facts)
    return by_level(found)


def by_level(found: Iterable[Finding]) -> list[Finding]:
    """The findings, the worst first."""
    order = list(Level)
    return sorted(found, key=lambda finding: -order.index(finding.level))


# One server


def _of_server(server: ServerFacts, max_ttl: float, *, judges_itself: bool) -> Iterator[Finding]:
    url = server.url
    if server.error:
        verb = "does not answer" if server.advice else "can't be used"
        yield Finding(Level.DANGER, url, f"{verb}: {server.error}", server.advice)
        return
    yield from _of_version(server)
    if not server.info and not judges_itself:
        yield Finding(
            Level.WARNING,
            url,
            "refuses INFO, so there is no quarantine after a restart or failover",
            "Give its user the right +info",
        )
    yield from _of_rights(server)
    yield from _of_memory(server)
    yield from _of_persistence(server, None if judges_itself else max_ttl)
    yield from _of_role(server)
    if server.latency > MAX_LATENCY:
        yield Finding(
            Level.WARNING,
            url,
            f"takes {server.latency * 1000:.0f} ms for a round trip, which each call needs",
            "Use a server that is nearer, or look at what else it does (SLOWLOG GET)",
        )
    if abs(server.clock) > MAX_CLOCK_DIFFERENCE:
        ahead = "ahead of" if server.clock > 0 else "behind"
        yield Finding(
            Level.NOTE,
            url,
            f"has a clock that is {abs(server.clock):.0f} s {ahead} this machine's. That "
            "harms no lease, but a clock that is stepped ends leases early or late",
            "Let an NTP client set it slowly",
        )


def _of_version(server: ServerFacts) -> Iterator[Finding]:
    version = server.info.get("valkey_version") or server.info.get("redis_version", "")
    name = "Valkey" if "valkey_version" in server.info else "Redis"
    numbers = parse_version(version)
    if numbers is None:
        return
    if numbers < OLDEST_VERSION:
        text, advice = f"runs {name} {version}, which is too old", "Use Redis 6.2, Valkey 7.2, or later"
        yield Finding(Level.DANGER, server.url, text, advice)
    else:
        up = _span(server.info.get("uptime_in_seconds", "0"))
        user = f", as user {server.user}" if server.user else ""
        yield Finding(
            Level.OK,
            server.url,
            f"{name} {version}, up {up}, {server.latency * 1e6:.0f} µs a round trip{user}",
        )


def _of_rights(server: ServerFacts) -> Iterator[Finding]:
    whose = f"its user {server.user}" if server.user else "its user"
    for what, rights in server.missing.items():
        harm = {
            "registry": "nobody sees what this user's processes hold and wait for, or this user not that of others",
            "audit": "what this user revokes is not written down, or this user can't read who revoked what",
        }[what]
        yield Finding(
            Level.NOTE, server.url, f"denies {whose} rights for the {what}: {harm}",
            f"Give {whose} the rights {' '.join(rights)}",
        )  # fmt: skip


def _of_memory(server: ServerFacts) -> Iterator[Finding]:
    policy = server.settings.get("maxmemory-policy") or server.info.get("maxmemory_policy", "")
    limit = int(server.settings.get("maxmemory") or server.info.get("maxmemory", "0") or 0)
    if policy and policy != "noeviction":
        level, when = (Level.DANGER, "evicts") if limit else (Level.NOTE, "would evict, had it a maxmemory,")
        yield Finding(
            level,
            server.url,
            f"{when} locks that are held when memory is short (maxmemory-policy {policy})",
            "CONFIG SET maxmemory-policy noeviction; or use a server of its own for locks",
        )
    used = int(server.info.get("used_memory", "0") or 0)
    if limit and used > 0.9 * limit:
        yield Finding(
            Level.WARNING,
            server.url,
            f"uses {used / limit:.0%} of its maxmemory; when that is full it grants nothing",
            "Raise maxmemory",
        )


def _of_persistence(server: ServerFacts, quarantine: float | None) -> Iterator[Finding]:
    """`quarantine`: seconds that it lasts; None if there is none after a start."""
    uptime = float(server.info.get("uptime_in_seconds", "inf") or 0)
    if quarantine is not None and uptime < quarantine:
        # A server does not say when it was promoted: the quarantine begins then.
        at_least = "at least " if server.info.get("master_replid2", NO_REPLID) != NO_REPLID else ""
        yield Finding(
            Level.NOTE,
            server.url,
            f"started {uptime:.0f} s ago: for {at_least}{quarantine - uptime:.0f} s more it grants nothing for "
            "names that were in use before (quarantine)",
        )
    if (
        server.info.get("rdb_last_bgsave_status", "ok") != "ok"
        or server.info.get("aof_last_write_status", "ok") != "ok"
    ):
        yield Finding(
            Level.DANGER,
            server.url,
            "cannot write to its disk, and may refuse all writes",
            "Look at its log, and at the space on its disk",
        )
    if server.settings and server.settings.get("appendonly") != "yes":
        yield Finding(
            Level.NOTE,
            server.url,
            "keeps no log of its writes: after a crash it has forgotten leases, whose ttl interlock waits out",
            "Nothing to do; fsync=True needs appendonly yes",
        )


def _of_role(server: ServerFacts) -> Iterator[Finding]:
    role = server.info.get("role")
    if role == "slave":
        yield Finding(Level.DANGER, server.url, "is a read-only replica", "Connect to its primary")
    needed = server.settings.get("min-replicas-to-write", "")
    connected = int(server.info.get("connected_slaves", "0") or 0)
    if needed.isdecimal() and int(needed) > connected:
        yield Finding(
            Level.DANGER,
            server.url,
            f"has {connected} replicas, and takes writes only with {needed}",
            "Start its replicas, or lower min-replicas-to-write",
        )


def _of_names(server: ServerFacts, prefix: str) -> Iterator[Finding]:
    """Where programs keep their names: those of another database or prefix do not exclude those of this one."""
    used = [(number, text, count) for number, by_text in server.names.items() for text, count in by_text.items()]
    if not used:
        return
    shown = [
        f"db {number}: {count} name{'s' * (count != 1)} {f'beginning with {text!r}' if text else 'without a prefix'}"
        for number, text, count in used[:MAX_PREFIXES]
    ]
    more = f"; and {len(used) - MAX_PREFIXES} more" if len(used) > MAX_PREFIXES else ""
    part = "" if server.knows_all_names else " (of a part of its keys: it has too many)"
    elsewhere = [each for each in used if each[0] != server.database or not _may_have(prefix, each[1])]
    yield Finding(
        Level.NOTE if elsewhere else Level.OK,
        server.url,
        f"has names of interlock in {'; '.join(shown)}{more}{part}",
        f"You look at db {server.database} and the prefix {prefix!r}. Programs exclude each other only with the same "
        "database and the same prefix"
        if elsewhere
        else "",
    )


def _may_have(prefix: str, text: str) -> bool:
    """Whether names that begin with this text, as far as a colon, may have the prefix."""
    return prefix.startswith(text) if ":" in prefix else text.startswith(prefix)


# The callers


def of_callers(things: Sequence[Listed]) -> Iterator[Finding]:
    """What processes say of themselves: callers that wait for each other, and processes that say nothing any more."""
    for found in find(things):
        number = len(found.members)
        subject, whom = (f"{number} callers", "each other") if number > 1 else ("a caller", "itself")
        behind = f", and {found.behind} more behind them" if found.behind else ""
        probably = "" if found.certain else "probably "
        yield Finding(
            Level.DANGER if found.certain else Level.WARNING,
            subject,
            f"{probably}wait{'' if number > 1 else 's'} for {whom}, for {_span(str(found.seconds))}{behind}: "
            + "; ".join(member.sentence() for member in found.members),
            f"{WAY_OUT}. To end it now: interlock revoke one of these names",
        )
    silent: dict[str, list[tuple[Listed, Party]]] = {}
    for thing in things:
        for party in thing.holders:
            if party.is_silent:
                silent.setdefault(party.process, []).append((thing, party))
    for process, held in silent.items():
        thing, party = held[0]
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        yield Finding(
            Level.WARNING,
            process,
            f"holds {thing.kind} {thing.name!r} since {party.place}{more}, and "
            + ("has ended" if party.gone else f"has said nothing for {party.reported_ago:.0f} s: {MAY_BE}"),
            "Look at that process. If it is dead, its leases end by themselves: "
            f"interlock show {shlex.quote(thing.name)} says when",
        )


# Several servers


def _of_sentinels(facts: Facts) -> Iterator[Finding]:
    for sentinel in facts.sentinels:
        if sentinel.error:
            yield Finding(
                Level.WARNING, sentinel.url, f"does not answer: {sentinel.error}", "Start it, or correct the URL"
            )
    answering = [each for each in facts.sentinels if not each.error]
    if len(facts.sentinels) < 3:
        yield Finding(
            Level.WARNING,
            "the sentinels",
            f"the URL names {len(facts.sentinels)}: a majority needs three",
            "Name all of them in the URL; run three or more, on machines of their own",
        )
    if len(answering) * 2 <= len(facts.sentinels):
        yield Finding(Level.DANGER, "the sentinels", "no majority answers, so no failover is possible", "Start them")
    for master in facts.masters[:1]:
        replicas = int(master.get("num-slaves", "0") or 0)
        if not replicas:
            yield Finding(
                Level.WARNING, "the sentinels", "know no replica: there is nothing to fail over to", "Add a replica"
            )
    for server in (each for each in facts.servers if not each.error):
        needed = server.settings.get("min-replicas-to-write")
        if needed == "0":
            yield Finding(
                Level.DANGER,
                server.url,
                "goes on granting when it is cut off from its replicas, while they promote another: two holders",
                "CONFIG SET min-replicas-to-write 1, and min-replicas-max-lag 10",
            )
        elif needed is None:
            yield Finding(
                Level.WARNING,
                server.url,
                "refuses CONFIG GET, so interlock can't see min-replicas-to-write",
                "Give its user the right +config|get; see that min-replicas-to-write is 1 or more",
            )


def _of_cluster(facts: Facts) -> Iterator[Finding]:
    for server in facts.servers:
        if not server.error and server.info and not int(server.info.get("connected_slaves", "0") or 0):
            yield Finding(
                Level.WARNING,
                server.url,
                "has no replica: if it dies, nobody gets the locks in its slots",
                "Add a replica",
            )


def _of_quorum(facts: Facts) -> Iterator[Finding]:
    number, answering = len(facts.servers), [each for each in facts.servers if not each.error]
    if number % 2 == 0:
        yield Finding(
            Level.WARNING,
            "the quorum",
            f"{number} servers survive no more failures than {number - 1}",
            "Add or remove one",
        )
    if len(answering) * 2 <= number:
        yield Finding(
            Level.DANGER, "the quorum", f"{len(answering)} of {number} answer: no lock is granted", "Start them"
        )
    elif len(answering) < number:
        yield Finding(
            Level.WARNING,
            "the quorum",
            f"{len(answering)} of {number} answer: it survives {len(answering) - number // 2 - 1} more failures",
            "Start the others",
        )
    for run_id, count in Counter(each.info.get("run_id", each.url) for each in answering).items():
        if count > 1:
            yield Finding(
                Level.DANGER, "the quorum", f"{count} of its URLs lead to one server ({run_id})", "Name each once"
            )
    for host, count in Counter(
        "this machine" if host in LOCAL or host.startswith("/") else host for host in facts.hosts
    ).items():
        if count > 1:
            yield Finding(
                Level.WARNING,
                "the quorum",
                f"{count} of its servers run on {host}, and fail together",
                "Run each on a machine of its own",
            )
    for server in answering:
        if server.info.get("role") == "slave" or int(server.info.get("connected_slaves", "0") or 0):
            yield Finding(
                Level.DANGER,
                server.url,
                "replicates or is replicated: the servers of a quorum must be independent",
                "REPLICAOF NO ONE; or use Sentinel",
            )


def _of_voters(facts: Facts, max_ttl: float, prefix: str) -> Iterator[Finding]:
    """Which servers of a quorum count now."""
    counting = 0
    for server in (each for each in facts.servers if not each.error):
        standing = judge(server.voter_record, server.info, server.now_ms, max_ttl)
        counting += standing.state is State.COUNTS
        level, advice = {
            State.COUNTS: (Level.OK, ""),
            State.ABSTAINS: (
                Level.WARNING,
                "Wait so long. Restart the servers of a quorum one by one, and max_ttl apart",
            ),
            State.NEW: (
                Level.WARNING,
                "Of a new quorum: interlock quorum new. Before an upgrade: interlock quorum adopt. Else wait so long",
            ),
            State.CHANGED: (Level.WARNING, "Wait so long"),
            State.UNREADABLE: (Level.DANGER, way_out(prefix)),
            State.UNKNOWN: (Level.DANGER, "Give its user the right +info"),
        }[standing.state]
        yield Finding(level, server.url, standing.sentence(f"{standing.wait:.0f} s"), advice)
    if 2 * counting <= len(facts.servers):
        yield Finding(
            Level.WARNING,
            "the quorum",
            f"{counting} of its {len(facts.servers)} servers count now: until a majority does, no lock is granted",
            "interlock quorum show says when they will",
        )


def _span(seconds: str) -> str:
    value = float(seconds or 0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s"
