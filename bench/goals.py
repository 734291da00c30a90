"""The goals, row by row: the table of docs/internals/DESIGN.md, section 5, as ratios that a run can judge.

A contender's name stands here once; the rows import it. `of` is the contender whose number is divided; "" is the row's
own (interlock with the row's options).
"""

from __future__ import annotations

from dataclasses import dataclass

FLOOR, FLOOR_BEFORE = "floor", "floor, before"
OURS, FAIR, UNCONFIRMED = "interlock", "interlock, fair=True", "interlock, confirm=False"
REDIS_PY, EAGER, BLPOP, POTTERY = "redis-py Lock", "redis-py Lock, sleep=0.001", "python-redis-lock", "pottery Redlock"
REDIS_ASYNCIO, EAGER_ASYNCIO = "redis.asyncio Lock", "redis.asyncio Lock, sleep=0.001"
FIFO, AIOREDLOCK = "redis-fifo-lock", "aioredlock"
STEADY = "the fastest peer that starves nobody"
BEFORE, SMALLEST = "before", "the smallest script"
BARE = "a bare round trip"
FEW, ONE_SERVER = "10 of them", "one server"
THREE = "quorum of 3"
UNREGISTERED = "registry=False"


@dataclass(frozen=True)
class Goal:
    """What is wanted of ours / other."""

    against: str
    least: float | None = None
    most: float | None = None
    of: str = ""

    def met(self, ratio: float) -> bool:
        return (self.least is None or ratio >= self.least) and (self.most is None or ratio <= self.most)

    def __str__(self) -> str:
        return f"≥ {self.least:g} ×" if self.least is not None else f"≤ {self.most:g} ×"

    @property
    def text(self) -> str:
        """The goal with its contenders, for the list of rows."""
        return f"{self.of + ' ' if self.of else ''}{self} {self.against}"


GOALS: dict[str, tuple[Goal, ...]] = {
    "uncontended": (
        Goal(FLOOR, least=0.85, of=OURS),
        Goal(REDIS_PY, least=1.5, of=OURS),
        Goal(REDIS_PY, least=1.75, of=UNCONFIRMED),
    ),
    "tasks": (Goal(REDIS_ASYNCIO, least=5, of=OURS), Goal(REDIS_ASYNCIO, least=6, of=UNCONFIRMED)),
    "contended": (Goal(STEADY, least=8),),
    "fair": (Goal(STEADY, least=1.3),),
    "handover": (Goal(FLOOR, most=1.4), Goal(BLPOP, most=0.9)),
    "slow-link": (Goal(BARE, most=2.1, of=OURS), Goal(BARE, most=1.1, of=UNCONFIRMED)),
    "client-cpu": (Goal(REDIS_PY, most=0.38, of=OURS),),
    "import": (Goal("import redis", most=1.1),),
    "server-time": (Goal(BEFORE, most=0.5),),
    "server-handover": (Goal(BEFORE, most=0.6),),
    "waiters": (Goal(FEW, most=1.5),),
    "crowds": (Goal(FEW, most=1.5),),
    "holders": (Goal(FEW, most=1.5),),
    "arrivals": (Goal(FEW, most=1.5),),
    "cluster": (Goal(ONE_SERVER, least=0.83),),
    "registry": (Goal(UNREGISTERED, least=0.98, of=OURS),),
    "quorum": (Goal(ONE_SERVER, least=0.62), Goal(POTTERY, least=3)),
}
