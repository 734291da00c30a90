"""What one history is made of. Every choice comes from its seed; real processes and servers add their own timing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

TOPOLOGIES: Final = ("single", "sentinel", "cluster", "quorum")
MODES: Final = ("threads", "asyncio")
KINDS: Final = ("lock", "rlock", "owner", "rwlock", "semaphore", "multi", "election", "once")
IN_QUORUM: Final = ("lock", "rlock", "owner", "multi", "election", "once")
STYLES: Final = ("with", "entered", "released", "handed", "dropped", "crossed")
PHASES: Final = ("lost-grant", "stopped-holder", "late-reply", "slow-renewals")  # see phases.py
LINED_PHASES: Final = ("late-reply", "slow-renewals")  # they need proxies between the workers and the servers
# Seconds: the longest ttl, one of which a history has. Where a failover takes seconds, a lease that is lost by it must
# last longer, if the history has the phase for that.
MAX_TTLS: Final = {"single": (1.0, 1.5, 2.0), "sentinel": (1.5, 2.0), "cluster": (1.5, 2.0), "quorum": (1.0, 1.5, 2.0)}
OUTLASTS_FAILOVER: Final = {"sentinel": 9.0, "cluster": 7.0}
MIXED: Final = 0.25  # of the histories have processes of an older version
UNEQUAL: Final = 0.25  # of the histories of quorums have two longest ttls
UNDISTURBED: Final = 0.5  # of them have no phases, so that more faults come about
SHORTER: Final = 0.75  # seconds: the other one at least, so that the phases have ttls below it
MEMBERS: Final = {"a": "lock", "b": "lock", "c": "lock", "pool": "semaphore", "books": "rwlock"}  # of a multi
SCENE: Final = "scene"  # the lock of the phases: if workers used it at random, a waiter that is cut off would hide much
KEPT: Final = "kept"  # the lock of the keepers, which random sections try, too
TRIES_KEPT: Final = 0.15  # of the random sections, where there are keepers
LIMIT: Final = 3  # of the semaphore
ALL: Final = 1_000_000_000  # the weight of a writer


@dataclass(frozen=True)
class Settings:
    """One history."""

    topology: str = "single"
    seed: int = 1
    seconds: float = 15.0  # for which faults strike
    modes: tuple[str, ...] = MODES
    kinds: tuple[str, ...] = KINDS
    styles: tuple[str, ...] = STYLES
    faults: tuple[str, ...] | None = None  # None: all that the topology has
    processes: int = 4
    workers: int = 3  # of each process
    max_ttl: float | None = None  # seconds; None: the seed decides
    shorter: float | None = None  # seconds: that of half of the processes; 0: as the others; None: the seed decides
    phases: tuple[str, ...] | None = None  # None: the seed decides
    server: str = "valkey-9.1"
    tls: bool | None = None  # None: the seed decides
    pace: float = 0.7  # mean seconds between two faults
    older: tuple[str, ...] | None = None  # commits of versions that some processes run; None: the seed decides
    forks: bool = False  # whether worker processes are forked without Python's hooks: see hookless.py
    plant: str = ""  # see plants.py

    def random(self, *about: object) -> Random:
        """Numbers for one purpose; they depend on the seed and the purpose only."""
        return Random("/".join(map(str, (self.seed, self.topology, *about))))

    def settled(self, versions: Sequence[str] = ()) -> Settings:
        """These settings, and in them what the seed decides: phases, the longest ttl, and one of the older versions."""
        random = self.random("settled")
        chosen = random.sample(PHASES, len(PHASES) // 2)
        max_ttl = random.choice(MAX_TTLS[self.topology])
        phases = tuple(chosen) if self.phases is None else self.phases
        if "lost-grant" in phases:
            max_ttl = OUTLASTS_FAILOVER.get(self.topology, max_ttl)
        older, is_mixed = self.older, random.random() < MIXED
        if older is None:
            older = (random.choice(versions),) if is_mixed and versions and not self.plant else ()
        max_ttl, shorter = self.max_ttl or max_ttl, self.shorter
        if shorter is None:
            is_unequal = self.topology == "quorum" and random.random() < UNEQUAL
            shorter = min(max_ttl, max(SHORTER, max_ttl / 2)) if is_unequal else 0.0
        if self.phases is None and self.topology == "quorum":
            phases = () if random.random() < UNDISTURBED else tuple(dict.fromkeys(("lost-grant", *chosen)))
        return self.but(phases=phases, max_ttl=max_ttl, shorter=shorter, older=older)

    def of(self, process: str) -> Settings:
        """The settings of one worker process, which may have another longest ttl than the others."""
        number = int(process.lstrip("p").rstrip("at"))
        return self.but(max_ttl=self.shorter) if self.shorter and number % 4 in {2, 3} else self

    @property
    def has_keepers(self) -> bool:
        """Whether each process has a worker more, which holds one lock for most of the longest ttl.

        Servers of a quorum lose what they have in many ways, and in most of these their clients see nothing. A wrong
        grant after that shows only beside a lease that is as long as the wait of the servers.
        """
        return self.topology == "quorum" and "lock" in self.kinds

    @property
    def needs_lines(self) -> bool:
        """Whether proxies must stand between the workers and the servers."""
        return bool({*(self.phases or ())} & {*LINED_PHASES}) or "silence" in (self.faults or ())

    @property
    def used_kinds(self) -> tuple[str, ...]:
        """The kinds that this topology has."""
        return tuple(kind for kind in self.kinds if self.topology != "quorum" or kind in IN_QUORUM)

    @property
    def names(self) -> dict[str, str]:
        """What is locked in this history: name -> how a new client acquires it."""
        found: dict[str, str] = {}
        for kind in self.used_kinds:
            found |= {
                "lock": {"a": "lock", "b": "lock"}, "rlock": {"a": "lock", "b": "lock"}, "owner": {"mine": "lock"},
                "rwlock": {"books": "rwlock"}, "semaphore": {"pool": "semaphore"},
                "multi": {name: kind for name, kind in MEMBERS.items() if kind == "lock" or self.topology != "quorum"},
                "election": {"chief": "election"},
                "once": {"job": "once"},
            }[kind]  # fmt: skip
        found |= {KEPT: "lock"} if self.has_keepers else {}
        return found | ({SCENE: "lock"} if self.phases and "lock" in self.kinds else {})

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Settings:
        read: dict[str, Any] = json.loads(text)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in read.items()})

    def but(self, **changes: Any) -> Settings:
        return replace(self, **changes)


@dataclass(frozen=True)
class Turn:
    """One section, all of it drawn at once."""

    kind: str
    style: str
    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    fair: bool
    seconds: float  # inside
    extends: bool  # calls extend()
    extends_to: float  # for so many seconds, and at once; 0: for a random time, at some time
    depth: int  # of an rlock
    names: tuple[str, ...]
    permits: int
    side: str  # of an rwlock: read, write, downgrade
    owner: str
    cancel: float | None  # seconds after which its task is cancelled
    deaf: bool  # goes on after ensure() has raised LeaseLost, until it hears of the loss
    ignores: bool  # leaves as if nothing had happened after a loss
    turns: bool  # its body makes its own error of a CancelledError
    fails: bool  # its body raises
    own_task: bool  # is a task of its own, not a part of a task that lives as long as the process
    pause: float  # before the next one
    blind: bool = False  # looks at its lease once, at the beginning
    looks: float = 0.0  # seconds at most between two looks at the lease; 0: as its length says

    def but(self, **changes: Any) -> Turn:
        return replace(self, **changes)


PLAIN: Final = Turn(
    kind="lock", style="released", ttl=1.0, timeout=None, renew=True, max_hold=None, fair=False, seconds=0.002,
    extends=False, extends_to=0.0, depth=1, names=("a",), permits=1, side="read", owner="ann", cancel=None, deaf=False,
    ignores=False, turns=False, fails=False, own_task=False, pause=0.001, looks=0.002,
)  # fmt: skip


@dataclass(frozen=True)
class Order:
    """What a phase wants of a worker process: so many more workers, which play this turn."""

    number: int  # of all orders of the history
    turn: Turn
    workers: int = 1
    seconds: float = 0.0  # for which they play it again and again; 0: once

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Order:
        read: dict[str, Any] = json.loads(text)
        turn = read.pop("turn")
        return cls(turn=Turn(**turn | {"names": tuple(turn["names"])}), **read)


def draw_kept(random: Random, settings: Settings) -> Turn:
    """The next section of a keeper: most of the longest ttl, and mostly without a renewal that could tell of a loss."""
    ttl = settings.max_ttl
    assert ttl is not None, "settled() decides"
    return PLAIN.but(
        names=(KEPT,),
        style=random.choice(("with", "entered", "released")),
        ttl=ttl,
        timeout=random.choice((None, random.uniform(0.5, 3.0))),
        renew=random.random() < 0.3,
        seconds=ttl * random.uniform(0.5, 1.2),
        deaf=random.random() < 0.2,
        pause=random.expovariate(1 / 0.1),
        looks=0.02,
    )


def draw(random: Random, settings: Settings, mode: str) -> Turn:
    """The next section of a worker."""
    assert settings.max_ttl is not None, "settled() decides"
    if settings.has_keepers and random.random() < TRIES_KEPT:
        return PLAIN.but(names=(KEPT,), ttl=min(settings.max_ttl, PLAIN.ttl), timeout=0.0)
    kind = random.choice(settings.used_kinds)
    weights = {"with": 4, "entered": 3, "released": 3, "handed": 1, "dropped": 0.01, "crossed": 0.15}
    style = random.choices(settings.styles, [weights[style] for style in settings.styles])[0]
    if kind == "once" or (style == "crossed" and kind not in {"lock", "election", "multi"}):
        style = "with"  # in another thread or task nobody could tell which permit, or whose hold, ends
    names = {
        "lock": ("a", "b")[random.random() < 0.3], "rlock": ("a", "b")[random.random() < 0.3], "owner": "mine",
        "rwlock": "books", "semaphore": "pool", "election": "chief", "once": "job", "multi": "",
    }[kind]  # fmt: skip
    members = [name for name, what in MEMBERS.items() if what == "lock" or settings.topology != "quorum"]
    chosen = tuple(random.sample(members, random.choice((2, 2, 3)))) if kind == "multi" else (names,)
    ttl = min(settings.max_ttl, random.choice((0.5, 0.6, 1.0, 1.0, 1.0, 1.5)))
    timeout = random.choice((None, None, 0.0, random.uniform(0.05, 0.5), random.uniform(0.5, 3.0)))
    # Nearly all sections are short, so that there are many. A long one, of which there are few, keeps its name for as
    # long as a hundred others take.
    (mean,) = random.choices((0.0015, 0.01, 0.1), (90, 9, 1))
    seconds = min(random.expovariate(1 / mean), 0.6)
    long_running = random.random() < 0.003  # longer than ttl, so that a loss meets a body
    cancels = mode == "asyncio" and random.random() < 0.25
    return Turn(
        kind=kind,
        style=style,
        ttl=ttl,
        timeout=timeout,
        renew=random.random() < 0.85,
        max_hold=random.uniform(0.2, 1.0) if random.random() < 0.1 else None,
        fair=random.random() < 0.2,
        seconds=ttl * 1.5 if long_running else seconds,
        extends=random.random() < 0.15,
        extends_to=0.0,
        depth=random.choice((1, 2, 2, 3)) if kind in {"rlock", "owner"} else 1,
        names=chosen,
        permits=random.choice((1, 1, 2)),
        side=random.choice(("read", "read", "write", "downgrade")),
        owner=random.choice(("ann", "bob")),
        cancel=random.choice((0.0, random.uniform(0, 0.01), random.uniform(0, 0.2))) if cancels else None,
        deaf=random.random() < 0.2,
        ignores=random.random() < 0.3,
        turns=mode == "asyncio" and random.random() < 0.1,
        fails=random.random() < 0.05,
        own_task=cancels or random.random() < 0.5,
        pause=random.expovariate(1 / 0.004),
    )
