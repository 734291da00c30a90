"""The option `retry_for` of an Interlock: for how long a call goes on while the server is away (ADR 57)."""

from __future__ import annotations

from typing import Final, TypeAlias

from interlock._protocol.names import duration
from interlock._protocol.unset import Unset
from interlock.errors import ConfigError

RetryFor: TypeAlias = float | Unset | None  # seconds; None: no bound but the timeout of the call
# A call with a timeout goes on until its end, and any other call for as long as the server's address says.
BY_TIMEOUT: Final = Unset("the timeout of the call, or 5 s without one")
MIN_RETRY_FOR: Final = 0.01  # seconds: less than a round trip is no try


def checked_retry_for(value: object) -> float | None:
    """The value of the option, if it was given. Raises ConfigError, whose text says what is valid."""
    if value is None:
        return None
    try:
        return duration(value, "retry_for", minimum=MIN_RETRY_FOR)
    except ConfigError as error:
        raise ConfigError(f"{error}. For no bound: None, or in a URL retry_for=none") from None


def retry_for_in_url(text: str) -> float | None:
    """The value of the option as a URL says it. Raises ConfigError."""
    if text.lower() == "none":
        return None
    try:
        seconds: object = float(text)
    except ValueError:
        seconds = text
    return checked_retry_for(seconds)
