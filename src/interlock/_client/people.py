"""Where people are plugged in: what the client calls for them, and never asks. `_people` stands behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from interlock._client.grant import Attempt
    from interlock.errors import AcquireTimeout


class SayMore(Protocol):
    """Adds to the error of a caller whose time is over what is known of the holder by the time `until`.

    Raises nothing of its own.
    """

    async def __call__(self, attempt: Attempt, error: AcquireTimeout, until: float) -> None: ...
