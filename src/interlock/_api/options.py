"""How something is acquired and held: the options that users give, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypedDict, TypeVar

from interlock._protocol.names import MIN_TTL, duration
from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._protocol.acks import Acks

    from .lease import WatchedCore

LeaseT = TypeVar("LeaseT", bound="WatchedCore[Any]")
DEFAULT_TTL: Final = 30.0  # seconds


class Unset:
    """The type of `UNSET`: an argument that was not given, where None means something."""

    def __repr__(self) -> str:
        return "the lock's own timeout"


UNSET: Final = Unset()


class OptionsOf(TypedDict, Generic[LeaseT], total=False):
    """How something is acquired and held; Interlock.lock says what each means, and what it is by default."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    fair: bool
    on_lost: Callable[[LeaseT], object] | None
    acks: int | Literal["majority", "all"] | None
    fsync: bool


@dataclass(slots=True)  # not frozen: that takes three times as long to make, for each lock
class AcquireOptions:
    """The options of a lockable, checked."""

    ttl: float
    acks: Acks | None
    timeout: float | None = None
    renew: bool = True
    max_hold: float | None = None
    fair: bool = False
    on_lost: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        timeout_of(self.timeout)
        if self.max_hold is not None:
            duration(self.max_hold, "max_hold", least=MIN_TTL)
        if self.on_lost is not None and not callable(self.on_lost):
            raise ConfigError(f"on_lost must be callable with the lease, not {self.on_lost!r}")


def timeout_of(timeout: object) -> float | None:
    """Seconds to wait: None is for ever, 0 not at all. Raises ConfigError."""
    checked = math.inf if timeout is None else duration(timeout, "timeout")
    return None if checked == math.inf else checked
