"""How something is acquired and held: the options that users give, checked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeVar

from interlock._client.error_texts import about
from interlock._protocol.names import duration
from interlock._protocol.unset import Unset
from interlock.errors import ConfigError

if TYPE_CHECKING:
    from interlock._protocol.resource import Resource

    from .lease import WatchedCore

LeaseT = TypeVar("LeaseT", bound="WatchedCore")
UNSET: Final = Unset("the lock's own timeout")


def timeout_of(timeout: object, resource: Resource | None = None) -> float | None:
    """Seconds to wait: None is for ever, 0 not at all. Raises ConfigError, about the `resource` that is waited for."""
    if timeout is None:
        return None
    try:
        checked = duration(timeout, "timeout")
    except ConfigError as error:
        text = str(error) if resource is None else f"{resource}: {error}"
        if isinstance(timeout, bool):
            text += ". To try without waiting: try_acquire(), or 0 seconds; to wait for ever: None"
        elif isinstance(timeout, int | float) and timeout < 0:
            text += ". To wait for ever: None"
        raise about(resource, ConfigError(text)) from None
    return None if checked == math.inf else checked
