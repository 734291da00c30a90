"""Which faults strike, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from .network import CALM, LATEST, Weather
from .port import IO_TIMEOUT


@dataclass(frozen=True)
class Profile:
    """What may go wrong; the rates are per second, of all clients together (see faults.py)."""

    name: str
    weather: Weather = CALM
    rates: dict[str, float] = field(default_factory=dict[str, float])
    trusted: bool = True  # the server loses no data, and its clock is not set

    @property
    def clean(self) -> bool:
        """Whether whatever ended must be gone within a second."""
        return self.weather.clean and self.trusted and "cut off" not in self.rates

    @property
    def aftermath(self) -> float:
        """Seconds for which the storm has consequences when it is over."""
        silent = not self.clean or "deafen" in self.rates
        return (LATEST if self.weather.late else 0.0) + (IO_TIMEOUT if silent else 0.0)


_ROUGH: Final = Weather(
    slow=0.03, late=0.01, lost=0.02, unanswered=0.02, doubled=0.03, refused=0.01, replica=0.003, reset=0.5,
    push_lost=0.1, push_doubled=0.1,
)  # fmt: skip
_CANCEL: Final = {"cancel": 2.0, "ambush cancel": 3.0}
_PAUSE: Final = {"pause": 0.4, "ambush pause": 0.6}
_CRASH: Final = {"crash": 0.15, "ambush crash": 0.3, "close": 0.05, "ambush close": 0.2}
_SERVER: Final = {"script flush": 0.3, "deafen": 0.3, "revoke": 0.2, "force": 0.1}
_MEMORY: Final = {"out of memory": 0.3}

PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile("calm"),
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
# Faults outside the promise. Fences (unless both strike), TTLs, telling and renewal hold; exclusion may not.
RELAXED: Final = {
    profile.name: profile
    for profile in (
        Profile("flush", weather=_ROUGH, rates=_CANCEL | {"flush all": 0.3}, trusted=False),
        Profile("clock", weather=_ROUGH, rates=_CANCEL | {"clock step": 0.3}, trusted=False),
    )
}


def natural(seed: int) -> Profile:
    """The profile that a seed chooses by itself."""
    return list(PROFILES.values())[seed % len(PROFILES)]
