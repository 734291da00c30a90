"""Profiles: which faults strike, and how often. A world is a set of profiles that suit one kind of servers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from .network import LATEST, NO_FAULTS, Weather
from .outage_kinds import ISOLATION_GRACE, KINDS, LOSSY, MAX_PAUSE, OUTAGE_TIME
from .sim_pool import IO_TIMEOUT


@dataclass(frozen=True)
class Profile:
    """One mixture of faults. The rates are per second, of all clients together; faults.py explains the names."""

    name: str
    weather: Weather = NO_FAULTS
    rates: dict[str, float] = field(default_factory=dict[str, float])
    trusted: bool = True  # no server loses data unnoticed, and nobody sets its clock
    max_ttl: float = 60.0  # seconds: the longest ttl of any lease, and so the length of a quarantine
    other_max_ttl: float = 0.0  # seconds: that of every second client; 0: it is the same
    together: float = 0.0  # how likely a fault strikes several servers of a quorum at once
    servers: tuple[int, ...] = (1,)  # the number of independent servers
    skew: float = 0.0  # seconds: how wrong each server's clock may be
    fault_phase: float = 8.0  # seconds with faults
    idle: float = 0.3  # seconds between two sections in the aftermath of the fault phase
    quiet_phase: float = 3.0  # seconds without faults in which workers go on
    clients: tuple[int, ...] = (2, 3, 3, 4)  # the number of clients
    workers: tuple[int, ...] = (1, 2, 2, 3)  # the number of workers of each client
    usage: str = "any"  # how workers use resources: see usage.py
    foreign: float = 0.0  # how likely a section or a loss starts code that uses the same resources, in another task
    subjects: tuple[str, ...] = ()  # the subjects that the profile is about; none: all of its world

    @property
    def crowded(self) -> bool:
        """Whether these workers want the same resource all the time."""
        return self.usage in {"short", "short and long"}

    def max_ttl_of(self, client: int) -> float:
        """Return the max_ttl of the process with this number."""
        return self.other_max_ttl if self.other_max_ttl and client % 2 else self.max_ttl

    @property
    def changes_primary(self) -> bool:
        """Whether another process may become the primary."""
        return not self.rates.keys().isdisjoint(KINDS)

    @property
    def loses_leases(self) -> bool:
        """Whether a server that takes over may lack the last writes."""
        return not self.rates.keys().isdisjoint(LOSSY)

    @property
    def world(self) -> str:
        """The world whose subjects suit these faults."""
        return "quorum" if len(self.servers) > 1 else "servers" if self.loses_leases else "one"

    @property
    def promotes(self) -> bool:
        """Whether replicas take over."""
        return not self.rates.keys().isdisjoint({"failover", "primary isolated", "primary paused", "planned failover"})

    @property
    def isolation_grace(self) -> float:
        """Seconds for which an isolated primary may still grant leases, as clients assume."""
        return ISOLATION_GRACE if not self.rates.keys().isdisjoint({"primary isolated", "primary paused"}) else 0.0

    @property
    def clean(self) -> bool:
        """Whether every attempt that ended must be gone from the server within a second."""
        return (
            self.weather.clean
            and self.trusted
            and not self.changes_primary
            and self.rates.keys().isdisjoint({"cut off", "one way"})
            and len(self.servers) == 1  # a server of a quorum gets a release late if it was away
        )

    @property
    def aftermath(self) -> float:
        """Seconds after the fault phase in which its faults may still have effects."""
        silent = not self.clean or "break subscription" in self.rates
        late, changes = LATEST if self.weather.late else 0.0, OUTAGE_TIME if self.changes_primary else 0.0
        changes += MAX_PAUSE + ISOLATION_GRACE if "primary paused" in self.rates else 0.0
        return late + changes + (IO_TIMEOUT if silent else 0.0)


_ROUGH: Final = Weather(
    slow=0.03, late=0.01, lost=0.02, unanswered=0.02, doubled=0.03, refused=0.01, replica=0.003, reset=0.5,
    push_lost=0.1, push_doubled=0.1,
)  # fmt: skip
_CANCEL: Final = {"cancel": 2.0, "scheduled cancel": 3.0}
_PAUSE: Final = {"pause": 0.4, "scheduled pause": 0.6}
_CRASH: Final = {"crash": 0.15, "scheduled crash": 0.3, "close": 0.05, "scheduled close": 0.2}
_SERVER: Final = {"script flush": 0.3, "break subscription": 0.3, "revoke": 0.2, "force": 0.1}
_MEMORY: Final = {"out of memory": 0.3}

PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile("no faults"),
        Profile("cancel", rates=_CANCEL | _SERVER),
        Profile("pause", rates=_PAUSE | _CANCEL),
        Profile("crash", rates=_CRASH | _SERVER),
        Profile("loss", weather=_ROUGH),
        Profile("slow", weather=Weather(slow=0.25, lost=0.05, unanswered=0.05, reset=0.3), rates={"cut off": 0.2}),
        Profile("lossy cancel", weather=_ROUGH, rates=_CANCEL | {"cut off": 0.1}),
        Profile("memory", rates=_MEMORY | _CANCEL),
        Profile("chaos", weather=_ROUGH, rates=_CANCEL | _PAUSE | _CRASH | _SERVER | _MEMORY | {"cut off": 0.1}),
    )
}


_SHORT_TTL: Final = 2.0  # seconds: the longest ttl, and so the length of a quarantine


# Servers that restart and fail over. Ttls are short here, so that quarantines are short, too.
def _servers(name: str, rates: dict[str, float], *, weather: Weather = NO_FAULTS, trusted: bool = True) -> Profile:
    return Profile(
        name, weather, rates, trusted=trusted, max_ttl=_SHORT_TTL, fault_phase=4.0, idle=2.0, quiet_phase=1.0,
        clients=(2, 2, 3), workers=(1, 1, 2),
    )  # fmt: skip


SERVERS: Final = {
    profile.name: profile
    for profile in (
        _servers("durable", _CANCEL | _CRASH | {"restart": 0.5, "first replica": 0.2}),
        _servers("snapshot", _CANCEL | _CRASH | {"restart with old keys": 0.5}),
        _servers("empty", _CANCEL | _CRASH | {"restart without keys": 0.5, "crash": 0.4}),
        _servers("failover", _CRASH | {"failover": 0.5, "planned failover": 0.3, "first replica": 0.1}),
        _servers("isolated", _CANCEL | {"primary isolated": 0.5}),
        _servers("one way", _CANCEL | {"one way": 1.0, "failover": 0.3, "restart with old keys": 0.2}),
        _servers(
            "ruin", _CANCEL | _PAUSE | _CRASH | _SERVER
            | {"restart": 0.3, "failover": 0.3, "planned failover": 0.3, "primary isolated": 0.3, "first replica": 0.1}
            | {"one way": 0.2},
            weather=_ROUGH,
        ),
    )
}  # fmt: skip


# Independent servers. While servers keep their records, each clock may be wrong by 5 times the longest ttl. Where a
# server may forget its records, clocks differ by less than a restarted server waits before it votes again.
def _quorum(name: str, rates: dict[str, float], *, weather: Weather = NO_FAULTS, keeps_records: bool = True) -> Profile:
    return Profile(
        name, weather, rates, max_ttl=_SHORT_TTL, fault_phase=2.5, idle=4.0, quiet_phase=0.5, clients=(2, 2, 3),
        workers=(1, 1, 2), servers=(3, 3, 3, 5), skew=5 * _SHORT_TTL if keeps_records else 0.5,
    )  # fmt: skip


_NETS: Final = {"one way": 0.8, "cut off": 0.3}
QUORUMS: Final = {
    profile.name: profile
    for profile in (
        _quorum("q no faults", {}),
        _quorum("q cancel", _CANCEL | _SERVER),
        _quorum("q crash", _CRASH | _PAUSE | {"restart": 0.8}),
        _quorum("q loss", _NETS, weather=_ROUGH),
        _quorum("q empty", _CANCEL | _CRASH | {"restart without keys": 0.7}, keeps_records=False),
        _quorum("q late", _NETS | _CANCEL | {"restart with old keys": 0.7}, keeps_records=False),
        _quorum("q ruin", _CANCEL | _PAUSE | _CRASH | _SERVER | _NETS | {"restart": 0.7}, weather=_ROUGH),
        _quorum(
            "q forgetting", _CANCEL | _PAUSE | _CRASH | _NETS
            | {"restart without keys": 0.4, "restart with old keys": 0.4}, weather=_ROUGH, keeps_records=False,
        ),
    )
}  # fmt: skip


# Servers of a quorum that lose what they granted, so that the question is when they may vote again. Sections last for
# several ttls, which are short: so leases live through faults. A fault strikes one server, a majority, or all at once;
# and messages are lost, so that a majority is often the smallest one. By name only.
_GAPS: Final = Weather(lost=0.03, unanswered=0.03, reset=0.5)


def _voters(name: str, rates: dict[str, float], *, weather: Weather = _GAPS, other_max_ttl: float = 0.0) -> Profile:
    return Profile(
        name, weather, rates, max_ttl=1.0, other_max_ttl=other_max_ttl, fault_phase=8.0, idle=2.0, quiet_phase=1.0,
        clients=(2, 3), workers=(1, 1, 2), servers=(3, 3, 3, 5), skew=0.5, usage="outlasting", together=0.6,
        subjects=("lock", "election", "rlock", "once"),
    )  # fmt: skip


_OF_MEMBERS: Final = {
    "restart": 0.05, "restart without keys": 0.1, "restart with old keys": 0.1, "spare": 0.05, "emptied": 0.1,
    "re-seeded by a member": 0.15, "re-seeded by its replica": 0.1, "address moved": 0.1, "first replica": 0.05,
}  # fmt: skip
VOTERS: Final = {
    profile.name: profile
    for profile in (
        _voters("q re-seeded", {"re-seeded by a member": 0.4, "re-seeded by its replica": 0.4}),
        _voters("q emptied", _PAUSE | {"emptied": 0.5, "spare": 0.2, "restart without keys": 0.2}),
        _voters("q moved", _CRASH | {"address moved": 0.6, "break subscription": 1.5}),
        _voters("q two ttls", _OF_MEMBERS, other_max_ttl=0.5),
        _voters("q voters", _OF_MEMBERS | _CRASH | _PAUSE | _CANCEL, weather=_ROUGH),
    )
}


# Faults against which interlock promises no exclusion: the server loses all keys unnoticed, or its clock is set. The
# rules about TTLs, reports of losses and renewals hold, and those about fences unless both faults strike.
RELAXED: Final = {
    profile.name: profile
    for profile in (
        Profile("flush", weather=_ROUGH, rates=_CANCEL | {"flush all": 0.3}, trusted=False),
        Profile("clock", weather=_ROUGH, rates=_CANCEL | {"clock step": 0.3}, trusted=False),
        _servers("set back", _CANCEL | {"clock step": 0.5, "restart": 0.5, "force": 1.0}, trusted=False),
    )
}


# A later version of interlock uses the same resources, and stores words that this version does not know.
SIDE_BY_SIDE: Final = {
    profile.name: profile
    for profile in (
        Profile("later", weather=_ROUGH, rates=_CANCEL | _PAUSE | _CRASH | _SERVER | {"later version": 20.0}),
        _servers("later failover", _CRASH | {"failover": 0.5, "restart with old keys": 0.2, "later version": 20.0}),
    )
}

# A client that is restored twice from a snapshot. By name only, so that the seeds of the worlds keep their runs.
SNAPSHOTS: Final = {
    profile.name: profile
    for profile in (
        Profile("restored twice", rates={"snapshot": 2.0, "revoke": 0.2}, workers=(1, 1, 2), clients=(1, 2)),
        Profile(
            "restored in chaos", weather=_ROUGH, rates=_CANCEL | _PAUSE | _CRASH | {"snapshot": 2.0}, clients=(1, 2)
        ),
        _servers(
            "restored elsewhere", _CRASH | {"snapshot": 2.0, "failover": 0.3, "planned failover": 0.2, "restart": 0.3}
        ),
        _quorum("q restored", _CANCEL | _NETS | {"snapshot": 2.0, "restart": 0.4}),
    )
}

# Many callers in each process, whose leases pass on. By name only.
CROWDS: Final = {
    f"crowd, {profile.name}": replace(
        profile, name=f"crowd, {profile.name}", usage="short", clients=(1, 2, 3), workers=(3, 4, 5), fault_phase=3.0,
        quiet_phase=1.0, subjects=("lock", "lock", "rlock"),
    )
    for profile in (*PROFILES.values(), SERVERS["empty"], SERVERS["ruin"])
}  # fmt: skip


_OUTAGES: Final = {
    "restart": 0.2, "restart with old keys": 0.2, "restart without keys": 0.2, "failover": 0.2, "planned failover": 0.2,
    "primary isolated": 0.2, "primary paused": 0.1, "first replica": 0.2, "one way": 0.3,
}  # fmt: skip


def _crowd(name: str, weather: Weather, rates: dict[str, float] | None = None, *, foreign: float = 0.0) -> Profile:
    return Profile(
        name, weather, rates or {}, usage="short and long", foreign=foreign, clients=(1, 2, 3), workers=(2, 3, 4),
        fault_phase=5.0, quiet_phase=1.0, subjects=("lock", "lock", "rlock"),
    )  # fmt: skip


# One question each. By name only.
BY_NAME: Final = {
    profile.name: profile
    for profile in (
        # Pushes that arrive when the handover is over, while heartbeats go on, and many replies are lost.
        Profile(
            "late pushes",
            weather=Weather(unanswered=0.3, lost=0.05, push_late=0.7, reset=0.3),
            rates=_PAUSE | {"one way": 0.5},
        ),
        # Young processes that seldom wait, and so are not subscribed; people who revoke their leases.
        Profile(
            "revoked",
            rates={"revoke": 3.0, "force": 1.0, "crash": 0.6, "break subscription": 0.3},
            clients=(2,),
            workers=(1, 1, 2),
        ),
        # Behind one address a server that has run for long takes the place of one that died.
        _servers("spare", _CANCEL | _CRASH | {"spare": 0.5}),
        # A machine stands still for long. That strikes only a client that is idle even longer.
        replace(_servers("paused", {"primary paused": 0.5}), idle=5.0),
        # Servers that fail over again and again, and people who end the quarantines.
        _servers("ended by hand", {"force": 6.0, "failover": 1.5, "restart with old keys": 0.5}, weather=_ROUGH),
        # Short sections pass a lease on while its renewal is due or under way; long ones live by renewals.
        _crowd("short and long", Weather(slow=0.1), {"pause": 1.0}),
        # A link as slow as the ttl allows: most of the time a request of each lease is under way.
        _crowd("slow link", Weather(trip=0.12), _CANCEL | {"revoke": 0.5}),
        # The same while servers change, and while any message may be lost.
        replace(
            _servers("short and long restarts", _CRASH | _OUTAGES, weather=Weather(slow=0.1)),
            usage="short and long",
            workers=(2, 3),
            fault_phase=5.0,
            subjects=("lock", "lock", "rlock"),
        ),
        replace(
            _servers("slow link restarts", _CANCEL | _OUTAGES, weather=Weather(trip=0.1)),
            usage="short and long",
            workers=(1, 2),
            fault_phase=5.0,
            subjects=("lock", "rwlock", "semaphore", "lock"),
        ),
        _crowd(
            "short and long in chaos", _ROUGH, _CANCEL | _PAUSE | _CRASH | _SERVER | {"revoke": 1.0, "cut off": 0.3}
        ),
        # Releases for whose replies nobody waits, at a server that forgets them. A `with` leaves so only where no
        # server fails over.
        _servers(
            "left behind",
            _CANCEL
            | _PAUSE
            | {"restart with old keys": 0.3, "restart without keys": 0.2, "restart": 0.2, "one way": 0.5},
            weather=Weather(slow=0.2),
        ),
        # Code beside the sections: on_lost, finalizers and second threads take the same lock, or use the same lease.
        Profile(
            "foreign code",
            weather=Weather(slow=0.1, unanswered=0.03, reset=0.9),
            rates=_CANCEL | _SERVER | {"revoke": 1.5, "pause": 0.5},
            foreign=0.4,
            subjects=("lock", "rlock", "rwlock", "semaphore"),
        ),
        _crowd("foreign code in a crowd", Weather(slow=0.1), _CANCEL | {"revoke": 1.0}, foreign=0.4),
        # Pushes of revocations overtake the replies that grant.
        Profile("revoked early", weather=Weather(slow=0.3), rates={"revoke": 4.0}, workers=(1, 2)),
        # Revocations of which the client hears late or never, since messages and servers fail.
        Profile(
            "revoked unheard",
            weather=replace(_ROUGH, push_lost=0.8, slow=0.2),
            rates=_CRASH | _MEMORY | {"revoke": 4.0, "break subscription": 1.0, "cut off": 0.3, "close": 0.3},
            workers=(1, 2),
        ),
        # Revocations while the client is not subscribed, of leases whose renewals come too late to notice.
        Profile(
            "revoked in silence",
            rates={"revoke": 3.0, "break subscription": 2.0},
            usage="long",
            fault_phase=12.0,
            workers=(1, 2),
            subjects=("lock", "semaphore", "rwlock"),
        ),
        _servers("revoked on lost servers", _OUTAGES | {"revoke": 6.0}, weather=replace(_ROUGH, push_lost=0.8)),
        # Sections and waits that outlast leases and quarantines; writers that go on as readers after a restart.
        Profile("outlasting", rates=_PAUSE | {"cut off": 0.3}, usage="outlasting", fault_phase=12.0),
        replace(
            _servers("outlasting restarts", {"restart with old keys": 0.4, "restart": 0.3, "failover": 0.3}),
            usage="outlasting",
            fault_phase=8.0,
            subjects=("rwlock", "lock", "semaphore", "rwlock"),
        ),
    )
}


# one: one server that stays. servers: one address behind which servers change. quorum: several independent servers.
WORLDS: Final = {"one": PROFILES, "servers": SERVERS, "quorum": QUORUMS}
ALL: Final = {
    name: profile
    for profiles in (*WORLDS.values(), VOTERS, RELAXED, SIDE_BY_SIDE, SNAPSHOTS, CROWDS, BY_NAME)
    for name, profile in profiles.items()
}


EVERY: Final = "all"  # instead of a world: all profiles in turn, also those that no seed chooses in a world


def profile_of(seed: int, world: str = "one") -> Profile:
    """Return the profile that the seed chooses in this world."""
    profiles = ALL if world == EVERY else WORLDS[world]
    return list(profiles.values())[seed % len(profiles)]
