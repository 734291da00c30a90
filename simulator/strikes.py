"""Strikes: the faults from outside, drawn before a run begins, each with the numbers that choose its victim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from .chance import STRIKE

if TYPE_CHECKING:
    from .chance import Chance
    from .profiles import Profile

TRAP_POINTS: Final = ("before_send", "park", "park", "wake", "wake", "handover", "handover")


class Strike(NamedTuple):
    """One later fault."""

    number: int
    when: float
    kind: str
    point: str
    skips: int  # how many such points its victim passes before
    coin: bool  # one of two ways to strike; for a scheduled fault, whether only awaits of messages count
    client: float  # chooses the client: 0 to 1
    victim: float
    resource: float
    seconds: float
    spare: float
    breadth: float  # chooses how many servers of a quorum it strikes at once

    @property
    def name(self) -> str:
        """The name of the strike in a plan."""
        return f"{self.kind}: strike {self.number}"


def strikes(chance: Chance, profile: Profile, until: float) -> list[Strike]:
    """Draw all strikes of a run."""
    found: list[Strike] = []
    total = sum(profile.rates.values())
    when, random = 0.0, chance.stream(STRIKE)
    while total and (when := when + random.expovariate(total)) < until:
        numbers = chance.stream(STRIKE, len(found))
        found.append(
            Strike(
                number=len(found),
                when=when,
                kind=numbers.choices(list(profile.rates), list(profile.rates.values()))[0],
                point=numbers.choice(TRAP_POINTS),
                skips=numbers.choice((0, 0, 0, 1, 2, 3, 5, 8)),
                coin=numbers.random() < 0.6,
                client=numbers.random(),
                victim=numbers.random(),
                resource=numbers.random(),
                seconds=min(until - when, numbers.choice((numbers.expovariate(1 / 0.3), numbers.uniform(0.5, 8.0)))),
                spare=numbers.random(),
                breadth=numbers.random(),
            )
        )
    return found
