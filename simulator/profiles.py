"""Which faults strike, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from .network import LATEST, NO_FAULTS, Weather
from .outages import ISOLATION_GRACE, KINDS, MAX_PAUSE, OUTAGE_TIME
from .sim_server import IO_TIMEOUT


@dataclass(frozen=True)
class Profile:
    """What may go wrong; the rates are per second, of all clients together (see faults.py)."""

    name: str
    weather: Weather = NO_FAULTS
    rates: dict[str, float] = field(default_factory=dict[str, float])
    trusted: bool = True  # the server loses no data, or says that it may have; and its clock is not set
    max_ttl: float = 60.0  # seconds that the longest lease lasts, and so a quarantine
    servers: tuple[int, ...] = (1,)  # how many, that know nothing of each other
    skew: float = 0.0  # seconds by which each of their clocks is off
    fault_phase: float = 8.0  # seconds with faults
    idle: float = 0.3  # seconds between two sections while the fault phase still has consequences
    quiet_phase: float = 3.0  # seconds for which workers go on without faults
    clients: tuple[int, ...] = (2, 3, 3, 4)  # how many clients
    workers: tuple[int, ...] = (1, 2, 2, 3)  # how many each of them has

    @property
    def changes_primary(self) -> bool:
        """Whether one process after the other serves."""
        return not self.rates.keys().isdisjoint(KINDS)

    @property
    def promotes(self) -> bool:
        """Whether replicas take over."""
        return not self.rates.keys().isdisjoint({"failover", "isolated", "paused", "handover"})

    @property
    def isolation_grace(self) -> float:
        """Seconds that clients believe an isolated primary to go on for."""
        return ISOLATION_GRACE if not self.rates.keys().isdisjoint({"isolated", "paused"}) else 0.0

    @property
    def clean(self) -> bool:
        """Whether whatever ended must be gone within a second."""
        return (
            self.weather.clean
            and self.trusted
            and not self.changes_primary
            and self.rates.keys().isdisjoint({"cut off", "one way"})
            and len(self.servers) == 1  # one of several that is away learns of a release when it is back
        )

    @property
    def aftermath(self) -> float:
        """Seconds for which the fault phase has consequences when it is over."""
        silent = not self.clean or "deafen" in self.rates
        late, changes = LATEST if self.weather.late else 0.0, OUTAGE_TIME if self.changes_primary else 0.0
        changes += MAX_PAUSE + ISOLATION_GRACE if "paused" in self.rates else 0.0
        return late + changes + (IO_TIMEOUT if silent else 0.0)


_ROUGH: Final = Weather(
    slow=0.03, late=0.01, lost=0.02, unanswered=0.02, doubled=0.03, refused=0.01, replica=0.003, reset=0.5,
    push_lost=0.1, push_doubled=0.1,
)  # fmt: skip
_CANCEL: Final = {"cancel": 2.0, "scheduled cancel": 3.0}
_PAUSE: Final = {"pause": 0.4, "scheduled pause": 0.6}
_CRASH: Final = {"crash": 0.15, "scheduled crash": 0.3, "close": 0.05, "scheduled close": 0.2}
_SERVER: Final = {"script flush": 0.3, "deafen": 0.3, "revoke": 0.2, "force": 0.1}
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


_SHORT_TTL: Final = 2.0  # seconds that the longest lease lasts, and a quarantine


# Servers that restart and fail over. A quarantine lasts as long as the longest ttl, so that is short here, as all is.
def _servers(name: str, rates: dict[str, float], *, weather: Weather = NO_FAULTS, trusted: bool = True) -> Profile:
    return Profile(
        name, weather, rates, trusted=trusted, max_ttl=_SHORT_TTL, fault_phase=4.0, idle=2.0, quiet_phase=1.0,
        clients=(2, 2, 3), workers=(1, 1, 2),
    )  # fmt: skip


SERVERS: Final = {
    profile.name: profile
    for profile in (
        _servers("durable", _CANCEL | _CRASH | {"restart": 0.5, "first replica": 0.2}),
        _servers("snapshot", _CANCEL | _CRASH | {"restart late": 0.5}),
        _servers("empty", _CANCEL | _CRASH | {"restart empty": 0.5, "crash": 0.4}),
        _servers("failover", _CRASH | {"failover": 0.5, "handover": 0.3, "first replica": 0.1}),
        _servers("isolated", _CANCEL | {"isolated": 0.5}),
        _servers("one way", _CANCEL | {"one way": 1.0, "failover": 0.3, "restart late": 0.2}),
        _servers(
            "ruin", _CANCEL | _PAUSE | _CRASH | _SERVER
            | {"restart": 0.3, "failover": 0.3, "handover": 0.3, "isolated": 0.3, "first replica": 0.1, "one way": 0.2},
            weather=_ROUGH,
        ),
    )
}  # fmt: skip


# Several servers that know nothing of each other. Their clocks may differ by 5 times the longest ttl as long as they
# keep their records; where one may forget them, by less than the wait before it votes again.
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
        _quorum("q empty", _CANCEL | _CRASH | {"restart empty": 0.7}, keeps_records=False),
        _quorum("q late", _NETS | _CANCEL | {"restart late": 0.7}, keeps_records=False),
        _quorum("q ruin", _CANCEL | _PAUSE | _CRASH | _SERVER | _NETS | {"restart": 0.7}, weather=_ROUGH),
        _quorum(
            "q forgetting", _CANCEL | _PAUSE | _CRASH | _NETS | {"restart empty": 0.4, "restart late": 0.4},
            weather=_ROUGH, keeps_records=False,
        ),
    )
}  # fmt: skip
# Faults outside the promise. Fences (unless both strike), TTLs, telling and renewal hold; exclusion may not.
RELAXED: Final = {
    profile.name: profile
    for profile in (
        Profile("flush", weather=_ROUGH, rates=_CANCEL | {"flush all": 0.3}, trusted=False),
        Profile("clock", weather=_ROUGH, rates=_CANCEL | {"clock step": 0.3}, trusted=False),
        _servers("set back", _CANCEL | {"clock step": 0.5, "restart": 0.5, "force": 1.0}, trusted=False),
    )
}


# Another version is at work on the same names, and stores more than this one knows.
SIDE_BY_SIDE: Final = {
    profile.name: profile
    for profile in (
        Profile("later", weather=_ROUGH, rates=_CANCEL | _PAUSE | _CRASH | _SERVER | {"later version": 20.0}),
        _servers("later failover", _CRASH | {"failover": 0.5, "restart late": 0.2, "later version": 20.0}),
    )
}

# A client that is restored twice from a snapshot. By name only, so that no seed of the worlds means another run.
SNAPSHOTS: Final = {
    profile.name: profile
    for profile in (
        Profile("restored twice", rates={"snapshot": 2.0, "revoke": 0.2}, workers=(1, 1, 2), clients=(1, 2)),
        Profile(
            "restored in chaos", weather=_ROUGH, rates=_CANCEL | _PAUSE | _CRASH | {"snapshot": 2.0}, clients=(1, 2)
        ),
        _servers("restored elsewhere", _CRASH | {"snapshot": 2.0, "failover": 0.3, "handover": 0.2, "restart": 0.3}),
        _quorum("q restored", _CANCEL | _NETS | {"snapshot": 2.0, "restart": 0.4}),
    )
}


# For one question each: seeds do not choose these by themselves.
BY_NAME: Final = {
    profile.name: profile
    for profile in (
        # Young processes that hold and seldom wait, and so are not subscribed; people who revoke what they hold.
        Profile(
            "revoked", rates={"revoke": 3.0, "force": 1.0, "crash": 0.6, "deafen": 0.3}, clients=(2,), workers=(1, 1, 2)
        ),
        # A machine stands still for so long that whoever is to be struck by that must be idle for long.
        replace(_servers("paused", {"paused": 0.5}), idle=5.0),
        # Servers that fail over again and again, and people who end their quarantines.
        _servers("ended by hand", {"force": 6.0, "failover": 1.5, "restart late": 0.5}, weather=_ROUGH),
    )
}


# What there is: one server that stays; one place where servers change; several that know nothing of each other.
WORLDS: Final = {"one": PROFILES, "servers": SERVERS, "quorum": QUORUMS}
ALL: Final = {
    name: profile
    for profiles in (*WORLDS.values(), RELAXED, SIDE_BY_SIDE, SNAPSHOTS, BY_NAME)
    for name, profile in profiles.items()
}


def profile_of(seed: int, world: str = "one") -> Profile:
    """The profile that a seed chooses by itself."""
    profiles = WORLDS[world]
    return list(profiles.values())[seed % len(profiles)]
