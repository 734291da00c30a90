"""How a worker acquires, holds and releases a resource. The worker draws a use first, so no event changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random


class Resource(Protocol):
    """What a use must know of its resource: see `ResourceModel`."""

    name: str
    max_ttl: float
    usage: str


class Usage(NamedTuple):
    """One use of a resource: the arguments of the acquire, and how long and how the worker holds the lease."""

    resource: Resource
    ttl: float
    timeout: float | None
    renews: bool
    max_hold: float | None
    drops: bool
    hold_time: float  # seconds
    exits: bool  # whether `with` releases the lease; else release()

    def describe(self, call: str, *more: str) -> str:
        """Describe the use like source code. The subject gives the name of the call, and further arguments."""
        timeout = "None" if self.timeout is None else f"{self.timeout:.3g}"
        renew = "" if self.renews else ", renew=False"
        hold = f", max_hold={self.max_hold:.3g}" if self.max_hold is not None else ""
        end = "drop the lease" if self.drops else "exit" if self.exits else "release"
        arguments = ", ".join((repr(self.resource.name), *more, f"ttl={self.ttl:g}", f"timeout={timeout}{renew}{hold}"))
        return f"{call}({arguments}) for {self.hold_time:.3g} s, then {end}"


def draw_usage(random: Random, resources: Sequence[Resource]) -> Usage:
    """Draw one use of one of these resources."""
    return _DRAW[resources[0].usage](random, resources)


def _draw_any_usage(random: Random, resources: Sequence[Resource]) -> Usage:
    ttl = min(random.choice((0.25, 0.5, 1.0, 2.0, 2.0, 5.0, 5.0)), *(resource.max_ttl for resource in resources))
    return Usage(
        resource=random.choice(resources),
        ttl=ttl,
        timeout=random.choice((None, None, 0, random.uniform(0.01, 0.3), random.uniform(0.1, 3.0))),
        renews=random.random() < 0.7,
        max_hold=random.uniform(0.1, 3.0) if random.random() < 0.15 else None,
        drops=random.random() < 0.04,
        hold_time=random.expovariate(1 / 0.15) if random.random() < 0.85 else ttl * 1.5,
        exits=random.random() < 0.7,
    )


def _draw_short_usage(random: Random, resources: Sequence[Resource]) -> Usage:
    """Draw a use as in a crowd: nearly all with the options that let a lease pass on, and for short sections."""
    return Usage(
        resource=resources[0] if random.random() < 0.9 else random.choice(resources),
        ttl=random.choice((1.0, 2.0, 2.0, 2.0, 2.0, 2.0)),
        timeout=random.choice((None, None, None, 0, random.uniform(0.001, 0.1), random.uniform(0.1, 1.0))),
        renews=random.random() < 0.95,
        max_hold=random.uniform(0.1, 3.0) if random.random() < 0.03 else None,
        drops=random.random() < 0.02,
        hold_time=random.expovariate(1 / 0.004) if random.random() < 0.98 else random.uniform(0.5, 3.0),
        exits=random.random() < 0.7,
    )


def _draw_short_or_long_usage(random: Random, resources: Sequence[Resource]) -> Usage:
    """Draw a use as in a crowd, of the same small ttl as nearly all others; some outlast several renewals."""
    long = random.random() < 0.15
    return Usage(
        resource=resources[0] if random.random() < 0.9 else random.choice(resources),
        ttl=random.choice((1.0, 1.0, 1.0, 1.0, 1.0, 0.5)),
        timeout=random.choice((None, None, None, None, random.uniform(0.01, 0.3), random.uniform(0.3, 2.0))),
        renews=random.random() < 0.97,
        max_hold=None,
        drops=random.random() < 0.02,
        hold_time=random.uniform(0.2, 2.0) if long else random.expovariate(1 / 0.004),
        exits=random.random() < 0.7,
    )


def _draw_outlasting_usage(random: Random, resources: Sequence[Resource]) -> Usage:
    """Draw a use that may outlast its ttl, or the quarantine of a restarted server."""
    ttl = random.choice((0.5, 1.0, 2.0, 2.0))
    return Usage(
        resource=random.choice(resources),
        ttl=ttl,
        timeout=random.choice((None, None, None, 0, random.uniform(0.5, 6.0))),
        renews=random.random() < 0.8,
        max_hold=random.uniform(0.5, 5.0) if random.random() < 0.15 else None,
        drops=random.random() < 0.04,
        hold_time=ttl * random.uniform(0.1, 1.0) if random.random() < 0.4 else random.uniform(1.0, 6.0),
        exits=random.random() < 0.7,
    )


def _draw_long_usage(random: Random, resources: Sequence[Resource]) -> Usage:
    """Draw a use of a long ttl, whose renewals alone would tell too late what happens to the lease."""
    return Usage(
        resource=random.choice(resources),
        ttl=5.0,
        timeout=random.choice((0, random.uniform(0.1, 1.0))),
        renews=random.random() < 0.8,
        max_hold=None,
        drops=False,
        hold_time=random.uniform(0.5, 8.0),
        exits=random.random() < 0.7,
    )


_DRAW: Final = {
    "long": _draw_long_usage,
    "any": _draw_any_usage,
    "short": _draw_short_usage,
    "short and long": _draw_short_or_long_usage,
    "outlasting": _draw_outlasting_usage,
}
