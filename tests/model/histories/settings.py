"""What one history is made of. Every choice comes from its seed; real processes and servers add their own timing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, Final

TOPOLOGIES: Final = ("single", "sentinel", "cluster", "quorum")
MODES: Final = ("threads", "asyncio")
KINDS: Final = ("lock", "rlock", "owner", "rwlock", "semaphore", "multi", "election", "once")
IN_QUORUM: Final = ("lock", "rlock", "owner", "multi", "election", "once")
STYLES: Final = ("with", "entered", "released", "handed", "dropped", "crossed")
MEMBERS: Final = {"a": "lock", "b": "lock", "c": "lock", "pool": "semaphore", "books": "rwlock"}  # of a multi
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
    max_ttl: float = 3.0
    server: str = "valkey-9.1"
    tls: bool | None = None  # None: the seed decides
    pace: float = 0.7  # mean seconds between two faults
    plant: str = ""  # see plants.py

    def random(self, *about: object) -> Random:
        """Numbers for one purpose; they depend on the seed and the purpose only."""
        return Random("/".join(map(str, (self.seed, self.topology, *about))))

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
        return found

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
    depth: int  # of an rlock
    names: tuple[str, ...]
    permits: int
    side: str  # of an rwlock: read, write, downgrade
    owner: str
    cancel: float | None  # seconds after which its task is cancelled
    deaf: bool  # does not look at what ensure() says until it hears of a loss
    ignores: bool  # leaves as if nothing had happened after a loss
    turns: bool  # its body makes its own error of a CancelledError
    fails: bool  # its body raises
    own_task: bool  # is a task of its own, not a part of a task that lives as long as the process
    pause: float  # before the next one


def draw(random: Random, settings: Settings, mode: str) -> Turn:
    """The next section of a worker."""
    kind = random.choice(settings.used_kinds)
    weights = {"with": 4, "entered": 3, "released": 3, "handed": 1, "dropped": 0.15, "crossed": 0.15}
    style = random.choices(settings.styles, [weights[style] for style in settings.styles])[0]
    if kind == "once" or (style == "crossed" and kind not in {"lock", "election", "multi"}):
        style = "with"  # which permit, or whose hold, would be meant in another thread or task nobody can tell
    names = {
        "lock": ("a", "b")[random.random() < 0.3], "rlock": ("a", "b")[random.random() < 0.3], "owner": "mine",
        "rwlock": "books", "semaphore": "pool", "election": "chief", "once": "job", "multi": "",
    }[kind]  # fmt: skip
    members = [name for name, what in MEMBERS.items() if what == "lock" or settings.topology != "quorum"]
    chosen = tuple(random.sample(members, random.choice((2, 2, 3)))) if kind == "multi" else (names,)
    ttl = min(settings.max_ttl, random.choice((0.6, 1.0, 1.0, 2.0)))
    timeout = random.choice((None, None, 0.0, random.uniform(0.05, 0.5), random.uniform(0.5, 3.0)))
    seconds = random.choice((random.expovariate(1 / 0.01), random.expovariate(1 / 0.1), random.uniform(0.0, 0.6)))
    long_running = random.random() < 0.08  # longer than ttl, so that a loss meets a body
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
        depth=random.choice((1, 2, 2, 3)) if kind in {"rlock", "owner"} else 1,
        names=chosen,
        permits=random.choice((1, 1, 2)),
        side=random.choice(("read", "read", "write", "downgrade")),
        owner=random.choice(("ann", "bob")),
        cancel=random.choice((0.0, random.uniform(0, 0.05), random.uniform(0, 1.0))) if cancels else None,
        deaf=random.random() < 0.2,
        ignores=random.random() < 0.3,
        turns=mode == "asyncio" and random.random() < 0.1,
        fails=random.random() < 0.05,
        own_task=cancels or random.random() < 0.5,
        pause=random.expovariate(1 / 0.03),
    )
